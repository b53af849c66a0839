"""Rows as tables, the same on a terminal and in the documentation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.record import Figures, Row

_NONE = Figures()


class Column(NamedTuple):
    """A heading, and the text of a row; text columns are aligned to the left."""

    heading: str
    cell: Callable[[Row], str]
    text: bool = False


def _number(value: float, form: str, missing: str = "-") -> str:
    return missing if math.isnan(value) else format(value, form)


def _figure(name: str, heading: str, form: str) -> Column:
    return Column(heading, lambda row: _number(row.figures.get(name, math.nan), form))


def _own(name: str, heading: str, form: str) -> Column:
    return Column(heading, lambda row: _number(getattr(row, name), form))


def _ratio(name: str, heading: str, form: str) -> Column:
    return Column(heading, lambda row: _number(row.ratios.get(name, math.nan), form))


def _peer(name: str, heading: str, form: str, field: str = "us") -> Column:
    return Column(heading, lambda row: _number(getattr(row.peers.get(name, _NONE), field), form))


def _spread(time: Row | Figures) -> str:
    return f"{time.us:.1f} ± {time.iqr_us:.1f}"


_CASE = Column("case", lambda row: row.name, text=True)
# Columns of runs that have them.
_MORE = (
    Column("of plain", lambda row: _number(1 / row.ratios.get("plain", math.nan), ".3f", "")),
    Column("at most", lambda row: _number(1 / row.targets.get("plain", math.nan), ".2f", "")),
    Column("peak MiB", lambda row: _number(row.peak_mib, ".0f", "")),
    Column("XLA's MiB", lambda row: _number(row.peers.get("xla", _NONE).peak_mib, ".0f", "")),
)


def _kernel(row: Row) -> str:
    return row.failure or f"`{row.kernel if row.variant == 'auto' else f'{row.kernel} (pinned)'}`"


def _beside_xla(rows: Sequence[Row]) -> list[Column]:
    """Columns of an operation that names none: ours beside XLA."""

    def timed(heading: str, cell: Callable[[Row], str]) -> Column:
        return Column(heading, lambda row: "-" if row.failure else cell(row))

    return [
        _CASE,
        timed("cutjax us", _spread),
        timed("TFLOP/s", lambda row: f"{row.tflops:.0f}"),
        timed("of the roofline", lambda row: f"{row.roofline:.2f}"),
        timed("XLA us", lambda row: _spread(row.peers["xla"]) if row.peers["xla"].us > 0 else "-"),
        timed("ratio", lambda row: _number(row.ratios.get("xla", math.nan), ".3f")),
        timed("target", lambda row: _number(row.targets.get("xla", math.nan), ".2f", "")),
        *(timed(*column[:2]) for column in _MORE if any(column.cell(row) for row in rows)),
        Column("kernel", _kernel, text=True),
    ]


def _form(form: str) -> Column:
    def cell(row: Row) -> str:
        return f"{row.us if row.figures['ships'] == form else row.peers['other'].us:.1f}"

    return Column(f"{form} us", cell)


_AIMS = ("target", "at most")
COLUMNS = {
    "calls": [
        Column("product, epilogue", lambda row: row.case, text=True),
        _form("inlined"),
        _form("called"),
        _peer("plain", "plain us", ".1f"),
        Column("ships", lambda row: row.figures["ships"], text=True),
        Column("of the other", lambda row: _number(1 / row.ratios.get("other", math.nan), ".3f")),
        Column("at most", lambda row: _number(1 / row.targets.get("other", math.nan), ".3f")),
    ],
    "compile": [
        Column("epilogue, result", lambda row: row.name, text=True),
        Column("tile", lambda row: row.figures.get("tile", "") or row.failure, text=True),
        _figure("cpu_s", "CPU seconds", ".2f"),
        _figure("most_s", "at most", ".1f"),
        _figure("cubin_bytes", "cubin bytes", ""),
        _figure("registers", "registers", ""),
        _figure("spill_bytes", "bytes spilled", ""),
    ],
    "mma_parts": [
        Column("product, part", lambda row: row.case, text=True),
        _own("us", "cutjax us", ".1f"),
        _peer("without", "us without it", ".1f"),
        _ratio("without", "as long without it", ".3f"),
        _ratio("xla", "as long by XLA", ".3f"),
        Column("kernel", lambda row: f"`{row.kernel}`", text=True),
    ],
    "grouped": [
        Column("case", lambda row: row.case, text=True),
        Column("product", lambda row: row.product, text=True),
        _own("us", "cutjax us", ".1f"),
        _own("tflops", "TFLOP/s", ".0f"),
        _ratio("dense", "dense us / ours", ".3f"),
        _ratio("torch", "torch us / ours", ".3f"),
        _ratio("copy", "of the copy rate", ".3f"),
        _peer("xla", "XLA us", ".0f"),
        _peer("pallas", "Pallas us", ".0f"),
        _peer("torch", "torch us", ".0f"),
        Column("kernel", lambda row: f"`{row.kernel}`", text=True),
    ],
    "moe": [
        Column("layer", lambda row: row.name, text=True),
        _figure("tokens", "tokens", ".0f"),
        _own("us", "cutjax us", ".0f"),
        _figure("rest_us", "all but products", ".0f"),
        _own("peak_mib", "peak MiB", ".0f"),
        _figure("xla_tokens", "XLA's tokens", ".0f"),
        _peer("xla", "XLA us", ".0f"),
        _peer("xla", "XLA's MiB", ".0f", "peak_mib"),
        _ratio("xla", "ratio", ".2f"),
    ],
}

COLUMNS["programs"] = [
    Column("program", lambda row: row.case, text=True),
    Column("way", lambda row: row.product + (f": {row.failure}" if row.failure else ""), text=True),
    Column("ms", lambda row: _number(row.us / 1e3, ".2f")),
    _ratio("jax", "ratio", ".3f"),
    Column("beside", lambda row: row.figures.get("baseline", ""), text=True),
    Column("target", lambda row: _number(row.targets.get("jax", math.nan), ".2f", "")),
    _own("peak_mib", "peak MiB", ".0f"),
    _own("error", "difference of the losses", ".1e"),
    _figure("gradients", "of the gradients", ".1e"),
    _figure("kernel_us", "kernel us", ".0f"),
]

COLUMNS["collective"] = [
    Column("program", lambda row: row.case, text=True),
    Column("way", lambda row: row.product + (f": {row.failure}" if row.failure else ""), text=True),
    Column("us", lambda row: _number(row.us, ".1f")),
    Column("ratio", lambda row: _number(next(iter(row.ratios.values()), math.nan), ".3f", "")),
    Column("target", lambda row: _number(next(iter(row.targets.values()), math.nan), ".2f", "")),
    _figure("hidden", "hidden", ".2f"),
    _figure("burst", "burst ratio", ".3f"),
    _own("gb_per_s", "GB/s sent", ".0f"),
    _own("peak_mib", "peak MiB", ".0f"),
    _own("error", "difference", ".1e"),
]

COLUMNS["sharded"] = COLUMNS["programs"]

COLUMNS["products"] = [
    _CASE,
    Column("of", lambda row: row.figures.get("of", ""), text=True),
    _peer("xla", "XLA us", ".1f"),
    _own("us", "untuned us", ".1f"),
    Column("tuned us", lambda row: _number(row.figures.get("tuned", {}).get("us") or math.nan, ".1f")),
    _ratio("xla", "ratio untuned", ".3f"),
    _ratio("xla, tuned", "ratio tuned", ".3f"),
    _ratio("sustained", "sustained untuned", ".3f"),
    _ratio("sustained, tuned", "sustained tuned", ".3f"),
    _own("roofline", "of the roofline", ".2f"),
    Column("kernel", _kernel, text=True),
]


def _columns(op: str, rows: Sequence[Row]) -> list[Column]:
    return COLUMNS.get(op) or _beside_xla(rows)


def markdown(op: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a table of an operation's rows, for readers: without what was aimed at."""
    columns = [column for column in _columns(op, rows) if column.heading not in _AIMS]
    yield f"| {' | '.join(column.heading for column in columns)} |"
    yield f"|{'|'.join('---' if column.text else '--:' for column in columns)}|"
    for row in rows:
        yield f"| {' | '.join(column.cell(row) for column in columns)} |"


def print_rows(op: str, rows: Sequence[Row], title: str) -> None:
    """Prints the table, the mean ratios where there are targets, and what failed; a row that missed one is red."""
    import rich.console
    import rich.table

    columns = _columns(op, rows)
    table = rich.table.Table(title=title, title_justify="left")
    for column in columns:
        kernel: dict[str, Any] = {"overflow": "ellipsis", "max_width": 36} if column.heading == "kernel" else {}
        table.add_column(column.heading, justify="left" if column.text else "right", no_wrap=True, **kernel)
    table.add_column("missed", no_wrap=True)
    for row in rows:
        missed = ", ".join(f"{key} {row.targets[key]:.2f}" for key in row.missed)
        cells = [column.cell(row).strip("`") for column in columns]
        table.add_row(*cells, missed, style="red" if missed or row.failure else None)
    console = rich.console.Console(width=None if os.isatty(1) else 240)
    console.print(table)
    for line in means(rows):
        console.print(line, highlight=False)
    failures = [f"{row.name}: {row.failure}" for row in rows if row.failure]
    failures += [f"{name}: {peer.failure}" for row in rows for name, peer in row.peers.items() if peer.failure]
    for failure in dict.fromkeys(failures):
        console.print(failure, highlight=False, markup=False)


def means(rows: Sequence[Row], label: str = "") -> Iterator[str]:
    """The geometric means of ratios that have a target, by peer and product."""
    for key, product in dict.fromkeys((key, row.product) for row in rows for key in row.targets):
        of = [row.ratios[key] for row in rows if row.product == product and key in row.targets and key in row.ratios]
        if len(of) > 1:
            whose = " ".join(filter(None, (label, product)))
            yield f"{whose}{whose and ': '}ratio to {key}: geometric mean {report.geometric_mean(of):.3f} of {len(of)}"
