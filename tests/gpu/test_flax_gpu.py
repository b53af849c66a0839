"""Layers of cutjax.flax on the device: Flax's own to the bit on integers, and to rounding on normal numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cutjax
import cutjax.flax.nnx as ours

pytestmark = pytest.mark.gpu

H = jnp.bfloat16
# Our layer and Flax's, and the shape of the inputs. Contractions are at most 64 long: sums of -2..2 are exact in bf16.
LAYERS = {
    "Linear": ("Linear", (64, 200), {}, (3, 88, 64)),
    "LinearGeneral": ("LinearGeneral", (64, (5, 40)), {}, (3, 88, 64)),
    "two axes": ("LinearGeneral", ((4, 16), 72), {"axis": (-2, -1)}, (3, 88, 4, 16)),
    "batch": ("LinearGeneral", (64, 72), {"batch_axis": {0: 3}}, (3, 88, 64)),
    "Conv": ("Conv", (16, 72, (3,)), {}, (3, 88, 16)),
    "ConvTranspose": ("ConvTranspose", (16, 72, (4,)), {"strides": (2,)}, (3, 44, 16)),
    "Einsum": ("Einsum", ("btd,dhk->bhtk", (64, 5, 40), (5, 40)), {}, (3, 88, 64)),
}


def integers(key, shape, dtype, **how):
    return jnp.asarray(np.random.default_rng(len(shape)).integers(-2, 3, shape), dtype)


def normal(key, shape, dtype, **how):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape) / 8, dtype)


def found(name, init, activation):
    """The result, the gradients and their counterparts: ours on kernels alone, Flax's in float32."""
    kind, args, kwargs, shape = LAYERS[name]
    x = init(None, shape, H)
    layers = [
        getattr(module, kind)(*args, dtype=dtype, rngs=nnx.Rngs(0), kernel_init=init, bias_init=init, **kwargs)
        for module, dtype in ((ours, H), (nnx, jnp.float32))
    ]
    layers[0].activation = activation

    def loss(state, x, graph, after):
        y = after(nnx.merge(graph, state)(x))
        return (y * integers(None, y.shape, y.dtype)).sum(dtype=jnp.float32), y

    for layer, after, backend in zip(layers, (lambda y: y, activation), ("cuda", "xla"), strict=True):
        graph, state = nnx.split(layer)
        state = jax.tree.map(lambda v: v.astype(H).astype(jnp.float32), state)
        run = jax.value_and_grad(lambda s, x, graph=graph, after=after: loss(s, x, graph, after), (0, 1), has_aux=True)
        with cutjax.use_backend(backend), jax.default_matmul_precision("default" if backend == "cuda" else "highest"):
            (_, y), grads = jax.jit(run)(state, x)
        yield [np.asarray(v, np.float64) for v in jax.tree.leaves((y, grads))]


@pytest.mark.parametrize("name", LAYERS)
def test_exact(name):
    got, expected = found(name, integers, jax.nn.relu)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, np.asarray(jnp.asarray(y, jnp.float32).astype(H), np.float64))


@pytest.mark.parametrize("name", LAYERS)
def test_gaussian(name):
    """Of the norm: two roundings to bfloat16, each 1.7e-3, in gradients; one in the result."""
    got, expected = found(name, normal, jax.nn.gelu)
    for x, y in zip(got, expected, strict=True):
        assert np.linalg.norm(x - y) <= 8e-3 * np.linalg.norm(y)


@pytest.mark.parametrize("kind", ["MLP", "GatedMLP", "MoE"])
def test_blocks(kind):
    """In bfloat16 on kernels, against the same block in float32 on XLA; the router is in float32 in both."""
    args = (64, 136, 8) if kind == "MoE" else (64, 136)
    blocks = [getattr(ours, kind)(*args, dtype=dtype, rngs=nnx.Rngs(0)) for dtype in (H, jnp.float32)]
    x, results = normal(None, (3, 88, 64), H), []
    for block, backend in zip(blocks, ("auto", "xla"), strict=True):
        graph, state = nnx.split(block)
        run = jax.grad(lambda s, x, graph=graph: (nnx.merge(graph, s)(x).astype(jnp.float32) ** 2).sum(), (0, 1))
        with cutjax.use_backend(backend), jax.default_matmul_precision("highest"):
            results.append([np.asarray(v, np.float64) for v in jax.tree.leaves(jax.jit(run)(state, x))])
    for x, y in zip(*results, strict=True):
        assert np.linalg.norm(x - y) <= 2e-2 * np.linalg.norm(y)
