"""Products of rows in groups, which are each other's transposes.

    Rows:   d[rows of group i] = x[rows of group i] @ w[i]      x [*B, m, k], w [*B, g, k, n] -> d [*B, m, n]
    Depth:  d[i] = a[rows of group i]^T @ b[rows of group i]    a [*B, m, k], b [*B, m, n] -> d [*B, g, k, n]

Their context is the sizes, data, int32 [*B, leading + g]: with ``leading``, the first is the number of rows before the
first group. Rows of no group are zero in every result, and nothing there, NaN neither, reaches another row's results or
any derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.binding.define import define
from cutjax.binding.explicit import batched
from cutjax.binding.placement import Labels, Placement, batch_labels
from cutjax.binding.rules import batch_axis, check_varying, is_zero, on_mesh, with_rank, zero_tangent
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import REDUCTIONS, Epilogue, OperandSpec
from cutjax.kernels.device import Device
from cutjax.kernels.problem import Problem
from cutjax.primitives import ragged_reference
from cutjax.primitives.accumulators import accumulator, cotangent_dtype
from cutjax.primitives.dense import FLIP
from cutjax.primitives.factors import Factors, sum_to
from cutjax.primitives.groups import group_of_row, in_some_group, rows_of_groups
from cutjax.primitives.product import Arithmetic, Product, multiply
from cutjax.primitives.product_rules import define_product
from cutjax.primitives.sums import summed


@dataclasses.dataclass(frozen=True)
class _InGroups(Product):
    """The common part of both products.

    Attributes:
      leading: whether the sizes start with the number of rows before the first group.
    """

    leading: bool

    def window(self, placement: Placement, sizes: jax.Array, m: int) -> tuple[bool, jax.Array]:
        """The sizes of a device's groups in its ``m`` rows, and True if they start with the rows before the first."""
        over_rows, over_groups = (placement.axes.get(label, ()) for label in ("m", "g"))
        if not over_rows and not over_groups:
            return self.leading, sizes
        starts, ends = rows_of_groups(sizes, m * placement.count(over_rows), self.leading)
        if over_groups:
            count = starts.shape[-1] // placement.count(over_groups)
            first = placement.index(over_groups) * count
            starts, ends = (lax.dynamic_slice_in_dim(x, first, count, x.ndim - 1) for x in (starts, ends))
        first = placement.index(over_rows) * m
        starts, ends = (jnp.clip(x - first, 0, m) for x in (starts, ends))
        leading = self.leading or bool(over_groups)
        before = [starts[..., :1]] if leading else []
        return leading, jnp.concatenate([*before, ends - starts], -1)

    def made(
        self, prologue: Epilogue, i: int, x: jax.Array, operands: Sequence[jax.Array], context: Sequence[Any]
    ) -> jax.Array:
        """Returns the result of a prologue of rows; those of no group, where it may have no derivative, are zero."""
        rows = functools.partial(in_some_group, sizes=context[0], m=x.shape[-2], leading=self.leading)
        return rows(prologue.apply([rows(x)], [rows(operand) for operand in operands])[0])

    def sum_of(self, count: int) -> Product | None:
        return summed(self, count)

    def shard(self, placement: Placement, factors: Factors) -> tuple[Product, Factors]:
        leading, sizes = self.window(placement, factors.context[0], factors.a.shape[-2])
        return dataclasses.replace(self, leading=leading), dataclasses.replace(factors, context=[sizes])


def _tile(a: Any, shape: Sequence[int], rank: int, *ranked: tuple[Any, int]) -> Any:
    """Returns the aval of a result of a rank besides batch axes, given the further operands and ranks of theirs."""
    # No weak type, as with lax.ragged_dot, whose sizes are strong.
    spec = batched(rank, a.sharding.spec[:-2], *(x.sharding.spec[:-own] for x, own in ranked))
    sharding = on_mesh(a, *(x for x, _ in ranked)).update(spec=spec)
    return a.update(shape=tuple(shape), weak_type=False, sharding=sharding)


@define_product("cutjax_grouped_gemm")
@dataclasses.dataclass(frozen=True)
class Rows(_InGroups):
    """The rows of each group of x by its own matrix of w; the layout, "nn" or "nt", says how w lies.

    Operands of an epilogue are those of a dense product, or of groups, ``[*B, g, 1, n or 1]``: of such a one each row
    reads its group's.
    """

    layout: str

    where = "grouped_gemm"
    axes = (2, 3, 1)
    late = ("g",)  # a row is of one group

    @property
    def summed(self) -> tuple[str, ...]:
        return "k", "g"

    def tile(self, a: Any, *rest: Any) -> Any:
        *ws, sizes = rest
        batch: Any = lax.broadcast_shapes(a.shape[:-2], *(w.shape[:-3] for w in ws), sizes.shape[:-1])
        n = ws[0].shape[-1 if self.layout[1] == "n" else -2]
        return _tile(a, (*batch, a.shape[-2], n), 2, *((w, 3) for w in ws), (sizes, 1))

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        *ws, sizes = rest
        full = self.tile(a, *rest).shape
        matrix = ("g", "k", "n") if self.layout[1] == "n" else ("g", "n", "k")
        own = [(*batch_labels(a.shape[:-2], full), "m", "k")]
        own += [(*batch_labels(w.shape[:-3], full), *matrix) for w in ws]
        own.append((*batch_labels(sizes.shape[:-1], full), None))
        return own, (*batch_labels(full[:-2], full), "m", "n")

    def operand_labels(self, x: Any, tile: Labels) -> Labels:
        if x.ndim == len(tile):
            return super().operand_labels(x, tile)
        labels = (*tile[:-2], "g", None, tile[-1])
        return tuple(label if size != 1 else None for label, size in zip(labels, x.shape, strict=True))

    def after(self, placement: Placement, factors: Factors) -> tuple[Product, Sequence[Any]]:
        # Sums are of all groups, and a device may keep some of its rows alone.
        kept = dataclasses.replace(placement, axes={"m": placement.over("m")})
        rows = factors.a.shape[-2] // placement.count(placement.scattered.get("m", ()))
        leading, sizes = self.window(kept, factors.context[0], rows)
        return dataclasses.replace(self, leading=leading), [sizes]

    def reference(self, *arrays: jax.Array, **params: Any) -> jax.Array:
        return ragged_reference.reference_gemm(*arrays, layout=self.layout, leading=self.leading, **params)

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        a, b, sizes = avals
        (*x_batch, m, k), (*w_batch, groups, _, _), (*sizes_batch, _) = a.shape, b.shape, sizes.shape
        return Problem.of(
            m,
            b.shape[-1 if self.layout[1] == "n" else -2],
            k,
            self.layout,
            a.dtype,
            b.dtype,
            out_dtype,
            tuple(np.broadcast_shapes(x_batch, w_batch, sizes_batch)),
            tuple(x_batch),
            tuple(w_batch),
            device=device,
            groups=groups,
            ragged="m",
            leading=self.leading,
            sizes_batch=tuple(sizes_batch),
        )

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        if i == 0:
            return Rows(self.leading, "n" + FLIP[self.layout[1]]), (g, other), precision
        if self.layout[1] == "n":
            return Depth(self.leading), (other, g), precision
        return Depth(self.leading), (g, other), dot_precision.swapped(precision)  # in lax it is the second operand here

    def specs(self, a: jax.Array, operands: Sequence[jax.Array]) -> tuple[OperandSpec, ...]:
        specs = []
        for x in operands:
            group, batch = x.ndim > a.ndim, tuple(size != 1 for size in x.shape[: a.ndim - 2])
            row = not group and x.shape[-2] != 1
            specs.append(OperandSpec(x.dtype.name, row, x.shape[-1] != 1, batch, group))
        return tuple(specs)

    def groups(self, bs: Sequence[Any]) -> int | None:
        return bs[0].shape[-3]

    def seen(self, x: jax.Array, context: Sequence[jax.Array], m: int, arithmetic: Arithmetic) -> jax.Array:
        """Returns an epilogue's operand for each row, ``[*B, m, n or 1]``; rows of no group have zeros."""
        (sizes,) = context
        if x.ndim > sizes.ndim + 1:
            return spread_p.bind(x, sizes, m=m, leading=self.leading, arithmetic=arithmetic)
        return in_some_group(x, sizes, m, self.leading)

    def whole(
        self, x: jax.Array, context: Sequence[jax.Array], shape: tuple[int, ...], arithmetic: Arithmetic
    ) -> jax.Array:
        """Returns an operand as one of full size, in the dtype of the product. Its transpose adds up as products do.

        One that is alike in all columns is one column, in the accumulators' dtype: of columns a kernel makes sums.
        """
        rows = self.seen(x, context, shape[-2], arithmetic).astype(accumulator(x.dtype))
        if rows.shape[-1] == 1:
            return jnp.broadcast_to(rows, (*shape[:-1], 1))
        return jnp.broadcast_to(rows, shape).astype(cotangent_dtype(arithmetic.dtype, x.dtype))

    def applied(self, epilogue: Epilogue, context: Sequence[jax.Array], arithmetic: Arithmetic) -> AppliedInGroups:
        return AppliedInGroups(epilogue, self, context[0], arithmetic)

    def finished(self, results: Any, acc: Any, context: Sequence[jax.Array], why: str) -> Any:
        if any(x.shape != acc.shape for x in jax.tree.leaves(results)):
            raise NotImplementedError(
                f"epilogue: the derivative of a reduction over rows in groups, where {why}; "
                "reduce outside of the epilogue"
            )
        return jax.tree.map(lambda x: in_some_group(x, context[0], acc.shape[-2], self.leading), results)


@define_product("cutjax_grouped_outer")
@dataclasses.dataclass(frozen=True)
class Depth(_InGroups):
    """The rows of each group of a, transposed, by those of a b. Operands of an epilogue are of the result's groups."""

    where = "grouped_outer"
    axes = (2, 2, 1)

    @property
    def summed(self) -> tuple[str, ...]:
        return ("m",)

    def tile(self, a: Any, *rest: Any) -> Any:
        *bs, sizes = rest
        batch: Any = lax.broadcast_shapes(a.shape[:-2], *(b.shape[:-2] for b in bs), sizes.shape[:-1])
        shape = (*batch, sizes.shape[-1] - self.leading, a.shape[-1], bs[0].shape[-1])
        return _tile(a, shape, 3, *((b, 2) for b in bs), (sizes, 1))

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        *bs, sizes = rest
        full = self.tile(a, *rest).shape
        shapes = a.shape[:-2], *(b.shape[:-2] for b in bs), sizes.shape[:-1]
        matrices = ("m", "k"), *[("m", "n")] * len(bs), (None,)
        own: list[Labels] = [(*batch_labels(x, full), *y) for x, y in zip(shapes, matrices, strict=True)]
        return own, (*batch_labels(full[:-3], full), "g", "k", "n")

    def reference(self, *arrays: jax.Array, **params: Any) -> jax.Array:
        return ragged_reference.reference_outer(*arrays, leading=self.leading, **params)

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        """Returns the problem, whose contraction is over the rows."""
        a, b, sizes = avals
        (*a_batch, rows, m), (*b_batch, _, n), (*sizes_batch, groups) = a.shape, b.shape, sizes.shape
        return Problem.of(
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
            device=device,
            groups=groups - self.leading,
            ragged="k",
            leading=self.leading,
            sizes_batch=tuple(sizes_batch),
        )

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        return Rows(self.leading, "nt" if i == 0 else "nn"), (other, g), dot_precision.swapped(precision)

    def specs(self, a: jax.Array, operands: Sequence[jax.Array]) -> tuple[OperandSpec, ...]:
        return tuple(dataclasses.replace(spec, batch=spec.batch[:-1]) for spec in super().specs(a, operands))

    def whole_operands(self, factors: Factors, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns the operands with all groups: kernels read each group's own."""
        groups = factors.context[0].shape[-1] - self.leading
        operands = [with_rank(x, max(x.ndim, 3)) for x in operands]
        return [jnp.broadcast_to(x, (*x.shape[:-3], groups, *x.shape[-2:])) for x in operands]


@dataclasses.dataclass(frozen=True)
class AppliedInGroups:
    """An epilogue as a function of accumulators and operands of rows in groups: ``Epilogue.apply``, and the zeros."""

    epilogue: Epilogue
    product: Rows
    sizes: jax.Array
    arithmetic: Arithmetic

    @property
    def products(self) -> int:
        return self.epilogue.products

    def apply(self, accs: Sequence[jax.Array], operands: Sequence[jax.Array] = ()) -> list[jax.Array]:
        m = accs[0].shape[-2]

        def select(x: jax.Array, other: Any = 0) -> jax.Array:
            return in_some_group(x, self.sizes, m, self.product.leading, other)

        # Operands before the function too: at rows of no group it may have no finite derivative. The accumulators' own
        # derivatives are products, which leave those rows out.
        operands = [self.product.seen(x, (self.sizes,), m, self.arithmetic) for x in operands]
        whole = [dataclasses.replace(out, reduce=None, axes=()) for out in self.epilogue.outputs]
        values = dataclasses.replace(self.epilogue, outputs=tuple(whole)).apply(accs, operands)
        results = []
        for value, out in zip(values, self.epilogue.outputs, strict=True):
            if out.reduce:
                value = select(value, _neutral(out.reduce, value.dtype))
                axes = [{"row": value.ndim - 2, "col": value.ndim - 1}[axis] for axis in out.axes]
                value = REDUCTIONS[out.reduce](value, axes)
                if "row" not in out.axes:
                    value = select(value[..., None])[..., 0]
            else:
                value = select(value)
            results.append(value)
        return results


def _neutral(reduce: str, dtype: np.dtype) -> Any:
    """Returns the neutral element of a sum, a maximum or a minimum."""
    if reduce == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if reduce == "max" else np.inf
    if jnp.issubdtype(dtype, jnp.bool_):
        return reduce == "min"
    return jnp.iinfo(dtype).min if reduce == "max" else jnp.iinfo(dtype).max


# From what each group has to what its rows have: linear, and its transpose is a product.


def _spread_abstract(x: Any, sizes: Any, *, m: int, leading: bool, **_: Any) -> Any:
    check_varying(Rows.where, (x, sizes))
    batch = lax.broadcast_shapes(x.shape[:-3], sizes.shape[:-1])
    spec = batched(2, x.sharding.spec[:-3], sizes.sharding.spec[:-1])
    return x.update(shape=(*batch, m, x.shape[-1]), sharding=on_mesh(x, sizes).update(spec=spec))


def _spread(x: jax.Array, sizes: jax.Array, *, m: int, leading: bool, **_: Any) -> jax.Array:
    group, has = group_of_row(sizes, m, leading)
    if not x.shape[-3]:
        return jnp.broadcast_to(jnp.zeros((), x.dtype), (*group.shape, x.shape[-1]))
    rows = jnp.take_along_axis(lax.squeeze(x, [x.ndim - 2]), group[..., None], group.ndim - 1, mode="clip")
    return jnp.where(has[..., None], rows, jnp.zeros((), x.dtype))


def _spread_batch(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    rank = args[1].ndim - (dims[1] is not None) - 1
    at = next((dim for dim in dims if dim is not None and dim <= rank), 0)
    return spread_p.bind(*batch_axis(args, dims, at), **params), at


def _spread_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, Any]:
    x, sizes = primals
    out = spread_p.bind(x, sizes, **params)
    return out, zero_tangent(out) if is_zero(tangents[0]) else spread_p.bind(tangents[0], sizes, **params)


def _spread_transpose(
    g: Any, x: Any, sizes: jax.Array, *, m: int, leading: bool, arithmetic: Arithmetic
) -> tuple[Any, None]:
    """Computes the sum over each group's rows: a product with a column of ones, so neither atomics nor a scatter."""
    if is_zero(g):
        return None, None
    n, dtype = g.shape[-1], cotangent_dtype(arithmetic.dtype, g.dtype)
    g = lax.pad(g.astype(dtype), jnp.zeros((), dtype), [*((0, 0, 0) for _ in g.shape[1:]), (0, -n % 8, 0)])
    # Eight columns and a multiple of that, so that rows are aligned as kernels want them.
    ones = lax.broadcasted_iota(np.int32, (*(1 for _ in g.shape[:-2]), m, 8), g.ndim - 1) == 0
    precision = dot_precision.of_cotangents(arithmetic.precision, dtype, Rows.where)
    params: dict[str, Any] = {"out_dtype": accumulator(dtype), "precision": precision, "backend": arithmetic.backend}
    d = multiply(Depth(leading), ones.astype(dtype), g, sizes, **params)  # [*B, g, 8, n]
    return sum_to(d[..., :1, :n], x.aval), None


spread_p = define(
    "cutjax_spread",
    abstract=_spread_abstract,
    reference=_spread,
    batch=_spread_batch,
    jvp=_spread_jvp,
    transpose=_spread_transpose,
)
