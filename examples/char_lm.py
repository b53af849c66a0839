"""Train a small character-level transformer on `cutjax.gemm`, and check it against the same model on `jnp.matmul`.

    python examples/char_lm.py [--steps N] [--backend auto|cuda|xla] [--out loss.png]

The model is trained twice, from the same weights on the same batches: once with every matrix product a `cutjax.gemm`,
once with `jnp.matmul`. The program prints what runs each product, draws both loss curves, writes a few lines of its
own, and fails if the curves part. On a GPU the model is larger, computes in bfloat16, and is timed against XLA.

The text, romeo_and_juliet.txt, is Shakespeare's play (public domain) as the "tiny Shakespeare" collection has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import cutjax

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TEXT = (pathlib.Path(__file__).parent / "romeo_and_juliet.txt").read_text()
CHARACTERS = sorted(set(TEXT))
VOCABULARY = 64  # the 61 characters, rounded up: TMA walks aligned rows of the [width, vocabulary] weight in place


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes of the model and of its training; weights and optimizer are f32, products are computed in `dtype`."""

    width: int
    heads: int
    layers: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    dtype: type
    start_tolerance: float  # of the loss in the first 10 steps, before training amplifies rounding
    end_tolerance: float  # of the mean loss of the last quarter


# Calibrated with products that differ in rounding only (k summed in two halves): the first 10 losses then move by at
# most 5e-7 in f32 and 6e-4 in bf16, later ones by 8e-6 and 1e-3. A gradient that lacks 16 columns moves the first 10
# by 3e-2.
CPU = Setup(128, 4, 3, 64, 16, 240, 3e-3, jnp.float32, start_tolerance=1e-5, end_tolerance=1e-3)
GPU = Setup(1024, 16, 6, 256, 64, 300, 5e-4, jnp.bfloat16, start_tolerance=0.005, end_tolerance=0.02)


def jnp_matmul(a, b, *, layout="nn"):
    """What `cutjax.gemm` computes, said with `jnp.matmul`: the model to check against."""
    a = a.mT if layout[0] == "t" else a
    b = b.mT if layout[1] == "t" else b
    return jnp.matmul(a, b)


def init(key: jax.Array, setup: Setup) -> dict:
    """Random weights; those of the layers are stacked on a leading axis, for `lax.scan`."""
    width, layers = setup.width, setup.layers
    shapes = {
        "embed": (VOCABULARY, width),
        "position": (setup.context, width),
        "layers": {
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
        },
        "head": (width, VOCABULARY),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([jax.random.normal(k, s) * s[-2] ** -0.5 for k, s in zip(keys, leaves, strict=True)])


def normalize(x):
    """RMS norm, in f32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def logits(matmul, setup: Setup, params: dict, tokens: jax.Array) -> jax.Array:
    """The model: tokens [batch, time] -> f32 logits [batch, time, vocabulary]."""
    params = jax.tree.map(lambda w: w.astype(setup.dtype), params)
    batch, length = tokens.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    head_width = setup.width // setup.heads

    def layer(x, w):
        qkv = matmul(normalize(x), w["qkv"]).reshape(batch, length, 3, setup.heads, head_width)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # each [batch, heads, time, head_width]
        scores = matmul(q, k, layout="nt").astype(jnp.float32) * head_width**-0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(setup.dtype)
        mixed = matmul(weights, v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + matmul(mixed, w["out"])
        x = x + matmul(jax.nn.gelu(matmul(normalize(x), w["up"])), w["down"])
        return x, None

    x = params["embed"][tokens] + params["position"][:length]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return matmul(normalize(x), params["head"]).astype(jnp.float32)


def make_step(matmul, setup: Setup, optimizer):
    """The training step ``(state, step number) -> (state, loss)``, on the batch that belongs to the step number."""
    text = jnp.asarray([CHARACTERS.index(c) for c in TEXT], jnp.int32)

    def loss(params, tokens):
        predicted = logits(matmul, setup, params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:]).mean()

    def step(state, number):
        params, optimizer_state = state
        starts = jax.random.randint(jax.random.key(number), (setup.batch, 1), 0, len(TEXT) - setup.context)
        tokens = text[starts + jnp.arange(setup.context + 1)]
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    return step


def train(name: str, step, state, steps: int, progress: Progress) -> tuple[tuple, np.ndarray]:
    """Runs the step; returns the final state and the loss of every step."""
    bar = progress.add_task(name, total=steps, loss=float("nan"))
    losses = []
    for number in range(steps):
        state, loss = step(state, number)
        losses.append(loss)
        if number % 10 == 9 or number == steps - 1:  # reading the loss waits for the device
            progress.update(bar, completed=number + 1, loss=float(loss))
    return state, np.array(losses)


def write(setup: Setup, params: dict, prompt: str) -> str:
    """Continues the prompt up to the length of the context."""

    @jax.jit
    def run(tokens):
        def body(i, tokens):
            row = logits(cutjax.gemm, setup, params, tokens[None])[0, i - 1, : len(CHARACTERS)]
            return tokens.at[i].set(jax.random.categorical(jax.random.key(i), row / 0.7))

        return jax.lax.fori_loop(len(prompt), setup.context, body, tokens)

    tokens = jnp.zeros(setup.context, jnp.int32)
    tokens = tokens.at[: len(prompt)].set(jnp.asarray([CHARACTERS.index(c) for c in prompt]))
    return "".join(CHARACTERS[i] for i in run(tokens))


def time_steps(steps: dict, states: dict, repeats: int = 20, length: int = 5) -> dict[str, float]:
    """Median milliseconds of a step, the programs taking turns so that clocks and temperature are the same for all."""
    times = {name: [] for name in steps}
    for repeat in range(repeats + 1):  # the first round warms up
        for name, step in steps.items():
            start = time.perf_counter()
            for number in range(length):
                states[name], loss = step(states[name], number)
            jax.block_until_ready(loss)
            if repeat:
                times[name].append((time.perf_counter() - start) * 1e3 / length)
    return {name: statistics.median(values) for name, values in times.items()}


def train_each(steps: dict, fresh_state, count: int) -> tuple[dict, dict]:
    """What training with each step function ends with, and its losses."""
    states, losses = {}, {}
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}")) as progress:
        for name, step in steps.items():
            states[name], losses[name] = train(name, step, fresh_state(), count, progress)
    return states, losses


def check(losses: dict[str, np.ndarray], setup: Setup) -> None:
    """Ends the program with an error if the two loss curves differ by more than rounding explains."""
    ours, theirs = losses.values()
    quarter = max(1, len(ours) // 4)
    start = np.max(np.abs(ours[:10] - theirs[:10]))
    end = abs(np.mean(ours[-quarter:]) - np.mean(theirs[-quarter:]))
    print(f"largest difference of the loss in the first 10 steps: {start:.2g} (tolerance {setup.start_tolerance:g})")
    print(f"difference of the mean loss over the last {quarter} steps: {end:.2g} (tolerance {setup.end_tolerance:g})")
    if not (start <= setup.start_tolerance and end <= setup.end_tolerance):  # a NaN fails too
        one, other = losses
        sys.exit(f"FAILED: the loss with {one} is not the loss with {other}; please report the lines above")


def plot(losses: dict[str, np.ndarray], setup: Setup, out: pathlib.Path) -> None:
    """Draws the loss curves, three at most."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", "--", ":"), strict=False):
        axes.plot(np.arange(1, len(values) + 1), values, style, label=name)
    axes.set(xlabel="step", ylabel="cross-entropy per character (nats)")
    axes.set_title(f"width {setup.width}, {setup.layers} layers, {np.dtype(setup.dtype).name}, {device_name()}")
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def device_name() -> str:
    return jax.devices()[0].device_kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="training steps (default: 200 on a CPU, 300 on a GPU)")
    parser.add_argument("--backend", choices=("auto", "cuda", "xla"), default="auto", help="what runs cutjax.gemm")
    parser.add_argument("--out", type=pathlib.Path, default="build/char_lm.png", help="where the loss curves go")
    args = parser.parse_args()

    on_gpu = jax.default_backend() == "gpu"
    setup = GPU if on_gpu else CPU
    setup = dataclasses.replace(setup, steps=max(1, args.steps or setup.steps))
    optimizer = optax.adam(optax.warmup_constant_schedule(0.0, setup.learning_rate, 20))

    def fresh_state():
        params = init(jax.random.key(0), setup)
        return params, optimizer.init(params)

    size = sum(w.size for w in jax.tree.leaves(fresh_state()[0]))
    print(f"{size / 1e6:.1f} M weights, {np.dtype(setup.dtype).name}, on {device_name()}; jax {jax.__version__}\n")
    products = {"cutjax.gemm": cutjax.gemm, "jnp.matmul": jnp_matmul}
    steps = {name: jax.jit(make_step(f, setup, optimizer), donate_argnums=0) for name, f in products.items()}

    with cutjax.use_backend(args.backend):
        print(cutjax.explain(steps["cutjax.gemm"])(fresh_state(), 0), "\n")
        states, losses = train_each(steps, fresh_state, setup.steps)
        print(f"\n{write(setup, states['cutjax.gemm'][0], 'JULIET:' + chr(10))}\n")
        plot(losses, setup, args.out)
        print(f"loss curves: {args.out}")
        if on_gpu:
            ours, theirs = time_steps(steps, states).values()
            print(f"a training step: cutjax.gemm {ours:.2f} ms, jnp.matmul {theirs:.2f} ms, ratio {theirs / ours:.3f}")
        check(losses, setup)


if __name__ == "__main__":
    main()
