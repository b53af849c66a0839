"""Narrow and quantized weights on the device: every dtype, layout and kind of kernel, and operations that take them.

Small integers: equal to numpy's product, bit for bit, or wrong. Normal numbers: errors against float64.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import cutjax
from cutjax import Quantized
from cutjax.dtypes import EIGHT_BITS
from cutjax.epilogue.expression import identity
from cutjax.kernels import choose
from cutjax.kernels.mma import family
from cutjax.kernels.prepared import wide

pytestmark = pytest.mark.gpu

F32 = np.dtype(np.float32)
SIZES = ((257, 130, 67), (64, 192, 256), (1, 33, 5), (4, 1024, 1040), (16, 512, 2048), (300, 31, 129))
LAYOUTS = ("nn", "nt", "tn", "tt")
# In parts of the sum of magnitudes: the rounding of the result, beside 2^-24 for each of a few hundred sums.
ERRORS = {"bfloat16": 2**-8, "float16": 2**-10}


@pytest.fixture(autouse=True)
def _promotion():
    """Strict promotion, which other tests have, refuses integers beside floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def every_value(dtype):
    """All finite values of a dtype whose products by small integers a float32 adds up exactly."""
    found = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    size = np.abs(found.astype(np.float64))
    least = 2**-5 if dtype == "float8_e5m2" else 2**-9
    return found if dtype.endswith("int8") else found[(size == 0) | ((size >= least) & (size <= 448))]


def stored(x, turned):
    return np.ascontiguousarray(x.swapaxes(-1, -2)) if turned == "t" else x


def pinned(rng, problem, count):
    """Some configs of the mma family, which decodes, one of a slim kernel among them where there is one."""
    serving = [config for config in family.configs(problem) if not isinstance(family.resolve(problem, config), tuple)]
    serving = sorted(set(serving), key=repr)
    assert serving, family.reasons(problem)
    chosen = [serving[i] for i in rng.choice(len(serving), min(count, len(serving)), replace=False)]
    return [*chosen, *[config for config in serving if config.slim][:1]]


def check_every_value(seed, wide, narrow, layout, sizes, pinned):
    """Multiplies every value of 8 bits by -1, 0 and 1, by some configs of ``pinned(rng, problem, count)``."""
    rng = np.random.default_rng([problems.SEED, seed, EIGHT_BITS.index(narrow), LAYOUTS.index(layout)])
    for m, n, k in sizes:
        problem = cutjax.Problem.of(m, n, k, layout, wide, narrow, F32, epilogue=identity(F32, F32), device=_device())
        a = rng.integers(-1, 2, (m, k)).astype(jnp.dtype(wide))
        b = rng.permutation(np.resize(every_value(narrow), k * n)).reshape(k, n)
        expected = a.astype(np.float64) @ b.astype(np.float64)
        for config in pinned(rng, problem, 2):
            gemm = functools.partial(cutjax.gemm, layout=layout, out_dtype=F32, backend="cuda", config=config)
            out = jax.jit(gemm)(stored(a, layout[0]), stored(b, layout[1]))
            np.testing.assert_array_equal(np.asarray(out), expected, err_msg=str(config))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("narrow", EIGHT_BITS)
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
def test_every_value_is_decoded_exactly(wide, narrow, layout):
    check_every_value(31, wide, narrow, layout, SIZES, pinned)


@functools.cache
def _device():
    """The device as the library sees it."""
    (row,) = cutjax.explain(cutjax.gemm)(jnp.ones((8, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.int8)).rows
    return row.choice.problem.device


@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("wide", ERRORS)
def test_gaussian(wide, narrow):
    """Quantized weights, the scale in the kernel, against the same numbers multiplied in float64."""
    rng = np.random.default_rng([problems.SEED, 32, EIGHT_BITS.index(narrow)])
    for m, n, k in ((260, 190, 515), (3, 512, 1024), (20, 256, 768)):
        x = rng.standard_normal((m, k)).astype(jnp.dtype(wide))
        w = cutjax.quantize(rng.standard_normal((k, n)).astype(np.float32), narrow, block=(-1, 1))
        a, b = x.astype(np.float64), np.asarray(w.values).astype(np.float64) * np.asarray(w.scale).astype(np.float64)
        exact, size = a @ b, np.abs(a) @ np.abs(b)
        out = jax.jit(functools.partial(cutjax.gemm, backend="cuda"))(x, w)
        worst = float(np.max(np.abs(np.asarray(out).astype(np.float64) - exact) / size)) / ERRORS[wide]
        problems.note_worst(f"quantized {wide} {narrow}", worst)
        assert worst <= 1


@pytest.mark.parametrize("narrow", EIGHT_BITS)
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
def test_every_pattern_of_bits(wide, narrow):
    """Subnormal numbers, infinities and NaN too: each the only one of its column that is not zero."""
    patterns = np.arange(256, dtype=np.uint8).view(jnp.dtype(narrow))
    b = np.zeros((48, 256), patterns.dtype)
    b[np.arange(256) % 48, np.arange(256)] = patterns
    for m, layout in itertools.product((2, 64), ("nn", "nt")):
        gemm = functools.partial(cutjax.gemm, layout=layout, out_dtype=jnp.float32, backend="cuda")
        out = jax.jit(gemm)(np.ones((m, 48)).astype(jnp.dtype(wide)), stored(b, layout[1]))
        expected = np.broadcast_to(patterns.astype(np.float32), out.shape)
        np.testing.assert_array_equal(np.asarray(out), expected, err_msg=f"{m} {layout}")


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_converted_weights_are_the_same(layout):
    """The other way of many rows on Hopper: kernels of the wide product, after a conversion."""
    rng = np.random.default_rng([problems.SEED, 33])
    x = rng.integers(-2, 3, (512, 1024)).astype(jnp.bfloat16)
    w = rng.integers(-2, 3, (1024, 512)).astype(np.int8)
    expected = (x.astype(np.float64) @ w.astype(np.float64)).astype(jnp.bfloat16)
    problem = cutjax.Problem.of(512, 512, 1024, layout, "bfloat16", "int8", "bfloat16", device=_device())
    for config in (cutjax.candidates(wide(problem))[0], choose.choose(problem, backend="cuda").config):
        f = jax.jit(functools.partial(cutjax.gemm, layout=layout, backend="cuda", config=config))
        np.testing.assert_array_equal(np.asarray(f(x, stored(w, layout[1]))), expected)


def test_gradients():
    """In x, the narrow array read in the other layout; in the scale."""
    rng = np.random.default_rng([problems.SEED, 34])
    for m in (2, 200):
        x = jnp.asarray(rng.integers(-2, 3, (m, 384)).astype(jnp.bfloat16))
        w = jnp.asarray(rng.integers(-2, 3, (384, 256)).astype(np.int8))
        s = jnp.full((1, 256), 0.5)
        g = jnp.asarray(rng.integers(-2, 3, (m, 256)).astype(np.float32))

        def loss(x, s, w=w, g=g):
            return (cutjax.gemm(x, Quantized(w, s), out_dtype=jnp.float32, backend="cuda") * g).sum()

        dx, ds = jax.jit(jax.grad(loss, (0, 1)))(x, s)
        wide = [np.asarray(y).astype(np.float64) for y in (x, w, g)]
        np.testing.assert_array_equal(
            np.asarray(dx).astype(np.float64), (wide[2] * 0.5 @ wide[1].T).astype(jnp.bfloat16)
        )
        np.testing.assert_array_equal(np.asarray(ds)[0], (wide[2] * (wide[0] @ wide[1])).sum(0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn"])
def test_rows_with_scales(narrow, layout):
    """Both operands quantized, then the first alone, beside few columns and many; scales are powers of 2."""
    rng = np.random.default_rng([problems.SEED, 36])
    run = jax.jit(functools.partial(cutjax.gemm, layout=layout, out_dtype=jnp.float32, backend="cuda"))
    for m, n, k in (*SIZES, (512, 4, 1024)):
        a, b = (rng.integers(-2, 3, shape).astype(jnp.dtype(narrow)) for shape in ((m, k), (k, n)))
        s, t = (2.0 ** rng.integers(-2, 3, shape) for shape in ((m, 1), (1, n)))
        rows = Quantized(stored(a, layout[0]), stored(s.astype(np.float32), layout[0]))
        columns = Quantized(stored(b, layout[1]), stored(t.astype(np.float32), layout[1]))
        exact = a.astype(np.float64) @ b.astype(np.float64) * s
        np.testing.assert_array_equal(np.asarray(run(rows, columns)), exact * t)
        np.testing.assert_array_equal(np.asarray(run(rows, columns.values.astype(jnp.bfloat16))), exact)


@pytest.mark.parametrize("m", [7, 120])
def test_grouped_and_layers(m):
    """Groups of a few rows and of many, with a scale of each; two layers against those of dequantized weights."""
    rng = np.random.default_rng([problems.SEED, 35, m])
    sizes = np.array([m // 3, 0, m // 2, 1], np.int32)
    x = rng.integers(-2, 3, (m, 96)).astype(jnp.bfloat16)
    w = rng.integers(-2, 3, (4, 96, 64)).astype(np.int8)
    s = (2.0 ** rng.integers(-2, 3, (4, 1, 64))).astype(np.float32)
    run = functools.partial(cutjax.grouped_gemm, out_dtype=jnp.float32, backend="cuda")
    out = np.asarray(jax.jit(run)(x, Quantized(w, s), sizes))
    expected, end = np.zeros((m, 64)), 0
    for i, size in enumerate(sizes):
        rows = slice(end, end + size)
        expected[rows] = x[rows].astype(np.float64) @ (w[i] * s[i].astype(np.float64))
        end += size
    np.testing.assert_array_equal(out, expected)

    up, down = (
        cutjax.quantize(rng.standard_normal(shape).astype(np.float32) / shape[-2] ** 0.5, jnp.int8, block=(-1, 1))
        for shape in ((4, 96, 128), (4, 128, 96))
    )
    logits = rng.standard_normal((m, 4)).astype(np.float32)
    layers = (
        lambda x, up, down: cutjax.mlp(x, jax.tree.map(lambda y: y[0], up), jax.tree.map(lambda y: y[0], down)),
        lambda x, up, down: cutjax.grouped_mlp(x, up, down, sizes, gate=up),
        lambda x, up, down: cutjax.moe(x, logits, up, up, down),
    )
    for layer in layers:
        with cutjax.use_backend("cuda"):
            out = np.asarray(jax.jit(layer)(x, up, down)).astype(np.float64)
        with cutjax.use_backend("xla"), jax.default_matmul_precision("highest"):
            wide = np.asarray(jax.jit(layer)(x.astype(np.float32), up.dequantize(), down.dequantize()))
        # What lies between the products, and the result, are rounded to bfloat16.
        assert np.max(np.abs(out - wide)) <= 2**-6 * max(1.0, np.max(np.abs(wide)))


def test_batched_with_an_epilogue():
    rng = np.random.default_rng([problems.SEED, 36])
    x, w = rng.integers(-2, 3, (3, 70, 48)).astype(np.float16), rng.integers(-2, 3, (3, 48, 96)).astype(np.int8)
    bias = rng.integers(-2, 3, (96,)).astype(np.float32)
    fused = functools.partial(
        cutjax.gemm,
        epilogue=lambda a, b, c: (a * b + c, (a + b).sum(-1)),
        operands=(bias,),
        out_dtype=(jnp.float32, None),
        backend="cuda",
    )
    first, second = jax.jit(fused)(x, (w, -w))
    acc = x.astype(np.float64) @ w.astype(np.float64)
    np.testing.assert_array_equal(np.asarray(first), -acc * acc + bias)
    np.testing.assert_array_equal(np.asarray(second), np.zeros((3, 70)))
