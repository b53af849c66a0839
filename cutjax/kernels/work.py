"""The work of a problem: its floating-point operations, and the bytes that it moves at least."""

from __future__ import annotations

import functools
import math

import numpy as np

from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.operand import Groups, Im2col, Operand


class Work:
    """The part of a ``Problem`` that counts, and what it counts by."""

    m: int
    n: int
    k: int
    a: Operand
    bs: tuple[Operand, ...]
    groups: Groups | None
    batch: tuple[int, ...]
    epilogue: Epilogue
    symmetric: bool
    products: int
    beside: tuple[int, int]
    batch_groups: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def flops(self) -> int:
        """Floating-point operations of the products: 2 m n k for each matrix of the result.

        Where that is symmetric, of what is on and below its diagonal.
        """
        if self.symmetric:
            return self.m * (self.m + 1) * self.k * self.batch_size
        if self.groups and not self.groups.count:
            return 0
        elements = self.a.view.multiplied if isinstance(self.a.view, Im2col) else self.m * self.k
        return 2 * elements * self.n * self.batch_size * self.products

    @functools.cached_property
    def result_bytes(self) -> int:
        """Bytes of all results."""
        full = self.m * self.n * self.results
        axes = {"row": self.m, "col": self.n}
        return sum(
            full // math.prod(axes[x] for x in out.axes) * np.dtype(out.dtype).itemsize for out in self.epilogue.outputs
        )

    @functools.cached_property
    def bytes(self) -> int:
        """The fewest bytes device memory must move: each operand read once, each result written once."""
        (of_a, *of_bs), (count_a, count_b) = self.matrices, self.beside
        a = count_a * of_a * self.a.read(self.m, self.k)
        found = (x * b.read(self.n, self.k) for b, x in zip(self.bs[:count_b], of_bs, strict=False))
        b = 0 if self.symmetric else sum(found)
        operands = 0
        for i, spec in enumerate(self.epilogue.operands):
            matrices = math.prod(size for size, *moves in self.batch_groups if moves[2 + i])
            operands += (
                matrices * (self.m if spec.row else 1) * (self.n if spec.col else 1) * np.dtype(spec.dtype).itemsize
            )
        return a + b + operands + self.result_bytes

    @functools.cached_property
    def batch_size(self) -> int:
        """Number of matrices along the batch axes."""
        return math.prod(self.batch)

    @functools.cached_property
    def results(self) -> int:
        """Number of matrices in the result: of each group one, where groups are of the contraction."""
        return self.batch_size * self.groups_along("k")

    @functools.cached_property
    def matrices(self) -> tuple[int, ...]:
        """Number of matrices in a, and in each b: of each group one, where groups are of the other's rows."""
        of_rows, of_columns = self.groups_along("m"), self.groups_along("n")
        return (math.prod(self.a.batch) * of_columns, *(math.prod(b.batch) * of_rows for b in self.bs))

    @property
    def divided(self) -> str:
        """The axis that groups divide, "m", "k" or "n"; "" where there are none."""
        return self.groups.axis if self.groups else ""

    def groups_along(self, axis: str) -> int:
        """Returns the number of groups that divide an axis; 1 where none do."""
        return self.groups.count if self.groups and self.groups.axis == axis else 1
