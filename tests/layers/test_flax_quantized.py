"""Flax's layers whose kernels are quantized: what they compute is the layer of dequantized kernels, in one kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, normal
from flax import nnx

import cutjax
import cutjax.flax.linen
import cutjax.flax.nnx

RNGS = nnx.Rngs(0)
D, H = 32, 16
BLOCKS = {"columns": (-1, 1), "groups": (8, 1)}


def quantized(kernel, block):
    """A kernel with the axes of matrices last."""
    return cutjax.quantize(kernel, jnp.int4, block=block)


LINEN = {
    "Dense": (cutjax.flax.linen.Dense(H, activation=jnp.tanh), (4, D)),
    "general": (cutjax.flax.linen.DenseGeneral((4, 8), use_bias=True), (2, 4, D)),
    "Einsum": (cutjax.flax.linen.Einsum((D, H), "btd,df->bft", activation=jax.nn.relu, use_bias=False), (2, 4, D)),
    "GatedMLP": (cutjax.flax.linen.GatedMLP(H), (4, D)),
    "MoE": (cutjax.flax.linen.MoE(H, num_experts=4), (6, D)),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("name", LINEN)
def test_linen(name, block):
    layer, shape = LINEN[name]
    x = normal(0, shape)
    variables = layer.init(jax.random.key(0), x)

    def changed(make):
        def leaf(path, y):
            keys = [key.key for key in path]
            return make(y) if "kernel" in keys[-1] and "router" not in keys else y

        return jax.tree_util.tree_map_with_path(leaf, variables)

    block = (block[0], 1) if name != "general" else (1, block[0])
    narrow = changed(lambda y: quantized(y, block))
    wide = changed(lambda y: quantized(y, block).dequantize())
    close(layer.apply(narrow, x), layer.apply(wide, x), 1e-5)


NNX = {
    "Linear": (cutjax.flax.nnx.Linear(D, H, activation=jnp.tanh, rngs=RNGS), ("kernel",)),
    "no bias": (cutjax.flax.nnx.Linear(D, H, use_bias=False, rngs=RNGS), ("kernel",)),
    "GatedMLP": (cutjax.flax.nnx.GatedMLP(D, H, rngs=RNGS), ("gate.kernel", "up.kernel", "down.kernel")),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx(name):
    """A variable takes a quantized kernel; gradients of the others go past it."""
    layer, names = NNX[name]
    x = normal(0, (4, D))

    def changed(make):
        copy = nnx.clone(layer)
        for of in names:
            *owner, last = of.split(".")
            module = getattr(copy, owner[0]) if owner else copy
            setattr(module, last, nnx.Param(make(quantized(getattr(module, last)[...], (8, 1)))))
        return copy

    narrow, wide = changed(lambda q: q), changed(lambda q: q.dequantize())
    close(narrow(x), wide(x), 1e-5)
    gradients = [jax.grad(lambda x, layer=layer: (layer(x) ** 2).sum())(x) for layer in (narrow, wide)]
    close(*gradients, 1e-5)


def test_layers_and_experts_are_sliced():
    q = cutjax.quantize(normal(0, (3, 2, D, H)), jnp.int8, block=(8, 1))
    close(q[1].dequantize(), q.dequantize()[1])
    close(q[1:, 0].dequantize(), q.dequantize()[1:, 0])
    shared = cutjax.Quantized(q.values, q.scale[:1])
    assert (shared[2, 1].scale == q.scale[0, 1]).all()
    assert q[...] is q
    assert (q.shape, q.ndim) == (np.shape(q.values), 4)
    with pytest.raises(IndexError, match="axes before the last two"):
        q[0, 0, 0]
