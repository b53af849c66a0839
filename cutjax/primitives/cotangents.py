"""The transposition of a product that is linear in some of its arrays: the cotangent of each is a product too.

That of an a with several b is a sum of products, those of b with one a are several products of one a: each of the two
is bound as one product, where the products are alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.binding.rules import is_linear, is_zero
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue, normal
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.factors import sum_to
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import Arithmetic, Product, multiply, plain_products
from cutjax.primitives.together import multiply_each

Pair = tuple[int, int, int]  # the places of a and b among the arrays, and of their product among the results


@dataclasses.dataclass(frozen=True, eq=False)
class Cotangent:
    """A cotangent of a factor, as a product that is not bound yet.

    Attributes:
      product: which.
      factors: what it multiplies.
      context: that of the product that is transposed, and scales of the factor.
      to: the aval of what it is the cotangent of.
      dtype: of the product.
      whole: whether it is the cotangent as it is, of which nothing is added up.
      restored: makes the cotangent of the product.
      params: of the primitive.
    """

    product: Product
    factors: tuple[jax.Array, jax.Array]
    context: Sequence[jax.Array]
    to: Any
    dtype: np.dtype
    whole: bool
    restored: Callable[[jax.Array], jax.Array]
    params: dict[str, Any]

    @property
    def kind(self) -> Any:
        """Everything that products alike have in common."""
        avals = tuple(map(jax.typeof, self.factors))
        return self.product, avals, self.to, self.dtype, self.whole, *self.params.values()

    def finished(self, d: jax.Array) -> jax.Array:
        """Returns the cotangent of the product's result."""
        return sum_to(self.restored(d), self.to)


def transpose(cotangents: Any, *args: Any, product: Product, epilogue: Epilogue, **params: Any) -> list[Any]:
    """Transposes a product in those arrays, factors or operands, of which only the aval is known."""
    places = [i for i, x in enumerate(args) if is_linear(x) and x.aval.dtype != jax.dtypes.float0]
    found: list[Any] = [None] * len(args)
    if not places or all(map(is_zero, cotangents)):
        return found
    shared = {name: params[name] for name in ("precision", "backend", "hints")}
    inner, pairs = _pairs(product, epilogue, len(args))
    if _one_each(product, pairs, places):
        # The context, and the scales of the other factor: what is linear has none.
        alone = epilogue.plain and not product.further
        beside = args[2:] if alone else product.unpack(args, epilogue)[0].context
        plan = functools.partial(_cotangent, cotangents, args, inner, beside=beside, **shared)
        live = [pair for pair in pairs if not is_zero(cotangents[pair[2]])]
        of_a = {i: [plan(0, pair) for pair in live if pair[0] == i] for i in places}
        for i, sums in of_a.items():
            found[i] = _sum(sums) if sums else None
        of_bs = [pair for pair in live if pair[1] in places]
        for pair, d in zip(of_bs, _each([plan(1, pair) for pair in of_bs]), strict=True):
            found[pair[1]] = d
        return found
    # What is linear in products and operands, in plain JAX: of that a product alone is transposed as above.
    outputs = [out for out, g in zip(epilogue.outputs, cotangents, strict=True) if not is_zero(g)]
    live = normal(epilogue.products, epilogue.operands, epilogue.nodes, outputs)

    def function(*linear: jax.Array) -> list[jax.Array]:
        given = iter(linear)
        full = [next(given) if is_linear(x) else x for x in args]
        factors, operands = product.unpack(full, epilogue)
        plain, factors = product.unmade(factors)
        accs = plain_products(plain, factors, epilogue.accumulator, **shared)
        applied = product.applied(live, factors.context, Arithmetic.of(product, factors, shared))
        return list(applied.apply(accs, operands))

    try:
        made = not all(map(product.as_given, range(2)))
        if (epilogue.plain and not made) or (product.unary and 0 in places):
            raise NotImplementedError("a product of two of them is not linear")
        transposed = jax.linear_transpose(function, *(_struct(args[i].aval) for i in places))
        linear = transposed([g for g in cotangents if not is_zero(g)])
    except (NotImplementedError, AssertionError) as error:
        names = ", ".join(f"argument {i}" for i in places)
        raise NotImplementedError(
            f"{product.where}: no transpose, for it is not linear in {names}: {epilogue}; use jax.vjp"
        ) from error
    for i, g in zip(places, linear, strict=True):
        found[i] = g
    return found


def _pairs(product: Product, epilogue: Epilogue, count: int) -> tuple[Product, list[Pair]]:
    """Returns the product of each pair of factors of a plain product, of several, or of a sum; and the pairs."""
    if not epilogue.identities or product.unary:
        return product, []
    places, _ = product.unpack(range(count), epilogue)
    pairs = [(places.a, b, i) for i, b in enumerate(places.bs)]
    if product.further:
        of_a, *of_bs = places.scales
        pairs += [(a, b, i) for i, bs in enumerate(of_bs) for a, b in zip(of_a, bs, strict=True)]
        return product.product, pairs  # pyright: ignore[reportAttributeAccessIssue]
    return product, pairs if epilogue.plain or product.sum_of(2) is not None else []


def _one_each(product: Product, pairs: Sequence[Pair], places: Sequence[int]) -> bool:
    """True if the arrays at these places are factors as they are given, and no two of them are of one pair."""
    linear = [[i for i in pair[:2] if i in places] for pair in pairs]
    given = all(product.as_given(pair.index(i)) for pair, of in zip(pairs, linear, strict=True) for i in of)
    return given and all(len(of) < 2 for of in linear) and {i for of in linear for i in of} == {*places}


def _cotangent(
    cotangents: Sequence[Any],
    args: Sequence[Any],
    product: Product,
    i: int,
    pair: Pair,
    *,
    beside: Sequence[jax.Array],
    precision: Canonical,
    backend: str,
    hints: Hints,
) -> Cotangent:
    """Returns the cotangent of a (i = 0) or b (1) of a plain product of a pair."""
    at_a, at_b, of = pair
    a, b, g = args[at_a], args[at_b], cotangents[of]
    to, other = (a.aval, b) if i == 0 else (b.aval, a)
    g, other = product.with_cotangent(g, other, product.multiplied(to.dtype if i == 0 else other.dtype))
    precision = dot_precision.of_cotangents(precision, g.dtype, product.where)
    back, factors, precision = product.cotangent(i, g, other, precision)
    hints = hints.of_cotangent(i, factors[0] is g)
    factors = back.widened(*factors)
    adding = back.adding(to.shape, *factors)
    laid = adding.laid(to, *map(jax.typeof, factors))
    # Terms narrower than 32 bits are added in f32, and rounded once. One of 8 bits is made of f32 that a kernel writes.
    full = laid.tile(*map(jax.typeof, (*factors, *beside)))
    alone = math.prod(full.shape) == math.prod(to.shape)
    dtype = to.dtype if alone and to.dtype.itemsize > 1 else accumulator(to.dtype)
    # No config: a pinned kernel is for the product it was pinned to.
    params = {"precision": precision, "backend": backend, "hints": hints}
    restored = functools.partial(product.restored, i)
    return Cotangent(laid, factors, beside, to, dtype, alone and adding == back, restored, params)


def _sum(found: Sequence[Cotangent]) -> jax.Array:
    """Returns the sum of cotangents: of one product, where they are products alike."""
    first, *others = found
    total = first.product.sum_of(len(found)) if others and _alike(found) else None
    if total is None:
        return functools.reduce(lax.add, _each(found))
    further = [x for of in zip(*(other.factors for other in others), strict=True) for x in of]
    d = multiply(total, *first.factors, *first.context, *further, out_dtype=first.dtype, **first.params)
    return first.finished(d)


def _each(found: Sequence[Cotangent]) -> list[jax.Array]:
    """Returns cotangents, those of products alike that share the first factor as one product of several b."""
    if len(found) > 1 and _alike(found) and all(x.factors[0] is found[0].factors[0] for x in found):
        first, bs = found[0], [x.factors[1] for x in found]
        ds = multiply_each(first.product, first.factors[0], bs, *first.context, out_dtype=first.dtype, **first.params)
    else:
        ds = [multiply(x.product, *x.factors, *x.context, out_dtype=x.dtype, **x.params) for x in found]
    return [x.finished(d) for x, d in zip(found, ds, strict=True)]


def _alike(found: Sequence[Cotangent]) -> bool:
    """True if products differ in their arrays alone, and both factors are of one dtype."""
    a, b = found[0].factors
    return found[0].whole and a.dtype == b.dtype and len({x.kind for x in found}) == 1


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, weak_type=aval.weak_type, manual_axis_type=aval.mat
    )
