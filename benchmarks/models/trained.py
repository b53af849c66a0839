"""The functions of each model that programs.py times: first parameters and inputs, and a loss of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import gpt2, llama, signals, vision, vit
from benchmarks.models.ways import way


class Model(NamedTuple):
    """The functions of a program.

    Attributes:
      init: ``init(key)`` returns the parameters for "jax" and the inputs, to be jitted.
      loss: ``loss(way)`` returns the function of parameters and inputs that is differentiated, or that decodes.
      params_of: ``params_of(way, tree)`` returns the parameters for a way, or a tree of them, from those for "jax".
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[[Any], Callable[[Any, Any], jax.Array]]
    params_of: Callable[[Any, Any], Any] = lambda way, params: params


def block(batch: int, length: int, **sizes: int) -> Model:
    """Returns a block, whose result is compared with random numbers."""

    def module(way: Any) -> Any:
        return llama.Block(llama.Sizes(**sizes), way)

    def init(key: jax.Array) -> tuple[Any, Any]:
        keys = jax.random.split(key, 3)
        x, y = (jax.random.normal(k, (batch, length, sizes["width"]), jnp.bfloat16) for k in keys[:2])
        return _init(module, keys[2], x[:1, :8]), (x, y)

    def loss(way: Any) -> Callable[[Any, Any], jax.Array]:
        def squared(params: Any, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, y = inputs
            out, _ = module(way).apply(params, x)
            return jnp.square(out.astype(jnp.float32) - y.astype(jnp.float32)).mean()

        return squared

    return Model(init, loss)


def gpt2_model(batch: int, length: int, **sizes: int) -> Model:
    """Returns GPT-2 with the loss of predicting random tokens."""

    def module(way: Any) -> Any:
        return gpt2.GPT2(gpt2.Sizes(**sizes), way)

    def init(key: jax.Array) -> tuple[Any, Any]:
        tokens = jax.random.randint(key, (batch, length + 1), 0, gpt2.Sizes(**sizes).vocabulary)
        return _init(module, key, tokens[:1, :8]), tokens

    def loss(way: Any) -> Callable[[Any, Any], jax.Array]:
        def cross_entropy(params: Any, tokens: jax.Array) -> jax.Array:
            logits = module(way).apply(params, tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        return cross_entropy

    return Model(init, loss, gpt2.params_of)


def vit_model(batch: int, side: int, **sizes: int) -> Model:
    """Returns a vision transformer."""
    of = vit.Sizes(**sizes)
    return _classifier(lambda way: vit.ViT(of, way), batch, side, of.classes)


def resnet_model(batch: int, side: int, **sizes: Any) -> Model:
    """Returns a ResNet of bottlenecks."""
    of = vision.Sizes(**sizes)
    return _classifier(lambda way: vision.ResNet(of, way), batch, side, of.classes)


def convnext_model(batch: int, side: int, **sizes: Any) -> Model:
    """Returns a ConvNeXt."""
    of = vision.Sizes(**sizes)
    return _classifier(lambda way: vision.ConvNeXt(of, way), batch, side, of.classes)


def efficientnet_model(batch: int, side: int, classes: int = 1000, **sizes: Any) -> Model:
    """Returns an EfficientNet; B0 without further sizes."""
    of = {"stages": vision.EFFICIENTNET_B0, "first": 32, "last": 1280, **sizes}
    return _classifier(lambda way: vision.EfficientNet(**of, classes=classes, way=way), batch, side, classes)


def _classifier(module: Callable[[Any], Any], batch: int, side: int, classes: int) -> Model:
    """Returns a model with the loss of classifying random images; norms take the statistics of the batch."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        images = jax.random.normal(key, (batch, side, side, 3), jnp.bfloat16)
        labels = jax.random.randint(key, (batch,), 0, classes)
        return {"params": _init(module, key, images[:1])["params"]}, (images, labels)

    def loss(way: Any) -> Callable[[Any, Any], jax.Array]:
        def cross_entropy(params: Any, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            images, labels = inputs
            logits, _ = module(way).apply(params, images, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

        return cross_entropy

    return Model(init, loss)


def hifigan_model(batch: int, frames: int, **sizes: Any) -> Model:
    """Returns HiFi-GAN's generator, whose signals are compared with random ones."""
    of = signals.Generator(**sizes)

    def module(way: Any) -> Any:
        return signals.HiFiGAN(of, way)

    def init(key: jax.Array) -> tuple[Any, Any]:
        x = jax.random.normal(key, (batch, frames, of.bands), jnp.bfloat16)
        y = jax.random.uniform(key, (batch, frames * math.prod(of.strides), 1), jnp.bfloat16, -1)
        return _init(module, key, x[:1, :8]), (x, y)

    def loss(way: Any) -> Callable[[Any, Any], jax.Array]:
        def distance(params: Any, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, y = inputs
            return jnp.abs(module(way).apply(params, x).astype(jnp.float32) - y).mean()

        return distance

    return Model(init, loss)


def unet3d_model(batch: int, side: int, widths: tuple[int, ...], classes: int = 3) -> Model:
    """Returns a 3-D U-Net with the loss of classifying the points of random volumes."""

    def module(way: Any) -> Any:
        return signals.UNet3D(widths, classes, way)

    def init(key: jax.Array) -> tuple[Any, Any]:
        volumes = jax.random.normal(key, (batch, side, side, side, 4), jnp.bfloat16)
        labels = jax.random.randint(key, (batch, side, side, side), 0, classes)
        least = 2 ** (len(widths) - 1)
        return _init(module, key, volumes[:1, :least, :least, :least]), (volumes, labels)

    def loss(way: Any) -> Callable[[Any, Any], jax.Array]:
        def cross_entropy(params: Any, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            volumes, labels = inputs
            logits = module(way).apply(params, volumes).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return cross_entropy

    return Model(init, loss)


def decoding(sequences: int, context: int, steps: int, layers: int, vocabulary: int, **sizes: int) -> Model:
    """Returns the decoding of the last positions of a context, one after the other, over full caches.

    The tokens are given, so that ways which round differently decode the same ones.
    """
    of = llama.Sizes(**sizes)

    def module(way: Any) -> Any:
        return llama.Stack(of, layers, vocabulary, way)

    def init(key: jax.Array) -> tuple[Any, Any]:
        keys = jax.random.split(key, 2 * layers + 1)
        shape = sequences, context, of.kv_heads, of.size
        cache = [jax.random.normal(k, shape, jnp.bfloat16) for k in keys[1:]]
        caches = list(zip(cache[::2], cache[1::2], strict=True))
        tokens = jax.random.randint(keys[0], (sequences, steps + 1), 0, vocabulary)
        few = [(k[:1], v[:1]) for k, v in caches]
        return _init(module, keys[0], tokens[:1, :1], few, jnp.int32(0)), (tokens, caches)

    def loss(way: Any) -> Callable[[Any, Any], jax.Array]:
        def decode(params: Any, inputs: tuple[jax.Array, Any]) -> jax.Array:
            tokens, caches = inputs

            def step(caches: Any, number: jax.Array) -> tuple[Any, jax.Array]:
                seen, wanted = (jax.lax.dynamic_slice_in_dim(tokens, number + i, 1, 1) for i in (0, 1))
                logits, caches = module(way).apply(params, seen, caches, context - steps + number)
                logits = logits.astype(jnp.float32)
                return caches, optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

            return jax.lax.scan(step, caches, jnp.arange(steps))[1].mean()

        return decode

    return Model(init, loss)


def _init(module: Callable[[Any], Any], key: jax.Array, *args: Any) -> Any:
    return module(way("jax")).init(key, *args)
