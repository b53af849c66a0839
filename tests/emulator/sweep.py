"""Random products by random kernels, run on the CPU and compared with numpy bit for bit.

PYTHONPATH=tests:tests/gpu python -m emulator.sweep --arch sm_90a --count 100 --seed 0 [--family sm90]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import launches
import products

from cutjax.kernels import families
from emulator import device
from emulator.storage import Unsupported

SIZES = (16, 37, 64, 72, 100, 136, 200)
LAYOUTS = {"dense": ("nn", "nt", "tn", "tt"), "rows": ("nn", "nt"), "k": ("tn",), "symmetric": ("nt", "tn")}


def drawn(rng: random.Random, arch: str) -> Iterator[tuple[products.Item, Any]]:
    """Random products, and of each family a kernel for each."""
    while True:
        way, kind = rng.choice(list(products.WAYS)), rng.choice(products.KINDS)
        m, n, k = (rng.choice(SIZES) for _ in range(3))
        if kind == "symmetric":
            n, mixed = m, products.WAYS[way][0] != products.WAYS[way][1]
            kind = "dense" if mixed else kind
        epilogue, layout = rng.choice(products.epilogues(way, kind)), rng.choice(LAYOUTS[kind])
        item = products.Item(way, kind, layout, m, n, k, epilogue, arch=arch, seed=rng.randrange(1000))
        for family in families.FAMILIES:
            configs = [] if family.reasons(item.problem) else list(family.configs(item.problem))
            for config in rng.sample(configs, min(6, len(configs))):
                kernel = family.resolve(item.problem, config)
                if not isinstance(kernel, tuple) and not kernel.unlaunchable():
                    yield item, kernel
                    break


def outcome(item: products.Item, kernel: Any, machine: device.Machine) -> str | None:
    """Runs a kernel; returns what is wrong, or None."""
    try:
        with device.emulated():
            call = kernel.call()
        arrays, expected = item.data()
        return launches.wrong(launches.run(item.problem, call, arrays, machine.execute), expected)
    except (device.Fault, Unsupported) as error:
        return str(error)


def main() -> int:
    """The command line; returns 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m emulator.sweep")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="")
    args = parser.parse_args()
    rng, done, failed = random.Random(args.seed), 0, 0
    for item, kernel in drawn(rng, args.arch):
        if args.family not in ("", kernel.family):
            continue
        start, machine = time.time(), device.Machine(done, rng.choice([0, 2, 8]))
        wrong = outcome(item, kernel, machine)
        done, failed = done + 1, failed + bool(wrong)
        print(
            f"{'WRONG' if wrong else 'right'} {time.time() - start:5.1f} s  {kernel.name}  {item}  {machine}",
            flush=True,
        )
        if wrong:
            print(f"  {wrong}", flush=True)
        if done == args.count:
            break
    print(f"{done} kernels, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
