"""The kernels under JAX's transformations, streams, threads and graphs. Small integers throughout: equal or wrong."""

from __future__ import annotations

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

pytestmark = pytest.mark.gpu

CALL = "@cutjax_launch"
LAYOUTS = ("nn", "nt", "tn", "tt")
gemm = functools.partial(cutjax.gemm, backend="cuda")


def ints(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape, np.int8).astype(np.float32), dtype)


def operands(layout: str, m=264, n=200, k=136, batch=(), b_batch=()):
    a = ints(1, *batch, *((m, k) if layout[0] == "n" else (k, m)))
    return a, ints(2, *b_batch, *((k, n) if layout[1] == "n" else (n, k)))


def product(a, b, layout="nn") -> np.ndarray:
    """f32 on the CPU, rounded to bf16."""
    a, b = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
    out = np.matmul(a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT)
    return out.astype(jnp.bfloat16)


def equal(out, expected) -> bool:
    return np.array_equal(np.asarray(out), np.asarray(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jit_and_eager(layout):
    a, b = operands(layout)
    function = jax.jit(functools.partial(gemm, layout=layout))
    assert function.lower(a, b).as_text().count(CALL) == 1
    assert equal(function(a, b), product(a, b, layout))
    assert equal(gemm(a, b, layout=layout), product(a, b, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_is_two_kernels(layout):
    a, b = operands(layout)
    cotangent = ints(3, 264, 200)

    def backward(a, b, cotangent, backend):
        return jax.vjp(functools.partial(cutjax.gemm, layout=layout, backend=backend), a, b)[1](cotangent)

    function = jax.jit(functools.partial(backward, backend="cuda"))
    text = function.lower(a, b, cotangent).as_text()
    assert text.count(CALL) == 2
    assert "stablehlo.transpose" not in text
    expected = jax.jit(functools.partial(backward, backend="xla"))(a, b, cotangent)
    for out, ref in zip(function(a, b, cotangent), expected, strict=True):
        assert equal(out, ref)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_reads_what_is_shared_in_place(layout):
    a, b = operands(layout, batch=(5,))
    function = jax.jit(jax.vmap(functools.partial(gemm, layout=layout), in_axes=(0, None)))
    text = function.lower(a, b).as_text()
    assert text.count(CALL) == 1
    assert f"tensor<5x{b.shape[0]}x{b.shape[1]}x" not in text  # one matrix b, stride 0
    assert equal(function(a, b), product(a, b, layout))


def test_batches_broadcast_along_several_axes():
    a, b = operands("tn", batch=(3, 1, 2), b_batch=(1, 4, 2))
    assert equal(gemm(a, b, layout="tn"), product(a, b, "tn"))


def test_scan():
    x = ints(1, 256, 512)
    order = np.random.default_rng(0).permutation(512)
    w = jnp.asarray(np.eye(512, dtype=np.float32)[:, order], jnp.bfloat16)  # exact however often it is applied

    @jax.jit
    def run(x, w):
        return jax.lax.scan(lambda x, _: (gemm(x, w), None), x, length=7)[0]

    expected = np.asarray(x)
    for _ in range(7):
        expected = expected[:, order]
    assert equal(run(x, w), expected)


def test_export_runs_after_a_round_trip():
    a, b = operands("nt")
    checks = [jax.export.DisabledSafetyCheck.custom_call("cutjax_launch")]
    function = jax.jit(functools.partial(gemm, layout="nt"))
    data = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)(a, b).serialize()
    assert equal(jax.jit(jax.export.deserialize(data).call)(a, b), product(a, b, "nt"))


def test_donated_operand():
    a, b = ints(1, 512, 512), ints(2, 512, 512)
    expected = product(a, b)
    assert equal(jax.jit(gemm, donate_argnums=0)(a, b), expected)  # the result may not land on what is still being read


def test_threads_share_one_executable():
    function = jax.jit(gemm)
    pairs = [(ints(2 * i, 520, 264), ints(2 * i + 1, 264, 392)) for i in range(8)]
    expected = [product(*pair) for pair in pairs]
    function(*pairs[0])

    def run(i):
        return all(equal(function(*pairs[i]), expected[i]) for _ in range(50))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))


@pytest.mark.parametrize("options", [{}, {"xla_gpu_graph_min_graph_size": 1}], ids=["default", "graph"])
def test_graph_replay_with_other_buffers(options):
    """XLA captures a run of launches as a CUDA graph: its replays must use each call's own buffers."""

    def chain(x, ws):
        for i in range(len(ws)):
            x = jnp.clip(gemm(x, ws[i]), -2, 2)
        return x

    ws = [ints(10 + i, 264, 264) for i in range(8)]
    function = jax.jit(chain, compiler_options=options)
    kept = []
    for i in range(20):
        x = ints(100 + i, 200, 264)
        expected = np.asarray(x)
        for w in ws:
            expected = np.clip(product(expected, w).astype(np.float32), -2, 2).astype(jnp.bfloat16)
        kept.append((function(x, ws), expected, x))  # kept alive, so that the next call gets other memory
    for out, expected, _ in kept:
        assert equal(out, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_stays_in_its_batch_row_and_column(layout):
    jnp.full((1 << 28,), jnp.nan, jnp.bfloat16).delete()  # memory around the operands: NaN, where the pool is fresh
    m, n, k = 200, 136, 72  # tails in all three
    a, b = operands(layout, m, n, k, (3,), (3,))
    expected = product(a, b, layout)
    a, b = a.at[1].set(jnp.nan), b.at[1].set(jnp.nan)  # neighbours of the tails of 0 and of the first tiles of 2
    out = np.asarray(gemm(a, b, layout=layout))
    assert np.isnan(out[1].astype(np.float32)).all()
    assert equal(out[[0, 2]], expected[[0, 2]])

    a, b = operands(layout, m, n, k)
    expected = product(a, b, layout)
    out = np.asarray(gemm(a.at[(m - 1, 0) if layout[0] == "n" else (0, m - 1)].set(jnp.nan), b, layout=layout))
    assert np.isnan(out[m - 1].astype(np.float32)).all()
    assert equal(out[: m - 1], expected[: m - 1])
    out = np.asarray(gemm(a, b.at[(k - 1, 0) if layout[1] == "n" else (0, k - 1)].set(jnp.inf), layout=layout))
    assert equal(out[:, 1:], expected[:, 1:])


def test_zero_sizes():
    a, b = ints(1, 64, 0), ints(2, 0, 128)
    assert equal(gemm(a, b), np.zeros((64, 128), jnp.bfloat16))
    assert gemm(ints(1, 0, 64), ints(2, 64, 128)).shape == (0, 128)


def test_no_kernel():
    a, b = ints(1, 64, 128).astype(jnp.float32), ints(2, 128, 64).astype(jnp.float32)
    assert equal(cutjax.gemm(a, b), product(a, b))
    with pytest.raises(NotImplementedError, match="both operands are bf16"):
        gemm(a, b)


def _large(shape: tuple[int, ...]) -> jax.Array:
    """-2 to 2, made on the device, a slab at a time."""

    @jax.jit
    def fill():
        index = [jax.lax.broadcasted_iota(jnp.uint32, shape, i) for i in range(len(shape))]
        mixed = sum(x * jnp.uint32(p) for x, p in zip(index, (2654435761, 2246822519, 3266489917), strict=False))
        return ((mixed >> 13) % 5).astype(jnp.int8).astype(jnp.bfloat16) - 2

    return fill()


@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_operand_past_2_31_elements(layout):
    m, n, k = ((1 << 19) + 264, 64, 4096) if layout == "nn" else (4096 + 8, 64, 1 << 19)
    a = _large((m, k) if layout == "nn" else (k, m))
    assert a.size > 1 << 31
    b = ints(1, k, n) if layout == "nn" else ints(1, k, n) * (jnp.arange(k) >= k - 512)[:, None].astype(jnp.bfloat16)
    out = np.asarray(gemm(a, b, layout=layout))
    if layout == "nn":
        assert equal(out[-300:], product(a[-300:], b))
        assert equal(out[:300], product(a[:300], b))
    else:  # only the last rows of a count
        assert equal(out, product(a[-512:], b[-512:], "tn"))


def test_result_past_2_31_elements():
    a, b = ints(1, 65536 + 264, 64), ints(2, 64, 32768)
    out = gemm(a, b)
    assert out.size > 1 << 31
    assert equal(out[-300:], product(a[-300:], b))


def test_batch_past_2_31_elements():
    a, b = ints(1, 520, 2048, 64), ints(2, 520, 64, 2048)
    out = gemm(a, b)
    assert out.size > 1 << 31
    assert equal(out[-2:], product(a[-2:], b[-2:]))
