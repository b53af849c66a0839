"""A product of rows in groups whose epilogue runs on the accumulators: the primitive grouped_gemm_fused_p.

    outputs = epilogue(rows_i @ w0[i], rows_i @ w1[i], ..., operands)      rows_i: those of x that are group i's

Operands are those of gemm_fused_p, or of groups: ``[*B, g, 1, n or 1]``, of which each row reads its group's. Rows of
no group are zero in every result, and nothing there, NaN neither, reaches another row's results or any derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import REDUCTIONS, Epilogue, OperandSpec
from cutjax.kernels.choose import Choice, choose
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90.config import Config
from cutjax.primitives import dense, derivative, fused_dense
from cutjax.primitives import ragged as ragged_products
from cutjax.primitives.define import define, is_zero, match_varying, zero_tangent
from cutjax.primitives.ragged import grouped_gemm_p


def call(
    fn: Callable[..., Any],
    x: jax.Array,
    ws: Sequence[jax.Array],
    sizes: jax.Array,
    operands: Sequence[Any],
    *,
    layout: str,
    out_dtype: Any,
    **params: Any,
) -> Any:
    """Traces a function and binds the primitive; what the function returns."""
    x, sizes, *ws = match_varying(x, sizes, *ws)
    x, sizes, *ws = with_ranks(x, sizes, ws)
    avals = [jax.typeof(v) for v in (x, sizes, *ws)]
    ragged_products.check("grouped_gemm", *avals)
    acc = fused_dense.accumulator(x.dtype, tile(*avals, layout=layout), out_dtype)
    count = ws[0].shape[-3]
    traced = fused_dense.trace_with_dtype(fn, [acc] * len(ws), operands, out_dtype, count)
    how = {"layout": layout, **params}
    if traced.outside is None:
        return traced.finish(bind(traced.epilogue, x, ws, sizes, traced.operands, **how))
    function, of_groups, why = traced.outside.function, traced.outside.groups, traced.outside.why

    def fused(x: jax.Array, ws: Sequence[jax.Array], leaves: Sequence[Any]) -> Any:
        operands = (tuple(leaves),)
        again = fused_dense.trace_with_dtype(
            lambda *xs: function(xs[:-1], xs[-1]), [acc] * len(ws), operands, out_dtype, count
        )
        return again.finish(bind(again.epilogue.primal, x, ws, sizes, again.operands, **how))

    def plain(x: jax.Array, ws: Sequence[jax.Array], leaves: Sequence[Any]) -> Any:
        groups = Groups(sizes, params["leading"], x.dtype, params["backend"], params["precision"])
        accs = [_multiply(x, w, acc.dtype, sizes=sizes, **how) for w in ws]
        seen = [
            groups.rows(leaf, acc.shape[-2]) if each else leaf for leaf, each in zip(leaves, of_groups, strict=True)
        ]
        results = fused_dense.with_result_dtype(function(accs, seen), acc, out_dtype)
        if any(v.shape != acc.shape for v in jax.tree.leaves(results)):
            raise NotImplementedError(
                f"epilogue: the derivative of a reduction over rows in groups, where {why}; "
                "reduce outside of the epilogue"
            )
        return jax.tree.map(lambda v: groups.select(v, acc.shape[-2]), results)

    return derivative.outside(traced.outside, fused, plain, x, ws)


def with_ranks(x: jax.Array, sizes: jax.Array, ws: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays with as many batch axes each."""
    rank = max(x.ndim - 2, sizes.ndim - 1, *(w.ndim - 3 for w in ws))
    with_rank = dense.with_rank
    return [with_rank(x, rank + 2), with_rank(sizes, rank + 1), *(with_rank(w, rank + 3) for w in ws)]


def bind(
    epilogue: Epilogue,
    x: jax.Array,
    ws: Sequence[jax.Array],
    sizes: jax.Array,
    operands: Sequence[jax.Array],
    **params: Any,
) -> list[jax.Array]:
    """Binds the primitive."""
    args = match_varying(x, *ws, sizes, *operands)
    specs = []
    for v in args[2 + len(ws) :]:
        group = v.ndim > x.ndim
        batch = tuple(size != 1 for size in v.shape[: x.ndim - 2])
        specs.append(OperandSpec(v.dtype.name, not group and v.shape[-2] != 1, v.shape[-1] != 1, batch, group))
    epilogue = dataclasses.replace(epilogue, operands=tuple(specs))
    return grouped_gemm_fused_p.bind(*args, epilogue=epilogue, **params)


# What of groups the rows of x have.


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of the rows of x: what their operands and products are.

    Attributes:
      sizes: int32 ``[*B, leading + g]``.
      leading: whether the first is the number of rows before the first group.
      dtype: in which cotangents of operands of groups are added up: that of x, accumulating in float32.
      backend, precision: of that product.
    """

    sizes: jax.Array
    leading: bool
    dtype: np.dtype
    backend: str
    precision: Canonical

    def rows(self, x: jax.Array, m: int) -> jax.Array:
        """What the rows have of an operand, ``[*B, m, n or 1]``; those of no group have zeros."""
        if x.ndim > self.sizes.ndim + 1:
            how: dict[str, Any] = {"dtype": self.dtype, "backend": self.backend, "precision": self.precision}
            return spread_p.bind(x, self.sizes, m=m, leading=self.leading, **how)
        return self.select(x, m)

    def select(self, x: jax.Array, m: int, other: Any = 0) -> jax.Array:
        """What broadcasts against ``[*B, m, n]``, with another value in rows of no group."""
        starts, ends = ragged_products.rows_of_groups(self.sizes, m, self.leading)
        first, end = jnp.min(starts, -1, keepdims=True, initial=m), jnp.max(ends, -1, keepdims=True, initial=0)
        row = lax.broadcasted_iota(np.int32, (*(1 for _ in first.shape[:-1]), m), first.ndim - 1)
        has = (first <= row) & (row < end)
        return jnp.where(has[..., None], x, jnp.asarray(other, x.dtype))

    def whole(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """An operand as one of full size, in the dtype of the product. Its transpose adds up as products do."""
        dtype = dense.cotangent_dtype(self.dtype, x.dtype)
        return jnp.broadcast_to(self.rows(x, shape[-2]).astype(dense.accumulator(x.dtype)), shape).astype(dtype)

    def applied(self, epilogue: Epilogue) -> OfGroups:
        return OfGroups(epilogue, self)

    def tile(self, x: Any, *ws: Any, layout: str) -> Any:
        return tile(x, self.sizes, *ws, layout=layout)

    def multiply(self, x: jax.Array, w: jax.Array, **params: Any) -> jax.Array:
        return ragged_products.multiply(x, w, self.sizes, leading=self.leading, **params)

    def bind(self, epilogue: Epilogue, x: Any, ws: Any, operands: Any, **params: Any) -> list[jax.Array]:
        return bind(epilogue, x, ws, self.sizes, operands, leading=self.leading, **params)

    def call(self, fn: Callable[..., Any], x: Any, ws: Any, operands: Any, **params: Any) -> Any:
        return call(fn, x, ws, self.sizes, operands, leading=self.leading, **params)


@dataclasses.dataclass(frozen=True)
class OfGroups:
    """An epilogue as a function of accumulators and operands of rows in groups: ``Epilogue.apply``, and the zeros."""

    epilogue: Epilogue
    groups: Groups

    @property
    def products(self) -> int:
        return self.epilogue.products

    def apply(self, accs: Sequence[jax.Array], operands: Sequence[jax.Array] = ()) -> list[jax.Array]:
        m = accs[0].shape[-2]
        # Operands before the function too: at rows of no group it may have no finite derivative. The accumulators' own
        # derivatives are products, which leave those rows out.
        operands = [self.groups.rows(x, m) for x in operands]
        whole = [dataclasses.replace(out, reduce=None, axes=()) for out in self.epilogue.outputs]
        values = dataclasses.replace(self.epilogue, outputs=tuple(whole)).apply(accs, operands)
        results = []
        for value, out in zip(values, self.epilogue.outputs, strict=True):
            if out.reduce:
                value = self.groups.select(value, m, _neutral(out.reduce, value.dtype))
                axes = [{"row": value.ndim - 2, "col": value.ndim - 1}[axis] for axis in out.axes]
                value = REDUCTIONS[out.reduce](value, axes)
                if "row" not in out.axes:
                    value = self.groups.select(value[..., None], m)[..., 0]
            else:
                value = self.groups.select(value, m)
            results.append(value)
        return results


def _neutral(reduce: str, dtype: np.dtype) -> Any:
    """What leaves a sum, a maximum or a minimum as it is."""
    if reduce == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if reduce == "max" else np.inf
    if jnp.issubdtype(dtype, jnp.bool_):
        return reduce == "min"
    return jnp.iinfo(dtype).min if reduce == "max" else jnp.iinfo(dtype).max


# From what each group has to what its rows have: linear, and its transpose is a product.


def _spread_abstract(x: Any, sizes: Any, *, m: int, **_: Any) -> Any:
    ragged_products.check("grouped_gemm", x, sizes)
    batch = np.broadcast_shapes(x.shape[:-3], sizes.shape[:-1])
    return x.update(shape=(*batch, m, x.shape[-1]), sharding=x.sharding.update(spec=jax.P(*(None,) * (x.ndim - 1))))


def _spread(x: jax.Array, sizes: jax.Array, *, m: int, leading: bool, **_: Any) -> jax.Array:
    group, has = ragged_products.group_of_row(sizes, m, leading)
    if not x.shape[-3]:
        return jnp.broadcast_to(jnp.zeros((), x.dtype), (*group.shape, x.shape[-1]))
    rows = jnp.take_along_axis(lax.squeeze(x, [x.ndim - 2]), group[..., None], group.ndim - 1, mode="clip")
    return jnp.where(has[..., None], rows, jnp.zeros((), x.dtype))


def _spread_batch(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    moved, at = ragged_products.batch_axis(args, dims, args[1].ndim - (dims[1] is not None) - 1)
    return spread_p.bind(*moved, **params), at


def _spread_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, Any]:
    x, sizes = primals
    out = spread_p.bind(x, sizes, **params)
    return out, zero_tangent(out) if is_zero(tangents[0]) else spread_p.bind(tangents[0], sizes, **params)


def _spread_transpose(
    g: Any, x: Any, sizes: jax.Array, *, m: int, dtype: np.dtype, precision: Canonical, **params: Any
) -> tuple[Any, None]:
    """The sum over each group's rows: a product with a column of ones, so neither atomics nor a scatter."""
    if is_zero(g):
        return None, None
    n, dtype = g.shape[-1], dense.cotangent_dtype(dtype, g.dtype)
    g = lax.pad(g.astype(dtype), jnp.zeros((), dtype), [*((0, 0, 0) for _ in g.shape[1:]), (0, -n % 8, 0)])
    # Eight columns and a multiple of that, so that rows are aligned as kernels want them.
    ones = lax.broadcasted_iota(np.int32, (*(1 for _ in g.shape[:-2]), m, 8), g.ndim - 1) == 0
    params |= {"precision": dot_precision.of_cotangents(precision, dtype, "grouped_gemm"), "config": None}
    d = ragged_products.outer(
        ones.astype(dtype), g, sizes, out_dtype=dense.accumulator(dtype), **params
    )  # [*B, g, 8, n]
    return ragged_products.sum_to(d[..., :1, :n], x.aval), None


spread_p = define(
    "cutjax_spread",
    abstract=_spread_abstract,
    reference=_spread,
    batch=_spread_batch,
    jvp=_spread_jvp,
    transpose=_spread_transpose,
)


# The primitive.


def _split(args: Sequence[Any], epilogue: Epilogue) -> tuple[Any, list[Any], Any, list[Any]]:
    """x, the ws, the sizes and the operands."""
    n = 1 + epilogue.products
    return args[0], list(args[1:n]), args[n], list(args[n + 1 :])


def tile(x: Any, sizes: Any, *ws: Any, layout: str) -> Any:
    """The aval of ``[*B, m, n]``, in x's dtype, from avals."""
    batch = np.broadcast_shapes(x.shape[:-2], sizes.shape[:-1], *(w.shape[:-3] for w in ws))
    shape = (*batch, x.shape[-2], ws[0].shape[-1 if layout[1] == "n" else -2])
    spec = jax.P(*(None,) * len(shape))
    return x.update(shape=shape, weak_type=False, sharding=dense.on_mesh(x, *ws).update(spec=spec))


def _abstract(*avals: Any, layout: str, epilogue: Epilogue, **_: Any) -> list[Any]:
    x, ws, sizes, _operands = _split(avals, epilogue)
    ragged_products.check("grouped_gemm", *avals)
    return fused_dense.result_avals(tile(x, sizes, *ws, layout=layout), epilogue)


def _reference(
    *args: jax.Array,
    layout: str,
    epilogue: Epilogue,
    leading: bool,
    precision: Canonical,
    backend: str,
    on_cuda: bool,
    **_: Any,
) -> list[jax.Array]:
    x, ws, sizes, operands = _split(args, epilogue)
    how: dict[str, Any] = {"layout": layout, "leading": leading, "precision": precision, "on_cuda": on_cuda}
    accs = [ragged_products.reference_gemm(x, w, sizes, out_dtype=epilogue.accumulator, **how) for w in ws]
    return Groups(sizes, leading, x.dtype, backend, precision).applied(epilogue.primal).apply(accs, operands)


def _choose(
    *avals: Any,
    layout: str,
    epilogue: Epilogue,
    leading: bool,
    precision: Canonical,
    config: Config | None,
    arch: str,
    **_: Any,
) -> Choice:
    x, ws, sizes, _operands = _split(avals, epilogue)
    out_dtype = next((out.dtype for out in epilogue.outputs if out.reduce is None), x.dtype)
    problem = ragged_products.gemm_problem(
        x, ws[0], sizes, layout=layout, out_dtype=out_dtype, leading=leading, arch=arch
    )
    if len({w.shape for w in ws}) > 1:
        return Choice(problem, None, ("the matrices that share x differ in their batch axes",))
    return choose(dataclasses.replace(problem, epilogue=epilogue.primal), config, precision=precision)


def _multiply(x: jax.Array, w: jax.Array, dtype: np.dtype, *, sizes: jax.Array, **params: Any) -> jax.Array:
    how = {name: params[name] for name in ("layout", "leading", "precision", "backend")}
    return grouped_gemm_p.bind(x, w, sizes, out_dtype=dtype, config=None, **how)


def _batch(args: Any, dims: Any, *, epilogue: Epilogue, **params: Any) -> tuple[Any, list[int]]:
    x, _, sizes, _ = _split(args, epilogue)
    if "batch" in epilogue.positions:  # counted from the rows outwards, so a new axis is the outermost
        args = [v if dim is None else jnp.moveaxis(v, dim, 0) for v, dim in zip(args, dims, strict=True)]
        dims = [None if dim is None else 0 for dim in dims]
    mapped = _split([dim is not None for dim in dims], epilogue)
    moved, at = ragged_products.batch_axis(args, dims, sizes.ndim - mapped[2] - 1)
    if mapped[0] or any(mapped[1]) or mapped[2]:
        x, ws, sizes, operands = _split(moved, epilogue)
        outs = bind(epilogue, x, ws, sizes, operands, **params)
    else:  # only operands differ: one product serves them all
        x, ws, sizes, operands = _split(moved, epilogue)
        accs = [_multiply(x, w, epilogue.accumulator, sizes=sizes, **params) for w in ws]
        groups = Groups(sizes, params["leading"], x.dtype, params["backend"], params["precision"])
        outs = groups.applied(epilogue).apply(accs, operands)
    return outs, [at] * len(outs)


def _jvp(primals: Any, tangents: Any, *, epilogue: Epilogue, save: str, **params: Any) -> Any:
    x, ws, sizes, operands = _split(primals, epilogue)
    x_dot, w_dots, _, operand_dots = _split([None if is_zero(v) else v for v in tangents], epilogue)
    full = tile(*map(jax.typeof, (x, sizes, *ws)), layout=params["layout"])
    acc = fused_dense.accumulator(epilogue.accumulator, full)
    groups = Groups(sizes, params["leading"], x.dtype, params["backend"], params["precision"])
    applied = groups.applied(epilogue)

    def rebind(epilogue: Epilogue, operands: Sequence[jax.Array]) -> list[jax.Array]:
        return bind(epilogue, x, ws, sizes, operands, save=save, **params)

    return derivative.derivative(
        epilogue,
        (x, ws, operands),
        (x_dot, w_dots, operand_dots),
        acc,
        bind=rebind,
        multiply=functools.partial(_multiply, sizes=sizes, **params),
        pushed=functools.partial(derivative.push, applied, acc.shape),
        groups=ws[0].shape[-3],
        save=save,
    )


def _drop(used: Sequence[bool], *, epilogue: Epilogue, save: str, **params: Any) -> tuple[Any, list[bool], Any]:
    epilogue, kept = fused_dense.without(used, epilogue)
    dtype = fused_dense.plain_dtype(epilogue)
    if dtype is not None:
        return grouped_gemm_p, [True, True, True, *kept], {"out_dtype": dtype, **params}
    reading = [True] * (2 + epilogue.products) + kept
    return grouped_gemm_fused_p, reading, {"epilogue": epilogue, "save": save, **params}


grouped_gemm_fused_p = define(
    "cutjax_grouped_gemm_fused",
    abstract=_abstract,
    reference=_reference,
    choose=_choose,
    launch=sm90.launch,
    batch=_batch,
    jvp=_jvp,
    drop=_drop,
    multiple_results=True,
)
