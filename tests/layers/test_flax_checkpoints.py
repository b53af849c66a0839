"""Orbax round trips: a checkpoint of one of Flax's layers loads in ours, and one of ours in Flax's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from checks import close, normal, same
from flax import linen as nn
from flax import nnx

import cutjax.flax.linen
import cutjax.flax.nnx

INITS = {"bias_init": nn.initializers.normal()}


class Block(nnx.Module):
    """Two layers of a transformer's block by the names they have in a program."""

    def __init__(self, layers, rngs):
        self.heads = layers.LinearGeneral(8, (4, 2), rngs=rngs, **INITS)
        self.out = layers.LinearGeneral((4, 2), 8, axis=(-2, -1), rngs=rngs, **INITS)
        self.mix = layers.Einsum("td,de->te", (8, 8), (8,), rngs=rngs, **INITS)
        self.last = layers.Linear(8, 5, rngs=rngs, **INITS)

    def __call__(self, x):
        return self.last(self.mix(self.out(self.heads(x))))


class Convolutions(nnx.Module):
    """Down and up again, of groups."""

    def __init__(self, layers, rngs):
        self.down = layers.Conv(8, 4, (3,), strides=2, feature_group_count=2, rngs=rngs, **INITS)
        self.up = layers.ConvTranspose(4, 8, (4,), (2,), transpose_kernel=True, rngs=rngs, **INITS)

    def __call__(self, x):
        return self.up(self.down(x))


class FeedForward(nnx.Module):
    """A gated block of Flax's own layers."""

    def __init__(self, rngs):
        self.gate, self.up = (nnx.Linear(8, 16, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


PAIRS = {
    "layers": (lambda rngs: Block(cutjax.flax.nnx, rngs), lambda rngs: Block(nnx, rngs)),
    "convolutions": (
        lambda rngs: Convolutions(cutjax.flax.nnx, rngs),
        lambda rngs: Convolutions(nnx, rngs),
    ),
    "gated": (lambda rngs: cutjax.flax.nnx.GatedMLP(8, 16, rngs=rngs), FeedForward),
    "mlp": (lambda rngs: cutjax.flax.nnx.MLP(8, 16, rngs=rngs, **INITS),) * 2,
    "moe": (lambda rngs: cutjax.flax.nnx.MoE(8, 16, 4, use_selection_bias=True, rngs=rngs),) * 2,
}


def both_ways(pairs):
    """A round trip for each pair and direction; one of a layer with itself."""
    ways = [(name, back) for name, (a, b) in pairs.items() for back in (False, True) if a is not b or not back]
    return pytest.mark.parametrize(("name", "back"), ways, ids=[name + " back" * back for name, back in ways])


def round_trip(path, tree, abstract):
    """The tree from disk, as a program that knows its structure alone reads it."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, abstract)


@both_ways(PAIRS)
def test_nnx(name, back, tmp_path):
    made, read = PAIRS[name][::-1] if back else PAIRS[name]
    saved, x = nnx.jit(lambda: made(nnx.Rngs(0)))(), normal(0, (3, 8))
    graph, abstract = nnx.split(nnx.eval_shape(lambda: read(nnx.Rngs(1))))
    restored = round_trip(tmp_path / "checkpoint", nnx.state(saved), abstract)
    assert [path for path, _ in nnx.to_flat_state(restored)] == [
        path for path, _ in nnx.to_flat_state(nnx.state(saved))
    ]
    same(*map(jax.tree.leaves, (restored, nnx.state(saved))))
    run = nnx.jit(lambda model, x: model(x))
    close(run(nnx.merge(graph, restored), x), run(saved, x))


class LinenBlock(nn.Module):
    """The block of above in linen."""

    layers: object

    @nn.compact
    def __call__(self, x):
        x = self.layers.DenseGeneral((4, 2), name="heads", **INITS)(x)
        x = self.layers.DenseGeneral(8, axis=(-2, -1), name="out", **INITS)(x)
        x = self.layers.Einsum((8, 8), "td,de->te", name="mix", **INITS)(x)
        return self.layers.Dense(5, name="last", **INITS)(x)


class LinenConvolutions(nn.Module):
    """The convolutions of above in linen."""

    layers: object

    @nn.compact
    def __call__(self, x):
        x = self.layers.Conv(4, (3,), strides=2, feature_group_count=2, name="down", **INITS)(x)
        return self.layers.ConvTranspose(8, (4,), (2,), transpose_kernel=True, name="up", **INITS)(x)


class LinenFeedForward(nn.Module):
    """A gated block of Flax's own layers."""

    @nn.compact
    def __call__(self, x):
        gate, up, down = (nn.Dense(n, False, name=name) for n, name in ((16, "gate"), (16, "up"), (8, "down")))
        return down(jax.nn.silu(gate(x)) * up(x))


LINEN = {
    "layers": (LinenBlock(cutjax.flax.linen), LinenBlock(nn)),
    "convolutions": (LinenConvolutions(cutjax.flax.linen), LinenConvolutions(nn)),
    "gated": (cutjax.flax.linen.GatedMLP(16), LinenFeedForward()),
    "mlp": (cutjax.flax.linen.MLP(16, **INITS),) * 2,
    "moe": (cutjax.flax.linen.MoE(16, 4, use_selection_bias=True),) * 2,
}


@both_ways(LINEN)
def test_linen(name, back, tmp_path):
    made, read = LINEN[name][::-1] if back else LINEN[name]
    x = normal(0, (3, 8))
    saved = jax.jit(made.init)(jax.random.key(0), x)
    abstract = jax.eval_shape(read.init, jax.random.key(1), jax.ShapeDtypeStruct(x.shape, jnp.float32))
    restored = round_trip(tmp_path / "checkpoint", saved, abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    same(restored, saved)
    close(jax.jit(read.apply)(restored, x), jax.jit(made.apply)(saved, x))
