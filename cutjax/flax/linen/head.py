"""Head of Flax Linen: a last layer, and its loss without its logits in memory."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from cutjax.flax.linear import named_arguments
from cutjax.flax.linen.linear import Dense, parameters, product
from cutjax.ops.linear_cross_entropy import linear_cross_entropy


@named_arguments
class Head(Dense):
    """``flax.linen.Dense`` to a vocabulary: logits, or given labels their cross-entropy without logits in memory.

    Takes all arguments of ``flax.linen.Dense``, and has its parameters.

    Raises:
      TypeError: if there is no such argument; when called, if there are options without labels, there is no such
        option, or labels are no integers.
      ValueError: if there is an activation; when called, if labels are not one for each row.
      flax.errors.ScopeParamShapeError: as of ``Dense``.

    Examples:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> head, x = cutjax.flax.linen.Head(32, use_bias=False), jnp.ones((2, 8, 16))
      >>> loss, variables = head.init_with_output(jax.random.key(0), x, jnp.zeros((2, 8), jnp.int32), z_loss=1e-4)
      >>> loss.shape, head.apply(variables, x).shape
      ((), (2, 8, 32))
    """

    def __post_init__(self) -> None:
        if self.activation is not None:
            raise ValueError("Head: the loss is that of logits, which have no activation: leave activation")
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array, labels: jax.Array | None = None, **options: Any) -> jax.Array:
        """Returns the logits of ``[..., k]``, or the loss of labels ``[...]``.

        Options are those of ``cutjax.linear_cross_entropy``; logits have none.
        """
        x, kernel, bias = parameters(self, inputs)
        if labels is not None:
            return linear_cross_entropy(x, kernel, labels, bias=bias, **{"precision": self.precision, **options})
        if options:
            raise TypeError(f"Head: options without labels: {', '.join(options)}")
        return product(self, x, kernel, bias)
