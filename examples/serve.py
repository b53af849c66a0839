"""Write text from a checkpoint of transformer.py: batched decoding with a cache of keys and values, few tokens a step.

    python examples/serve.py FOLDER [--with jax|dropin|fuse|flax] [--sequences 16] [--tokens N] [--temperature T]

The prompt is read in one pass, which fills the cache. Then each step multiplies one token of every sequence, so the
products have as many rows as there are sequences, and the time is that of reading the weights. Which way trained the
checkpoint does not matter: the parameters are the same in all. serve_quantized.py decodes with weights of 4 and 8 bits.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from data import decode, encode
from flax import nnx
from model import Setup, build
from transformer import Checkpoints, fresh_state
from ways import WAYS, way

# Of one length: the sequences of a batch move on together.
PROMPTS = ("JULIET:\nO", "ROMEO:\nMy", "Nurse:\nI ", "TYBALT:\nI")


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
    parser.add_argument("--with", dest="way", choices=WAYS, default="jax", help="what multiplies")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, help="to write after each prompt (default: what the context leaves)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    checkpoints = Checkpoints(args.checkpoints)
    setup = checkpoints.setup()
    state, trained = checkpoints.restore(fresh_state(setup), setup)
    prompts = jnp.asarray([encode(PROMPTS[i % len(PROMPTS)]) for i in range(args.sequences)])
    length = prompts.shape[1]
    count = args.tokens or setup.context - length
    if not 0 < count <= setup.context - length:
        parser.error(f"--tokens must be 1 to {setup.context - length}: the context has {setup.context}")

    write = make_writer(setup, args.way, count, args.temperature)
    compiled = write.lower(state.params, prompts, jax.random.key(args.seed)).compile()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        tokens = jax.block_until_ready(compiled(state.params, prompts, jax.random.key(args.seed)))
        times.append(time.perf_counter() - start)
    for prompt, line in zip(np.asarray(prompts), np.asarray(tokens), strict=True):
        print(f"| {decode(prompt)}{decode(line)}".replace("\n", " / "))
    rate = args.sequences * count / min(times)
    print(
        f"{trained} steps trained; {args.sequences} sequences of {count} tokens with {args.way}: {rate:,.0f} tokens/s"
    )
    return np.asarray(tokens)


if __name__ == "__main__":
    main()
