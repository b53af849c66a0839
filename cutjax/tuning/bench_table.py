"""The screen of ``python -m cutjax bench``: a line for each case, its ratio to XLA as a bar, and the H200's."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from cutjax.tuning.cases import CASES, KINDS
from cutjax.tuning.report import number

STEPS, LOW, HIGH = 8, -1, 2  # of the picture: columns for a factor of two, and the powers of two at its ends
WIDTH = 100  # of a reason
WRONG = "ArithmeticError"  # what `measure.times` says of a wrong result
_RECORDED = pathlib.Path(__file__).with_name("h200.json")


def recorded() -> dict[str, dict[str, Any]]:
    """Returns by case what was recorded of it on an H200: ``us``, ``xla_us``, and the run that they are of.

    ``python -m benchmarks recorded`` writes the file from runs in ``benchmarks/results``.
    """
    return json.loads(_RECORDED.read_text())["cases"]


def text(content: Mapping[str, Any], left: int) -> str:
    """Returns a report as a screen of text; ``left`` is the number of cases that have no row yet."""
    rows = {row["case"]: row for row in content["rows"]}
    lines = [*_heading(content, rows.get("copy", {})), _ruler()]
    for kind in KINDS:
        of_kind = [case for case in CASES if case.kind == kind and case.name in rows]
        lines += [kind] * any(case.brief for case in of_kind)
        lines += [_line(case.name, rows[case.name]) for case in of_kind if case.brief]
    small = [ratio for case in CASES if not case.brief and (ratio := ratio_of(rows.get(case.name, {})))]
    if small:
        mean = math.exp(sum(map(math.log, small)) / len(small))
        lines.append(f"and {len(small)} smaller products, {mean:.2f} in the geometric mean")
    lines.append("# XLA's time over the fastest kernel's. o, H200: the same as recorded there, - where it was not.")
    return "\n".join(
        [*lines, *_notes(rows), *[f"{left} cases are left: the same command goes on with them"] * bool(left)]
    )


def ratio_of(row: Mapping[str, Any]) -> float | None:
    """Returns XLA's time over that of the fastest kernel; None where either was not measured, or a kernel is wrong."""
    us, xla_us = _us(row), row.get("xla_us")
    return xla_us / us if us and xla_us else None


def _us(row: Mapping[str, Any]) -> float | None:
    return None if _wrong(row) else min(row.get("us", {}).values(), default=None)


def _heading(content: Mapping[str, Any], copy: Mapping[str, Any]) -> Iterator[str]:
    versions, commit = content["versions"], content["commit"]
    yield f"{content['device']}, {content['arch']}, {content['sms']} SMs, driver {content['driver']}" + (
        f", copies {copy['bytes'] / copy['xla_us'] / 1e6:.2f} TB/s" if copy.get("xla_us") else ""
    )
    at = f" at {commit[:9]}{'-dirty' * commit.endswith('-dirty')}" if commit else ""
    yield f"cutjax {versions['cutjax']}{at}, jax {versions['jax']}, {versions['compiler']}, {content['date']}"


def _ruler() -> str:
    """Returns the head of the table."""
    marks = "".join(f"{2.0**power:<{STEPS}g}" for power in range(LOW, HIGH + 1)).rstrip()
    return _cells("", "us", "XLA us", "ratio", marks, "H200", "default")


def _line(name: str, row: Mapping[str, Any]) -> str:
    record, ratio = recorded().get(name), ratio_of(row)
    theirs = record["xla_us"] / record["us"] if record else None
    said = {"error": "failed", "missing": "none"}
    told = "WRONG" if _wrong(row) else next((text for key, text in said.items() if key in row), "-")
    us, xla_us = number(_us(row)), number(row.get("xla_us"))
    default = "" if "error" in row else "XLA" if row["runs"] == "XLA" else "kernel"
    return _cells(name, us, xla_us, _ratio(ratio) or told, _bar(ratio, theirs), _ratio(theirs) or "-", default)


def _cells(name: str, us: str, xla_us: str, ratio: str, bar: str, theirs: str, default: str) -> str:
    return f" {name:<33}{us:>8}{xla_us:>9}{ratio:>7} {bar:<{STEPS * (HIGH - LOW) + 1}}{theirs:>6}  {default}".rstrip()


def _ratio(ratio: float | None) -> str:
    return f"{ratio:.2f}" if ratio else ""


def _bar(ratio: float | None, theirs: float | None) -> str:
    """Returns the picture of a ratio, on a logarithmic scale from a line at 1, with a mark at the recorded one."""
    cells, line = [" "] * (STEPS * (HIGH - LOW) + 1), -STEPS * LOW
    if ratio:
        at = _column(ratio)
        cells[min(at, line) : max(at, line) + 1] = "#" * (abs(at - line) + 1)
        if not 2.0**LOW <= ratio <= 2.0**HIGH:
            cells[at] = "<" if ratio < 1 else ">"
    cells[line] = "|"
    if theirs:
        cells[_column(theirs)] = "o"
    return "".join(cells)


def _column(ratio: float) -> int:
    return round(STEPS * (min(max(math.log2(ratio), LOW), HIGH) - LOW))


def _wrong(row: Mapping[str, Any]) -> list[str]:
    return [name for name, why in row.get("dropped", {}).items() if why.startswith(WRONG)]


def _notes(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines below the table: failures, wrong results, and the reasons why there are no kernels."""
    missing: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "error" in row:
            yield f"failed: {name}: {row['error'][:WIDTH]}"
        if "missing" in row:
            missing.setdefault(row["missing"][:WIDTH], []).append(name)
        for kernel, why in row.get("dropped", {}).items():
            yield f"{'WRONG' if kernel in _wrong(row) else 'failed'}: {name}: {kernel}: {why[:WIDTH]}"
    for why, names in missing.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"none: {names[0]}{others}: {why}"
