"""The convolution: windows of images by weights, and the two products that are its gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.binding.explicit import batched
from cutjax.binding.placement import Labels, Placement, batch_labels
from cutjax.binding.rules import on_devices, on_mesh
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue, OperandSpec
from cutjax.epilogue.merge import merged
from cutjax.kernels import convolution
from cutjax.kernels.device import Device
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.problem import Problem
from cutjax.primitives.accumulators import accumulator, as_wide, is_half
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Folded, Product
from cutjax.primitives.product_rules import define_product

Sizes = tuple[int, ...]  # along each axis of an image
DOTS_BYTES = 50e6  # of images and their gradient: from here on XLA's product of matrices is as fast as cuDNN's
DOTS_PIXELS = 2048  # of all images: of fewer XLA divides the contraction of a gradient of weights, which cuDNN does not


@define_product("cutjax_conv")
@dataclasses.dataclass(frozen=True)
class Convolution(Product):
    """One of the products of images ``a [..., images, *image, channels]``, of which windows are taken.

      "forward"     by weights ``b [..., *window, channels / groups, n]``
      "transposed"  by weights ``b [..., *window, n / groups, channels]`` whose taps are flipped
      "weights"     by images ``b [..., images, *grid, n]``: the gradient of weights

    The first two are ``[..., images, *grid, n]``, the last one is ``[..., *window, channels / groups, n]``. A window's
    place p and tap t meet the image's element ``(strides * p + dilation * t - low) / spread``, where there is one.

    Attributes:
      form: one of the three.
      image, window, strides, dilation, spread: as those of ``kernels.operand.Im2col``.
      padding: elements of zero before and after each axis of the images as they are spread, ``(low, high)``.
      feature_groups: of channels; the first ``n / groups`` columns have the first ``channels / groups``.
    """

    form: str
    image: Sizes
    window: Sizes
    strides: Sizes
    dilation: Sizes
    spread: Sizes
    padding: tuple[tuple[int, int], ...]
    feature_groups: int = 1

    where = "conv"

    @property
    def axes(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The axes of images, and of weights."""
        return len(self.image) + 2, len(self.image) + 2

    @property
    def rows(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The axes of images without channels, and of weights without their last."""
        return len(self.image) + 1

    @functools.cached_property
    def grid(self) -> Sizes:
        """The windows along each axis."""
        sizes = zip(self._extents, self._reaches, self.strides, self.padding, strict=True)
        return tuple(max(0, (extent + sum(pads) - reach) // stride + 1) for extent, reach, stride, pads in sizes)

    @property
    def _extents(self) -> Sizes:
        """The sizes of an image that is spread."""
        return tuple(_reach(size, spread) for size, spread in zip(self.image, self.spread, strict=True))

    @property
    def _reaches(self) -> Sizes:
        """The places from the first to the last tap of a window, along each axis."""
        return tuple(_reach(size, step) for size, step in zip(self.window, self.dilation, strict=True))

    def _with_form(self, form: str) -> Convolution:
        return dataclasses.replace(self, form=form)

    def inverse(self, form: str) -> Convolution:
        """Returns the product that takes windows of what this one's windows make, to where those were taken."""
        sizes = zip(self._extents, self._reaches, self.grid, self.strides, self.padding, strict=True)
        padding = []
        for extent, reach, grid, stride, (low, _) in sizes:
            before = reach - 1 - low
            padding.append((before, extent + reach - 1 - _reach(grid, stride) - before))
        return Convolution(
            form, self.grid, self.window, self.spread, self.dilation, self.strides, tuple(padding), self.feature_groups
        )

    def tile(self, a: Any, *rest: Any) -> Any:
        b, own = rest[0], self.rows + 1
        batch = lax.broadcast_shapes(a.shape[:-own], *(x.shape[:-own] for x in rest))
        if self.form == "weights":
            shape = (*self.window, a.shape[-1] // self.feature_groups, b.shape[-1])
        else:
            n = b.shape[-1] if self.form == "forward" else self.feature_groups * b.shape[-2]
            shape = (a.shape[-own], *self.grid, n)
        spec = batched(len(shape), *(x.sharding.spec[:-own] for x in (a, *rest)))
        sharding = on_mesh(a, *rest).update(spec=spec)
        weak = all(x.weak_type for x in (a, *rest))
        return a.update(shape=(*batch, *shape), weak_type=weak, sharding=sharding)

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        own, whole = self.rows + 1, (None,) * len(self.image)
        full = self.tile(a, *rest).shape
        if self.feature_groups == 1:
            k, m, n = "k", "m", "n"
            of_weights = (k, n) if self.form == "forward" else (n, k)
        else:
            # Channels of both sides are divided alike, and only between groups: what divides both divides the groups.
            apart = math.gcd(a.shape[-1] // self.feature_groups, full[-1] // self.feature_groups) == 1
            k = m = n = "n" if apart else None
            of_weights = (None, n)
        if self.form == "weights":
            of_a, of_b = ("k", *whole, m), ("k", *whole, n)
            tile = (*whole, m if self.feature_groups == 1 else None, n)
        else:
            of_a, of_b, tile = ("m", *whole, k), (*whole, *of_weights), ("m", *whole, n)
        labels = [
            batch_labels(x.shape[:-own], full) + of
            for x, of in zip((a, *rest), (of_a, *[of_b] * len(rest)), strict=True)
        ]
        return labels, batch_labels(full[:-own], full) + tile

    def shard(self, placement: Placement, factors: Factors) -> tuple[Product, Factors]:
        parts = placement.count(placement.axes.get("n", ())) if self.feature_groups > 1 else 1
        return dataclasses.replace(self, feature_groups=self.feature_groups // parts), factors

    def specs(self, a: jax.Array, operands: Sequence[jax.Array]) -> tuple[OperandSpec, ...]:
        """Returns the specs, in which an axis of size 1 of the result varies as the other rows do."""
        found = []
        for spec, x in zip(super().specs(a, operands), operands, strict=True):
            sizes = self._row_sizes(a)
            of_rows = [size != 1 for size in x.shape[-1 - len(sizes) : -1]]
            of_rows = [any(of_rows) if size == 1 else moves for size, moves in zip(sizes, of_rows, strict=True)]
            batch = (*spec.batch[: 1 - len(sizes)], *of_rows[:-1])
            found.append(dataclasses.replace(spec, row=of_rows[-1], batch=batch))
        return tuple(found)

    def _row_sizes(self, a: Any) -> tuple[int, ...]:
        """Returns the sizes of the accumulators' axes that are rows."""
        if self.form == "weights":
            return (*self.window, a.shape[-1] // self.feature_groups)
        return (a.shape[-1 - self.rows], *self.grid)

    def whole_operands(self, factors: Factors, operands: Sequence[jax.Array]) -> list[jax.Array]:
        return [_along_all(x, self._row_sizes(factors.a)) for x in operands]

    def fold(self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array]) -> Folded | None:
        """Merges batch axes into images where weights are for all."""
        a, bs, count = factors.a, factors.bs, factors.a.ndim - self.rows - 1
        shared = self.form != "weights" and all(math.prod(b.shape[:count]) == 1 for b in bs)
        if not count or not shared or on_devices(a, *bs, *operands):
            return None
        found, lead = merged(epilogue, count, self.rows - 1), a.shape[: count + 1]
        if found is None:
            return None
        spread = [_along_all(x, (*lead, *self.grid)) for x in operands]
        a = lax.reshape(a, (math.prod(lead), *a.shape[count + 1 :]))
        matrices = [lax.reshape(b, b.shape[count:]) for b in bs]
        spread = [lax.reshape(x, (math.prod(x.shape[: count + 1]), *x.shape[count + 1 :])) for x in spread]
        return Folded(self, found, Factors(a, matrices), spread, lambda d: lax.reshape(d, (*lead, *d.shape[1:])))

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        a, b, own = avals[0], avals[1], self.rows + 1
        n, low = self.tile(a, b).shape[-1], tuple(low for low, _ in self.padding)
        images, channels = a.shape[-own], a.shape[-1] // self.feature_groups
        geometry = self.window, self.strides, self.dilation, self.spread, low
        view = Im2col(images, self.image, self.grid, *geometry, channels, self.feature_groups)
        how: dict[str, Any] = {"dtype": a.dtype, "out_dtype": out_dtype, "device": device}
        if self.form == "weights":
            found = convolution.weight_gradient(view, n, **how)
        elif self.form == "forward":
            found = convolution.forward(view, n, **how)
        else:
            flipped = Taps(self.window, self.window, tuple(size - 1 for size in self.window), (-1,) * len(self.window))
            found = convolution.forward(view, n, flipped, transposed=True, **how)
        of_a, of_b = (x.shape[:-own] for x in (a, b))
        matrices = dataclasses.replace(found.bs[0].of(b.dtype), batch=of_b)
        batch = lax.broadcast_shapes(of_a, of_b)
        return dataclasses.replace(found, a=dataclasses.replace(found.a, batch=of_a), bs=(matrices,), batch=batch)

    def in_order(self, problem: Problem) -> Problem:
        return convolution.with_patches(problem) if problem.plain else problem

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Convolution, tuple[jax.Array, jax.Array], Canonical]:
        if self.form == "weights":  # g is of weights
            if i == 1:
                return self._with_form("forward"), (other, g), precision
            return self.inverse("transposed"), (other, g), precision
        if i == 0:
            return self.inverse("transposed" if self.form == "forward" else "forward"), (g, other), precision
        if self.form == "forward" and not self.is_spread:
            return self._with_form("weights"), (other, g), precision
        return self.inverse("weights"), (g, other), precision

    @property
    def is_spread(self) -> bool:
        """True if the gradient of weights is of the result's windows: those of the images would be of zeros mostly."""
        return set(self.strides) == {1} and set(self.spread) != {1}

    def restored(self, i: int, d: jax.Array) -> jax.Array:
        """Returns weights from those of the inverse product: taps in order, and channels in each other's place."""
        if i == 0 or self.form != "forward" or not self.is_spread:
            return d
        *_, n, channels = d.shape
        groups, at = self.feature_groups, d.ndim - 2  # [.., n / groups, channels] to [.., channels / groups, n]
        d = lax.rev(d, range(at - len(self.window), at)).reshape(*d.shape[:at], n, groups, channels // groups)
        return jnp.moveaxis(d, at + 2, at).swapaxes(-1, -2).reshape(*d.shape[:at], channels // groups, groups * n)

    def written(self, accumulator: np.dtype, dtype: np.dtype, on_cuda: bool) -> np.dtype:
        """Returns the operands' dtype where they have 16 bits: cuDNN has no such convolution with a wider result."""
        return dtype if on_cuda and is_half(dtype) and accumulator.itemsize == 4 else accumulator

    def reference(self, *arrays: jax.Array, out_dtype: np.dtype, precision: Canonical, on_cuda: bool) -> jax.Array:
        """Computes the product by one of lax's convolutions, batch axes as ``jax.vmap`` does."""
        params: dict[str, Any] = {"out_dtype": out_dtype, "precision": precision, "on_cuda": on_cuda}
        a, b = arrays
        if a.ndim > self.rows + 1:
            moved = [None if x.shape[0] == 1 else 0 for x in arrays]
            given = [lax.squeeze(x, [0]) if axis is None else x for x, axis in zip(arrays, moved, strict=True)]
            one = functools.partial(self.reference, **params)
            return one(*given)[None] if moved == [None, None] else jax.vmap(one, moved)(*given)
        full = self.tile(*map(jax.typeof, arrays))
        if 0 in (*a.shape, *b.shape, *full.shape):
            return jnp.zeros(full.shape, out_dtype)
        b = as_wide(b, a.dtype)
        preferred = accumulator(a.dtype, out_dtype)
        if on_cuda and out_dtype in (a.dtype, accumulator(a.dtype)):
            preferred = out_dtype  # as lax's own
        elif not on_cuda or preferred != accumulator(a.dtype):
            a, b = a.astype(preferred), b.astype(preferred)
        if on_cuda and self._is_of_pixels and not self._is_short_gradient(a, full):
            return self._by_dot(a, b, precision or dot_precision.DEFAULT, preferred).astype(out_dtype)
        if on_cuda and {a.dtype.name, b.dtype.name} <= {"int8", "uint8"} and (parts := self._parts(a, b)):
            wide = accumulator(a.dtype)
            one = functools.partial(self.reference, out_dtype=np.dtype(np.float32), precision=None, on_cuda=True)
            sums = (one(x, y).astype(wide) * (of_x * of_y) for x, of_x in parts[0] for y, of_y in parts[1])
            return functools.reduce(lax.add, sums).astype(out_dtype)
        product = self.exactly_padded(self.grid) if self.form == "weights" else self
        beyond = any(-min(pads) > extent for pads, extent in zip(product.padding, product._extents, strict=True))
        if not on_cuda or beyond:  # lax refuses padding beyond, which gradients may have
            a, product = product._cropped(a)
            if 0 in a.shape:
                return jnp.zeros(full.shape, out_dtype)
        convolve = functools.partial(
            lax.conv_general_dilated, precision=precision or dot_precision.DEFAULT, preferred_element_type=preferred
        )
        return product._by_lax(convolve, a, b).astype(out_dtype)

    def _parts(self, a: jax.Array, b: jax.Array) -> tuple[Any, Any] | None:
        """Returns integers of 8 bits as few sums of float32 times powers of two, whose products' sums are all exact.

        cuDNN adds up no integers in integers, and XLA refuses such a convolution on a GPU. None where k is too long.
        """
        taps = a.size // a.shape[-1] if self.form == "weights" else math.prod(self.window) * a.shape[-1]

        def halves(x: jax.Array) -> list[tuple[jax.Array, int]]:
            return [((x >> 4).astype(np.float32), 16), ((x & 15).astype(np.float32), 1)]

        whole = [[(x.astype(np.float32), 1)] for x in (a, b)]
        for found, most in ((whole, 2**16), ([halves(a), whole[1]], 2**12), ([halves(a), halves(b)], 2**8)):
            if taps * most <= 2**24:
                return found[0], found[1]
        return None

    @property
    def _is_of_pixels(self) -> bool:
        """True if each window is a pixel of its own, in order: a product of matrices."""
        ones = {*self.window, *self.strides, *self.spread, self.feature_groups} == {1}
        return ones and not any(map(any, self.padding))

    def _is_short_gradient(self, a: jax.Array, result: jax.Array) -> bool:
        """True for a gradient in 16 bits for which XLA's convolution beats its dot.

        In those of images cuDNN transposes no weights. Of 9 of up to 32 MB on an H200 (benchmarks/results, conv-*) XLA
        took 0.78 to 1.10 times as long by cuDNN, 0.90 in geometric mean; of 3 of 61 MB 0.90 to 1.12, and of 18 larger
        ones 1.00 to 1.17. Of weights 3 of 1568 pixels took 0.78 to 0.82, and 32 of more 0.91 to 1.64.
        """
        few = 2 * (a.size + result.size) <= DOTS_BYTES
        if self.form == "weights":
            few = a.size <= DOTS_PIXELS * a.shape[-1]
        return self.form != "forward" and few and is_half(a.dtype)

    def _by_dot(self, a: jax.Array, b: jax.Array, precision: Any, preferred: Any) -> jax.Array:
        """Computes the product of pixels as one of matrices, as XLA does too, but it transposes weights for that."""
        last, how = a.ndim - 1, {"precision": precision, "preferred_element_type": preferred}
        if self.form == "weights":
            pixels = tuple(range(last))
            d = lax.dot_general(a, b, ((pixels, pixels), ((), ())), **how)
            return d.reshape(*self.window, *d.shape)
        contracted = 0 if self.form == "forward" else 1
        return lax.dot_general(a, b.reshape(b.shape[-2:]), (((last,), (contracted,)), ((), ())), **how)

    def exactly_padded(self, grid: Sizes) -> Convolution:
        """Returns the product of so many windows along each axis, with the padding that ends with the last of them."""
        sizes = zip(self.padding, grid, self.strides, self._reaches, self._extents, strict=True)
        padding = [
            (low, _reach(grid, stride) + reach - 1 - extent - low) for (low, _), grid, stride, reach, extent in sizes
        ]
        return dataclasses.replace(self, padding=tuple(padding))

    def _cropped(self, a: jax.Array) -> tuple[jax.Array, Convolution]:
        """Returns the images without what negative padding leaves out, and the product of those.

        XLA's CPU backend reads outside of its operand for some such (jax 0.10.2).
        """
        padding, image = [], []
        for i, ((low, high), spread, size) in enumerate(zip(self.padding, self.spread, self.image, strict=True)):
            before, after = (-(min(pad, 0) // spread) for pad in (low, high))
            before, after = min(before, size), min(after, size)
            kept = max(size - before - after, 0)
            if kept < size:
                a = lax.slice_in_dim(a, before, before + kept, axis=1 + i)
            padding.append((low + spread * before, high + spread * after))
            image.append(kept)
        return a, dataclasses.replace(self, padding=tuple(padding), image=tuple(image))

    def _by_lax(self, convolve: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        """Computes the product of arrays without batch axes by lax's function, as lax's own derivatives would."""
        d, spatial = len(self.image), tuple(range(1, len(self.image) + 1))
        images, taps = (0, d + 1, *spatial), tuple(range(d))
        if self.form == "weights":
            swapped, weights = (d + 1, 0, *spatial), (d, d + 1, *taps)
            return convolve(
                a,
                b,
                window_strides=self.dilation,
                padding=self.padding,
                lhs_dilation=self.spread,
                rhs_dilation=self.strides,
                dimension_numbers=lax.ConvDimensionNumbers(swapped, swapped, weights),
                batch_group_count=self.feature_groups,
            )
        weights = (d + 1, d, *taps)
        if self.form == "transposed":
            if (
                self.feature_groups > 1
            ):  # [*window, n / groups, groups * channels] as [*window, groups * (n / groups), channels]
                *window, n, channels = b.shape
                b = b.reshape(*window, n, self.feature_groups, channels // self.feature_groups)
                b = jnp.moveaxis(b, d + 1, d).reshape(*window, self.feature_groups * n, channels // self.feature_groups)
            b, weights = lax.rev(b, taps), (d, d + 1, *taps)
        return convolve(
            a,
            b,
            window_strides=self.strides,
            padding=self.padding,
            lhs_dilation=self.spread,
            rhs_dilation=self.dilation,
            dimension_numbers=lax.ConvDimensionNumbers(images, weights, images),
            feature_group_count=self.feature_groups,
        )


def _reach(size: int, step: int) -> int:
    """Returns the places from the first to the last of so many that lie a step apart."""
    return max(0, (size - 1) * step + 1) if size else 0


def _along_all(x: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    """Returns an operand that varies along some of the rows' axes, broadcast along all of them."""
    own = x.shape[-1 - len(rows) : -1]
    if own == rows or all(size == 1 for size in own):
        return x
    return jnp.broadcast_to(x, (*x.shape[: -1 - len(rows)], *rows, x.shape[-1]))
