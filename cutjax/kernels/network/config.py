"""The way in which a network is computed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """The way in which a network is computed.

    Attributes:
      warps: of a block.
      tiles: of 16 rows, of a warp.
      chained: whether rows go from a layer to the next in registers; else each thread stashes them.
      memory: whether the stash is in global memory, not in shared.
      memory_sums: whether sums of outer products are in global memory between tiles, not in registers.
      blocks: on an SM.
      planes: whether factors of outer products are in shared memory from when they are made to when they are read last;
        else they are stashed, and staged there for each sum.
      wgmma: whether warpgroups multiply all columns of a stage at once, where a matrix has a multiple of 64 columns;
        with planes, outer products too.
      apart: with planes, whether a second kernel sums the outer products of two wide factors, whose planes are in
        global memory; those of narrow ones each warp adds up of its own rows.
      copied: with sums apart, whether those planes go to memory by bulk copies from shared memory, functions read
        activations in registers, and warpgroups sum the narrow outer products.
    """

    warps: int
    tiles: int
    chained: bool = True
    memory: bool = False
    memory_sums: bool = False
    blocks: int = 1
    planes: bool = False
    wgmma: bool = False
    apart: bool = False
    copied: bool = False

    @property
    def outer_wgmma(self) -> bool:
        """True if a warpgroup multiplies outer products of its rows."""
        return self.wgmma and self.planes and not self.apart
