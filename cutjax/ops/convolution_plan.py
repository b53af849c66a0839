"""The product that one of lax's convolutions is, and how its arrays lie in it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.primitives.convolution import Convolution
from cutjax.primitives.hints import Hints

Axes = tuple[int, ...]


class Plan(NamedTuple):
    """A convolution of lax's as a product.

    Attributes:
      product: the product, of groups of the batch as of channels.
      lhs, rhs, out: the axes of each array in the product's order.
      parts: groups of the images, that of lax's batch or of its features, which come among the channels.
      sizes: of the result in the product's order.
      spread: the convolution of spread images of whose weights this is the gradient, where it is computed by windows of
        the other images: the product's arrays are in each other's place, and its result is flipped.
    """

    product: Convolution
    lhs: Axes
    rhs: Axes
    out: Axes
    parts: int
    sizes: tuple[int, ...]
    spread: Convolution | None = None

    def operands(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the product's arrays."""
        a, b = self.images(x), self.weights(w)
        return (a, b) if self.spread is None else (b, a)

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
        d = d if self.spread is None else self.spread.restored(1, d)
        if d.shape != self.sizes:
            return d
        return lax.transpose(d, np.argsort(self.out))

    def moved(self, x: Any, w: Any, out: Any) -> tuple[bool, bool, bool]:
        """Returns True for each of the arrays that is transposed around the product."""
        lhs, rhs, result = map(_moves, (x.shape, w.shape, out.shape), (self.lhs, self.rhs, self.out))
        return lhs or self.parts > 1, rhs, result or self.spread is not None

    def copies(self, x: Any, w: Any, out: Any, names: tuple[str, str]) -> tuple[str, str, str]:
        """Returns the notes for explain of arrays that are transposed around the product."""
        found, arrays = [], (x, w, out)
        for name, array, moved in zip((*names, "the result"), arrays, self.moved(*arrays), strict=True):
            size = math.prod(array.shape) * array.dtype.itemsize
            found.append(f"{name} is transposed, of {size} bytes" if moved else "")
        if self.parts > 1:
            found[0] = f"{names[0]} is transposed for groups of its batch"
        return found[0], found[1], found[2]

    def hints(self, x: Any, w: Any, out: Any, names: tuple[str, str]) -> Hints:
        """Returns the hints of the product: what is transposed around it, and how many bytes of that for it alone.

        XLA has cuDNN convolve images of two axes in 16 bits with channels last too, and transposes them itself.
        """
        arrays = x, w, out
        alike = out.ndim == 4 and x.dtype.itemsize == 2
        sizes = (
            math.prod(y.shape) * y.dtype.itemsize for y, moved in zip(arrays, self.moved(*arrays), strict=True) if moved
        )
        return Hints(self.copies(*arrays, names), moved=0 if alike else sum(sizes))


def planned(
    params: Any,
    lhs: Sequence[int],
    rhs: Sequence[int],
    out: Sequence[int],
    flipped: bool = False,
    *,
    gradients: bool = False,
) -> Plan:
    """Returns the product of one of lax's equations, told its parameters and the shapes of its arrays.

    A gradient of weights is a convolution to lax too, of which batch and features are in each other's place, and the
    window is an image. So the product is that of which the arrays lie so that the fewest elements are transposed, and
    then that of the smaller window.

    Args:
      params: the parameters.
      lhs, rhs, out: the shapes.
      flipped: whether the equation is of the weights with taps flipped and axes "I" and "O" in each other's place.
      gradients: whether it may be the gradient of weights, whose rows are taps: an epilogue's are windows.
    """

    def cost(plan: Plan) -> tuple[int, int]:
        triples = ((lhs, plan.lhs), (rhs, plan.rhs), (out, plan.out))
        moved = sum(math.prod(shape) for shape, order in triples if _moves(shape, order))
        return moved + (plan.parts > 1) * math.prod(lhs), math.prod(plan.product.window)

    plans = _plans(params, lhs, rhs, out, flipped)
    return min((plan for plan in plans if gradients or plan.product.form != "weights"), key=cost)


def unknown_sizes(params: Any, lhs: Any, rhs: Any) -> str:
    """Returns the reason against a kernel where a size but that of the batch is symbolic, else ""."""
    batch = params["dimension_numbers"].lhs_spec[0]
    known = (size for axis, size in enumerate(lhs.shape) if axis != batch or params["batch_group_count"] > 1)
    if any(map(jax.export.is_symbolic_dim, (*known, *rhs.shape))):
        return f"it needs known sizes but that of the batch, got {lhs.shape}, {rhs.shape}"
    return ""


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
    transposed = dataclasses.replace(product, form="transposed")
    yield plan(transposed if flipped else product, of_lhs, (*taps, i, o), of_out, batches)
    if not flipped and every == math.prod(window) == 1:
        yield plan(transposed, of_lhs, (*taps, o, i), of_out, batches)
    if not flipped:
        product = Convolution("forward", image, grid, dilation, strides, spread, padding, every).exactly_padded(window)
        of_product = product if product.is_spread else None
        gradient = product.inverse("weights") if of_product else dataclasses.replace(product, form="weights")
        found = plan(gradient, (c, *places, n), (i, *taps, o), (*windows, of_n, of_c), groups)
        yield found._replace(spread=of_product)


def _moves(shape: Sequence[int], order: Axes) -> bool:
    """True if axes in an order are not as they lie in memory."""
    moving = [axis for axis in order if shape[axis] != 1]
    return moving != sorted(moving)


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
