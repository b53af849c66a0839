"""Products over devices with functions of their accumulators: an epilogue on gathered rows, and mlp."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cutjax.binding.rules import match_varying
from cutjax.epilogue.expression import Epilogue
from cutjax.parallel.overlap import Gathered, Overlapped, Scattered, gathered, overlapped, scattered
from cutjax.parallel.ring import Ring
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.chain import Chain
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors
from cutjax.primitives.tracing import abstract_accumulator, trace_with_dtype


def fused(
    spec: Gathered,
    fn: Callable[..., Any],
    x: jax.Array,
    ws: Sequence[jax.Array],
    given: Any,
    out_dtype: Any,
    where: str,
) -> Any:
    """Multiplies the gathered rows and applies an epilogue to the accumulators of each device's."""
    ring, m = spec.ring, x.shape[spec.rows]
    tile = spec.product.tile(*map(jax.typeof, (x, *ws)))
    everything = tile.update(shape=(*tile.shape[:-2], ring.size * m, tile.shape[-1]))
    acc = abstract_accumulator(x.dtype, everything, out_dtype)
    traced = trace_with_dtype(where, fn, [acc] * len(ws), given, out_dtype)
    check_rows(traced.epilogue, where)
    if traced.outside is not None:  # each call takes its derivative as gemm does
        chunks = ring.gather(x, spec.rows)
        params = {"out_dtype": out_dtype, "config": spec.config, "save": spec.save, **spec.params}
        leaves, tree = jax.tree.flatten(given)
        outs = [
            products.call(spec.product, fn, Factors(chunk, ws), tree.unflatten(mine), hints=hints, **params)
            for chunk, mine, hints in zip(chunks, by_chunk(ring, leaves, acc.shape[-2]), spec.each, strict=True)
        ]
        return jax.tree.map(lambda *parts: ring.assembled(parts, parts[0].ndim - acc.ndim - 2), *outs)
    x, *rest = match_varying(x, *ws, *traced.operands)
    ws, operands = rest[: len(ws)], rest[len(ws) :]
    spec = dataclasses.replace(spec, epilogue=traced.epilogue)
    outs = gathered(spec, x, ws, by_chunk(ring, operands, acc.shape[-2]))
    axes = [-1 if "col" in out.axes else -2 for out in traced.epilogue.outputs]
    return traced.finish(
        [ring.assembled(parts, axis) for parts, axis in zip(zip(*outs, strict=True), axes, strict=True)]
    )


def divided_mlp(
    ring: Ring,
    layout: str,
    hidden: Callable[..., jax.Array],
    x: jax.Array,
    ws: Sequence[jax.Array],
    w2: jax.Array,
    given: dict[str, jax.Array],
    last: Sequence[jax.Array],
    *,
    dtype: np.dtype,
    out_dtype: np.dtype,
    travel: np.dtype,
    **params: Any,
) -> jax.Array:
    """Returns ``hidden(x @ w, ..., given) @ w2`` over the devices of a ring, with ``last``, an array or none, added."""
    where, product = "mlp", Dense(layout)
    factors, given = match_varying(product.aligned(Factors(ring.varying(x), [*ws, w2])), given)
    x, *ws, w2 = factors.arrays
    tile = product.tile(*map(jax.typeof, (x, *ws)))
    m = ring.size * x.shape[-2]
    acc = abstract_accumulator(x.dtype, tile.update(shape=(*tile.shape[:-2], m, tile.shape[-1])))
    traced = trace_with_dtype(where, hidden, [acc] * len(ws), (given,), (dtype,))
    check_rows(traced.epilogue, where)
    wide = accumulator(dtype, out_dtype)
    ring = ring.chosen(product, jax.typeof(x), [jax.typeof(w) for w in ws], jax.typeof(w2), travel)
    chain = Chain(product, traced.epilogue, wide, params["precision"], params["backend"], params["save"])
    if traced.outside is not None or traced.names:  # each call takes its derivative as gemm does
        first = Gathered(ring, product, travel, traced.epilogue, chain.precision, chain.backend, None, chain.save)
        more = {"out_dtype": (dtype,), "save": chain.save, **first.params}
        names = list(given)
        hs = [
            products.call(
                product, hidden, Factors(chunk, ws), (dict(zip(names, mine, strict=True)),), hints=hints, **more
            )
            for chunk, mine, hints in zip(
                ring.gather(x), by_chunk(ring, list(given.values()), m), first.each, strict=True
            )
        ]
        y = scattered(Scattered(ring, product, wide, travel, chain.precision, chain.backend, None), hs, w2)
    else:
        x, w2, *rest = match_varying(x, w2, *ws, *traced.operands)
        ws, operands = rest[: len(ws)], rest[len(ws) :]
        y = overlapped(Overlapped(ring, chain, travel), x, ws, w2, by_chunk(ring, operands, m))
    for b in last:
        y, b = match_varying(y, b)
        y = y + b.astype(y.dtype)
    return y.astype(out_dtype)


def by_chunk(ring: Ring, operands: Sequence[Any], m: int) -> list[list[Any]]:
    """Returns each chunk's operands: of those with all rows its own."""
    found = [ring.divided(x, -2) if np.ndim(x) > 1 and x.shape[-2] == m != 1 else [x] * ring.chunks for x in operands]
    return [[parts[i] for parts in found] for i in range(ring.chunks)]


def check_rows(epilogue: Epilogue, where: str) -> None:
    """Raises if an epilogue depends on which row is which: each of its kernels has those of one device."""
    if any("row" in out.axes for out in epilogue.outputs):
        raise NotImplementedError(f"{where}: the epilogue reduces over rows, which come in parts: reduce its result")
    if any(node.op == "iota" and ("row" in node.params or len(node.params) > 1) for node in epilogue.nodes):
        raise NotImplementedError(f"{where}: the epilogue uses positions of rows, which come in parts: pass an operand")
