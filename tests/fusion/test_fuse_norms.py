"""Norms inside cutjax.fuse: multiplied by the factor of a row before that of a column."""

from __future__ import annotations

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, scaled
from flax import linen as nn

import cutjax
from cutjax.fusion.norms import reordered

pytestmark = pytest.mark.versions

BF16, F32 = jnp.bfloat16, jnp.float32
X, W = scaled(0, (16, 1, 64), BF16), scaled(1, (64, 24), BF16)


def normalized(x, scale, both=False):
    """As Flax has it; with another result of both factors."""
    wide = x.astype(F32)
    factors = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale.astype(F32)
    y = wide * factors
    return (y, factors) if both else y


def products(fn, *args):
    """The shapes that each product of factors reads, in order."""
    jaxpr = reordered(jax.make_jaxpr(fn)(*args)).jaxpr
    made = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns}

    def name(x):
        eqn = made.get(x)
        while eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "reshape", "convert_element_type"):
            x, eqn = eqn.invars[0], made.get(eqn.invars[0])
        return "" if eqn is None else eqn.primitive.name

    return [tuple(map(name, eqn.invars)) for eqn in jaxpr.eqns if eqn.primitive.name == "mul"]


def test_rows_first():
    scale = scaled(2, (64,), BF16)
    assert ("rsqrt", "") in products(normalized, X, scale)  # dead: its only reader is gone
    assert products(normalized, X, scale)[-2:] == [("", "rsqrt"), ("mul", "")]
    got = jax.jit(jax.extend.core.jaxpr_as_fun(reordered(jax.make_jaxpr(normalized)(X, scale))))(X, scale)[0]
    wide, by = np.asarray(X, np.float64), np.asarray(scale, np.float64)
    np.testing.assert_allclose(got, wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * by, rtol=1e-5)


def test_what_stays():
    """Where both factors are read together elsewhere, norms whose factors lie otherwise, float32, and a residual."""
    scale = scaled(2, (64,), BF16)
    functions = [
        (lambda x, s: normalized(x, s, both=True), X, scale),
        (lambda x, s: x * (jax.lax.rsqrt((x * x).mean((0, 1))) * s), X.astype(F32), scale.astype(F32)),
        (lambda x, s: x * (jnp.sqrt((x * x).mean(-1, keepdims=True)) * s), X.astype(F32), scale.astype(F32)),
        (normalized, X.astype(F32), scale),
        (lambda x, s: normalized(x + x, s), X, scale),
    ]
    for fn, *args in functions:
        jaxpr = jax.make_jaxpr(fn)(*args)
        assert str(reordered(jaxpr)) == str(jaxpr)


@pytest.mark.parametrize("module", [nn.RMSNorm, nn.LayerNorm])
@jax.numpy_dtype_promotion("standard")
def test_layers(module):
    norm = module(dtype=BF16)
    params = norm.init(jax.random.key(0), X)

    def layer(params, x, w):
        return norm.apply(params, x) @ w

    close(cutjax.fuse(layer)(params, X, W), layer(params, X, W), 2**-7)
    grads = (jax.grad(lambda *args, f=f: (f(*args).astype(F32) ** 2).sum()) for f in (cutjax.fuse(layer), layer))
    for got, want in zip(*(jax.tree.leaves(grad(params, X, W)) for grad in grads), strict=True):
        close(got, want, 2**-5)
