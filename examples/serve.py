"""Write text from a checkpoint of transformer.py: batched decoding with a cache of keys and values, few tokens a step.

    python examples/serve.py FOLDER [--with jax|dropin|fuse|flax] [--weights int4] [--sequences 16] [--tokens N]

The prompt is read in one pass, which fills the cache. Then each step multiplies one token of every sequence, so the
products have as many rows as there are sequences, and the time is that of reading the weights. Which way trained the
checkpoint does not matter: the parameters are the same in all. With --weights the layers of `cutjax.flax` multiply by
kernels of 4, 8 or 16 bits; serve_quantized.py reads those that others have quantized.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import bytes_of
from data import decode, encode
from flax import nnx
from model import Setup, build
from transformer import Checkpoints, fresh_state
from ways import WAYS, way

import cutjax

# Of one length: the sequences of a batch move on together.
PROMPTS = ("JULIET:\nO", "ROMEO:\nMy", "Nurse:\nI ", "TYBALT:\nI")
# The dtypes of values and scales, and how many neighbours along k share a scale; None is all of them.
WEIGHTS = {
    "bf16": None,
    "int8": ("int8", "float32", None),
    "int4": ("int4", "bfloat16", 128),
    "mxfp4": ("float4_e2m1fn", "float8_e8m0fnu", 32),
    "fp8": ("float8_e4m3fn", "float32", None),
}


def narrowed(params: nnx.State, weights: str) -> nnx.State:
    """Returns the parameters with the kernels of linear layers and of experts quantized, or in bf16; routers stay."""

    def kernel(path: tuple, w: jax.Array):
        if "kernel" not in path[-1] or "router" in path:
            return w
        if WEIGHTS[weights] is None:
            return w.astype(jnp.bfloat16)
        dtype, scale_dtype, group = WEIGHTS[weights]
        if path[-1] != "kernel":  # [experts, k, n]
            block = -1 if group is None else math.gcd(group, w.shape[1])
            return cutjax.quantize(w, dtype, block=(block, 1), scale_dtype=scale_dtype)
        axes = 2 if path[-2] == "out" else 1  # those of k: heads and their features, or features; the others are n's
        k, n = w.shape[:axes], w.shape[axes:]
        block = math.prod(k) if group is None else math.gcd(group, k[-1])
        q = cutjax.quantize(w.reshape(math.prod(k), -1), dtype, block=(block, 1), scale_dtype=scale_dtype)
        groups = (1,) * axes if group is None else (*k[:-1], k[-1] // block)
        return cutjax.Quantized(
            q.values.reshape(w.shape), q.scale.reshape(*groups, *n).astype(jnp.float32)
        )  # as kernels read it

    return nnx.from_flat_state(
        [(path, leaf.replace(kernel(path, leaf[...]))) for path, leaf in nnx.to_flat_state(params)]
    )


def make_writer(setup: Setup, name: str, count: int, temperature: float) -> Callable:
    """Returns the jitted function ``(params, prompts [sequences, time], key) -> tokens [sequences, count]``.

    A temperature of 0 takes the likeliest token.
    """
    graph = build(setup, name)

    def choose(logits, key):
        if temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    def write(params, prompts, key):
        model = nnx.merge(graph, params)
        sequences, start = prompts.shape
        blank = jnp.zeros((sequences, start + count, setup.kv_heads, setup.size), setup.dtype)
        logits, _, cache = model(prompts, [(blank, blank)] * setup.layers)

        def step(carry, number):
            cache, token = carry
            logits, _, cache = nnx.merge(graph, params)(token[:, None], cache, start + number)
            return (cache, choose(logits[:, -1], jax.random.fold_in(key, number + 1))), token

        first = choose(logits[:, -1], jax.random.fold_in(key, 0))
        return jax.lax.scan(step, (cache, first), jnp.arange(count))[1].T

    return jax.jit(way(name).transform(write))


def main(argv: Sequence[str] | None = None) -> np.ndarray:
    """The command line; returns the tokens written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoints", type=pathlib.Path, help="the folder that transformer.py saved to")
    parser.add_argument(
        "--with", dest="way", choices=WAYS, help="what multiplies (default: jax, or flax with --weights)"
    )
    parser.add_argument("--weights", choices=WEIGHTS, help="of linear layers (default: f32, as they were trained)")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, help="to write after each prompt (default: what the context leaves)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.way = args.way or ("flax" if args.weights else "jax")
    if args.weights and args.way != "flax":
        parser.error(f"--weights needs the layers of --with flax, got {args.way}: others' take no quantized kernel")

    checkpoints = Checkpoints(args.checkpoints)
    setup = checkpoints.setup()
    state, trained = checkpoints.restore(fresh_state(setup), setup)
    params = jax.jit(narrowed, static_argnums=1)(state.params, args.weights) if args.weights else state.params
    prompts = jnp.asarray([encode(PROMPTS[i % len(PROMPTS)]) for i in range(args.sequences)])
    length = prompts.shape[1]
    count = args.tokens or setup.context - length
    if not 0 < count <= setup.context - length:
        parser.error(f"--tokens must be 1 to {setup.context - length}: the context has {setup.context}")

    write = make_writer(setup, args.way, count, args.temperature)
    times = []
    for _ in range(4):  # the first compiles
        start = time.perf_counter()
        tokens = jax.block_until_ready(write(params, prompts, jax.random.key(args.seed)))
        times.append(time.perf_counter() - start)
    for prompt, line in zip(np.asarray(prompts), np.asarray(tokens), strict=True):
        print(f"| {decode(prompt)}{decode(line)}".replace("\n", " / "))
    rate = args.sequences * count / min(times)
    print(
        f"{trained} steps trained; {args.sequences} sequences of {count} tokens with {args.way}: {rate:,.0f} tokens/s, "
        f"weights of {bytes_of(params) / 1e6:,.2f} MB"
    )
    return np.asarray(tokens)


if __name__ == "__main__":
    main()
