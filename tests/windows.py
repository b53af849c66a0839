"""The oracle of convolutions: windows of images by hand in numpy, and views of random sizes."""

from __future__ import annotations

import itertools
import math

import numpy as np

from cutjax.kernels.operand import Im2col, Taps


def windows(x: np.ndarray, view: Im2col) -> np.ndarray:
    """The windows of images ``[images, *image, groups * channels]``: ``[rows, taps, groups, channels]``, in float64."""
    x = np.asarray(x, np.float64)
    padded = np.pad(x, [(0, 0), *[(0, 1)] * len(view.image), (0, 0)])  # the last of each axis is zero
    found = []
    for tap in itertools.product(*map(range, view.window)):
        taken = padded
        for axis, t in enumerate(tap):
            at = view.strides[axis] * np.arange(view.grid[axis]) + view.dilation[axis] * t - view.low[axis]
            whole, rest = np.divmod(at, view.spread[axis])
            there = (rest == 0) & (whole >= 0) & (whole < view.image[axis])
            taken = np.take(taken, np.where(there, whole, view.image[axis]), 1 + axis)
        found.append(taken.reshape(view.rows, view.groups, view.channels))
    return np.stack(found, 1)


def weights(w: np.ndarray, view: Im2col, n: int, taps: Taps | None, contiguous: str) -> np.ndarray:
    """The weights that a product reads, ``[taps, groups, channels, n / groups]`` in float64, of the array of a view."""
    stored, groups, each = taps.stored if taps else view.window, view.groups, n // view.groups
    w = np.asarray(w, np.float64)
    if contiguous == "mn":
        w = np.moveaxis(w.reshape(*stored, view.channels, groups, each), -3, -2)
    else:
        w = np.moveaxis(w.reshape(*stored, each, groups, view.channels), -3, -1)
    for axis in range(len(stored)):
        first, step = (taps.first[axis], taps.step[axis]) if taps else (0, 1)
        w = np.take(w, first + step * np.arange(view.window[axis]), axis)
    return w.reshape(view.taps, groups, view.channels, each)


def forward(
    x: np.ndarray, w: np.ndarray, view: Im2col, n: int, taps: Taps | None = None, contiguous: str = "mn"
) -> np.ndarray:
    """``im2col(x) @ w``, ``[rows, n]`` in float64."""
    found = np.einsum("rtgc,tgcj->rgj", windows(x, view), weights(w, view, n, taps, contiguous))
    return found.reshape(view.rows, n)


def weight_gradient(x: np.ndarray, g: np.ndarray, view: Im2col, n: int) -> np.ndarray:
    """``im2col(x)^T @ g``, ``[taps * channels, n]`` in float64."""
    g = np.asarray(g, np.float64).reshape(view.rows, view.groups, -1)
    return np.einsum("rtgc,rgj->tcgj", windows(x, view), g).reshape(view.columns, n)


def forward_view(
    images: int,
    image: tuple[int, ...],
    window: tuple[int, ...],
    groups: int,
    strides: tuple[int, ...] = (),
    dilation: tuple[int, ...] = (),
    spread: tuple[int, ...] = (),
    low: tuple[int, ...] | None = None,
    high: tuple[int, ...] | None = None,
    channels: int = 1,
) -> Im2col:
    """A view; without padding said, of that after which as many windows as pixels lie beside each other."""
    ones = (1,) * len(image)
    strides, dilation, spread = strides or ones, dilation or ones, spread or ones
    reach = [d * (w - 1) for d, w in zip(dilation, window, strict=True)]
    low = tuple(x // 2 for x in reach) if low is None else low
    high = tuple(x - x // 2 for x in reach) if high is None else high
    sizes = zip(image, spread, low, high, reach, strides, strict=True)
    grid = tuple(((i - 1) * u + a + b - x) // s + 1 for i, u, a, b, x, s in sizes)
    return Im2col(images, image, grid, window, strides, dilation, spread, low, channels, groups)


def random_view(rng: np.random.Generator, channels: int, groups: int, rank: int = 0, spread: bool = True) -> Im2col:
    """A view of small images of random sizes, strides, dilation, spread and padding, negative too."""
    rank = rank or int(rng.integers(1, 4))
    most = {1: 40, 2: 13, 3: 6}[rank]
    while True:
        image = tuple(rng.integers(1, most, rank).tolist())
        window = tuple(rng.integers(1, 6 if rank < 3 else 4, rank).tolist())
        strides, dilation, steps = (tuple(rng.choice([1, 1, 1, 2, 3], rank).tolist()) for _ in range(3))
        steps = steps if spread else (1,) * rank
        low, high = (tuple(rng.integers(-2, 5, rank).tolist()) for _ in range(2))
        view = forward_view(2, image, window, groups, strides, dilation, steps, low, high, channels)
        if min(view.grid) > 0 and math.prod(view.grid) < 2000:
            return view
