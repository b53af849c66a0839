"""Kernels of small networks on a GPU: small integers to the bit, and random numbers beside float32."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, normal
from jax import lax

import cutjax
from cutjax.kernels.network.choose import resolve
from cutjax.kernels.network.config import Config
from cutjax.primitives import network

pytestmark = pytest.mark.gpu
X6, X9 = lax.DotAlgorithmPreset.BF16_BF16_F32_X6, lax.DotAlgorithmPreset.BF16_BF16_F32_X9
# The largest error over the largest value, by dtype and precision, of some layers: multiples of a rounding.
ERRORS = {("bfloat16", None): 4e-2, ("float16", None): 6e-3, ("float32", None): 8e-3}
ERRORS |= {("float32", X6): 2e-5, ("float32", X9): 2e-5}


def plain(x, ws, bs, f=jnp.tanh):
    for w, b in zip(ws[:-1], bs[:-1], strict=True):
        x = f(jnp.matmul(x, w, precision="highest") + b)
    return jnp.matmul(x, ws[-1], precision="highest") + bs[-1]


def on_kernels(precision=None, f=jnp.tanh):
    return lambda x, ws, bs: cutjax.fused_mlp(x, ws, bs, f, precision=precision, backend="cuda")


def gradients(u):
    """Of a sum of squares by the root of the rows: a mean's would be below what float16 holds with 11 bits."""
    return jax.grad(lambda x, *args: (u(x, *args).astype(jnp.float32) ** 2).sum() / x.shape[0] ** 0.5, (0, 1, 2))


def laplacian(u):
    def at(x, ws, bs):
        slope = jax.grad(lambda x: u(x, ws, bs)[0])
        return sum(jax.jvp(slope, (x,), (e,))[1][i] for i, e in enumerate(jnp.eye(x.size, dtype=x.dtype)))

    return jax.vmap(at, (0, None, None))


FORMS = {
    "result": lambda u: u,
    "tangents": lambda u: lambda *args: jax.jvp(u, args, args),
    "gradients": gradients,
    "laplacian": laplacian,
    "ensemble": lambda u: (
        lambda x, ws, bs: jax.vmap(gradients(u), (None, 0, 0))(
            x, *jax.tree.map(lambda y: jnp.stack([y, y / 2, -y]), (ws, bs))
        )
    ),
}


def close(found, wanted, error):
    def check(x, y):
        assert np.abs(np.asarray(x, np.float32) - y).max() <= error * np.abs(y).max()

    jax.tree.map(check, found, wanted)


@pytest.mark.parametrize("rows", [1, 100, 70_000])
@pytest.mark.parametrize(
    "widths", [(2, 16, 1), (3, 64, 64, 64, 1), (20, 128, 128, 24), (3, 128, 120, 128, 24), (3, 50, 33, 2)]
)
@pytest.mark.parametrize("dtype_precision", ERRORS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_random_numbers(form, dtype_precision, widths, rows):
    dtype, precision = dtype_precision
    if form == "laplacian" and (widths[0] > 3 or dtype != "float32"):
        pytest.skip("second derivatives of 16 bits are noise, of 20 inputs as many launches")
    ws = [normal(i, pair) / pair[0] ** 0.5 for i, pair in enumerate(itertools.pairwise(widths))]
    args = (normal(9, (rows, widths[0])), ws, [normal(10 + i, (n,)) / 4 for i, n in enumerate(widths[1:])])
    narrow = jax.tree.map(lambda x: jnp.asarray(x, dtype), args)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    wanted = jax.jit(FORMS[form](plain))(*wide)
    ours = FORMS[form](on_kernels(precision))
    found = jax.jit(ours)(*narrow)
    alone = all(row.kernel.startswith("network") for row in cutjax.explain(ours)(*narrow).rows)
    error = ERRORS[dtype_precision if alone else (dtype, None)]  # of what XLA multiplies, parts are one TF32 product
    close(found, wanted, error * (4 if form == "laplacian" else 1))
    again = jax.jit(ours)(*narrow)
    jax.tree.map(np.testing.assert_array_equal, found, again)  # sums are added in one order


PLANES = [
    Config(8, 2, planes=True),
    Config(16, 1, planes=True),
    Config(4, 1, planes=True, blocks=2),
]


@pytest.mark.parametrize("rows", [100, 70_000])
@pytest.mark.parametrize("widths", [(3, 64, 64, 64, 1), (20, 48, 32, 24), (3, 50, 33, 2)])
@pytest.mark.parametrize("config", PLANES, ids=lambda config: f"{config.warps}x{config.tiles}")
def test_planes(config, widths, rows, monkeypatch):
    """Gradients whose factors of outer products are in planes, and results whose rows come a tile ahead."""
    own = network.choose

    def chosen(problem):
        kernel = resolve(
            problem, config if problem.program.sums else dataclasses.replace(config, warps=4, tiles=2, planes=False)
        )
        assert not isinstance(kernel, tuple), kernel
        return dataclasses.replace(own(problem), resolved=kernel)

    monkeypatch.setattr(network, "choose", chosen)
    ws = [normal(i, pair) / pair[0] ** 0.5 for i, pair in enumerate(itertools.pairwise(widths))]
    args = (normal(9, (rows, widths[0])), ws, [normal(10 + i, (n,)) / 4 for i, n in enumerate(widths[1:])])
    narrow = jax.tree.map(lambda x: jnp.asarray(x, "bfloat16"), args)
    wanted = jax.jit(gradients(plain))(*jax.tree.map(lambda x: x.astype(jnp.float32), narrow))
    ours = gradients(on_kernels())
    found = jax.jit(lambda *args: ours(*args))(*narrow)
    close(found, wanted, ERRORS["bfloat16", None])
    again = jax.jit(lambda *args: ours(*args))(*narrow)
    jax.tree.map(np.testing.assert_array_equal, found, again)


@pytest.mark.parametrize("rows", [17, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_small_integers_are_exact(dtype, rows):
    """Squares of small sums: every number on the way is one of 8 bits, and sums of float32 are exact."""
    w0 = np.zeros((8, 32))
    w0[np.arange(32) % 8, np.arange(32)] = 1
    args = (integers(0, (rows, 8)), [w0, np.eye(32)[:, :16]], [np.ones(32), np.zeros(16)])
    x, ws, bs = jax.tree.map(lambda y: jnp.asarray(y, dtype), args)
    hidden = (np.asarray(x, np.float64) @ w0 + 1) ** 2
    found = jax.jit(on_kernels(f=lambda t: t * t))(x, ws, bs)
    np.testing.assert_array_equal(np.asarray(found, np.float64), hidden[:, :16])
    total = lambda *args: on_kernels(f=lambda t: t * t)(*args).astype(jnp.float32).sum()  # noqa: E731
    slope = jax.jit(jax.grad(total, 2))(x, ws, bs)
    wanted = np.where(np.arange(32) < 16, 2 * (np.asarray(x, np.float64) @ w0 + 1), 0).sum(0)
    np.testing.assert_array_equal(np.asarray(slope[0]), np.asarray(jnp.asarray(wanted, dtype)))
