"""One executable on several GPUs at once."""

from __future__ import annotations

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

pytestmark = pytest.mark.gpu

gemm = functools.partial(cutjax.gemm, backend="cuda")


@pytest.fixture
def several(gpus):
    if len(gpus) < 2:
        pytest.skip(f"needs 2 GPUs, there is {len(gpus)}")
    return gpus


def _pair(seed: int):
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((1032, 520), (520, 776)))
    return a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), (a @ b).astype(jnp.bfloat16)


def test_threads_on_every_device(several):
    function = jax.jit(gemm)

    def run(i):
        a, b, expected = _pair(i)
        a, b = jax.device_put((a, b), several[i % len(several)])
        outs = [function(a, b) for _ in range(50)]
        assert outs[0].devices() == {several[i % len(several)]}
        return all(np.array_equal(np.asarray(out), expected) for out in outs)

    with concurrent.futures.ThreadPoolExecutor(2 * len(several)) as pool:
        assert all(pool.map(run, range(2 * len(several))))


def test_shard_map_and_its_gradient(several):
    mesh = jax.make_mesh((len(several),), ("x",), devices=several)
    rows, whole = jax.P("x"), jax.P()
    count = len(several)
    pairs = [_pair(i) for i in range(count)]
    a = jax.device_put(np.concatenate([pair[0] for pair in pairs]), jax.NamedSharding(mesh, rows))
    b = jax.device_put(pairs[0][1], jax.NamedSharding(mesh, whole))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    def forward(a, b):
        return gemm(a, b)

    assert forward.lower(a, b).as_text().count("@cutjax_launch") == 1
    a_cpu, b_cpu = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
    assert np.array_equal(np.asarray(forward(a, b)), (a_cpu @ b_cpu).astype(jnp.bfloat16))

    grad = jax.jit(jax.grad(lambda a: forward(a, b).astype(jnp.float32).sum()))(a)
    assert np.array_equal(np.asarray(grad), np.broadcast_to(b_cpu.sum(1), a.shape).astype(jnp.bfloat16))
