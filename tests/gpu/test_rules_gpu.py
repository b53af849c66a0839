"""Functions with derivatives of their own in kernels: values and derivatives are those of XLA's operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_rules import ELEMENTWISE, OTHERS

import cutjax

pytestmark = pytest.mark.gpu
CASES = {name: (fn, ()) for name, fn in ELEMENTWISE.items()} | OTHERS
M, N, K = 200, 264, 136  # of the operands of OTHERS there are (m, n) and (n,) ones: drawn here


def operand(x: jax.Array, seed: int) -> jax.Array:
    shape = {0: (), 1: (N,), 2: (M, N)}[x.ndim] if x.shape != (5,) else x.shape  # (5,): a history
    return x if x.ndim == 0 or x.shape == (5,) else jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name):
    fn, operands = CASES[name]
    x, w = (jax.random.randint(jax.random.key(i), s, -2, 3) for i, s in enumerate(((M, K), (K, N))))
    args = (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), *(operand(y, 2 + i) for i, y in enumerate(operands)))

    def loss(backend):
        def run(x, w, *operands):
            # The sums are exact integers; a half keeps them from where a rounding jumps.
            found = cutjax.gemm(
                x, w, epilogue=lambda v, *y: fn(0.37 * v, *y), operands=operands, out_dtype="float32", backend=backend
            )
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(found))

        return jax.jit(jax.value_and_grad(run, range(len(args))))

    assert loss("cuda").lower(*args).as_text().count("cutjax_launch") >= 3  # the product and two gradients
    got, wanted = loss("cuda")(*args), loss("xla")(*args)
    for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        y, z = np.asarray(y, np.float32), np.asarray(z, np.float32)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(z))  # the loss of log(0)
        y, z = np.nan_to_num(y), np.nan_to_num(z)
        # Cotangents are rounded to bfloat16 in both; what a rounding turns over there is 2^-8 of one element.
        assert np.abs(y - z).max() <= 2**-6 * np.abs(z).max() + 1e-3, (np.abs(y - z).max(), np.abs(z).max())
