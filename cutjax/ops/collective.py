"""Products that overlap with the network, in shard_map: all_gather_gemm and gemm_reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.rules import match_varying
from cutjax.epilogue.expression import identity
from cutjax.kernels.families import AnyConfig
from cutjax.kernels.problem import LAYOUTS
from cutjax.ops.arguments import check_config, check_epilogue, check_shapes, promote, travel_dtype
from cutjax.ops.arguments import weights as weights_of
from cutjax.parallel.fused import fused
from cutjax.parallel.overlap import Gathered, Scattered, gathered, scattered
from cutjax.parallel.ring import ring_of
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors
from cutjax.runtime import backends


def all_gather_gemm(
    x: ArrayLike,
    w: ArrayLike | tuple[ArrayLike, ...],
    *,
    axis_name: str,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    layout: str = "nn",
    out_dtype: DTypeLike | tuple[DTypeLike | None, ...] | None = None,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
    config: AnyConfig | None = None,
    save: str = "default",
    route: str = "auto",
    reduce_dtype: DTypeLike | None = None,
) -> Any:
    """Multiplies the rows of all devices: ``gemm(all_gather(x), w)``, each device's rows as they arrive.

    For ``jax.shard_map``, with rows divided over a mesh axis and w's columns too: the first product of a layer under
    tensor parallelism with sequence sharding. One product runs for each device's rows, beside the transfer of the next;
    nothing waits for all of them. With an epilogue, each product has it.

    The gradient in x is a ``gemm_reduce_scatter`` of the same kind: products beside transfers. That in w is one
    product, of the rows as they were gathered, which are kept: named "cutjax_gathered" for ``jax.checkpoint`` policies.

    Args:
      x: ``[..., m, k]``, this device's rows, or ``[..., k, m]`` where ``layout[0]`` is "t".
      w: ``[..., k, n]``, this device's columns, or ``[..., n, k]``; with an epilogue also a tuple of two or three.
      axis_name: the mesh axis over which the rows are divided.
      epilogue: as in ``cutjax.gemm``, of the accumulators of all rows. It reduces along columns alone, and does not use
        positions of rows.
      operands: its further arguments. Those with rows have all, ``[devices * m, n]`` or ``[devices * m, 1]``.
      layout: as in ``cutjax.gemm``.
      out_dtype: as in ``cutjax.gemm``.
      precision: as in ``cutjax.gemm``.
      backend: as in ``cutjax.gemm``.
      save: as in ``cutjax.gemm``.
      config: pins the kernel of each product of one device's rows.
      route: how rows travel. "whole": by one collective, before one product of all rows. "pieces": by one collective
        for each quarter of a device's rows, or half, beside the product of the one before. "direct": each share to each
        device, for a switch such as NVSwitch. "auto": the one that is predicted to be the fastest, from measured rates
        of links and the kernels' predicted times.
      reduce_dtype: dtype in which parts of the gradient in x travel, as those of ``cutjax.gemm_reduce_scatter``.

    Returns:
      ``[..., devices * m, n]``, the rows in the order of the devices, or what the epilogue returns.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``cutjax.gemm`` does; and if the axis is not one name, is not
        bound, or the epilogue depends on which row is which.

    Examples:
      >>> import cutjax, functools, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> rows, columns = jax.P("model", None), jax.P(None, "model")
      >>> f = functools.partial(cutjax.all_gather_gemm, axis_name="model", epilogue=jax.nn.gelu)
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=(rows, columns), out_specs=columns)
      >>> jax.jit(f)(jnp.ones((8, 16)), jnp.ones((16, 32))).shape
      (8, 32)
    """
    where = "all_gather_gemm"
    ring = ring_of(axis_name, route, where)
    _check(layout, config, where)
    out_dtype = tuple(out_dtype) if isinstance(out_dtype, list) else out_dtype
    check_epilogue(w, epilogue, operands, out_dtype, save, where, "w")
    several = isinstance(out_dtype, tuple)
    a, *ws, dtype, _ = promote(matrix(x, "x", where), weights_of(w, "w", where), None if several else out_dtype, where)
    check_shapes(a, ws[0], layout, where, ("x", "w"))
    a, *ws = match_varying(*Dense(layout).aligned(Factors(ring.varying(a), ws)).arrays)
    ring = ring.chosen(Dense(layout), jax.typeof(a), [jax.typeof(x) for x in ws])
    spec = Gathered(
        ring,
        Dense(layout),
        travel_dtype(reduce_dtype, accumulator(a.dtype), where),
        identity(dtype, accumulator(a.dtype, dtype)),
        dot_precision.canonical(precision, where),
        backends.resolve(backend, where),
        config,
        save,
    )
    if epilogue is None:
        return ring.assembled([out for (out,) in gathered(spec, a, ws, [()] * ring.chunks)], -2)
    given = jax.tree.map(unwrapped, tuple(operands))
    return fused(spec, epilogue, a, ws, given, out_dtype if several else dtype, where)


def gemm_reduce_scatter(
    x: ArrayLike,
    w: ArrayLike,
    *,
    axis_name: str,
    layout: str = "nn",
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
    config: AnyConfig | None = None,
    route: str = "auto",
    reduce_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies, adds up over devices, and leaves each its rows: ``psum_scatter(gemm(x, w))``, in parts.

    For ``jax.shard_map``, with the contraction divided over a mesh axis: the second product of a layer under tensor
    parallelism with sequence sharding. The product of each device's rows is sent as the next runs.

    The gradient in x is an ``all_gather_gemm``, with the cotangent's rows in its dtype; that in w is one product of all
    of them.

    Args:
      x: ``[..., devices * m, k]``, or ``[..., k, devices * m]`` where ``layout[0]`` is "t".
      w: ``[..., k, n]``, or ``[..., n, k]``.
      axis_name: the mesh axis to add up over, and to divide the rows over.
      layout: as in ``cutjax.gemm``.
      out_dtype: as in ``cutjax.gemm``.
      precision: as in ``cutjax.gemm``.
      backend: as in ``cutjax.gemm``.
      config: pins the kernel of each product of one device's rows.
      route: how parts travel, as in ``cutjax.all_gather_gemm``.
      reduce_dtype: dtype in which parts of the sum travel. By default that of the accumulators, float32 for 16-bit
        operands; bfloat16 halves what is sent and rounds each part. They are added up in the accumulators' dtype.

    Returns:
      ``[..., m, n]``, this device's rows of the sum.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``cutjax.gemm`` does; and if the axis is not one name, is not
        bound, or does not divide the rows.

    Examples:
      >>> import cutjax, functools, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> f = functools.partial(cutjax.gemm_reduce_scatter, axis_name="model")
      >>> specs = jax.P(None, "model"), jax.P("model", None)
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=jax.P("model", None))
      >>> jax.jit(f)(jnp.ones((8, 16)), jnp.ones((16, 32))).shape
      (8, 32)
    """
    where = "gemm_reduce_scatter"
    ring = ring_of(axis_name, route, where)
    _check(layout, config, where)
    a, b, dtype, _ = promote(matrix(x, "x", where), [matrix(w, "w", where)], out_dtype, where)
    check_shapes(a, b, layout, where, ("x", "w"))
    rows = -2 if layout[0] == "n" else -1
    if a.shape[rows] % ring.size:
        raise ValueError(
            f"{where}: x is {a.shape}: its rows do not divide over the {ring.size} devices of {axis_name!r}"
        )
    a, b = match_varying(*Dense(layout).aligned(Factors(ring.varying(a), [b])).arrays)
    travel = travel_dtype(reduce_dtype, accumulator(a.dtype, dtype), where)
    share = jax.typeof(a)
    shape = list(share.shape)
    shape[rows] //= ring.size
    ring = ring.chosen(Dense(layout), share.update(shape=tuple(shape)), [jax.typeof(b)], travel=travel)
    spec = Scattered(
        ring,
        Dense(layout),
        accumulator(a.dtype, dtype),
        travel,
        dot_precision.canonical(precision, where),
        backends.resolve(backend, where),
        config,
    )
    return scattered(spec, ring.divided(a, rows), b).astype(dtype)


def _check(layout: str, config: Any, where: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: unknown layout {layout!r}, expected one of {LAYOUTS}")
    check_config(config, where)
