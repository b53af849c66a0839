"""cutjax.cuda_kernel: a kernel of the user's own as a JAX function."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from cutjax.binding.define import define
from cutjax.binding.lowering import PARTITIONED, Target
from cutjax.binding.rules import batch_axis, check_varying, is_zero, match_varying, zero_tangent
from cutjax.ops import cuda_launch
from cutjax.primitives.arrays import unwrapped
from cutjax.runtime import backends, compiler

VMAP = ("reference", "grid")


def cuda_kernel(
    source: str | os.PathLike[str],
    entry: str,
    *,
    out: Callable[..., Any],
    launch: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    vjp: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    vmap: str = "reference",
    headers: Sequence[str] = (),
    name: str | None = None,
) -> Callable[..., Any]:
    """Makes a JAX function of a CUDA kernel, from its text.

    The text is compiled by NVRTC when ``jax.jit`` lowers a program for a GPU, for exactly the arrays and keyword
    arguments of the call, and cached on disk. The function works under ``jax.jit``, ``jax.vmap``, ``jax.grad``,
    ``jax.shard_map`` and ``jax.export``, and in CUDA graphs. It takes arrays by position, and by keyword hashable
    values that all functions below are given too, as well as ``backend``: "auto", "cuda" or "xla", see
    ``cutjax.use_backend``.

    Args:
      source: the text, or the path of a file that holds it. It includes nothing; the kernel is ``extern "C"``.
      entry: the kernel's name in the text.
      out: shape and dtype of the result: ``(*operands, **keywords) -> jax.ShapeDtypeStruct``, or a tuple of them. The
        operands are ``jax.ShapeDtypeStruct``s, and one may be returned.
      launch: ``(*operands, *results, **keywords) -> cutjax.CudaLaunch``, or a tuple of them, launched in order.
        Operands and results are ``Buffer``s: shape, dtype, and what makes a kernel argument of them. Where the kernel
        does not serve, it raises ``NotImplementedError`` with the reason, and the reference runs.
      reference: the same function of arrays in plain JAX. It runs on every other platform, is differentiated where
        neither jvp nor vjp is given, and is what ``vmap="reference"`` batches. Without one those are errors.
      jvp: the rule for ``jax.custom_jvp``: ``(primals, tangents, **keywords) -> result, tangent``.
      vjp: the rules for ``jax.custom_vjp``: ``(*operands, **keywords) -> result, residuals`` and ``(residuals,
        cotangent, **keywords) -> cotangents``.
      vmap: what runs under ``jax.vmap``. "reference" batches the reference. "grid" launches the kernel for all examples
        at once: ``launch`` describes one, and the z axis of the grid counts them. The kernel adds ``blockIdx.z *
        stride`` to each pointer, the stride being passed as ``buffer.batch_stride``: 0 where all examples share the
        array. Nested vmaps are one.
      headers: device headers that come before the text: "sm90/atoms.cuh" (PTX instructions by their names) and
        "common/math.cuh" (functions with XLA's semantics). "common/tma.cuh" has loads by TMA alone, which other
        architectures than sm_90a have too.
      name: of the function, in ``cutjax.explain`` and in messages; by default the entry.

    Returns:
      The function.

    Raises:
      TypeError, ValueError: if an argument is none of the above; a call raises them for what ``out`` and ``launch``
        return. Lowering for a GPU raises ``CompileError`` with the places in the text where NVRTC rejects it.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> double = cutjax.cuda_kernel(
      ...     '''extern "C" __global__ void twice(const float* x, float* y, int n) {
      ...          int i = blockIdx.x * blockDim.x + threadIdx.x;
      ...          if (i < n) y[i] = 2 * x[i];
      ...        }''',
      ...     "twice",
      ...     out=lambda x: x,
      ...     launch=lambda x, y: cutjax.CudaLaunch(grid=-(-x.size // 256), block=256, arguments=(x, y, x.size)),
      ...     reference=lambda x: 2 * x,
      ... )
      >>> jax.jit(double)(jnp.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """
    for what, rule in {"out": out, "launch": launch, "reference": reference, "jvp": jvp}.items():
        if not callable(rule) and (rule is not None or what in ("out", "launch")):
            raise TypeError(f"cuda_kernel: {what} must be a function, got {type(rule).__name__}")
    if vjp is not None and not (isinstance(vjp, tuple) and len(vjp) == 2 and all(map(callable, vjp))):
        raise TypeError(f"cuda_kernel: vjp must be a tuple of two functions, got {vjp!r}")
    if jvp is not None and vjp is not None:
        raise ValueError("cuda_kernel: jvp and vjp are both given; jax uses one")
    if vmap not in VMAP:
        raise ValueError(f"cuda_kernel: unknown vmap {vmap!r}, expected one of {VMAP}")
    if isinstance(source, os.PathLike):
        file, text = pathlib.Path(source).as_posix(), pathlib.Path(source).read_text()
    elif isinstance(source, str):
        file, text = f"{name or entry}.cu", source
    else:
        raise TypeError(f"cuda_kernel: source must be text or a path, got {type(source).__name__}")
    if isinstance(headers, str):
        raise TypeError(f"cuda_kernel: headers must be a tuple, got a string; write headers=({headers!r},)")
    kernel = cuda_launch.Kernel(name or entry, entry, text, file, tuple(headers), out, launch, reference, vmap)

    @functools.cache
    def function_of(single: bool, backend: str, static: tuple[Any, ...]) -> Callable[..., Any]:
        def bound(*arrays: Any) -> Any:
            outs = cuda_kernel_p.bind(*arrays, kernel=kernel, static=static, batch=None, backend=backend)
            return outs[0] if single else tuple(outs)

        bound.__name__ = kernel.name
        given = cuda_launch.keywords(static)
        if jvp is not None:
            differentiable = jax.custom_jvp(bound)
            differentiable.defjvp(functools.partial(jvp, **given))
            return differentiable
        if vjp is not None:
            differentiable = jax.custom_vjp(bound)
            forward, backward = vjp
            differentiable.defvjp(functools.partial(forward, **given), functools.partial(backward, **given))
            return differentiable
        return bound

    def function(*arrays: Any, backend: str | None = None, **static: Any) -> Any:
        where = kernel.name
        operands = [_array(x, i, where) for i, x in enumerate(arrays)]
        values = tuple((key, value, repr(value)) for key, value in sorted(static.items()))  # 1 and 1.0 are equal
        try:
            hash(values)
        except TypeError:
            raise TypeError(
                f"{where}: keyword arguments are hashable constants, arrays go by position: {static}"
            ) from None
        _, single = kernel.outputs(operands, static)
        return function_of(single, backends.resolve(backend, where), values)(*match_varying(*operands))

    function.__name__ = function.__qualname__ = kernel.name
    function.__doc__ = getattr(reference, "__doc__", None)
    return function


def _array(x: Any, i: int, where: str) -> jax.Array:
    x = unwrapped(x)
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"{where}: operand {i} must be an array, got {type(x).__name__}")
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"{where}: operand {i} must be an array of numbers, got dtype {x.dtype}")
    if any(jax.export.is_symbolic_dim(size) for size in x.shape):
        raise NotImplementedError(
            f"{where}: operand {i} has a symbolic shape {x.shape}, but kernels are compiled for known sizes"
        )
    return x


# A batch of n examples is an axis of size n before those of an example, on every result, and on every operand either
# that or an axis of size 1: then all examples share it. Nested vmaps multiply n. Without vmap, n is None and no axis.

NOWHERE = Target("")  # of a choice that is made only to see the results, or what is wrong with the launch


def _choose(
    *avals: Any, kernel: cuda_launch.Kernel, static: Any, batch: int | None, target: Target = NOWHERE, **_: Any
) -> cuda_launch.Choice:
    shapes = [x.shape if batch is None else x.shape[1:] for x in avals]
    examples = tuple(jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, avals, strict=True))
    shared = tuple(batch is not None and x.shape[0] == 1 != batch for x in avals)
    return cuda_launch.choose(kernel, examples, shared, static, batch, target.arch)


def _abstract(*avals: Any, kernel: cuda_launch.Kernel, **params: Any) -> list[Any]:
    if any(axes is not None for x in avals for axes in x.sharding.spec):
        raise NotImplementedError(
            f"{kernel.name}: operands are divided over explicit mesh axes: {', '.join(x.str_short() for x in avals)}; "
            "call it inside jax.shard_map, or jax.reshard them"
        )
    check_varying(kernel.name, avals)
    results = _choose(*avals, kernel=kernel, **params).problem.results
    if not avals:
        return [ShapedArray(x.shape, x.dtype) for x in results]
    like = avals[0]  # it carries the mesh axes that the results vary over inside shard_map
    return [
        like.update(
            shape=x.shape,
            dtype=x.dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=jax.P(*(None for _ in x.shape))),
        )
        for x in results
    ]


def _values(*arrays: jax.Array, kernel: cuda_launch.Kernel, static: Any, batch: int | None) -> list[jax.Array]:
    """Computes the results of the reference, checked against what ``out`` says."""
    assert kernel.reference is not None
    wanted = _choose(*map(jax.typeof, arrays), kernel=kernel, static=static, batch=batch).problem.results
    reference = functools.partial(kernel.reference, **cuda_launch.keywords(static))
    if batch is not None:
        axes = tuple(None if x.shape[0] == 1 != batch else 0 for x in arrays)
        arrays = tuple(lax.squeeze(x, [0]) if axis is None else x for x, axis in zip(arrays, axes, strict=True))
        reference = jax.vmap(reference, axes, axis_size=batch)
    found = reference(*arrays)
    results = [jnp.asarray(x) for x in (found if isinstance(found, tuple | list) else (found,))]
    if [(x.shape, x.dtype) for x in results] != [(x.shape, x.dtype) for x in wanted]:
        said, came = (", ".join(f"{x.dtype}{list(x.shape)}" for x in xs) for xs in (wanted, results))
        raise TypeError(f"{kernel.name}: out says {said}, the reference returns {came}")
    return results


def _reference(
    *arrays: jax.Array,
    on_cuda: bool,
    kernel: cuda_launch.Kernel,
    static: Any,
    batch: int | None,
    backend: str,
    **_: Any,
) -> list[jax.Array]:
    params = {"kernel": kernel, "static": static, "batch": batch}
    if kernel.reference is not None:
        return _values(*arrays, **params)
    choice = _choose(*map(jax.typeof, arrays), **params)
    if choice.problem.flops == 0:
        return [jnp.zeros(x.shape, x.dtype) for x in choice.problem.results]
    if not on_cuda:
        why = "the program is compiled for a platform other than CUDA"
    elif backend == "xla":
        why = "backend 'xla' runs no kernel"
    else:
        why = "; ".join(choice.reasons) if not choice.served else compiler.compiler_missing() or PARTITIONED
    raise NotImplementedError(f"{kernel.name}: {why}, and there is no reference= to run instead")


def _batch(args: Any, dims: Any, *, batch: int | None, **params: Any) -> tuple[list[jax.Array], list[int]]:
    kernel = params["kernel"]
    if kernel.vmap == "reference" and kernel.reference is None:
        raise NotImplementedError(f"{kernel.name}: jax.vmap needs reference= or vmap='grid'; jax.lax.map needs neither")
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    merged = []
    for x in batch_axis(args, dims, 0):
        if batch is not None:
            if x.shape[:2] != (1, 1):
                x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
            x = lax.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
        merged.append(x)
    outs = cuda_kernel_p.bind(*merged, batch=size * (1 if batch is None else batch), **params)
    if batch is not None:
        outs = [lax.reshape(x, (size, batch, *x.shape[1:])) for x in outs]
    return outs, [0] * len(outs)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[jax.Array], list[Any]]:
    kernel = params["kernel"]
    if kernel.reference is None:
        raise NotImplementedError(f"{kernel.name}: it has no derivative; give reference=, jvp= or vjp=")
    places = [i for i, dot in enumerate(tangents) if not is_zero(dot)]

    def along(*moving: Any) -> list[jax.Array]:
        new: dict[int, Any] = dict(zip(places, moving, strict=True))
        arrays = (new.get(i, x) for i, x in enumerate(primals))
        return _values(*arrays, **{name: params[name] for name in ("kernel", "static", "batch")})

    outs = cuda_kernel_p.bind(*primals, **params)
    _, dots = jax.jvp(along, [primals[i] for i in places], [tangents[i] for i in places])
    return outs, [
        zero_tangent(out) if dot.dtype == jax.dtypes.float0 else dot for out, dot in zip(outs, dots, strict=True)
    ]


cuda_kernel_p = define(
    "cutjax_cuda_kernel",
    abstract=_abstract,
    reference=_reference,
    batch=_batch,
    choose=_choose,
    jvp=_jvp,
    multiple_results=True,
)
