"""Two products with an epilogue between them, dense or grouped: mlp and grouped_mlp are made of them; and chain_p.

h = epilogue(x @ w1, ..., operands)
y = h @ w2 + b2
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from cutjax import dot_precision
from cutjax.binding.define import define
from cutjax.binding.partition import mark_of
from cutjax.binding.rules import batch_axis, is_linear, is_zero, lying_as, match_varying
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue
from cutjax.epilogue.trace import Traced
from cutjax.primitives import derivative
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import accumulator, with_cotangent
from cutjax.primitives.factors import Factors
from cutjax.primitives.hints import NO_HINTS, Hints
from cutjax.primitives.product import Arithmetic, Product
from cutjax.primitives.together import multiply_each
from cutjax.primitives.tracing import abstract_accumulator

HIDDEN = "cutjax_hidden"  # the name jax.checkpoint policies see, of what the second product reads


@dataclasses.dataclass(frozen=True)
class Chain:
    """The parameters of two products: everything known of them when they are traced.

    Attributes:
      product: which two: dense, or of rows in groups.
      first: the first, where it is another: of what a prologue makes.
      hidden: the epilogue of the first.
      out_dtype: of the result.
      precision, backend, save: as gemm's.
      hints: of both.
    """

    product: Product
    hidden: Epilogue
    out_dtype: np.dtype
    precision: Canonical
    backend: str
    save: str
    hints: Hints = NO_HINTS
    first: Product | None = None

    @property
    def of_hidden(self) -> Product:
        """The first product."""
        return self.first or self.product

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of both products."""
        return {"precision": self.precision, "backend": self.backend, "hints": self.hints}

    @property
    def of_second(self) -> dict[str, Any]:
        """The parameters of the second product: a float8 algorithm is of the first alone, where that widens."""
        precision = dot_precision.of_wider(self.precision) if self.dtype.itemsize > 1 else self.precision
        return {**self.params, "precision": precision}

    @property
    def dtype(self) -> np.dtype:
        """The dtype of what lies between the products, in which the second is."""
        return np.dtype(self.hidden.outputs[0].dtype)

    @property
    def arithmetic(self) -> Arithmetic:
        """The dtype of the second product, and its parameters."""
        return Arithmetic(self.dtype, self.of_second["precision"], self.backend)

    def context(self, factors: Factors) -> Sequence[Any]:
        """Returns the context of the second product: the first one's, but for what of that gathers rows."""
        return factors.context[: len(self.product.axes) - 2]

    def second(self, h: jax.Array, w2: jax.Array, context: Sequence[jax.Array]) -> jax.Array:
        """Returns the second product, or one like it."""
        return products.multiply(self.product, h, w2, *context, out_dtype=self.out_dtype, **self.of_second)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def block(chain: Chain, factors: Factors, w2: Any, operands: Any, b2: Any) -> jax.Array:
    """Returns the result, told the factors of the first product; b2 is a list of one array or none."""
    (h,) = products.bind(chain.of_hidden, chain.hidden, factors, operands, save=chain.save, **chain.params)
    return _second(chain, chain.context(factors), h, w2, b2)


def apart(
    chain: Chain,
    first: tuple[Product, Factors],
    second: Callable[[jax.Array], tuple[Product, Factors]],
    hidden: Callable[..., jax.Array],
    given: Any,
    b2: Sequence[jax.Array],
    scales: Sequence[jax.Array],
) -> jax.Array:
    """Returns the result of two operations, each with its own derivative: of what no kernel can differentiate.

    Or where factors, or the second product, have scales.
    """
    (out,) = chain.hidden.outputs
    params = {"out_dtype": (out.dtype,), "save": chain.save, **chain.params}
    product, factors = first
    return _finished(chain, *second(products.call(product, hidden, factors, (given,), **params)), b2, scales)


def _second(chain: Chain, context: Any, h: jax.Array, w2: jax.Array, b2: Sequence[jax.Array]) -> jax.Array:
    return _finished(chain, chain.product, Factors(h, [w2], context), b2)


def _finished(
    chain: Chain,
    product: Product,
    factors: Factors,
    b2: Sequence[jax.Array],
    scales: Sequence[jax.Array] = (),
) -> jax.Array:
    """Returns the second product, times its scales and with the bias added, one or none each."""
    if not b2 and not scales:
        return products.multiply(product, *factors.arrays, out_dtype=chain.out_dtype, **chain.of_second)

    def finished(acc: jax.Array, scales: Sequence[jax.Array], b2: Sequence[jax.Array]) -> jax.Array:
        acc = functools.reduce(lambda acc, scale: acc * scale.astype(acc.dtype), scales, acc)
        return functools.reduce(lambda acc, b: acc + b.astype(acc.dtype), b2, acc)

    params = {"out_dtype": chain.out_dtype, "save": chain.save, **chain.of_second}
    return products.call(product, finished, factors, (list(scales), list(b2)), **params)


def _block_jvp(chain: Chain, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """y' = h' @ w2 + h @ w2' + b2', where h' @ w2 is one operation, because its transpose is one kernel."""
    factors, w2, operands, b2 = primals
    dots, w2_dot, operand_dots, b2_dot = jax.tree.map(
        _none_if_zero, tangents, is_leaf=lambda t: isinstance(t, SymbolicZero)
    )
    product, hidden, context = chain.of_hidden, chain.hidden, chain.context(factors)
    of_factors = product.multiplied(factors.a.dtype)
    dtype = derivative.saved_dtype(hidden, of_factors)

    def multiply(of: Product, a: jax.Array, bs: Sequence[jax.Array], *scales: jax.Array) -> list[jax.Array]:
        return multiply_each(of, a, bs, *factors.context, *scales, out_dtype=dtype, **chain.params)

    acc_dots = product.tangents(multiply, factors, dots)
    moves = derivative.moving(acc_dots), derivative.moving(operand_dots)
    needed = derivative.accumulators_needed(hidden, *moves)
    acc = abstract_accumulator(of_factors, product.tile(*map(jax.typeof, factors.arrays)))
    valued, factors = product.beside(factors, dots)

    def values(operands: Any) -> Traced:
        return derivative.differentiated(hidden, acc, operands, *moves, product.groups(factors.bs))

    def forward(factors: Factors, operands: Any) -> tuple[jax.Array, list[Any]]:
        traced = values(operands)
        extended, places = derivative.with_accumulators(traced.epilogue, needed, dtype)
        outs = products.bind(valued, extended, factors, traced.operands, save=chain.save, **chain.params)
        kept = [None if i is None else checkpoint_name(outs[i], derivative.PREACTIVATION) for i in places]
        return checkpoint_name(outs[0], HIDDEN), kept

    def tangent(h: Any, kept: Any, w2: Any, operands: Any, acc_dots: Any, operand_dots: Any, w2_dot: Any) -> list[Any]:
        dot = tangent_of_second(chain, context, h.shape, kept, operands, w2, acc_dots, operand_dots)
        terms = [] if dot is None else [dot]
        if w2_dot is not None:
            terms.append(chain.second(h, w2_dot, context))
        return terms

    if chain.save == "recompute":
        traced = values(operands)
        again = dataclasses.replace(chain, hidden=traced.epilogue, first=valued)
        y = block(again, factors, w2, list(traced.operands), b2)

        def recomputed(factors: Factors, w2: Any, operands: Any, *dots: Any) -> list[Any]:
            return tangent(*forward(factors, operands), w2, operands, *dots)

        terms = jax.checkpoint(recomputed)(factors, w2, operands, acc_dots, operand_dots, w2_dot)
    else:
        h, kept = forward(factors, operands)
        y = _second(chain, context, h, w2, b2)
        terms = tangent(h, kept, w2, operands, acc_dots, operand_dots, w2_dot)
    wide = accumulator(y.dtype)  # the transpose sums over rows in it
    terms += [jnp.broadcast_to(dot.astype(wide), y.shape).astype(y.dtype) for dot in b2_dot if dot is not None]
    return y, functools.reduce(lax.add, terms) if terms else jnp.zeros_like(y)


block.defjvp(_block_jvp, symbolic_zeros=True)


def _none_if_zero(dot: Any) -> Any:
    return None if isinstance(dot, SymbolicZero) or dot.dtype == jax.dtypes.float0 else dot


# h' @ w2, of the tangents of the accumulators and the operands. h' is made by XLA and read by the second kernel; the
# transpose is one kernel, the product with w2 transposed whose epilogue multiplies by the activation's derivative.
# None among the arguments stands for an accumulator that is not needed, or a tangent of zero: ``present`` says which
# are given. Where there are groups the tangents of operands are of h's shape, but for those of a value a row: sums of
# a row are all that a kernel makes there.


def tangent_of_second(
    chain: Chain,
    context: Any,
    shape: tuple[int, ...],
    kept: Any,
    operands: Any,
    w2: Any,
    acc_dots: Any,
    operand_dots: Any,
) -> jax.Array | None:
    """Returns h' @ w2, of the accumulators that were kept, for an h of that shape; None is zero, as among tangents."""
    product, arithmetic = chain.product, chain.arithmetic
    if any(derivative.moving(acc_dots)):
        dots = [dot if dot is None else product.whole(dot, context, shape, arithmetic) for dot in operand_dots]
        return _chain(chain, context, kept, operands, w2, acc_dots, dots)
    if any(derivative.moving(operand_dots)):
        applied = product.applied(chain.hidden, context, arithmetic)
        (dot,) = derivative.push(applied, shape, kept, operands, acc_dots, operand_dots)
        return chain.second(dot, w2, context)
    return None


def _chain(
    chain: Chain, context: Any, accs: Any, operands: Any, w2: Any, acc_dots: Any, operand_dots: Any
) -> jax.Array:
    args = (*context, w2, *accs, *operands, *acc_dots, *operand_dots)
    present = tuple(x is not None for x in args)
    values = match_varying(*(x for x in args if x is not None))
    return _bind(*values, chain=chain, present=present)


def _bind(*values: jax.Array, chain: Chain, present: tuple[bool, ...]) -> jax.Array:
    return chain_p.bind(*values, chain=chain, present=present, mark=mark_of(chain.backend))


class _Parts(NamedTuple):
    """The arguments of the primitive, None where one is not given; ``dots`` are the tangents of both."""

    context: list[Any]
    w2: Any
    accs: list[Any]
    operands: list[Any]
    dots: list[Any]


def _parts(values: Sequence[Any], chain: Chain, present: tuple[bool, ...]) -> _Parts:
    it = iter(values)
    args = [next(it) if given else None for given in present]
    context = len(chain.product.axes) - 2
    accs = context + 1 + chain.hidden.products
    operands = accs + len(chain.hidden.operands)
    return _Parts(args[:context], args[context], args[context + 1 : accs], args[accs:operands], args[operands:])


def _shaped(operands: Sequence[jax.Array], dots: Sequence[Any]) -> list[jax.Array]:
    """Returns operands of the shapes of their tangents."""
    return [
        x if dot is None else jnp.broadcast_to(x, lax.broadcast_shapes(x.shape, dot.shape))
        for x, dot in zip(operands, dots, strict=True)
    ]


def _composed(*values: Any, chain: Chain, present: tuple[bool, ...]) -> jax.Array:
    context, w2, accs, operands, dots = _parts(values, chain, present)
    shape = next(dot.shape for dot in dots if dot is not None)
    n, arithmetic = chain.hidden.products, chain.arithmetic
    operands = _shaped([chain.product.seen(x, context, shape[-2], arithmetic) for x in operands], dots[n:])
    operand_dots = [dot if dot is None else dot.astype(x.dtype) for x, dot in zip(operands, dots[n:], strict=True)]
    (h_dot,) = derivative.push(chain.hidden, shape, accs, operands, dots[:n], operand_dots)
    return chain.second(h_dot, w2, context)


def _abstract(*avals: Any, chain: Chain, present: tuple[bool, ...]) -> Any:
    context, w2, _, _, dots = _parts(avals, chain, present)
    h = next(dot for dot in dots if dot is not None)
    return chain.product.tile(h, w2, *context).update(dtype=chain.out_dtype, weak_type=False)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, jax.Array]:
    places = [i for i, dot in enumerate(tangents) if not is_zero(dot)]

    def along(*values: jax.Array) -> jax.Array:
        new = dict(zip(places, values, strict=True))
        return _composed(*(new.get(i, x) for i, x in enumerate(primals)), **params)

    return jax.jvp(along, tuple(primals[i] for i in places), tuple(tangents[i] for i in places))


def _transpose(g: Any, *values: Any, chain: Chain, present: tuple[bool, ...]) -> list[Any]:
    if is_zero(g):
        return [None] * len(values)
    context, w2, accs, operands, dots = _parts(values, chain, present)
    n = chain.hidden.products
    wide = dataclasses.replace(
        chain.hidden, outputs=(dataclasses.replace(chain.hidden.outputs[0], dtype=chain.hidden.accumulator.name),)
    )
    like = [None if dot is None else dot.aval for dot in dots]

    def pulled(acc: jax.Array, accs: Any, operands: Any) -> list[jax.Array]:
        """Returns the cotangents of the inputs with tangents, from that of h before it was rounded."""
        acc_dots = [None if dot is None else jnp.zeros(acc.shape, dot.dtype) for dot in like[:n]]
        along, at = derivative.restrict(wide, acc.shape, accs, _shaped(operands, like[n:]), acc_dots, like[n:])
        dot, pull = jax.vjp(lambda *args: along(*args)[0], *at)
        found = pull(lying_as(acc, jax.typeof(dot)))
        return [x.astype(dot.dtype) for x, dot in zip(found, (d for d in like if d is not None), strict=True)]

    arithmetic = chain.arithmetic
    g, w2 = with_cotangent(g, w2, chain.dtype)
    back, factors, _ = chain.product.cotangent(0, g, w2, None)
    params: dict[str, Any] = {"backend": chain.backend, "out_dtype": accumulator(chain.dtype)}
    params["hints"] = chain.hints.of_cotangent(0, factors[0] is g)
    params["precision"] = dot_precision.of_cotangents(chain.precision, g.dtype, "mlp")
    shape = next(dot.shape for dot in like if dot is not None)
    hidden = next((jax.typeof(x) for x in accs if x is not None), None) or next(filter(None, like))
    back = back.laid(hidden, *map(jax.typeof, factors))
    full = back.tile(*map(jax.typeof, (*factors, *context))).shape
    axes = [i for i in range(g.ndim - 2) if shape[i] == 1 != full[i]]
    try:
        if axes:
            raise NotImplementedError
        found = products.call(back, pulled, Factors(g, [w2], context), (accs, operands), **params)
    except NotImplementedError:  # a sum over batch axes: no kernel makes it
        acc = products.multiply(back, g, w2, *context, **params)
        operands = [back.seen(x, context, acc.shape[-2], arithmetic) for x in operands]
        found = pulled(acc.sum(axes, keepdims=True) if axes else acc, accs, operands)
    dots = values[len(values) - len(found) :]
    found = [lying_as(x, dot.aval) if is_linear(dot) else None for x, dot in zip(found, dots, strict=True)]
    return [None] * (len(values) - len(found)) + found


def _batch(args: Any, dims: Any, *, chain: Chain, present: tuple[bool, ...]) -> tuple[jax.Array, int]:
    """Batches as rows where w2 is shared, as an axis where all of h's shape has it; else the transpose is no kernel."""
    batched = [dim is not None for dim in dims]
    context, w2_batched, accs, operands, dots = _parts(batched, chain, present)
    grouped, n = bool(context), chain.hidden.products
    moved = batch_axis(args, dims, 0)
    whole = all(x is not False for x in (*accs, *dots[: None if grouped else n]))
    if all(batched) or (grouped and whole):
        return _bind(*moved, chain=chain, present=present), 0
    alike = all(dot in (None, x) for x, dot in zip(operands, dots[n:], strict=True))
    if not grouped and not w2_batched and whole and alike and args[0].ndim == 2:
        tile = next(dot for dot in _parts(moved, chain, present).dots if dot is not None)
        folded = chain.product.fold(chain.hidden, Factors(tile, moved[:1]), moved[1:])
        if folded is not None:
            return folded.unfold(_bind(args[0], *folded.operands, chain=chain, present=present)), 0
    return jax.vmap(functools.partial(_composed, chain=chain, present=present), dims)(*args), 0


chain_p = define(
    "cutjax_chain",
    abstract=_abstract,
    reference=_composed,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)
