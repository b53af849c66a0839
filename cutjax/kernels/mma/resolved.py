"""The record of a resolved config, of which its text, arguments and cost are functions."""

from __future__ import annotations

import dataclasses

from cutjax.kernels import base
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import Math
from cutjax.kernels.operand import Pixels
from cutjax.kernels.problem import Problem
from cutjax.runtime.architectures import number


def in_units(problem: Problem, way: Math, units: tuple[int, int], wm: int, wn: int) -> bool:
    """True of elements multiplied one by one that are loaded 16 bytes at a time (ffi/device/mma/units.cuh).

    They are where they have 4 bytes, rows of both arrays begin at multiples of 16, and warps have tiles of 64 x 64:
    others were not measured.
    """
    plain = all(operand.view is None and operand.prologue is None for operand in (problem.a, problem.bs[0]))
    whole = wm == wn == 64 and units == (16, 16) and number(problem.arch) >= 80
    return way.fragments == "fma" and way.words == 4 and plain and whole


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Resolved(base.Resolved):
    """One config resolved for one problem.

    Attributes:
      way: how the operands are multiplied.
      units: bytes that rows of a, and of b, begin at multiples of.
      pixels: what rows of the result are, where it is that of a phase.
    """

    config: Config
    way: Math
    units: tuple[int, int]
    pixels: Pixels | None = None

    @property
    def name(self) -> str:
        """The entry symbol, which is the same wherever the kernel is seen."""
        name = self.config.name(self.problem)
        units = "" if self.units == (16, 16) else f"_u{self.units[0]}_{self.units[1]}"
        pitch = self.staging.pitch
        odd = "_odd" * (self.config.swap and not self.staging.even)
        units += "_phases" * (self.pixels is not None)
        return name + units + (f"_pitch{pitch}" if pitch < 16 else "") + odd

    @property
    def average_tiles(self) -> int:
        """The number of tiles of all splits, where groups are of average size."""
        p = self.multiplied
        if p.symmetric:
            return self.tiles * self.config.splits
        groups = p.groups.count if p.groups else 1
        return self.rows * self.columns * p.batch_size * groups * self.config.splits

    @property
    def depth(self) -> float:
        """The contraction of a tile: of a group of average size, where k has groups, and of one split."""
        p = self.multiplied
        return p.k / p.groups_along("k") / self.config.splits

    @property
    def slices(self) -> int:
        """Slices of a stage that one warp multiplies."""
        depth = self.config.bk // self.config.sliced_k
        return depth // self.way.slice(self.config, self.problem.arch)

    @property
    def load_turns(self) -> int:
        """Slices of a stage beside which a later stage is loaded, a turn of its loads each."""
        if self.way.fragments == "fma":
            return 1
        if self.config.tma:
            return self.slices // 2  # those before the one beside which it is loaded
        return 1 if self.config.wm * self.config.wn > 2048 else min(self.slices - 1, 3)

    @property
    def numbers(self) -> int:
        """Real numbers of an element."""
        return 2 if self.problem.a.dtype.kind == "c" else 1

    @property
    def in_units(self) -> bool:
        """As the function of that name."""
        return in_units(self.multiplied, self.way, self.units, self.config.wm, self.config.wn)

    @property
    def slices_at_once(self) -> int:
        """Slices that the code of one pass multiplies, an even number.

        Of FMA it is few: about 256 products. The compiler finds registers in different banks for what each reads then.
        """
        if self.way.fragments != "fma":
            return self.slices
        products = self.config.wm * self.config.wn // 32 * self.problem.products * self.way.instructions
        return next(n for n in (2, 4, 8) if n * products >= 256 or n == 8)
