"""The examples' own mathematics: what make demo runs is checked by the example itself."""

from __future__ import annotations

import functools
import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def muon(monkeypatch):
    pytest.importorskip("optax")
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("muon")


@pytest.mark.parametrize("step", ["cutjax_step", "jnp_step"])
@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)], ids=str)
def test_orthogonalization(muon, step, shape):
    """The iteration by products against the same polynomial of the singular values, which leaves the vectors."""
    u, s, v = np.linalg.svd(np.random.default_rng(0).standard_normal((3, *shape)), full_matrices=False)
    s = np.linspace(0.2, 1, s.shape[-1])  # five steps would leave smaller ones smaller
    x = (u * s) @ v
    s /= np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    # The largest difference is 8e-7, and 0.04 in bfloat16; that of a matrix and the next one is 0.6.
    for dtype, tolerance in ((jnp.float32, 3e-6), (jnp.bfloat16, 0.1)):
        of = jax.jit(functools.partial(muon.orthogonalize, getattr(muon, step), dtype))
        got = np.asarray(of(x.astype(np.float32)))
        np.testing.assert_allclose(got, (u * s) @ v, rtol=0, atol=tolerance)
        values = np.linalg.svd(got, compute_uv=False)
        assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("shape", [(2, 64, 256), (2, 256, 64)], ids=str)
def test_muon_runs_on_kernels_alone(muon, shape):
    """Three for each of the five steps, and no matrix is transposed in memory."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    traced = jax.jit(lambda x: muon.orthogonalize(muon.cutjax_step, jnp.bfloat16, x)).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r'@cutjax_launch.*?kernel = "(\w+)"', text)
    assert ["_symmetric" in name for name in kernels] == [True, True, False] * 5
    assert "dot_general" not in text
    assert "stablehlo.transpose" not in text
