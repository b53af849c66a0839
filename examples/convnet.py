"""Train a small ConvNeXt in flax.nnx on plain JAX, the drop-ins, cutjax.fuse or cutjax.flax, by one switch.

    python examples/convnet.py [--with jax|dropin|fuse|flax|all] [--config cpu|gpu] [--steps N]

Images are random: a pattern for each class, and noise. With several ways, or "all", each trains the same parameters on
the same batches; the program prints a row for each, and fails if the losses part.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cutjax

WAYS = ("jax", "dropin", "fuse", "flax")
# Of the first 10 losses, by which the ways differ on a CPU by at most 1e-6 in f32 and 4e-3 in bf16.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes of a model and of its training; weights are f32, products are computed in `dtype`."""

    widths: tuple[int, ...]
    depth: int
    side: int
    batch: int
    steps: int
    dtype: str
    classes: int = 10
    rate: float = 1e-3


CONFIGS = {
    "cpu": Setup((16, 32), 1, 16, 16, 60, "float32"),
    "gpu": Setup((96, 192, 384, 768), 3, 224, 128, 200, "bfloat16"),
}


def activated(layer: type) -> Any:
    """Returns one of Flax's layers with an activation after it, as the layers of cutjax.flax have."""

    class Activated(layer):
        def __init__(self, *args: Any, activation: Callable | None = None, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.activation = activation

        def __call__(self, x: Array) -> Array:
            y = super().__call__(x)
            return y if self.activation is None else self.activation(y)

    return Activated


def layers(way: str) -> tuple[Any, Any]:
    """Returns the constructors of linear layers and convolutions."""
    linear, conv = activated(nnx.Linear), activated(nnx.Conv)
    if way == "dropin":
        linear = functools.partial(linear, dot_general=cutjax.dot_general)
        conv = functools.partial(conv, conv_general_dilated=cutjax.conv_general_dilated)
    if way == "flax":
        from cutjax.flax import nnx as ours

        return ours.Linear, ours.Conv
    return linear, conv


class Block(nnx.Module):
    """Each channel by itself in 7x7, then an MLP of each pixel, with a residual around them."""

    def __init__(self, width: int, linear: Callable, conv: Callable, make: dict[str, Any]):
        self.depthwise = conv(width, width, (7, 7), feature_group_count=width, **make)
        self.norm = nnx.LayerNorm(width, **make)
        self.up = linear(width, 4 * width, activation=jax.nn.gelu, **make)
        self.down = linear(4 * width, width, **make)

    def __call__(self, x: Array) -> Array:
        return x + self.down(self.up(self.norm(self.depthwise(x))))


class ConvNet(nnx.Module):
    """Images ``[batch, side, side, 3]`` -> f32 logits ``[batch, classes]``."""

    def __init__(self, setup: Setup, way: str, rngs: nnx.Rngs):
        linear, conv = layers(way)
        make, cin, steps = {"dtype": jnp.dtype(setup.dtype), "rngs": rngs}, 3, []
        for i, width in enumerate(setup.widths):
            size = 2 if i else 4  # a patch as large as its stride
            steps.append(conv(cin, width, (size, size), strides=size, padding="VALID", **make))
            steps += [Block(width, linear, conv, make) for _ in range(setup.depth)]
            cin = width
        self.steps, self.norm = nnx.List(steps), nnx.LayerNorm(cin, **make)
        self.head = linear(cin, setup.classes, **make)

    def __call__(self, x: Array) -> Array:
        for step in self.steps:
            x = step(x)
        return self.head(self.norm(x.mean((1, 2)))).astype(jnp.float32)


def batches(setup: Setup) -> Iterator[tuple[Array, Array]]:
    """Yields images and labels, the same ones each time that it is called."""
    random = np.random.default_rng(0)
    patterns = random.standard_normal((setup.classes, setup.side, setup.side, 3), np.float32)
    while True:
        labels = random.integers(0, setup.classes, setup.batch)
        noise = random.standard_normal((setup.batch, *patterns.shape[1:]), np.float32)
        yield jnp.asarray(patterns[labels] + noise), jnp.asarray(labels)


def make_step(setup: Setup, way: str) -> tuple[Any, Callable]:
    """Returns the first state, and the jitted step ``(state, images, labels) -> (state, loss)``."""
    graph, params = nnx.split(ConvNet(setup, way, nnx.Rngs(0)))
    optimizer = optax.adamw(setup.rate)

    def loss(params: Any, images: Array, labels: Array) -> Array:
        logits = nnx.merge(graph, params)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    gradient = jax.value_and_grad(loss)
    if way == "fuse":
        gradient = cutjax.fuse(gradient)  # the line that fuses

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, images: Array, labels: Array) -> tuple[Any, Array]:
        params, moments = state
        value, grads = gradient(params, images, labels)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return (params, optimizer.init(params)), step


def train(setup: Setup, way: str) -> tuple[list[float], float]:
    """Returns the losses of the steps, and images a second without the first step, in which all is compiled."""
    state, step = make_step(setup, way)
    losses, start = [], time.perf_counter()
    for number, (images, labels) in zip(range(setup.steps), batches(setup), strict=False):
        state, loss = step(state, images, labels)
        losses.append(loss)
        if number == 0:
            loss.block_until_ready()
            start = time.perf_counter()
    found = [float(loss) for loss in losses]
    return found, (setup.steps - 1) * setup.batch / (time.perf_counter() - start)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """The command line; returns the losses by way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--with", dest="ways", default="jax", help=f"some of {', '.join(WAYS)}, by commas, or all")
    parser.add_argument("--config", choices=CONFIGS, help="sizes (default: what fits the device)")
    parser.add_argument("--steps", type=int, help="how many")
    args = parser.parse_args(argv)
    ways = WAYS if args.ways == "all" else tuple(args.ways.split(","))
    if unknown := set(ways) - set(WAYS):
        parser.error(f"unknown way {sorted(unknown)}, expected some of {WAYS} or all")
    setup = CONFIGS[args.config or ("gpu" if jax.default_backend() == "gpu" else "cpu")]
    setup = dataclasses.replace(setup, steps=max(2, args.steps or setup.steps))

    losses: dict[str, list[float]] = {}
    for way in ways:
        losses[way], rate = train(setup, way)
        apart = float(np.abs(np.subtract(losses[way], losses[ways[0]]))[:10].max())
        print(f"{way:>7}: loss {losses[way][0]:.4f} to {losses[way][-1]:.4f}, {rate:,.0f} images/s, apart {apart:.1e}")
        if not apart <= TOLERANCES[setup.dtype]:  # a NaN fails too
            sys.exit(f"FAILED: the losses of {way} differ from those of {ways[0]} by more than rounding explains")
    return losses


if __name__ == "__main__":
    main()
