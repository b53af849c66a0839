"""Convolutions for tests of kernels: geometries, problems, arrays, and the products of their windows by numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

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


def windows(x: np.ndarray, of: Im2col) -> np.ndarray:
    """The windows ``[images * grid, groups, taps, channels]`` of images."""
    sizes = [(size - 1) * by + 1 for size, by in zip(of.image, of.spread, strict=True)]
    apart = np.zeros((of.images, *sizes, x.shape[-1]), x.dtype)
    apart[(slice(None), *(slice(None, None, by) for by in of.spread))] = x
    found = np.zeros((of.images, *of.grid, of.taps, of.groups * of.channels), x.dtype)
    for t, tap in enumerate(itertools.product(*map(range, of.window))):
        inside, read = [], []
        for grid, stride, step, i, low, size in zip(of.grid, of.strides, of.dilation, tap, of.low, sizes, strict=True):
            at = stride * np.arange(grid) + step * i - low
            kept = np.flatnonzero((at >= 0) & (at < size))
            inside.append(kept)
            read.append(at[kept])
        images = np.arange(of.images)
        found[(*np.ix_(images, *inside), t)] = apart[np.ix_(images, *read)]
    return found.reshape(of.rows, of.taps, of.groups, of.channels).swapaxes(1, 2)


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


def product(problem: Problem, x: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """The product ``[m, n]`` of arrays, added up in a dtype."""
    of, given = problem.a.view, problem.bs[0]
    assert isinstance(of, Im2col)
    columns, rows = problem.n // of.groups, windows(x.astype(dtype), of)
    b = b.astype(dtype)
    if problem.a.contiguous == "mn":
        b = b.reshape(of.rows, of.groups, columns)
        found = [rows[:, g].reshape(of.rows, -1).T @ b[:, g] for g in range(of.groups)]
        return np.concatenate(found, 1)
    if given.contiguous == "k":
        b = b.reshape(*b.shape[:-1], of.groups, of.channels)
        b = np.moveaxis(b, (-3, -2, -1), (-1, -2, -3))
    else:
        b = b.reshape(*b.shape[:-1], of.groups, columns)
    if isinstance(given.view, Taps):
        for axis, size in enumerate(of.window):
            first, step = given.view.first[axis], given.view.step[axis]
            b = np.take(b, first + step * np.arange(size), axis)
    b = b.reshape(of.columns, of.groups, columns)
    found = [rows[:, g].reshape(of.rows, -1) @ b[:, g] for g in range(of.groups)]
    return np.concatenate(found, 1)
