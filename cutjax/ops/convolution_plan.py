"""The product that one of lax's convolutions is, and how its arrays lie in it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.primitives.convolution import Convolution

Axes = tuple[int, ...]


class Plan(NamedTuple):
    """A convolution of lax's as a product.

    Attributes:
      product: the product, of groups of the batch as of channels.
      lhs, rhs, out: the axes of each array in the product's order.
      parts: groups of the images, that of lax's batch or of its features, which come among the channels.
      sizes: of the result in the product's order.
    """

    product: Convolution
    lhs: Axes
    rhs: Axes
    out: Axes
    parts: int
    sizes: tuple[int, ...]

    def images(self, x: jax.Array) -> jax.Array:
        """Returns the images with channels last, their groups beside each other among the channels."""
        x = lax.transpose(x, self.lhs)
        if self.parts == 1:
            return x
        n, *image, c = x.shape
        x = jnp.moveaxis(x.reshape(self.parts, n // self.parts, *image, c), 0, -2)
        return x.reshape(n // self.parts, *image, self.parts * c)

    def weights(self, w: jax.Array) -> jax.Array:
        """Returns the weights, or of a weight gradient the images that lie on the grid."""
        return lax.transpose(w, self.rhs)

    def result(self, d: jax.Array) -> jax.Array:
        """Returns a result of full size with its axes as lax's."""
        if d.shape != self.sizes:
            return d
        return lax.transpose(d, np.argsort(self.out))

    def moved(self, x: Any, w: Any, out: Any) -> tuple[bool, bool, bool]:
        """Returns True for each of the arrays that is transposed around the product."""
        triples = zip((x, w, out), (self.lhs, self.rhs, self.out), (self.parts > 1, False, False), strict=True)
        return tuple(grouped or _moves(array.shape, order) for array, order, grouped in triples)  # pyright: ignore

    def copies(self, x: Any, w: Any, out: Any, names: tuple[str, str]) -> tuple[str, str, str]:
        """Returns the notes for explain of arrays that are transposed around the product."""
        found, arrays = [], (x, w, out)
        for name, array, moved in zip((*names, "the result"), arrays, self.moved(*arrays), strict=True):
            size = math.prod(array.shape) * array.dtype.itemsize
            found.append(f"{name} is transposed, of {size} bytes" if moved else "")
        if self.parts > 1:
            found[0] = f"{names[0]} is transposed for groups of its batch"
        return found[0], found[1], found[2]


def planned(params: Any, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int], flipped: bool = False) -> Plan:
    """Returns the product of one of lax's equations, told its parameters and the shapes of its arrays.

    A weight gradient is a convolution to lax too, of which batch and features are in each other's place, and the window
    is an image. So the product is that of which the arrays lie so that the fewest elements are transposed, and then
    that of the smaller window.

    Args:
      params: the parameters.
      lhs, rhs, out: the shapes.
      flipped: whether lax's weights are ``rhs`` with taps flipped. The axes that ``rhs_spec`` names are then those of
        ``rhs`` that become lax's "O" and "I"; where there are groups, "I" has those of all of them and "O" of one.
    """

    def cost(plan: Plan) -> tuple[int, int]:
        triples = ((lhs, plan.lhs), (rhs, plan.rhs), (out, plan.out))
        moved = sum(math.prod(shape) for shape, order in triples if _moves(shape, order))
        return moved + (plan.parts > 1) * math.prod(lhs), math.prod(plan.product.window)

    return min(_plans(params, lhs, rhs, out, flipped), key=cost)


def _plans(params: Any, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int], flipped: bool) -> Iterator[Plan]:
    """Yields the products that an equation is."""
    numbers = params["dimension_numbers"]
    n, c, *places = numbers.lhs_spec
    o, i, *taps = numbers.rhs_spec
    of_n, of_c, *windows = numbers.out_spec
    image, window, grid = (
        tuple(shape[axis] for axis in axes) for shape, axes in ((lhs, places), (rhs, taps), (out, windows))
    )
    strides, dilation, spread = (tuple(params[name]) for name in ("window_strides", "rhs_dilation", "lhs_dilation"))
    padding = tuple(map(tuple, params["padding"]))
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    every = groups * batches

    def plan(product: Convolution, of_lhs: Axes, of_rhs: Axes, of_out: Axes, parts: int) -> Plan:
        return Plan(product, of_lhs, of_rhs, of_out, parts, tuple(out[axis] for axis in of_out))

    product = Convolution("forward", image, window, strides, dilation, spread, padding, every)
    of_lhs, of_out = (n, *places, c), (of_n, *windows, of_c)
    if not flipped:
        yield plan(product, of_lhs, (*taps, i, o), of_out, batches)
    if flipped or (every == math.prod(window) == 1):
        yield plan(dataclasses.replace(product, form="transposed"), of_lhs, (*taps, o, i), of_out, batches)
    if not flipped:
        gradient = Convolution("weights", image, grid, dilation, strides, spread, padding, every).exactly_padded(window)
        yield plan(gradient, (c, *places, n), (i, *taps, o), (*windows, of_n, of_c), groups)


def _moves(shape: Sequence[int], order: Axes) -> bool:
    """True if axes in an order are not as they lie in memory."""
    moving = [axis for axis in order if shape[axis] != 1]
    return moving != sorted(moving)


def swapped(params: Any) -> Any:
    """Returns an equation's parameters with the weights' axes "I" and "O" in each other's place."""
    numbers = params["dimension_numbers"]
    o, i, *taps = numbers.rhs_spec
    return {**params, "dimension_numbers": numbers._replace(rhs_spec=(i, o, *taps))}


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
