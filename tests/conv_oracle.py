"""Convolutions by hand, in numpy: the matrices that the views of a convolution are, element by element."""

from __future__ import annotations

import itertools
import math

import numpy as np

from cutjax.kernels.operand import Im2col, Taps


def windows(x: np.ndarray, view: Im2col) -> np.ndarray:
    """The matrix ``[groups, rows, columns]`` of the windows of images."""
    found = np.zeros((view.groups, view.images, *view.grid, *view.window, view.channels), x.dtype)
    x = x.reshape(view.images, *view.image, view.groups, view.channels)
    for place in itertools.product(*map(range, view.grid)):
        for tap in itertools.product(*map(range, view.window)):
            along = zip(place, tap, view.strides, view.dilation, view.low, view.spread, view.image, strict=True)
            at = [divmod(s * p + d * t - low, spread) + (size,) for p, t, s, d, low, spread, size in along]
            if all(rest == 0 and 0 <= i < size for i, rest, size in at):
                pixel = x[(slice(None), *(i for i, _, _ in at))]
                found[(slice(None), slice(None), *place, *tap)] = np.moveaxis(pixel, 1, 0)
    return found.reshape(view.groups, view.rows, view.columns)


def weights(w: np.ndarray, taps: Taps, contiguous: str, groups: int, n: int) -> np.ndarray:
    """The matrix ``[groups, columns of a window, n / groups]`` of the weights' taps."""
    if contiguous == "k":  # [*stored, n / groups, groups * channels]
        w = w.reshape(*taps.stored, n // groups, groups, -1)
        w = np.moveaxis(w, (-2, -1), (0, -2))
    else:
        w = np.moveaxis(w.reshape(*taps.stored, -1, groups, n // groups), -2, 0)
    places = [[f + s * t for t in range(size)] for f, s, size in zip(taps.first, taps.step, taps.window, strict=True)]
    taken = w[(slice(None), *np.ix_(*places))]
    return taken.reshape(groups, math.prod(taps.window) * w.shape[-2], n // groups)


def in_columns(groups: np.ndarray) -> np.ndarray:
    """The matrix of the columns of all groups ``[groups, m, n / groups]``, one group after the other."""
    return np.concatenate(list(groups), -1)
