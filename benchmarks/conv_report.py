"""Convolutions that were measured, as tables and as a picture by network."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import networks, plot, report
from benchmarks.networks import Conv
from benchmarks.record import Row

_OURS, _XLA, _TUNED = "#76b900", "#9e9e9e", "#2a6f97"
WAYS = ("xla", "auto", "kernel", "tuned")


class Line(NamedTuple):
    """A convolution and its times in microseconds by way, NaN where there is none."""

    case: Conv
    row: Row
    us: dict[str, float]

    def ratio(self, way: str) -> float:
        """The ratio of XLA's time to a way's."""
        return self.us["xla"] / self.us[way]


def lines(rows: Sequence[Row], cases: Mapping[str, Conv]) -> list[Line]:
    """Returns the rows with their convolutions."""
    found = []
    for row in rows:
        us = {name: row.peers[name].us for name in WAYS if name != "auto"} | {"auto": row.us}
        found.append(Line(cases[row.case], row, us))
    return found


def _patch(case: Conv) -> bool:
    return case.kernel == case.strides and case.cin <= 4 and not case.transposed


def _strided(case: Conv) -> bool:
    return max(case.strides) > 1 and case.kernel != case.strides and not case.transposed


def _own_ground(case: Conv) -> bool:
    plain = case.groups == max(case.strides) == max(case.dilation) == 1 and not case.transposed
    return plain and case.kernel == (3, 3) and min(case.cin, case.cout) >= 128


# Kinds of convolutions, and what is asked of each: how many times as fast as XLA, in geometric mean.
KINDS: dict[str, tuple[Callable[[Conv], bool], float]] = {
    "all": (lambda case: True, 2.2),
    "forward": (lambda case: case.kind == "fwd", 1.6),
    "input gradient": (lambda case: case.kind == "dx", 1.6),
    "weight gradient": (lambda case: case.kind == "dw", 4.5),
    "depthwise": (lambda case: case.groups == case.cin > 1, 4.0),
    "grouped": (lambda case: 1 < case.groups < case.cin, math.nan),
    "transposed": (lambda case: case.transposed, 5.0),
    "patch embedding": (_patch, 10.0),
    "strided": (_strided, 1.8),
    "dilated": (lambda case: max(case.dilation) > 1, math.nan),
    "1x1": (lambda case: max(case.kernel) == 1, math.nan),
    "3x3 stride 1, 128 and more": (_own_ground, 0.97),
}


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return report.geometric_mean(known)


def kinds(found: Sequence[Line], groups: Mapping[str, Callable[[Conv], bool]]) -> Iterator[str]:
    """Yields a table of geometric means by group."""
    yield "| | n | XLA / floor | ours / floor | XLA / ours | median | worst | kernel forced | tuned | by XLA |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, belongs in groups.items():
        chosen = [line for line in found if belongs(line.case) and not math.isnan(line.ratio("auto"))]
        if not chosen:
            continue
        over = {way: [line.us[way] / line.case.floor_us for line in chosen] for way in WAYS}
        ratios = [line.ratio("auto") for line in chosen]
        by_xla = sum(line.row.figures["runs"] == "XLA" for line in chosen) / len(chosen)
        cells = [_mean(over["xla"]), _mean(over["auto"]), _mean(ratios), float(np.median(ratios)), min(ratios)]
        cells += [_mean([line.ratio(way) for line in chosen]) for way in ("kernel", "tuned")]
        numbers = " | ".join("-" if math.isnan(x) else f"{x:.2f}" for x in cells)
        yield f"| {name} | {len(chosen)} | {numbers} | {by_xla:.0%} |"


def by_network(found: Sequence[Line]) -> dict[str, Callable[[Conv], bool]]:
    """Returns the networks, those that XLA takes longest over first."""
    over: dict[str, list[float]] = {}
    for line in found:
        over.setdefault(line.case.network, []).append(line.us["xla"] / line.case.floor_us)
    names = sorted(over, key=lambda name: -_mean(over[name]))
    return {name: lambda case, name=name: case.network == name for name in names}


def each(found: Sequence[Line]) -> Iterator[str]:
    """Yields a line for each convolution, those whose "auto" loses most to XLA first."""
    yield f"{'':44s} {'floor':>8s} {'XLA':>9s} {'auto':>9s} {'kernel':>9s} {'tuned':>9s}  XLA/auto XLA/kern   predicted"
    for line in sorted(found, key=lambda line: (math.isnan(line.ratio("auto")), line.ratio("auto"))):
        us, told = line.us, line.row.figures["predicted"]
        times = " ".join(f"{us[way]:9.1f}" for way in WAYS)
        predicted = [told.get(name) or math.nan for name in ("xla_us", "kernel_us")]
        yield (
            f"{line.case.name:44s} {line.case.floor_us:8.1f} {times}  {line.ratio('auto'):8.2f} "
            f"{line.ratio('kernel'):8.2f}   {predicted[0]:.1f} / {predicted[1]:.1f} {line.row.kernel[:60]}"
        )


def failures(found: Sequence[Line]) -> Iterator[str]:
    """Yields the failures, each with the convolutions that have it in common."""
    why: dict[str, list[str]] = {}
    for line in found:
        told = {"auto": line.row.failure} | {way: line.row.peers[way].failure for way in ("xla", "kernel")}
        for way, failure in told.items():
            if failure:
                why.setdefault(f"{way}: {failure[:160]}", []).append(line.case.name)
    for failure, names in sorted(why.items(), key=lambda item: -len(item[1])):
        yield f"{len(names):4d} x {failure}  ({', '.join(names[:4])}{', ..' * (len(names) > 4)})"


def text(rows: Sequence[Row], cases: Mapping[str, Conv]) -> str:
    """Returns the tables: each convolution, failures, by network, by kind."""
    found = lines(rows, cases)
    told = {f"{name} ({least:g})" if least > 0 else name: belongs for name, (belongs, least) in KINDS.items()}
    parts = each(found), failures(found), kinds(found, by_network(found)), kinds(found, told)
    return "\n\n".join("\n".join(part) for part in parts) + f"\n\n{len(found)} of {len(cases)} measured"


def draw(path: pathlib.Path) -> pathlib.Path:
    """Draws XLA's, ours and tuned times over the floor by network; returns the picture beside the JSON."""
    import matplotlib.figure

    content, rows = report.read(path)
    salts = content["salt"].split(", ")
    found = lines(rows, {case.name: case for salt in salts for case in networks.sample(content["count"], salt)})
    groups = by_network(found)
    figure = matplotlib.figure.Figure(figsize=(9, 1.8 + 0.42 * len(groups)), layout="constrained")
    axes = figure.subplots()
    bars: dict[str, list[Any]] = {"xla": [], "auto": [], "tuned": []}
    for belongs in groups.values():
        chosen = [line for line in found if belongs(line.case)]
        for way, values in bars.items():
            values.append(_mean([line.us[way] / line.case.floor_us for line in chosen]))
    y = np.arange(len(groups))[::-1]
    looks = {"xla": ("XLA", _XLA), "auto": ("cutjax", _OURS), "tuned": ("cutjax, tuned", _TUNED)}
    for i, (way, values) in enumerate(bars.items()):
        places = y + 0.27 * (1 - i)
        axes.barh(places, values, 0.26, label=looks[way][0], color=looks[way][1])
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:.1f}", va="center", fontsize=7)
    counts = [sum(belongs(line.case) for line in found) for belongs in groups.values()]
    axes.set_yticks(y, [f"{name} ({count})" for name, count in zip(groups, counts, strict=True)])
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time over the floor, geometric mean (arithmetic at 800 TFLOP/s, each array once at 4.3 TB/s)")
    axes.legend(fontsize=8)
    figure.suptitle(plot.subtitle(content), fontsize=9)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150)
    return target
