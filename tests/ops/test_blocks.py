"""Operands with scales of blocks along k, or with zero points: products against float64, transformations, errors."""

from __future__ import annotations

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
from cutjax.primitives.scaled import Scaled
from cutjax.runtime import settings

P, BF16, F32, F8 = jax.P, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
ROUNDING = 2**-7  # of results in bfloat16, and of weights that are rounded to it
M, K, N = 16, 64, 32


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def exact(q):
    """A quantized operand in float64, by numpy alone."""
    values = np.asarray(q.values, np.float64)
    zero = 0.0 if q.zero_point is None else _repeated(q.zero_point, values.shape)
    return (values - zero) * _repeated(q.scale, values.shape)


def _repeated(x, shape):
    x = np.asarray(x, np.float64)
    for axis, size in enumerate(shape):
        x = np.repeat(x, size // x.shape[axis], axis)
    return x


def turned(q):
    return jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), q)


def weights(dtype, block, seed=1, shape=(K, N), **how):
    how.setdefault("zero_point", dtype.startswith("u"))
    return cutjax.quantize(scaled(seed, shape), dtype, block=block, **how)


BLOCKS = {"32": (32, 1), "16x16": (16, 16), "rows of k": (1, -1), "1x16": (1, 16), "zero points": (-1, 1)}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", NARROW)
def test_products(dtype, name):
    """By rows in bfloat16 and float32, and as the first operand; weights are rounded to the other's dtype, no more."""
    zero = jnp.issubdtype(jnp.dtype(dtype), jnp.integer) and (name == "zero points" or dtype.startswith("u"))
    if name == "zero points" and not zero:
        pytest.skip("zero points are of integers")
    q = weights(dtype, BLOCKS[name], zero_point=zero, scale_dtype=BF16 if "16" in name else F32)
    x = np.asarray(scaled(0, (K, M)).T, BF16)
    wide, expected = exact(q), np.asarray(x, np.float64) @ exact(q)

    @jax.jit
    def all_of(x, q):
        narrow = cutjax.gemm(x, q), cutjax.gemm(x, turned(q), layout="nt"), cutjax.gemm(x.mT, q, layout="tn")
        return narrow, cutjax.gemm(x.astype(F32), q), cutjax.gemm(turned(q), x.astype(F32), layout="nt").mT

    narrow, in_float32, first = all_of(x, q)
    for found in narrow:
        assert found.dtype == BF16
        close(found.astype(F32), expected.astype(F32), ROUNDING)
    close((in_float32, first), (expected.astype(F32),) * 2, 2e-6)
    rounded = (np.asarray(x, F32) @ wide.astype(F32).astype(BF16).astype(F32)).astype(BF16)
    close(narrow[0], rounded, 2**-8)


def aval(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


PAIRS = {
    "fp8": ("float8_e4m3fn", (1, 16), "float8_e4m3fn", (16, 16)),
    "fp8 mixed": ("float8_e5m2", (1, 16), "float8_e4m3fn", (16, 1)),
    "int8": ("int8", (1, 32), "int8", (32, 1)),
    "rows by blocks": ("float8_e4m3fn", (1, -1), "float8_e4m3fn", (16, 16)),
    "w4a8": ("float8_e4m3fn", (1, -1), "int4", (32, 1)),
    "fp4": ("float4_e2m1fn", (1, 16), "float4_e2m1fn", (16, 1)),
    "mx": ("float8_e4m3fn", (1, 32), "float4_e2m1fn", (32, 1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_of_two_quantized_operands(name):
    """Nothing is rounded but to float32: sums of blocks are multiplied by both scales."""
    of_a, block_a, of_b, block_b = PAIRS[name]
    scale = jnp.float8_e8m0fnu if name == "mx" else F8 if name == "fp4" else F32
    a = cutjax.quantize(normal(0, (M, K)), of_a, block=block_a, scale_dtype=scale)
    b = cutjax.quantize(normal(1, (K, N)), of_b, block=block_b, scale_dtype=scale)
    expected = exact(a) @ exact(b)
    found, turned_too, fused = jax.jit(
        lambda a, b: (
            cutjax.gemm(a, b),
            cutjax.gemm(turned(a), turned(b), layout="tt", out_dtype=BF16),
            cutjax.gemm(a, b, epilogue=lambda acc, c: jnp.tanh(acc) + c, operands=(jnp.ones(N),)),
        )
    )(a, b)
    close(found, expected.astype(F32), 2e-6)
    close(turned_too, expected.astype(F32).astype(BF16), 2**-8)
    close(fused, (np.tanh(expected) + 1).astype(F32), 1e-5)


def test_scales_of_rows_and_columns_stay_the_epilogue_s():
    """Those that do not vary along k, repeated where they are of blocks of columns."""
    x, w = integers(0, (M, K), BF16), integers(1, (K, N), jnp.int8)
    s = jnp.abs(normal(2, (1, 4)))
    jaxpr = jax.make_jaxpr(cutjax.gemm)(x, Quantized(w, s))
    assert "cutjax_scaled" not in str(jaxpr)
    expected = (x.astype(F32) @ w.astype(F32)) * jnp.repeat(s, N // 4, 1)
    same(cutjax.gemm(x, Quantized(w, s)), expected.astype(BF16))
    assert "cutjax_scaled" in str(jax.make_jaxpr(cutjax.gemm)(x, Quantized(w, s, jnp.ones((1, 4), jnp.int8))))


class QArray:
    """As Qwix has it."""

    def __init__(self, q):
        self.qvalue, self.scale, self.zero_point = q.values, q.scale, q.zero_point


def test_other_libraries_arrays():
    q = weights("int4", (16, 1), zero_point=True)
    x = scaled(0, (M, K), BF16)
    same(cutjax.gemm(x, QArray(q)), cutjax.gemm(x, q))
    same(cutjax.gemm(QArray(turned(q)), x, layout="nt"), cutjax.gemm(turned(q), x, layout="nt"))
    same(cutjax.mlp(x, QArray(q), QArray(turned(q))), cutjax.mlp(x, q, turned(q)))
    grouped = jax.tree.map(lambda x: x[None], q)
    sizes = jnp.array([M])
    same(cutjax.grouped_gemm(x, QArray(grouped), sizes), cutjax.grouped_gemm(x, grouped, sizes))


# Derivatives.


def both(q, x, loss):
    """Gradients in x and in the arrays of q that are floats, of our product and of jnp's formula."""

    def plain(x, q):
        wide = q.dequantize(F32)
        return x.astype(F32) @ wide

    def gradients(f):
        return jax.grad(lambda x, q: loss(f(x, q)), (0, 1), allow_int=True)(x, q)

    return jax.jit(lambda: [gradients(lambda x, q: cutjax.gemm(x, q, out_dtype=F32)), gradients(plain)])()


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3fn"])
def test_gradients(dtype):
    q = weights(dtype, (16, 1))
    x = scaled(0, (K, M)).T
    (dx, dq), (dx_plain, dq_plain) = both(q, x, lambda y: (jnp.tanh(y) ** 2).mean())
    close(dx, dx_plain, 1e-5)
    close(dq.scale, dq_plain.scale, 1e-5)
    if dtype.startswith("float"):
        close(dq.values, dq_plain.values, 2**-3)
    else:
        assert dq.values.dtype == jax.dtypes.float0
    if dtype == "uint4":
        assert dq.zero_point.dtype == jax.dtypes.float0


def test_the_gradient_in_x_reads_the_same_arrays():
    """dy by the transposed view of the weights: nothing in the program dequantizes them."""
    q, x = weights("int4", (16, 1), zero_point=True), scaled(0, (M, K), BF16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: cutjax.gemm(x, q).astype(F32).sum()))(x)
    found = [eqn for eqn in jaxpr.jaxpr.eqns if "product" in eqn.params]
    assert len(found) == 2
    for eqn, layout in zip(found, ("nn", "nt"), strict=True):
        product = eqn.params["product"]
        assert isinstance(product, Scaled)
        assert (product.product.layout, product.counts, product.dtype) == (layout, (0, 2), BF16)
        assert [x.aval.dtype.name for x in eqn.invars[1:]] == ["int4", "float32", "int4"]


def test_gradients_through_an_epilogue_and_forward_mode():
    q, x, b = weights("int8", (32, 1)), scaled(0, (M, K), F32), normal(3, (N,))
    v = normal(4, (M, K)), normal(5, (N,))

    def ours(x, b):
        return cutjax.gemm(x, q, epilogue=lambda acc, b: jax.nn.gelu(acc + b), operands=(b,))

    def plain(x, b):
        return jax.nn.gelu(x @ q.dequantize() + b)

    def derivatives(f):
        def loss(x, b):
            return (f(x, b) ** 2).mean()

        gradient = jax.grad(loss, (0, 1))
        return jax.jvp(f, (x, b), v), jax.grad(jax.checkpoint(loss))(x, b), jax.jvp(gradient, (x, b), v)

    close(*jax.jit(lambda: [derivatives(f) for f in (ours, plain)])(), 1e-4)


# Transformations.


def test_batched_scanned_and_vmapped():
    q, x = weights("int4", (16, 1), shape=(3, K, K)), scaled(0, (3, M, K), F32)
    wide = q.dequantize()

    @jax.jit
    def all_of(x, q):
        def chain(x, layer):
            return jnp.tanh(cutjax.gemm(x, layer)), None

        one = jax.tree.map(lambda x: x[0], q)
        return (
            cutjax.gemm(x, q),
            jax.vmap(cutjax.gemm)(x, q),
            jax.vmap(cutjax.gemm, (None, 0))(x[0], q),
            jax.vmap(cutjax.gemm, (0, None))(x, one),
            jax.vmap(cutjax.gemm, (1, None), 1)(x, one),
            jax.lax.scan(chain, x[0], q)[0],
            cutjax.gemm(x, one),
        )

    found = all_of(x, q)
    close(found[:2], (x @ wide,) * 2, 1e-5)
    close(found[2], x[0] @ wide, 1e-5)
    close((found[3], found[4], found[6]), (x @ wide[0],) * 3, 1e-5)
    expected = x[0]
    for w in wide:
        expected = jnp.tanh(expected @ w)
    close(found[5], expected, 1e-5)


def test_several_weights_of_one_operand():
    gate, up, x = weights("int4", (16, 1)), weights("int4", (16, 1), 2), scaled(0, (M, K), BF16)
    got = cutjax.gemm(x, (gate, up), epilogue=lambda g, u: jax.nn.silu(g) * u, out_dtype=F32)
    g, u = (x.astype(F32) @ w.dequantize(BF16).astype(F32) for w in (gate, up))
    close(got, jax.nn.silu(g) * u, 1e-5)


def test_exported_and_restored():
    """Any number of rows; the pytree goes through an exported program as it goes through a checkpoint."""
    q, x = weights("int8", (16, 1)), scaled(0, (M, K), F32)
    (rows,) = jax.export.symbolic_shape("m")
    args = jax.ShapeDtypeStruct((rows, K), F32), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), q)
    leaves, tree = jax.tree.flatten(args)
    exported = jax.export.export(jax.jit(lambda *xs: cutjax.gemm(*jax.tree.unflatten(tree, xs))))(*leaves)
    restored = jax.export.deserialize(exported.serialize())
    close(restored.call(x, *jax.tree.leaves(q)), cutjax.gemm(x, q), 1e-6)


SPECS = {"columns": (None, "i"), "k": ("i", None), "blocks of two devices": ("i", None)}


@pytest.mark.parametrize("name", SPECS)
def test_over_devices(name):
    """Values and scales are divided together, a block never: where there are fewer than devices, k is whole."""
    block = (K // 2, 1) if name == "blocks of two devices" else (K // 8, 1)
    q, x = weights("int8", block, shape=(K, 32)), scaled(0, (M, K), BF16)
    mesh, spec = mesh_of(i=8), P(*SPECS[name])
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
    expected = cutjax.gemm(x, q)
    there = put(q.scale, P() if q.scale.shape[0] == 2 else spec)
    for scale in (put(q.scale, P()), there):
        divided = Quantized(put(q.values, spec), scale)
        got = jax.jit(cutjax.gemm)(put(x, P()), divided)
        close(got, expected, ROUNDING)

    def local(x, values, scale):
        y = cutjax.gemm(x, Quantized(values, scale), out_dtype=F32)
        return y if name == "columns" else jax.lax.psum(y, "i")

    if name != "blocks of two devices":
        rows, out = (P(), spec) if name == "columns" else (P(None, "i"), P())
        run = jax.shard_map(local, mesh=mesh, in_specs=(rows, spec, spec), out_specs=out)
        close(jax.jit(run)(x, q.values, q.scale).astype(BF16), expected, ROUNDING)


# Layers and groups.


def test_groups():
    x, sizes = scaled(0, (M, K), BF16), jnp.array([5, 0, 6], jnp.int32)
    up, down = (weights("int4", (16, 1), i, (3, *shape)) for i, shape in enumerate(((K, N), (N, K)), 1))
    rows = cutjax.quantize(x.astype(F32), F8, block=(1, 16))
    logits = normal(7, (M, 3))

    @jax.jit
    def all_of(x, rows, up, down):
        return [
            y.astype(F32)
            for y in (
                cutjax.grouped_gemm(x, up, sizes),
                cutjax.grouped_gemm(x, turned(up), sizes, layout="nt"),
                cutjax.grouped_gemm(rows, up, sizes),
                cutjax.grouped_mlp(x, up, down, sizes, gate=up),
                cutjax.moe(x, logits, up, up, down),
                cutjax.mlp(x, *(jax.tree.map(lambda x: x[0], w) for w in (up, down)), b2=jnp.ones(K, BF16)),
                jax.grad(lambda x: cutjax.grouped_mlp(x, up, down, sizes, gate=up).astype(F32).sum())(x),
            )
        ]

    wide_x, wide_up, wide_down = x.astype(F32), up.dequantize(), down.dequantize()
    expected = [
        oracles.masked_multiply(wide_x, wide_up, sizes),
        oracles.masked_multiply(wide_x, wide_up, sizes),
        oracles.masked_multiply(rows.dequantize(), wide_up, sizes),
        oracles.grouped_mlp(wide_x, wide_up, wide_down, sizes, wide_up),
        oracles.moe(wide_x, logits, wide_up, wide_up, wide_down),
        jax.nn.gelu(wide_x @ wide_up[0]) @ wide_down[0] + 1,
        jax.grad(lambda x: oracles.grouped_mlp(x, wide_up, wide_down, sizes, wide_up).sum())(wide_x),
    ]
    for got, plain in zip(all_of(x, rows, up, down), expected, strict=True):
        close(got, plain, 4 * ROUNDING)


# What runs, and why.


def test_explain_says_why_no_kernel_reads_it():
    x, q = jax.ShapeDtypeStruct((64, 512), BF16), weights("int4", (128, 1), shape=(512, 512), zero_point=True)
    (row,) = cutjax.explain(cutjax.gemm, arch="sm_80")(x, q).rows
    assert row.runs == "XLA"
    assert "XLA multiplies b dequantized" in row.why
    assert str(row.choice.problem).endswith("b in blocks of 1 x 128, f32 scales and s4 zero points")
    operand = row.choice.problem.bs[0]
    assert (operand.bits, operand.scale.k, operand.scale.zero) == (4, 128, jnp.int4)


DEQUANTIZED = {
    "groups": (cutjax.grouped_gemm, (4,), (aval(4, dtype=jnp.int32),), ["1024x512xbf16", "4x512x512xbf16", "4xi32"]),
    "reduction": (
        lambda x, q: cutjax.gemm(x, q, epilogue=lambda acc: (acc, acc.max(-1)), backend="cuda"),
        (),
        (),
        ["1024x512xbf16", "512x512xbf16"],
    ),
}


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_kernels_multiply_what_was_dequantized_before(name):
    """Where none reads blocks, and its product is the faster one for the pass over the weights."""
    fn, batch, more, read = DEQUANTIZED[name]
    q = weights("int4", (128, 1), shape=(*batch, 512, 512), zero_point=True)
    args = aval(1024, 512), q, *more
    (row,) = cutjax.explain(fn, arch="sm_80")(*args).rows
    assert row.runs.startswith("mma_bf16")
    assert "b dequantized to bf16" in row.why
    with settings.override(target_arch="sm_80"):
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "@cutjax_launch" in line]
    types = call.split(" : (")[1].split(") ->")[0]
    assert re.findall(r"tensor<(\w+)>", types) == read


W = weights("int8", (16, 1))
REFUSED = {
    "tuple": (
        lambda x: cutjax.gemm(x, (W, Quantized(W.values, W.scale[:1])), epilogue=jnp.add),
        ValueError,
        "scales of the same blocks",
    ),
    "complex": (lambda x: cutjax.gemm(x.astype(jnp.complex64), W), TypeError, "dequantize them"),
    "k": (lambda x: cutjax.gemm(x[:, :-1], W), ValueError, "contracting dimensions differ"),
    "out": (lambda x: cutjax.gemm(x, W, out_dtype=int), TypeError, "has no meaning as out_dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    fn, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        fn(jnp.ones((M, K), BF16))


def test_outer_products_of_groups():
    """Scales of columns multiply the results, others the rows before; sums are added to what is given."""
    sizes, to = jnp.array([5, 0, 6], jnp.int32), normal(3, (3, K, N))
    x, dy = normal(0, (M, K)), normal(1, (M, N))
    kinds = {
        "columns": (cutjax.quantize(x, "int8", block=(-1, 1)), cutjax.quantize(dy, "int8", block=(-1, 1))),
        "rows": (cutjax.quantize(x, F8, block=(1, 16)), cutjax.quantize(dy, F8, block=(1, 16))),
        "one": (x.astype(BF16), cutjax.quantize(dy, F8, block=(8, 8))),
    }

    @jax.jit
    def all_of(kinds):
        return {name: (cutjax.grouped_outer(*of, sizes), added(*of)) for name, of in kinds.items()}

    def added(x, dy):
        return cutjax.grouped_outer(x, dy, sizes, accumulate=to)

    for name, (found, more) in all_of(kinds).items():
        a, b = (np.asarray(y, np.float64) if isinstance(y, jax.Array) else exact(y) for y in kinds[name])
        expected = np.stack([a[s : s + n].T @ b[s : s + n] for s, n in ((0, 5), (5, 0), (5, 6))])
        tolerance = ROUNDING if name == "one" else 2e-6
        close(found, expected.astype(found.dtype), tolerance)
        close(more, (expected + np.asarray(to)).astype(F32), tolerance)


def test_convolutions():
    """Scales of the result's channels multiply the sums; all others the weights, or the images, before."""
    x, w = normal(0, (2, 8, 8, 16)), normal(1, (3, 3, 16, 8))
    channels = Quantized(jnp.round(w * 16).astype(jnp.int8), jnp.abs(normal(2, (1, 1, 1, 8))))
    kinds = {
        "channels": (x.astype(BF16), channels),
        "float32": (x, channels),
        "blocks": (x, cutjax.quantize(w, "int4", block=(16, 2))),
        "images": (cutjax.quantize(x, "int8", block=(1, -1)), w),
        "both": (cutjax.quantize(x, "int8"), channels),
    }

    @jax.jit
    def all_of(kinds):
        return {name: cutjax.conv(*of, window_strides=2).astype(F32) for name, of in kinds.items()}

    for name, found in all_of(kinds).items():
        wide = [y if isinstance(y, jax.Array) else y.dequantize() for y in kinds[name]]
        close(
            found, cutjax.conv(wide[0].astype(F32), wide[1], window_strides=2), ROUNDING if name == "channels" else 1e-5
        )
    program = jax.make_jaxpr(lambda x: cutjax.conv(x, channels))(x.astype(BF16))
    (eqn,) = [eqn for eqn in program.jaxpr.eqns if "product" in eqn.params]
    assert eqn.invars[1].aval.dtype == jnp.int8
    fused = cutjax.conv(x, channels, epilogue=lambda acc, b: jax.nn.relu(acc + b), operands=(jnp.ones(8),))
    close(fused, jax.nn.relu(cutjax.conv(x, channels.dequantize()) + 1), 1e-5)


DROP_INS = {
    "matmul": (cutjax.matmul, ("x", "q"), jnp.matmul),
    "dot": (cutjax.dot, ("x", "q"), jnp.dot),
    "tensordot": (lambda x, q: cutjax.tensordot(x, q, 1), ("x", "q"), lambda x, q: jnp.tensordot(x, q, 1)),
    "heads": (
        lambda x, q: cutjax.einsum("btd,dhk->bhtk", x, q),
        ("tokens", "heads"),
        lambda x, q: jnp.einsum("btd,dhk->bhtk", x, q),
    ),
    "out": (
        lambda x, q: cutjax.einsum("bthk,hkd->btd", x, q),
        ("of heads", "out"),
        lambda x, q: jnp.einsum("bthk,hkd->btd", x, q),
    ),
    "first": (lambda x, q: cutjax.einsum("kn,bk->nb", q, x), ("x", "q"), lambda x, q: jnp.einsum("kn,bk->nb", q, x)),
    "dot_general": (
        lambda x, q: cutjax.dot_general(x, q, (((1,), (1,)), ((), ())), preferred_element_type=F32),
        ("x", "turned"),
        lambda x, q: jax.lax.dot_general(x, q, (((1,), (1,)), ((), ()))),
    ),
}


@pytest.mark.parametrize("name", DROP_INS)
def test_drop_ins(name):
    """Scales are moved as values are, and repeated where axes are merged across their blocks."""
    ours, names, plain = DROP_INS[name]
    heads = scaled(1, (K, 4, 8))
    given = {
        "x": normal(0, (M, K)),
        "tokens": normal(0, (2, M, K)),
        "of heads": normal(0, (2, M, 4, 8)),
        "q": weights("int4", (16, 1)),
        "turned": weights("int4", (1, 16), shape=(N, K)),
        "heads": Quantized(jnp.round(heads * 64).astype(jnp.int8), jnp.abs(normal(2, (4, 2, 1)))),
        "out": Quantized(jnp.round(heads * 64).astype(jnp.int8).reshape(4, 8, K), jnp.abs(normal(2, (4, 2, 1)))),
    }
    x, q = (given[name] for name in names)
    assert "cutjax_scaled" in str(jax.make_jaxpr(ours)(x, q))
    close(ours(x, q), plain(x, exact(q).astype(F32)), 1e-5)
    if name == "out":
        with pytest.raises(ValueError, match="dequantize them"):
            cutjax.einsum("bthk,hkd,d->bt", x, q, jnp.ones(K))


@pytest.mark.parametrize("block", [(-1, 1), (16, 1), (16, 16)], ids=str)
def test_special_scales_and_values(block):
    """Zero scales make zeros, what is not finite reaches its own results alone, denormal values count."""
    q = weights("float8_e4m3fn", block)
    scale = np.array(q.scale)
    scale[0, 0], scale[-1, -1] = 0, np.nan
    values = np.array(q.values)
    values[3, 20] = np.nan
    values[:, 9] = np.float32(2**-9)  # the least denormal number of float8_e4m3fn
    q = Quantized(jnp.asarray(values), jnp.asarray(scale))
    x = normal(0, (M, K))
    columns = block[1]
    with np.errstate(invalid="ignore"):
        expected = np.asarray(x, np.float64) @ exact(q)
    bad = np.isnan(exact(q)).any(0)
    assert bad[20]
    assert bad[-columns:].all()
    assert not bad[:16].any()
    for found in (cutjax.gemm(x, q), cutjax.gemm(cutjax.quantize(x, "float8_e4m3fn", block=(1, -1)), q)):
        np.testing.assert_array_equal(np.isnan(found).any(0), bad)
        np.testing.assert_array_equal(np.isnan(found).all(0), bad)
    found = np.asarray(cutjax.gemm(x, q))
    close(jnp.asarray(found[:, ~bad]), expected[:, ~bad].astype(np.float32), 2e-6)
    assert np.abs(found[:, 9]).max() > 0
    if block[0] == -1:
        assert not found[:, 0].any()
