"""The primitive of attention of few query rows: scores, an expression of them, a softmax and the mixed values.

Its operands are queries [batch, heads, group, time, key_size], of which each group has one head of keys and values;
keys and values, [batch, keys, heads, size] or [batch, heads, keys, size] as ``keys_first`` says of each; and the
expression's own, of size 1 along axes of [batch, heads, group, time, keys] on which they do not depend. The expression
is of the scores in float32. The result is [batch, heads, group, time, value_size].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding.define import define
from cutjax.binding.lowering import Target
from cutjax.binding.partition import Rules, mark_of
from cutjax.binding.placement import Labels, Placement, Rule
from cutjax.binding.rules import batch_axis, match_varying, transposed, written_out
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels import attention
from cutjax.kernels.device import device_of
from cutjax.primitives.partition import located
from cutjax.runtime.choice import Choice

_TILE: Labels = ("b", "h", None, None, None)  # of scores, and of results


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array, backend: str = "auto", **params: Any
) -> jax.Array:
    """Binds the primitive."""
    (out,) = attention_p.bind(*match_varying(q, k, v, *operands), backend=backend, **params, mark=mark_of(backend))
    return out


def _abstract(q: Any, k: Any, v: Any, *_: Any, out_dtype: np.dtype, **__: Any) -> list[Any]:
    return [q.update(shape=(*q.shape[:-1], v.shape[-1]), dtype=np.dtype(out_dtype), weak_type=False)]


def _reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *operands: jax.Array,
    expression: Epilogue,
    keys_first: tuple[bool, bool],
    out_dtype: np.dtype,
    **_: Any,
) -> list[jax.Array]:
    k, v = (jnp.swapaxes(x, 1, 2) if first else x for x, first in zip((k, v), keys_first, strict=True))
    scores = jnp.einsum("bhgtd,bhsd->bhgts", q, k, preferred_element_type=np.float32)
    (scores,) = expression.apply([scores], operands)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    return [jnp.einsum("bhgts,bhsd->bhgtd", weights, v, preferred_element_type=np.float32).astype(out_dtype)]


def _choose(*avals: Any, expression: Epilogue, backend: str, target: Target, **params: Any) -> Choice:
    problem = attention.Problem.of(*avals, expression=expression.primal, device=device_of(target), **params)
    return attention.choose(problem, backend)


def _batch(args: Any, dims: Any, **params: Any) -> tuple[list[jax.Array], list[int]]:
    """Joins the axis with that of the batch, where nothing counts it; keys for several queries are not written out."""
    counted = {node.params[1:] for node in params["expression"].nodes if node.op == "iota"} - {(), (0,), (1,)}
    if counted or None in dims[:3]:
        return jax.vmap(lambda *args: _reference(*args, **params), dims)(*args), [0]
    given = batch_axis(args, dims, 0)
    size, batch = given[0].shape[:2]
    joined = [
        lax.reshape(x if x.shape[:2] == (1, 1) else jnp.broadcast_to(x, (size, batch, *x.shape[2:])), shape)
        for x in given
        for shape in [(1 if x.shape[:2] == (1, 1) else size * batch, *x.shape[2:])]
    ]
    out = attend(*joined, **params)
    return [lax.reshape(out, (size, batch, *out.shape[1:]))], [0]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Differentiates plain JAX's."""
    _, dots = jax.jvp(lambda *args: _reference(*args, **params), tuple(primals), written_out(tangents))
    return [attend(*primals, **params)], dots


def _orders(keys_first: tuple[bool, bool]) -> list[Labels]:
    return [("b", None, "h", None) if first else ("b", "h", None, None) for first in keys_first]


def _rule(*avals: Any, keys_first: tuple[bool, bool], **_: Any) -> Rule:
    operands = [tuple(label if n != 1 else None for n, label in zip(x.shape, _TILE, strict=True)) for x in avals[3:]]
    return Rule((_TILE, *_orders(keys_first), *operands), (_TILE,), 3, ())


def _shard(
    placement: Placement, *shards: jax.Array, avals: Sequence[Any], expression: Epilogue, mark: Any, **params: Any
) -> list[jax.Array]:
    full = (*avals[0].shape[:-1], avals[1].shape[1 if params["keys_first"][0] else 2])
    expression, more = located(expression, full, _TILE, placement)
    return [attend(*shards, *more, expression=expression, **params)]


attention_p = define(
    "cutjax_attention",
    abstract=_abstract,
    reference=_reference,
    batch=_batch,
    choose=_choose,
    required=False,
    jvp=_jvp,
    transpose=transposed(_reference),
    divided=Rules(_rule, _shard),
    multiple_results=True,
)
