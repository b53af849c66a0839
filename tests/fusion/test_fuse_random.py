"""cutjax.fuse on random programs: elementwise graphs around one to three products equal themselves without it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, scaled

import cutjax

B, S, N = 2, 3, 4
UNARY = [jnp.tanh, jax.nn.gelu, jax.nn.silu, jax.nn.relu, jnp.square, lambda x: -x, lambda x: x * 0.5]
BINARY = [jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, lambda x, y: jnp.where(x > 0, x, y)]


def program(seed: int):
    """A function of an array, matrices and a bias, with the same operations each time that it is called."""

    def fn(x, ws, bias, column):
        rng = np.random.default_rng(seed)

        def pick(values):
            return values[rng.integers(len(values))]

        values, sums = [x], []
        products = int(rng.integers(1, 4))
        for step in range(products * 4):
            kind = rng.integers(8)
            if step % 4 == 0 or kind == 0:
                y = pick(values) @ pick(ws)
            elif kind < 3:
                y = pick(UNARY)(pick(values))
            elif kind == 3:
                y = pick(values) + pick([bias, column, jnp.float32(0.25)])
            elif kind == 4:
                y = jnp.where(jnp.arange(N) > 1, pick(values), 0.0)
            elif kind == 5:
                z = pick(values)
                y = z * jax.lax.rsqrt(jnp.mean(z * z, -1, keepdims=True) + 1)  # a norm: what depends on it may not join
            elif kind == 6:
                y = pick(values).reshape(B * S, N).reshape(B, S, N)
                sums.append(y.sum(tuple(pick([(0, 1), (0, 1, 2), (2,)]))))
            else:
                y = pick(BINARY)(pick(values), pick(values))
            values.append(y)
        return values[-1], pick(values), sums

    return fn


def loss(fn):
    return lambda *args: sum(jnp.mean(jnp.sin(x)) for x in jax.tree.leaves(fn(*args)))


@pytest.mark.parametrize("seed", range(10))  # after a change of cutjax.fuse: 600
def test_random_programs_equal_themselves(seed):
    ws = [scaled(i, (N, N)) for i in range(2)]
    args = scaled(5, (B, S, N)), ws, scaled(6, (N,)), scaled(7, (B, S, 1))
    fn = program(seed)
    fused = cutjax.fuse(fn, policy="always")
    gradient = jax.value_and_grad(loss(fn), (0, 1, 2, 3))
    found = cutjax.fuse(gradient, policy="always")

    @jax.jit
    def both(*args):
        inside = jax.value_and_grad(loss(fused), (0, 1, 2, 3))(*args)
        return fn(*args), fused(*args), gradient(*args), found(*args), inside

    value, got, expected, outside, inside = both(*args)
    # float32 all through: only the order of sums differs.
    close(got, value, 1e-5)
    close(outside, expected, 1e-4)
    close(inside, expected, 1e-4)
