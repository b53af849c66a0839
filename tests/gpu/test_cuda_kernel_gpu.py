"""cutjax.cuda_kernel on the device: the tutorial's RMSNorm, and kernels with a cluster, TMA, scalars, much memory."""

from __future__ import annotations

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

pytestmark = pytest.mark.gpu

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "cuda-kernel.md"


@functools.cache
def tutorial():
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    return names


def rms_norm(x, w):
    return tutorial()["rms_norm"](x, w, eps=1e-6, backend="cuda")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def check_close(got, x, w):
    """To bfloat16's rounding, 2 ** -8 relative, and a float32 sum in another order, which may tip it over once more."""
    x, w, got = (np.asarray(v, np.float64) for v in (x, w, got))
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w
    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("shape", [(1, 8), (5, 200), (3, 7, 512), (300, 4096), (4, 5000), (64, 16384), (2, 131072)])
def test_rms_norm(shape):
    x, w = normal(0, *shape), normal(1, shape[-1])
    check_close(jax.jit(rms_norm)(x, w), x, w)
    check_close(rms_norm(x, w), x, w)


def test_rms_norm_under_vmap():
    x, w = normal(0, 6, 4, 264), normal(1, 6, 264)
    check_close(jax.vmap(rms_norm, (0, None))(x, w[0]), x, w[0])
    check_close(jax.vmap(rms_norm)(x, w), x, w[:, None])
    check_close(jax.jit(jax.vmap(jax.vmap(rms_norm, (0, None))))(x, w), x, w[:, None])
    check_close(jax.vmap(rms_norm, (None, 0))(x[0], w), x[0], w[:, None])


def test_rms_norm_gradient_is_the_references():
    x, w, g = normal(0, 32, 1024), normal(1, 1024), normal(2, 32, 1024)
    reference = functools.partial(tutorial()["reference"], eps=1e-6)
    got, expected = (jax.jit(lambda x, w, f=f: jax.vjp(f, x, w)[1](g))(x, w) for f in (rms_norm, reference))
    for a, b in zip(got, expected, strict=True):  # one program but for the kernel, which it does not depend on
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("options", [{}, {"xla_gpu_graph_min_graph_size": 1}], ids=["default", "graph"])
def test_graph_replay_with_other_buffers(options):
    """XLA captures a run of launches as a CUDA graph: its replays must use each call's own buffers."""
    w = normal(1, 512)

    def chain(x):
        for _ in range(6):
            x = tiles(rms_norm(x, w).astype(jnp.float32), 0.5, scale=1.0, shift=0.0).astype(jnp.bfloat16)
        return x

    function, kept = jax.jit(chain, compiler_options=options), []
    for i in range(20):
        x = normal(100 + i, 64, 512)
        kept.append((function(x), chain(x), x))  # kept alive, so that the next call gets other memory
    for got, expected, _ in kept:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(2, 10, 14, 40), (1, 1, 1, 4), (3, 33, 7, 64)])
def test_columns_of_pixels(shape):
    """Small integers, of which there are nine to a sum: but for the division by nine all is exact."""
    images = jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32))
    names = tutorial()
    got = jax.jit(lambda x: names["mean"](x, backend="cuda"))(images)
    np.testing.assert_allclose(got, names["mean_reference"](images), rtol=2**-22)


# Each block moves a tile with TMA, and both of a cluster add up what they have in each other's shared memory.
TILES = r"""
__device__ void store_remote(u32 address, u32 rank, float value) {
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nst.shared::cluster.f32 [remote], %2;\n}"
               ::"r"(address), "r"(rank), "f"(value) : "memory");
}

__device__ void barrier_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

extern "C" __global__ void tiles(const __grid_constant__ TensorMap map, const float* c, float* y, int n, float scale,
                                 double shift, long long x_stride, long long c_stride) {
  extern __shared__ __align__(128) float tile[];  // [32, 32]
  __shared__ u64 barrier;
  __shared__ float sums[2];
  const u32 loaded = shared_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(loaded, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(loaded, sizeof(float) * 32 * 32);
    tma_load(shared_address(tile), &map, loaded, blockIdx.x * 32, blockIdx.y * 32, x_stride ? blockIdx.z : 0);
  }
  __syncthreads();
  mbarrier_wait(loaded, 0);
  float sum = 0;
  for (int i = 0; i < 32; ++i) sum += tile[i * 32 + threadIdx.x];
  for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  barrier_cluster();  // the other block runs, and has its shared memory
  if (threadIdx.x < 2) store_remote(shared_address(&sums[cluster_ctarank()]), threadIdx.x, sum);
  __syncwarp();
  barrier_cluster();
  const float added = (float)shift + sums[0] + sums[1] + c[blockIdx.z * c_stride];
  y += (long long)blockIdx.z * gridDim.y * 32 * n + blockIdx.y * 32 * n + blockIdx.x * 32 + threadIdx.x;
  for (int i = 0; i < 32; ++i) y[i * n] = scale * tile[i * 32 + threadIdx.x] + added;
}
"""


def tiles_launch(x, c, y, scale, shift):
    m, n = x.shape
    return cutjax.CudaLaunch(
        grid=(n // 32, m // 32),
        block=32,
        cluster=2,
        shared_bytes=100_000,  # more than a kernel may have unless it is allowed to
        arguments=(
            *(x.tensor_map((32, 32), swizzle=0), c, y, n),
            *(scale, np.float64(shift), x.batch_stride, c.batch_stride),
        ),
    )


tiles = cutjax.cuda_kernel(
    TILES,
    "tiles",
    out=lambda x, c, scale, shift: x,
    launch=tiles_launch,
    vmap="grid",
    headers=("sm90/atoms.cuh",),
)


def tiles_reference(x, c, scale, shift):
    *batch, m, n = x.shape
    pairs = x.reshape(*batch, m // 32, 32, n // 64, 64)
    values = scale * pairs + shift + pairs.sum((-1, -3), keepdims=True)
    return values.reshape(x.shape) + np.asarray(c)[..., None, None]


def test_cluster_shared_memory_tensor_map_and_scalars():
    """Small integers: every sum is exact, so equal or wrong."""
    x = np.random.default_rng(0).integers(-3, 4, (5, 96, 256)).astype(np.float32)
    c = np.arange(5, dtype=np.float32)
    f, g = (functools.partial(h, scale=-2.0, shift=7.0) for h in (tiles, tiles_reference))
    np.testing.assert_array_equal(jax.jit(f)(x[0], 3.0), g(x[0], 3.0))
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x, c), g(x, c))
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, 2.0), g(x, np.full(5, 2.0, np.float32)))
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(x[1], c), g(np.stack([x[1]] * 5), c))
    nested = jax.vmap(jax.vmap(f, (0, None)), (None, 0))(x, c[:2])
    np.testing.assert_array_equal(nested, np.stack([g(x, np.full(5, v, np.float32)) for v in c[:2]]))


def test_launches_of_one_call_see_what_those_before_wrote():
    source = """extern "C" __global__ void square(const float* x, float* y) {
                  y[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x];
                }
                extern "C" __global__ void total(const float* x, float* y, int n) {
                  float sum = 0;
                  for (int i = 0; i < n; ++i) sum += x[i];
                  *y = sum;
                }"""

    def launch(x, squares, total):
        return (
            cutjax.CudaLaunch(1, x.size, arguments=(x, squares), entry="square"),
            cutjax.CudaLaunch(1, 1, arguments=(squares, total, x.size)),
        )

    def out(x):
        return x, jax.ShapeDtypeStruct((), x.dtype)

    f = jax.jit(cutjax.cuda_kernel(source, "total", out=out, launch=launch))
    for n in (3, 100):
        squares, total = f(jnp.arange(float(n)))
        np.testing.assert_array_equal(squares, np.arange(float(n)) ** 2)
        assert total == sum(i * i for i in range(n))


def test_a_kernel_that_serves_two_sizes_of_shared_memory():
    """One cubin, loaded once: the smaller launch, prepared later, must not take the memory of the larger."""
    source = """extern "C" __global__ void fill(float* y, int n) {
                  extern __shared__ float held[];
                  for (int i = threadIdx.x; i < n; i += 32) held[i] = i;
                  __syncwarp();
                  for (int i = threadIdx.x; i < n; i += 32) y[i] = held[n - 1 - i];
                }"""

    def make(n):
        launch = lambda y: cutjax.CudaLaunch(1, 32, shared_bytes=4 * n, arguments=(y, n))  # noqa: E731
        out = jax.ShapeDtypeStruct((n,), jnp.float32)
        return jax.jit(cutjax.cuda_kernel(source, "fill", out=lambda: out, launch=launch))

    large, small = make(25_000), make(13_000)
    for f, n in ((large, 25_000), (small, 13_000), (large, 25_000)):
        np.testing.assert_array_equal(f(), np.arange(n - 1, -1, -1))
