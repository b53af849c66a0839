"""The layers of two products, mlp and grouped_mlp: the gradient of what lies between them is never written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, rows_by_columns
from cutjax.binding.rules import match_varying, with_rank
from cutjax.dtypes import are_narrow
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.ops.arguments import (
    broadcasting,
    check_accumulate,
    check_batch,
    contracted,
    elementwise_of,
    group_sizes_of,
    local_sizes,
    result_of,
    travel_dtype,
)
from cutjax.ops.fp8 import Float8Recipe, in_float8
from cutjax.ops.prologue import applied, check_prologue, multiplied
from cutjax.ops.quantized import Weights, as_quantized, is_quantized, values_of
from cutjax.ops.scales import Scales, promote_values, scales_of, times
from cutjax.parallel.fused import divided_mlp
from cutjax.parallel.ring import ring_of
from cutjax.primitives import derivative
from cutjax.primitives.accumulators import accumulator, converted
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.chain import Chain, apart, block
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Product
from cutjax.primitives.ragged import Rows
from cutjax.primitives.tracing import abstract_accumulator, trace_with_dtype
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

    Example:
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
    both = _scales(x, w1, w2, gate, layout, "mlp")
    given = matrix(values_of(x), "x", "mlp")
    a, ws, v, dtype = _arrays("mlp", x, w1, w2, gate, both, layout, save, axis_name is None)
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
    biases |= _of_hidden(both[0])
    hidden = _hidden("mlp", activation, gate is not None)
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
        product = in_float8(fp8, product, _pairs(a, ws[0], v, dtype, layout), 0, precision, backend, "mlp")
    of_x = functools.partial(multiplied, "mlp", prologue, prologue_operands, given)
    return _chained("mlp", product, hidden, a, ws, v, (), biases, last, both, of_x, **params)


def _pairs(a: Any, w: Any, v: Any, dtype: np.dtype, layout: str) -> list[tuple[Any, Any]]:
    """Returns the factors of both products of a layer, of what lies between them its shape and dtype."""
    h = jax.ShapeDtypeStruct((*a.shape[:-1], contracted(w, layout[1] == "n")), dtype)
    return [(a, w), (h, v)]


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

    Example:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w, v = jnp.ones((6, 16)), jnp.ones((3, 16, 64)), jnp.ones((3, 64, 16))
      >>> cutjax.grouped_mlp(x, w, v, jnp.array([2, 0, 3]), gate=w, activation=jax.nn.silu).shape
      (6, 16)
    """
    where = "grouped_mlp"
    backend = backends.resolve(backend, where)
    check_accumulate(accumulate, where)
    precision = dot_precision.canonical(precision, where)
    x, w1, w2, gate = as_quantized((x, w1, w2, gate))
    sizes = group_sizes_of(group_sizes, where)
    ranks = (np.ndim(unwrapped(w)) for w in values_of((w1, w2)))
    rank = max(sizes.ndim + 1, np.ndim(unwrapped(values_of(x))), *(rank - 1 for rank in ranks))
    both = _scales(x, w1, w2, gate, layout, where, rank)
    check_prologue(x, prologue, prologue_operands, where, "x")
    given = matrix(values_of(x), "x", where)
    a, ws, v, dtype = _arrays(where, x, w1, w2, gate, both, layout, save)
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
    sizes, leading = local_sizes(sizes, group_offset, groups, a.shape[-2], where)
    scale = {}
    if row_scale is not None:
        shape = (*lax.broadcast_shapes(*batches), a.shape[-2], 1)
        scale["row_scale"] = broadcasting(where, row_scale, "row_scale", shape)
    scale |= _of_hidden(both[0])
    hidden = _hidden(where, activation, gate is not None)
    out = dtype if out_dtype is None else result_of(out_dtype, where, dtype)
    precision = dot_precision.accumulated(precision, accumulate, a.dtype, ws[0].dtype)
    params = {"dtype": dtype, "out_dtype": out, "precision": precision, "backend": backend, "save": save}
    product: Product = Rows(leading, layout)
    if not is_quantized((x, w1, w2, gate)):
        product = in_float8(fp8, product, _pairs(a, ws[0], v, dtype, layout), groups, precision, backend, where)
    of_x = functools.partial(multiplied, where, prologue, prologue_operands, given)
    return _chained(where, product, hidden, a, ws, v, (sizes,), scale, [], both, of_x, **params)


def _chained(
    where: str,
    product: Product,
    hidden: Callable[..., jax.Array],
    a: jax.Array,
    ws: Sequence[jax.Array],
    v: jax.Array,
    context: Sequence[jax.Array],
    given: dict[str, jax.Array],
    last: Sequence[jax.Array],
    both: tuple[Scales, Scales],
    of_x: Callable[..., jax.Array],
    *,
    dtype: np.dtype,
    out_dtype: np.dtype,
    precision: Any,
    backend: str,
    save: str,
) -> jax.Array:
    """Returns ``hidden(x @ w, ..., given) @ v``, with ``last`` added, an array or none, told all scales.

    What runs a product ``of_x`` has its prologue.
    """
    first, second = both
    scales = [scale for scale in second.columns if scale is not None]
    factors = product.aligned(Factors(a, [*ws, v], context))
    factors, given, scales, last = match_varying(factors, given, scales, last)
    *ws, v = factors.bs
    factors = dataclasses.replace(factors, bs=ws)
    scaled, of_first = first.factored(product, a, ws, context)
    acc = abstract_accumulator(scaled.multiplied(a.dtype), product.tile(*map(jax.typeof, factors.arrays)))
    traced = trace_with_dtype(where, hidden, [acc] * len(ws), (given,), (dtype,), product.groups(ws))
    chain = Chain(product, traced.epilogue, out_dtype, precision, backend, save)
    if traced.outside is not None or traced.names or scales or first.blocks or second.blocks:

        def of_second(h: jax.Array) -> tuple[Product, Factors]:
            return dataclasses.replace(second, dtype=h.dtype).factored(product, h, [v], context)

        def run_apart(product: Product, factors: Factors) -> jax.Array:
            return apart(chain, (product, factors), of_second, hidden, given, last, scales)

        return of_x(scaled, of_first, run_apart, precision=precision, backend=backend)

    def run(first: Product, factors: Factors) -> jax.Array:
        factors, w2, b2, operands = match_varying(first.aligned(factors), v, last, list(traced.operands))
        both = dataclasses.replace(
            factors, bs=[*factors.bs, w2], scales=[*factors.scales, ()] if factors.scales else ()
        )
        folded = first.fold(chain.hidden, both, [*b2, *operands])
        if folded is None:
            return block(dataclasses.replace(chain, first=first), factors, w2, operands, b2)
        *ws, w2 = folded.factors.bs
        own = dataclasses.replace(folded.factors, bs=ws, scales=folded.factors.scales[:-1])
        b2, operands = folded.operands[: len(b2)], folded.operands[len(b2) :]
        of_rows = dataclasses.replace(chain, hidden=folded.epilogue, first=folded.product)
        return folded.unfold(block(of_rows, own, w2, operands, b2))

    return of_x(product, factors, run, precision=precision, backend=backend)


def _arrays(
    where: str,
    x: Any,
    w1: Any,
    w2: Any,
    gate: Any,
    both: tuple[Scales, Scales],
    layout: str,
    save: str,
    narrow: bool = True,
) -> tuple[jax.Array, list[jax.Array], jax.Array, np.dtype]:
    """Returns x, the weights of the first product, the gate's first, those of the second, and the products' dtype."""
    if layout not in ("nn", "nt"):
        raise ValueError(f"{where}: unknown layout {layout!r}, expected 'nn' or 'nt'")
    if save not in derivative.SAVE:
        raise ValueError(f"{where}: unknown save {save!r}, expected one of {derivative.SAVE}")
    a, v = matrix(values_of(x), "x", where), matrix(values_of(w2), "w2", where)
    ws = [] if gate is None else [matrix(values_of(gate), "gate", where)]
    ws.append(matrix(values_of(w1), "w1", where))
    if ws[0].shape != ws[-1].shape or ws[0].dtype != ws[-1].dtype:
        raise ValueError(f"{where}: gate is {jax.typeof(ws[0]).str_short()}, but w1 is {jax.typeof(ws[1]).str_short()}")
    given = (x, gate, w1, w2) if is_quantized((x, gate, w1)) else ()
    first, second = both
    a, *ws, dtype, _ = promote_values(given, first, a, ws, None, where, narrow)
    if is_quantized(w2) and not second.blocks and not are_narrow(dtype, v.dtype):
        v = converted(v, dtype)
    if v.dtype != dtype and not second.blocks and not (narrow and are_narrow(dtype, v.dtype)):
        raise TypeError(f"{where}: w2 is {v.dtype}, but the product of x and w1 is {dtype}: cast one of them")
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"{where}: x and the weights must be floating-point numbers, got {dtype}")
    if contracted(a, True) != contracted(ws[0], layout[1] == "t"):
        raise ValueError(f"{where}: x is {a.shape}, w1 is {ws[0].shape}, layout {layout!r}: k differs")
    if contracted(ws[0], layout[1] == "n") != contracted(v, layout[1] == "t"):
        raise ValueError(f"{where}: w1 is {ws[0].shape}, w2 is {v.shape}, layout {layout!r}: h differs")
    return a, ws, v, dtype


def _scales(x: Any, w1: Any, w2: Any, gate: Any, layout: str, where: str, rank: int = 0) -> tuple[Scales, Scales]:
    """Returns the scales of the first product, whose weights are the gate, if any, and w1; and those of the second."""
    names, ws = (("gate", "w1"), (gate, w1)) if gate is not None else (("w1",), w1)
    return scales_of(x, ws, layout, where, ("x", *names), rank), scales_of(None, w2, layout, where, ("x", "w2"), rank)


def _of_hidden(first: Scales) -> dict[str, jax.Array]:
    """Returns the scales of rows and columns of the first product, as inputs of the function between the products."""
    *of_gate, columns = first.columns
    found = {"x_scale": first.rows, "scale": columns, "gate_scale": of_gate[0] if of_gate else None}
    return {name: scale for name, scale in found.items() if scale is not None}


def _hidden(where: str, activation: Callable[[jax.Array], jax.Array], gated: bool) -> Callable[..., jax.Array]:
    """Returns the function between the products: of the first one's accumulators, the gate's first, and of operands."""
    check_activation(where, activation)

    def hidden(*args: Any) -> jax.Array:
        *accs, given = args
        given = {name: with_rank(x, accs[0].ndim) for name, x in given.items()}
        rows = given.get("x_scale")
        first, last = times(accs[0], rows, given.get("gate_scale")), times(accs[-1], rows, given.get("scale"))
        z = last + given["b1"].astype(last.dtype) if "b1" in given else last
        taken = first if gated else z
        h = elementwise_of(taken, activation(taken), z.dtype, where, "the activation")
        h = h * z if gated else h
        return h * given["row_scale"].astype(h.dtype) if "row_scale" in given else h

    return hidden


def check_activation(where: str, activation: Any) -> None:
    """Raises if it is none."""
    if not callable(activation):
        raise TypeError(f"{where}: activation must be a function, such as jax.nn.silu, got {activation!r}")
