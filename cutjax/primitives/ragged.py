"""Products of rows in groups as primitives: grouped_gemm_p and grouped_outer_p, which are each other's transposes.

    multiply:  d[rows of group i] = x[rows of group i] @ w[i]      x [*B, m, k], w [*B, g, k, n] -> d [*B, m, n]
    outer:     d[i] = a[rows of group i]^T @ b[rows of group i]    a [*B, m, k], b [*B, m, n] -> d [*B, g, k, n]

The sizes are data, int32 [*B, leading + g]: with ``leading``, the first is the number of rows before the first group.
All operands have the same number of batch axes B, each axis equal or 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Node, OperandSpec, Output, normal
from cutjax.kernels.choose import Choice, choose
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90.config import Config
from cutjax.primitives import dense
from cutjax.primitives.define import define, is_linear, is_zero, match_varying, varying_axes, zero_tangent
from cutjax.primitives.dense import FLIP, with_rank


def multiply(x: jax.Array, w: jax.Array, sizes: jax.Array, **params: Any) -> jax.Array:
    """Binds grouped_gemm_p for operands whose batch axes broadcast."""
    x, w, sizes = match_varying(x, w, sizes)
    rank = max(x.ndim - 2, w.ndim - 3, sizes.ndim - 1)
    args = with_rank(x, rank + 2), with_rank(w, rank + 3), with_rank(sizes, rank + 1)
    return grouped_gemm_p.bind(*args, **params)


def outer(a: jax.Array, b: jax.Array, sizes: jax.Array, **params: Any) -> jax.Array:
    """Binds grouped_outer_p for operands whose batch axes broadcast."""
    a, b, sizes = match_varying(a, b, sizes)
    rank = max(a.ndim - 2, b.ndim - 2, sizes.ndim - 1)
    args = with_rank(a, rank + 2), with_rank(b, rank + 2), with_rank(sizes, rank + 1)
    return grouped_outer_p.bind(*args, **params)


def outer_add(a: jax.Array, b: jax.Array, sizes: jax.Array, to: jax.Array, **params: Any) -> jax.Array:
    """Binds grouped_outer_add_p for operands whose batch axes broadcast to those of ``to``."""
    a, b, sizes, to = match_varying(a, b, sizes, to)
    rank = to.ndim - 3
    args = with_rank(a, rank + 2), with_rank(b, rank + 2), with_rank(sizes, rank + 1), to
    return grouped_outer_add_p.bind(*args, **params)


# Which rows a group has.


def rows_of_groups(sizes: jax.Array, m: int, leading: bool) -> tuple[jax.Array, jax.Array]:
    """First row, and the row after the last, of each group: int32 [*B, g] each, ascending, all in 0 to m.

    Any sizes are served: a negative one counts as 0, and the sum stops at m.
    """
    # Two numbers up to m add up in 32 bits without a sign, whatever m; cut off at m their addition is associative.
    clipped = jnp.clip(sizes, 0, m).astype(jnp.uint32)
    ends = lax.associative_scan(lambda p, q: jnp.minimum(p + q, np.uint32(m)), clipped, axis=sizes.ndim - 1)
    ends = ends.astype(jnp.int32)
    if leading:
        return ends[..., :-1], ends[..., 1:]
    return jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], -1), ends


def group_of_row(sizes: jax.Array, m: int, leading: bool) -> tuple[jax.Array, jax.Array]:
    """For each row its group, int32 [*B, m], and whether it has one, bool [*B, m]; a row without counts as group 0."""
    ends = rows_of_groups(sizes, m, False)[1]
    row = lax.broadcasted_iota(np.int32, (*(1 for _ in ends.shape[:-1]), m, 1), ends.ndim - 1)
    before = ends[..., None, :] <= row
    group = jnp.sum(before, -1, dtype=jnp.int32) - int(leading)
    has = (group >= 0) & (group < sizes.shape[-1] - leading)
    return jnp.where(has, group, 0), has


# The references: a loop over blocks of rows of one group, so that only as much is multiplied as there are rows.


class _Visits:
    """The blocks of rows of one group, in the order of the rows, batch index by batch index."""

    def __init__(self, sizes: jax.Array, m: int, leading: bool, batch: Sequence[int], on_cuda: bool):
        starts, ends = rows_of_groups(sizes, m, leading)
        self.groups = starts.shape[-1]
        starts, ends = (jnp.broadcast_to(x, (*batch, self.groups)).reshape(-1) for x in (starts, ends))
        # Of 64 rows on a CPU, where wider ones do more that is cut off; of 128 on CUDA, where a step costs a launch.
        widest = 128 if on_cuda else 64
        self.m, self.block, self.on_cuda = m, min(m, widest, max(8, 1 << (m // self.groups).bit_length())), on_cuda
        counts = (ends - starts + (self.block - 1)) // self.block
        lasts = jnp.cumsum(counts, dtype=jnp.int32)
        self.count, self.bound = lasts[-1], math.prod(batch) * (m // self.block + self.groups)
        # All groups in a row, one of no rows at the end; and whose visit each is: the group's before which as many end.
        self.starts, self.ends, self.firsts = (jnp.pad(x, (0, 1)) for x in (starts, ends, lasts - counts))
        self.index = jnp.cumsum(jnp.zeros(self.bound, jnp.int32).at[lasts].add(1, mode="drop"))

    def __getitem__(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Visit i: the batch index, the group, the first row of the block, and which of its rows are the group's."""
        at = self.index[i]
        first = self.starts[at] + (i - self.firsts[at]) * self.block
        start = jnp.minimum(first, self.m - self.block)
        rows = start + jnp.arange(self.block, dtype=jnp.int32)
        return at // self.groups, at % self.groups, start, ((rows >= first) & (rows < self.ends[at]))[:, None]

    def loop(self, body: Any, init: jax.Array) -> jax.Array:
        # On CUDA a number of visits that is data would come to the host after each of them.
        return lax.fori_loop(0, self.bound if self.on_cuda else self.count, body, init)


def _flat_index(batch: Sequence[int], full: Sequence[int]) -> jax.Array:
    """For each index into the flattened batch axes ``full`` that into an operand's, some of size 1."""
    return jnp.asarray(np.broadcast_to(np.arange(math.prod(batch), dtype=np.int32).reshape(batch), full).reshape(-1))


def _block(x: jax.Array, batch: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """x[batch, start : start + rows]."""
    zero = jnp.zeros_like(start)
    return lax.dynamic_slice(x, (batch, start, zero), (1, rows, x.shape[-1]))[0]


def reference_gemm(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    layout: str,
    out_dtype: np.dtype,
    leading: bool,
    on_cuda: bool = False,
    precision: Canonical = None,
    **_: Any,
) -> jax.Array:
    """grouped_gemm_p in plain JAX."""
    batch, m = np.broadcast_shapes(x.shape[:-2], w.shape[:-3], sizes.shape[:-1]), x.shape[-2]
    n = w.shape[-1 if layout[1] == "n" else -2]
    d = jnp.zeros((math.prod(batch), m, n), out_dtype)
    d, x, w, sizes = match_varying(d, x, w, sizes)
    if 0 in (*batch, m, n, *x.shape, *w.shape):
        return d.reshape(*batch, m, n)
    x_index, w_index = _flat_index(x.shape[:-2], batch), _flat_index(w.shape[:-3], batch)
    x, w = x.reshape(-1, *x.shape[-2:]), w.reshape(-1, *w.shape[-2:])
    visits = _Visits(sizes, m, leading, batch, on_cuda)
    dot = functools.partial(dense.reference, on_cuda=on_cuda, precision=precision)

    def visit(i: jax.Array, d: jax.Array) -> jax.Array:
        b, group, start, mine = visits[i]
        rows = _block(x, x_index[b], start, visits.block)
        weights = lax.dynamic_index_in_dim(w, w_index[b] * visits.groups + group, keepdims=False)
        product = dot(rows, weights, layout=layout, out_dtype=out_dtype)
        product = jnp.where(mine, product, _block(d, b, start, visits.block))
        return lax.dynamic_update_slice(d, product[None], (b, start, jnp.zeros_like(start)))

    return visits.loop(visit, d).reshape(*batch, m, n)


def reference_outer(
    a: jax.Array,
    b: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: np.dtype,
    leading: bool,
    on_cuda: bool = False,
    precision: Canonical = None,
    **_: Any,
) -> jax.Array:
    """grouped_outer_p in plain JAX."""
    batch, m = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], sizes.shape[:-1]), a.shape[-2]
    shape = (*batch, sizes.shape[-1] - leading, a.shape[-1], b.shape[-1])
    acc = dense.accumulator(a.dtype, out_dtype)
    d = jnp.zeros((math.prod(shape[:-2]), *shape[-2:]), acc)
    d, a, b, sizes = match_varying(d, a, b, sizes)
    if 0 in (m, *shape):
        return d.reshape(shape).astype(out_dtype)
    a_index, b_index = _flat_index(a.shape[:-2], batch), _flat_index(b.shape[:-2], batch)
    a, b = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    visits = _Visits(sizes, m, leading, batch, on_cuda)
    dot = functools.partial(dense.reference, on_cuda=on_cuda, precision=precision)

    def visit(i: jax.Array, d: jax.Array) -> jax.Array:
        at, group, start, mine = visits[i]
        # Rows of other groups may hold NaN, which no multiplication by zero would take out.
        rows_a = jnp.where(mine, _block(a, a_index[at], start, visits.block), jnp.zeros((), a.dtype))
        rows_b = jnp.where(mine, _block(b, b_index[at], start, visits.block), jnp.zeros((), b.dtype))
        product = dot(rows_a, rows_b, layout="tn", out_dtype=acc)
        at = at * visits.groups + group
        product = product + lax.dynamic_index_in_dim(d, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(d, product, at, 0)

    return visits.loop(visit, d).reshape(shape).astype(out_dtype)


# The rules both primitives share.


def check(where: str, *avals: Any) -> None:
    if any(varying_axes(x) != varying_axes(avals[0]) for x in avals):
        raise ValueError(f"{where}: operands vary over different mesh axes: {', '.join(x.str_short() for x in avals)}")
    if any(axes is not None for x in avals for axes in x.sharding.spec):
        raise NotImplementedError(
            f"{where}: operands are divided over explicit mesh axes: {', '.join(x.str_short() for x in avals)}; "
            "call it inside jax.shard_map, or jax.reshard them"
        )


def _result(shape: Sequence[int], out_dtype: np.dtype, *avals: Any) -> Any:
    return avals[0].update(
        shape=tuple(shape),
        dtype=out_dtype,
        weak_type=False,  # as that of lax.ragged_dot, whose sizes are strong
        sharding=dense.on_mesh(*avals).update(spec=jax.P(*(None,) * len(shape))),
    )


def batch_axis(args: Sequence[jax.Array], dims: Sequence[int | None], rank: int) -> tuple[list[jax.Array], int]:
    """The operands with one more batch axis, of size 1 where one is not mapped, and its place among ``rank`` others.

    Where an operand has it among its batch axes already, so that only an axis among its last ones must move.
    """
    at = next((dim for dim in dims if dim is not None and dim <= rank), 0)
    moved = [
        lax.expand_dims(x, [at]) if dim is None else jnp.moveaxis(x, dim, at) for x, dim in zip(args, dims, strict=True)
    ]
    return moved, at


def sum_to(d: jax.Array, to: Any) -> jax.Array:
    """A cotangent added up over the batch axes that its operand broadcast over, in the operand's dtype."""
    axes = [i for i, (size, full) in enumerate(zip(to.shape, d.shape, strict=True)) if size == 1 != full]
    d = d.sum(axes, keepdims=True) if axes else d
    return d if d.dtype == to.dtype else dense.converted(d, to.dtype, to.weak_type)


def _dtype_of_terms(to: Any, *batches: Sequence[int]) -> np.dtype:
    """The dtype of a cotangent before sum_to: 16-bit terms are added in f32, and rounded once."""
    rank = len(batches[0])
    if tuple(to.shape[:rank]) == np.broadcast_shapes(*batches) and to.dtype.itemsize > 1:
        return to.dtype  # narrower, it is made of what a kernel writes
    return dense.accumulator(to.dtype)


def _batch(primitive: Any, args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    rank = args[2].ndim - (dims[2] is not None) - 1
    moved, at = batch_axis(args, dims, rank)
    return primitive.bind(*moved, **params), at


def _jvp(primitive: Any, primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, Any]:
    x, y, sizes = primals
    x_dot, y_dot, _ = tangents
    out = primitive.bind(*primals, **params)
    terms = [] if is_zero(x_dot) else [primitive.bind(x_dot, y, sizes, **params)]
    terms += [] if is_zero(y_dot) else [primitive.bind(x, y_dot, sizes, **params)]
    return out, functools.reduce(lax.add, terms) if terms else zero_tangent(out)


# x, w -> [*B, m, n]


def _gemm_abstract(x: Any, w: Any, sizes: Any, *, layout: str, out_dtype: np.dtype, **_: Any) -> Any:
    check("grouped_gemm", x, w, sizes)
    batch = np.broadcast_shapes(x.shape[:-2], w.shape[:-3], sizes.shape[:-1])
    n = w.shape[-1 if layout[1] == "n" else -2]
    return _result((*batch, x.shape[-2], n), out_dtype, x, w, sizes)


def gemm_problem(x: Any, w: Any, sizes: Any, *, layout: str, out_dtype: Any, leading: bool, arch: str) -> Problem:
    """The problem of avals as grouped_gemm_p takes them."""
    (*x_batch, m, k), (*w_batch, g, _, _), (*sizes_batch, _) = x.shape, w.shape, sizes.shape
    return Problem(
        m,
        w.shape[-1 if layout[1] == "n" else -2],
        k,
        layout,
        x.dtype,
        w.dtype,
        out_dtype,
        tuple(np.broadcast_shapes(x_batch, w_batch, sizes_batch)),
        tuple(x_batch),
        tuple(w_batch),
        arch,
        groups=g,
        ragged="m",
        leading=leading,
        sizes_batch=tuple(sizes_batch),
    )


def _gemm_choose(
    x: Any,
    w: Any,
    sizes: Any,
    *,
    layout: str,
    out_dtype: np.dtype,
    leading: bool,
    precision: Canonical,
    config: Config | None,
    arch: str,
    **_: Any,
) -> Choice:
    problem = gemm_problem(x, w, sizes, layout=layout, out_dtype=out_dtype, leading=leading, arch=arch)
    return choose(problem, config, precision=precision)


def _gemm_transpose(
    g: Any, x: Any, w: Any, sizes: jax.Array, *, layout: str, out_dtype: np.dtype, **params: Any
) -> tuple[Any, Any, None]:
    if is_zero(g):
        return None, None, None
    params["config"] = None  # a pinned kernel is for the product it was pinned to
    batches = g.shape[:-2], sizes.shape[:-1]
    g, other = dense.with_cotangent(g, w if is_linear(x) else x)
    params["precision"] = dot_precision.of_cotangents(params["precision"], g.dtype, "grouped_gemm")
    if is_linear(x):
        params |= {"layout": "n" + FLIP[layout[1]], "out_dtype": _dtype_of_terms(x.aval, *batches, w.shape[:-3])}
        return sum_to(grouped_gemm_p.bind(g, other, sizes, **params), x.aval), None, None
    params["out_dtype"] = _dtype_of_terms(w.aval, *batches, x.shape[:-2])
    if layout[1] == "t":  # in lax the cotangent is the second operand here
        g, other, params["precision"] = other, g, dot_precision.swapped(params["precision"])
    return None, sum_to(grouped_outer_p.bind(other, g, sizes, **params), w.aval), None


grouped_gemm_p = define(
    "cutjax_grouped_gemm",
    abstract=_gemm_abstract,
    reference=reference_gemm,
    choose=_gemm_choose,
    launch=sm90.launch,
    batch=lambda *args, **params: _batch(grouped_gemm_p, *args, **params),
    jvp=lambda *args, **params: _jvp(grouped_gemm_p, *args, **params),
    transpose=_gemm_transpose,
)


# a, b -> [*B, g, k, n]


def _outer_abstract(a: Any, b: Any, sizes: Any, *, out_dtype: np.dtype, leading: bool, **_: Any) -> Any:
    check("grouped_outer", a, b, sizes)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], sizes.shape[:-1])
    return _result((*batch, sizes.shape[-1] - leading, a.shape[-1], b.shape[-1]), out_dtype, a, b, sizes)


def outer_problem(a: Any, b: Any, sizes: Any, *, out_dtype: Any, leading: bool, arch: str) -> Problem:
    """The problem of avals as grouped_outer_p takes them: the contraction is over the rows."""
    (*a_batch, rows, m), (*b_batch, _, n), (*sizes_batch, g) = a.shape, b.shape, sizes.shape
    return Problem(
        m,
        n,
        rows,
        "tn",
        a.dtype,
        b.dtype,
        out_dtype,
        tuple(np.broadcast_shapes(a_batch, b_batch, sizes_batch)),
        tuple(a_batch),
        tuple(b_batch),
        arch,
        groups=g - leading,
        ragged="k",
        leading=leading,
        sizes_batch=tuple(sizes_batch),
    )


def _outer_choose(
    a: Any,
    b: Any,
    sizes: Any,
    *,
    out_dtype: np.dtype,
    leading: bool,
    precision: Canonical,
    config: Config | None,
    arch: str,
    **_: Any,
) -> Choice:
    problem = outer_problem(a, b, sizes, out_dtype=out_dtype, leading=leading, arch=arch)
    return choose(problem, config, precision=precision)


def _outer_transpose(
    g: Any, a: Any, b: Any, sizes: jax.Array, *, out_dtype: np.dtype, **params: Any
) -> tuple[Any, Any, None]:
    if is_zero(g):
        return None, None, None
    params["config"] = None
    first = is_linear(a)
    to, other = (a.aval, b) if first else (b.aval, a)
    dtype = _dtype_of_terms(to, g.shape[:-3], sizes.shape[:-1], other.shape[:-2])
    g, other = dense.with_cotangent(g, other)
    precision = dot_precision.of_cotangents(params["precision"], g.dtype, "grouped_outer")
    params |= {"layout": "nt" if first else "nn", "precision": dot_precision.swapped(precision)}
    d = sum_to(grouped_gemm_p.bind(other, g, sizes, out_dtype=dtype, **params), to)
    return (d, None, None) if first else (None, d, None)


grouped_outer_p = define(
    "cutjax_grouped_outer",
    abstract=_outer_abstract,
    reference=reference_outer,
    choose=_outer_choose,
    launch=sm90.launch,
    batch=lambda *args, **params: _batch(grouped_outer_p, *args, **params),
    jvp=lambda *args, **params: _jvp(grouped_outer_p, *args, **params),
    transpose=_outer_transpose,
)


# a, b, to -> to + outer(a, b), [*B, g, k, n] in the dtype of ``to``, whose memory the result may take.


def _add_abstract(a: Any, b: Any, sizes: Any, to: Any, **_: Any) -> Any:
    check("grouped_outer", a, b, sizes, to)
    return _result(to.shape, to.dtype, to, a)


def _add_reference(a: jax.Array, b: jax.Array, sizes: jax.Array, to: jax.Array, **params: Any) -> jax.Array:
    acc = dense.accumulator(a.dtype, to.dtype)
    wide = dense.accumulator(to.dtype, acc)
    d = reference_outer(a, b, sizes, out_dtype=acc, **params)
    return (to.astype(wide) + d.astype(wide)).astype(to.dtype)


def _add_choose(
    a: Any,
    b: Any,
    sizes: Any,
    to: Any,
    *,
    leading: bool,
    precision: Canonical,
    config: Config | None,
    arch: str,
    **_: Any,
) -> Choice:
    problem = outer_problem(a, b, sizes, out_dtype=to.dtype, leading=leading, arch=arch)
    *batch, _, m, n = to.shape
    nodes = [Node("acc", params=(0,)), Node("operand", dtype=to.dtype.name, params=(0,))]
    if to.dtype != np.float32:
        nodes.append(Node("convert_element_type", (1,)))
    nodes.append(Node("add", (0, len(nodes) - 1)))
    spec = OperandSpec(to.dtype.name, m != 1, n != 1, tuple(size != 1 for size in batch))
    epilogue = normal(1, [spec], nodes, [Output(len(nodes) - 1, to.dtype.name)])
    problem = dataclasses.replace(problem, batch=tuple(batch), epilogue=epilogue, in_place=((0, 0),))
    return choose(problem, config, precision=precision)


def _add_batch(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    (a, b, sizes, to), at = batch_axis(args, dims, args[2].ndim - (dims[2] is not None) - 1)
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    to = jnp.broadcast_to(to, (*to.shape[:at], size, *to.shape[at + 1 :]))
    return grouped_outer_add_p.bind(a, b, sizes, to, **params), at


def _add_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, Any]:
    a, b, sizes, to = primals
    a_dot, b_dot, _, to_dot = tangents
    out = grouped_outer_add_p.bind(*primals, **params)
    params |= {"out_dtype": to.dtype, "config": None}
    terms = [] if is_zero(to_dot) else [to_dot]
    terms += [] if is_zero(a_dot) else [grouped_outer_p.bind(a_dot, b, sizes, **params)]
    terms += [] if is_zero(b_dot) else [grouped_outer_p.bind(a, b_dot, sizes, **params)]
    dot = functools.reduce(lax.add, (jnp.broadcast_to(term, out.shape) for term in terms)) if terms else None
    return out, zero_tangent(out) if dot is None else dot


grouped_outer_add_p = define(
    "cutjax_grouped_outer_add",
    abstract=_add_abstract,
    reference=_add_reference,
    choose=_add_choose,
    launch=sm90.launch,
    batch=_add_batch,
    jvp=_add_jvp,
)
