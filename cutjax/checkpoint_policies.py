"""Policies for jax.checkpoint that save products, ours among them: those of jax know ``lax.dot_general`` alone."""

from __future__ import annotations

from typing import Any

import jax

from cutjax.primitives.factors import batch_axes


def dots_saveable(prim: Any, *avals: Any, **params: Any) -> bool:
    """True if the equation is a product: ``jax.checkpoint_policies.dots_saveable``, which does not know ours, and ours.

    Args:
      prim: the primitive of an equation, which ``jax.checkpoint`` asks about.
      avals: the shapes and dtypes of its operands.
      params: its parameters.

    Returns:
      True where the equation's results are to be saved for the backward pass.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> layer = jax.checkpoint(cutjax.gemm, policy=cutjax.checkpoint_policies.dots_saveable)
      >>> jax.grad(lambda x: layer(x, x).sum())(jnp.ones((2, 2))).shape
      (2, 2)
    """
    return "product" in params or jax.checkpoint_policies.dots_saveable(prim, *avals, **params)


def dots_with_no_batch_dims_saveable(prim: Any, *avals: Any, **params: Any) -> bool:
    """True if it is a product of which no batch axis is both operands': jax's policy of that name, and ours.

    The groups of a grouped product are no batch axis, and neither is one along which a weight is shared.

    Args:
      prim: the primitive of an equation, which ``jax.checkpoint`` asks about.
      avals: the shapes and dtypes of its operands.
      params: its parameters.

    Returns:
      True where the equation's results are to be saved for the backward pass.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> policy = cutjax.checkpoint_policies.dots_with_no_batch_dims_saveable
      >>> layer = jax.checkpoint(cutjax.gemm, policy=policy)
      >>> jax.grad(lambda x: layer(x, x).sum())(jnp.ones((2, 2))).shape
      (2, 2)
    """
    if "product" not in params:
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *avals, **params)
    product = params["product"]
    a, b = avals[:1] * 2 if product.unary else avals[:2]
    return not batch_axes(a, b, product.axes[0])
