"""The primitive that routes: from logits the experts of each token, their weights, and the pairs sorted by expert.

Results are the arrays of a ``Routing``, in its order. Operands: logits [*B, tokens, experts], and, if there is one, the
selection bias, float32 in as many axes, each equal or 1. The weights alone have a derivative, in the logits alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cutjax.binding.define import define
from cutjax.binding.explicit import batched
from cutjax.binding.lowering import Target
from cutjax.binding.rules import batch_axis, is_zero, match_varying, on_mesh, zero_tangent
from cutjax.kernels import routing
from cutjax.kernels.device import device_of
from cutjax.primitives.routing import ROUTING, Routing, is_expert, sorted_pairs
from cutjax.runtime import backends
from cutjax.runtime.choice import Choice


def route(logits: jax.Array, bias: jax.Array | None, k: int, scoring: str, renormalize: bool) -> Routing:
    """Returns the routing of tokens, told the selection bias in as many axes as the logits; all checked before."""
    if logits.dtype.name not in routing.LOGITS:
        logits = logits.astype(np.float32)
    given = [] if bias is None else [lax.stop_gradient(bias).astype(np.float32)]
    params = {"k": k, "scoring": scoring, "renormalize": renormalize, "backend": backends.resolve(None, "route")}
    found = route_p.bind(*match_varying(logits, *given), **params)
    return Routing(*(checkpoint_name(x, ROUTING) for x in found))


def _abstract(logits: Any, *bias: Any, k: int, **_: Any) -> list[Any]:
    batch = lax.broadcast_shapes(logits.shape[:-2], *(x.shape[:-2] for x in bias))
    tokens, experts = logits.shape[-2:]
    pairs = tokens, k
    found = []
    for i, shape in enumerate((pairs, pairs, (tokens * k,), pairs, (experts,))):
        spec = batched(len(shape), *(x.sharding.spec[:-2] for x in (logits, *bias)))
        sharding = on_mesh(logits, *bias).update(spec=spec)
        dtype = np.dtype(np.float32 if i == 1 else np.int32)
        found.append(logits.update(shape=(*batch, *shape), dtype=dtype, weak_type=False, sharding=sharding))
    return found


def _reference(logits: jax.Array, *bias: jax.Array, k: int, scoring: str, renormalize: bool, **_: Any) -> list[Any]:
    logits = scores = logits.astype(np.float32)
    if bias:
        scores = (jax.nn.softmax(logits) if scoring == "softmax" else jax.nn.sigmoid(logits)) + bias[0]
    # A NaN is chosen first, on every platform, and so shows in the token's result.
    indices = lax.top_k(jnp.where(jnp.isnan(scores), jnp.inf, scores), k)[1]
    picked = _picked(logits if scoring == "softmax" else jax.nn.log_sigmoid(logits), indices)
    if renormalize:
        weights = jax.nn.softmax(picked)  # of logarithms: no sum to divide by that may be zero
    elif scoring == "softmax":
        weights = jnp.exp(picked - jax.nn.logsumexp(logits, -1, keepdims=True))
    else:
        weights = jnp.exp(picked)
    return [indices, weights, *sorted_pairs(indices, logits.shape[-1])]


def _picked(scores: jax.Array, indices: jax.Array) -> jax.Array:
    """Computes the scores of the chosen: a masked sum and not a gather, whose transpose would be a scatter-add."""
    return jnp.where(is_expert(indices, scores.shape[-1]), scores[..., None, :], 0).sum(-1)


def _picked_one_by_one(scores: jax.Array, indices: jax.Array) -> jax.Array:
    """Computes the same, whose transpose adds up k masked terms: elementwise, where it would be a reduction."""
    experts = lax.broadcasted_iota(indices.dtype, (*(1 for _ in scores.shape[:-1]), scores.shape[-1]), scores.ndim - 1)
    chosen = (indices[..., i, None] == experts for i in range(indices.shape[-1]))
    return jnp.stack([jnp.where(mask, scores, 0).sum(-1) for mask in chosen], -1)


def _choose(
    *avals: Any, k: int, scoring: str, renormalize: bool, backend: str, target: Target
) -> Choice[routing.Problem, routing.Kernel]:
    logits, bias = (*avals, None)[:2]
    return routing.choose(routing.Problem.of(logits, bias, k, scoring, renormalize, device_of(target)), backend)


def _batch(args: Any, dims: Any, **params: Any) -> tuple[list[jax.Array], list[int]]:
    return route_p.bind(*batch_axis(args, dims, 0), **params), [0] * 5


def _jvp(primals: Any, tangents: Any, *, scoring: str, renormalize: bool, **params: Any) -> tuple[Any, list[Any]]:
    params |= {"scoring": scoring, "renormalize": renormalize}
    outs = [checkpoint_name(x, ROUTING) for x in route_p.bind(*primals, **params)]
    dots = [zero_tangent(x) for x in outs]
    if not is_zero(tangents[0]):
        pushed = functools.partial(_pushed, scoring=scoring, renormalize=renormalize)
        # Or the mask [*B, tokens, k, experts] would be kept.
        dots[1] = jax.checkpoint(pushed, prevent_cse=False)(primals[0], *outs[:2], tangents[0])
    return outs, dots


def _pushed(
    logits: jax.Array, indices: jax.Array, weights: jax.Array, dot: jax.Array, scoring: str, renormalize: bool
) -> jax.Array:
    """Computes the tangent of the weights, of those and of the tangent of the logits."""
    logits, dot = logits.astype(np.float32), dot.astype(np.float32)
    if scoring == "sigmoid":
        dot = dot * jax.nn.sigmoid(-logits)  # that of the scores' logarithms
    moved = _picked_one_by_one(dot, indices)
    if renormalize:
        moved = moved - (weights * moved).sum(-1, keepdims=True)
    elif scoring == "softmax":
        moved = moved - (jax.nn.softmax(logits) * dot).sum(-1, keepdims=True)
    return weights * moved


route_p = define(
    "cutjax_route",
    abstract=_abstract,
    reference=_reference,
    batch=_batch,
    choose=_choose,
    required=False,
    jvp=_jvp,
    multiple_results=True,
)
