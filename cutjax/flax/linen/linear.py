"""Dense, DenseGeneral and Einsum of Flax Linen, with bias and activation in the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.typing import Initializer

from cutjax.flax.linear import (
    Activation,
    einsum,
    einsum_bias_shapes,
    is_product,
    linear,
    named_arguments,
    places,
    without_quantized,
)


@named_arguments
class Dense(nn.Dense):
    """``flax.linen.Dense`` with ``activation(inputs @ kernel + bias)`` in one kernel.

    Takes all arguments of ``flax.linen.Dense``, and has its parameters.

    Attributes:
      activation: any elementwise function written in JAX, run in float32 before the result is rounded; or None.

    Raises:
      TypeError: if there is no such argument, with a list of those there are; when called, if the activation is no
        function.
      ValueError: when called, if the inputs are a scalar.
      flax.errors.ScopeParamShapeError: when applied, if the parameters are of inputs of another size.

    Examples:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.Dense(32, activation=jax.nn.gelu)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 16)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((2, 8, 32), {'params': {'bias': (32,), 'kernel': (16, 32)}})
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns ``activation(inputs @ kernel + bias)``, of ``[..., k]``."""
        return product(self, *parameters(self, inputs))


@named_arguments
class DenseGeneral(nn.DenseGeneral):
    """``flax.linen.DenseGeneral`` with bias and activation in the kernel.

    Takes all arguments of ``flax.linen.DenseGeneral``, and has its parameters.

    Attributes:
      activation: as of ``Dense``.

    Raises:
      TypeError, flax.errors.ScopeParamShapeError: as of ``Dense``.
      ValueError: when called, if the inputs have no such axis, or ``batch_dims`` are not the first ones.

    Examples:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.DenseGeneral((4, 8), axis=(-2, -1))
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 3, 16)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((2, 4, 8), {'params': {'bias': (4, 8), 'kernel': (3, 16, 4, 8)}})
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the inputs with the axes of features, the last, in place of those that the kernel multiplies."""
        features, axis, batch = _axes(self.features), _axes(self.axis), tuple(sorted(_axes(self.batch_dims)))
        if batch != tuple(range(len(batch))):
            return super().__call__(inputs)  # which says what is wrong with them
        axis = places("DenseGeneral", axis, inputs.shape)
        size = tuple(inputs.shape[i] for i in batch)
        depth = tuple(inputs.shape[i] for i in axis)
        groups = (math.prod(size) * math.prod(depth), math.prod(features))
        kernel = self.param("kernel", _flat(self.kernel_init, groups), (*size, *depth, *features), self.param_dtype)
        bias = None
        if self.use_bias:
            init = _flat(self.bias_init, (math.prod(size) * math.prod(features),))
            bias = self.param("bias", init, (*size, *features), self.param_dtype)
        x, kernel, bias = promoted(self, inputs, kernel, bias)
        rows = tuple(x.shape[i] if i in batch else 1 for i in range(x.ndim) if i not in axis)
        return linear(
            "DenseGeneral",
            x,
            kernel,
            bias if bias is None else bias.reshape(*rows, *features),
            ((axis, tuple(range(len(batch), len(batch) + len(axis)))), (batch, batch)),
            activation=self.activation,
            dot_general=self.dot_general if self.dot_general_cls is None else self.dot_general_cls(),
            precision=self.precision,
        )


@named_arguments
class Einsum(nn.Einsum):
    """``flax.linen.Einsum`` with bias and activation in the kernel, where the equation is one product of matrices.

    Takes all arguments of ``flax.linen.Einsum``, and has its parameters.

    Attributes:
      activation: as of ``Dense``.

    Raises:
      TypeError: as of ``Dense``.
      ValueError: when called, if there is no equation, one without "->", or of another number of operands than two, or
        if sizes differ.

    Examples:
      >>> import cutjax.flax.linen, jax, jax.numpy as jnp
      >>> layer = cutjax.flax.linen.Einsum((16, 4, 8), "btd,dhk->bthk", activation=jax.nn.relu)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 16)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((2, 5, 4, 8), {'params': {'bias': (4, 8), 'kernel': (16, 4, 8)}})
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Returns the activation of the equation's result and the bias; the equation is given here or there."""
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if not is_product(equation):
            return super().__call__(inputs, einsum_str)  # which says what is wrong with it
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, shape = None, ()
        if self.use_bias:
            own, shape = einsum_bias_shapes(equation, inputs, kernel)
            bias = self.param("bias", self.bias_init, own, self.param_dtype)
        x, kernel, bias = promoted(self, inputs, kernel, bias)
        return einsum(
            "Einsum",
            equation,
            x,
            kernel,
            bias if bias is None else bias.reshape(shape),
            activation=self.activation,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


def parameters(layer: Dense, inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the inputs, the kernel and the bias of a layer in the dtype that it computes in."""
    features, shape = (layer.features,), jnp.shape(inputs)
    places("Dense", (-1,), shape)
    kernel = layer.param("kernel", layer.kernel_init, (shape[-1], *features), layer.param_dtype)
    bias = layer.param("bias", layer.bias_init, features, layer.param_dtype) if layer.use_bias else None
    return promoted(layer, inputs, kernel, bias)


def product(layer: Dense, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns the result of a layer."""
    return linear(
        "Dense",
        x,
        kernel,
        bias if bias is None else bias.reshape((1,) * (x.ndim - 1) + bias.shape),
        ((places("Dense", (-1,), x.shape), (0,)), ((), ())),
        activation=layer.activation,
        dot_general=layer.dot_general if layer.dot_general_cls is None else layer.dot_general_cls(),
        precision=layer.precision,
    )


def promoted(layer: Any, *arrays: Any) -> Any:
    """Returns arrays in the dtype that the layer computes in; quantized kernels as they are."""
    return without_quantized(lambda xs: layer.promote_dtype(*xs, dtype=layer.dtype), arrays)


def _axes(axes: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(axes) if isinstance(axes, Iterable) else (axes,)


def _flat(init: Initializer, flat: tuple[int, ...]) -> Callable[..., Any]:
    """Returns the initializer of a flat shape, its array reshaped, in its box of metadata if it has one."""

    def reshaped(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        value = init(key, flat, dtype)
        if isinstance(value, meta.AxisMetadata):
            return meta.replace_boxed(value, value.unbox().reshape(shape))
        return value.reshape(shape)

    return reshaped
