"""Tracing with cutjax.fuse over tracing without it, in turns: ``python -m benchmarks trace_overhead [--layers N]``.

The program is a step of training of a plain transformer, each layer written out. CPU seconds, the least of each way:
other work on the machine only adds. Before, those of the first time, where each problem is priced. No device is needed;
prices are those of the device that programs are lowered for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import cutjax

WAYS = (None, "auto", "always")


def norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def layer(p, x):
    batch, positions, width = x.shape
    q, k, v = jnp.moveaxis((norm(x, p["scale"]) @ p["qkv"] + p["bias"]).reshape(batch, positions, 3, -1, 64), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 8
    scores = jnp.where(jnp.tril(jnp.ones((positions, positions), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
    x = x + mixed.reshape(batch, positions, width) @ p["out"]
    h = norm(x, p["scale"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def step(params, x):
    def loss(params):
        y = x
        for p in params:
            y = layer(p, y)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - (1e-3 * g.astype(jnp.float32)).astype(p.dtype), params, gradients), value


def arguments(layers: int, width: int = 1024):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    shapes = {"scale": (width,), "qkv": (width, 3 * width), "bias": (3 * width,), "out": (width, width)}
    shapes |= {"gate": (width, 4 * width), "up": (width, 4 * width), "down": (4 * width, width)}
    return [{name: array(*shape) for name, shape in shapes.items()} for _ in range(layers)], array(4, 512, width)


def seconds(way: str | None, args) -> float:
    """Traces a new function, of which jax remembers nothing."""

    def fn(*args):
        return step(*args)

    traced = jax.jit(fn if way is None else cutjax.fuse(fn, policy=way))
    start = time.process_time()
    traced.trace(*args)
    return time.process_time() - start


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks trace_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    args = arguments(options.layers)
    seconds(None, args)  # what jax itself does once
    first = {way: seconds(way, args) for way in WAYS}
    least = dict.fromkeys(WAYS, float("inf"))
    for _ in range(options.rounds):
        for way in WAYS:
            least[way] = min(least[way], seconds(way, args))
    for way in WAYS:
        print(f"{way or 'without':8} {first[way]:.3f} s at first, {least[way]:.3f} s  {least[way] / least[None]:.2f}")
    return 0
