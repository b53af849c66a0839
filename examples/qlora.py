"""Train a small Llama, quantize it to 4 bits, and train LoRA adapters beside the frozen weights (QLoRA).

    python examples/qlora.py [--steps N] [--rank R] [--weights int4|float4_e2m1fn|float8_e4m3fn|int8]

The model of serve_quantized.py learns the first half of the play by bytes. Its linear layers are then quantized in
groups of 32 along k, and adapters of them learn the second half: their gradients, and those of activations, go past the
narrow weights, which no pass dequantizes for good. The program fails if adapters do not lower the loss, or if their
gradients are not those past the dequantized weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import bytes_of
from data import TEXT, Batches, encode
from serve_quantized import PRODUCTS, Params, Setup, logits, random_checkpoint, read

import cutjax

SETUP = Setup(128, 4, 2, 256, 2, dtype="float32")
CONTEXT, BATCH, GROUP = 64, 8, 32
TOLERANCE = 1e-3  # of gradients, by the largest of an array: none differs on a CPU; other kernels round otherwise


def cross_entropy(params: Params, tokens: jax.Array, setup: Setup, layout: str) -> jax.Array:
    """Mean cross-entropy of the next byte, of tokens ``[batch, time + 1]``."""
    found, _ = logits(params, tokens[:, :-1], None, 0, setup, layout)
    return optax.softmax_cross_entropy_with_integer_labels(found, tokens[:, 1:]).mean()


def of_linears(make: Callable[[Any], Any], params: Params) -> list[dict[str, Any]]:
    """Returns what is made of each linear layer's weights, by blocks and names."""
    return [{name: make(block[name]) for name in PRODUCTS} for block in params["layers"]]


def with_linears(params: Params, blocks: list[dict[str, Any]]) -> Params:
    """Returns the parameters with other weights of the linear layers."""
    return {**params, "layers": [{**old, **new} for old, new in zip(params["layers"], blocks, strict=True)]}


def adapted(params: Params, adapters: list[dict[str, Any]]) -> Params:
    """Returns the parameters with adapters ``(a [k, rank], b [rank, n])`` beside the linear layers."""
    pairs = zip(params["layers"], adapters, strict=True)
    return with_linears(params, [{name: (block[name], *new[name]) for name in PRODUCTS} for block, new in pairs])


def train(loss: Callable, trained: Any, batches: Batches, steps: int, learning_rate: float) -> tuple[Any, list[float]]:
    """Returns what Adam makes of `trained` by ``loss(trained, tokens)``, and the losses of its steps."""
    optimizer = optax.adam(learning_rate)

    @jax.jit
    def step(trained, state, tokens):
        value, gradients = jax.value_and_grad(loss)(trained, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(trained, updates), state, value

    state, losses = optimizer.init(trained), []
    for _ in range(steps):
        trained, state, value = step(trained, state, jnp.asarray(next(batches)))
        losses.append(value)
    return trained, [float(value) for value in losses]


def check_gradients(loss: Callable, frozen: Params, adapters: Any, tokens: jax.Array) -> None:
    """Ends the program if the adapters' gradients are not those beside the dequantized weights."""
    wide = with_linears(frozen, of_linears(lambda q: q.dequantize(), frozen))
    gradient = jax.jit(jax.grad(lambda adapters, params: loss(adapted(params, adapters), tokens)))
    pairs = zip(*(jax.tree.leaves(gradient(adapters, params)) for params in (frozen, wide)), strict=True)
    worst = max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs if jnp.abs(y).max() > 0)
    print(f"gradients of adapters differ by {worst:.1e} from those beside dequantized weights")
    if not worst < TOLERANCE:
        sys.exit(f"FAILED: gradients differ by {worst:.1e}, more than {TOLERANCE:.0e}")


def main(argv: Sequence[str] | None = None) -> tuple[list[float], list[float]]:
    """The command line; returns the losses of both trainings."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of each of the two trainings")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--weights", default="int4", help="the dtype that the linear layers are quantized to")
    args = parser.parse_args(argv)

    text = encode(TEXT.read_text())
    halves = [Batches(half, BATCH, CONTEXT) for half in np.array_split(text, 2)]
    params, layout = read(random_checkpoint(SETUP, "bf16"), SETUP)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)

    def loss(params, tokens):
        return cross_entropy(params, tokens, SETUP, layout)

    params, first = train(loss, params, halves[0], args.steps, 3e-3)
    block = (1, GROUP) if layout == "nt" else (GROUP, 1)
    frozen = with_linears(params, of_linears(lambda w: cutjax.quantize(w, args.weights, block=block), params))

    keys = iter(jax.random.split(jax.random.key(0), SETUP.layers * len(PRODUCTS)))

    def adapter(q):
        n, k = q.shape if layout == "nt" else q.shape[::-1]
        return jax.random.normal(next(keys), (k, args.rank)) * k**-0.5, jnp.zeros((args.rank, n))

    adapters = of_linears(adapter, frozen)
    tokens = jnp.asarray(next(halves[1]))
    moved = jax.tree.map(lambda x: x + 0.01, adapters)  # where b is zero, a has no gradient
    check_gradients(loss, frozen, moved, tokens)
    before = [float(jax.jit(loss)(x, tokens)) for x in (params, frozen)]
    adapters, second = train(lambda x, tokens: loss(adapted(frozen, x), tokens), adapters, halves[1], args.steps, 3e-3)
    after = float(jax.jit(loss)(adapted(frozen, adapters), tokens))

    print(f"loss of the first half: {first[0]:.3f} at first, {first[-1]:.3f} after {args.steps} steps")
    print(
        f"of a batch of the second: {before[0]:.3f}, quantized to {args.weights} {before[1]:.3f}, adapted {after:.3f}"
    )
    sizes = [bytes_of(x) / 1e3 for x in (of_linears(lambda w: w, params), of_linears(lambda w: w, frozen), adapters)]
    print("linear layers: {:,.0f} kB, quantized {:,.0f}; adapters {:,.0f} kB".format(*sizes))
    if not after < before[1]:
        sys.exit("FAILED: adapters do not lower the loss")
    return first, second


if __name__ == "__main__":
    main()
