"""Convolutions for tests of kernels: geometries, problems, and products by hand of the windows of images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.epilogue.trace import trace
from cutjax.kernels import convolution
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.problem import Problem

# Beside these, "backwards": all taps, flipped, along their columns.
# "in order": the weights as they lie; "flipped": along their columns, flipped, and of every other tap; "some taps": of
# every other one; "weights": their gradient.
KINDS = ("in order", "flipped", "some taps", "weights")


def view(images, image, window, channels, strides=None, dilation=None, low=None, high=None, groups=1, spread=None):
    """The windows of images with so much padding."""
    ones, zeros = (1,) * len(image), (0,) * len(image)
    strides, dilation, spread = strides or ones, dilation or ones, spread or ones
    low, high = low or zeros, high or zeros
    along = zip(image, window, strides, dilation, spread, low, high, strict=True)
    grid = tuple(((n - 1) * by + lo + hi - (w - 1) * d) // s + 1 for n, w, s, d, by, lo, hi in along)
    return Im2col(images, image, grid, window, strides, dilation, spread, low, channels, groups)


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
    reach = [d * (w - 1) for d, w in zip(dilation or (1,) * len(image), window, strict=True)]
    low = tuple(x // 2 for x in reach) if low is None else low
    high = tuple(x - x // 2 for x in reach) if high is None else high
    return view(images, image, window, channels, strides, dilation, low, high, groups, spread)


def random_view(
    rng: np.random.Generator, channels: int, groups: int, rank: int = 0, spread: bool = True, grid: int = 2000
) -> Im2col:
    """A view of small images of random sizes, strides, dilation, spread and padding, negative too.

    An image has fewer windows than ``grid``, and some meet elements.
    """
    rank = rank or int(rng.integers(1, 4))
    most = {1: 40, 2: 13, 3: 6}[rank]
    while True:
        image = tuple(rng.integers(1, most, rank).tolist())
        window = tuple(rng.integers(1, 6 if rank < 3 else 4, rank).tolist())
        strides, dilation, steps = (tuple(rng.choice([1, 1, 1, 2, 3], rank).tolist()) for _ in range(3))
        steps = steps if spread else (1,) * rank
        low, high = (tuple(rng.integers(-2, 5, rank).tolist()) for _ in range(2))
        found = view(2, image, window, channels, strides, dilation, low, high, groups, steps)
        if min(found.grid) > 0 and math.prod(found.grid) < grid and found.multiplied:
            return found


def _wide(x: Any) -> np.ndarray:
    """The array in float64, or complex128."""
    return np.asarray(x, np.complex128 if np.asarray(x).dtype.kind == "c" else np.float64)


def windows(x: Any, view: Im2col) -> np.ndarray:
    """The windows of images ``[images, *image, groups * channels]``: ``[rows, taps, groups, channels]``."""
    padded = np.pad(_wide(x), [(0, 0), *[(0, 1)] * len(view.image), (0, 0)])  # the last of each axis is zero
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
    """The weights that a product reads, ``[taps, groups, channels, n / groups]``, of the array of a view."""
    stored, groups, each = taps.stored if taps else view.window, view.groups, n // view.groups
    w = _wide(w)
    if contiguous == "mn":
        w = np.moveaxis(w.reshape(*stored, view.channels, groups, each), -3, -2)
    else:
        w = np.moveaxis(w.reshape(*stored, each, groups, view.channels), -3, -1)
    for axis in range(len(stored)):
        first, step = (taps.first[axis], taps.step[axis]) if taps else (0, 1)
        w = np.take(w, first + step * np.arange(view.window[axis]), axis)
    return w.reshape(view.taps, groups, view.channels, each)


def _rows(x: Any, view: Im2col) -> np.ndarray:
    """The rows of each group, ``[groups, rows, columns]``."""
    return np.moveaxis(windows(x, view), 2, 0).reshape(view.groups, view.rows, view.columns)


def forward(x: Any, w: Any, view: Im2col, n: int, taps: Taps | None = None, contiguous: str = "mn") -> np.ndarray:
    """``im2col(x) @ w``, ``[rows, n]``."""
    by = np.moveaxis(weights(w, view, n, taps, contiguous), 1, 0).reshape(view.groups, view.columns, -1)
    return np.moveaxis(_rows(x, view) @ by, 0, 1).reshape(view.rows, n)


def weight_gradient(x: Any, g: Any, view: Im2col, n: int) -> np.ndarray:
    """``im2col(x)^T @ g``, ``[taps * channels, n]``."""
    g = np.moveaxis(_wide(g).reshape(view.rows, view.groups, n // view.groups), 1, 0)
    return np.moveaxis(_rows(x, view).swapaxes(1, 2) @ g, 0, 1).reshape(view.columns, n)


def asked(of: Im2col, n: int, kind: str, **more: Any) -> Problem:
    """The problem of a kind of product."""
    if kind == "weights":
        return convolution.weight_gradient(of, n, **more)
    if kind == "in order":
        return convolution.forward(of, n, **more)
    if kind == "backwards":
        taps = Taps(of.window, of.window, tuple(size - 1 for size in of.window), (-1,) * len(of.window))
        return convolution.forward(of, n, taps, transposed=True, **more)
    stored = tuple(2 * size for size in of.window)
    taps = Taps(stored, of.window, (stored[0] - 1, *(0 for _ in stored[1:])), (-2, *(2 for _ in stored[1:])))
    return convolution.forward(of, n, taps, transposed=kind == "flipped", **more)


def shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the arrays a and b."""
    of, b = problem.a.view, problem.bs[0]
    assert isinstance(of, Im2col)
    x = of.images, *of.image, of.groups * of.channels
    if problem.a.contiguous == "mn":
        return x, (of.rows, problem.n)
    stored = b.view.stored if isinstance(b.view, Taps) else of.window
    if b.contiguous == "k":
        return x, (*stored, problem.n // of.groups, of.groups * of.channels)
    return x, (*stored, of.channels, problem.n)


def product(problem: Problem, x: Any, b: Any) -> np.ndarray:
    """The product ``[m, n]`` of arrays."""
    of, given = problem.a.view, problem.bs[0]
    assert isinstance(of, Im2col)
    if problem.a.contiguous == "mn":
        return weight_gradient(x, b, of, problem.n)
    taps = given.view if isinstance(given.view, Taps) else None
    return forward(x, b, of, problem.n, taps, given.contiguous)


def with_sums(problem: Problem, large: bool) -> tuple[Problem, list[np.ndarray], Callable[..., Any]]:
    """The problem with sums of each column and of all in its epilogue, its operands, and the epilogue as a function.

    Of small integers. Where operands are ``large`` one is as large as the result, and another has a row.
    """
    rng, shape = np.random.default_rng(3), (problem.m, problem.n)
    operands = [rng.integers(-2, 3, shape).astype(jnp.bfloat16), rng.integers(1, 3, (1, problem.n)).astype(np.float32)]
    operands = operands if large else []

    def function(acc: Any, *given: Any) -> Any:
        y = (acc + given[0].astype(acc.dtype)) * given[1] if given else acc
        return y, jnp.sum(y, 0), jnp.sum(acc * acc), jnp.max(y, 0)

    acc = jax.ShapeDtypeStruct(shape, jnp.float32)
    return problem.fused(trace(function, [acc], list(map(jnp.asarray, operands))).epilogue), operands, function
