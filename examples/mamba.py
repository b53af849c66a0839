"""Train a small Mamba in flax.nnx with `cutjax.causal_conv1d`, then decode with its state, token by token.

    python examples/mamba.py [--config cpu|gpu] [--steps N]

A block convolves each channel with its last few values, bias and SiLU in the same kernel, runs a selective state-space
model over the result, and gates it (Gu and Dao, 2023). The program trains on random repetitions, which a state can
learn, with the convolution of `cutjax.causal_conv1d` and with that of Flax, and fails if the losses part, or if
decoding by `cutjax.causal_conv1d_update` gives other logits than the whole sequence at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cutjax

# Of the first 10 losses, and of logits by their largest: rounding, measured on a CPU, is 1e-6 in f32.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
Array = jax.Array
State = tuple[Array, Array]  # the last inputs of the convolution [batch, width - 1, inner], and [batch, inner, size]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes of a model and of its training; weights are f32, products are computed in `dtype`."""

    width: int
    layers: int
    size: int  # of a channel's state
    length: int
    batch: int
    steps: int
    dtype: str
    vocabulary: int = 32
    taps: int = 4


CONFIGS = {
    "cpu": Setup(32, 2, 4, 32, 8, 60, "float32"),
    "gpu": Setup(512, 4, 16, 512, 8, 200, "bfloat16"),
}


class Block(nnx.Module):
    """A Mamba block: convolution, selective state space and gate, with a norm before and a residual around them."""

    def __init__(self, setup: Setup, rngs: nnx.Rngs):
        inner, make = 2 * setup.width, {"dtype": jnp.dtype(setup.dtype), "rngs": rngs}
        self.norm = nnx.RMSNorm(setup.width, **make)
        self.inputs = nnx.Linear(setup.width, 2 * inner, use_bias=False, **make)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (setup.taps, inner)) / setup.taps)
        self.bias = nnx.Param(jnp.zeros(inner))
        self.selected = nnx.Linear(inner, inner + 2 * setup.size, **make)  # steps, and what is written and read
        self.decay = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, setup.size + 1), (inner, 1))))
        self.skip = nnx.Param(jnp.ones(inner))
        self.out = nnx.Linear(inner, setup.width, use_bias=False, **make)
        self.size = setup.size

    def __call__(self, x: Array, convolve: Callable[..., Any], state: State | None = None) -> tuple[Array, State]:
        """Returns an array like x ``[batch, length, width]``, and the state after it."""
        y, gate = jnp.split(self.inputs(self.norm(x)), 2, -1)
        before, h = state or (None, None)
        y, after = convolve(y, self.kernel[...].astype(y.dtype), self.bias[...].astype(y.dtype), before)
        inner = y.shape[-1]
        step, write, read = jnp.split(self.selected(y).astype(jnp.float32), (inner, inner + self.size), -1)
        step = jax.nn.softplus(step)[..., None]
        kept = jnp.exp(-step * jnp.exp(self.decay[...]))  # [batch, length, inner, size]
        added = step * write[..., None, :] * y.astype(jnp.float32)[..., None]
        if h is not None:
            added = added.at[:, 0].add(kept[:, 0] * h)
        _, h = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (kept, added), axis=1)
        mixed = (h * read[..., None, :]).sum(-1) + self.skip[...] * y.astype(jnp.float32)
        return x + self.out(mixed.astype(x.dtype) * jax.nn.silu(gate)), (after, h[:, -1])


def ours(x: Array, kernel: Array, bias: Array, state: Array | None) -> tuple[Array, Array]:
    """Whole sequences, or the next part of them."""
    return cutjax.causal_conv1d(x, kernel, bias, state=state, activation="silu", return_state=True)


def update(x: Array, kernel: Array, bias: Array, state: Array | None) -> tuple[Array, Array]:
    """One token of each sequence."""
    y, state = cutjax.causal_conv1d_update(x[:, 0], state, kernel, bias, activation="silu")
    return y[:, None], state


def plain(x: Array, kernel: Array, bias: Array, state: Array | None) -> tuple[Array, Array]:
    """The same in plain JAX, of whole sequences."""
    numbers, (taps, channels) = ("NWC", "WIO", "NWC"), kernel.shape
    y = jax.lax.conv_general_dilated(
        x, kernel[:, None], (1,), [(taps - 1, 0)], dimension_numbers=numbers, feature_group_count=channels
    )
    return jax.nn.silu(y + bias), x[:, x.shape[1] - taps + 1 :]


class Mamba(nnx.Module):
    """Tokens ``[batch, length]`` -> f32 logits ``[batch, length, vocabulary]``, and the states of the blocks."""

    def __init__(self, setup: Setup, rngs: nnx.Rngs):
        self.embed = nnx.Embed(setup.vocabulary, setup.width, dtype=jnp.dtype(setup.dtype), rngs=rngs)
        self.blocks = nnx.List([Block(setup, rngs) for _ in range(setup.layers)])
        self.norm = nnx.RMSNorm(setup.width, dtype=jnp.dtype(setup.dtype), rngs=rngs)

    def __call__(
        self, tokens: Array, convolve: Callable[..., Any], states: list[State] | None = None
    ) -> tuple[Array, list[State]]:
        x, after = self.embed(tokens), []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, convolve, state)
            after.append(state)
        return self.embed.attend(self.norm(x)).astype(jnp.float32), after


def batches(setup: Setup) -> Iterator[Array]:
    """Yields random tokens, each of them several times in a row: the same batches each time that it is called."""
    random = np.random.default_rng(0)
    while True:
        tokens = random.integers(0, setup.vocabulary, (setup.batch, setup.length // 4 + 1))
        yield jnp.asarray(tokens.repeat(4, 1)[:, : setup.length + 1])


def train(setup: Setup, convolve: Callable[..., Any]) -> tuple[Mamba, list[float]]:
    """Returns the trained model and the losses of the steps."""
    graph, params = nnx.split(Mamba(setup, nnx.Rngs(0)))
    optimizer = optax.adamw(1e-2 if setup.dtype == "float32" else 1e-3)

    @jax.value_and_grad
    def gradient(params: Any, tokens: Array) -> Array:
        logits, _ = nnx.merge(graph, params)(tokens[:, :-1], convolve)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: Array) -> tuple[Any, Array]:
        params, moments = state
        loss, grads = gradient(params, tokens)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    state, losses = (params, optimizer.init(params)), []
    for _, tokens in zip(range(setup.steps), batches(setup), strict=False):
        state, loss = step(state, tokens)
        losses.append(loss)
    return nnx.merge(graph, state[0]), [float(loss) for loss in losses]


def decode(model: Mamba, tokens: Array, prompt: int) -> Array:
    """Returns the logits of tokens, those after a prompt one by one."""
    graph, params = nnx.split(model)

    @jax.jit
    def run(params: Any, tokens: Array) -> Array:
        model = nnx.merge(graph, params)
        logits, states = model(tokens[:, :prompt], ours)

        def next_token(states: list[State], token: Array) -> tuple[list[State], Array]:
            logits, states = model(token[:, None], update, states)
            return states, logits[:, 0]

        _, rest = jax.lax.scan(next_token, states, tokens[:, prompt:].T)
        return jnp.concatenate([logits, rest.swapaxes(0, 1)], 1)

    return run(params, tokens)


def main(argv: Sequence[str] | None = None, setup: Setup | None = None) -> dict[str, list[float]]:
    """The command line; returns the losses by convolution."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", choices=CONFIGS, help="sizes (default: what fits the device)")
    parser.add_argument("--steps", type=int, help="how many")
    args = parser.parse_args(argv)
    setup = setup or CONFIGS[args.config or ("gpu" if jax.default_backend() == "gpu" else "cpu")]
    setup = dataclasses.replace(setup, steps=max(1, args.steps or setup.steps))

    model, losses = train(setup, ours)
    _, expected = train(setup, plain)
    apart = float(np.abs(np.subtract(losses, expected))[:10].max())
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; {apart:.1e} from plain JAX's in the first 10 steps")
    tokens = next(batches(setup))[:, : setup.length]
    whole, _ = jax.jit(lambda tokens: model(tokens, ours))(tokens)
    off = float(jnp.abs(decode(model, tokens, setup.length // 2) - whole).max() / jnp.abs(whole).max())
    print(f"logits of decoding are {off:.1e} of the largest from those of whole sequences")
    if not max(apart, off) <= TOLERANCES[setup.dtype]:  # a NaN fails too
        sys.exit("FAILED: that is more than rounding explains")
    return {"ours": losses, "plain": expected}


if __name__ == "__main__":
    main()
