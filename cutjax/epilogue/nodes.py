"""The parts of an epilogue: values, the operands they read and the outputs they make."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Node:
    """One value; its index in ``Epilogue.nodes`` names it.

    Attributes:
      op: "acc", "operand", "const", "iota", "rule", "random_bits" (threefry's, of the words of a key and of an index),
        or the name of an elementwise lax primitive.
      args: indices of earlier nodes.
      dtype: the result's.
      params: by op:
        acc, operand: ``(index,)``.
        const: ``(value,)``: a bool, an int or a float; -0.0, inf and nan as the strings that ``float`` reads, and
        complex numbers as those that ``complex`` reads, so that equal means the same bits.
        iota: ``("row",)``, ``("col",)`` or ``("batch", i)``, the position in the result, batch axes counted from the
        rows outwards; ``("row", i)`` and ``("col", i)`` count those of all matrices along the last i batch axes.
        rule: ``(rule, i)``. The value is the first argument's, and nothing is computed. The derivative is that of
        result i of the function ``rule`` (`rules.Rule`) of the other arguments.
        integer_pow: ``(y,)``. round: ``(lax.RoundingMethod as int,)``. reduce_precision: ``(exponent, mantissa)`` bits.
    """

    op: str
    args: tuple[int, ...] = ()
    dtype: str = "float32"
    params: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class OperandSpec:
    """An array operand by the axes of the result that it varies along.

    Attributes:
      dtype: its elements'.
      row, col: whether it varies along rows, along columns.
      batch: whether it varies along each of the last batch axes.
      group: whether each group of a grouped GEMM has its own, ``[..., groups, 1, n or 1]``; then ``row`` is False.
    """

    dtype: str
    row: bool
    col: bool
    batch: tuple[bool, ...]
    group: bool = False


@dataclasses.dataclass(frozen=True)
class Output:
    """One result: ``[..., m, n]``, or that reduced along "row" (over m), "col" (over n) or both.

    Where the rows of a product are several axes, the outer ones among them are batch axes here: "b0" is the first one
    from the rows outwards.

    Attributes:
      node: the value, or what is reduced.
      dtype: the result's.
      reduce: None, "sum", "max" or "min".
      axes: the axes reduced away; they are absent from the result's shape.
    """

    node: int
    dtype: str
    reduce: str | None = None
    axes: tuple[str, ...] = ()

    def places(self, rank: int) -> list[int]:
        """Returns the axes that are reduced away, of a result of that rank."""
        last = {"row": rank - 2, "col": rank - 1}
        return [last[axis] if axis in last else rank - 3 - int(axis[1:]) for axis in self.axes]
