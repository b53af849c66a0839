"""Convolutions by kernels of the mma family: whole kernels on the host, what refuses them, and what compiles."""

from __future__ import annotations

import dataclasses
import math

import conv_oracle
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest

from cutjax.epilogue.expression import identity
from cutjax.kernels import convolution
from cutjax.kernels.device import reference
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import MATHS
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.problem import Problem
from cutjax.runtime.architectures import number

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")


def problem_of(make, dtype: str, math_: str, arch: str, *args, **fields) -> Problem:
    """A convolution whose result is in the dtype that its products are added up in."""
    of = next(x for x in MATHS[dtype, math_] if number(arch) in x.archs)
    acc = np.dtype(of.accumulator)
    asked = make(*args, dtype=jnp.dtype(dtype), epilogue=identity(acc, acc), device=reference(arch), **fields)
    return dataclasses.replace(asked, math=math_)


def integers(rng, shape, dtype):
    low = 0 if dtype.startswith("uint") else -3
    x = rng.integers(low, 4, shape).astype(np.float64)
    return x + 1j * rng.integers(-3, 4, shape) if dtype.startswith("complex") else x


def run(asked: Problem, config: Config, arrays, tmp_path):
    kernel = mma.resolved(asked, config)
    result = kernel_host.aligned(np.full((asked.m, asked.n), 7).astype(asked.out_dtype))
    kernel_host.run(kernel, [*map(kernel_host.aligned, arrays), result], tmp_path)
    return result


def check_forward(view, n, dtype, math_, arch, config, tmp_path, taps=None, transposed=False):
    rng = np.random.default_rng(0)
    asked = problem_of(convolution.forward, dtype, math_, arch, view, n, taps, transposed=transposed)
    taps = taps or Taps(view.window, view.window, (0,) * len(view.window), (1,) * len(view.window))
    x = integers(rng, (view.images, *view.image, view.groups * view.channels), dtype)
    shape = (n // view.groups, view.groups * view.channels) if transposed else (view.channels, n)
    w = integers(rng, (*taps.stored, *shape), dtype)
    found = run(asked, config, [x.astype(jnp.dtype(dtype)), w.astype(jnp.dtype(dtype))], tmp_path)
    b = conv_oracle.weights(w, taps, "k" if transposed else "mn", view.groups, n)
    expected = conv_oracle.in_columns(conv_oracle.windows(x, view) @ b)
    np.testing.assert_array_equal(found.astype(x.dtype), expected)


def check_weights(view, n, dtype, math_, arch, config, tmp_path):
    rng = np.random.default_rng(0)
    asked = problem_of(convolution.weight_gradient, dtype, math_, arch, view, n)
    x = integers(rng, (view.images, *view.image, view.groups * view.channels), dtype)
    g = integers(rng, (view.rows, n), dtype)
    found = run(asked, config, [x.astype(jnp.dtype(dtype)), g.astype(jnp.dtype(dtype))], tmp_path)
    of_groups = np.moveaxis(g.reshape(view.rows, view.groups, -1), 1, 0)
    expected = conv_oracle.in_columns(np.swapaxes(conv_oracle.windows(x, view), 1, 2) @ of_groups)
    np.testing.assert_array_equal(found.astype(x.dtype), expected)


def view_of(images, image, window, channels, strides=1, dilation=1, low=0, high=0, groups=1):
    """A convolution of lax's arguments: those that are numbers are of all axes."""
    strides, dilation, low, high = (
        x if isinstance(x, tuple) else (x,) * len(image) for x in (strides, dilation, low, high)
    )
    grid = tuple(
        (size + before + after - by * (taps - 1) - 1) // step + 1
        for size, before, after, by, taps, step in zip(image, low, high, dilation, window, strides, strict=True)
    )
    assert min(grid) > 0
    return Im2col(images, image, grid, window, strides, dilation, (1,) * len(image), low, channels, groups)


# What a view is of; n; dtype, math, architecture; (bm, bn, bk, wm, wn, sliced_k, stages)
BF16 = ("bfloat16", "", "sm_80"), (64, 64, 32, 32, 32, 1, 3)
F32 = ("float32", "", "sm_80"), (64, 64, 8, 32, 32, 1, 3)
VIEWS = {
    "3x3": view_of(2, (7, 6), (3, 3), 8, low=1, high=1),
    "strided": view_of(3, (9, 11), (3, 5), 16, strides=(2, 3), low=(1, 2), high=(0, 2)),
    "dilated": view_of(1, (40,), (5,), 24, dilation=3, low=6, high=6),
    "cut": view_of(2, (12, 9), (2, 3), 8, low=(-2, 1), high=(1, -2)),
    "causal": view_of(2, (33,), (4,), 2, low=3),
    "3-D": view_of(2, (5, 4, 6), (3, 2, 3), 4, strides=(1, 2, 1), dilation=(1, 1, 2), low=(1, 0, 2), high=(1, 1, 2)),
    "stem": view_of(1, (15, 14), (7, 7), 3, strides=2, low=3, high=3),
    "one": view_of(2, (17,), (9,), 1, low=4, high=4),
    "groups": view_of(2, (6, 5), (3, 3), 8, low=1, high=1, groups=3),
}


@needs_gxx
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(("way", "config"), [BF16, F32], ids=["bf16", "f32"])
def test_forward(name, way, config, tmp_path):
    view = VIEWS[name]
    check_forward(view, 24 if view.groups > 1 else 20, *way, Config(*config), tmp_path)


@needs_gxx
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(("way", "config"), [BF16, F32], ids=["bf16", "f32"])
def test_weight_gradient(name, way, config, tmp_path):
    view = VIEWS[name]
    check_weights(view, 24 if view.groups > 1 else 20, *way, Config(*config), tmp_path)


# How weights lie; the taps that are stored, the first of each axis and the step to the next.
FLIPPED = Taps((3, 3), (3, 3), (2, 2), (-1, -1))
SOME = Taps((5, 7), (3, 3), (0, 5), (2, -2))


@needs_gxx
@pytest.mark.parametrize("name", ["3x3", "groups"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("taps", [FLIPPED, SOME], ids=["flipped", "some"])
@pytest.mark.parametrize(("way", "config"), [BF16, F32], ids=["bf16", "f32"])
def test_taps(name, transposed, taps, way, config, tmp_path):
    view = VIEWS[name]
    n = 24 if view.groups > 1 else 20
    check_forward(view, n, *way, Config(*config), tmp_path, dataclasses.replace(taps, groups=view.groups), transposed)
