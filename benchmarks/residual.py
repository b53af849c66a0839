"""Trains the network beside the formula of dense products, and judges it: ``python -m benchmarks residual [--ship]``.

It is trained on the sweep that the formula's constants were fitted to, in seconds, and judged by sweeps that it has not
seen: of other products, another device, batches of attention, and epilogues. ``--ship`` writes what cutjax reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import fit, fused_sweep, report
from benchmarks.cases import Dense
from cutjax.kernels import choose, families, remembered, tuned
from cutjax.kernels.device import device_of_kind
from cutjax.kernels.sm90 import dense_cost, residual
from cutjax.kernels.sm90.config import Config
from cutjax.kernels.sm90.kernel import Kernel, resolve

SWEEPS = report.RESULTS / "sweeps"
FUSED = report.RESULTS / "experiments" / "fused-sweep-h200.json"
HOT = SWEEPS / "hot-h200.json"
HELD = SWEEPS / "products-held-h200.json"
TRAINED_ON = (SWEEPS / "products-h200.json", SWEEPS / "attention-h200.json", FUSED, HOT)
UNSEEN = (HELD, SWEEPS / "products-h100.json")
WHAT = (
    "What picks by predicted times cost over the best of the configs measured, in geometric mean, by the formula alone "
    "and as the network corrects it: of the sweeps that it was trained on by networks that have not seen a product's "
    "sizes, and of those that it was not trained on. auto: XLA's time over that of what runs, with what ships."
)
HIDDEN = (48, 32)
STEPS, WARM_UP, RATE, DECAY = 400, 20, 3e-3, 1e-3
FOLDS = 4
NOISE = 0.1  # added to each input at each step, in its standard deviations
# Errors beyond WIDTH count by their size, not its square, and those of a config that is slower by SLOWER 1/e as much.
WIDTH, SLOWER = 0.1, 0.3
ERRORS, PICKS = 20.0, 3.0  # the weights of errors, and of what picks cost
SHARPNESS = 0.03  # in log time: configs predicted closer than this share a pick, so that what it costs has a slope


@dataclasses.dataclass(frozen=True)
class Samples:
    """The measured configs that a network is trained on, a row each, those of a product one after the other.

    Attributes:
      inputs: of the network, [rows, inputs].
      formula: microseconds that the formula predicts.
      us: measured.
      product: which product each row is of.
    """

    inputs: np.ndarray
    formula: np.ndarray
    us: np.ndarray
    product: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """The first row of each product."""
        return np.flatnonzero(np.diff(self.product, prepend=-1))

    def of(self, chosen: np.ndarray) -> Samples:
        """Returns those of some products, told by a truth value for each."""
        rows = chosen[self.product]
        return Samples(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def joined(parts: Sequence[Samples]) -> Samples:
    """Returns the samples of several sweeps as those of one."""
    before = np.cumsum([0, *(len(part.starts) for part in parts)])
    product = [part.product + first for part, first in zip(parts, before, strict=False)]
    inputs, formula, us = (np.concatenate([getattr(x, name) for x in parts]) for name in ("inputs", "formula", "us"))
    return Samples(inputs, formula, us, np.concatenate(product))


def read(path: pathlib.Path) -> fit.Rows:
    """Returns the rows of a recorded sweep."""
    if path not in (FUSED, HOT):
        return fit.flatten(fit.recorded(path))
    return formula_alone(lambda: fused(path))  # tracing chooses too, and there may be no network yet


def samples(rows: fit.Rows) -> Samples:
    """Returns the samples of measured configs."""
    inputs, formula = [], []
    for kernel, device in zip(rows.kernels, rows.devices, strict=True):
        features = dense_cost.features(kernel, device)
        costs = dense_cost.costs(features)
        inputs.append(residual.inputs(residual.product(kernel), features, costs)[:, 0])
        formula.append(costs.whole)
    return Samples(np.array(inputs), np.array(formula), rows.us, rows.product)


class Training:
    """A network in training, by Adam, on all samples at each step.

    Attributes:
      mean, deviation: of each input.
      parameters: weights [inputs, outputs] of each layer, then their biases.
    """

    def __init__(self, data: Samples, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.mean, self.deviation = data.inputs.mean(0), data.inputs.std(0) + 1e-6
        sizes = (data.inputs.shape[1], *HIDDEN, 1)
        weights = [rng.normal(size=(i, o)) * np.sqrt(2 / i) for i, o in itertools.pairwise(sizes)]
        weights[-1] *= 0.1
        self.parameters = [x.astype(np.float32) for x in (*weights, *(np.zeros(o) for o in sizes[1:]))]

    def run(self, data: Samples) -> None:
        """Trains for STEPS steps, at a rate that rises at first, and then falls to zero."""
        limit = residual.SPREAD
        x = np.clip((data.inputs - self.mean) / self.deviation, -limit, limit).astype(np.float32)
        slope = _slope(data)
        first, second = ([np.zeros_like(p) for p in self.parameters] for _ in range(2))
        for step in range(STEPS):
            rate = RATE * 0.5 * (1 + np.cos(np.pi * step / STEPS)) * min(1.0, (step + 1) / WARM_UP)
            noisy = x + np.float32(NOISE) * self.rng.standard_normal(x.shape, np.float32)
            for i, gradient in enumerate(self._gradients(noisy, slope)):
                first[i] += 0.1 * (gradient - first[i])
                second[i] += 0.001 * (gradient**2 - second[i])
                mean, square = first[i] / (1 - 0.9 ** (step + 1)), second[i] / (1 - 0.999 ** (step + 1))
                decayed = DECAY * self.parameters[i] * (self.parameters[i].ndim == 2)
                self.parameters[i] -= (rate * (mean / (np.sqrt(square) + 1e-8) + decayed)).astype(np.float32)

    def _gradients(self, x: np.ndarray, slope: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
        """Returns the gradient of the loss by each parameter, told its slope by what the network adds to log times."""
        weights, biases = self.parameters[: len(HIDDEN) + 1], self.parameters[len(HIDDEN) + 1 :]
        layers = [x]
        for w, b in zip(weights[:-1], biases, strict=False):
            layers.append(np.maximum(layers[-1] @ w + b, 0))
        back = slope((layers[-1] @ weights[-1] + biases[-1])[:, 0]).astype(np.float32)[:, None]
        by_weights, by_biases = [], []
        for layer, w in zip(reversed(layers), reversed(weights), strict=True):
            by_weights.insert(0, layer.T @ back)
            by_biases.insert(0, back.sum(0))
            back = (back @ w.T) * (layer > 0)
        return by_weights + by_biases

    def rounded(self) -> dict[str, Any]:
        """Returns the network in whole numbers, as its file has it."""
        weights, biases = self.parameters[: len(HIDDEN) + 1], self.parameters[len(HIDDEN) + 1 :]
        unit = residual.UNIT
        layers = [
            {"weights": np.rint(w.T * unit).astype(int).tolist(), "bias": np.rint(b * unit**2).astype(int).tolist()}
            for w, b in zip(weights, biases, strict=True)
        ]
        mean, deviation = ([float(f"{x:.4g}") for x in of] for of in (self.mean, self.deviation))
        return {"mean": mean, "deviation": deviation, "layers": layers}


def _slope(data: Samples) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the slope of the loss by what is added to the logarithms of the formula's times."""
    starts, product, count = data.starts, data.product, len(data.starts)
    _, place = np.unique(product, return_inverse=True)
    formula, wanted = np.log(data.formula), np.log(data.us / data.formula)
    slower = np.log(data.us / np.minimum.reduceat(data.us, starts)[place])
    weights = np.exp(-slower / SLOWER)
    weights /= np.add.reduceat(weights, starts)[place]

    def slope(added: np.ndarray) -> np.ndarray:
        errors = added - wanted
        of_errors = ERRORS * weights * errors / np.sqrt(1 + (errors / WIDTH) ** 2)
        scaled = -(formula + np.clip(added, -residual.MOST, residual.MOST)) / SHARPNESS
        shares = np.exp(scaled - np.maximum.reduceat(scaled, starts)[place])
        shares /= np.add.reduceat(shares, starts)[place]
        costs = np.add.reduceat(shares * slower, starts)[place]
        of_picks = -shares * (slower - costs) / SHARPNESS
        of_picks *= (np.abs(added) < residual.MOST) | (np.sign(of_picks) == np.sign(added))  # or nothing would change
        return (of_errors + PICKS * of_picks) / count

    return slope


def trained(data: Samples, seed: int) -> dict[str, Any]:
    """Returns a network, as its file has it, trained on samples.

    On average it leaves the time of a pick as it is by the formula, by which other kernels are ranked.
    """
    training = Training(data, seed)
    training.run(data)
    network = training.rounded()
    by_formula, by_both = (np.minimum.reduceat(us, data.starts) for us in (data.formula, corrected(network, data)))
    network["layers"][-1]["bias"][0] += round(float(np.log(by_formula / by_both).mean()) * residual.UNIT**2)
    return network


def corrected(network: dict[str, Any], data: Samples) -> np.ndarray:
    """Returns the formula's times as a network corrects them."""
    return data.formula * (1 + residual.decoded(network)(data.inputs.T))


def cross_validated(data: Samples, lines: Sequence[dict[str, Any]], seed: int) -> np.ndarray:
    """Returns corrected times, of each product by a network that has not seen its sizes, in whatever order."""
    fold = np.array([zlib.crc32(str(_sizes(line)).encode()) % FOLDS for line in lines])
    us = np.zeros_like(data.us)
    for i in range(FOLDS):
        rows = (fold == i)[data.product]
        us[rows] = corrected(trained(data.of(fold != i), seed), data.of(fold == i))
    return us


def fused(path: pathlib.Path) -> fit.Rows:
    """Returns the rows of a sweep of products with epilogues."""
    content = json.loads(path.read_text())
    device = device_of_kind(content["device"], "sm_90a", content["sms"])
    lines, product, us, kernels = [], [], [], []
    for line in content["rows"]:
        problem = fused_sweep.problem_of((line["m"], line["n"], line["k"], line["layout"]), line["epilogue"]).on(device)
        for fields, time_us in line["configs"]:
            kernel = resolve(problem, Config(**fields))
            if isinstance(kernel, Kernel):
                product.append(len(lines))
                us.append(time_us)
                kernels.append(kernel)
        lines.append(line)
    return fit.Rows(lines, np.array(product), np.array(us), kernels, [device] * len(us))


def figures(data: Samples, us: np.ndarray) -> dict[str, float]:
    """Returns the times of picks over those of the best measured, and of the best of three."""
    ends = [*data.starts[1:], len(us)]
    orders = [a + np.argsort(us[a:b], kind="stable") for a, b in zip(data.starts, ends, strict=True)]
    best = np.minimum.reduceat(data.us, data.starts)
    found = {}
    for name, count in (("pick", 1), ("best of three", 3)):
        over = np.array([data.us[order[:count]].min() for order in orders]) / best
        found[name] = {
            "mean": round(float(np.exp(np.log(over).mean())), 4),
            "95th percentile": round(float(np.percentile(over, 95)), 3),
            "share over 1.12": round(float((over > 1.12).mean()), 3),
            "worst": round(float(over.max()), 3),
        }
    return found


def by_auto(rows: fit.Rows) -> dict[str, float]:
    """Returns XLA's time over that of what "auto" runs, and what kernels would be picked of all configs that ship.

    Of products whose kernel was not measured nothing is known, but their number.
    """
    over_xla, over_best, asked = [], [], 0
    for i, line in enumerate(rows.lines):
        of = slice(*np.searchsorted(rows.product, (i, i + 1)))
        times = {kernel.config: us for kernel, us in zip(rows.kernels[of], rows.us[of], strict=True)}
        problem = Dense.of_fields(line).problem.on(rows.devices[of.start])
        with tuned.use_tuning(None):
            auto, first = choose.choose(problem), choose.candidates(problem)[0]
        asked += auto.served
        if not auto.served or auto.config in times:
            over_xla.append(line["xla_us"] / times[auto.config] if auto.served else 1.0)
        over_best += [times[first] / min(times.values())] if first in times else []
    return {
        "kernels run": asked,
        "known": len(over_xla),
        "mean": round(float(np.exp(np.mean(np.log(over_xla)))), 4),
        "5th percentile": round(float(np.percentile(over_xla, 5)), 3),
        "under 0.97": int(np.sum(np.array(over_xla) < 0.97)),
        "worst": round(min(over_xla), 3),
        "picks of all configs that were measured": len(over_best),
        "their mean over the best measured": round(float(np.exp(np.mean(np.log(over_best)))), 4),
    }


def _of_kind(rows: fit.Rows, data: Samples, us: np.ndarray) -> dict[str, Any]:
    """Returns the figures of each kind of product."""
    found = {}
    for name, belongs in fit.KINDS.items():
        chosen = np.array([belongs(line) for line in rows.lines])
        if chosen.any():
            found[name] = {"products": int(chosen.sum()), **figures(data.of(chosen), us[chosen[data.product]])}
    return found


def _sizes(line: dict[str, Any]) -> tuple[int, ...]:
    return tuple(sorted((line["m"], line["n"], line["k"])))


def judged(rows: fit.Rows, data: Samples, us: np.ndarray) -> dict[str, Any]:
    """Returns the figures of a sweep by the formula alone, and by corrected times."""
    times = {"formula": data.formula, "corrected": us}
    found = {"products": len(rows.lines), "configs": len(data.us)}
    return {**found, **{way: figures(data, us) for way, us in times.items()}}


def _ends(parts: Mapping[pathlib.Path, Samples]) -> list[int]:
    return np.cumsum([len(parts[path].us) for path in TRAINED_ON])[:-1].tolist()


def _about(path: pathlib.Path) -> dict[str, Any]:
    """Returns the machine and the software of a sweep, and its commit."""
    content = json.loads(path.read_text())
    about = {name: content.get(name) for name in ("device", "versions", "date")}
    return {**about, "commit": content.get("commit") or report.commit_of(path)}


def formula_alone(of: Callable[[], Any]) -> Any:
    """Returns a function's result where choices are made by the formula alone."""
    caches = families.offers, families._fastest, choose._choose
    with mock.patch.object(residual, "serves", return_value=False), mock.patch.object(remembered, "ON", False):
        for cached in caches:
            cached.cache_clear()
        found = of()
    for cached in caches:
        cached.cache_clear()
    return found


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks residual", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ship", action="store_true", help="train, and write the network that cutjax reads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file of figures to write")
    args = parser.parse_args(argv)
    sweeps = {path: read(path) for path in (*TRAINED_ON, *UNSEEN)}
    parts = {path: samples(rows) for path, rows in sweeps.items()}
    data = joined([parts[path] for path in TRAINED_ON])
    lines = [line for path in TRAINED_ON for line in sweeps[path].lines]
    if args.ship:
        start = time.process_time()
        network = trained(data, args.seed)
        print(f"trained in {time.process_time() - start:.1f} s")
        residual.FILE.write_text(json.dumps(network, separators=(",", ":")).replace('],"', '],\n"') + "\n")
        residual.network.cache_clear()
    network = json.loads(residual.FILE.read_text())
    times = dict(zip(TRAINED_ON, np.split(cross_validated(data, lines, args.seed), _ends(parts)), strict=True))
    times |= {path: corrected(network, parts[path]) for path in UNSEEN}
    content: dict[str, Any] = {
        "what": WHAT,
        "device": sweeps[HELD].lines[0]["device"],
        "versions": {name: report.version(name) for name in ("numpy", "cutjax")},
        "commit": report.commit_of(),
        "sweeps": {path.stem: _about(path) for path in sweeps},
    }
    content |= {path.stem: judged(rows, parts[path], times[path]) for path, rows in sweeps.items()}
    known, own = {_sizes(line) for line in lines}, content[HELD.stem]
    new = np.array([_sizes(line) not in known for line in sweeps[HELD].lines])
    ways = {"formula": parts[HELD].formula, "corrected": times[HELD]}
    own["of sizes that were not trained on"] = {
        "products": int(new.sum()),
        **{way: figures(parts[HELD].of(new), us[new[parts[HELD].product]]) for way, us in ways.items()},
    }
    own["by kind"] = {way: _of_kind(sweeps[HELD], parts[HELD], us) for way, us in ways.items()}
    for path in (HELD, SWEEPS / "attention-h200.json"):
        auto = functools.partial(by_auto, sweeps[path])
        content[path.stem]["auto"] = {"formula": formula_alone(auto), "corrected": auto()}
    print(json.dumps(content, indent=1))
    if args.out:
        report.write(args.out, content)
    return 0
