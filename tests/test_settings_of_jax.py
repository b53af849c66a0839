"""Every operation under jax's own settings: strict promotion of ranks and dtypes, leak checks, 64 bits, NaN checks."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import OPERATIONS, operands, uses

USES = tuple(uses("gemm"))


@contextlib.contextmanager
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


SETTINGS = {"strict": strict, "leaks": jax.checking_leaks, "x64": lambda: jax.enable_x64(True)}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_runs_the_same(name, use, setting):
    if setting == "leaks" and use not in ("value", "gradient"):
        pytest.skip("slow")
    if name.startswith("load_balance") and use == "x":
        pytest.skip("")
    args, fn = operands(name), uses(name)[use]
    expected = fn(*args)
    jax.clear_caches() if setting == "leaks" else None
    with SETTINGS[setting]():
        got = fn(*args)
        assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(expected)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, expected)
