"""The record of a resolved config, of which its text, arguments and cost are functions."""

from __future__ import annotations

import dataclasses

from cutjax.dtypes import short
from cutjax.kernels import base
from cutjax.kernels.halo.config import Config
from cutjax.kernels.halo.geometry import Geometry


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Resolved(base.Resolved):
    """One config resolved for one problem.

    Attributes:
      geometry: of its steps.
    """

    config: Config
    geometry: Geometry

    @property
    def name(self) -> str:
        """The entry symbol, which says what is compiled into it."""
        p, c, g = self.problem, self.config, self.geometry
        name = f"halo_{short(p.a.dtype.name)}"
        if p.plain and p.out_dtype != p.a.dtype:
            name += short(p.out_dtype.name)
        name += f"_{p.layout}_{g.axes}d_c{g.chunk}_{c.consumers}x{c.bn}_t{g.stacked}_s{c.stages}_{c.along}"
        name += "_packed" * (g.packing is not None) + "_grouped" * (g.view.groups > 1)
        if not p.plain:
            name += f"_e{p.epilogue.digest}"
        return name + f"_pitch{self.staging.pitch}" * (self.staging.pitch < 16)
