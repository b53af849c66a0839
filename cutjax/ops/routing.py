"""Routing of tokens to experts: the choice of each token's experts and their weights, and the router's losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from cutjax.binding.explicit import automatic, axes
from cutjax.binding.rules import with_rank
from cutjax.ops.arguments import check_rows, integer
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.route import route as of_tokens
from cutjax.primitives.routing import Routing

SCORING = ("softmax", "sigmoid")


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
    the choice is that of ``jax.lax.top_k``, of the logits or, with a bias, of the scores plus it: of equal ones the
    first expert (it may put 0.0 before -0.0), and the sort is stable. The weights are differentiable in the logits,
    without a scatter in the backward pass; the choice itself has no derivative.

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

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> routing = cutjax.route(jnp.array([[0.0, 2.0, 2.0], [5.0, 0.0, 0.0]]), k=2)
      >>> routing.indices.tolist(), routing.group_sizes.tolist()
      ([[1, 2], [0, 1]], [1, 2, 1])
    """
    return routed(router_logits, k, scoring, renormalize, selection_bias, "route")


def routed(logits: Any, k: Any, scoring: str, renormalize: bool, bias: Any, where: str) -> Routing:
    """Computes ``route``, for the operation that an error is to name."""
    logits, k = _logits(logits, where), integer(k, "k", where)
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"{where}: k is {k}, but router_logits {logits.shape} are for {logits.shape[-1]} experts")
    check_rows(logits.shape[-2] * k, where, "pairs of a token and an expert")
    if scoring not in SCORING:
        raise ValueError(f"{where}: unknown scoring {scoring!r}, expected one of {SCORING}")
    bias = None if bias is None else broadcastable(bias, logits.shape, where)
    return of_tokens(logits, bias, k, scoring, renormalize)


def _logits(x: Any, where: str) -> jax.Array:
    """Returns the logits; raises an error that says what came."""
    x = matrix(x, "router_logits", where)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{where}: router_logits must be floating-point numbers, got {x.dtype}")
    return x


def broadcastable(bias: Any, shape: tuple[int, ...], where: str) -> jax.Array:
    """Returns the selection bias in the rank of the logits; raises an error if it does not broadcast."""
    bias = jnp.asarray(unwrapped(bias))
    if bias.ndim > len(shape) or any(
        n not in (1, size) for n, size in zip(bias.shape[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(f"{where}: selection_bias is {bias.shape}, which does not broadcast against {shape}")
    return with_rank(bias, len(shape))


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

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> float(cutjax.load_balance_loss(jnp.zeros((8, 4)), k=4))
      1.0
    """
    routing = routed(router_logits, k, scoring, True, selection_bias, "load_balance_loss")
    pairs, experts = routing.indices.size, routing.group_sizes.shape[-1]
    check_rows(pairs, "load_balance_loss", "pairs of a token and an expert")
    logits = _logits(router_logits, "load_balance_loss").astype(jnp.float32)
    logs = logits if scoring == "softmax" else jax.nn.log_sigmoid(logits)
    share = routing.group_sizes.reshape(-1, experts).sum(0).astype(jnp.float32) / pairs
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

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> round(float(cutjax.router_z_loss(jnp.zeros((8, 1)))), 3)
      0.0
    """
    logits = _logits(router_logits, "router_z_loss").astype(jnp.float32)
    return (jax.nn.logsumexp(logits, -1) ** 2).mean()
