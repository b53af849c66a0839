"""Narrow and quantized weights: values, derivatives, what a kernel reads, drop-ins, fuse, devices and errors."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from checks import close, integers, mesh_of, normal, same, scaled

import cutjax
from cutjax import Quantized
from cutjax.dtypes import NARROW
from cutjax.runtime import settings

P, BF16, F16, F32 = jax.P, jnp.bfloat16, jnp.float16, jnp.float32
ROUNDING = 2**-7  # of results in bfloat16, rounded once, and of accumulators kept for a derivative
M, K, N = 12, 32, 24


@pytest.fixture(autouse=True)
def _promotion():
    """Strict promotion, which other tests have, refuses integers beside floats, but for quantized weights."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def narrow(seed, shape, dtype):
    return jnp.abs(integers(seed, shape)).astype(dtype) if dtype == "uint8" else integers(seed, shape).astype(dtype)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
def test_values_and_gradients_are_those_of_converted_weights(wide, dtype):
    x, w = integers(0, (M, K), wide), narrow(1, (K, N), dtype)
    floats = (0, 1) if dtype.startswith("float8") else (0,)

    def loss(multiply, x, w):
        return (multiply(x, w).astype(F32) ** 2).sum()

    @jax.jit
    def both(x, w):
        def plain(x, w):
            return x @ w.astype(x.dtype)

        found = [jax.value_and_grad(functools.partial(loss, f), floats)(x, w) for f in (cutjax.gemm, plain)]
        return found, cutjax.gemm(x, w), plain(x, w), cutjax.gemm(x, w.mT, layout="nt")

    (got, expected), value, plain, turned = both(x, w)
    same(value, plain)
    same(turned, plain)
    assert value.dtype == wide
    # float8 weights' gradients: the kernel's are rounded once from float32, plain ones to 16 bits first
    close(got, expected, 2**-3 if len(floats) > 1 else ROUNDING)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantized_is_within_a_step(dtype):
    """Steps of int8 are the largest magnitude over 127; those of float8 2^-3 or 2^-2 of a number. Half either way."""
    w = np.array(normal(0, (K, N)))
    w[:, 3] = 0

    @jax.jit
    def program(w):
        q = cutjax.quantize(w, dtype, block=(-1, 1))
        return q, cutjax.quantize(w.mT, dtype, block=(1, -1)), q.dequantize(), q.dequantize(BF16)

    q, turned, wide, rounded = program(w)
    assert (q.values.dtype, q.values.shape, q.scale.shape) == (jnp.dtype(dtype), (K, N), (1, N))
    step = np.abs(w).max(0) / 127 if dtype == "int8" else np.abs(w) * 2.0 ** (-3 if "e4m3" in dtype else -2)
    least = np.abs(w).max(0) * 2**-12  # of float8, numbers below the smallest normal one
    assert (np.abs(np.asarray(wide) - w) <= step * 0.5001 + least).all()
    same(turned.values, np.asarray(q.values).T)
    assert rounded.dtype == BF16


def test_the_scale_multiplies_what_is_added_up():
    """Sums of integers are exact, so the result is the exact one, rounded once: scaled weights would differ."""
    x, q = integers(0, (M, K), BF16), integers(1, (K, N), jnp.int8)
    s = jnp.abs(normal(2, (1, N)))
    got = jax.jit(cutjax.gemm)(x, Quantized(q, s))
    same(got, ((x.astype(F32) @ q.astype(F32)) * s).astype(BF16))


SCALES = {"a number": (), "columns": (N,), "matrix": (1, 1), "both": (1, N)}


@pytest.mark.parametrize("shape", SCALES.values(), ids=SCALES)
def test_scales_of_any_shape(shape):
    x, q, s = integers(0, (2, M, K), BF16), integers(1, (K, N), jnp.int8), jnp.abs(normal(2, shape)) + 1
    expected = ((x.astype(F32) @ q.astype(F32)) * s).astype(BF16)
    same(cutjax.gemm(x, Quantized(q, s)), expected)
    if len(shape) != 1:
        same(cutjax.gemm(x, Quantized(q.mT, s.mT if shape else s), layout="nt"), expected)


def test_batched_scales_and_several_weights():
    x, q = integers(0, (3, M, K), BF16), integers(1, (3, K, N), jnp.int8)
    s, t = jnp.abs(normal(2, (3, 1, N))), jnp.abs(normal(3, (1, N)))

    def gated(acc, gate, b):
        return acc * gate + b

    got = cutjax.gemm(x, (Quantized(q, s), q), epilogue=gated, operands=(t,))
    acc = x.astype(F32) @ q.astype(F32)
    close(got, ((acc * s) * acc + t).astype(BF16), ROUNDING)
    close(jax.vmap(cutjax.gemm)(x, Quantized(q, s)), (acc * s).astype(BF16), ROUNDING)


def test_gradients_of_quantized_weights():
    """Integer values have none: float0. float8 values and scales have theirs."""
    x, s, b = scaled(0, (M, K), BF16), jnp.abs(normal(2, (1, N))) / 8, normal(3, (N,))

    def loss(f, x, w):
        return (f(x, w).astype(F32) ** 2).mean()

    def ours(x, w):
        return cutjax.gemm(x, w, epilogue=lambda acc, b: jnp.tanh(acc + b), operands=(b,), out_dtype=F32)

    def plain(x, w):
        return jnp.tanh(x.astype(F32) @ (w.values.astype(F32) * w.scale) + b)

    for dtype, how in (("int8", {"allow_int": True}), ("float8_e4m3fn", {})):
        w = Quantized(narrow(1, (K, N), dtype), s)
        (dx, dw), (dx_plain, dw_plain) = (
            jax.jit(jax.grad(functools.partial(loss, f), (0, 1), **how))(x, w) for f in (ours, plain)
        )
        close(dx, dx_plain, 2 * ROUNDING)
        close(dw.scale, dw_plain.scale, 2 * ROUNDING)
        if dtype == "int8":
            assert dw.values.dtype == jax.dtypes.float0
        else:
            close(dw.values, dw_plain.values, 2**-3)


def test_layers_of_quantized_weights():
    x = scaled(0, (M, K), BF16)
    given = [scaled(i, shape) for i, shape in enumerate(((K, N), (K, N), (N, K)), 1)]

    def ours(x, gate, up, down):
        return cutjax.mlp(x, up, down, gate=gate, activation=jax.nn.silu, b2=jnp.ones(K))

    def plain(x, gate, up, down):
        x = x.astype(F32)
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down + 1

    @jax.jit
    def both(x, given):
        weights = [cutjax.quantize(w, jnp.int8, block=(-1, 1)) for w in given]
        wide = [w.dequantize() for w in weights]
        values = ours(x, *weights).astype(F32), plain(x, *wide)
        gradients = [
            jax.grad(lambda x, f=f, ws=ws: (f(x, *ws).astype(F32) ** 2).mean())(x)
            for f, ws in ((ours, weights), (plain, wide))
        ]
        return values, gradients

    values, gradients = both(x, given)
    close(*values, 2 * ROUNDING)
    close(*gradients, 4 * ROUNDING)


def test_layers_of_quantized_weights_in_groups():
    x, logits = scaled(0, (M, K), BF16), normal(7, (M, 3))
    given = [scaled(i, (3, *shape)) for i, shape in enumerate(((K, N), (K, N), (N, K)), 4)]

    @jax.jit
    def both(x, logits, sizes, given):
        gate, up, down = weights = [cutjax.quantize(w, jnp.int8, block=(-1, 1)) for w in given]
        wide, wide_x = [w.dequantize() for w in weights], x.astype(F32)
        rows = cutjax.grouped_gemm(x, Quantized(up.values, up.scale[:1]), sizes)
        got = cutjax.grouped_mlp(x, up, down, sizes, gate=gate), cutjax.moe(x, logits, *weights), rows
        expected = (
            oracles.grouped_mlp(wide_x, wide[1], wide[2], sizes, wide[0]),
            oracles.moe(wide_x, logits, *wide),
            oracles.masked_multiply(wide_x, up.values * up.scale[:1], sizes),
        )
        return [y.astype(F32) for y in got], expected

    *layers, rows = zip(*both(x, logits, np.array([5, 0, 6], np.int32), given), strict=True)
    for layer in layers:
        close(*layer, 2 * ROUNDING)
    close(*rows, ROUNDING)


def test_float32_takes_quantized_weights_too():
    @jax.jit
    def both(x, *given):
        w, v = (cutjax.quantize(w, jnp.int8, block=(-1, 1)) for w in given)
        products = cutjax.gemm(x, w), x @ w.dequantize()
        return products, (cutjax.mlp(x, w, v), cutjax.mlp(x, w.dequantize(), v.dequantize()))

    products, layers = both(normal(0, (M, K)), normal(1, (K, N)), normal(2, (N, K)))
    close(*products, 1e-5)
    close(*layers, 1e-4)


@pytest.mark.parametrize(("inner", "outer"), [("int4", "int8"), ("int8", "float32"), ("float32", "float8_e5m2")])
def test_experts_whose_weights_have_two_dtypes(inner, outer):
    x, logits = normal(0, (M, K)), normal(1, (M, 3))
    given = [scaled(i, (3, *shape)) for i, shape in enumerate(((K, N), (K, N), (N, K)), 2)]
    dtypes = inner, inner, outer
    pairs = zip(given, dtypes, strict=True)
    weights = [w if dtype == "float32" else cutjax.quantize(w, dtype, block=(-1, 1)) for w, dtype in pairs]
    wide = [w.dequantize() if isinstance(w, Quantized) else w for w in weights]
    close(cutjax.moe(x, logits, *weights), oracles.moe(x, logits, *wide), 1e-4)


# What a kernel reads.


def program(fn, *args, arch="sm_80"):
    with cutjax.use_backend("cuda"), settings.override(target_arch=arch):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def read(text):
    """The dtypes of the two first operands of each kernel."""
    assert "stablehlo.dot" not in text
    return re.findall(r"@cutjax_launch.* : \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>", text)


def aval(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W8, S = aval(64, 512), aval(512, 512, dtype=jnp.int8), aval(512, dtype=F32)
SIZES, GROUPS = aval(4, dtype=jnp.int32), aval(4, 512, 512, dtype=jnp.float8_e4m3fn)
NARROWLY = {
    "gemm": (cutjax.gemm, (X, W8)),
    "few rows": (cutjax.gemm, (aval(2, 512), W8)),
    "quantized": (lambda x, w, s: cutjax.gemm(x, Quantized(w, s)), (X, W8, S)),
    "gradient": (lambda x, w: jax.grad(lambda x: cutjax.gemm(x, w).astype(F32).sum())(x), (X, W8)),
    "grouped": (cutjax.grouped_gemm, (X, GROUPS, SIZES)),
    "batched": (cutjax.gemm, (aval(3, 64, 512), aval(3, 512, 512, dtype=jnp.uint8))),
    "mlp": (lambda x, w, s: cutjax.mlp(x, Quantized(w, s), w, gate=w), (X, W8, S)),
    "matmul": (cutjax.matmul, (X, W8)),
    "einsum": (lambda x, w: cutjax.einsum("kn,bk->bn", w, x), (X, W8)),
}


@pytest.mark.parametrize("name", NARROWLY)
def test_kernels_read_narrow_weights(name):
    fn, args = NARROWLY[name]
    text = program(fn, *args)
    found = read(text)
    assert found
    assert all(b in ("i8", "ui8", "f8E4M3FN") for _, b in found), found
    assert not re.search(r"convert .*\(tensor<[\dx]*x(ui?8|i8|f8E4M3FN)>\)", text)


@pytest.mark.parametrize("sizes", [(0, K, N), (M, 0, N), (M, K, 0)])
def test_empty_products_are_lowered_for_a_gpu(sizes):
    m, k, n = sizes
    w = Quantized(aval(k, n, dtype=jnp.uint8), aval(k, 1))  # scales along the contraction of the gradient too

    def loss(x, w):
        return cutjax.gemm(x, (w, w), epilogue=jnp.multiply).astype(F32).sum()

    jax.jit(jax.value_and_grad(loss)).trace(aval(m, k), w).lower(lowering_platforms=("cuda",))


def test_many_rows_are_decoded_on_hopper():
    given = aval(8192, 4096), aval(4096, 4096, dtype=jnp.int8)
    assert read(program(cutjax.gemm, *given, arch="sm_90a")) == [("bf16", "i8")]
    (row,) = cutjax.explain(cutjax.gemm, arch="sm_90a")(*given).rows
    assert row.choice.kernel.startswith("sm90_bf16xs8")
    assert "b in s8 is decoded to bf16 in registers" in row.choice.reasons


def test_narrow_rows_are_converted():
    """A kernel decodes columns alone."""
    f = functools.partial(cutjax.einsum, "bk,kn->nb")
    assert read(program(f, X, W8)) == [("bf16", "bf16")]
    with cutjax.use_backend("cuda"):
        (row,) = cutjax.explain(f, arch="sm_80")(X, W8).rows
    assert "is converted to bfloat16: kernels read narrow columns, not rows" in row.why


def test_fuse_finds_the_conversion():
    def f(x, w, s, b):
        return jax.nn.gelu((x @ w.astype(x.dtype)) * s + b)

    def shared(x, w, s, b):
        wide = w.astype(x.dtype)
        return jax.nn.gelu((x @ wide) * s + b), wide

    args = scaled(0, (M, K), BF16), integers(1, (K, N), jnp.int8), jnp.abs(normal(2, (N,), BF16)), normal(3, (N,), BF16)
    fused = cutjax.fuse(f, policy="always")
    (row,) = cutjax.explain(fused)(*args).rows
    assert (row.choice.problem.bs[0].dtype, row.choice.problem.plain) == (np.int8, False)
    close(fused(*args), jax.jit(f)(*args), 2 * ROUNDING)
    (row,) = cutjax.explain(cutjax.fuse(shared, policy="always"))(*args).rows
    assert row.choice.problem.bs[0].dtype == BF16
    gradients = jax.jit(lambda x: [jax.grad(lambda x, f=f: f(x, *args[1:]).astype(F32).sum())(x) for f in (fused, f)])
    close(*gradients(args[0]), 4 * ROUNDING)


def test_over_devices():
    """Weights and scales divided by columns, and in shard_map by the contraction."""
    x, q, s = integers(0, (16, K), BF16), integers(1, (K, 32), jnp.int8), jnp.abs(normal(2, (1, 32)))
    expected = cutjax.gemm(x, Quantized(q, s))
    mesh = mesh_of(i=8)
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))  # noqa: E731
    w = Quantized(put(q, None, "i"), put(s, None, "i"))
    same(jax.jit(cutjax.gemm)(put(x, None, None), w), expected)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "i"), P("i"), P()), out_specs=P())
    def parts(x, q, s):
        return jax.lax.psum(cutjax.gemm(x, Quantized(q, s), out_dtype=F32), "i").astype(BF16)

    close(jax.jit(parts)(x, q, s), expected, ROUNDING)


def test_scan_and_checkpoint():
    x, q, s = scaled(0, (M, K), BF16), integers(1, (4, K, K), jnp.int8), jnp.full((4, 1, K), 0.05)

    def chain(x, s):
        layer = jax.checkpoint(lambda x, w: (cutjax.gemm(x, Quantized(*w), epilogue=jnp.tanh), None))
        return jax.lax.scan(layer, x, (q, s))[0].astype(F32).sum()

    def plain(x, s):
        def layer(x, w):
            return jnp.tanh(x.astype(F32) @ (w[0].astype(F32) * w[1])).astype(BF16), None

        return jax.lax.scan(layer, x, (q, s))[0].astype(F32).sum()

    got, expected = (jax.jit(jax.grad(f, (0, 1)))(x, s) for f in (chain, plain))
    close(got, expected, 8 * ROUNDING)  # through four layers


W = Quantized(jnp.ones((K, N), jnp.int8), jnp.ones((1, N)))
REFUSED = {
    "blocks": (lambda x: cutjax.gemm(x, Quantized(W.values, jnp.ones((5, N)))), ValueError, "or divide them"),
    "shape": (lambda x: cutjax.gemm(x, Quantized(W.values, jnp.ones(5))), ValueError, r"scale of b is \(5,\)"),
    "integers": (lambda x: cutjax.gemm(x, Quantized(W.values, jnp.ones(N, int))), TypeError, "floating-point"),
    "axis": (lambda x: cutjax.mlp(x, W, W, axis_name="i"), ValueError, "dequantize them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    fn, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        fn(jnp.ones((M, K), BF16))
