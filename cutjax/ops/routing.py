"""Routing of tokens to experts: the choice of experts, and the rows of the tokens sorted by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.typing import ArrayLike

from cutjax.binding.define import define
from cutjax.binding.rules import is_zero, match_varying, with_rank, zero_tangent
from cutjax.ops.arguments import check_rows, integer, matrix, unwrapped
from cutjax.ops.explicit import automatic, axes
from cutjax.primitives.accumulators import accumulator

SCORING = ("softmax", "sigmoid")
ROUTING = "cutjax_routing"  # the name jax.checkpoint policies see


class Routing(NamedTuple):
    """The experts of each token, and the (token, expert) pairs sorted by expert: what ``cutjax.route`` returns.

    A pair's index is ``token * k + choice``. Sorted, the pairs of one expert are neighbours, in the order of their
    tokens: they are the rows of one group of a grouped product.

    Attributes:
      indices: int32 ``[..., tokens, k]``, the experts of each token, the best first.
      weights: float32 ``[..., tokens, k]``, the weight of each in the token's result.
      permutation: int32 ``[..., tokens * k]``, for each row the pair it belongs to.
      inverse: int32 ``[..., tokens, k]``, for each pair its row.
      group_sizes: int32 ``[..., experts]``, the number of rows of each expert.

    Example:
      >>> import cutjax, jax.numpy as jnp
      >>> routing = cutjax.route(jnp.array([[0.0, 1.0], [3.0, 2.0], [1.0, 5.0]]), k=1)
      >>> routing.group_sizes.tolist()
      [1, 2]
      >>> rows = routing.dispatch(jnp.array([[10.0], [11.0], [12.0]]))
      >>> rows.ravel().tolist()
      [11.0, 10.0, 12.0]
      >>> routing.combine(rows * routing.row_weights()).ravel().tolist()
      [10.0, 11.0, 12.0]
    """

    indices: jax.Array
    weights: jax.Array
    permutation: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array

    @automatic(lambda x, **_: lambda out: [*[None] * (out.ndim - 1), axes(x, -1)])
    def dispatch(self, x: ArrayLike) -> jax.Array:
        """Returns each token's row for each of its experts, by expert: ``[..., tokens, d] -> [..., tokens * k, d]``.

        A gather, whose transpose is ``combine``.
        """
        return _bind(dispatch_p, matrix(x, "x", "dispatch"), self.permutation, self.inverse, self.inverse.shape[:-1])

    @automatic(lambda rows, **_: lambda out: [*[None] * (out.ndim - 1), axes(rows, -1)])
    def combine(self, rows: ArrayLike) -> jax.Array:
        """Computes the sum of the rows of each token: ``[..., tokens * k, d] -> [..., tokens, d]``.

        A gather and a sum in float32 in the order of the choices, rounded once: deterministic. Its transpose is
        ``dispatch``.
        """
        return _bind(combine_p, matrix(rows, "rows", "combine"), self.permutation, self.inverse, self.permutation.shape)

    @automatic(lambda **_: lambda out: [None] * out.ndim)
    def row_weights(self) -> jax.Array:
        """Returns the weight of each row, ``[..., tokens * k, 1]``."""
        pairs = self.permutation.shape
        return _bind(
            dispatch_p, self.weights.reshape(*pairs, 1), self.permutation, self.inverse.reshape(*pairs, 1), pairs
        )


def _as_tokens(router_logits: Any, **_: Any) -> Callable[[Any], list[Any]]:
    """Returns the sharding of a routing's array: as the logits if it has a row for each token, else whole."""
    tokens, rank = router_logits.shape[:-1], router_logits.ndim
    return lambda out: [
        axes(router_logits, i - rank) if out.shape[:-1] == tokens and i < rank - 1 else None for i in range(out.ndim)
    ]


@automatic(_as_tokens)
def route(
    router_logits: ArrayLike,
    k: int = 2,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    selection_bias: ArrayLike | None = None,
) -> Routing:
    """Chooses the k best experts of each token, and sorts the (token, expert) pairs by expert.

    Every token keeps all its k experts, whatever the sizes of the groups become. Computed in float32. Deterministic:
    the choice is that of ``jax.lax.top_k``, of equal scores the first expert (it may put 0.0 before -0.0), and the sort
    is stable. The weights are differentiable in the logits, without a scatter in the backward pass; the choice itself
    has no derivative.

    The default is the softmax over the chosen experts of Mixtral, Qwen3-MoE and gpt-oss. Switch Transformer and
    DeepSeek-V2 do without ``renormalize``. DeepSeek-V3 has the ``scoring`` "sigmoid" and a ``selection_bias``.

    Args:
      router_logits: ``[..., tokens, experts]``. -inf excludes an expert.
      k: how many experts a token is sent to.
      scoring: an expert's score is the "softmax" over all experts of the logits, or the "sigmoid" of its own.
      renormalize: whether a token's weights, the scores of its experts, are divided by their sum.
      selection_bias: what broadcasts against the logits, and is added to the scores to choose the experts, not to weigh
        them: ``[experts]`` to balance the load, or 0 and -inf to exclude groups of experts for a token. It has no
        gradient.

    Returns:
      A ``Routing``. Its arrays are named "cutjax_routing" for ``jax.checkpoint`` policies.

    Raises:
      TypeError: if the logits are no floating-point array, or k is no integer.
      ValueError: if k is not in 1 to the number of experts, the scoring is unknown, or the bias does not broadcast.

    Example:
      >>> import cutjax, jax.numpy as jnp
      >>> routing = cutjax.route(jnp.array([[0.0, 2.0, 2.0], [5.0, 0.0, 0.0]]), k=2)
      >>> routing.indices.tolist(), routing.group_sizes.tolist()
      ([[1, 2], [0, 1]], [1, 2, 1])
    """
    return routed(router_logits, k, scoring, renormalize, selection_bias, "route")


def routed(logits: Any, k: Any, scoring: str, renormalize: bool, bias: Any, where: str) -> Routing:
    """Computes ``route``, for the operation that an error is to name."""
    logits, indices = _chosen(logits, k, scoring, bias, where)
    logs = logits if scoring == "softmax" else jax.nn.log_sigmoid(logits)
    picked = jax.checkpoint(_picked, prevent_cse=False)(logs, indices)  # or the mask [tokens, k, experts] would be kept
    if renormalize:
        weights = jax.nn.softmax(picked)  # of logarithms: no sum to divide by that may be zero
    elif scoring == "softmax":
        weights = jnp.exp(picked - jax.nn.logsumexp(logs, -1, keepdims=True))
    else:
        weights = jnp.exp(picked)
    permutation, inverse, sizes = _sorted(indices, logits.shape[-1])
    return Routing(indices, *(checkpoint_name(x, ROUTING) for x in (weights, permutation, inverse, sizes)))


def sorted_by(expert: jax.Array, experts: int, weights: jax.Array) -> Routing:
    """Returns the routing of rows of which each has one expert, and its weight ``[rows, 1]``.

    Rows whose expert is ``experts`` have none: they come last, and are of no group.
    """
    indices = expert[:, None]
    permutation, inverse, sizes = _sorted(indices, experts)
    return Routing(indices, weights, *(checkpoint_name(x, ROUTING) for x in (permutation, inverse, sizes)))


def _sorted(indices: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the permutation, the inverse and the group sizes of pairs."""
    pairs = indices.reshape(*indices.shape[:-2], -1)
    # To shard_map an argsort does not vary over the mesh axes its argument varies over, which it does.
    permutation = match_varying(jnp.argsort(pairs, stable=True).astype(jnp.int32), pairs)[0]
    inverse = jnp.vectorize(_inverse, signature="(r)->(r)")(permutation).reshape(indices.shape)
    return permutation, inverse, _histogram(pairs, experts)


def _chosen(logits: Any, k: Any, scoring: str, bias: Any, where: str) -> tuple[jax.Array, jax.Array]:
    """Returns the logits in float32, and each token's experts."""
    logits = _logits(logits, where)
    k = integer(k, "k", where)
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"{where}: k is {k}, but router_logits {logits.shape} are for {logits.shape[-1]} experts")
    check_rows(logits.shape[-2] * k, where, "pairs of a token and an expert")
    if scoring not in SCORING:
        raise ValueError(f"{where}: unknown scoring {scoring!r}, expected one of {SCORING}")
    scores = lax.stop_gradient(logits)
    if bias is not None:
        scores = jax.nn.softmax(scores) if scoring == "softmax" else jax.nn.sigmoid(scores)
        scores += lax.stop_gradient(broadcastable(bias, logits.shape, where)).astype(scores.dtype)
    # A NaN is chosen first, on every platform, and so shows in the token's result.
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    return logits, checkpoint_name(lax.top_k(scores, k)[1], ROUTING)


def _logits(x: Any, where: str) -> jax.Array:
    """Returns the logits in float32; raises an error that says what came."""
    x = matrix(x, "router_logits", where)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{where}: router_logits must be floating-point numbers, got {x.dtype}")
    return x.astype(jnp.float32)


def broadcastable(bias: Any, shape: tuple[int, ...], where: str) -> jax.Array:
    """Returns the selection bias in the rank of the logits; raises an error if it does not broadcast."""
    bias = jnp.asarray(unwrapped(bias))
    if bias.ndim > len(shape) or any(
        n not in (1, size) for n, size in zip(bias.shape[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(f"{where}: selection_bias is {bias.shape}, which does not broadcast against {shape}")
    return with_rank(bias, len(shape))


def _picked(scores: jax.Array, indices: jax.Array) -> jax.Array:
    """Computes the scores of the chosen: a masked sum and not a gather, whose transpose would be a scatter-add."""
    return jnp.where(_is_expert(indices, scores.shape[-1]), scores[..., None, :], 0).sum(-1)


def _is_expert(indices: jax.Array, experts: int) -> jax.Array:
    """True if an index is that of an expert, for each and each, ``[..., experts]``."""
    return indices[..., None] == lax.broadcasted_iota(
        indices.dtype, (*(1 for _ in indices.shape), experts), indices.ndim
    )


def _inverse(permutation: jax.Array) -> jax.Array:
    """Computes the inverse by a scatter, but of integers, each to a place of its own."""
    places = jnp.arange(permutation.size, dtype=permutation.dtype)
    return jnp.zeros_like(permutation).at[permutation].set(places, unique_indices=True, mode="promise_in_bounds")


def _histogram(pairs: jax.Array, experts: int) -> jax.Array:
    """Counts the pairs of each expert: comparisons and a sum, in one kernel and with no scatter."""
    return _is_expert(pairs, experts).sum(-2, dtype=jnp.int32)


# The losses.


@automatic(lambda **_: lambda out: [])
def load_balance_loss(
    router_logits: ArrayLike,
    k: int = 2,
    *,
    scoring: str = "softmax",
    selection_bias: ArrayLike | None = None,
) -> jax.Array:
    """Computes the auxiliary loss that evens out the load of the experts: ``experts * sum_e(f_e * p_e)``.

    f_e is the share of the (token, expert) pairs that expert e gets, and p_e the mean over the tokens of its score, the
    scores of a token divided by their sum. It is 1 where all experts get the same, and at most the number of experts.
    For k=1 it is equation 4 of Switch Transformer (Fedus et al., 2021, arXiv:2101.03961) without its factor alpha,
    after the auxiliary loss of GShard (Lepikhin et al., 2020, arXiv:2006.16668). For larger k all choices count alike,
    and f_e still sums to 1; Hugging Face's loss of Mixtral, where it sums to k, is k times this one. The gradient is
    that of p_e: f_e is a count.

    Args:
      router_logits: ``[..., tokens, experts]``. The means are over all tokens; ``jax.vmap`` makes a loss per sequence.
      k: how many experts a token is sent to.
      scoring: "softmax" or "sigmoid", see ``cutjax.route``.
      selection_bias: see ``cutjax.route``.

    Returns:
      A float32 scalar, to be multiplied by a coefficient such as 0.01 and added to the loss.

    Raises:
      TypeError, ValueError: as ``cutjax.route`` does.

    Example:
      >>> import cutjax, jax.numpy as jnp
      >>> float(cutjax.load_balance_loss(jnp.zeros((8, 4)), k=4))
      1.0
    """
    logits, indices = _chosen(router_logits, k, scoring, selection_bias, "load_balance_loss")
    check_rows(indices.size, "load_balance_loss", "pairs of a token and an expert")
    logs = logits if scoring == "softmax" else jax.nn.log_sigmoid(logits)
    experts = logits.shape[-1]
    share = _histogram(indices.reshape(-1), experts).astype(jnp.float32) / indices.size
    score = jax.nn.softmax(logs).reshape(-1, experts).mean(0)
    return experts * (share * score).sum()


@automatic(lambda **_: lambda out: [])
def router_z_loss(router_logits: ArrayLike) -> jax.Array:
    """Computes the auxiliary loss that keeps logits small: the mean over the tokens of ``logsumexp(logits) ** 2``.

    Equation 5 of ST-MoE (Zoph et al., 2022, arXiv:2202.08906), without its coefficient.

    Args:
      router_logits: ``[..., tokens, experts]``.

    Returns:
      A float32 scalar, to be multiplied by a coefficient such as 0.001 and added to the loss.

    Raises:
      TypeError: if the logits are no floating-point array.
      ValueError: if they have no axis of tokens.

    Example:
      >>> import cutjax, jax.numpy as jnp
      >>> round(float(cutjax.router_z_loss(jnp.zeros((8, 1)))), 3)
      0.0
    """
    logits = _logits(router_logits, "router_z_loss")
    return (jax.nn.logsumexp(logits, -1) ** 2).mean()


def to_slots(x: jax.Array, pairs: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns rows ``[slots, d]`` of tokens' pairs, some of which have no slot, and zeros in slots of no pair.

    ``pairs [slots]`` and ``slots [tokens, k]`` are each other's inverses, past the end where there is none.
    """
    return dispatch_p.bind(*match_varying(x, pairs, slots), fill=True)


def from_slots(rows: jax.Array, pairs: jax.Array, slots: jax.Array) -> jax.Array:
    """Computes the sum of each token's rows: the transpose of ``to_slots``."""
    return combine_p.bind(*match_varying(rows, pairs, slots), fill=True)


# Dispatch and combine: linear in their rows, and each the transpose of the other. JAX's own transpose of a gather is a
# scatter-add, which on a GPU adds with float atomics, in any order. Operands: rows, permutation [*B, rows], inverse
# [*B, tokens, k], of equal rank and with batch axes equal or 1. With fill, an index past the end means zeros.


def _bind(primitive: Primitive, x: jax.Array, permutation: jax.Array, inverse: jax.Array, rows: tuple[int, ...]) -> Any:
    if x.shape[:-1] != rows:
        name = "dispatch" if primitive is dispatch_p else "combine"
        raise ValueError(f"{name}: the routing is for rows [{', '.join(map(str, rows))}, d], got {x.shape}")
    return primitive.bind(*match_varying(x, permutation, inverse), fill=False)


def _gather(x: jax.Array, indices: jax.Array, fill: bool) -> jax.Array:
    how: dict[str, Any] = {"mode": "fill", "fill_value": 0} if fill else {"mode": "promise_in_bounds"}
    return jnp.take_along_axis(x, indices[..., None], -2, **how)


def _dispatch(x: jax.Array, permutation: jax.Array, inverse: jax.Array, *, fill: bool) -> jax.Array:
    return _gather(x, permutation // inverse.shape[-1], fill)


def _combine(rows: jax.Array, permutation: jax.Array, inverse: jax.Array, *, fill: bool) -> jax.Array:
    wide = accumulator(rows.dtype)
    # A term for each choice and not a reduction: elementwise, so that XLA fuses the gathers and the sum into one loop.
    terms = [_gather(rows, inverse[..., i], fill).astype(wide) for i in range(inverse.shape[-1])]
    return functools.reduce(lax.add, terms).astype(rows.dtype)


def _define(name: str, apply: Callable[..., jax.Array], transposed: Callable[[], Primitive]) -> Primitive:
    def abstract(x: Any, permutation: Any, inverse: Any, *, fill: bool) -> Any:
        batch = lax.broadcast_shapes(x.shape[:-2], permutation.shape[:-1])
        rows = (permutation.shape if apply is _dispatch else inverse.shape[:-1])[-1]
        return x.update(shape=(*batch, rows, x.shape[-1]), weak_type=False)

    def batch(args: Any, dims: Any, *, fill: bool) -> tuple[jax.Array, int]:
        moved = [
            lax.expand_dims(x, [0]) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(args, dims, strict=True)
        ]
        return primitive.bind(*moved, fill=fill), 0

    def jvp(primals: Any, tangents: Any, *, fill: bool) -> tuple[jax.Array, Any]:
        out, dot = primitive.bind(*primals, fill=fill), tangents[0]
        return out, zero_tangent(out) if is_zero(dot) else primitive.bind(dot, *primals[1:], fill=fill)

    def transpose(g: Any, x: Any, permutation: jax.Array, inverse: jax.Array, *, fill: bool) -> list[Any]:
        if is_zero(g):
            return [None] * 3
        d = transposed().bind(g, permutation, inverse, fill=fill)
        shared = [i for i in range(d.ndim - 2) if x.aval.shape[i] == 1 != d.shape[i]]
        if shared:  # rows shared by several routings
            d = d.astype(accumulator(d.dtype)).sum(shared, keepdims=True).astype(d.dtype)
        return [d, None, None]

    primitive = define(name, abstract=abstract, reference=apply, batch=batch, jvp=jvp, transpose=transpose)
    return primitive


dispatch_p = _define("cutjax_dispatch", _dispatch, lambda: combine_p)
combine_p = _define("cutjax_combine", _combine, lambda: dispatch_p)
