"""The record of a region: products with the elementwise equations around them that one kernel can compute."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from cutjax.epilogue.flatten import line_of
from cutjax.fusion.form import Form


class Stop(NamedTuple):
    """An operation that ends a tail, and why where that does not go without saying."""

    eqn: Any
    why: str

    def __str__(self) -> str:
        return f"{self.eqn.primitive.name} at {line_of(self.eqn)}{self.why}"


@dataclasses.dataclass
class Region:
    """Equations that one kernel computes.

    Attributes:
      products: the products' equations.
      moves: the equations that transpose the product.
      found: their form.
      accumulators: the variables that are the products, transposed where the form is.
      members: all equations that are computed in the kernel, the products among them, in order.
      inputs: the variables that these read, the operands of the products first: the left one, then the right ones.
      results: the variables that the kernel makes: of full size, then reductions.
      stops: why the tail ends: operations that read a value of it and stayed outside.
    """

    products: tuple[int, ...]
    moves: set[int]
    found: Form
    accumulators: tuple[Any, ...]
    members: list[int]
    inputs: list[Any]
    results: list[Any]
    stops: list[str | Stop]
    made: Any = None  # the equation, once it is built

    def equation(self) -> Any:
        """Returns the equation that takes the place of the members."""
        return self.made

    @functools.cached_property
    def size(self) -> int:
        """The number of elements of the result."""
        return math.prod(self.found.shape)

    @property
    def reduces(self) -> bool:
        """True if the kernel makes a reduction too."""
        return any(math.prod(x.aval.shape) != self.size for x in self.results)

    @property
    def tail(self) -> list[int]:
        """The members that are no products, nor transpose one."""
        return [i for i in self.members if i not in self.products and i not in self.moves]
