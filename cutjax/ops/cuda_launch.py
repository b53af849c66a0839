"""Kernels of the user's own: the text, the launches for given arrays, and the call compiled of both."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cutjax.dtypes import short
from cutjax.ops.cuda_buffer import Buffer
from cutjax.runtime import compiler, cubin, sources
from cutjax.runtime.choice import Choice
from cutjax.runtime.launch import Call, Float32, Float64, Int32, Int64, Launch, Param, TensorMap

# The device headers on offer, and those that each needs before it.
HEADERS = {
    "common/atoms.cuh": (),
    "sm90/atoms.cuh": ("common/atoms.cuh", "common/tma.cuh"),
    "common/math.cuh": ("common/atoms.cuh", "common/tma.cuh", "sm90/atoms.cuh", *sources.MATH[:-1]),
    "common/tma.cuh": ("common/atoms.cuh",),
}
_MAX_GRID_Z = 65535


def _int(x: int) -> int:
    if not -(2**31) <= x < 2**31:
        raise ValueError(f"launch: the argument {x} does not fit a C++ int; np.uint32 and np.int64 say otherwise")
    return x


_SCALARS: dict[type, Callable[[Any], Param]] = {
    int: lambda x: Int32(_int(x)),
    np.int32: lambda x: Int32(int(x)),
    np.uint32: lambda x: Int32(int(x)),
    np.int64: lambda x: Int64(int(x)),
    float: Float32,
    np.float32: Float32,
    np.float64: Float64,
}


@dataclasses.dataclass(frozen=True)
class CudaLaunch:
    """One launch of a kernel, as the function ``launch`` of a ``cutjax.cuda_kernel`` describes it.

    Attributes:
      grid, block: blocks in the grid, and threads in a block: a number, or up to three along x, y and z.
      cluster: blocks in a cluster.
      shared_bytes: dynamic shared memory of a block.
      arguments: the kernel's parameters in order. A ``Buffer`` is the pointer to it, ``buffer.pointer(i)`` one to an
        element, ``buffer.tensor_map(...)`` or ``buffer.im2col_map(...)`` a tensor map. A number is a scalar: an ``int``
        or ``float`` of Python is a C++ ``int`` or ``float``, one of ``np.int32``, ``uint32``, ``int64``, ``float32``,
        ``float64`` what it says. By default, the pointers to all operands and then to all results.
      constants: integers and booleans that the text knows by these names, as ``constexpr``: each value is compiled.
      entry: the kernel in the text; by default that of the ``cuda_kernel``.
      blocks_per_sm: 0 launches the grid as it is; more makes the kernel persistent: the grid's x is cut to that many
        blocks for each SM of the device it runs on.

    Raises:
      TypeError, ValueError: if a field is none of the above; not here, but when the function of the ``cuda_kernel`` is
        called, on every platform.

    Examples:
      >>> import cutjax, jax
      >>> def launch(x, y):  # a thread for each element; the kernel's parameters are two pointers and an int
      ...     return cutjax.CudaLaunch(grid=-(-x.size // 256), block=256, arguments=(x, y, x.size))
      >>> x = jax.ShapeDtypeStruct((1000,), "float32")
      >>> launch(x, x).grid
      4
    """

    grid: int | Sequence[int]
    block: int | Sequence[int]
    cluster: int | Sequence[int] = 1
    shared_bytes: int = 0
    arguments: Sequence[Any] | None = None
    constants: Mapping[str, int | bool] = dataclasses.field(default_factory=dict)
    entry: str | None = None
    blocks_per_sm: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """The arguments of ``cutjax.cuda_kernel``. Two are equal where they are one object."""

    name: str
    entry: str
    source: str
    file: str
    headers: tuple[str, ...]
    out: Callable[..., Any]
    launch: Callable[..., Any]
    reference: Callable[..., Any] | None
    vmap: str

    def __post_init__(self):
        for what in ("entry", "name"):
            if not re.fullmatch(r"[A-Za-z_]\w*", value := getattr(self, what)):
                raise ValueError(f"cuda_kernel: {what} must be an identifier, got {value!r}")
        if unknown := sorted(set(self.headers) - set(HEADERS)):
            raise ValueError(f"cuda_kernel: no header {unknown[0]!r}, there are {', '.join(HEADERS)}")
        self.check_entry(self.entry)

    def __repr__(self) -> str:
        return f"<cuda_kernel {self.name}>"

    def check_entry(self, entry: str) -> None:
        """Raises a ValueError where the text does not name the kernel."""
        if not re.search(rf"\b{re.escape(entry)}\s*\(", self.source):
            raise ValueError(f"{self.name}: no kernel {entry!r} in the text of {self.file}")

    def outputs(self, avals: Iterable[Any], static: Mapping[str, Any]) -> tuple[tuple[jax.ShapeDtypeStruct, ...], bool]:
        """Returns shape and dtype of each result, and True if the result is one array rather than a tuple."""
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        try:
            inspect.signature(self.out).bind(*avals, **static)
        except TypeError as error:
            given = f"{len(avals)} arrays" + "".join(f", {name}=" for name in static)
            raise TypeError(f"{self.name}: {error}: out takes {inspect.signature(self.out)}, got {given}") from None
        found = self.out(*avals, **static)
        single = hasattr(found, "shape") and hasattr(found, "dtype")
        results = (found,) if single else found
        if not isinstance(results, tuple | list) or not all(
            hasattr(x, "shape") and hasattr(x, "dtype") for x in results
        ):
            raise TypeError(f"{self.name}: out must return a jax.ShapeDtypeStruct or a tuple of them, got {found!r}")
        if not results:
            raise TypeError(f"{self.name}: out returns no result")
        canonical = jax.dtypes.canonicalize_dtype
        return tuple(jax.ShapeDtypeStruct(tuple(x.shape), canonical(x.dtype)) for x in results), single


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arrays of a call: ``str`` shows them."""

    name: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def flops(self) -> int:
        """0 where there is nothing to compute; the number itself is not known."""
        return sum(math.prod(x.shape) for x in self.results)

    def __str__(self) -> str:
        operands, results = (", ".join(map(_short, arrays)) for arrays in (self.operands, self.results))
        return f"{self.name}({operands}) -> {results}"


@dataclasses.dataclass(frozen=True, eq=False)
class Launches:
    """The launches of a call of a user's kernel.

    Attributes:
      text: the kernel's own.
      launches: each with its constants and without its code.
      arch: the architecture to compile for.
    """

    text: Kernel
    launches: tuple[tuple[Launch, tuple[tuple[str, int], ...]], ...]
    arch: str

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.text.name

    def call(self) -> Call:
        """Compiles the text, or finds it compiled, and returns the call."""
        return Call(tuple(self._compiled(*launch) for launch in self.launches))

    def _compiled(self, launch: Launch, constants: tuple[tuple[str, int], ...]) -> Launch:
        kernel = self.text
        headers = dict.fromkeys(part for name in kernel.headers for part in (*HEADERS[name], name))
        parts = [*headers, f'#undef KERNEL\n#line 1 "{kernel.file}"\n{kernel.source}\n']
        text = sources.source(kernel.name, dict(constants), parts)
        image = compiler.compile_kernel(text, name=kernel.name, arch=self.arch).image
        found = cubin.kernels(image)
        if launch.kernel not in found:
            there = f"its kernels are {', '.join(found)}" if found else "it has no kernel"
            raise ValueError(
                f'{kernel.name}: the compiled text has no kernel {launch.kernel!r} ({there}): declare it extern "C" '
                "__global__ void"
            )
        takes, given = found[launch.kernel], tuple(map(_param_bytes, launch.params))
        if takes not in (None, given):
            raise ValueError(
                f"{kernel.name}: {launch.kernel} takes {_parameters(takes or ())}, "
                f"the launch passes {_parameters(given)}"
            )
        return dataclasses.replace(launch, cubin=image)


@functools.lru_cache(maxsize=4096)
def choose(
    kernel: Kernel,
    examples: tuple[jax.ShapeDtypeStruct, ...],
    shared: tuple[bool, ...],
    static: tuple[Any, ...],
    batch: int | None,
    arch: str,
) -> Choice[Problem, Launches]:
    """Returns the choice for operands on CUDA: the launches that the user described, or the reasons why there are none.

    Args:
      kernel: the user's.
      examples: the operands, without an axis of examples.
      shared: of each, whether all examples have the same.
      static: the keyword arguments, see ``keywords``.
      batch: the number of examples; None outside ``jax.vmap``.
      arch: the architecture to compile for.

    Raises:
      TypeError, ValueError: if what the user's functions return is not a launch.
    """
    outs, _ = kernel.outputs(examples, keywords(static))
    problem = Problem(
        kernel.name,
        tuple(x if alone else _examples(x, batch) for x, alone in zip(examples, shared, strict=True)),
        tuple(_examples(x, batch) for x in outs),
    )
    buffers = []
    for x, alone in zip((*examples, *outs), (*shared, *(False for _ in outs)), strict=True):
        stride = np.int64(0 if alone else math.prod(x.shape))
        count = 1 if alone or batch is None else batch
        buffers.append(Buffer(x.shape, np.dtype(x.dtype), len(buffers), count, stride, kernel.vmap == "grid"))
    if problem.flops == 0:
        return Choice(problem, ("the results are empty",))
    if batch is not None and kernel.vmap == "reference":
        return Choice(problem, ("vmap='reference': the reference runs under jax.vmap",))
    if batch is not None and batch > _MAX_GRID_Z:
        reason = f"vmap of {batch} examples: the z axis of a grid has at most {_MAX_GRID_Z}"
        return Choice(problem, (reason,))
    try:
        described = kernel.launch(*buffers, **keywords(static))
        several = described if isinstance(described, tuple | list) else (described,)
        launches = tuple(_launch(kernel, x, buffers, batch or 1) for x in several)
        Call(tuple(launch for launch, _ in launches))
    except NotImplementedError as error:
        return Choice(problem, (str(error) or "launch raises NotImplementedError",))
    except ValueError as error:
        if not str(error).startswith("launch: "):
            raise
        raise ValueError(f"{kernel.name}: {error}") from None
    return Choice(problem, ("launched as described",), Launches(kernel, launches, arch))


def keywords(static: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the keyword arguments of a call from their hashable form among a primitive's parameters."""
    return {name: value for name, value, _ in static}


def _launch(
    kernel: Kernel, described: Any, buffers: Sequence[Buffer], batch: int
) -> tuple[Launch, tuple[tuple[str, int], ...]]:
    """Returns the launch without its code, and the constants of its text."""
    if not isinstance(described, CudaLaunch):
        raise TypeError(f"{kernel.name}: launch must return a cutjax.CudaLaunch or a tuple of them, got {described!r}")
    grid = _extents(described.grid, "grid", kernel.name)
    if kernel.vmap == "grid":
        if grid[2] != 1:
            raise ValueError(f"{kernel.name}: the grid is {grid}, but where vmap='grid' its z axis is that of examples")
        grid = (*grid[:2], batch)
    for name, value in described.constants.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not isinstance(value, bool | int | np.integer):
            raise TypeError(f"{kernel.name}: constants are names and integers or booleans, got {name!r}: {value!r}")
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{kernel.name}: the constant {name} = {value} does not fit an int")
    constants = {name: x if isinstance(x, bool) else int(x) for name, x in described.constants.items()}
    if described.entry is not None:
        kernel.check_entry(described.entry)
    arguments = buffers if described.arguments is None else described.arguments
    launch = Launch(
        kernel=described.entry or kernel.entry,
        cubin=b"compiled later",
        grid=grid,
        block=_extents(described.block, "block", kernel.name),
        cluster=_extents(described.cluster, "cluster", kernel.name),
        shared_bytes=operator.index(described.shared_bytes),
        blocks_per_sm=operator.index(described.blocks_per_sm),
        params=tuple(_param(x, i, kernel.name) for i, x in enumerate(arguments)),
    )
    return launch, tuple(constants.items())


def _extents(value: Any, what: str, where: str) -> tuple[int, int, int]:
    try:
        sizes = [operator.index(x) for x in (value if isinstance(value, tuple | list) else (value,))]
    except TypeError:
        raise TypeError(f"{where}: {what} must be an int or up to three, got {value!r}") from None
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{where}: {what} must be an int or up to three, got {value!r}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _param(value: Any, i: int, where: str) -> Param:
    if isinstance(value, Buffer):
        return value.pointer()
    if isinstance(value, Param):
        return value
    if record := _SCALARS.get(type(value)):
        return record(value)
    hint = "an array is an operand of the function" if isinstance(value, jax.Array | np.ndarray) else "see CudaLaunch"
    raise TypeError(f"{where}: argument {i} of the launch cannot be of type {type(value).__name__}: {hint}")


def _param_bytes(param: Param) -> int:
    return {TensorMap: 128, Int32: 4, Float32: 4}.get(type(param), 8)


def _parameters(sizes: tuple[int, ...]) -> str:
    return f"{len(sizes)} parameters of {', '.join(map(str, sizes))} bytes" if sizes else "no parameter"


def _examples(x: jax.ShapeDtypeStruct, batch: int | None) -> jax.ShapeDtypeStruct:
    return x if batch is None else jax.ShapeDtypeStruct((batch, *x.shape), x.dtype)


def _short(x: jax.ShapeDtypeStruct) -> str:
    return f"{short(np.dtype(x.dtype).name)}[{','.join(map(str, x.shape))}]"
