"""The parts of a mixture-of-experts layer that both APIs share: experts in groups, and auxiliary results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cutjax.binding.rules import with_rank
from cutjax.ops.moe import moe
from cutjax.ops.routing import SCORING, load_balance_loss, route, router_z_loss


def check_experts(
    num_experts: int, k: int, scoring: str, num_groups: int, groups_per_token: int, where: str = "MoE"
) -> None:
    """Raises if the numbers do not fit."""
    if scoring not in SCORING:
        raise ValueError(f"{where}: unknown scoring {scoring!r}, expected one of {SCORING}")
    if not 1 <= k <= num_experts:
        raise ValueError(f"{where}: k is {k}, but there are {num_experts} experts")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"{where}: {num_experts} experts do not divide into {num_groups} groups")
    if not 1 <= groups_per_token <= num_groups:
        raise ValueError(f"{where}: groups_per_token is {groups_per_token}, but there are {num_groups} groups")
    if groups_per_token * (num_experts // num_groups) < k:
        each = num_experts // num_groups
        raise ValueError(f"{where}: {groups_per_token} groups of {each} experts are fewer experts than k, {k}")


def experts(
    x: jax.Array,
    logits: jax.Array,
    kernels: Sequence[jax.Array],
    *,
    bias: jax.Array | None,
    num_groups: int,
    groups_per_token: int,
    scale: float,
    renormalize: bool,
    scoring: str,
    k: int,
    return_aux: bool,
    **options: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the layer's result, and its auxiliary losses and loads if they are asked for."""
    if num_groups > 1:
        limit = group_limit(logits, num_groups, groups_per_token, scoring, bias)
        bias = limit if bias is None else with_rank(bias, limit.ndim) + limit
    gate, up, down = kernels
    choice: dict[str, Any] = {"k": k, "scoring": scoring, "selection_bias": bias}
    y = moe(x, logits, gate, up, down, renormalize=renormalize, **choice, **options)
    y = y if scale == 1 else y * scale
    if not return_aux:
        return y, {}
    counts = route(logits, **choice).group_sizes
    return y, {
        "load_balance_loss": load_balance_loss(logits, **choice),
        "router_z_loss": router_z_loss(logits),
        "tokens_per_expert": counts.reshape(-1, counts.shape[-1]).sum(0, dtype=counts.dtype),
    }


def group_limit(
    logits: jax.Array, num_groups: int, groups_per_token: int, scoring: str, bias: jax.Array | None
) -> jax.Array:
    """Returns 0 for the experts of each token's best groups, and -inf for all others.

    The score of a group is that of its best expert, as in DeepSeek-V2; with the scoring "sigmoid" the sum of its two
    best, as in DeepSeek-V3. A selection bias counts.
    """
    logits = lax.stop_gradient(logits).astype(jnp.float32)
    scores = jax.nn.softmax(logits) if scoring == "softmax" else jax.nn.sigmoid(logits)
    scores = scores if bias is None else scores + with_rank(bias.astype(scores.dtype), scores.ndim)
    groups = scores.reshape(*scores.shape[:-1], num_groups, -1)
    best = lax.top_k(groups, 1 if scoring == "softmax" else min(2, groups.shape[-1]))[0].sum(-1)
    chosen = jax.nn.one_hot(lax.top_k(best, groups_per_token)[1], num_groups, dtype=bool).any(-2)
    limit = jnp.where(chosen, jnp.float32(0), jnp.float32(-jnp.inf))
    return jnp.repeat(limit, groups.shape[-1], -1)
