"""The report of a tuning: times before and after, in a table and a picture."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from cutjax.kernels.problem import Problem
from cutjax.tuning.measure import DEVICE, HOST


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem that was measured.

    Attributes:
      problem: the product.
      count: how often it runs in one call.
      exact: False inside a while_loop or a cond, where ``count`` is of one iteration or of every branch.
      before, before_us: what ran until now, a kernel's name or "XLA", and its time; None where it failed.
      after, after_us: what runs from now on, and its time.
      xla_us: XLA's time; None where it was not measured.
      roofline: share of the device's roofline at ``after_us``, above 1 where inputs were still in L2.
      config: the config that runs from now on; None where XLA does.
      tried: number of candidates.
      dropped: name of each that failed or was wrong, and why.
    """

    problem: Problem
    count: int
    exact: bool
    before: str
    before_us: float | None
    after: str
    after_us: float | None
    xla_us: float | None
    roofline: float | None
    config: Any
    tried: int
    dropped: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A product that was not measured.

    Attributes:
      problem: the product, as printed.
      why: the reasons.
      count: how often it runs in one call.
    """

    problem: str
    why: str
    count: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Times of the products of a function; prints as a table.

    Attributes:
      rows: one for each distinct problem, in the order of the program.
      skipped: products that were not measured, with the reasons.
      device: the GPU.
      path: the file that the choices went to; None where to none.
      clock: "device", sums of kernels' times, or "host" where the device was not traced for each of the problems.
    """

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    device: str
    path: pathlib.Path | None
    clock: str = DEVICE

    @property
    def before_us(self) -> float:
        """The time of all measured products in one call, as it was."""
        return sum(row.count * row.before_us for row in self._both)

    @property
    def after_us(self) -> float:
        """The time of all measured products in one call with the fastest that was found."""
        return sum(row.count * row.after_us for row in self._both)

    @property
    def _both(self) -> list[Any]:
        return [row for row in self.rows if row.before_us is not None and row.after_us is not None]

    def __str__(self) -> str:
        lines = [["count", "problem", "before us", "after us", "XLA us", "roofline", "runs"]]
        for row in self.rows:
            lines.append(
                [
                    f"{row.count}{'' if row.exact else '*'}",
                    str(row.problem),
                    *(number(x) for x in (row.before_us, row.after_us, row.xla_us)),
                    "-" if row.roofline is None else f"{row.roofline:.0%}",
                    row.after if row.after == row.before else f"{row.after} (was {row.before})",
                ]
            )
        text = table(lines) if self.rows else ["nothing was measured"]
        if self._both:
            gain = self.before_us / self.after_us
            text.append(
                f"all products of one call: {self.before_us:.1f} us before, {self.after_us:.1f} after ({gain:.2f}x)"
            )
        if not all(row.exact for row in self.rows):
            text.append("* of one iteration, or of every branch: the number is known only at run time")
        text += self.notes()
        text.append(f"{self.device or 'no device'}" + (f"; choices are in {self.path}" if self.path else ""))
        return "\n".join(text)

    def notes(self) -> list[str]:
        """Returns lines of what was dropped, of what was not measured, and of the host's clock."""
        dropped = [f"dropped for {row.problem}: {name}: {why}" for row in self.rows for name, why in row.dropped]
        host = ["times are by the host's clock: the device was not traced"] if self.clock == HOST else []
        return dropped + host + [f"not measured: {x.problem} ({x.count} in a call): {x.why}" for x in self.skipped]

    def plot(self) -> Any:
        """Draws the times before, after and of XLA as bars, on a logarithmic scale; returns matplotlib's figure.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(f"Report.plot draws with matplotlib, which is not installed: {error}") from error
        figure = Figure(figsize=(8, 1.5 + 0.6 * len(self.rows)), layout="constrained")
        axes = figure.add_subplot()
        bars = {
            "before": [row.before_us for row in self.rows],
            "after": [row.after_us for row in self.rows],
            "XLA": [row.xla_us for row in self.rows],
        }
        for i, (label, times) in enumerate(bars.items()):
            places = [(at + 0.25 * (i - 1), us) for at, us in enumerate(times) if us is not None]
            axes.barh([at for at, _ in places], [us for _, us in places], height=0.23, label=label)
        axes.set_yticks(range(len(self.rows)), [f"{row.count} x {row.problem}" for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"us on {self.device}")
        if self.rows:
            axes.set_xscale("log")
            axes.legend()
        return figure


def number(us: float | None) -> str:
    """Returns a time for a table."""
    return "-" if us is None else f"{us:.1f}"


def table(lines: Sequence[Sequence[str]], left: Sequence[str] = ("problem", "runs")) -> list[str]:
    """Returns the rows of a table, the first its head, columns aligned to the right but for those named."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head = lines[0]
    text = [
        "  ".join(
            cell.ljust(w) if name in left else cell.rjust(w) for name, cell, w in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    return [text[0], "  ".join("-" * w for w in widths), *text[1:]]
