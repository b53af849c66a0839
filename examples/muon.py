"""Train the model of char_lm.py with Muon, its Newton-Schulz iteration on `cutjax.syrk`, checked against `jnp.matmul`.

    python examples/muon.py [--steps N] [--backend auto|cuda|xla] [--out loss.png]

Muon (Jordan et al., 2024) replaces the momentum of each weight matrix by a matrix of the same singular vectors whose
singular values are near one. Five Newton-Schulz steps do so with products alone. Two of the three products of a step
are symmetric: a syrk multiplies half of each. The model is trained three times, from the same weights on the same
batches: with Muon on cutjax, with Muon on `jnp.matmul`, and with AdamW. The program prints what runs each product,
draws the loss curves, and fails if those of the two Muons part. On a GPU the model is larger, the iteration computes in
bfloat16 and is timed against XLA.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable

import char_lm
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cutjax

A, B, C = 3.4445, -4.7750, 2.0315  # the published quintic: a singular value s becomes A s + B s^3 + C s^5
RATE = 0.02  # of Muon; that of a Setup is AdamW's
# Calibrated on a CPU with 0.6 M weights. Products that differ in rounding only (k summed in two halves) move the losses
# by at most 1e-6 in f32; in bf16 the first 10 move by 3e-3, and the mean of the last quarter by 2e-3. An iteration that
# leaves 16 x 16 values above a diagonal zero moves that mean by 1.8 in either.
CPU = dataclasses.replace(char_lm.CPU, steps=120, start_tolerance=1e-5, end_tolerance=1e-3)
GPU = dataclasses.replace(char_lm.GPU, start_tolerance=0.01, end_tolerance=0.02)


def cutjax_step(x: jax.Array) -> jax.Array:
    """A Newton-Schulz step of matrices [..., rows, columns]: ``A x + (B g + C g g) x``, where ``g = x x^T``.

    Where there are more rows than columns g is ``x^T x``, and multiplies from the right: g is the smaller of the two,
    and no matrix is transposed in memory.
    """

    def mixed(acc, gram):
        return B * gram.astype(acc.dtype) + C * acc

    def added(acc, x):
        return A * x.astype(acc.dtype) + acc

    tall = x.shape[-2] > x.shape[-1]
    gram = cutjax.syrk(x, layout="t" if tall else "n")
    mix = cutjax.syrk(gram, epilogue=mixed, operands=(gram,))
    return cutjax.gemm(*((x, mix) if tall else (mix, x)), epilogue=added, operands=(x,))


def jnp_step(x: jax.Array) -> jax.Array:
    """The step in plain JAX, to check against."""
    tall = x.shape[-2] > x.shape[-1]
    gram = jnp.matmul(x.mT, x) if tall else jnp.matmul(x, x.mT)
    mix = B * gram + C * jnp.matmul(gram, gram)
    return A * x + (jnp.matmul(x, mix) if tall else jnp.matmul(mix, x))


def orthogonalize(step: Callable[[jax.Array], jax.Array], dtype: type, x: jax.Array) -> jax.Array:
    """Returns matrices with x's singular vectors, and singular values near one.

    Args:
      step: the Newton-Schulz step.
      dtype: what it is computed in.
      x: f32 [layers, rows, columns]: the layers' matrices are one batch.
    """
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)  # no singular value is larger
    y = (x / (norm + 1e-7)).astype(dtype)
    for _ in range(5):
        y = step(y)
    return y.astype(x.dtype)


def muon(step: Callable[[jax.Array], jax.Array], dtype: type, learning_rate) -> optax.GradientTransformation:
    """Muon of weights [layers, inputs, outputs]: Nesterov's momentum, then ``orthogonalize``."""

    def update(momentum: jax.Array) -> jax.Array:
        inputs, outputs = momentum.shape[-2:]
        return orthogonalize(step, dtype, momentum) * max(1.0, outputs / inputs) ** 0.5

    return optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(lambda updates, params: jax.tree.map(update, updates)),
        optax.scale_by_learning_rate(learning_rate),
    )


def optimizers(setup: char_lm.Setup) -> dict[str, optax.GradientTransformation]:
    """Muon on cutjax and in plain JAX, with AdamW for the embeddings and the head; and AdamW for all."""
    adamw = optax.adamw(optax.warmup_constant_schedule(0.0, setup.learning_rate, 20))
    rate = optax.warmup_constant_schedule(0.0, RATE, 20)

    def labels(params):
        return {name: "muon" if name == "layers" else "adamw" for name in params}

    steps = {"Muon on cutjax": cutjax_step, "Muon on jnp.matmul": jnp_step}
    found = {
        name: optax.multi_transform({"muon": muon(step, setup.dtype, rate), "adamw": adamw}, labels)
        for name, step in steps.items()
    }
    return {**found, "AdamW": adamw}


def time_orthogonalization(setup: char_lm.Setup, matrices: dict[str, jax.Array]) -> dict[str, float]:
    """Median milliseconds of the orthogonalization of all layers' matrices, by cutjax and in plain JAX."""

    def program(step):
        def run(matrices, number):
            out = jax.tree.map(functools.partial(orthogonalize, step, setup.dtype), matrices)
            return out, out["out"][0, 0, 0]

        return jax.jit(run)

    programs = {"cutjax": program(cutjax_step), "plain JAX": program(jnp_step)}
    return char_lm.time_steps(programs, dict.fromkeys(programs, matrices))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="training steps (default: 120 on a CPU, 300 on a GPU)")
    parser.add_argument("--backend", choices=("auto", "cuda", "xla"), default="auto", help="what runs the products")
    parser.add_argument("--out", type=pathlib.Path, default="build/muon.png", help="where the loss curves go")
    args = parser.parse_args()

    on_gpu = jax.default_backend() == "gpu"
    setup = GPU if on_gpu else CPU
    setup = dataclasses.replace(setup, steps=max(1, args.steps or setup.steps))

    def fresh_state(optimizer):
        params = char_lm.init(jax.random.key(0), setup)
        return params, optimizer.init(params)

    params, _ = fresh_state(optax.identity())
    size = sum(w.size for w in jax.tree.leaves(params))
    print(
        f"{size / 1e6:.1f} M weights, {np.dtype(setup.dtype).name}, on {char_lm.device_name()}; jax {jax.__version__}\n"
    )

    losses = {}
    with cutjax.use_backend(args.backend):
        print(cutjax.explain(cutjax_step)(params["layers"]["up"].astype(setup.dtype)), "\n")
        for name, optimizer in optimizers(setup).items():
            step = jax.jit(char_lm.make_step(cutjax.gemm, setup, optimizer), donate_argnums=0)
            fresh = functools.partial(fresh_state, optimizer)
            losses |= char_lm.train_each({name: step}, fresh, setup.steps)[1]
        char_lm.plot(losses, setup, args.out)
        print(f"\nloss curves: {args.out}")
        if on_gpu:
            ours, theirs = time_orthogonalization(setup, params["layers"]).values()
            print(f"orthogonalization: cutjax {ours:.2f} ms, plain JAX {theirs:.2f} ms, ratio {theirs / ours:.3f}")
    quarter = max(1, setup.steps // 4)
    means = ", ".join(f"{name} {np.mean(values[-quarter:]):.3f}" for name, values in losses.items())
    print(f"mean loss over the last {quarter} steps: {means}")
    del losses["AdamW"]
    char_lm.check(losses, setup)


if __name__ == "__main__":
    main()
