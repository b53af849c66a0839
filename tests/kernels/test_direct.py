"""Direct kernels: exact on the host, over random geometries; what is refused; that they compile without spills."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest
import windows
from cubin import code_bytes
from windows import forward_view

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels import convolution, results
from cutjax.kernels.direct import family, kernel
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.geometry import geometry_of
from cutjax.kernels.families import CONFIGS, config_of, fields_of
from cutjax.kernels.operand import Taps
from cutjax.runtime import compiler
from cutjax.runtime.architectures import ARCHITECTURES

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")
needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

GEOMETRIES = 5  # random ones; 200 are worth it after a change of the device text
DTYPES = ("bfloat16", "float16", "float32", "float64")
OF_GROUPS = ((1, 1), (1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (3, 1))  # channels of the image and of the result


def kernels(problem):
    found = [family.resolve(problem, config) for config in family.configs(problem)]
    return [one for one in found if not isinstance(one, tuple)]


def run(found, arrays, folder):
    """What a kernel makes of arrays, on the host."""
    written = results.written(found.problem, 1, shares=found.parts)
    given = [kernel_host.aligned(x) for x in (*arrays, *(np.full(x.shape, 7).astype(x.dtype) for x in written))]
    if found.geometry.gradient:
        scratch = found.scratch
        given.append(kernel_host.aligned(np.full(scratch.shape, np.nan, scratch.dtype)))
    for entry in found.entries:
        kernel_host.run(entry, given, folder, blocks=entry.blocks)
    return results.finish(found.problem.epilogue.outputs, given[len(arrays) :], ())


def random_case(seed):
    """A problem of a random geometry, arrays of small integers and what their product is."""
    rng = np.random.default_rng([28, seed])
    channels, multiplier = OF_GROUPS[rng.integers(len(OF_GROUPS))]
    groups = int(rng.choice([2, 3, 8, 16, 24, 64]))
    view, n = windows.random_view(rng, channels, groups), groups * multiplier
    dtype = jnp.dtype(DTYPES[rng.integers(len(DTYPES))])
    fields = {"dtype": dtype, "out_dtype": dtype if dtype.itemsize > 4 or rng.integers(2) else "float32"}
    x = rng.integers(-3, 4, (view.images, *view.image, groups * channels))
    if rng.integers(3) == 0:
        g = rng.integers(-1, 2, (view.rows, n))
        problem = convolution.weight_gradient(view, n, **fields)
        return problem, (x.astype(dtype), g.astype(dtype)), windows.weight_gradient(x, g, view, n)
    flipped = Taps(view.window, view.window, tuple(k - 1 for k in view.window), (-1,) * len(view.window), groups)
    taps, transposed = (None, flipped)[rng.integers(2)], bool(rng.integers(2))
    problem = convolution.forward(view, n, taps, transposed=transposed, **fields)
    shape = (multiplier, groups * channels) if transposed else (channels, n)
    w = rng.integers(-3, 4, (*view.window, *shape))
    expected = windows.forward(x, w, view, n, taps, problem.bs[0].contiguous)
    return problem, (x.astype(dtype), w.astype(dtype)), expected


@needs_gxx
@pytest.mark.parametrize("seed", range(GEOMETRIES))
def test_small_integers_are_exact(seed, tmp_path):
    problem, arrays, expected = random_case(seed)
    geometry, out = geometry_of(problem), problem.out_dtype
    if seed % 2 and problem.accumulator.itemsize == 4 and not (geometry.gradient or geometry.slides):
        problem = epilogue(problem, lambda acc: (acc.astype(out), jnp.sum(acc, 0), jnp.min(acc)))
    found = kernels(problem)
    got, *sums = run(found[seed % len(found)], arrays, tmp_path)
    np.testing.assert_array_equal(got, expected.astype(got.dtype))
    for one, of in zip(sums, (expected.sum(0), expected.min()), strict=False):
        np.testing.assert_array_equal(np.squeeze(one), np.squeeze(of))


# Images, their size and a window; configs' warps, rows, stages and parts: strips of five images and of 16, rows in
# parts, of which a block has one of several images; chunks of rows; channels that fill no block; pixels cut off.
TOEPLITZ = [
    (7, (11, 20), (7, 7), 24, None, (8, 4, 3, 3)),
    (34, (7, 7), (5, 9), 16, None, (8, 7, 2, 2)),
    (3, (5, 140), (3, 4), 10, None, (8, 5, 4, 4)),
    (13, (12, 16), (3, 4), 36, (2, -1), (16, 9, 4, 1)),
]


@needs_gxx
@pytest.mark.parametrize(("images", "image", "window", "channels", "low", "config"), TOEPLITZ)
def test_toeplitz_matrices_are_exact(images, image, window, channels, low, config, tmp_path):
    rng, (warps, rows, stages, parts) = np.random.default_rng(2), config
    view = forward_view(images, image, window, channels, low=low)
    x, w = (rng.integers(-3, 4, shape) for shape in ((images, *image, channels), (*window, 1, channels)))
    flipped = Taps(window, window, tuple(k - 1 for k in window), (-1, -1), channels)
    problem = convolution.forward(view, channels, flipped, transposed=True, out_dtype="float32")
    found = family.resolve(problem, Config(2, 8, rows, warps, 32 * warps, stages, 1, parts, True))
    arrays, acc = (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), windows.forward(x, w, view, channels, flipped, "k")
    (got,) = run(found, arrays, tmp_path)
    np.testing.assert_array_equal(got, acc)
    shapes = [(view.rows, 1), (1, channels), *[(view.rows, channels)] * 2]
    operands = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
    row, column, both, other = operands
    given = [row, column, both.astype(jnp.bfloat16), other]  # of 16 bits: through shared memory

    def function(acc, row, column, both, other):
        x, at = both.astype(jnp.float32), jax.lax.broadcasted_iota(jnp.float32, acc.shape, 1)
        return (acc + x).astype(jnp.bfloat16), acc * column + row * x + other - at

    found = family.resolve(epilogue(problem, function, *given), dataclasses.replace(found.config, ahead=2))
    got = run(found, (*arrays, *given), tmp_path)
    np.testing.assert_array_equal(got[0], acc + both)
    np.testing.assert_array_equal(got[1], acc * column + row * both + other - np.arange(channels))
    g = rng.integers(-1, 2, (view.rows, channels))
    problem = convolution.weight_gradient(view, channels, out_dtype="float32")
    found = family.resolve(problem, Config(2, 8, rows, warps, 32 * warps, stages, 1, parts, True))
    (got,) = run(found, (x.astype(jnp.bfloat16), g.astype(jnp.bfloat16)), tmp_path)
    np.testing.assert_array_equal(got, windows.weight_gradient(x, g, view, channels))


# Channels, window, padding, dtype, a config's channels of a thread, rows and rows ahead; whether taps are flipped.
SLIDES = [
    (16, 4, (3, 0), "bfloat16", (4, 5, 4), False),
    (16, 4, (0, 3), "bfloat16", (8, 1, 1), True),
    (6, 4, (1, 2), "float16", (2, 12, 4), True),
    (5, 3, (-2, 4), "float32", (1, 7, 2), False),
    (8, 2, (6, -1), "float32", (4, 64, 3), True),
    (8, 8, (7, 0), "bfloat16", (8, 9, 2), False),
]


@needs_gxx
@pytest.mark.parametrize("case", SLIDES)
def test_windows_that_slide_are_exact(case, tmp_path):
    """Rows ahead, and chunks that end anywhere; of taps as they lie and of flipped ones, as input gradients have."""
    channels, window, (low, high), dtype, (pairs, rows, ahead), flip = case
    view = forward_view(2, (23,), (window,), channels, low=(low,), high=(high,))
    rng = np.random.default_rng(window)
    x, w = rng.integers(-3, 4, (2, 23, channels)), rng.integers(-3, 4, (window, 1, channels))
    taps = Taps((window,), (window,), (window - 1,), (-1,), channels) if flip else None
    problem = convolution.forward(view, channels, taps, transposed=flip, dtype=dtype, out_dtype=dtype)
    found = family.resolve(problem, Config(pairs, 1, rows, 4, 32, ahead, 1))
    assert found.shape.slides
    (got,) = run(found, (x.astype(dtype), w.astype(dtype)), tmp_path)
    contiguous = problem.bs[0].contiguous
    np.testing.assert_array_equal(got, windows.forward(x, w, view, channels, taps, contiguous).astype(got.dtype))


def epilogue(problem, function, *operands):
    acc, found = jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32), []
    jax.eval_shape(lambda *given: found.append(trace(function, [acc], given).epilogue), *operands)
    return problem.fused(found[0])


@needs_gxx
def test_an_epilogue_of_every_operand(tmp_path):
    """Of rows, of columns, of both and of one value, and where an element lies; two results."""
    view, n = forward_view(2, (5, 6), (3, 3), 8), 8
    rng = np.random.default_rng(1)
    asked = convolution.forward(view, n, dtype="float32", out_dtype="float32")
    shapes = [(asked.m, 1), (1, n), (asked.m, n), (1, 1)]

    def function(acc, row, column, both, one):
        return acc * column + row + both * one, acc - jax.lax.broadcasted_iota(jnp.float32, acc.shape, 1)

    x, w = rng.integers(-3, 4, (2, 5, 6, n)), rng.integers(-3, 4, (3, 3, 1, n))
    operands = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
    for found in kernels(epilogue(asked, function, *operands))[:2]:
        arrays = [x.astype(np.float32), w.astype(np.float32), *operands]
        row, column, both, one = operands
        acc = windows.forward(x, w, view, n)
        got = run(found, arrays, tmp_path)
        np.testing.assert_array_equal(got[0], acc * column + row + both * one)
        np.testing.assert_array_equal(got[1], acc - np.arange(n))


def test_candidates_of_a_depthwise_convolution():
    problem = convolution.forward(forward_view(64, (56, 56), (7, 7), 96), 96)
    candidates = cutjax.candidates(problem)
    assert isinstance(candidates[0], Config)
    for config in candidates:
        assert config_of(fields_of(config)) == config
    assert Config in CONFIGS


def summed(problem, axis, dtype=jnp.float32):
    return epilogue(problem, lambda acc: (acc, jnp.sum(acc.astype(dtype), axis, dtype=dtype)))


def of(**fields):
    return dataclasses.replace(forward_view(2, (8, 8), (3, 3), 8), **fields)


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (cutjax.Problem(64, 64, 64), "no convolution"),
        (convolution.forward(of(groups=1), 8), "in each of 1 groups"),
        (convolution.forward(of(channels=2), 16), "2 channels to 2 in each of 8 groups"),
        (convolution.forward(of(), 8, dtype="int8", out_dtype="int32"), "direct kernels multiply bf16, f16, f32, f64"),
        (convolution.forward(of(images=0), 8), "a size is 0"),
        (summed(convolution.forward(of(), 8), 1), "a reduction over channels"),
        (summed(convolution.forward(of(), 8), 0, jnp.bfloat16), "a reduction in bfloat16"),
        (summed(convolution.weight_gradient(of(), 8), 0), "a reduction of a weight gradient"),
    ],
)
def test_what_is_refused(problem, why):
    assert why in "; ".join(family.reasons(problem))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pairs": 3}, "whole channels"),
        ({"ahead": 2, "parts": 0}, ""),
        ({"parts": 1}, "those of a weight gradient"),
        ({"strip": 32, "pairs": 8}, "registers a thread"),
        ({"toeplitz": True}, "2 channels and strips of 8 places"),
    ],
)
def test_what_a_config_is_refused_for(fields, why):
    problem = convolution.forward(of(), 8)
    found = family.resolve(problem, Config(**{"pairs": 2, "strip": 2} | fields))
    assert not why if isinstance(found, kernel.Kernel) else why and why in "; ".join(found)


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"pairs": 0}, "pairs=0"), ({"lanes": 64, "threads": 32}, "lanes=64"), ({"rows": 1.5}, "expected int")],
)
def test_fields_that_no_config_has(fields, why):
    with pytest.raises(ValueError, match=why):
        Config(**fields)


# Images, strided ones and an input gradient, a causal one along a sequence, a long one, and three axes.
TELLING = {
    "7x7": forward_view(64, (56, 56), (7, 7), 96),
    "3x3": forward_view(64, (112, 112), (3, 3), 32),
    "5x5 /2": forward_view(64, (56, 56), (5, 5), 144, strides=(2, 2)),
    "5x5 spread": forward_view(64, (28, 28), (5, 5), 144, low=(2, 2), high=(3, 3), spread=(2, 2)),
    "causal": forward_view(8, (2048,), (4,), 5120, low=(3,), high=(0,)),
    "31": forward_view(16, (1024,), (31,), 512),
    "3-D": forward_view(8, (16, 56, 56), (3, 3, 3), 54),
}


@needs_nvrtc
@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize("make", [convolution.forward, convolution.weight_gradient])
def test_kernels_compile_without_spills(name, make):
    view = TELLING[name]
    arch = sorted(ARCHITECTURES)[list(TELLING).index(name) % len(ARCHITECTURES)]
    problem = make(view, view.groups)
    fastest = min(kernels(problem), key=lambda one: one.time_us(problem.device))
    for entry in fastest.entries:
        cubin = compiler.compile_source(entry.source, name=entry.name, arch=arch)
        assert "warning" not in cubin.log
        assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0), entry.name
        assert code_bytes(cubin.image) < 48000, entry.name


@needs_nvrtc
def test_tails_of_several_large_operands_compile_without_spills():
    view, channels, bf16 = forward_view(32, (14, 14), (7, 7), 96), 96, jnp.bfloat16
    given = [*[jnp.zeros((view.rows, channels), bf16)] * 2, jnp.zeros((1, channels), bf16)]

    def function(acc, r, q, bias):
        r, q, bias = (x.astype(jnp.float32) for x in (r, q, bias))
        return (jax.nn.gelu(acc + bias) + r * q).astype(bf16)

    problem = epilogue(convolution.forward(view, channels), function, *given)
    found = kernel.resolve(problem, cutjax.candidates(problem)[0])
    assert found.config.toeplitz
    (entry,) = found.entries
    resources = compiler.compile_source(entry.source, name=entry.name, arch="sm_90a").resources
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)


# Depthwise convolutions of EfficientNet, and input gradients.
NORMED = {
    "3x3": (TELLING["3x3"], False),
    "3x3 /2": (forward_view(256, (112, 112), (3, 3), 96, strides=(2, 2), low=(0, 0), high=(1, 1)), False),
    "5x5 gradient": (forward_view(256, (28, 28), (5, 5), 240), True),
    "5x5 /2 gradient": (TELLING["5x5 spread"], True),
}


def derivatives(view):
    """An input gradient with the derivatives of SiLU and of a batch norm, and the sums of these."""
    x, column = (jax.ShapeDtypeStruct((m, view.groups), of) for m, of in ((view.rows, jnp.bfloat16), (1, jnp.float32)))

    def function(acc, x, mean, scale, bias):
        centred = x.astype(jnp.float32) - mean
        y = centred * scale + bias
        d = jax.vjp(jax.nn.silu, y)[1](acc)[0]
        return (d * scale).astype(x.dtype), jnp.sum(d, 0), jnp.sum(d * centred, 0), jnp.sum(-d * scale, 0)

    return epilogue(convolution.forward(view, view.groups), function, x, *[column] * 3)


@needs_nvrtc
@pytest.mark.parametrize("name", NORMED)
def test_sums_of_a_norm_compile_without_spills(name):
    """Forward, those of a batch norm; of an input gradient those of the derivatives of it and of its activation."""
    view, backward = NORMED[name]

    def statistics(acc):
        return acc.astype(jnp.bfloat16), jnp.sum(acc, 0), jnp.sum(acc * acc, 0)

    problem = derivatives(view) if backward else epilogue(convolution.forward(view, view.groups), statistics)
    (entry,) = min(kernels(problem), key=lambda one: one.time_us(problem.device)).entries
    cubin = compiler.compile_source(entry.source, name=entry.name, arch="sm_90a")
    resources = cubin.resources
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0), entry.name
    assert code_bytes(cubin.image) < 60000, entry.name


RECORDED = pathlib.Path(__file__).parents[2] / "benchmarks/results/experiments/depthwise-gradients-h200.json"


def recorded():
    """Input gradients whose kernels were measured, and the time of each config."""
    for row in json.loads(RECORDED.read_text())["rows"]:
        if "configs" not in row:
            continue
        size, groups, window, step = map(int, re.findall(r"(\d+)x\d+x(\d+) (\d)x\d/(\d)", row["case"])[0])
        small = -(-size // step)
        low = window - 1 - max((small - 1) * step + window - size, 0) // 2
        high = size + window - 2 - (small - 1) * step - low
        padding = {"low": (low, low), "high": (high, high), "spread": (step, step)}
        view = forward_view(256, (small, small), (window, window), groups, **padding)
        yield derivatives(view), {Config(*fields): us for *fields, us in row["configs"]}


def test_prices_pick_well_among_recorded_gradients():
    """As shipped 1.03 at most; kernels take 0.79 to 1.3 of what is predicted."""
    found = list(recorded())
    assert len(found) == 8
    for problem, times in found:
        told = {config: family.resolve(problem, config) for config in times}
        told = {config: one.time_us(problem.device) for config, one in told.items() if not isinstance(one, tuple)}
        assert times[min(told, key=told.get)] < 1.035 * min(times[config] for config in told), problem
        assert all(0.75 < times[config] / us < 1.35 for config, us in told.items()), problem
