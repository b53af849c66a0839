"""The record of a resolved config, of which its launches and its time are functions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from cutjax.dtypes import short
from cutjax.kernels.direct import cost, toeplitz
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.geometry import Geometry
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem

ACCUMULATORS = {"float64": "float64"}  # of others float32


def accumulator_of(problem: Problem) -> str:
    """Returns the dtype in which products are added up."""
    return ACCUMULATORS.get(problem.a.dtype.name, "float32")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Resolved:
    """One config resolved for one problem.

    Attributes:
      problem, config: which.
      geometry: the problem's.
      converted: operands that are converted before, where it is the kernel of a narrow problem's wide one.
    """

    problem: Problem
    config: Config
    geometry: Geometry
    converted: tuple[Prepared, ...] = ()

    @functools.cached_property
    def shape(self) -> cost.Shape:
        """The sizes of a thread's work and of the launch."""
        return cost.Shape(self.problem, self.config, self.geometry)

    @functools.cached_property
    def tensor(self) -> toeplitz.Shape:
        """The sizes of the same of a kernel by Toeplitz matrices."""
        return toeplitz.Shape(self.problem, self.config, self.geometry)

    @property
    def name(self) -> str:
        """The entry symbol of the first launch, which says what is compiled into it."""
        p, c, g = self.problem, self.config, self.geometry
        axes = g.view
        by = {"s": axes.strides, "d": axes.dilation, "u": axes.spread}
        steps = "".join(f"_{x}{'x'.join(map(str, sizes))}" for x, sizes in by.items() if set(sizes) != {1})
        window = "x".join(map(str, axes.window))
        dtypes = short(p.a.dtype.name) + ("" if p.out_dtype == p.a.dtype else short(p.out_dtype.name))
        of = f"_c{g.channels}" * (g.channels > 1) + f"_m{g.multiplier}" * (g.multiplier > 1)
        kind = "weights" if g.gradient else "conv" + "_k" * self.k_major
        if c.toeplitz:
            kind = "toeplitz_weights" if g.gradient else "toeplitz"
            read = "x".join(map(str, dict.fromkeys(self.tensor.read)))
            thread = f"{self.tensor.strips}x{self.tensor.subs}_x{read}_w{c.lanes}_s{c.ahead}_b{c.blocks}"
        elif self.shape.slides:
            kind = "slide"
            thread = f"{c.pairs}_a{c.ahead}_l{self.shape.lanes}x{self.shape.across}_b{c.blocks}_n{g.pairs}"
        else:
            thread = f"{c.pairs}x{c.strip}_a{c.ahead}_l{self.shape.lanes}x{self.shape.across}_b{c.blocks}"
        low = f"_r{g.rows.low}x{g.columns.low}" * bool(g.rows.low or g.columns.low)
        digest = "" if p.plain else f"_e{p.epilogue.digest}"
        return f"direct_{dtypes}_{kind}_{window}{steps}{low}{of}_{thread}{digest}"

    @property
    def k_major(self) -> bool:
        """True if the weights' channels of the result lie before those of the image, of which there are several."""
        several = self.geometry.channels * self.geometry.multiplier > 1
        return several and self.problem.bs[0].contiguous == "k"

    @property
    def parts(self) -> int:
        """Parts of a weight gradient, or of the reductions of a result."""
        return self.tensor.parts if self.config.toeplitz else self.shape.parts

    @property
    def scratch(self) -> jax.ShapeDtypeStruct:
        """The parts of a weight gradient."""
        g = self.geometry
        return jax.ShapeDtypeStruct((self.parts, g.taps, g.pairs), np.dtype(accumulator_of(self.problem)))
