"""Solve Poisson's equation with a network on `cutjax.fused_mlp`, trained by its Laplacian, checked against plain JAX.

    python examples/pinn.py [--steps N] [--backend auto|cuda|xla] [--out FILE]

On the unit square, ``-laplacian(u) = f`` and u = 0 on the edge, where f is made such that u is known. The network's
result times ``x (1 - x) y (1 - y)`` is zero on the edge, so the loss is the equation's residual at random points alone.
The Laplacian is forward over reverse, of the function of one point, mapped over points, and the loss is differentiated
by weights through it: with backend="cuda" each of these is one kernel. The program trains the same network in plain JAX
from the same weights at the same points, draws the solution, its error and both curves, and fails if they part.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import cutjax

WIDTHS = (2, 64, 64, 64, 64, 1)
RATE, POINTS = 2e-3, 256
PRECISION = lax.DotAlgorithmPreset.BF16_BF16_F32_X9  # second derivatives want more than TF32
APART = 1e-3  # of the loss, after the first steps: both round in float32

Parameters = tuple[list[jax.Array], list[jax.Array]]
Network = Callable[[jax.Array, Parameters], jax.Array]


def initial(key: jax.Array) -> Parameters:
    """Weights of variance 1 / width, and zeros."""
    keys = jax.random.split(key, len(WIDTHS) - 1)
    sizes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [jax.random.normal(key, (k, n)) / k**0.5 for key, k, n in sizes], [jnp.zeros(n) for n in WIDTHS[1:]]


def fused(backend: str) -> Network:
    """The network as one call."""
    precision = PRECISION if jax.default_backend() == "gpu" else None
    return lambda x, of: cutjax.fused_mlp(x, *of, jnp.tanh, precision=precision, backend=backend)


def plain(x: jax.Array, of: Parameters) -> jax.Array:
    """The network in plain JAX."""
    *hidden, last = zip(*of, strict=True)
    for w, b in hidden:
        x = jnp.tanh(jnp.matmul(x, w, precision="highest") + b)
    return jnp.matmul(x, last[0], precision="highest") + last[1]


def exact(x: jax.Array) -> jax.Array:
    """The solution."""
    return jnp.sin(jnp.pi * x[..., 0]) * jnp.sin(2 * jnp.pi * x[..., 1])


def solution(network: Network, x: jax.Array, of: Parameters) -> jax.Array:
    """The network's solution at one point, zero on the edge."""
    return jnp.prod(4 * x * (1 - x)) * network(x, of)[0]


def laplacian(u: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """The sum of second derivatives of a function at a point: tangents of its gradient."""
    slope = jax.grad(u)
    return jnp.trace(jnp.stack([jax.jvp(slope, (x,), (e,))[1] for e in jnp.eye(x.size)]))


def loss(network: Network, of: Parameters, points: jax.Array) -> jax.Array:
    """The mean squared residual, of f = 5 pi^2 u."""

    def residual(x: jax.Array) -> jax.Array:
        return laplacian(lambda x: solution(network, x, of), x) + 5 * jnp.pi**2 * exact(x)

    return jnp.mean(jax.vmap(residual)(points) ** 2)


def train(network: Network, steps: int) -> tuple[Parameters, list[float]]:
    """Trains from the same weights at the same points, whatever the network is made of."""
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    of = initial(jax.random.key(0))
    state = optimizer.init(of)

    @jax.jit
    def step(of: Parameters, state: Any, key: jax.Array) -> Any:
        points = jax.random.uniform(key, (POINTS, 2))
        value, slope = jax.value_and_grad(loss, 1)(network, of, points)
        updates, state = optimizer.update(slope, state)
        return optax.apply_updates(of, updates), state, value

    values = []
    for key in jax.random.split(jax.random.key(1), steps):
        of, state, value = step(of, state, key)
        values.append(float(value))
    return of, values


def plot(found: jax.Array, errors: jax.Array, curves: dict[str, list[float]], out: pathlib.Path) -> None:
    """Draws the solution, its error, and the losses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for axes, values, title in ((left, found, "solution"), (middle, errors, "error")):
        figure.colorbar(axes.imshow(values.T, origin="lower", extent=(0, 1, 0, 1)), ax=axes)
        axes.set(title=title, xlabel="x", ylabel="y")
    for (name, values), style in zip(curves.items(), ("-", "--"), strict=True):
        right.semilogy(np.arange(1, len(values) + 1), values, style, label=name)
    right.set(xlabel="step", ylabel="mean squared residual")
    right.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """The command line; returns the losses by way."""
    parser = argparse.ArgumentParser(description="Solve Poisson's equation by a network.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--backend", choices=("auto", "cuda", "xla"), default="auto")
    parser.add_argument("--out", type=pathlib.Path, default="build/pinn.png", help="where the picture goes")
    args = parser.parse_args(argv)

    network = fused(args.backend)
    step = jax.grad(lambda of, points: loss(network, of, points))
    print(cutjax.explain(step, platform="cuda")(initial(jax.random.key(0)), jnp.zeros((POINTS, 2))))
    (of, ours), (_, theirs) = train(network, args.steps), train(plain, args.steps)
    curves = {"cutjax": ours, "plain JAX": theirs}
    grid = jnp.stack(jnp.meshgrid(*[jnp.linspace(0, 1, 65)] * 2, indexing="ij"), -1)
    found = jax.jit(jax.vmap(jax.vmap(lambda x: solution(network, x, of))))(grid)
    errors = found - exact(grid)
    print(f"mean squared residual {ours[0]:.4g} -> {ours[-1]:.4g}, in plain JAX {theirs[-1]:.4g}")
    print(f"largest error of the solution {float(jnp.abs(errors).max()):.3g}")
    plot(found, errors, curves, args.out)
    print(f"solution, error and losses: {args.out}")
    first = slice(0, 10)  # later steps amplify any rounding
    if not np.allclose(ours[first], theirs[first], rtol=APART):
        sys.exit(f"FAILED: losses part: {ours[first]}, in plain JAX {theirs[first]}")
    return curves


if __name__ == "__main__":
    main()
