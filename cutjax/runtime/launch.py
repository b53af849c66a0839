"""The launch plan: everything the native launcher is told, validated here and encoded as attributes of a custom call.

This is the one module that loads the native extension.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.ffi
import numpy as np

from cutjax.runtime.tensor_map import MAX_BUFFERS, TensorMap, require

try:
    from cutjax import _ffi
except ImportError as error:
    raise ImportError(
        f"cutjax: the native launcher cannot be loaded ({error}); build it with `pip install .` in the repository"
    ) from error

TARGET = "cutjax_launch"

# The same format and bounds as ffi/launcher/plan.h.
FORMAT = 2
MAX_LAUNCHES = 16
MAX_PARAMS = 48


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A device pointer into a buffer."""

    buffer: int
    byte_offset: int = 0

    def __post_init__(self):
        require(0 <= self.buffer < MAX_BUFFERS, f"buffer {self.buffer} is not in 0..{MAX_BUFFERS - 1}")
        require(self.byte_offset >= 0, f"byte_offset {self.byte_offset} is negative")

    @property
    def words(self) -> tuple[int, ...]:
        """The record in the attribute ``plan``."""
        return (1, self.buffer, self.byte_offset)


@dataclasses.dataclass(frozen=True)
class Int32:
    """A 32-bit scalar, signed or unsigned."""

    value: int

    def __post_init__(self):
        require(-(2**31) <= self.value < 2**32, f"{self.value} does not fit 32 bits")

    @property
    def words(self) -> tuple[int, ...]:
        """The record in the attribute ``plan``."""
        return (2, self.value)


@dataclasses.dataclass(frozen=True)
class Int64:
    """A signed 64-bit scalar."""

    value: int

    def __post_init__(self):
        require(-(2**63) <= self.value < 2**63, f"{self.value} does not fit 64 bits")

    @property
    def words(self) -> tuple[int, ...]:
        """The record in the attribute ``plan``."""
        return (3, self.value)


@dataclasses.dataclass(frozen=True)
class Float32:
    """A 32-bit float, the nearest to ``value``."""

    value: float

    @property
    def words(self) -> tuple[int, ...]:
        """The record in the attribute ``plan``."""
        with np.errstate(over="ignore"):
            return (4, int(np.float32(self.value).view(np.int32)))


@dataclasses.dataclass(frozen=True)
class Float64:
    """A 64-bit float."""

    value: float

    @property
    def words(self) -> tuple[int, ...]:
        """The record in the attribute ``plan``."""
        return (5, int(np.float64(self.value).view(np.int64)))


Param = TensorMap | Pointer | Int32 | Int64 | Float32 | Float64


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch, complete but for the addresses.

    Attributes:
      kernel: entry symbol in ``cubin``.
      cubin: the compiled code.
      grid, block, cluster: extents along x, y, z; the grid in blocks, whole clusters.
      shared_bytes: dynamic shared memory of one block.
      blocks_per_sm: 0 launches ``grid`` as it is; more makes the kernel persistent: ``grid[0]`` is clipped to that many
        blocks for each SM of the device it runs on, in whole clusters.
      params: the kernel's parameters in order.
    """

    kernel: str
    cubin: bytes = dataclasses.field(repr=False)
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    blocks_per_sm: int = 0
    params: tuple[Param, ...] = ()

    def __post_init__(self):
        require(bool(self.kernel), "the kernel has no name")
        require(not set(self.kernel) & set(" \t\n\0"), f"the kernel's name {self.kernel!r} has a space in it")
        require(bool(self.cubin), "the cubin is empty")
        for what, high in (("grid", (2**31 - 1, 65535, 65535)), ("block", (1024, 1024, 64)), ("cluster", (8, 8, 8))):
            extents = getattr(self, what)
            require(
                len(extents) == 3 and all(1 <= e <= h for e, h in zip(extents, high, strict=True)),
                f"{what} {extents} is not within 1..{high}",
            )
        require(math.prod(self.block) <= 1024, f"block {self.block} has more than 1024 threads")
        require(math.prod(self.cluster) <= 8, f"cluster {self.cluster} has more than 8 blocks")
        require(
            all(g % c == 0 for g, c in zip(self.grid, self.cluster, strict=True)),
            f"grid {self.grid} is not a multiple of cluster {self.cluster}",
        )
        require(0 <= self.shared_bytes <= 2**20, f"shared_bytes {self.shared_bytes} is not in 0..2^20")
        require(0 <= self.blocks_per_sm <= 64, f"blocks_per_sm {self.blocks_per_sm} is not in 0..64")
        require(len(self.params) <= MAX_PARAMS, f"{len(self.params)} parameters are more than {MAX_PARAMS}")


@dataclasses.dataclass(frozen=True)
class Call:
    """One custom call: the kernels it launches, one after the other on its stream, and what it writes.

    Attributes:
      launches: what is launched, in order.
      results: what the kernels write, where that is not yet the operation's results.
      finish: then makes those of it and of the operation's arguments, in JAX.
      aliases: which arguments of the custom call share memory with which results; XLA copies such an argument where it
        is needed later.
      prepare: makes the kernels' arguments of the operation's, in JAX, where they are not the same.
      operand_orders: how the axes of the first arguments of the custom call lie in memory, the slowest first; () is
        row-major, as all others are. XLA copies what lies otherwise.
      result_orders: those of the first results.
    """

    launches: tuple[Launch, ...]
    results: tuple[jax.ShapeDtypeStruct, ...] = ()
    finish: Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]] | None = None
    aliases: tuple[tuple[int, int], ...] = ()
    prepare: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] | None = None
    operand_orders: tuple[tuple[int, ...], ...] = ()
    result_orders: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        count = len(self.launches)
        require(1 <= count <= MAX_LAUNCHES, f"a call has 1 to {MAX_LAUNCHES} launches, not {count}")
        for argument, result in self.aliases:
            require(
                0 <= argument < MAX_BUFFERS and 0 <= result < (len(self.results) or MAX_BUFFERS),
                f"no argument {argument} shares memory with a result {result}",
            )
        for side in (0, 1):
            shared = [pair[side] for pair in self.aliases]
            require(len(set(shared)) == len(shared), f"a buffer is aliased twice: {self.aliases}")

    def attributes(self) -> dict[str, str | bytes | np.ndarray | np.int64]:
        """Returns the attributes of the custom call ``cutjax_launch``, as ``jax.ffi.ffi_lowering`` takes them.

        ``plan`` is the number of launches and a record of each; launches with the same cubin share its bytes.
        """
        code, offsets, plan = b"", {}, [len(self.launches)]
        for launch in self.launches:
            if launch.cubin not in offsets:
                offsets[launch.cubin] = len(code)
                code += launch.cubin
            plan += [offsets[launch.cubin], len(launch.cubin), *launch.grid, *launch.block, *launch.cluster]
            plan += [launch.shared_bytes, launch.blocks_per_sm, len(launch.params)]
            plan += [word for param in launch.params for word in param.words]
        names = " ".join(launch.kernel for launch in self.launches)
        return {"format": np.int64(FORMAT), "kernel": names, "cubin": code, "plan": np.array(plan, np.int64)}


def register() -> None:
    """Makes the custom call known to JAX's CUDA platform; JAX keeps it until that platform is loaded, if ever."""
    # The type before the target: XLA refuses a target whose state it does not know.
    jax.ffi.register_ffi_type(f"{TARGET}_state", _ffi.state_type(), platform="CUDA")
    jax.ffi.register_ffi_target(TARGET, _ffi.handlers(), platform="CUDA", api_version=1)


register()
