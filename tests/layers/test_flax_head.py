"""Head of both APIs: Flax's parameters and logits, and the loss of those."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from checks import close, normal
from flax import linen, nnx

import cutjax.flax.linen
import cutjax.flax.nnx

X, LABELS = normal(0, (2, 5, 8)), jnp.arange(10).reshape(2, 5)


def expected(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


@pytest.mark.parametrize("use_bias", [True, False])
def test_nnx(use_bias):
    layer, flaxs = (
        kind(8, 12, use_bias=use_bias, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
        for kind in (cutjax.flax.nnx.Head, nnx.Linear)
    )
    ours, theirs = (
        nnx.jit(nnx.value_and_grad(loss))(module)
        for module, loss in ((layer, lambda m: m(X, LABELS)), (flaxs, lambda m: expected(m(X))))
    )
    close(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    close(layer(X), flaxs(X))


@pytest.mark.parametrize("use_bias", [True, False])
def test_linen(use_bias):
    layer, flaxs = (
        kind(12, use_bias=use_bias, bias_init=linen.initializers.normal())
        for kind in (cutjax.flax.linen.Head, linen.Dense)
    )
    variables = flaxs.init(jax.random.key(0), X)
    close(layer.init(jax.random.key(0), X, LABELS), variables)
    ours, theirs = (
        jax.jit(jax.value_and_grad(loss))(variables)
        for loss in (lambda v: layer.apply(v, X, LABELS), lambda v: expected(flaxs.apply(v, X)))
    )
    close(ours, theirs)
    close(layer.apply(variables, X), flaxs.apply(variables, X))


def test_refused():
    with pytest.raises(ValueError, match=r"Head: .*leave activation"):
        cutjax.flax.nnx.Head(8, 12, activation=jax.nn.relu, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Head: .*leave activation"):
        cutjax.flax.linen.Head(12, activation=jax.nn.relu)
    with pytest.raises(TypeError, match="Head: options without labels: where"):
        cutjax.flax.linen.Head(12).init(jax.random.key(0), X, where=None)
