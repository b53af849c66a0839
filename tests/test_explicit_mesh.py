"""Every operation under a mesh of explicit axes, the default of jax.make_mesh, with replicated operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import OPERATIONS, M, arrays, operands, uses

import cutjax

EXPLICIT = jax.sharding.AxisType.Explicit


def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(EXPLICIT,))


@pytest.mark.parametrize("use", list(uses("gemm")))
@pytest.mark.parametrize("name", OPERATIONS)
def test_lowers(name, use):
    with jax.set_mesh(mesh()):
        jax.jit(uses(name)[use]).lower(*operands(name))


@pytest.mark.parametrize("use", ["value", "gradient"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values(name, use):
    expected = uses(name)[use](*operands(name))
    with jax.set_mesh(mesh()):
        got = jax.jit(uses(name)[use])(*operands(name))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3), got, expected)


def test_divided_operands_of_ragged_dot_are_refused_by_name():
    with jax.set_mesh(mesh()):
        found = arrays()
        w = jax.device_put(jnp.ones((8, 8, 16)), jax.NamedSharding(mesh(), jax.P("x")))
        with pytest.raises(NotImplementedError, match=r"divided over explicit mesh axes.*jax\.shard_map"):
            cutjax.ragged_dot(found["x"], w, jnp.full(8, M // 8))
