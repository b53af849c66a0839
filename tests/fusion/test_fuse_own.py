"""Products of this package inside cutjax.fuse: drop-ins, gemm and layers get the tail that is around them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checks import close, scaled

import cutjax

pytestmark = pytest.mark.versions

BF16 = jnp.bfloat16
ROUNDING = 2**-6  # a result of 16 bits is rounded once where plain JAX rounds after each operation
X, W, V, B = scaled(0, (2, 16, 32), BF16), scaled(1, (32, 24), BF16), scaled(2, (32, 24), BF16), scaled(3, (24,), BF16)


def dropin(x, w, v, b):
    return jax.nn.gelu(cutjax.dot(x, w) + b)


def gemm(x, w, v, b):
    return jnp.tanh(cutjax.gemm(x[0], w) + b)


def transposed(x, w, v, b):
    return jnp.tanh(cutjax.gemm(x[0].T, w.T, layout="tt")) * b


def gate(x, w, v, b):
    return jax.nn.silu(cutjax.matmul(x, w)) * cutjax.matmul(x, v)


def mixed(x, w, v, b):
    """The kernel of one reads the product of the other."""
    return jnp.tanh(x @ w) + jnp.tanh(cutjax.matmul(x, v))


def heads(x, w, v, b):
    """Batch axes that lie between others: the product walks them by strides."""
    q = x.reshape(2, 16, 4, 8)
    return jnp.tanh(cutjax.einsum("bqhd,bkhd->bhqk", q, q))


def decoded(x, w, v, b):
    """The norm of a residual behind weights of 4 bits: its sum of squares is the kernel's too."""
    y = (cutjax.gemm(x[0], cutjax.quantize(w, jnp.int4, block=(16, 1))) + b).astype(jnp.float32)
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True))


def columns(x, w, v, b):
    """Scales and zero points of columns, and a batch."""
    return jnp.tanh(cutjax.matmul(x, cutjax.quantize(w, jnp.uint8, block=(-1, 1), zero_point=True))) * b


FUSED = {dropin: 1, gemm: 1, transposed: 1, gate: 2, mixed: 1, heads: 1, decoded: 1, columns: 1}


@pytest.mark.parametrize("fn", FUSED, ids=lambda fn: fn.__name__)
def test_our_products_get_tails(fn):
    fused = cutjax.fuse(fn, policy="always")
    found = cutjax.explain(fused)(X, W, V, B)
    assert sum(report.runs == "fused" for report in found.fusion) == FUSED[fn]
    assert len(found.rows) == (1 if fn is gate else FUSED[fn])
    close(fused(X, W, V, B), jax.jit(fn)(X, W, V, B), ROUNDING)


def test_gradients_of_our_products():
    def loss(*args):
        return (dropin(*args).astype(jnp.float32) ** 2).mean()

    gradient = jax.grad(loss, (0, 1, 3))
    expected = jax.jit(gradient)(X, W, V, B)
    fused = cutjax.fuse(gradient, policy="always")
    assert sum(report.runs == "fused" for report in cutjax.explain(fused)(X, W, V, B).fusion) >= 1
    close(fused(X, W, V, B), expected, 2 * ROUNDING)


def test_our_products_stay_where_they_say_so():
    """One with an epilogue, a pinned config or a backend of its own, and one that nothing is computed from."""

    def stays(x, w):
        first = cutjax.gemm(x, w, epilogue=jnp.tanh)
        return jnp.sin(first), jnp.tanh(cutjax.gemm(x, w, backend="xla")), cutjax.gemm(x, w)

    fused = cutjax.fuse(stays, policy="always")
    assert cutjax.explain(fused)(X[0], W).fusion == ()
    close(fused(X[0], W), jax.jit(stays)(X[0], W), ROUNDING)


def test_prices_decide_of_our_products():
    shapes = (8, 1024, 4096), (4096, 14336), (4096, 14336), (14336,)
    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    found = cutjax.explain(cutjax.fuse(gate), platform="cuda")(*args)
    assert [report.runs for report in found.fusion] == ["fused", "fused"]
    assert len(found.rows) == 1


def test_a_gate_of_quantized_products_is_priced_with_all_their_scales():
    """The two products of shared scales, each by its kernel, take twice what one takes: a few us."""

    def gate(x, scale, w, v):
        return jax.nn.silu(cutjax.gemm(x, cutjax.Quantized(w, scale))) * cutjax.gemm(x, cutjax.Quantized(v, scale))

    def alone(x, scale, w):
        return jax.nn.silu(cutjax.gemm(x, cutjax.Quantized(w, scale)))

    values = jax.ShapeDtypeStruct((4096, 8192), jnp.int4)
    x, scale = jax.ShapeDtypeStruct((8, 4096), BF16), jax.ShapeDtypeStruct((32, 8192), jnp.float32)
    (one,) = cutjax.explain(cutjax.fuse(alone), platform="cuda")(x, scale, values).fusion
    both = cutjax.explain(cutjax.fuse(gate), platform="cuda")(x, scale, values, values).fusion
    assert [report.runs for report in both] == ["fused", "fused"]
    assert both[0].reason.plain_us < 2.5 * one.reason.plain_us
