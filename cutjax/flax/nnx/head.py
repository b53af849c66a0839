"""Head of Flax NNX: a last layer, and its loss without its logits in memory."""

from __future__ import annotations

from typing import Any

import jax

from cutjax.flax.linear import named_arguments
from cutjax.flax.nnx.linear import Linear, value
from cutjax.ops.linear_cross_entropy import linear_cross_entropy


@named_arguments
class Head(Linear):
    """``flax.nnx.Linear`` to a vocabulary: logits, or given labels their cross-entropy without logits in memory.

    Takes all arguments of ``flax.nnx.Linear``, and has its parameters.

    Raises:
      TypeError: if there is no such argument; when called, if there is no such option, or labels are no integers.
      ValueError: if there is an activation; when called, if the last axis of the inputs is not in_features, or labels
        are not one for each row.

    Examples:
      >>> import cutjax.flax.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> head = cutjax.flax.nnx.Head(16, 32, use_bias=False, rngs=nnx.Rngs(0))
      >>> x, labels = jnp.ones((2, 8, 16)), jnp.zeros((2, 8), jnp.int32)
      >>> head(x).shape, head(x, labels, z_loss=1e-4).shape
      ((2, 8, 32), ())
    """

    def __init__(self, in_features: int, out_features: int, **kwargs: Any):
        super().__init__(in_features, out_features, **kwargs)
        if self.activation is not None:
            raise ValueError("Head: the loss is that of logits, which have no activation: leave activation")

    def __call__(self, inputs: jax.Array, labels: jax.Array | None = None, **options: Any) -> jax.Array:
        """Returns the logits of ``[..., in_features]``, or the loss of labels ``[...]``.

        Options are ``out_sharding`` of logits, and of a loss those of ``cutjax.linear_cross_entropy``.
        """
        if labels is None:
            return super().__call__(inputs, **options)
        x, kernel, bias = self.promote_dtype((inputs, self.kernel[...], value(self.bias)), dtype=self.dtype)
        return linear_cross_entropy(x, kernel, labels, bias=bias, **{"precision": self.precision, **options})
