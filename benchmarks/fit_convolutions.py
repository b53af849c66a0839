"""Fits the model of XLA's convolutions to measured ones: ``python -m benchmarks fit_convolutions X.json ...``.

X.json is what ``benchmarks convolutions`` writes. Prints the weights, how far they are off where each network, and each
file, was left out of the fit, and what "auto" would do by them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import pprint
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks import networks, report
from benchmarks.conv_programs import chosen
from benchmarks.record import Figures
from cutjax.binding import lowering
from cutjax.kernels import xla_convolution
from cutjax.kernels.choose import LEAD
from cutjax.kernels.operand import Im2col
from cutjax.kernels.problem import Problem
from cutjax.kernels.xla_convolution import Geometry

QUANTILE = 0.3  # of the convolutions with the same in common, those in which XLA is that fast
RIDGE = 0.02
H200 = lowering.Target("sm_90a", "NVIDIA H200", 132)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A convolution that was measured.

    Attributes:
      case: the convolution.
      problem: that it is, on the device.
      xla_us: XLA's time.
      kernel_us: the time of the kernel that the cost model takes for the fastest; NaN where it was not timed.
      predicted_us: the cost model's of that kernel.
      source: the file that has it.
    """

    case: networks.Conv
    problem: Problem
    xla_us: float
    kernel_us: float = math.nan
    predicted_us: float = math.nan
    source: str = ""

    @property
    def network(self) -> str:
        """The network that has the convolution."""
        return self.case.network

    @property
    def windows(self) -> bool:
        """True if it is no plain product."""
        return isinstance(self.problem.a.view, Im2col)


def load(paths: Sequence[pathlib.Path]) -> list[Sample]:
    """Returns the samples of some files, with the problems of today."""
    found = []
    for path in paths:
        content, rows = report.read(path)
        cases = {case.name: case for case in networks.sample(content["count"], content["salt"])}
        for row in rows:
            xla_us = row.peers["xla"].us
            case = cases[row.case]
            # lax's gradient of the weights of a transposed convolution is another program than ours by XLA.
            if not math.isnan(xla_us) and not (case.transposed and case.kind == "dw"):
                found.append(sampled(case, xla_us, row.peers, path.stem))
    return [sample for sample in found if sample is not None]


def sampled(
    case: networks.Conv, xla_us: float, peers: Mapping[str, Figures] | None = None, source: str = ""
) -> Sample | None:
    """Returns the sample of a case on an H200; None where it is not one product."""
    with lowering.on_target(H200):
        choice = chosen(case, "cuda")
    if choice is None:
        return None
    times = [of.us for of in (peers or {}).values() if choice.kernel in of.kernel.split(" + ")]
    return Sample(case, choice.problem, xla_us, min(times, default=math.nan), choice.time_us or math.nan, source)


def features(samples: Sequence[Sample]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Returns the names of what may be true, how far it is of each sample, and log(XLA's time / that of its steps)."""
    rows, ratios = [], []
    for sample in samples:
        p = sample.problem
        geometry = Geometry.of(p)
        base = geometry.steps_us(p.device, p.a.dtype)
        rows.append({name: float(value) for name, value in geometry.true(p).items()})
        ratios.append(math.log(sample.xla_us / base))
    names = list(rows[0])
    return names, np.array([[row[name] for name in names] for row in rows]), np.array(ratios)


def fit(x: np.ndarray, y: np.ndarray, quantile: float = QUANTILE, ridge: float = RIDGE) -> np.ndarray:
    """Returns the weights by which so large a share of y lies below; but for the first, none is less than 0."""
    from scipy import optimize

    width = 0.02

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        left = y - x @ w
        soft = np.sqrt(left * left + width * width)
        value = np.mean((quantile - 0.5) * left + 0.5 * soft) + ridge * np.mean(w * w)
        slope = (quantile - 0.5) + 0.5 * left / soft
        return float(value), -(x.T @ slope) / len(y) + 2 * ridge * w / len(w)

    bounds = [(None, None), *[(0.0, None)] * (x.shape[1] - 1)]
    start, options = np.zeros(x.shape[1]), {"maxiter": 4000}
    return optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x


def by_form(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Returns the samples that have windows, by form."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.windows:
            found.setdefault(Geometry.of(sample.problem).form, []).append(sample)
    return found


def weights(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Returns the fitted value of `xla_convolution.WEIGHTS`."""
    found = {}
    for form, of_form in sorted(by_form(samples).items()):
        names, x, y = features(of_form)
        found[form] = {name: float(f"{w:.3g}") for name, w in zip(names, fit(x, y), strict=True) if abs(w) > 5e-4}
    return found


def left_out(samples: Sequence[Sample], by: str = "network") -> Iterator[tuple[Sample, float]]:
    """Yields each sample with the logarithm of XLA's time over that told by a fit without its network, or source."""
    for of_form in by_form(samples).values():
        _, x, y = features(of_form)
        of = np.array([getattr(sample, by) for sample in of_form])
        for left in dict.fromkeys(of):
            rest = of != left
            w = fit(x[rest], y[rest]) if rest.any() else np.zeros(x.shape[1])
            for i in np.flatnonzero(~rest):
                yield of_form[i], float(y[i] - x[i] @ w)


def decided(samples: Sequence[Sample], xla_us: Sequence[float], scale: float = 1.0) -> Iterator[tuple[Sample, float]]:
    """Yields each sample that has a kernel with XLA's time over that of what "auto" runs by such predictions."""
    for sample, us in zip(samples, xla_us, strict=True):
        if not math.isnan(sample.kernel_us):
            leads = sample.predicted_us * scale * LEAD <= us
            yield sample, sample.xla_us / sample.kernel_us if leads else 1.0


def show(samples: Sequence[Sample], by: str) -> Iterator[str]:
    """Yields lines on predictions: how far off, what they decide, and the losses."""
    pairs, label = list(left_out(samples, by)), f"left out by {by}"
    errors = np.array([error for _, error in pairs])
    if len(errors):
        slower = np.mean(errors < math.log(0.9))
        yield f"{label}: {len(errors)}, XLA / told: median {np.exp(np.median(errors)):.2f}, under 0.9 {slower:.0%}"
    for sample, error in sorted(pairs, key=lambda pair: pair[1])[:12]:
        yield f"   XLA is faster than told, by {math.exp(error):.2f}: {sample.case.name}, {sample.xla_us:.1f} us"
    told = [sample.xla_us / math.exp(error) for sample, error in pairs]
    ratios = list(decided([sample for sample, _ in pairs], told))
    if ratios:
        gain = report.geometric_mean([ratio for _, ratio in ratios])
        worst = min(ratio for _, ratio in ratios)
        best = report.geometric_mean([max(1.0, s.xla_us / s.kernel_us) for s, _ in ratios])
        yield f"   auto: {gain:.3f} in geometric mean, worst {worst:.3f}; by a perfect model {best:.3f}"
        for sample, ratio in sorted(ratios, key=lambda pair: pair[1])[:12]:
            if ratio < 0.98:
                times = f"XLA {sample.xla_us:.1f}, kernel {sample.kernel_us:.1f} us"
                yield f"   loses, {ratio:.2f}: {sample.case.name}, {times}"


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fit_convolutions", description=__doc__)
    parser.add_argument("paths", type=pathlib.Path, nargs="+")
    args = parser.parse_args(argv)
    samples = load(args.paths)
    for by in ("network", "source"):
        print("\n".join(show(samples, by)))
    pprint.pprint(weights(samples), sort_dicts=False, width=60)
    by_plain = [sample for sample in samples if not sample.windows]
    if by_plain:
        from cutjax.kernels import xla

        told = [xla.time_us(sample.problem) or math.nan for sample in by_plain]
        errors = [math.log(sample.xla_us / us) for sample, us in zip(by_plain, told, strict=True)]
        print(f"plain products: {len(told)}, XLA / told: median {math.exp(float(np.nanmedian(errors))):.2f}")
    now = [xla_convolution.time_us(sample.problem) for sample in samples if sample.windows]
    ratios = [ratio for _, ratio in decided([sample for sample in samples if sample.windows], now)]
    if ratios:
        print(f"by the shipped weights: {report.geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
    return 0
