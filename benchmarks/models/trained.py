"""The functions of each model that programs.py times: first parameters and inputs, and a loss of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import cutjax
from benchmarks.models import classifiers, generators, gpt2, llama, vit
from benchmarks.models.layers import Maker
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
    """Returns a vision transformer with the loss of classifying random images."""

    def module(way: Any) -> Any:
        return vit.ViT(vit.Sizes(**sizes), way)

    def init(key: jax.Array) -> tuple[Any, Any]:
        images = jax.random.normal(key, (batch, side, side, 3), jnp.bfloat16)
        labels = jax.random.randint(key, (batch,), 0, vit.Sizes(**sizes).classes)
        return _init(module, key, images[:1]), (images, labels)

    def loss(way: Any) -> Callable[[Any, Any], jax.Array]:
        def cross_entropy(params: Any, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            images, labels = inputs
            logits = module(way).apply(params, images).astype(jnp.float32)
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

    return Model(init, loss, served)


GROUP = 128  # of k, whose weights of 4 bits share a scale


def served(way: Any, params: Any) -> Any:
    """Returns the parameters of a way that decodes: of "int4" the kernels are quantized, the head's too."""

    def of(path: Any, w: jax.Array) -> Any:
        if path[-1].key != "kernel":
            return w
        axes = 2 if path[-2].key == "out" else 1  # those of k: heads and their features, or features
        k, n = w.shape[:axes], w.shape[axes:]
        group = math.gcd(GROUP, k[-1])
        flat = w.reshape(math.prod(k), math.prod(n))
        q = cutjax.quantize(flat, jnp.int4, block=(group, 1), scale_dtype=jnp.bfloat16)
        return cutjax.Quantized(q.values.reshape(w.shape), q.scale.reshape(*k[:-1], k[-1] // group, *n))

    return jax.jit(functools.partial(jax.tree_util.tree_map_with_path, of))(params) if way.name == "int4" else params


def classifier(kind: str, batch: int, side: int, **sizes: Any) -> Model:
    """Returns a model of classifiers.py with the loss of classifying random images."""

    def inputs(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        images = jax.random.normal(key, (batch, side, side, 3), jnp.bfloat16)
        return images, jax.random.randint(key, (batch,), 0, sizes.get("classes", 1000))

    return _of_nnx(lambda make: getattr(classifiers, kind)(make, **sizes), 2, inputs, _cross_entropy)


def vocoder(batch: int, frames: int, **sizes: Any) -> Model:
    """Returns HiFi-GAN's generator with its distance from random samples."""
    bands, rate = sizes.get("bands", 80), math.prod(sizes.get("rates", (8, 8, 2, 2)))

    def inputs(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        spectra = jax.random.normal(key, (batch, frames, bands), jnp.bfloat16)
        return spectra, jax.random.uniform(key, (batch, frames * rate), jnp.float32, -1, 1)

    def loss(model: Any, given: Any) -> jax.Array:
        spectra, samples = given
        return jnp.abs(model(spectra).astype(jnp.float32) - samples).mean()

    return _of_nnx(lambda make: generators.HiFiGAN(make, **sizes), 1, inputs, loss)


def diffusion(batch: int, side: int, **sizes: Any) -> Model:
    """Returns a diffusion U-Net with its squared distance from random noise."""

    def inputs(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys = jax.random.split(key)
        latents, noise = (jax.random.normal(k, (batch, side, side, 4), jnp.bfloat16) for k in keys)
        return latents, jax.random.uniform(key, (batch,), jnp.float32, 0, 1000), noise

    def loss(model: Any, given: Any) -> jax.Array:
        latents, times, noise = given
        return jnp.square(model(latents, times).astype(jnp.float32) - noise.astype(jnp.float32)).mean()

    return _of_nnx(lambda make: generators.DiffusionUNet(make, **sizes), 2, inputs, loss)


def segmenter(batch: int, side: int, **sizes: Any) -> Model:
    """Returns a 3-D U-Net with the loss of classifying random voxels."""

    def inputs(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        volumes = jax.random.normal(key, (batch, side, side, side, 1), jnp.bfloat16)
        return volumes, jax.random.randint(key, volumes.shape[:-1], 0, 3)

    return _of_nnx(lambda make: generators.UNet3D(make, **sizes), 3, inputs, _cross_entropy)


def _cross_entropy(model: Any, given: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = given
    return optax.softmax_cross_entropy_with_integer_labels(model(x).astype(jnp.float32), labels).mean()


def _of_nnx(
    build: Callable[[Maker], nnx.Module],
    rank: int,
    inputs: Callable[[jax.Array], Any],
    loss_of: Callable[[Any, Any], jax.Array],
) -> Model:
    """Returns a model of NNX. The running averages of its norms are not kept from step to step."""

    def built(found: Any, key: jax.Array) -> nnx.Module:
        return build(Maker(found.layers, nnx.Rngs(key), rank, found.dtype))

    def init(key: jax.Array) -> tuple[Any, Any]:
        of_params, of_inputs = jax.random.split(key)
        return nnx.state(built(way("jax"), of_params), nnx.Param), inputs(of_inputs)

    def loss(found: Any) -> Callable[[Any, Any], jax.Array]:
        abstract = nnx.eval_shape(lambda: built(found, jax.random.key(0)))
        graph, _, averages = nnx.split(abstract, nnx.Param, ...)

        def value(params: Any, given: Any) -> jax.Array:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), averages)
            return loss_of(nnx.merge(graph, params, zeros), given)

        return value

    return Model(init, loss)


def _init(module: Callable[[Any], Any], key: jax.Array, *args: Any) -> Any:
    return module(way("jax")).init(key, *args)
