"""Heads of language models and their losses, forward and backward: ``python -m benchmarks run --op cross_entropy``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import cutjax
from benchmarks.suite import Peer, Product, Suite

# Of gradients, in Frobenius norm: the logits' gradient, scaled rows and up to eight chunks' sums are rounded.
MOST = 2**-7


@dataclasses.dataclass(frozen=True)
class Head:
    """x [tokens, d] by w [d, vocabulary], bf16, and labels; ``target`` is the least ratio to XLA asked for."""

    tokens: int
    d: int
    vocabulary: int
    target: float
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The sizes, e.g. ``4096x4096x128256``."""
        return f"{self.tokens}x{self.d}x{self.vocabulary}"

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Random normal, such that logits are too."""
        of_x, of_w, of_labels = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
        x = jax.random.normal(of_x, (self.tokens, self.d), jnp.bfloat16)
        w = jax.random.normal(of_w, (self.d, self.vocabulary), jnp.bfloat16) / self.d**0.5
        return x, w, jax.random.randint(of_labels, (self.tokens,), 0, self.vocabulary)


CASES = (
    Head(4096, 4096, 128256, 20.8 / 18.0),
    Head(8192, 4096, 32000, 10.0 / 9.2),
    Head(8192, 2048, 151936, 26.2 / 23.0),
)


def plain(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of logits in float32."""
    logits = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def products(case: Head) -> list[Product]:
    """The loss and the gradients of x and w; right is what is near XLA's."""

    def look(args: Any, out: Any, theirs: Any) -> Any:
        (loss, ours), (other, grads) = out, theirs

        def off(x: jax.Array, y: jax.Array) -> jax.Array:
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            return jnp.linalg.norm(x - y) / jnp.linalg.norm(y)

        return abs(loss - other) / other, *map(off, ours, grads)

    def judge(seen: Any) -> tuple[float, str]:
        loss, of_x, of_w = map(float, seen)
        right = loss < 1e-5 and max(of_x, of_w) < MOST
        return max(of_x, of_w), "" if right else f"wrong: loss off by {loss:.2g}, gradients by {of_x:.2g}, {of_w:.2g}"

    tokens, d, vocabulary = case.tokens, case.d, case.vocabulary
    return [
        Product(
            "fwd+bwd",
            6 * tokens * d * vocabulary,
            2 * 2 * d * (tokens + vocabulary),
            lambda config: jax.value_and_grad(cutjax.linear_cross_entropy, (0, 1)),
            {"xla": Peer(lambda: jax.value_and_grad(plain, (0, 1)), check=False)},
            look,
            judge,
            beside="xla",
            targets={"xla": case.target},
        )
    ]


SUITE = Suite("cross_entropy", CASES, Head.inputs, products, clocks=("host",))
