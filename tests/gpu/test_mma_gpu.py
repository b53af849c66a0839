"""Kernels of the mma family on the device, pinned: every dtype and way to multiply, layout, size and operation.

Small integers: equal to numpy's product, bit for bit, or wrong. Normal numbers: errors against float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax.lax import DotAlgorithmPreset as Preset

import cutjax
from cutjax import dot_precision
from cutjax.epilogue.expression import identity
from cutjax.kernels import choose
from cutjax.kernels.mma import family
from cutjax.kernels.mma.math import math_of

pytestmark = pytest.mark.gpu

# (dtype, precision, error of normal numbers: of a sum, in parts of the sum of what is added up). That of products in
# f32 is some 2^-24 for each of a few hundred sums; rounded operands add theirs. Of 8-bit floats
# an instruction keeps 13 bits or more of each of 32 products, below the largest: their sum is in f32.
WAYS = {
    "bf16": ("bfloat16", None, 2**-8),
    "f16": ("float16", None, 2**-10),
    "f16_f16": ("float16", Preset.F16_F16_F16, 2**-6),
    "f32": ("float32", "highest", 2**-20),
    "tf32": ("float32", Preset.TF32_TF32_F32, 2**-10),
    "tf32x3": ("float32", Preset.TF32_TF32_F32_X3, 2**-19),
    "bf16x1": ("float32", Preset.BF16_BF16_F32, 2**-7),
    "bf16x3": ("float32", Preset.BF16_BF16_F32_X3, 2**-14),
    "bf16x6": ("float32", Preset.BF16_BF16_F32_X6, 2**-20),
    "bf16x9": ("float32", Preset.BF16_BF16_F32_X9, 2**-20),
    "f64": ("float64", None, 2**-48),
    "c64": ("complex64", "highest", 2**-19),
    "c64tf32": ("complex64", None, 2**-9),
    "c128": ("complex128", None, 2**-47),
    "c128_highest": ("complex128", "highest", 2**-47),
    "s8": ("int8", None, 0),
    "u8": ("uint8", None, 0),
    "s32": ("int32", None, 0),
    "u32": ("uint32", None, 0),
    "s64": ("int64", None, 0),
    "e4m3": ("float8_e4m3fn", None, 2**-8),
    "e5m2": ("float8_e5m2", "ANY_F8_ANY_F8_F32", 2**-8),
}
SIZES = ((257, 130, 67), (64, 192, 256), (1, 33, 5), (300, 1, 129))
LAYOUTS = ("nn", "nt", "tn", "tt")
CASES = [(way, layout) for way in WAYS for layout in LAYOUTS]


def integers(rng, shape, dtype):
    """Those whose products and sums every dtype holds."""
    low = 0 if dtype.startswith("uint") else -2
    x = rng.integers(low, 3, shape).astype(np.float64)
    if dtype.startswith("complex"):
        x = x + 1j * rng.integers(-2, 3, shape)
    return x.astype(jnp.dtype(dtype))


def normal(rng, shape, dtype):
    x = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(jnp.dtype(dtype))


def wide(x):
    """The array where numpy adds exactly, or in float64."""
    kinds = {"c": np.complex128, "i": np.int64, "u": np.int64}
    return np.asarray(x).astype(kinds.get(x.dtype.kind, np.float64))


def scope(dtype):
    return jax.enable_x64(True) if dtype.endswith(("64", "128")) and dtype != "complex64" else contextlib.nullcontext()


def asked(dtype, precision, layout, m, n, k, out_dtype=None):
    """The problem of a product, as the library has it."""
    dtype = jnp.dtype(dtype)
    accumulator = dot_precision.accumulator(dtype)
    out = np.dtype(out_dtype or (accumulator if dtype.itemsize == 1 else dtype))
    problem = cutjax.Problem.of(m, n, k, layout, dtype, dtype, out, epilogue=identity(out, accumulator))
    found = choose.in_precision(problem, dot_precision.canonical(precision, "gemm"))
    assert isinstance(found, cutjax.Problem), found
    return found


def pinned(rng, problem, count, tma=False):
    """Some configs of the family that serve a problem; with `tma`, of those alone whose tiles TMA loads."""
    serving = [config for config in family.configs(problem) if not isinstance(family.resolve(problem, config), tuple)]
    serving = sorted({config for config in serving if config.tma or not tma}, key=repr)
    assert serving, family.reasons(problem)
    return [serving[i] for i in rng.choice(len(serving), min(count, len(serving)), replace=False)]


def stored(x, turned):
    return np.ascontiguousarray(x.swapaxes(-1, -2)) if turned == "t" else x


def product(problem, layout, precision, config, a, b):
    """Multiplies a [m, k] and b [k, n], which lie in memory as the layout says, by the kernel of a config."""
    gemm = functools.partial(cutjax.gemm, layout=layout, precision=precision, backend="cuda", config=config)
    gemm = jax.jit(functools.partial(gemm, out_dtype=problem.out_dtype))
    return wide(gemm(stored(a, layout[0]), stored(b, layout[1])))


def check_exact(way, layout, sizes, rng, count, **only):
    """That products of small integers are exact, by so many kernels of each size."""
    dtype, precision, _ = WAYS[way]
    out_dtype = np.float32 if way in ("bf16", "f16") else None
    with scope(dtype):
        for m, n, k in sizes:
            problem = asked(dtype, precision, layout, m, n, k, out_dtype)
            a, b = integers(rng, (m, k), dtype), integers(rng, (k, n), dtype)
            expected = wide(a) @ wide(b)
            for config in pinned(rng, problem, count, **only):
                np.testing.assert_array_equal(
                    product(problem, layout, precision, config, a, b), expected, err_msg=str(config)
                )


def check_gaussian(way, layout, sizes, rng, count, note, **only):
    """That products of normal numbers are as accurate as their way says, by so many kernels."""
    dtype, precision, error = WAYS[way]
    m, n, k = sizes
    with scope(dtype):
        problem = asked(dtype, precision, layout, m, n, k)
        a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
        exact, size = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b))
        for config in pinned(rng, problem, count, **only):
            out = product(problem, layout, precision, config, a, b)
            worst = float(np.max(np.abs(out - exact) / size)) / error
            problems.note_worst(f"{note} {way}", worst)
            assert worst <= 1, config


@pytest.mark.parametrize(("way", "layout"), CASES)
def test_exact(way, layout):
    rng = np.random.default_rng([problems.SEED, list(WAYS).index(way), LAYOUTS.index(layout)])
    check_exact(way, layout, SIZES, rng, 3)


@pytest.mark.parametrize("way", [way for way, (_, _, error) in WAYS.items() if error])
def test_gaussian(way):
    rng = np.random.default_rng([problems.SEED, 7])
    check_gaussian(way, "nn", (260, 190, 515), rng, 4, "mma")


# Layouts of ways whose tiles TMA loads: float32 lies along k in both operands, or in neither.
BY_TMA = [(way, layout) for way in WAYS if way not in ("f32", "c64", "s32", "u32", "s64") for layout in LAYOUTS]
BY_TMA = [(way, layout) for way, layout in BY_TMA if WAYS[way][0] != "float32" or layout in ("nt", "tn")]
# Rows begin at multiples of 16 bytes; tiles end inside and outside of matrices, and some blocks have several.
ALIGNED = ((272, 144, 80), (48, 320, 1040), (2064, 1056, 48))


@pytest.mark.parametrize(("way", "layout"), BY_TMA)
def test_exact_by_tma(way, layout):
    rng = np.random.default_rng([problems.SEED, list(WAYS).index(way), LAYOUTS.index(layout), 1])
    check_exact(way, layout, ALIGNED, rng, 2, tma=True)


@pytest.mark.parametrize(("way", "layout"), [(way, layout) for way, layout in BY_TMA if WAYS[way][2]])
def test_gaussian_by_tma(way, layout):
    rng = np.random.default_rng([problems.SEED, LAYOUTS.index(layout), 10])
    check_gaussian(way, layout, (272, 208, 528), rng, 2, "mma by TMA", tma=True)


def small(way):
    """A config of the family that suits any problem."""
    dtype, precision, _ = WAYS[way]
    math = math_of(asked(dtype, precision, "nn", 64, 64, 64))
    return family.Config(64, 64, math.depths[0], 32, 16 if math.words > 8 else 32, stages=2)


@pytest.mark.parametrize("way", ["f32", "tf32", "bf16x6", "f64", "c64", "c128", "s8", "e4m3"])
def test_batched_and_fused(way):
    """A batch that broadcasts, and an epilogue with a bias and a second result."""
    dtype, precision, _ = WAYS[way]
    rng = np.random.default_rng([problems.SEED, 8])
    with scope(dtype):
        a, b = integers(rng, (3, 70, 45), dtype), integers(rng, (1, 45, 51), dtype)
        accumulator = dot_precision.accumulator(jnp.dtype(dtype))
        bias = integers(rng, (51,), dtype).astype(accumulator)
        fused = functools.partial(
            cutjax.gemm,
            epilogue=lambda acc, c: (acc + c, acc * acc),
            operands=(bias,),
            out_dtype=(accumulator, accumulator),
            precision=precision,
            backend="cuda",
            config=small(way),
        )
        first, second = jax.jit(fused)(a, b)
        expected = wide(a) @ wide(b)
        np.testing.assert_array_equal(wide(first), expected + wide(bias))
        np.testing.assert_array_equal(wide(second), expected * expected)


@pytest.mark.parametrize("way", ["bf16", "f64", "c64tf32", "c128", "f16"])
def test_batches_and_groups_by_tma(way):
    """A batch that broadcasts; groups that begin in any row, one of them empty, and rows of none."""
    dtype, precision, _ = WAYS[way]
    rng = np.random.default_rng([problems.SEED, 11])
    how = {"precision": precision, "backend": "cuda", "config": dataclasses.replace(small(way), tma=True)}
    how["out_dtype"] = dot_precision.accumulator(jnp.dtype(dtype))
    sizes = np.array([5, 0, 70, 33], np.int32)
    with scope(dtype):
        a, b = integers(rng, (3, 72, 48), dtype), integers(rng, (1, 48, 56), dtype)
        out = jax.jit(functools.partial(cutjax.gemm, **how))(a, b)
        np.testing.assert_array_equal(wide(out), wide(a) @ wide(b))
        x, w = integers(rng, (120, 48), dtype), integers(rng, (4, 48, 56), dtype)
        out = jax.jit(functools.partial(cutjax.grouped_gemm, **how))(x, w, sizes)
        group = np.repeat(np.arange(4), sizes)
        np.testing.assert_array_equal(wide(out)[:108], np.einsum("mk,mkn->mn", wide(x)[:108], wide(w)[group]))
        assert not wide(out)[108:].any()


@pytest.mark.parametrize("way", ["f32", "tf32", "bf16x9", "f64", "c64", "s8", "e4m3", "s32"])
def test_grouped(way):
    dtype, precision, _ = WAYS[way]
    rng = np.random.default_rng([problems.SEED, 9])
    sizes = np.array([5, 0, 70, 33], np.int32)
    with scope(dtype):
        x, w = integers(rng, (120, 45), dtype), integers(rng, (4, 45, 51), dtype)
        how = {"precision": precision, "backend": "cuda", "config": small(way)}
        how["out_dtype"] = dot_precision.accumulator(jnp.dtype(dtype))
        out = jax.jit(functools.partial(cutjax.grouped_gemm, **how))(x, w, sizes)
        ends = np.cumsum(sizes)
        expected = np.zeros((120, 51), wide(x).dtype)
        for i, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            expected[end - size : end] = wide(x)[end - size : end] @ wide(w)[i]
        np.testing.assert_array_equal(wide(out), expected)
        dy = integers(rng, (120, 51), dtype)
        outer = jax.jit(functools.partial(cutjax.grouped_outer, **how))(x, dy, sizes)
        for i, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            rows = slice(end - size, end)
            np.testing.assert_array_equal(wide(outer)[i], wide(x)[rows].T @ wide(dy)[rows])
