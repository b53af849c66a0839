"""Windows of images and taps of weights, as the sm_90 kernels load them: on the host, TMA being a stand-in."""

import dataclasses
import itertools

import gxx
import loads_host
import numpy as np
import pytest

from cutjax.kernels import convolution
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90.config import Config

pytestmark = pytest.mark.skipif(not gxx.installed(), reason="needs g++")


def view(images, image, window, channels, strides=None, dilation=None, low=None, high=None, groups=1):
    ones, zeros = (1,) * len(image), (0,) * len(image)
    strides, dilation, low, high = strides or ones, dilation or ones, low or zeros, high or zeros
    along = zip(image, window, strides, dilation, low, high, strict=True)
    grid = tuple((size + lo + hi - (w - 1) * d - 1) // s + 1 for size, w, s, d, lo, hi in along)
    return Im2col(images, image, grid, window, strides, dilation, ones, low, channels, groups)


def windows(x, of):
    """The matrix ``[images * grid, groups, taps, channels]`` of the windows of images."""
    found = np.zeros((of.images, *of.grid, of.taps, of.groups * of.channels), x.dtype)
    for t, tap in enumerate(itertools.product(*map(range, of.window))):
        for place in itertools.product(*map(range, of.grid)):
            at = [s * p + d * i - lo for s, p, d, i, lo in zip(of.strides, place, of.dilation, tap, of.low, strict=True)]
            if all(0 <= i < size for i, size in zip(at, of.image, strict=True)):
                found[(slice(None), *place, t)] = x[(slice(None), *at)]
    return found.reshape(of.rows, of.taps, of.groups, of.channels).swapaxes(1, 2)


GEOMETRIES = {
    "1d": view(3, (50,), (3,), 64, low=(1,), high=(1,)),
    "1d causal, far apart": view(2, (70,), (2,), 32, dilation=(40,), low=(40,)),
    "1d strided": view(2, (61,), (5,), 16, (3,), low=(2,), high=(1,)),
    "2d": view(2, (7, 9), (3, 3), 64, low=(1, 1), high=(1, 1)),
    "2d in pieces": view(2, (7, 9), (3, 2), 96, low=(1, 0), high=(1, 2)),
    "2d strided, cut": view(3, (15, 12), (3, 3), 32, (2, 3), (2, 1), low=(-1, 2), high=(3, -2)),
    "2d of few channels": view(2, (6, 7), (2, 3), 24, low=(1, 1), high=(0, 1)),
    "3d": view(2, (4, 5, 6), (2, 3, 2), 16, (1, 2, 1), low=(1, 1, 0), high=(0, 1, 1)),
}
CONFIGS = {
    "64x64": Config(64, 64, 64, 4),
    "deep": Config(64, 64, 128, 3),
    "beside": Config(64, 64, 64, 4, cluster_n=2),
    "below": Config(64, 64, 64, 4, cluster_m=2),
    "wide": Config(128, 96, 64, 4),
    "streamed": Config(64, 64, 64, 4, stream_k=True),
    "in a cluster": Config(64, 64, 64, 8, cluster_k=3),
    "split": Config(64, 64, 64, 4, splits=3),
}


def check(problem, config, of, n, kind, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 10, (of.images, *of.image, of.groups * of.channels)).astype(np.int16)
    matrix = windows(x, of).astype(np.float64)
    kernel = sm90.resolved(problem, config)
    columns = n // of.groups
    if kind == "weights":
        g = rng.integers(-9, 10, (of.rows, n)).astype(np.int16)
        expected = np.einsum("rgtc,rgn->tcgn", matrix, g.reshape(-1, of.groups, columns).astype(np.float64))
        found = loads_host.multiplied(kernel, (x, g), tmp_path).reshape(of.taps, -1, of.groups, columns)
        assert not found[:, of.channels :].any()
        np.testing.assert_array_equal(found[:, : of.channels], expected)
        return
    stored = of.window if kind == "in order" else problem.bs[0].view.stored
    w = rng.integers(-9, 10, (*stored, of.channels, of.groups, columns)).astype(np.int16)
    taps = w
    if kind != "in order":
        for axis, (first, step, size) in enumerate(
            zip(problem.bs[0].view.first, problem.bs[0].view.step, of.window, strict=True)
        ):
            taps = np.take(taps, [first + step * i for i in range(size)], axis)
    taps = taps.reshape(of.taps, of.channels, of.groups, columns).astype(np.float64)
    given = np.ascontiguousarray(np.moveaxis(w, (-3, -1), (-1, -3)).swapaxes(-3, -3)) if kind == "flipped" else w
    if kind == "flipped":  # [*stored, columns, groups, channels]
        given = np.ascontiguousarray(np.einsum("tcgn->tngc", w.reshape(-1, of.channels, of.groups, columns)))
    expected = np.einsum("rgtc,tcgn->rgn", matrix, taps).reshape(of.rows, n)
    np.testing.assert_array_equal(loads_host.multiplied(kernel, (x, given), tmp_path), expected)


def asked(of, n, kind):
    if kind == "weights":
        return convolution.weight_gradient(of, n)
    if kind == "in order":
        return convolution.forward(of, n)
    stored = tuple(2 * size for size in of.window)  # every other one, of which one axis is flipped
    first = (stored[0] - 1, *(0 for _ in stored[1:]))
    taps = Taps(stored, of.window, first, (-2, *(2 for _ in stored[1:])))
    return convolution.forward(of, n, taps, transposed=kind == "flipped")


KINDS = ("in order", "flipped", "some taps", "weights")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name, kind, tmp_path):
    of, n = GEOMETRIES[name], 72
    config = CONFIGS["beside" if len(name) % 2 else "below"]
    check(asked(of, n, kind), config, of, n, kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name, kind, tmp_path):
    of, n = GEOMETRIES["2d in pieces"], 136
    check(asked(of, n, kind), CONFIGS[name], of, n, kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_groups(kind, tmp_path):
    of = view(2, (7, 9), (3, 3), 32, low=(1, 1), high=(1, 1), groups=3)
    check(asked(of, 384, kind), CONFIGS["beside"], of, 384, kind, tmp_path)
