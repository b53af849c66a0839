"""Programs of jax.jit whose kernels run on the CPU: what is more than one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import cutjax
from cutjax import Config, Quantized
from emulator import device

F32 = jnp.float32
E4M3 = jnp.dtype("float8_e4m3fn")


def on_kernels(fn, *args, names):
    """The result of a function by kernels, whose names say these words."""
    with device.emulated(device.Machine(eagerness=3)), cutjax.use_backend("cuda"):
        lowered = jax.jit(fn).lower(*args)
        text = lowered.as_text()
        assert all(name in text for name in names), text
        return jax.tree.map(np.asarray, lowered.compile()(*args))


def integers(rng, shape, dtype=jnp.bfloat16, low=-2, high=3):
    return jnp.asarray(rng.integers(low, high, shape).astype(np.float32)).astype(dtype)


def test_weights_of_4_bits_in_registers():
    rng = np.random.default_rng(0)
    x, w = integers(rng, (16, 256)), integers(rng, (256, 256), jnp.int4, -8, 8)
    s = jnp.asarray(2.0 ** rng.integers(-2, 2, (2, 256)), jnp.bfloat16)
    config = Config(256, 16, 128, 3, swap=True, cluster_k=2)
    got = on_kernels(
        lambda x, w, s: cutjax.gemm(x, Quantized(w, s), out_dtype=F32, config=config), x, w, s, names=["xs4by128"]
    )
    wide = np.asarray(w.astype(F32)) * np.repeat(np.asarray(s, np.float32), 128, 0)
    np.testing.assert_array_equal(got, np.asarray(x, np.float32) @ wide)


def test_scales_of_blocks():
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2, 3, (size, 256)).astype(np.float32) for size in (72, 128))
    s, t = 2.0 ** rng.integers(-2, 3, (72, 2)), 2.0 ** rng.integers(-2, 3, (1, 2))

    def fn(x, s, w, t):
        return cutjax.gemm(
            Quantized(x, s), Quantized(w, t), layout="nt", out_dtype=F32, config=Config(64, 128, schedule="pingpong")
        )

    arrays = jnp.asarray(x, E4M3), jnp.asarray(s, F32), jnp.asarray(w, E4M3), jnp.asarray(t, F32)
    wide = [x * np.repeat(s, 128, 1), w * np.repeat(np.repeat(t, 128, 0), 128, 1)]
    np.testing.assert_array_equal(on_kernels(fn, *arrays, names=["scaled"]), wide[0] @ wide[1].T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # of Hopper's kernels, and of any GPU's
def test_a_scale_of_all_groups(dtype):
    rng = np.random.default_rng(0)
    x, dy = integers(rng, (40, 32), dtype), integers(rng, (40, 16), E4M3)
    for scale in (jnp.full(1, 0.5, jnp.bfloat16), jnp.asarray(2.0 ** rng.integers(-2, 3, (1, 16)), F32)):

        def fn(x, dy, scale, sizes):
            return cutjax.grouped_outer(x, Quantized(dy, scale), sizes, out_dtype=F32, precision="highest")

        got = on_kernels(fn, x, dy, scale, jnp.array([8, 0, 17]), names=["groups_k"])
        wide = np.asarray(x, np.float32), np.asarray(dy, np.float32) * np.asarray(scale, np.float32)
        exact = [wide[0][rows].T @ wide[1][rows] for rows in (slice(0, 8), slice(0, 0), slice(8, 25))]
        np.testing.assert_array_equal(got, np.stack(exact))


def test_rows_by_index():
    rng = np.random.default_rng(0)
    routing = cutjax.route(jax.random.normal(jax.random.key(0), (37, 16), F32), 3)
    x = integers(rng, (37, 24))
    got = on_kernels(lambda x, routing: routing.dispatch(x), x, routing, names=["gather"])
    np.testing.assert_array_equal(got, np.asarray(routing.dispatch(x)))


@pytest.mark.parametrize("gather", ["copy", "loads"])
def test_a_layer_of_experts(gather):
    """Routed, multiplied, and back, by kernels alone: as near to float32 as XLA's in bfloat16."""
    rng = np.random.default_rng(0)
    shapes = (40, 64), (40, 8), (8, 64, 72), (8, 64, 72), (8, 72, 64)
    arrays = [
        jnp.asarray(rng.standard_normal(shape) * (0.125 if len(shape) > 2 else 1), jnp.bfloat16) for shape in shapes
    ]

    def layer(how):
        def loss(*args):
            return (how(*args).astype(F32) ** 2).sum()

        return jax.value_and_grad(loss, range(5))

    names = ["route_bf16_8k2", "gather", "_groups_k_gathered" if gather == "loads" else "_groups_k"]
    got = on_kernels(layer(lambda *args: cutjax.moe(*args, gather=gather)), *arrays, names=names)
    for x, exact in zip(
        jax.tree.leaves(got), jax.tree.leaves(layer(oracles.moe)(*(x.astype(F32) for x in arrays))), strict=True
    ):
        x, exact = np.asarray(x, np.float64), np.asarray(exact, np.float64)
        assert np.linalg.norm(x - exact) <= 8e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_several_products_of_one_x(grouped):
    """The one in x is a sum, those in the weights are of one x: small integers, so equal bit for bit."""
    rng = np.random.default_rng(0)
    lead, sizes = ((3,), jnp.array([30, 0, 37], jnp.int32)) if grouped else ((), ())
    x, w, v = integers(rng, (72, 40)), integers(rng, (*lead, 40, 64)), integers(rng, (*lead, 40, 64))

    def loss(x, w, v):
        multiply = cutjax.grouped_gemm if grouped else cutjax.gemm
        given = (sizes,) if grouped else ()
        return multiply(x, (w, v), *given, epilogue=lambda p, q: p + 2 * q, out_dtype=F32).sum()

    names = ["_sum2", *["_groups_k"] * grouped]
    got = on_kernels(jax.grad(loss, (0, 1, 2)), x, w, v, names=names)
    for found, expected in zip(got, jax.grad(loss, (0, 1, 2))(x, w, v), strict=True):
        np.testing.assert_array_equal(found, expected)


TEXT = """
extern "C" __global__ void reverse(const float* x, float* y, int n) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : 0;
  __syncthreads();
  if (threadIdx.x < n) y[threadIdx.x] = s[n - 1 - threadIdx.x];
}
"""


def test_a_kernel_of_a_user():
    def launch(x, y):
        return cutjax.CudaLaunch(grid=1, block=64, arguments=(x, y, x.size))

    reverse = cutjax.cuda_kernel(TEXT, "reverse", out=lambda x: x, launch=launch, reference=lambda x: x[::-1])
    x = jnp.arange(50, dtype=jnp.float32)
    np.testing.assert_array_equal(on_kernels(reverse, x, names=["reverse"]), x[::-1])


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "z_loss": 0.01}], ids=str)
@pytest.mark.parametrize("scale", [1, 300])  # of large logits the first shift is too far away
def test_linear_cross_entropy(scale, options):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((72, 64), (64, 200)))
    arrays = jnp.asarray(scale * x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    labels = jnp.asarray(rng.integers(0, 200, 72), jnp.int32)

    def loss(fn):
        return jax.value_and_grad(lambda x, w: fn(x, w, labels, **options), (0, 1))

    got = on_kernels(loss(cutjax.linear_cross_entropy), *arrays, names=["sm90_bf16_nt", "sm90_bf16_tn"])
    wide = [x.astype(F32) for x in arrays]
    expected = jax.tree.map(np.asarray, loss(oracles.linear_cross_entropy)(*wide))
    assert abs(got[0] - expected[0]) <= 1e-5 * abs(expected[0])
    for one, exact in zip(got[1], expected[1], strict=True):  # powers are rounded to bfloat16, and the result
        assert np.abs(one.astype(np.float32) - exact).max() <= 2**-7 * np.abs(exact).max()
