"""cutjax.fuse on the device: each kind of tail against itself in float32 without it, and which kernels run."""

from __future__ import annotations

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_cases import initial, step

import cutjax
from cutjax.fusion import price

pytestmark = pytest.mark.gpu

# To the norm of the right result: a result is rounded to bf16 once, which is 1.7e-3; of what is made of two products,
# the operand of the second as well, and jax.nn.relu takes rounded values. A step of float8 is 2.6e-2.
TOLERANCE = 6e-3
COARSE = {"fp8": 5e-2}


def wide(x):
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def check(fn, case, tolerance):
    got = jax.jit(fn)(*case.args)
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        expected = jax.jit(case.fn)(*map(wide, case.args))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
        assert np.linalg.norm(x - y) <= tolerance * max(np.linalg.norm(y), 1e-3)


@pytest.mark.parametrize("name", fuse_cases.CASES)
def test_tails(name):
    case = fuse_cases.CASES[name]
    fused = cutjax.fuse(case.fn, policy="always")
    explanation = cutjax.explain(fused)(*case.args)
    assert all(row.runs.startswith(("sm90_", "mma_")) for row in explanation.rows)
    check(fused, case, COARSE.get(name, TOLERANCE))


@pytest.mark.parametrize("name", fuse_cases.CASES)
def test_prices_change_no_value(name):
    case = fuse_cases.CASES[name]
    check(cutjax.fuse(case.fn), case, COARSE.get(name, 2 * TOLERANCE))


def test_a_step_of_a_large_gated_block():
    """Through the kernels that prices pick, forward and backward."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2048, 1024), (1024, 4096), (1024, 4096), (4096, 1024)
    x, w, v, d = (jax.random.normal(k, s, jnp.bfloat16) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True))

    def loss(w, v, d):
        return jnp.mean(jnp.square(((jax.nn.silu(x @ w) * (x @ v)) @ d).astype(jnp.float32)))

    gradient = jax.grad(loss, (0, 1, 2))
    expected, found = jax.jit(gradient)(w, v, d), jax.jit(cutjax.fuse(gradient))(w, v, d)
    for x, y in zip(found, expected, strict=True):
        x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
        assert np.linalg.norm(x - y) <= 2e-2 * np.linalg.norm(y)  # each way rounds to bf16 several times


@pytest.mark.parametrize("donated", [(), 0], ids=["kept", "donated"])
def test_steps_of_adamw(donated):
    """Parameters and moments are written where they were read, step after step; or not, where they are the caller's."""
    keys = jax.random.split(jax.random.key(1), 3)
    params = {name: jax.random.normal(k, (1024, 512), jnp.float32) / 32 for name, k in zip("wv", keys, strict=False)}
    x = jax.random.normal(keys[2], (2048, 1024), jnp.bfloat16)
    fused = jax.jit(cutjax.fuse(step, policy="always", donate_argnums=donated), donate_argnums=donated)
    expected, state = initial(params), initial(jax.tree.map(jnp.copy, params))
    for _ in range(3):
        expected, wanted = jax.jit(step)(expected, x)
        state, value = fused(state, x)
        assert abs(float(value - wanted)) <= TOLERANCE * abs(float(wanted))
    for got, true, first in zip(*map(jax.tree.leaves, (state[0], expected[0], params)), strict=True):
        # AdamW's first steps are of one size whatever the gradient: where that is 0 but for rounding, of either sign.
        moved = np.linalg.norm(np.asarray(true - first, np.float64))
        assert np.linalg.norm(np.asarray(got - true, np.float64)) <= 0.1 * moved


def test_a_gated_block_needs_no_more_memory():
    """Its backward pass writes the gradients of two products where these were."""
    shapes = (4096, 1024), (1024, 8192), (1024, 8192), (8192, 1024)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(x, w, v, d):
        return jnp.mean(jnp.square(((jax.nn.silu(x @ w) * (x @ v)) @ d).astype(jnp.float32)))

    gradient = jax.grad(loss, (0, 1, 2, 3))
    rows = cutjax.explain(cutjax.fuse(gradient))(*args).rows
    assert any(row.epilogue is not None for row in rows)
    plain, fused = (jax.jit(f).lower(*args).compile().memory_analysis() for f in (gradient, cutjax.fuse(gradient)))
    assert fused.temp_size_in_bytes <= plain.temp_size_in_bytes


@pytest.mark.parametrize("wins", [False, True], ids=["priced", "several in one kernel"])
def test_products_of_one_operand(wins, monkeypatch):
    """Small integers, so exact: as XLA merges them, and as one kernel, beside a product of ours that gets a tail."""
    if wins:
        of_problem = price._of_problem
        monkeypatch.setattr(price, "_of_problem", lambda *args: of_problem(*args).of_xla(100.0, 1))
        monkeypatch.setattr(price, "GAIN", 0.0)
    random = np.random.default_rng(0)
    x, q, k, v = (
        jnp.asarray(random.integers(-2, 3, s), jnp.bfloat16) for s in ((16, 512), (512, 256), (512, 256), (512, 256))
    )

    def fn(x, q, k, v):
        return jax.lax.sort(x @ q), jax.lax.sort(x @ k), jax.lax.sort(x @ v), jax.nn.relu(cutjax.dot(x, v) + 1)

    fused = cutjax.fuse(fn)
    several = [report for report in cutjax.explain(fused)(x, q, k, v).fusion if report.products == 3]
    assert len(several) == (3 if wins else 0)
    for got, expected in zip(jax.jit(fused)(x, q, k, v), jax.jit(fn)(x, q, k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_experts_in_plain_jax():
    """Rows that plain code scatters are gathered: gradients are those of float32, and the same in each run."""
    tokens, k, experts, width = 512, 4, 8, 256
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (width, width), jnp.bfloat16)
    chosen = jax.lax.top_k(jax.random.normal(keys[2], (tokens, experts)), k)[1]
    scale = jax.random.uniform(keys[3], (tokens, k))

    def loss(x, w, scale):
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts).astype(jnp.int32)
        weights = jnp.stack([w / 16] * experts)
        out = jax.lax.ragged_dot(x[order // k], weights, sizes) * scale.reshape(-1)[order][:, None].astype(x.dtype)
        return (jnp.zeros_like(x).at[order // k].add(out).astype(jnp.float32) ** 2).mean()

    run = jax.jit(cutjax.fuse(jax.value_and_grad(loss, (0, 1, 2))))
    first, second = run(x, w, scale), run(x, w, scale)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(wide(x), wide(w), scale)
    for got, want in zip(jax.tree.leaves(first), jax.tree.leaves(expected), strict=True):
        got, want = (np.asarray(y).astype(np.float64) for y in (got, want))
        assert np.linalg.norm(got - want) <= 2 * TOLERANCE * np.linalg.norm(want)
