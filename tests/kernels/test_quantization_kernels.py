"""The kernel that quantizes in one pass: that it compiles without spills, what it refuses, and who takes it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.binding import lowering
from cutjax.kernels import quantization
from cutjax.kernels.device import device_of, reference
from cutjax.ops import fp8_product
from cutjax.primitives.quantization import quantize_p
from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
BF16 = jnp.bfloat16
H200 = lowering.Target("sm_90a", "NVIDIA H200", 132)


LINES, SQUARES, ROWS, ALL = (1, 128), (128, 128), (1, -1), (-1, -1)


def problem(shape, dtype="bfloat16", to="float8_e4m3fn", block=LINES, own=True, turned=True, device=None, rounded=None):
    x = jax.ShapeDtypeStruct(shape, dtype)
    return quantization.Problem.of(x, to, block, own, turned, device or reference("sm_90a"), rounded)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_kernels_compile_without_spills(arch):
    dtypes = (*((dtype, None) for dtype in quantization.FLOATS), ("float32", "bfloat16"), ("float32", "float16"))
    for (dtype, rounded), block, (own, turned) in itertools.product(
        dtypes, (LINES, SQUARES, ROWS, ALL), ((True, False), (False, True), (True, True))
    ):
        kernel = quantization.Kernel(problem((256, 128), dtype, "float8_e4m3fn", block, own, turned, None, rounded))
        for entry in kernel.entries:
            cubin = compiler.compile_source(entry.source, name=entry.name, arch=arch)
            assert "warning" not in cubin.log
            assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0), entry.name
            blocks = 2 if dtype == "float32" else 3 if own and turned else 4
            assert blocks * cubin.resources.registers * quantization.THREADS <= 65536, entry.name


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (problem((256, 128), device=reference("sm_80")), "sm_80: float8 is converted to from sm_89 on"),
        (problem((256, 128), "float64"), "float64 to float8_e4m3fn: the kernel reads bf16, f16, f32"),
        (problem((256, 128), to="int8"), "bfloat16 to int8"),
        (problem((200, 128)), "200 x 128: the kernel has tiles of 128 x 128"),
        (problem((256, 72)), "256 x 72"),
        (problem((0, 128)), "a size is 0"),
        (problem((2**17, 2**17, 2**12)), "tiles of up to"),
    ],
)
def test_refusals(asked, why):
    found = quantization.choose(asked, "cuda")
    assert found.resolved is None
    assert why in "; ".join(found.reasons)


def test_who_takes_it():
    """All whose blocks divide; and where no kernel serves, XLA is no error under "cuda" either."""
    asked = problem((8192, 4096))
    found = quantization.choose(asked, "auto")
    assert found.kernel == "quantize_bf16_f8_e4m3fn_1x128_own_turned"
    assert found.time_us is not None
    assert found.time_us < asked.xla_us
    assert quantize_p in lowering.optional <= set(lowering.choosers)


@pytest.mark.parametrize(
    ("rows", "columns", "block", "orders", "us"),
    [
        (8192, 14336, LINES, (True, True), 137.2),
        (8192, 14336, LINES, (True, False), 85.1),
        (8192, 14336, LINES, (False, True), 90.4),
        (8192, 4096, LINES, (True, True), 38.8),
        (8192, 4096, LINES, (True, False), 25.1),
        (4096, 28672, SQUARES, (True, True), 120.1),
        (4096, 28672, SQUARES, (False, True), 87.7),
        (8192, 14336, ALL, (True, True), 175.1),
        (8192, 14336, ALL, (True, False), 131.8),
        (8192, 14336, ROWS, (False, True), 139.4),
        (8192, 4096, ALL, (True, True), 50.6),
        (8192, 4096, ROWS, (True, False), 38.0),
        (4096, 14336, ROWS, (True, True), 88.8),
        (4096, 14336, ALL, (False, True), 68.5),
    ],
)
def test_predicted_times(rows, columns, block, orders, us):
    """As on an H200 (experiments/quantize-h200.json, experiments/fp8-passes-h200.json), to 16%."""
    found = quantization.Kernel(problem((rows, columns), block=block, own=orders[0], turned=orders[1])).time_us
    assert abs(found / us - 1) < 0.16


def test_batches():
    """Matrices of a batch, by vmap or not, are quantized each by itself."""
    x = jax.random.normal(jax.random.key(0), (2, 128, 256), BF16)
    how = {"dtype": np.dtype("float8_e4m3fn"), "block": SQUARES, "own": True, "turned": True, "backend": "auto"}

    @jax.jit
    def all_of(x):
        each = jax.tree.map(lambda *y: jnp.stack(y), *(quantize_p.bind(y, **how) for y in x))
        return each, jax.vmap(lambda y: quantize_p.bind(y, **how))(x), quantize_p.bind(x, **how)

    each, mapped, whole = all_of(x)
    for a, b, c in zip(each, mapped, whole, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    assert [y.shape for y in whole] == [(2, 128, 256), (2, 1, 2), (2, 256, 128), (2, 2, 1)]


def loss(params, x):
    h = jax.nn.silu(x @ params["up"]) * (x @ params["gate"])
    return (h @ params["down"]).astype(jnp.float32).var()


def passes(fn, *args):
    """The kernels that quantize, with how often each is asked for."""
    with cutjax.use_backend("cuda"):
        rows = cutjax.explain(fn, platform="cuda")(*args).rows
    found = {}
    for row in rows:
        if row.kernel.startswith("quantize_"):
            key = (
                row.kernel.removeprefix("quantize_bf16_f8_e4m3fn_"),
                str(row.choice.problem).split("[")[1].split("]")[0],
            )
            found[key] = found.get(key, 0) + row.count
    return found


def test_one_pass_for_all_that_a_step_wants():
    """Each product asks for what all of its operand's want, so that calls of one array are equal."""
    shapes = {"up": (512, 1024), "gate": (512, 1024), "down": (1024, 512)}
    params = {name: jax.ShapeDtypeStruct(shape, BF16) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((256, 512), BF16)
    always = cutjax.fp8_dot_general("block", policy="always")
    step = cutjax.fuse(jax.value_and_grad(loss, (0, 1)), fp8=always)
    assert passes(step, params, x) == {
        ("1x128_own_turned", "256,512"): 4 + 2,  # x: twice forwards, and for both gradients of weights; dy
        ("1x128_own_turned", "256,1024"): 2 + 4,  # the hidden activations; gradients of both before
        ("128x128_own_turned", "512,1024"): 4,
        ("128x128_own_turned", "1024,512"): 2,
    }


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_arguments_that_the_program_rounds(recipe):
    """What quantizes weights rounds them, to the same values, where only products in float8 read them rounded."""
    always = cutjax.fp8_dot_general(recipe, policy="always")

    def program(params, x, other=None):
        up, gate, down = (w.astype(BF16) for w in params)
        h = jax.nn.silu(x @ up.reshape(256, 384)) * (x @ gate)
        value = (h @ down).astype(jnp.float32).var()
        return value if other is None else value + other * gate.astype(jnp.float32).sum()

    shapes = (256, 3, 128), (256, 384), (384, 256)
    params = [jax.random.normal(jax.random.key(i), shape) / 16 for i, shape in enumerate(shapes)]
    x = jax.random.normal(jax.random.key(3), (128, 256), BF16)
    step = cutjax.fuse(jax.value_and_grad(program), fp8=always)

    def read(*args):
        with cutjax.use_backend("cuda"):
            rows = cutjax.explain(step, platform="cuda")(*args).rows
        return sum(row.count for row in rows if row.kernel.startswith("quantize_f32_bf16"))

    assert read(params, x) == 4  # forwards, and for the gradient of h
    assert read(params, x, jnp.float32(1)) == 3
    got, wanted = step(params, x), jax.value_and_grad(cutjax.fuse(program, fp8=always))(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == jnp.float32
        assert np.linalg.norm(a - b) < 2**-5 * np.linalg.norm(b)  # sums in another order, rounded to float8
    (_, forward), (_, again) = (
        jax.jvp(f, (params, x), (params, x)) for f in (cutjax.fuse(program, fp8=always), program)
    )
    np.testing.assert_allclose(forward, again, rtol=0.1)


def test_activations_that_something_else_keeps():
    """They stay in 16 bits for that, so what is quantized along rows is made where it is multiplied."""
    always = cutjax.fp8_dot_general("block", policy="always")
    x, w = jax.ShapeDtypeStruct((256, 512), BF16), jax.ShapeDtypeStruct((512, 512), BF16)

    def other(params, x):
        w, v = params
        x = jnp.sin(x)
        return ((x @ w) * (x * v)).astype(jnp.float32).sum()

    step = cutjax.fuse(jax.value_and_grad(other), fp8=always)
    assert passes(step, (w, jax.ShapeDtypeStruct((512,), BF16)), x) == {
        ("1x128_own", "256,512"): 1,
        ("1x128_turned", "256,512"): 2,  # and of the gradient: that of x is not asked for
        ("128x128_turned", "512,512"): 1,
    }


def test_the_price_of_a_product():
    """Weight gradients of Llama's layers, of 1x128 by 1x128, lost to bfloat16 on an H200; the others did not."""
    recipe = fp8_product.Recipe("block", "float8_e4m3fn", "auto")
    of_x, of_w, of_dy = fp8_product.ACTIVATIONS, fp8_product.WEIGHTS, fp8_product.GRADIENTS
    for k, n in ((14336, 4096), (4096, 28672), (4096, 6144)):
        x, w, dy = (((*shape,), np.dtype(BF16)) for shape in ((8192, k), (k, n), (8192, n)))
        for layout, roles, a, b, why in (
            ("tn", (of_x, of_dy), x, dy, "that quantize"),
            ("nn", (of_x, of_w), x, w, ""),
            ("nt", (of_dy, of_w), dy, w, ""),
        ):
            found = fp8_product._why_wide(recipe, roles, fp8_product.Dense(layout), 0, a, b, device_of(H200))
            assert why in found if why else not found, (k, n, layout, found)


@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_small_products_of_odd_sizes_stay_wide(name):
    """XLA quantizes them, in passes that take longer than the product, however few bytes they move."""
    recipe = fp8_product.Recipe(name, "float8_e4m3fn", "auto")
    roles = fp8_product.ACTIVATIONS, fp8_product.WEIGHTS
    for m, k, n in ((129, 33, 130), (129, 130, 33), (64, 65, 96), (1000, 200, 100)):
        x, w, experts = (((*shape,), np.dtype(BF16)) for shape in ((m, k), (k, n), (4, k, n)))
        assert fp8_product._why_wide(recipe, roles, fp8_product.Dense("nn"), 0, x, w, device_of(H200))
        assert fp8_product._why_wide(recipe, roles, fp8_product.Rows(0, "nn"), 4, x, experts, device_of(H200))
