"""Two products with a function between them: what the layers mlp and grouped_mlp check, and run, alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.binding.rules import match_varying, with_rank
from cutjax.dtypes import are_narrow
from cutjax.ops.arguments import check_save, contracted, elementwise_of
from cutjax.ops.quantized import is_quantized, values_of
from cutjax.ops.scales import Scales, promote_values, scales_of, times
from cutjax.primitives.accumulators import converted
from cutjax.primitives.arrays import matrix
from cutjax.primitives.chain import Chain, apart, block
from cutjax.primitives.factors import Factors
from cutjax.primitives.gathered import Gathered
from cutjax.primitives.product import Product
from cutjax.primitives.tracing import abstract_accumulator, trace_with_dtype


def factors_of_layer(a: Any, w: Any, v: Any, dtype: np.dtype, layout: str) -> list[tuple[Any, Any]]:
    """Returns the factors of both products of a layer, of what lies between them its shape and dtype."""
    h = jax.ShapeDtypeStruct((*a.shape[:-1], contracted(w, layout[1] == "n")), dtype)
    return [(a, w), (h, v)]


def chained(
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
    gathers: Sequence[jax.Array] = (),
    *,
    dtype: np.dtype,
    out_dtype: np.dtype,
    precision: Any,
    backend: str,
    save: str,
) -> jax.Array:
    """Returns ``hidden(x @ w, ..., given) @ v``, with ``last`` added, an array or none, told all scales.

    What runs a product ``of_x`` has its prologue. Where the first product ``gathers`` its rows, by a permutation and
    its inverse, there are neither scales nor a prologue.
    """
    first, second = both
    scales = [scale for scale in second.columns if scale is not None]
    of_rows: Product = Gathered(product, backend) if gathers else product
    factors = of_rows.aligned(Factors(a, [*ws, v], (*context, *gathers)))
    factors, given, scales, last = match_varying(factors, given, scales, last)
    *ws, v = factors.bs
    factors = dataclasses.replace(factors, bs=ws)
    scaled, of_first = (of_rows, factors) if gathers else first.factored(product, a, ws, context)
    acc = abstract_accumulator(scaled.multiplied(a.dtype), of_rows.tile(*map(jax.typeof, factors.arrays)))
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

    return of_x(of_rows, factors, run, precision=precision, backend=backend)


def arrays_of(
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
    check_save(save, where)
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


def scales_of_layer(
    x: Any, w1: Any, w2: Any, gate: Any, layout: str, where: str, rank: int = 0
) -> tuple[Scales, Scales]:
    """Returns the scales of the first product, whose weights are the gate, if any, and w1; and those of the second."""
    names, ws = (("gate", "w1"), (gate, w1)) if gate is not None else (("w1",), w1)
    return scales_of(x, ws, layout, where, ("x", *names), rank), scales_of(None, w2, layout, where, ("x", "w2"), rank)


def scales_of_hidden(first: Scales) -> dict[str, jax.Array]:
    """Returns the scales of rows and columns of the first product, as inputs of the function between the products."""
    *of_gate, columns = first.columns
    found = {"x_scale": first.rows, "scale": columns, "gate_scale": of_gate[0] if of_gate else None}
    return {name: scale for name, scale in found.items() if scale is not None}


def hidden_function(where: str, activation: Callable[[jax.Array], jax.Array], gated: bool) -> Callable[..., jax.Array]:
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
