"""cutjax.checkpoint_policies: what is saved is not multiplied again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from identities import OF_OURS
from jax.extend import core

import cutjax
from cutjax.binding.rules import live

pytestmark = pytest.mark.versions

OURS, JAXS = cutjax.checkpoint_policies, jax.checkpoint_policies
NAMES = ("dots_saveable", "dots_with_no_batch_dims_saveable")
X, W = jnp.ones((16, 16)), jnp.ones((16, 16))
SIZES = jnp.array([8, 0, 4, 4], jnp.int32)
G = jnp.ones((4, 16, 16))


def products(fn, *args) -> int:
    """How many products a call makes, ours and XLA's."""

    def count(jaxpr):
        eqns = jaxpr.eqns
        own = sum(eqn.primitive.name in ("dot_general", *OF_OURS) for eqn in eqns)
        return own + sum(count(sub) for eqn in eqns for sub in core.jaxprs_in_params(eqn.params))

    jitted = jax.jit(fn).trace(*args)
    return count(live(getattr(jitted.jaxpr, "jaxpr", jitted.jaxpr)))


def two_layers(product):
    return lambda x: jnp.sin(product(jnp.sin(product(x)))).sum()


def gradient(f, policy):
    return jax.value_and_grad(jax.checkpoint(f, policy=policy))


PRODUCTS = {
    "plain": (lambda x: cutjax.gemm(x, W), lambda x: jnp.matmul(x, W), X),
    "shared": (lambda x: cutjax.gemm(x, W), lambda x: jnp.matmul(x, W), jnp.ones((3, 16, 16))),
    "batched": (lambda x: cutjax.gemm(x, x), lambda x: jnp.matmul(x, x), jnp.ones((3, 16, 16))),
    "vmap": (jax.vmap(lambda x: cutjax.gemm(x, x)), jax.vmap(lambda x: jnp.matmul(x, x)), jnp.ones((3, 16, 16))),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", PRODUCTS)
def test_as_jax_does_with_its_own(kind, name):
    ours, jaxs, x = PRODUCTS[kind]
    expected = products(gradient(two_layers(jaxs), getattr(JAXS, name)), x)
    assert products(gradient(two_layers(ours), getattr(OURS, name)), x) == expected
    assert products(gradient(two_layers(jaxs), getattr(OURS, name)), x) == expected


LAYERS = {
    "epilogue": lambda x: cutjax.gemm(x, W, epilogue=jnp.tanh),
    "mlp": lambda x: cutjax.mlp(x, W, W),
    "grouped_gemm": lambda x: cutjax.grouped_gemm(x, G, SIZES),
    "grouped, epilogue": lambda x: cutjax.grouped_gemm(x, G, SIZES, epilogue=jnp.tanh),
    "grouped_outer": lambda x: cutjax.grouped_outer(x, x, SIZES)[0],
    "ragged_dot": lambda x: cutjax.ragged_dot(x, G, SIZES),
    "moe": lambda x: cutjax.moe(x, x[:, :4], G, G, G, 2),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_is_multiplied_again(kind, name):
    f = two_layers(LAYERS[kind])
    least = products(jax.value_and_grad(f), X)
    assert products(gradient(f, getattr(OURS, name)), X) == least
    assert products(gradient(f, getattr(JAXS, name)), X) > least  # which is why there are ours


def test_batches_of_grouped_products():
    def batched(x):
        return jax.vmap(lambda x, w: cutjax.grouped_gemm(x, w, SIZES))(x, jnp.stack([G, G, G]))

    f, x = two_layers(batched), jnp.ones((3, 16, 16))
    least = products(jax.value_and_grad(f), x)
    assert products(gradient(f, OURS.dots_saveable), x) == least
    assert products(gradient(f, OURS.dots_with_no_batch_dims_saveable), x) > least
