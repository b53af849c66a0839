"""Products of rows that arrive and sums that leave, chunk by chunk as a Ring has them, and their derivatives."""

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

from cutjax.binding.rules import is_zero
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.families import AnyConfig
from cutjax.parallel.ring import Ring
from cutjax.parallel.wide import wide
from cutjax.primitives import derivative
from cutjax.primitives import product as products
from cutjax.primitives.chain import HIDDEN, Chain, tangent_of_second
from cutjax.primitives.factors import Factors
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import Product, multiply
from cutjax.primitives.tracing import abstract_accumulator

GATHERED = "cutjax_gathered"  # the name jax.checkpoint policies see, of the rows of other devices


# Rows gathered, multiplied as they arrive. Results are by chunk, in the order of the ring.


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The parameters of the products of gathered rows: the dtype in which tangents travel; the last five as gemm's."""

    ring: Ring
    product: Product
    travel: np.dtype
    epilogue: Epilogue
    precision: Any
    backend: str
    config: AnyConfig | None
    save: str

    @property
    def rows(self) -> int:
        """The axis of x that has the rows."""
        return rows_of(self.product)

    @property
    def params(self) -> dict[str, Any]:
        return {"precision": self.precision, "backend": self.backend}

    @property
    def each(self) -> list[Hints]:
        """The hints for each chunk's product."""
        return self.ring.hints

    def bind(self, hints: Hints, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array]) -> Any:
        """Binds the products of one chunk."""
        params = {"hints": hints, "config": self.config, "save": self.save, **self.params}
        return products.bind(self.product, epilogue, factors, operands, **params)

    def accumulator(self, x: jax.Array, ws: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
        """Returns an accumulator of one device's rows, abstract."""
        return abstract_accumulator(self.epilogue.accumulator, self.product.tile(*map(jax.typeof, (x, *ws))))

    def tangents(
        self, xs: Sequence[jax.Array], ws: Sequence[jax.Array], x_dot: Any, w_dots: Any, dtype: np.dtype
    ) -> list[list[Any]]:
        """Returns the tangents of the products, by chunk; None is zero.

        Those of x travel as parts of sums do: transposed, they are such. Those of w are one product.
        """
        found: list[list[Any]] = [[None] * len(ws) for _ in xs]
        if x_dot is not None:
            dots = self.ring.gather(x_dot.astype(self.travel), self.rows)
            params = {"out_dtype": dtype, **self.params}
            of = lambda dot, hints: [wide(self.product, dot, w, hints=hints, **params) for w in ws]  # noqa: E731
            found = self.ring.paced(of, dots, self.each)
        for j, w_dot in enumerate(w_dots):
            if w_dot is None:
                continue
            parts = self.divided_product(xs, w_dot, dtype)
            for dots, part in zip(found, parts, strict=True):
                dots[j] = part if dots[j] is None else dots[j] + part
        return found

    def divided_product(self, xs: Sequence[jax.Array], w: jax.Array, dtype: np.dtype) -> Sequence[jax.Array]:
        return one_product(self.product, xs, w, dtype, **self.params)


def rows_of(product: Product) -> int:
    """Returns the axis of a dense product's x that has the rows."""
    return -2 if getattr(product, "layout", "n")[0] == "n" else -1


def one_product(product: Product, xs: Sequence[jax.Array], w: jax.Array, dtype: np.dtype, **params: Any) -> Any:
    """Returns the products of chunks of rows with one matrix, made as one: its cotangent in w is one product too."""
    whole = multiply(product, jnp.concatenate(xs, rows_of(product)), w, out_dtype=dtype, **params)
    return lax.split(whole, [whole.shape[-2] // len(xs)] * len(xs), whole.ndim - 2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def gathered(spec: Gathered, x: jax.Array, ws: Any, operands: Any) -> list[list[jax.Array]]:
    """Returns the results of the epilogue for each chunk."""
    bind = lambda chunk, mine, hints: spec.bind(hints, spec.epilogue, Factors(chunk, ws), mine)  # noqa: E731
    return spec.ring.arriving(bind, x, spec.rows, operands, spec.each)[1]


def _gathered_jvp(spec: Gathered, primals: Any, tangents: Any) -> Any:
    x, ws, operands = primals
    x_dot, w_dots, operand_dots = without_zeros(tangents)
    epilogue = spec.epilogue
    of = lambda chunk, hints: spec.bind(hints, epilogue, Factors(chunk, ws), ()) if epilogue.plain else ()  # noqa: E731
    xs, plain_outs = spec.ring.arriving(of, x, spec.rows, spec.each, keep=named)
    plain = np.dtype(epilogue.outputs[0].dtype) if epilogue.plain else derivative.saved_dtype(epilogue, x.dtype)
    acc_dots = spec.tangents(xs, ws, x_dot, w_dots, plain)
    if epilogue.plain:
        found = list(zip(plain_outs, acc_dots, strict=True))
    else:
        one = functools.partial(_one, spec, ws)
        given = operands, acc_dots, operand_dots, spec.each
        found = spec.ring.paced(one, xs, *given, until=lambda each: each[0])
    outs = [results for results, _ in found]
    dots = [[zeros(x) if is_none(d) else d for x, d in zip(*each, strict=True)] for each in found]
    return outs, dots


def _one(spec: Gathered, ws: Any, x: jax.Array, operands: Any, acc_dots: Any, operand_dots: Any, hints: Hints) -> Any:
    """Returns results and tangents of one chunk."""
    acc, factors = spec.accumulator(x, ws), Factors(x, ws)
    return derivative.derivative(
        spec.epilogue,
        factors,
        operands,
        operand_dots,
        acc,
        bind=lambda epilogue, operands: spec.bind(hints, epilogue, factors, operands),
        tangents=lambda dtype: acc_dots,
        multiply=lambda factors, dtype: products.plain_products(
            spec.product, factors, dtype, hints=hints, **spec.params
        ),
        pushed=functools.partial(derivative.push, spec.epilogue, acc.shape),
        dtype=derivative.saved_dtype(spec.epilogue, x.dtype),
        save=spec.save,
    )


gathered.defjvp(_gathered_jvp, symbolic_zeros=True)


def named(chunk: jax.Array) -> jax.Array:
    """Returns the rows that were gathered as ``jax.checkpoint`` policies see them."""
    return checkpoint_name(chunk, GATHERED)


def without_zeros(tangents: Any) -> Any:
    """Returns the tangents, None in place of those that are zero."""
    none = lambda t: None if isinstance(t, SymbolicZero) or t.dtype == jax.dtypes.float0 else t  # noqa: E731
    return jax.tree.map(none, tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))


def is_none(dot: Any) -> bool:
    return dot is None or is_zero(dot)


def zeros(out: jax.Array) -> Any:
    """Returns the tangent that is zero."""
    if jnp.issubdtype(out.dtype, jnp.inexact):
        return jnp.zeros_like(out)
    return np.zeros(out.shape, jax.dtypes.float0)


# Rows multiplied, added up over the devices.


@dataclasses.dataclass(frozen=True)
class Scattered:
    """The parameters of products whose rows are added up: dtypes of the sum and of what travels; others as gemm's."""

    ring: Ring
    product: Product
    dtype: np.dtype
    travel: np.dtype
    precision: Any
    backend: str
    config: AnyConfig | None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def scattered(spec: Scattered, xs: Any, w: jax.Array) -> jax.Array:
    """Returns this device's rows of the sum, in the accumulators' dtype."""
    params = {"precision": spec.precision, "backend": spec.backend, "config": spec.config}
    of = lambda x, dtype, hints: multiply(spec.product, x, w, out_dtype=dtype, hints=hints, **params)  # noqa: E731
    return spec.ring.summed(of, xs, spec.dtype, spec.travel)


def _scattered_jvp(spec: Scattered, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Tangents travel in the operands' dtype: transposed, they are the rows of a cotangent."""
    xs, w = primals
    x_dots, w_dot = without_zeros(tangents)
    out = scattered(spec, xs, w)
    params: dict[str, Any] = {"precision": spec.precision, "backend": spec.backend}
    narrow = cotangents_dtype(w.dtype)
    if all(dot is None for dot in x_dots) and w_dot is None:
        return out, jnp.zeros_like(out)
    parts: Sequence[Any] = [None] * len(xs)
    if w_dot is not None:
        parts = one_product(spec.product, xs, w_dot, narrow, **params)
    if all(dot is None for dot in x_dots):
        return out, spec.ring.scatter(parts, narrow).astype(out.dtype)

    def term(dot: jax.Array, part: Any, hints: Hints) -> jax.Array:
        found = multiply(spec.product, dot, w, out_dtype=narrow, hints=hints, **params)
        return found if part is None else found + part

    full = [jnp.zeros_like(x) if dot is None else dot for x, dot in zip(xs, x_dots, strict=True)]
    return out, spec.ring.leaving(term, narrow, full, parts, spec.ring.hints).astype(out.dtype)


scattered.defjvp(_scattered_jvp, symbolic_zeros=True)


def cotangents_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which cotangents of a product of ``dtype`` travel: its own, of at least 16 bits."""
    return dtype if dtype.itemsize > 1 else np.dtype(jnp.bfloat16)


# Two products: rows gathered for the first, added up for the second. Nothing between leaves its chunk.


@dataclasses.dataclass(frozen=True)
class Overlapped:
    """The parameters of mlp over devices: of its two products on one, and how rows travel."""

    ring: Ring
    chain: Chain
    travel: np.dtype

    @property
    def first(self) -> Gathered:
        chain = self.chain
        return Gathered(
            self.ring, chain.product, self.travel, chain.hidden, chain.precision, chain.backend, None, chain.save
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def overlapped(spec: Overlapped, x: jax.Array, ws: Any, w2: jax.Array, operands: Any) -> jax.Array:
    """Returns this device's rows, in the accumulators' dtype."""
    first = spec.first
    bind = lambda chunk, mine, hints: first.bind(hints, first.epilogue, Factors(chunk, ws), mine)  # noqa: E731
    _, hs = spec.ring.arriving(bind, x, -2, operands, first.each)
    return _summed(spec, [h for (h,) in hs], w2)


def _summed(spec: Overlapped, hs: Sequence[jax.Array], w2: jax.Array) -> jax.Array:
    def of(h: jax.Array, dtype: np.dtype, hints: Hints) -> jax.Array:
        return dataclasses.replace(spec.chain, hints=hints, out_dtype=dtype).second(h, w2, ())

    return spec.ring.summed(of, hs, spec.chain.out_dtype, spec.travel)


def _overlapped_jvp(spec: Overlapped, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """As the derivative of a chain, by chunk; the weights' terms are one product each."""
    x, ws, w2, operands = primals
    x_dot, w_dots, w2_dot, operand_dots = without_zeros(tangents)
    first, hidden = spec.first, spec.chain.hidden
    narrow = cotangents_dtype(x.dtype)
    chain = dataclasses.replace(spec.chain, out_dtype=narrow)
    dtype = derivative.saved_dtype(hidden, x.dtype)
    acc_moves = tuple(x_dot is not None or w_dot is not None for w_dot in w_dots)

    def one(ws: Any, chunk: Any, mine: Any, dots: Any, hints: Hints) -> tuple[jax.Array, list[Any]]:
        moves, acc = (acc_moves, derivative.moving(dots)), first.accumulator(chunk, ws)
        needed = derivative.accumulators_needed(hidden, *moves)
        traced = derivative.differentiated(hidden, acc, mine, *moves)
        extended, places = derivative.with_accumulators(traced.epilogue, needed, dtype)
        outs = first.bind(hints, extended, Factors(chunk, ws), traced.operands)
        kept = [None if i is None else checkpoint_name(outs[i], derivative.PREACTIVATION) for i in places]
        return checkpoint_name(outs[0], HIDDEN), kept

    def parts_of(hs: Any, w2_dot: Any) -> Sequence[Any]:
        """Returns the terms of the second matrix, by chunk; None is zero."""
        return [None] * len(hs) if w2_dot is None else one_product(chain.product, hs, w2_dot, narrow, **chain.params)

    def term(dots: Any, part: Any, h: jax.Array, accs: Any, mine: Any, hints: Hints, w2: jax.Array) -> Any:
        """Returns the tangent of one chunk's rows of the second product."""
        own = dataclasses.replace(chain, hints=hints)
        found = tangent_of_second(own, (), h.shape, accs, mine, w2, *dots)
        return part if found is None else found if part is None else found + part

    if spec.chain.save == "recompute":
        xs = list(map(named, spec.ring.gather(x)))
        out = overlapped(spec, x, ws, w2, operands)
        acc_dots = first.tangents(xs, ws, x_dot, w_dots, dtype)

        def again(xs: Any, ws: Any, w2: Any, operands: Any, dots: Any, w2_dot: Any) -> list[Any]:
            found = spec.ring.paced(functools.partial(one, ws), xs, operands, operand_dots, first.each)
            hs, kept = zip(*found, strict=True)
            of_chunks = functools.partial(term, w2=w2)
            return list(map(of_chunks, dots, parts_of(hs, w2_dot), hs, kept, operands, first.each))

        dots = list(zip(acc_dots, operand_dots, strict=True))
        found = jax.checkpoint(again)(xs, ws, w2, operands, dots, w2_dot)
        total = None if all(x is None for x in found) else spec.ring.scatter(found, narrow)
    else:
        given = operands, operand_dots, first.each
        xs, found = spec.ring.arriving(functools.partial(one, ws), x, -2, *given, keep=named)
        acc_dots = first.tangents(xs, ws, x_dot, w_dots, dtype)
        hs, kept = zip(*found, strict=True)
        out = _summed(spec, hs, w2)
        dots, parts = list(zip(acc_dots, operand_dots, strict=True)), parts_of(hs, w2_dot)
        if w2_dot is None and not jax.tree.leaves(dots):
            total = None
        else:
            given = parts, hs, kept, operands, first.each
            total = spec.ring.leaving(functools.partial(term, w2=w2), narrow, dots, *given)
    return out, jnp.zeros_like(out) if total is None else total.astype(out.dtype)


overlapped.defjvp(_overlapped_jvp, symbolic_zeros=True)
