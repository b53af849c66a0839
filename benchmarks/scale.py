"""Times predicted for 8 to 512 GPUs from rates measured on one host: ``python -m benchmarks scale [FILE]``.

FILE is what ``--op collective`` wrote (default: benchmarks/results/collective-h200x4.json). Within a host of 8 a device
sends at the rate measured there; between hosts at ``--network`` GB/s a device, which nothing here measures: 50 is a
400 Gb/s port for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from cutjax.parallel.exchange import Sizes
from cutjax.parallel.links import ALL_GATHER, MEMORY, REDUCE_SCATTER

RESULTS = pathlib.Path(__file__).parent / "results" / "collective-h200x4.json"
LATENCY_US = 10.0  # of a transfer within a program: assumed
HOST = 8  # devices that one switch joins
DEVICES = (8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of a device.

    Attributes:
      tflops: of the products of a layer, without transfers.
      link, network: GB/s that it sends to a device of its host, and to one of another.
      latency_us: of one transfer.
    """

    tflops: float
    link: float
    network: float
    latency_us: float

    def sending_us(self, sent: float, devices: int, messages: int = 1, link: float | None = None) -> float:
        """Returns the time in which each of so many devices sends ``sent`` bytes, to all others alike."""
        inside = min(devices, HOST)
        share = (inside - 1) / max(1, devices - 1)
        at = link or self.link
        return messages * self.latency_us + max(sent * share / at, sent * (1 - share) / self.network) / 1e3


def rates(document: Mapping[str, Any], network: float) -> Rates:
    """Returns the rates that a file has: what the largest transfer takes more than the one before, and of the MLP's
    products. What a small transfer takes is the start of a program, and no latency within one."""
    rows = {(row["case"], row["product"]): row for row in document["rows"] if not row.get("failure")}
    links = [row for (case, name), row in rows.items() if "links" in case and "permute" in name]
    sends = sorted((row["figures"]["sent"], row["us"]) for row in links)
    if len(sends) < 2 or ("llama 70b mlp", "alone") not in rows:
        raise ValueError("the file has no links, or not the products of the MLP alone: run --op collective --tag suite")
    (less, start), (sent, us) = sends[-2:]
    m, k, n = 8192, 8192, 28672
    products = 6 * m * k * n / links[0]["figures"]["devices"] / rows["llama 70b mlp", "alone"]["us"] / 1e6
    return Rates(products, (sent - less) / (us - start) / 1e3, network, LATENCY_US)


def mlp_us(rate: Rates, tokens: int, k: int, h: int, devices: int) -> dict[str, float]:
    """Returns the times of a gated MLP divided over devices: its products, and with its transfers by each route.

    Rows are gathered in 16 bits, and parts of sums travel in 32: whole by one collective each, and direct by permutes,
    each beside the products of one device's rows. And were all hidden but the last of the parts of the sum.
    """
    products = 6 * tokens * k * h / devices / rate.tflops / 1e6
    rows = tokens / devices * k * (devices - 1)
    permutes = rate.sending_us(6 * rows, devices, 2 * (devices - 1))
    gather, scatter = (
        rate.sending_us(*x) for x in ((2 * rows, devices, 1, ALL_GATHER), (4 * rows, devices, 1, REDUCE_SCATTER))
    )
    last = permutes * 2 / 3 / max(1, devices - 1)
    # Two of three products are of rows that arrive, and a third of the bytes.
    stages = (2 / 3 * products, permutes / 3), (products / 3, 2 / 3 * permutes)
    return {
        "products": products,
        "whole": products + gather + scatter,
        "direct": sum(us / devices + max(us * (devices - 1) / devices, sent) for us, sent in stages),
        "all hidden": max(products, permutes - last) + last,
    }


def data_us(rate: Rates, parameters: int, tokens: int, devices: int) -> dict[str, float]:
    """Returns the times of a step of data parallelism: products, and the gradients' sum in 32 bits beside the backward
    pass."""
    products = 6 * parameters * tokens / rate.tflops / 1e6
    transfers = 2 * rate.sending_us(4 * parameters * (devices - 1) / devices, devices)
    return {"products": products, "transfers": transfers, "overlapped": max(products, products / 3 + transfers)}


def moe_us(rate: Rates, sizes: Sizes) -> dict[str, float]:
    """Returns the times of what a layer of experts does beside its products, in either form."""
    found = {"products": 6 * sizes.tokens * sizes.k * sizes.d * sizes.h / rate.tflops / 1e6}
    for form, (sent, moved) in sizes.costs().items():
        sending = sum(rate.sending_us(size, sizes.devices, 1, link) for link, size in sent.items())
        found[form] = sending + moved / MEMORY / 1e3
    return found


def lines(rate: Rates) -> list[str]:
    """Returns the tables, in Markdown."""
    found = [
        f"{rate.tflops:.0f} TFLOP/s, {rate.link:.0f} GB/s in a host, {rate.network:.0f} between hosts, "
        f"{rate.latency_us:.0f} us"
    ]

    def table(title: str, columns: Mapping[int, Mapping[str, float]], notes: Mapping[int, str]) -> None:
        names = list(columns[DEVICES[0]])
        found.extend(["", f"| {title}, us | {' | '.join(names)} | |", "|--:" * (len(names) + 1) + "|---|"])
        for devices, row in columns.items():
            found.append(f"| {devices} | {' | '.join(f'{us:.0f}' for us in row.values())} | {notes[devices]} |")

    mlp = {n: mlp_us(rate, 8192 * n // HOST, 8192, 28672, n) for n in DEVICES}
    fastest = {n: min(("whole", "direct"), key=row.__getitem__) for n, row in mlp.items()}
    table("MLP of Llama 70B, 1024 tokens a device", mlp, fastest)
    data = {n: data_us(rate, 3 * 8192 * 28672, 8192, n) for n in DEVICES}
    table(
        "data parallel, 8192 tokens a device",
        data,
        {n: f"{row['products'] / row['overlapped']:.0%}" for n, row in data.items()},
    )
    experts = {n: Sizes(8192, 8, n, 7168, 2048, 7168) for n in DEVICES}
    moe = {n: moe_us(rate, sizes) for n, sizes in experts.items()}
    table("DeepSeek-V3's experts, 8192 tokens a device", moe, {n: sizes.form() for n, sizes in experts.items()})
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--network", type=float, default=50.0, help="GB/s of a device between hosts")
    args = parser.parse_args(argv)
    if not args.file.exists():
        print(f"{args.file} is missing: python -m benchmarks run --op collective --tag suite --out {args.file}")
        return 1
    print("\n".join(lines(rates(json.loads(args.file.read_text()), args.network))))
    return 0
