"""The layers of two products, mlp and grouped_mlp: the gradient of what lies between them is never written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, rows_by_columns
from cutjax.binding.rules import with_rank
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.ops.arguments import (
    broadcasting,
    check_accumulate,
    check_batch,
    contracted,
    group_sizes_of,
    local_sizes,
    result_of,
    travel_dtype,
)
from cutjax.ops.chained import arrays_of, chained, factors_of_layer, hidden_function, scales_of_hidden, scales_of_layer
from cutjax.ops.fp8 import Float8Recipe, in_float8
from cutjax.ops.prologue import applied, check_prologue, multiplied
from cutjax.ops.quantized import Weights, as_quantized, is_quantized, values_of
from cutjax.parallel.fused import divided_mlp
from cutjax.parallel.ring import ring_of
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.dense import Dense
from cutjax.primitives.product import Product
from cutjax.primitives.ragged import Rows
from cutjax.primitives.routing import Routing
from cutjax.runtime import backends


def mlp(
    x: Weights,
    w1: Weights,
    w2: Weights,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    b1: ArrayLike | None = None,
    b2: ArrayLike | None = None,
    gate: Weights | None = None,
    prologue: Callable[..., Any] | None = None,
    prologue_operands: Sequence[Any] = (),
    layout: str = "nn",
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    accumulate: str = "f32",
    fp8: Float8Recipe = None,
    backend: str | None = None,
    save: str = "default",
    axis_name: str | None = None,
    route: str = "auto",
    reduce_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Two products with an activation between them: ``activation(x @ w1 + b1) @ w2 + b2``.

    With a gate ``(activation(x @ gate) * (x @ w1 + b1)) @ w2 + b2``: SwiGLU, where the activation is ``jax.nn.silu``.

    The activation runs in the first kernel's epilogue, in float32. In the backward pass its derivative, and the
    gradient of b1, run in the epilogue of the product with w2 transposed, so the gradient of what lies between the
    products is never written. Differentiable in both modes and any number of times, and batchable.

    With an ``axis_name``, in ``jax.shard_map``, the layer is divided over the devices of that mesh axis: rows of x and
    of the result, and columns of what lies between. Rows are gathered as in ``cutjax.all_gather_gemm`` and added up as
    in ``cutjax.gemm_reduce_scatter``, beside the products, and what lies between is never put together.

    Args:
      x: ``[..., m, k]``, or `cutjax.Quantized`; not with an axis_name.
      w1: ``[..., k, h]``, or ``[..., h, k]`` in the layout "nt". Weights may be narrow, or `cutjax.Quantized`, as in
        ``cutjax.gemm``; not with an axis_name.
      w2: ``[..., h, n]``, or ``[..., n, h]`` in the layout "nt".
      activation: any elementwise function written in JAX.
      b1: what broadcasts against ``[..., m, h]``, such as ``[h]``.
      b2: what broadcasts against ``[..., m, n]``.
      gate: like w1.
      prologue: a function ``(x, *prologue_operands)`` of x before it is multiplied, as in ``cutjax.gemm``, such as the
        last step of a norm.
      prologue_operands: its further arguments, which broadcast against x.
      layout: "nn" or "nt", of the weights; see ``cutjax.gemm``.
      out_dtype: dtype of the result; that of x and the weights by default.
      precision: of both products, as in ``cutjax.gemm``.
      accumulate: as in ``cutjax.gemm``.
      fp8: of both products, as in ``cutjax.grouped_gemm``; not with an axis_name.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      save: what is kept for the backward pass. "default": the accumulators which the activation's derivative needs,
        named "cutjax_preactivation" for ``jax.checkpoint`` policies, and the operand of the second product,
        "cutjax_hidden". "recompute": neither, the first product is made again.
      axis_name: the mesh axis over which the layer is divided: w1 and gate by columns, w2 by rows, b1 with the columns.
      route: with an axis, how rows travel, see ``cutjax.gemm_reduce_scatter``.
      reduce_dtype: with an axis, the dtype in which parts of sums travel, of the result's and of the gradient in x, see
        ``cutjax.gemm_reduce_scatter``.

    Returns:
      ``[..., m, n]``.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``cutjax.gemm`` does, and ``cutjax.all_gather_gemm``.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w, v = jnp.ones((2, 8, 16)), jnp.ones((16, 64)), jnp.ones((64, 16))
      >>> cutjax.mlp(x, w, v, gate=w, activation=jax.nn.silu).shape
      (2, 8, 16)
    """
    backend = backends.resolve(backend, "mlp")
    check_accumulate(accumulate, "mlp")
    precision = dot_precision.canonical(precision, "mlp")
    x, w1, w2, gate = as_quantized((x, w1, w2, gate))
    if axis_name is not None and fp8 is not None:
        raise ValueError("mlp: fp8 is of a layer on one device, or divided by jit: not with an axis_name")
    check_prologue(x, prologue, prologue_operands, "mlp", "x")
    if axis_name is not None and is_quantized((x, w1, w2, gate)):
        raise ValueError("mlp: what an axis_name divides are arrays, got cutjax.Quantized: dequantize them")
    both = scales_of_layer(x, w1, w2, gate, layout, "mlp")
    given = matrix(values_of(x), "x", "mlp")
    a, ws, v, dtype = arrays_of("mlp", x, w1, w2, gate, both, layout, save, axis_name is None)
    shapes = f"x is {a.shape}, w1 is {ws[0].shape}, w2 is {v.shape}"
    batch = check_batch("mlp", shapes, a.shape[:-2], ws[0].shape[:-2], v.shape[:-2])

    ring = None if axis_name is None else ring_of(axis_name, route, "mlp")
    m = a.shape[-2]
    all_rows = m if ring is None else ring.size * m
    columns = contracted(v, layout[1] == "t"), contracted(v, layout[1] == "n")
    biases = {
        name: broadcasting("mlp", b, name, (*batch, rows, n))
        for b, name, rows, n in zip((b1, b2), ("b1", "b2"), (all_rows, m), columns, strict=True)
        if b is not None
    }
    last = [with_rank(biases.pop("b2"), len(batch) + 2)] if b2 is not None else []
    biases |= scales_of_hidden(both[0])
    hidden = hidden_function("mlp", activation, gate is not None)
    out = dtype if out_dtype is None else result_of(out_dtype, "mlp", dtype)
    precision = dot_precision.accumulated(precision, accumulate, a.dtype, ws[0].dtype)
    params = {"dtype": dtype, "out_dtype": out, "precision": precision, "backend": backend, "save": save}
    if ring is not None:
        a = applied("mlp", prologue, prologue_operands, given, dtype)
        travel = travel_dtype(reduce_dtype, accumulator(dtype, out), "mlp")
        return divided_mlp(ring, layout, hidden, a, ws, v, biases, last, travel=travel, **params)
    if reduce_dtype is not None:
        raise ValueError("mlp: reduce_dtype without an axis_name: nothing is added up over devices")
    product: Product = Dense(layout)
    if not is_quantized((x, w1, w2, gate)):
        product = in_float8(fp8, product, factors_of_layer(a, ws[0], v, dtype, layout), 0, precision, backend, "mlp")
    of_x = functools.partial(multiplied, "mlp", prologue, prologue_operands, given)
    return chained("mlp", product, hidden, a, ws, v, (), biases, last, both, of_x, **params)


@automatic(lambda x, w2, layout="nn", **_: rows_by_columns(x, w2, layout), on_automatic_axes)
def grouped_mlp(
    x: Weights,
    w1: Weights,
    w2: Weights,
    group_sizes: ArrayLike,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    gate: Weights | None = None,
    row_scale: ArrayLike | None = None,
    prologue: Callable[..., Any] | None = None,
    prologue_operands: Sequence[Any] = (),
    layout: str = "nn",
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    accumulate: str = "f32",
    fp8: Float8Recipe = None,
    group_offset: ArrayLike | None = None,
    backend: str | None = None,
    save: str = "default",
) -> jax.Array:
    """``cutjax.mlp`` with weights of its own for each group of rows: the experts of a mixture.

    For the rows of group i: ``row_scale * (activation(x @ w1[i]) @ w2[i])``, and with a gate
    ``row_scale * ((activation(x @ gate[i]) * (x @ w1[i])) @ w2[i])``. Rows of no group give zeros.

    The backward pass is that of ``cutjax.mlp``: the derivative of the activation runs in the epilogue of the product
    with w2 transposed, so the gradient of what lies between the products is never written. Rows are scaled between the
    products, in the first one's epilogue: there the gradient of the scale takes nothing saved for it.

    Args:
      x: ``[..., m, k]``, rows sorted by group, as in ``cutjax.grouped_gemm``; or `cutjax.Quantized`.
      w1: ``[..., g, k, h]``, or ``[..., g, h, k]`` in the layout "nt". Weights may be narrow, or `cutjax.Quantized`.
      w2: ``[..., g, h, n]``, or ``[..., g, n, h]`` in the layout "nt".
      group_sizes: integers ``[..., g]``.
      activation: any elementwise function written in JAX.
      gate: like w1.
      row_scale: ``[..., m, 1]``, such as a router's weights.
      prologue: a function ``(x, *prologue_operands)``, as in ``cutjax.grouped_gemm``.
      prologue_operands: its further arguments, those of groups too.
      layout: "nn" or "nt", of the weights.
      out_dtype: dtype of the result; that of x and the weights by default.
      precision: of both products, as in ``cutjax.gemm``.
      accumulate: as in ``cutjax.gemm``.
      fp8: of both products, as in ``cutjax.grouped_gemm``.
      group_offset: the group that ``w1[0]`` and ``w2[0]`` are of, as in ``cutjax.grouped_gemm``.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      save: what is kept for the backward pass, as in ``cutjax.mlp``.

    Returns:
      ``[..., m, n]``.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``cutjax.grouped_gemm`` does.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w, v = jnp.ones((6, 16)), jnp.ones((3, 16, 64)), jnp.ones((3, 64, 16))
      >>> cutjax.grouped_mlp(x, w, v, jnp.array([2, 0, 3]), gate=w, activation=jax.nn.silu).shape
      (6, 16)
    """
    params = {"activation": activation, "layout": layout, "out_dtype": out_dtype, "precision": precision}
    params |= {"accumulate": accumulate, "fp8": fp8, "group_offset": group_offset, "backend": backend, "save": save}
    return experts(x, w1, w2, group_sizes, gate, row_scale, prologue, prologue_operands, **params)


def experts(
    x: Any,
    w1: Any,
    w2: Any,
    group_sizes: Any,
    gate: Any = None,
    row_scale: Any = None,
    prologue: Any = None,
    prologue_operands: Any = (),
    routing: Routing | None = None,
    *,
    activation: Any,
    layout: str,
    out_dtype: Any = None,
    precision: Any,
    accumulate: str,
    fp8: Any,
    group_offset: Any,
    backend: str | None,
    save: str,
) -> jax.Array:
    """Computes ``grouped_mlp``; with a routing, of rows of x that the first product gathers."""
    where = "grouped_mlp"
    backend = backends.resolve(backend, where)
    check_accumulate(accumulate, where)
    precision = dot_precision.canonical(precision, where)
    x, w1, w2, gate = as_quantized((x, w1, w2, gate))
    sizes = group_sizes_of(group_sizes, where)
    ranks = (np.ndim(unwrapped(w)) for w in values_of((w1, w2)))
    rank = max(sizes.ndim + 1, np.ndim(unwrapped(values_of(x))), *(rank - 1 for rank in ranks))
    both = scales_of_layer(x, w1, w2, gate, layout, where, rank)
    check_prologue(x, prologue, prologue_operands, where, "x")
    given = matrix(values_of(x), "x", where)
    a, ws, v, dtype = arrays_of(where, x, w1, w2, gate, both, layout, save)
    shapes = f"x is {a.shape}, w1 is {ws[-1].shape}, w2 is {v.shape}"
    if min(v.ndim, ws[0].ndim) < 3 or v.shape[-3] != ws[0].shape[-3]:
        raise ValueError(f"{where}: w1 and w2 must be of as many groups, [..., g, k, h] and [..., g, h, n]: {shapes}")
    groups = v.shape[-3]
    if group_offset is None and sizes.shape[-1] != groups:
        raise ValueError(
            f"{where}: the numbers of groups differ: group_sizes is {sizes.shape}, w1 is {ws[-1].shape}; group_offset= "
            "says which of them the weights have"
        )
    batches = (a.shape[:-2], ws[0].shape[:-3], v.shape[:-3], sizes.shape[:-1])
    check_batch(where, f"{shapes}, group_sizes is {sizes.shape}", *batches)
    rows = a.shape[-2] if routing is None else routing.permutation.shape[-1]
    sizes, leading = local_sizes(sizes, group_offset, groups, rows, where)
    scale = {}
    if row_scale is not None:
        shape = (*lax.broadcast_shapes(*batches), rows, 1)
        scale["row_scale"] = broadcasting(where, row_scale, "row_scale", shape)
    scale |= scales_of_hidden(both[0])
    hidden = hidden_function(where, activation, gate is not None)
    out = dtype if out_dtype is None else result_of(out_dtype, where, dtype)
    precision = dot_precision.accumulated(precision, accumulate, a.dtype, ws[0].dtype)
    params = {"dtype": dtype, "out_dtype": out, "precision": precision, "backend": backend, "save": save}
    product: Product = Rows(leading, layout)
    if not is_quantized((x, w1, w2, gate)):
        product = in_float8(
            fp8, product, factors_of_layer(a, ws[0], v, dtype, layout), groups, precision, backend, where
        )
    of_x = functools.partial(multiplied, where, prologue, prologue_operands, given)
    gathers = () if routing is None else (routing.permutation, routing.inverse)
    return chained(where, product, hidden, a, ws, v, (sizes,), scale, [], both, of_x, gathers, **params)
