"""The problem of a network: a program for so many rows and networks, on a device."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from cutjax import dot_precision
from cutjax.dot_precision import Canonical
from cutjax.dtypes import short
from cutjax.kernels.device import Device
from cutjax.kernels.network.program import Program


@dataclasses.dataclass(frozen=True)
class Problem:
    """A program that is local to rows, of the arrays that a primitive has.

    Attributes:
      program: what is computed.
      rows: of each network.
      networks: how many.
      given: of each input its dtype, and whether each network has its own.
      dtypes: of the results.
      dtype: in which rows and matrices are multiplied.
      precision: of the products.
      device: that it is for.
    """

    program: Program
    rows: int
    networks: int
    given: tuple[tuple[str, bool], ...]
    dtypes: tuple[str, ...]
    dtype: np.dtype
    precision: Canonical
    device: Device

    @property
    def arch(self) -> str:
        """The architecture to compile for."""
        return self.device.arch

    @property
    def flops(self) -> int:
        """FLOP of all products; 0 where there is nothing to compute."""
        if not self.rows * self.networks:
            return 0
        return self.networks * max(self.program.flops(self.rows), self.rows * bool(self.program.outputs))

    @property
    def bytes(self) -> int:
        """Bytes of the rows that are read and written; what rows share is nothing beside them."""
        kinds = self.program.kinds
        read = sum(k.sizes[0] * np.dtype(d).itemsize for k, (d, _) in zip(self.program.inputs, self.given, strict=True)
                   if k.name == "rows")  # fmt: skip
        written = sum(
            kinds[x].sizes[0] * np.dtype(name).itemsize
            for x, name in zip(self.program.outputs, self.dtypes, strict=True)
            if kinds[x].name == "rows"
        )
        return self.networks * self.rows * (read + written)

    @functools.cached_property
    def math(self) -> str | tuple[str, ...]:
        """The way operands are multiplied, as ``Problem.math`` of a product, or the reasons against a kernel."""
        return dot_precision.math(self.precision, self.dtype, np.dtype(np.float32), self.device.tf32)

    def __str__(self) -> str:
        several = f"{self.networks} networks of " if self.networks > 1 else "a network of "
        return f"{several}{self.rows} rows {short(self.dtype.name)}, {self.program}"
