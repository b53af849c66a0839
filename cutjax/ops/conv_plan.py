"""The plan of a convolution: from an equation of lax's, in any layout, to a product of images with channels last."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.primitives.convolution import Convolution


class Plan(NamedTuple):
    """A convolution of lax's as a product.

    Attributes:
      product: the product, of groups of the batch as of channels.
      lhs, rhs, out: the axes of each array in the product's order.
      batches: groups of the batch.
      sizes: of the result in the product's order.
    """

    product: Convolution
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    batches: int
    sizes: tuple[int, ...]

    def images(self, x: jax.Array) -> jax.Array:
        """Returns the images with channels last, the groups of a batch beside each other among the channels."""
        x = lax.transpose(x, self.lhs)
        if self.batches == 1:
            return x
        n, *image, c = x.shape
        x = jnp.moveaxis(x.reshape(self.batches, n // self.batches, *image, c), 0, -2)
        return x.reshape(n // self.batches, *image, self.batches * c)

    def weights(self, w: jax.Array) -> jax.Array:
        """Returns the weights, ``[*window, channels / groups, n]``."""
        return lax.transpose(w, self.rhs)

    def result(self, d: jax.Array) -> jax.Array:
        """Returns a result of full size with its axes as lax's."""
        if d.shape != self.sizes:
            return d
        return lax.transpose(d, np.argsort(self.out))

    def copies(self, x: Any, w: Any, out: Any, names: tuple[str, str]) -> tuple[str, str, str]:
        """Returns the notes for explain of arrays that are transposed around the product."""
        found = []
        for name, array, order in zip((*names, "the result"), (x, w, out), (self.lhs, self.rhs, self.out), strict=True):
            moving = [axis for axis in order if array.shape[axis] != 1]
            size = math.prod(array.shape) * array.dtype.itemsize
            found.append("" if moving == sorted(moving) else f"{name} is transposed, of {size} bytes")
        if self.batches > 1:
            found[0] = f"{names[0]} is transposed for groups of its batch"
        return found[0], found[1], found[2]


def planned(params: Any, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int], flipped: bool = False) -> Plan:
    """Returns the product of one of lax's equations, told its parameters and the shapes of its arrays.

    Args:
      params: the parameters.
      lhs, rhs, out: the shapes.
      flipped: whether the equation is of the weights with taps flipped and axes "I" and "O" in each other's place.
    """
    numbers, batches = params["dimension_numbers"], params["batch_group_count"]
    n, c, *image = numbers.lhs_spec
    o, i, *window = numbers.rhs_spec
    of_images, of_weights = (n, *image, c), (*window, i, o)
    n, c, *grid = numbers.out_spec
    order = (n, *grid, c)
    product = Convolution(
        "transposed" if flipped else "forward",
        tuple(lhs[axis] for axis in image),
        tuple(rhs[axis] for axis in window),
        tuple(params["window_strides"]),
        tuple(params["rhs_dilation"]),
        tuple(params["lhs_dilation"]),
        tuple(map(tuple, params["padding"])),
        params["feature_group_count"] * batches,
    )
    return Plan(product, of_images, of_weights, order, batches, tuple(out[axis] for axis in order))


def by_lax(name: str, given: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
    """Returns lax's function with arguments, and the same one jitted; the same objects for the same."""
    arguments = tuple(sorted((key, _as_tuples(value)) for key, value in given.items()))
    try:
        return _kept(name, arguments, repr(arguments))
    except TypeError:  # not hashable, so nothing that lax takes
        return _kept.__wrapped__(name, arguments, "")


@functools.lru_cache(maxsize=4096)
def _kept(name: str, arguments: tuple[tuple[str, Any], ...], shown: str) -> tuple[Callable[..., Any], Any]:
    """Returns the same objects for the same arguments, ``shown`` too, since 1, 1.0 and True are equal."""
    function = functools.partial(getattr(lax, name), **dict(arguments))
    return function, jax.jit(function)


def _as_tuples(value: Any) -> Any:
    """Returns sequences as tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) or type(value) is tuple else value
