"""Judges the cost model by rows of benchmarks/direct.py, or recorded sweeps: ``python -m benchmarks fit X.jsonl``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import cutjax
from benchmarks import sweep
from benchmarks.cases import Dense
from cutjax.kernels.device import Device, device_of_kind
from cutjax.kernels.sm90.kernel import Kernel, resolve

# Kinds of products, by name: of a line.
KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda line: True,
    "tokens <= 64": lambda line: min(line["m"], line["n"]) <= 64,
    "weight gradients": lambda line: line["layout"] == "tn",
    "over 100 us": lambda line: line["xla_us"] > 100,
    "under 10 us": lambda line: line["xla_us"] < 10,
}
SHARPNESS = 0.02  # in log time: configs predicted closer than this share a pick, so that the loss has a slope


def recorded(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a sweep as benchmarks/results/sweeps has it, where configs are places in a table."""
    content = json.loads(path.read_text())
    device, table = device_of_kind(content["device"], "sm_90a"), content["configs"]
    return [
        {
            **line,
            "case": Dense.of_fields(line).name,
            "device": device.name,
            "sms": device.sms,
            "configs": [{**table[i], "us": us} for i, us in line["times"]],
        }
        for line in content["products"]
    ]


def load(paths: Iterable[pathlib.Path]) -> list[dict[str, Any]]:
    """Returns the lines of products that have times of configs; of a product measured twice on a device, the last."""
    every = itertools.chain(*(recorded(path) if path.suffix == ".json" else sweep.lines(path) for path in paths))
    lines = [line for line in every if line.get("configs")]
    return list({(line["case"], line["device"], line["sms"]): line for line in lines}.values())


@dataclasses.dataclass(frozen=True)
class Rows:
    """Every measured config of every product, one after the other.

    Attributes:
      lines: of the products.
      product: which of them each row is of; rows of a product are neighbours.
      us: measured.
      kernels: resolved, of which a model reads what it needs.
      devices: they ran on.
    """

    lines: list[dict[str, Any]]
    product: np.ndarray
    us: np.ndarray
    kernels: list[Kernel]
    devices: list[Device]

    @property
    def starts(self) -> np.ndarray:
        """The first row of each product."""
        return np.flatnonzero(np.diff(self.product, prepend=-1))


def flatten(lines: Sequence[dict[str, Any]]) -> Rows:
    """Returns the rows of some products; configs that this version does not serve are left out."""
    kept, product, us, kernels, devices = [], [], [], [], []
    fields = {field.name for field in dataclasses.fields(cutjax.Config)}
    for line in lines:
        device = device_of_kind(line["device"], "sm_90a", line["sms"])
        case = Dense.of_fields(line)
        problem = case.problem.on(device)
        found = []
        for row in line["configs"]:
            try:
                kernel = resolve(problem, cutjax.Config(**{name: row[name] for name in fields & row.keys()}))
            except ValueError:
                continue
            if isinstance(kernel, Kernel):
                found.append((kernel, row["us"]))
        if found:
            product += [len(kept)] * len(found)
            kept.append(line)
            kernels += [kernel for kernel, _ in found]
            us += [time for _, time in found]
            devices += [device] * len(found)
    return Rows(kept, np.array(product), np.array(us), kernels, devices)


def present(rows: Rows) -> np.ndarray:
    """Returns the times that the shipped cost model predicts."""
    return np.array([kernel.time_us(device) for kernel, device in zip(rows.kernels, rows.devices, strict=True)])


@dataclasses.dataclass(frozen=True)
class Judged:
    """The picks of a model.

    Attributes:
      picks: the row picked for each product.
      best: the fastest row of each.
      to_best: its time over the time picked, of each product: 1 is perfect.
      to_xla: XLA's time over the time picked.
    """

    picks: np.ndarray
    best: np.ndarray
    to_best: np.ndarray
    to_xla: np.ndarray


def judge(rows: Rows, predicted: np.ndarray) -> Judged:
    """Judges predicted times by the picks that follow from them."""
    picks, best = (_least(rows, times) for times in (predicted, rows.us))
    xla = np.array([line["xla_us"] for line in rows.lines])
    return Judged(picks, best, rows.us[best] / rows.us[picks], xla / rows.us[picks])


def _least(rows: Rows, times: np.ndarray) -> np.ndarray:
    starts = rows.starts
    ends = [*starts[1:], len(times)]
    return np.array([a + int(np.argmin(times[a:b])) for a, b in zip(starts, ends, strict=True)], int)


def table(rows: Rows, predicted: np.ndarray) -> str:
    """Returns the picks kind by kind: XLA's time over theirs, over the best measured, and how far predictions are."""
    judged = judge(rows, predicted)
    error = np.log(predicted / rows.us)
    text = [f"{'':18s} {'n':>4s} | XLA / pick: mean, 5th, worst | XLA / best | best / pick | log error: mean, spread"]
    for name, belongs in KINDS.items():
        chosen = np.array([belongs(line) for line in rows.lines])
        if not chosen.any():
            continue
        to_xla, to_best = judged.to_xla[chosen], judged.to_best[chosen]
        worst = rows.lines[int(np.flatnonzero(chosen)[np.argmin(to_xla)])]["case"]
        errors = error[chosen[rows.product]]
        text.append(
            f"{name:18s} {chosen.sum():4d} | {_mean(to_xla):.3f}, {np.percentile(to_xla, 5):.3f}, {to_xla.min():.3f} "
            f"| {_mean(to_xla / to_best):10.3f} | {_mean(to_best):11.3f} "
            f"| {errors.mean():+.3f}, {errors.std():.3f} | {worst}"
        )
    return "\n".join(text)


def _mean(ratios: np.ndarray) -> float:
    return math.exp(np.log(ratios).mean())


def losses(rows: Rows, predicted: np.ndarray, judged_by: Judged, most: int) -> str:
    """Returns the products whose pick loses most to the best measured, both with their configs."""
    text = []
    for i in np.argsort(judged_by.to_best)[:most]:
        line, pick, best = rows.lines[i], judged_by.picks[i], judged_by.best[i]
        text.append(f"{line['case']:34s} best / pick {judged_by.to_best[i]:.3f}, XLA {line['xla_us']:.1f} us")
        for name, row in (("pick", pick), ("best", best)):
            text.append(
                f"    {name} {rows.us[row]:9.1f} us, predicted {predicted[row]:9.1f}  {_show(rows.kernels[row])}"
            )
    return "\n".join(text)


def _show(kernel: Kernel) -> str:
    defaults = cutjax.Config()
    fields = dataclasses.asdict(kernel.config)
    return " ".join(f"{name}={value}" for name, value in fields.items() if value != getattr(defaults, name))


def pick_loss(rows: Rows, predicted: np.ndarray) -> float:
    """Returns the mean of log(time picked / best), where configs predicted alike share the pick."""
    starts = rows.starts
    scaled = -np.log(predicted) / SHARPNESS
    shares = np.exp(scaled - np.maximum.reduceat(scaled, starts)[rows.product])
    shares /= np.add.reduceat(shares, starts)[rows.product]
    best = np.minimum.reduceat(rows.us, starts)[rows.product]
    return float(np.sum(shares * np.log(rows.us / best)) / len(starts))


def error_loss(rows: Rows, predicted: np.ndarray, slower: float = 0.3, width: float = 0.05) -> float:
    """Returns the mean error of log times, robust to outliers, where configs far slower than the best count less."""
    best = np.minimum.reduceat(rows.us, rows.starts)[rows.product]
    weights = np.exp(-np.log(rows.us / best) / slower)
    weights /= np.add.reduceat(weights, rows.starts)[rows.product]  # each product counts the same
    errors = np.log(predicted / rows.us) / width
    return float(np.sum(weights * width * (np.sqrt(1 + errors**2) - 1)) / len(rows.starts))


def fit(
    predict: Callable[[np.ndarray, Rows], np.ndarray],
    start: Sequence[float],
    rows: Rows,
    loss: Callable[[Rows, np.ndarray], float] = lambda rows, times: pick_loss(rows, times) + error_loss(rows, times),
    rounds: int = 4,
) -> np.ndarray:
    """Returns constants for which the loss of a model is least near ``start``.

    Args:
      predict: times of rows, by constants; vectorised, since it is called some thousand times.
      start: the constants to begin with. Their signs are kept, and those that are 0.
      rows: what was measured.
      loss: of predicted times.
      rounds: of Powell's method, each from where the last ended.
    """
    from scipy import optimize

    origin = np.asarray(start, float)
    free = np.flatnonzero(origin)

    def constants(x: np.ndarray) -> np.ndarray:
        found = origin.copy()
        found[free] *= np.exp(np.clip(x, -3, 3))
        return found

    def objective(x: np.ndarray) -> float:
        times = predict(constants(x), rows)
        value = loss(rows, times) if np.all(np.isfinite(times)) and np.all(times > 0) else 1e6
        return value + 1e-4 * float(np.mean(np.square(x)))  # constants without effect stay

    x, least = np.zeros(len(free)), math.inf
    for _ in range(rounds):
        found = optimize.minimize(objective, x, method="Powell", options={"xtol": 1e-3, "ftol": 1e-5})
        if found.fun > least - 1e-5:
            break
        x, least = np.atleast_1d(found.x), float(found.fun)
    return constants(x)


def main(argv: Sequence[str]) -> int:
    """The command line: judges the shipped model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit", description="Judges the cost model.")
    parser.add_argument(
        "paths", type=pathlib.Path, nargs="+", help="JSON lines of benchmarks direct, or JSON of a recorded sweep"
    )
    parser.add_argument("--worst", type=int, default=10, help="so many of the picks that lose most are listed")
    args = parser.parse_args(argv)
    rows = flatten(load(args.paths))
    predicted = present(rows)
    print(table(rows, predicted))
    print(losses(rows, predicted, judge(rows, predicted), args.worst))
    return 0
