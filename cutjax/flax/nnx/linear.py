"""Linear, LinearGeneral and Einsum of Flax NNX, with bias and activation in the kernel."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from cutjax.flax.linear import (
    Activation,
    check_activation,
    einsum,
    einsum_bias_shapes,
    is_product,
    linear,
    named_arguments,
    places,
    without_quantized,
)


@named_arguments
class Linear(nnx.Linear):
    """``flax.nnx.Linear`` with ``activation(inputs @ kernel + bias)`` in one kernel.

    Takes all arguments of ``flax.nnx.Linear``, and has its parameters.

    Args:
      activation: any elementwise function written in JAX, run in float32 before the result is rounded; or None.

    Raises:
      TypeError: if there is no such argument, with a list of those there are, or the activation is no function.
      ValueError: when called, if the last axis of the inputs is not in_features.

    Examples:
      >>> import cutjax.flax.nnx, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = cutjax.flax.nnx.Linear(16, 32, activation=jax.nn.gelu, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 16))).shape
      (2, 8, 32)
    """

    def __init__(self, *args: Any, activation: Activation | None = None, **kwargs: Any):
        check_activation("Linear", activation)
        super().__init__(*args, **kwargs)
        self.activation = activation

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns ``activation(inputs @ kernel + bias)``, of ``[..., in_features]``."""
        x, kernel, bias = promoted(self, inputs, self.kernel[...], value(self.bias))
        return linear(
            "Linear",
            x,
            kernel,
            bias if bias is None else bias.reshape((1,) * (x.ndim - 1) + bias.shape),
            ((places("Linear", (-1,), x.shape), (0,)), ((), ())),
            activation=self.activation,
            dot_general=self.dot_general,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )


@named_arguments
class LinearGeneral(nnx.LinearGeneral):
    """``flax.nnx.LinearGeneral`` with bias and activation in the kernel.

    Takes all arguments of ``flax.nnx.LinearGeneral``, and has its parameters.

    Args:
      activation: as of ``Linear``.

    Raises:
      TypeError: as of ``Linear``.
      ValueError: when called, if the inputs have no such axis, or one of another size than the kernel's.

    Examples:
      >>> import cutjax.flax.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> heads = cutjax.flax.nnx.LinearGeneral(16, (4, 8), rngs=nnx.Rngs(0))
      >>> out = cutjax.flax.nnx.LinearGeneral((4, 8), 16, axis=(-2, -1), rngs=nnx.Rngs(0))
      >>> heads(jnp.ones((2, 16))).shape, out(heads(jnp.ones((2, 16)))).shape
      ((2, 4, 8), (2, 16))
    """

    def __init__(self, *args: Any, activation: Activation | None = None, **kwargs: Any):
        check_activation("LinearGeneral", activation)
        super().__init__(*args, **kwargs)
        self.activation = activation

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the inputs with the axes of features, the last, in place of those that the kernel multiplies."""
        x, kernel, bias = promoted(self, inputs, self.kernel[...], value(self.bias))
        axis, batch = places("LinearGeneral", self.axis, x.shape), places("LinearGeneral", self.batch_axis, x.shape)
        if bias is not None:
            rows = tuple(x.shape[i] if i in batch else 1 for i in range(x.ndim) if i not in axis)
            bias = bias.reshape(*rows, *self.out_features)
        return linear(
            "LinearGeneral",
            x,
            kernel,
            bias,
            ((axis, tuple(range(len(batch), len(batch) + len(axis)))), (batch, batch)),
            activation=self.activation,
            dot_general=self.dot_general if self.dot_general_cls is None else self.dot_general_cls(),
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )


@named_arguments
class Einsum(nnx.Einsum):
    """``flax.nnx.Einsum`` with bias and activation in the kernel, where the equation is one product of matrices.

    Takes all arguments of ``flax.nnx.Einsum``, and has its parameters.

    Args:
      activation: as of ``Linear``.

    Raises:
      TypeError: as of ``Linear``.
      ValueError: when called, if the equation is one without "->", or of another number of operands than two, or if
        sizes differ.

    Examples:
      >>> import cutjax.flax.nnx, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = cutjax.flax.nnx.Einsum("btd,dhk->bthk", (16, 4, 8), (4, 8), activation=jax.nn.relu, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 16))).shape
      (2, 5, 4, 8)
    """

    def __init__(self, *args: Any, activation: Activation | None = None, **kwargs: Any):
        check_activation("Einsum", activation)
        super().__init__(*args, **kwargs)
        self.activation = activation

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None) -> jax.Array:
        """Returns the activation of the equation's result and the bias; the equation is given here or there."""
        equation = (self.einsum_str if einsum_str is None else einsum_str).replace(" ", "")
        if not is_product(equation):
            return super().__call__(inputs, einsum_str)  # which says what is wrong with it
        x, kernel, bias = promoted(self, inputs, self.kernel[...], value(self.bias))
        return einsum(
            "Einsum",
            equation,
            x,
            kernel,
            bias if bias is None else bias.reshape(einsum_bias_shapes(equation, x, kernel)[1]),
            activation=self.activation,
            einsum_op=self.einsum_op,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )


def promoted(layer: Any, *arrays: Any) -> Any:
    """Returns arrays in the dtype that the layer computes in; quantized kernels as they are."""
    return without_quantized(lambda xs: layer.promote_dtype(tuple(xs), dtype=layer.dtype), arrays)


def value(variable: Any) -> Any:
    """Returns the array of a variable, or None."""
    return None if variable is None else variable[...]
