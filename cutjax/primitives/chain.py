"""Two products with an epilogue between them, dense or grouped: what mlp and grouped_mlp are made of, and chain_p.

h = epilogue(x @ w1, ..., operands)
y = h @ w2 + b2
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
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from cutjax import dot_precision
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue
from cutjax.epilogue.trace import Traced
from cutjax.primitives import dense, derivative, fused_dense
from cutjax.primitives.define import define, is_linear, is_zero, match_varying
from cutjax.primitives.dense import FLIP
from cutjax.primitives.fused_ragged import Groups

HIDDEN = "cutjax_hidden"  # the name jax.checkpoint policies see, of what the second product reads


@dataclasses.dataclass(frozen=True)
class How:
    """What of two products is known when they are traced.

    Attributes:
      hidden: the epilogue of the first.
      layout: of both.
      out_dtype: of the result.
      precision, backend, save: as gemm's.
      leading: whether the sizes of groups, where there are some, begin with the rows before the first group.
    """

    hidden: Epilogue
    layout: str
    out_dtype: np.dtype
    precision: Canonical
    backend: str
    save: str
    leading: bool = False

    @property
    def first(self) -> dict[str, Any]:
        return {"layout": self.layout, "precision": self.precision, "backend": self.backend, "config": None}

    @property
    def second(self) -> dict[str, Any]:
        return self.first | {"out_dtype": self.out_dtype}

    def product(self, sizes: Any, dtype: np.dtype) -> Groups | type[_Dense]:
        """The product of operands of a dtype: that of rows in groups, or the dense one where the sizes are None."""
        return _Dense if sizes is None else Groups(sizes, self.leading, dtype, self.backend, self.precision)


class _Dense:
    """The dense product, by the names that Groups has."""

    tile = staticmethod(fused_dense.tile)
    bind = staticmethod(fused_dense.bind)
    call = staticmethod(fused_dense.call)
    multiply = staticmethod(dense.multiply)

    @staticmethod
    def applied(epilogue: Epilogue) -> Epilogue:
        return epilogue

    @staticmethod
    def rows(x: jax.Array, m: int) -> jax.Array:
        return x

    @staticmethod
    def whole(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def block(how: How, sizes: Any, x: Any, ws: Any, w2: Any, operands: Any, b2: Any) -> jax.Array:
    """The result; b2 is a list of one array or none."""
    product = how.product(sizes, x.dtype)
    (h,) = product.bind(how.hidden, x, ws, operands, save=how.save, **how.first)
    return _second(how, product, h, w2, b2)


def apart(how: How, sizes: Any, hidden: Any, x: Any, ws: Any, w2: Any, given: Any, b2: Any) -> jax.Array:
    """Returns the result of two operations, each with its own derivative: of what no kernel can differentiate."""
    product = how.product(sizes, x.dtype)
    (out,) = how.hidden.outputs
    h = product.call(hidden, x, ws, (given,), out_dtype=(out.dtype,), save=how.save, **how.first)
    return _second(how, product, h, w2, b2)


def _second(how: How, product: Any, h: jax.Array, w2: jax.Array, b2: Sequence[jax.Array]) -> jax.Array:
    if not b2:
        return product.multiply(h, w2, **how.second)
    return product.call(lambda acc, b: acc + b.astype(acc.dtype), h, [w2], b2, save=how.save, **how.second)


def _block_jvp(how: How, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """y' = h' @ w2 + h @ w2' + b2', where h' @ w2 is one operation, because its transpose is one kernel."""
    sizes, x, ws, w2, operands, b2 = primals
    _, x_dot, w_dots, w2_dot, operand_dots, b2_dot = jax.tree.map(
        _none_if_zero, tangents, is_leaf=lambda t: isinstance(t, SymbolicZero)
    )
    product = how.product(sizes, x.dtype)
    dtype = derivative.saved_dtype(how.hidden, x.dtype)

    def multiply(a: jax.Array, b: jax.Array, dtype: np.dtype) -> jax.Array:
        return product.multiply(a, b, out_dtype=dtype, **how.first)

    acc_dots = derivative.product_dots(multiply, x, ws, x_dot, w_dots, dtype)
    moves = derivative.moving(acc_dots), derivative.moving(operand_dots)
    needed = derivative.accumulators_needed(how.hidden, *moves)
    acc = fused_dense.accumulator(x.dtype, product.tile(*map(jax.typeof, (x, *ws)), layout=how.layout))
    groups = None if sizes is None else ws[0].shape[-3]

    def values(operands: Any) -> Traced:
        return derivative.differentiated(how.hidden, acc, operands, *moves, groups)

    def forward(x: Any, ws: Any, operands: Any) -> tuple[jax.Array, list[Any]]:
        traced = values(operands)
        extended, places = derivative.with_accumulators(traced.epilogue, needed, dtype)
        outs = product.bind(extended, x, ws, traced.operands, save=how.save, **how.first)
        kept = [None if i is None else checkpoint_name(outs[i], derivative.PREACTIVATION) for i in places]
        return checkpoint_name(outs[0], HIDDEN), kept

    def tangent(h: Any, kept: Any, w2: Any, operands: Any, acc_dots: Any, operand_dots: Any, w2_dot: Any) -> list[Any]:
        terms = []
        if any(derivative.moving(acc_dots)):
            dots = [dot if dot is None else product.whole(dot, h.shape) for dot in operand_dots]
            terms.append(_chain(how, sizes, kept, operands, w2, acc_dots, dots))
        elif any(derivative.moving(operand_dots)):
            applied = product.applied(how.hidden)
            (dot,) = derivative.push(applied, h.shape, kept, operands, acc_dots, operand_dots)
            terms.append(product.multiply(dot, w2, **how.second))
        if w2_dot is not None:
            terms.append(product.multiply(h, w2_dot, **how.second))
        return terms

    if how.save == "recompute":
        traced = values(operands)
        y = block(dataclasses.replace(how, hidden=traced.epilogue), sizes, x, ws, w2, list(traced.operands), b2)

        def again(x: Any, ws: Any, w2: Any, operands: Any, *dots: Any) -> list[Any]:
            return tangent(*forward(x, ws, operands), w2, operands, *dots)

        terms = jax.checkpoint(again)(x, ws, w2, operands, acc_dots, operand_dots, w2_dot)
    else:
        h, kept = forward(x, ws, operands)
        y = _second(how, product, h, w2, b2)
        terms = tangent(h, kept, w2, operands, acc_dots, operand_dots, w2_dot)
    wide = dense.accumulator(y.dtype)  # the transpose sums over rows in it
    terms += [jnp.broadcast_to(dot.astype(wide), y.shape).astype(y.dtype) for dot in b2_dot if dot is not None]
    return y, functools.reduce(lax.add, terms) if terms else jnp.zeros_like(y)


block.defjvp(_block_jvp, symbolic_zeros=True)


def _none_if_zero(dot: Any) -> Any:
    return None if isinstance(dot, SymbolicZero) or dot.dtype == jax.dtypes.float0 else dot


# h' @ w2, of the tangents of the accumulators and the operands. h' is made by XLA and read by the second kernel; the
# transpose is one kernel, the product with w2 transposed whose epilogue multiplies by the activation's derivative.
# None among the arguments stands for the sizes of no groups, an accumulator that is not needed, or a tangent of zero:
# ``there`` says where. Where there are groups the tangents of operands are of h's shape, for a kernel adds up nothing.


def _chain(how: How, sizes: Any, accs: Any, operands: Any, w2: Any, acc_dots: Any, operand_dots: Any) -> jax.Array:
    args = (sizes, w2, *accs, *operands, *acc_dots, *operand_dots)
    there = tuple(x is not None for x in args)
    values = match_varying(*(x for x in args if x is not None))
    return chain_p.bind(*values, how=how, there=there)


def _parts(
    values: Sequence[Any], how: How, there: tuple[bool, ...]
) -> tuple[Any, Any, list[Any], list[Any], list[Any]]:
    """The sizes, w2, the accumulators, the operands, and the tangents of both."""
    it = iter(values)
    sizes, w2, *rest = [next(it) if is_there else None for is_there in there]
    n, q = how.hidden.products, len(how.hidden.operands)
    return sizes, w2, rest[:n], rest[n : n + q], rest[n + q :]


def _as(operands: Sequence[jax.Array], dots: Sequence[Any]) -> list[jax.Array]:
    """Operands of the shapes of their tangents."""
    return [
        x if dot is None else jnp.broadcast_to(x, np.broadcast_shapes(x.shape, dot.shape))
        for x, dot in zip(operands, dots, strict=True)
    ]


def _composed(*values: Any, how: How, there: tuple[bool, ...]) -> jax.Array:
    sizes, w2, accs, operands, dots = _parts(values, how, there)
    shape = next(dot.shape for dot in dots if dot is not None)
    n = how.hidden.products
    product = how.product(sizes, w2.dtype)
    operands = _as([product.rows(x, shape[-2]) for x in operands], dots[n:])
    operand_dots = [dot if dot is None else dot.astype(x.dtype) for x, dot in zip(operands, dots[n:], strict=True)]
    (h_dot,) = derivative.push(how.hidden, shape, accs, operands, dots[:n], operand_dots)
    return product.multiply(h_dot, w2, **how.second)


def _abstract(*avals: Any, how: How, there: tuple[bool, ...]) -> Any:
    sizes, w2, _, _, dots = _parts(avals, how, there)
    h = next(dot for dot in dots if dot is not None)
    return how.product(sizes, w2.dtype).tile(h, w2, layout=how.layout).update(dtype=how.out_dtype)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, jax.Array]:
    places = [i for i, dot in enumerate(tangents) if not is_zero(dot)]

    def along(*values: jax.Array) -> jax.Array:
        new = dict(zip(places, values, strict=True))
        return _composed(*(new.get(i, x) for i, x in enumerate(primals)), **params)

    return jax.jvp(along, tuple(primals[i] for i in places), tuple(tangents[i] for i in places))


def _transpose(g: Any, *values: Any, how: How, there: tuple[bool, ...]) -> list[Any]:
    if is_zero(g):
        return [None] * len(values)
    sizes, w2, accs, operands, dots = _parts(values, how, there)
    n = how.hidden.products
    wide = dataclasses.replace(
        how.hidden, outputs=(dataclasses.replace(how.hidden.outputs[0], dtype=how.hidden.accumulator.name),)
    )
    like = [None if dot is None else dot.aval for dot in dots]

    def pulled(acc: jax.Array, accs: Any, operands: Any) -> list[jax.Array]:
        """The cotangents of what has a tangent, from that of h, before it was rounded."""
        acc_dots = [None if dot is None else jnp.zeros(acc.shape, dot.dtype) for dot in like[:n]]
        along, at = derivative.restrict(wide, acc.shape, accs, _as(operands, like[n:]), acc_dots, like[n:])
        found = jax.vjp(lambda *args: along(*args)[0], *at)[1](acc)
        return [x.astype(dot.dtype) for x, dot in zip(found, (d for d in like if d is not None), strict=True)]

    product = how.product(sizes, w2.dtype)
    g, w2 = dense.with_cotangent(g, w2)
    precision = dot_precision.of_cotangents(how.precision, g.dtype, "mlp")
    how_back = how.first | {"layout": "n" + FLIP[how.layout[1]], "precision": precision}
    how_back["out_dtype"] = dense.accumulator(w2.dtype)
    shape = next(dot.shape for dot in like if dot is not None)
    full = product.tile(*map(jax.typeof, (g, w2)), layout=how_back["layout"]).shape
    axes = [i for i in range(g.ndim - 2) if shape[i] == 1 != full[i]]
    try:
        if axes:
            raise NotImplementedError
        found = product.call(pulled, g, [w2], (accs, operands), save="default", **how_back)
    except NotImplementedError:  # a sum over batch axes: no kernel makes it
        acc = product.multiply(g, w2, **how_back)
        operands = [product.rows(x, acc.shape[-2]) for x in operands]
        found = pulled(acc.sum(axes, keepdims=True) if axes else acc, accs, operands)
    dots = values[len(values) - len(found) :]
    found = [x if is_linear(dot) else None for x, dot in zip(found, dots, strict=True)]
    return [None] * (len(values) - len(found)) + found


def _batch(args: Any, dims: Any, *, how: How, there: tuple[bool, ...]) -> tuple[jax.Array, int]:
    """As rows where w2 is shared, as an axis where all of h's shape has it; elsewhere the transpose is no kernel."""
    grouped, n = there[0], how.hidden.products
    batched = [dim is not None for dim in dims]
    _, w2_batched, accs, operands, dots = _parts(batched, how, there)
    moved = [
        lax.expand_dims(x, [0]) if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)
    ]
    whole = all(x is not False for x in (*accs, *dots[: None if grouped else n]))
    if all(batched) or (grouped and whole):
        return chain_p.bind(*moved, how=how, there=there), 0
    alike = all(dot in (None, x) for x, dot in zip(operands, dots[n:], strict=True))
    if not grouped and not w2_batched and whole and alike and args[0].ndim == 2:
        tile = next(dot for dot in _parts(moved, how, there)[4] if dot is not None)
        folded = fused_dense.fold(how.hidden, tile, moved[1:])
        if folded is not None:
            return fused_dense.unfold(chain_p.bind(args[0], *folded[1][1:], how=how, there=there), tile.shape[:-1]), 0
    return jax.vmap(functools.partial(_composed, how=how, there=there), dims)(*args), 0


chain_p = define(
    "cutjax_chain",
    abstract=_abstract,
    reference=_composed,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)
