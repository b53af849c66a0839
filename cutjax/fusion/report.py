"""The fate of each product of a program that was rewritten, for ``cutjax.explain`` to show."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from cutjax.dtypes import short
from cutjax.epilogue.flatten import line_of
from cutjax.fusion.region import Region


@dataclasses.dataclass
class Report:
    """One product of a program.

    Attributes:
      eqn: its equation.
      runs: "fused", "kernel" where the product alone became one, "float8", or "XLA".
      reason: the price, or why there is no kernel.
      ends: what ends its tail.
      kernel: our product's equation where it was fused, else None.
      products: how many products became one.
      wide: why it is no product of float8, where such were asked for.
    """

    eqn: Any
    runs: str = "XLA"
    reason: Any = ""
    ends: Sequence[Any] = ()
    kernel: Any = None
    products: int = 1
    wide: str = ""

    @property
    def why(self) -> str:
        """The prices, or why there is no kernel, as text: only what is shown is written."""
        return str(self.reason)

    @property
    def product(self) -> str:
        """Its operands and the line it is on."""
        shapes = (f"{short(x.aval.dtype.name)}{list(x.aval.shape)}" for x in self.eqn.invars)
        return f"{' x '.join(shapes)} at {line_of(self.eqn)}"

    @property
    def stops(self) -> tuple[str, ...]:
        """The operations at which its tail ends, each with its line and the reason where it is no plain one."""
        return tuple(dict.fromkeys(map(str, self.ends)))

    @property
    def epilogue(self) -> str:
        """The tail that was fused, as an expression; "" where nothing was."""
        return "" if self.kernel is None else str(self.kernel.params["epilogue"])

    def fused(self, region: Region, inner: Any, reason: Any) -> None:
        """Notes that the product was fused."""
        self.runs, self.reason, self.ends = "fused", reason, region.stops
        self.kernel, self.products = inner, len(region.products)

    def __str__(self) -> str:
        parts = [f"{self.runs}: {self.product}"]
        if self.epilogue:
            beside = f" of {self.products} products" if self.products > 1 else ""
            parts.append(f"epilogue{beside} {self.epilogue}")
        if self.stops:
            parts.append(f"stopped by {', '.join(self.stops)}")
        if self.why:
            parts.append(self.why)
        if self.wide:
            parts.append(f"not float8: {self.wide}")
        return "; ".join(parts)


class _Collectors(threading.local):
    def __init__(self) -> None:
        self.open: tuple[list[Report], ...] = ()


_collectors = _Collectors()


@contextlib.contextmanager
def collected() -> Iterator[list[Report]]:
    """Gathers in a ``with`` block the reports of programs that this thread rewrites."""
    before, found = _collectors.open, []
    _collectors.open = (*before, found)
    try:
        yield found
    finally:
        _collectors.open = before


def tell(reports: Sequence[Report]) -> None:
    """Hands the reports of a program to all who gather them."""
    for found in _collectors.open:
        found += reports
