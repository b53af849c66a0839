"""Every operation under jax's own settings: strict promotion of ranks and dtypes, leak checks, 64 bits, NaN checks."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import OPERATIONS, operands, uses


@contextlib.contextmanager
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("name", OPERATIONS)
def test_promotes_nothing_by_itself_and_leaks_no_tracer(name):
    """Traced, and lowered, which traces the references."""
    found = [uses(name)[use] for use in ("gradient", "tangent", "batch of one")]
    # The search for leaks collects garbage, all of the process's: of each operation, not of each form of it.
    with strict(), contextlib.nullcontext() if "," in name else jax.checking_leaks():
        jax.jit(lambda *args: [use(*args) for use in found]).lower(*operands(name))


@pytest.mark.parametrize("name", OPERATIONS)
def test_64_bits_change_nothing(name):
    args, found = operands(name), [uses(name)[use] for use in ("value", "gradient")]

    def fn(*args):
        return [use(*args) for use in found]

    expected = jax.eval_shape(fn, *args)
    with jax.enable_x64(True):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(fn, *args)) == jax.tree.map(
            lambda x: (x.shape, x.dtype), expected
        )
        jax.jit(fn).lower(*args)


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_in_64_bits_and_no_nan(name):
    """What a kernel or a reference does not need, such as rows of no group, must not be NaN on the way either."""
    args, fn = operands(name), uses(name)["value"]
    expected = jax.jit(fn)(*args)
    with jax.enable_x64(True), jax.debug_nans(True):
        got = fn(*args)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(got))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3), got, expected)
