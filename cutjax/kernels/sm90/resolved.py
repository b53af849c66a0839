"""The record of a resolved config, of which its text, arguments and cost are functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from cutjax.kernels import base
from cutjax.kernels.columns import each
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import operands, scales, windows
from cutjax.kernels.sm90.config import Sizes, Sums
from cutjax.kernels.sm90.phases import Phases
from cutjax.kernels.sums import blocks

FEW = 4  # cluster tiles along its own axis that an operand has at most, if shared memory keeps it,
LONG = 16  # and along the other axis at least
DEEP = 8192  # a contraction, of which blocks take tiles as they come to them: the counter cost nothing at 14336


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Resolved(base.Resolved):
    """One config resolved for one problem, or many, with columns of what differs among them.

    Attributes:
      way: how its operands are multiplied.
      sums: in which the products of a stage are added up before they are promoted.
      buffers: staging buffers a warpgroup: as many as there is room for, up to the whole of its accumulators.
      blocks_per_sm: thread blocks that share an SM.
      phases: of a convolution whose images are spread; None of any other. A phase is a matrix of the result.
    """

    config: Any
    way: operands.Way
    sums: Sums
    buffers: Any
    blocks_per_sm: Any
    phases: Phases | None = None

    @property
    def name(self) -> str:
        """The entry symbol, which is the same wherever the kernel is seen."""
        return self.config.name(self.asked if self.phases else self.problem)

    @property
    def in_parts(self) -> bool:
        """True if its results are sums that XLA takes further."""
        return windows.in_parts(self.problem, self.config.splits)

    @property
    def has_counter(self) -> bool:
        """True if a counter gives blocks their tiles as they come to them, since other kernels may hold some SMs.

        It costs a launch that clears it and, of short contractions, time for each tile. So the contraction is
        long, and there are several tiles for each block.
        """
        p, c, device = self.multiplied, self.config, self.problem.device
        alike = not (p.groups or p.symmetric or windows.view_of(p) or p.a.gathered or scales.scaled(p))
        if not device.several or device.shared or not alike or c.stream_k or c.parts > 1 or c.sliced or c.sms:
            return False
        return self.tiles > 2 * device.sms * self.blocks_per_sm // c.cluster and p.k >= DEEP

    @property
    def stored(self) -> Problem:
        """The problem as results are stored: `problem`, or that of complex numbers' parts, or of padded channels."""
        own = self.problem.a.dtype == operands.C64 or windows.view_of(self.problem)
        return self.multiplied if own else self.problem

    @property
    def given(self) -> Problem:
        """The problem of the arrays as they are given, in the order in which they are multiplied."""
        return self.problem.transposed if self.config.swap else self.problem

    @property
    def matrices(self) -> int:
        """Matrices of each result: its phases, where it is computed in such, and those of a batch."""
        return self.phases.count if self.phases else 1

    @property
    def k_blocks(self) -> Any:
        """Stages that a tile of the whole contraction takes; of phases, on average."""
        depth = self.config.depth(self.multiplied)
        return each(self._mean_pieces, depth) if self.phases else blocks(self.multiplied, depth) * len(self.way.pairs)

    @property
    def stays(self) -> tuple[Any, Any]:
        """True for a, and for b, where shared memory keeps it while tiles follow each other along the other axis.

        A stage has always the same k block then. Thin products of many rows are what this is for: their tiles would all
        read few lines of L2, which cannot serve them at the rate of memory.
        """
        p, c = self.multiplied, self.config
        plain = not any(x.view or x.scale or x.prologue for x in (p.a, *p.bs)) and len(self.way.pairs) == 1
        if not plain or p.a.bits != p.bs[0].bits or p.batch or p.groups or p.symmetric or self.phases:
            return False, False
        alike = (c.parts == 1) & (c.stream_k == 0) & (c.sliced == 0) & (c.stages % self.k_blocks == 0)
        rows, columns = self.rows, self.columns
        of_a, of_b = (rows <= FEW) & (columns >= LONG), (columns <= FEW) & (rows >= LONG)
        return alike & of_a, alike & of_b

    def _mean_pieces(self, depth: int) -> int:
        p = self.multiplied
        assert self.phases is not None
        pieces = [-(-taps * p.k // windows.taps(p) // depth) for taps in self.phases.taps]
        return max(1, round(sum(pieces) / len(pieces)))


def cluster_tile(config: Sizes) -> tuple[Any, Any]:
    """Returns the rows and columns that a cluster computes."""
    return config.bm * config.cluster_m, config.bn * config.cluster_n
