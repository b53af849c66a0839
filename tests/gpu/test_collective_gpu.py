"""Products beside transfers, and experts over devices, on 2 GPUs or more: exact integers, and Gaussians beside XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from checks import close, integers, same, scaled

import cutjax

P = jax.P
ROWS, COLUMNS = P("i"), P(None, "i")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def over():
    if jax.device_count() < 2:
        pytest.skip("one GPU")
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return functools.partial(jax.shard_map, mesh=mesh)


def squares(f):
    return lambda *args: (f(*args).astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("route", ["auto", "direct", "pieces"])
def test_exact(over, route):
    x, w, v = (integers(i, s, jnp.bfloat16) for i, s in enumerate(((1024, 512), (512, 1024), (1024, 512))))
    gather = functools.partial(
        cutjax.all_gather_gemm, axis_name="i", route=route, backend="cuda", out_dtype=jnp.float32
    )
    scatter = functools.partial(
        cutjax.gemm_reduce_scatter, axis_name="i", route=route, backend="cuda", out_dtype=jnp.float32
    )
    wide = [a.astype(jnp.float32) for a in (x, w, v)]
    same(jax.jit(over(gather, in_specs=(ROWS, COLUMNS), out_specs=COLUMNS))(x, w), wide[0] @ wide[1])
    same(jax.jit(over(scatter, in_specs=(COLUMNS, ROWS), out_specs=ROWS))(w, v), wide[1] @ wide[2])


@pytest.mark.parametrize("route", ["auto", "direct", "pieces"])
def test_mlp_and_its_gradients(over, route):
    x, u, g = (scaled(i, s, jnp.bfloat16) for i, s in enumerate(((2048, 1024), (1024, 2048), (1024, 2048))))
    v = scaled(3, (2048, 1024), jnp.bfloat16)
    kwargs = {"activation": jax.nn.silu, "backend": "cuda"}

    def local(x, u, v, g):
        return cutjax.mlp(x, u, v, gate=g, axis_name="i", route=route, **kwargs)

    def whole(x, u, v, g):
        return cutjax.mlp(x, u, v, gate=g, **kwargs)

    f = over(local, in_specs=(ROWS, COLUMNS, ROWS, COLUMNS), out_specs=ROWS)
    got, expected = (
        jax.jit(lambda *a, f=f: (f(*a), jax.grad(squares(f), range(4))(*a)))(x, u, v, g) for f in (f, whole)
    )
    close(got, expected, 2e-2)  # bf16: sums in another order, rounded in other places


@pytest.mark.parametrize("room", [2.0, 0.6])
@pytest.mark.parametrize("routing", ["even", "all to the last"])
@pytest.mark.parametrize("form", ["exchange", "gather"])
def test_experts(over, form, routing, room):
    """Rows by ragged_all_to_all, in rounds too, and its transpose."""
    x, logits = scaled(0, (2048, 512), jnp.bfloat16), 3 * scaled(1, (2048, 16))
    logits = logits.at[:, 14:].add(100) if routing != "even" else logits
    weights = [
        scaled(2 + i, s, jnp.bfloat16) for i, s in enumerate(((16, 512, 1024), (16, 512, 1024), (16, 1024, 512)))
    ]

    def local(*args):
        return cutjax.moe(*args, k=2, expert_axis="i", form=form, room=room)

    f = over(local, in_specs=(ROWS,) * 5, out_specs=ROWS)
    plain = functools.partial(cutjax.moe, k=2)
    got, expected = (
        jax.jit(lambda *a, f=f: (f(*a), jax.grad(squares(f), (0, 2, 3, 4))(*a)))(x, logits, *weights)
        for f in (f, plain)
    )
    close(got, expected, 2e-2)


def test_fewer_sms():
    """A grid of fewer SMs walks all tiles."""
    a, b = integers(0, (4096, 1024), jnp.bfloat16), integers(1, (1024, 4096), jnp.bfloat16)
    expected = jax.jit(functools.partial(cutjax.gemm, out_dtype=jnp.float32, backend="xla"))(a, b)
    for config in (
        cutjax.Config(sms=100),
        cutjax.Config(stages=3, stream_k=True, sms=90),
        cutjax.Config(64, 64, sms=7),
    ):
        same(cutjax.gemm(a, b, out_dtype=jnp.float32, config=config, backend="cuda"), expected)
