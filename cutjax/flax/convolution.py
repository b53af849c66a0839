"""A convolution, bias and activation in its epilogue: what Conv and ConvTranspose of both APIs compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import lax

from cutjax import dot_precision
from cutjax.binding.rules import sharded, with_rank
from cutjax.dtypes import promoted
from cutjax.flax.linear import Activation, check_activation, finished
from cutjax.ops.conv import CHANNELS_LAST
from cutjax.ops.conv_general_dilated import conv_general_dilated, conv_transpose
from cutjax.ops.convolution_plan import by_lax, planned
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import call
from cutjax.runtime import backends

Sizes = tuple[int, ...]
_MODES = {"CIRCULAR": "wrap", "REFLECT": "reflect"}


def along(given: Any, rank: int) -> Sizes:
    """Returns an integer for each of so many axes, of one for all, a sequence, or None for 1."""
    given = 1 if given is None else given
    return (given,) * rank if isinstance(given, int) else tuple(given)


def masked(where: str, kernel: jax.Array, mask: Any) -> jax.Array:
    """Returns the kernel, zero where the mask is; raises where they differ in shape."""
    if mask is None:
        return kernel
    if mask.shape != kernel.shape:
        raise ValueError(f"{where}: mask must have the kernel's shape, {kernel.shape}, got {mask.shape}")
    return kernel * mask


def check_groups(where: str, channels: int, groups: int) -> None:
    """Raises where channels do not divide into groups."""
    if groups < 1 or channels % groups:
        raise ValueError(f"{where}: {channels} channels of the inputs do not divide into feature_group_count, {groups}")


def convolve(
    layer: Any,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    convolution: Callable[..., jax.Array] | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes ``activation(conv(x, kernel) + bias)`` in one kernel, as a layer Conv of Flax's would in steps.

    Args:
      layer: has the arguments of Flax's layer, and activation.
      x: ``[..., *spatial, channels]``, of any number of batch axes.
      kernel: ``[*window, channels / groups, features]``, with the mask.
      bias: ``[features]``.
      convolution: a conv_general_dilated of the user's, with which there are steps.
      out_sharding: of the result on explicit mesh axes.
    """
    where, rank = "Conv", kernel.ndim - 2
    groups, dilation = layer.feature_group_count, along(layer.kernel_dilation, rank)
    if x.shape[-1] != kernel.shape[-2] * groups:
        raise ValueError(f"{where}: inputs are {x.shape}, expected {kernel.shape[-2] * groups} channels")
    batch, x = _images(where, x, rank)
    padding = _padding(where, layer.padding, rank)
    reaches = [(size - 1) * step + 1 for size, step in zip(kernel.shape, dilation, strict=False)]
    if padding in _MODES:
        sides = [(0, 0), *(((reach - 1) // 2, reach // 2) for reach in reaches), (0, 0)]
        x, padding = jnp.pad(x, sides, mode=_MODES[padding]), "VALID"
    elif padding == "CAUSAL":
        if rank != 1:
            raise ValueError(f"{where}: Causal padding is only implemented for 1D convolutions, got {rank} axes")
        padding = ((reaches[0] - 1, 0),)
    how = {
        "window_strides": along(layer.strides, rank),
        "padding": padding,
        "lhs_dilation": along(layer.input_dilation, rank),
        "rhs_dilation": dilation,
        "dimension_numbers": _channels_last(rank),
        "feature_group_count": groups,
        "precision": layer.precision,
        "preferred_element_type": getattr(layer, "preferred_element_type", None),
        "out_sharding": out_sharding,
    }
    convolution = None if convolution is lax.conv_general_dilated else convolution
    y = _activated(where, conv_general_dilated, convolution, x, kernel, bias, how, activation=layer.activation)
    return y if len(batch) == 1 else y.reshape(*batch, *y.shape[1:])


def convolve_transposed(layer: Any, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Computes ``activation(conv_transpose(x, kernel) + bias)`` in one kernel, as Flax's ConvTranspose would in steps.

    Args:
      layer: has the arguments of Flax's layer, and activation.
      x: ``[..., *spatial, channels]``, of any number of batch axes.
      kernel: ``[*window, channels, features]``, with transpose_kernel ``[*window, features, channels]``.
      bias: ``[features]``.
    """
    where, rank, flipped = "ConvTranspose", kernel.ndim - 2, layer.transpose_kernel
    channels = kernel.shape[-1 if flipped else -2]
    if x.shape[-1] != channels:
        raise ValueError(f"{where}: inputs are {x.shape}, expected {channels} channels")
    batch, x = _images(where, x, rank)
    strides, padding = along(layer.strides, rank), _padding(where, layer.padding, rank)
    circular = padding == "CIRCULAR"
    how = {
        "strides": strides,
        "padding": "VALID" if circular else padding,
        "rhs_dilation": along(layer.kernel_dilation, rank),
        "transpose_kernel": flipped,
        "precision": layer.precision,
        "preferred_element_type": layer.preferred_element_type,
    }
    if circular:  # bias and activation are of the sum of what lies a period apart
        y = _activated(where, conv_transpose, None, x, kernel, None, how, activation=None)
        y = _wrapped(y, [size * stride for size, stride in zip(x.shape[1:], strides, strict=False)], flipped)
        y = _followed(y, bias, layer.activation)
    else:
        y = _activated(where, conv_transpose, None, x, kernel, bias, how, activation=layer.activation, flipped=flipped)
    return y if len(batch) == 1 else y.reshape(*batch, *y.shape[1:])


def _activated(
    where: str,
    drop_in: Callable[..., jax.Array],
    users: Callable[..., jax.Array] | None,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    how: dict[str, Any],
    *,
    activation: Activation | None,
    flipped: bool = False,
) -> jax.Array:
    """Computes the function of lax's that a drop-in is of, and what follows it.

    There are steps with a function of the user's, and where the drop-in leaves the convolution to lax.
    """
    check_activation(where, activation)
    arrays = [x, kernel] if bias is None else [x, kernel, bias]
    sizes = (*x.shape, *kernel.shape)
    known = not any(jax.export.is_symbolic_dim(n) or n == 0 for n in sizes) and x.ndim in CHANNELS_LAST
    whole = how.get("out_sharding") is None and not any(map(sharded, arrays))
    if users is None and known and whole and x.dtype == kernel.dtype and len(arrays) + callable(activation) > 2:
        found = by_lax(drop_in.__name__, how)[1].trace(x, kernel).jaxpr
        (out,) = found.out_avals
        if 0 not in out.shape:
            plan = planned(found.eqns[-1].params, x.shape, kernel.shape, out.shape, flipped)
            y = call(
                plan.product,
                functools.partial(finished, activation),
                Factors(plan.images(x), [plan.weights(kernel)]),
                arrays[2:],
                out_dtype=out.dtype if bias is None else promoted(out.dtype, bias.dtype),
                save="default",
                precision=dot_precision.canonical(how["precision"], where),
                backend=backends.resolve(None, where),
                config=None,
            )
            return plan.result(y)
    if users is not None:  # which may have no such arguments
        optional = "preferred_element_type", "out_sharding"
        how = {name: value for name, value in how.items() if value is not None or name not in optional}
    return _followed((users or drop_in)(x, kernel, **how), bias, activation)


def _followed(y: jax.Array, bias: jax.Array | None, activation: Activation | None) -> jax.Array:
    """Returns the activation of a sum, in steps."""
    y = y if bias is None else y + with_rank(bias, y.ndim)
    return y if activation is None else activation(y)


def _images(where: str, x: jax.Array, rank: int) -> tuple[Sizes, jax.Array]:
    """Returns the sizes of the batch axes, and the inputs with those merged in one."""
    count = x.ndim - rank - 1
    if count < 0:
        raise ValueError(f"{where}: inputs must have {rank} axes of an image and channels, got {x.shape}")
    return x.shape[:count], x if count == 1 else x.reshape(-1, *x.shape[count:])


def _padding(where: str, given: Any, rank: int) -> Any:
    """Returns padding as lax takes it, or one of Flax's words."""
    if isinstance(given, str):
        return given
    pairs = (given,) * rank if isinstance(given, int) else given
    pairs = tuple((x, x) if isinstance(x, int) else tuple(x) for x in pairs)
    if len(pairs) != rank or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{where}: padding must be a string, an int, or {rank} of ints or pairs, got {given!r}")
    return pairs


def _channels_last(rank: int) -> lax.ConvDimensionNumbers:
    axes = tuple(range(1, rank + 1))
    images = (0, rank + 1, *axes)
    return lax.ConvDimensionNumbers(images, (rank + 1, rank, *range(rank)), images)


def _wrapped(y: jax.Array, periods: list[int], flipped: bool) -> jax.Array:
    """Returns images of one period along each axis: the sum of all that lies whole periods apart.

    The padding makes every axis an even number of periods, half of it before. Where that half is uneven, Flax puts the
    larger one first, and with a transposed kernel last, so that Conv's windows are met.
    """
    rest = [-(size - period) % (2 * period) for size, period in zip(y.shape[1:-1], periods, strict=True)]
    sides = [((x + (not flipped)) // 2, (x + flipped) // 2) for x in rest]
    y = jnp.pad(y, [(0, 0), *sides, (0, 0)])
    for axis, period in enumerate(periods, 1):
        y = y.reshape(*y.shape[:axis], -1, period, *y.shape[axis + 1 :]).sum(axis)
    return y
