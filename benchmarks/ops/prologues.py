"""A norm before a product of few rows, its scale in the kernel's loads: ``python -m benchmarks run --op prologues``.

Beside XLA's program of the norm and the product, and "before": the same call with the prologue in front of a kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import cutjax
from benchmarks.suite import Function, Peer, Product, Suite

WRONG = 1e-2  # in Frobenius norm: what is multiplied and the result are rounded to bf16


@dataclasses.dataclass(frozen=True)
class Normed:
    """RMSNorm of x [m, k] by w [k, n], in bf16."""

    m: int
    n: int
    k: int
    tags: tuple[str, ...] = ("suite",)

    @property
    def name(self) -> str:
        """The sizes, e.g. ``16x14336x4096``."""
        return f"{self.m}x{self.n}x{self.k}"

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Random normal rows, weights such that results are too, and factors of columns near one."""
        of_x, of_w, of_g = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
        x, w = (
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in ((of_x, (self.m, self.k)), (of_w, (self.k, self.n)))
        )
        return x, w / self.k**0.5, 1 + jax.random.normal(of_g, (self.k,), jnp.bfloat16) / 8


CASES = tuple(Normed(m, n, k) for n, k in ((6144, 4096), (14336, 4096), (8192, 8192)) for m in (1, 4, 16, 64, 256))


def norm(x: jax.Array, r: jax.Array, g: jax.Array) -> jax.Array:
    """The elementwise part of RMSNorm."""
    return x * r * g


def scale(x: jax.Array) -> jax.Array:
    """The factor of each row."""
    return lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6)


def products(case: Normed) -> list[Product]:
    """The norm and the product."""

    def by(backend: str | None, config: Any = None) -> Function:
        def run(x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
            how = {"prologue": norm, "prologue_operands": (scale(x), g), "backend": backend, "config": config}
            return cutjax.gemm(x, w, **how)

        return run

    def plain(x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
        return norm(x, scale(x), g).astype(x.dtype) @ w

    def look(args: Any, out: jax.Array, theirs: jax.Array) -> jax.Array:
        out, theirs = out.astype(jnp.float32), theirs.astype(jnp.float32)
        return jnp.linalg.norm(out - theirs) / jnp.linalg.norm(theirs)

    def judge(error: Any) -> tuple[float, str]:
        return float(error), "" if float(error) <= WRONG else f"wrong: {float(error):.3g}, at most {WRONG}"

    flops, moved = 2 * case.m * case.n * case.k, 2 * (case.m * case.k + case.k * case.n + case.m * case.n)
    peers = {"xla": Peer(lambda: plain, check=False), "before": Peer(lambda: by(None))}
    return [Product("", flops, moved, lambda config: by("cuda", config), peers, look, judge, beside="xla")]


SUITE = Suite("prologues", CASES, Normed.inputs, products)
