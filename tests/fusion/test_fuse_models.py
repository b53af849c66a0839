"""Models that know nothing of this library, under cutjax.fuse: the same losses, and how many products are fused."""

from __future__ import annotations

import functools

import equinox
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import cutjax

STEPS = 20


def bert():
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return transformers.FlaxBertModel(config, input_shape=(1, 8), _do_init=False)


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    return transformers.FlaxGPT2LMHeadModel(config, input_shape=(1, 8), _do_init=False)


def of_transformers(make):
    model = make()
    params = jax.jit(model.init_weights, static_argnums=1)(jax.random.PRNGKey(0), (1, 8))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 8)))

    def loss(params, key):
        out = model(ids, params=params, dropout_rng=key, train=True)[0]
        return ((out - jnp.sin(jnp.arange(out.size).reshape(out.shape))) ** 2).mean()

    return loss, params


def nnx_attention():
    """A block of flax.nnx.MultiHeadAttention and an MLP."""

    class Block(flax.nnx.Module):
        def __init__(self, rngs):
            self.attention = flax.nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.up, self.down = flax.nnx.Linear(16, 32, rngs=rngs), flax.nnx.Linear(32, 16, rngs=rngs)
            self.norm = flax.nnx.LayerNorm(16, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.down(flax.nnx.gelu(self.up(x)))

    rngs = flax.nnx.Rngs(0)
    graph, params = flax.nnx.split(flax.nnx.List([Block(rngs)]))
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))

    def loss(params, key):
        y = functools.reduce(lambda y, block: block(y), flax.nnx.merge(graph, params), x)
        return ((y - jnp.cos(x)) ** 2).mean()

    return loss, params


def nnx_images():
    """Blocks like those of a ResNet, in training, ConvNeXt and a U-Net, over one another."""
    rngs = flax.nnx.Rngs(0)
    conv = functools.partial(flax.nnx.Conv, rngs=rngs)

    class Residual(flax.nnx.Module):
        def __init__(self):
            self.first, self.second = conv(8, 4, (1, 1), use_bias=False), conv(4, 8, (3, 3), use_bias=False)
            self.norms = flax.nnx.List([flax.nnx.BatchNorm(n, rngs=rngs) for n in (4, 8)])

        def __call__(self, x):
            y = flax.nnx.relu(self.norms[0](self.first(x)))
            return flax.nnx.relu(x + self.norms[1](self.second(y)))

    class Wide(flax.nnx.Module):
        def __init__(self):
            self.depthwise, self.norm = conv(8, 8, (5, 5), feature_group_count=8), flax.nnx.LayerNorm(8, rngs=rngs)
            self.up, self.down = flax.nnx.Linear(8, 16, rngs=rngs), flax.nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(flax.nnx.gelu(self.up(self.norm(self.depthwise(x)))))

    class Down(flax.nnx.Module):
        def __init__(self):
            self.norm, self.half = flax.nnx.GroupNorm(8, num_groups=2, rngs=rngs), conv(8, 8, (3, 3), strides=2)
            self.twice = flax.nnx.ConvTranspose(8, 8, (2, 2), strides=(2, 2), rngs=rngs)
            self.last = conv(16, 8, (3, 3))

        def __call__(self, x):
            y = self.twice(flax.nnx.silu(self.half(flax.nnx.silu(self.norm(x)))))
            return self.last(jnp.concatenate([x, y], -1))

    model = flax.nnx.List([Residual(), Wide(), Down()])
    graph, params, state = flax.nnx.split(model, flax.nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (2, 6, 6, 8))

    def loss(params, key):
        y = functools.reduce(lambda y, block: block(y), flax.nnx.merge(graph, params, jax.tree.map(jnp.copy, state)), x)
        return ((y - jnp.cos(x)) ** 2).mean()

    return loss, params


def equinox_models():
    """An MLP on the result of an attention, by vmap, as equinox has it."""
    keys = jax.random.split(jax.random.key(0), 3)
    models = equinox.nn.MultiheadAttention(2, 16, key=keys[0]), equinox.nn.MLP(16, 16, 32, 2, jax.nn.silu, key=keys[1])
    params, static = equinox.partition(models, equinox.is_inexact_array)
    x = jax.random.normal(keys[2], (8, 16))

    def loss(params, key):
        attention, mlp = equinox.combine(params, static)
        y = jax.vmap(mlp)(x + attention(x, x, x))
        return ((y - jnp.cos(x)) ** 2).mean()

    return loss, params


MODELS = {
    "bert": (functools.partial(of_transformers, bert), (18, 26)),
    "gpt2": (functools.partial(of_transformers, gpt2), (13, 21)),
    "nnx": (nnx_attention, (17, 24)),
    "images": (nnx_images, (20, 23)),
    "equinox": (equinox_models, (14, 24)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@jax.numpy_dtype_promotion("standard")
def test_losses_are_the_same(name):
    make, count = MODELS[name]
    loss, params = make()

    def step(params, key):
        value, gradients = jax.value_and_grad(loss)(params, key)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), value

    fused = cutjax.fuse(step, policy="always")
    reports = cutjax.explain(fused)(params, jax.random.key(0)).fusion
    assert (sum(report.runs == "fused" for report in reports), len(reports)) == count

    def train(step):
        return jax.lax.scan(step, params, jax.random.split(jax.random.key(2), STEPS))[1]

    expected = jax.jit(train, static_argnums=0)(step)
    assert expected[-1] < expected[0]
    # float32: other orders of sums, over 20 steps.
    np.testing.assert_allclose(jax.jit(train, static_argnums=0)(fused), expected, rtol=1e-4)
