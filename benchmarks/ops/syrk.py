"""Symmetric products a a^T beside XLA's full product: ``python -m benchmarks run --op syrk``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

import cutjax
from benchmarks import oracle
from benchmarks.suite import Peer, Product, Suite

# Sums of squares, all of one sign: rounding in the matrix unit, always toward zero, adds up to more than in the others.
DIAGONAL = 1e-5


@dataclasses.dataclass(frozen=True)
class Symmetric:
    """a [*batch, m, k] by its own transpose, bf16; ``target`` is the least ratio to XLA asked for, or None."""

    m: int
    k: int
    batch: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    target: float | None = None

    @property
    def name(self) -> str:
        """The sizes, those of the batch first, e.g. ``8x2048x2048``."""
        return "x".join(map(str, (*self.batch, self.m, self.k)))

    def inputs(self, seed: int) -> tuple[jax.Array]:
        """Random normal."""
        return (jax.random.normal(jax.random.key(seed, impl="rbg"), (*self.batch, self.m, self.k), jnp.bfloat16),)


CASES = (
    Symmetric(2048, 2048, tags=("square",), target=1.3),
    Symmetric(4096, 4096, tags=("square",), target=1.6),
    Symmetric(8192, 8192, tags=("square",), target=1.6),
    *(Symmetric(m, k, tags=("rectangular",)) for m, k in ((1024, 4096), (4096, 1024), (4096, 14336), (8192, 2048))),
    *(Symmetric(m, m, (batch,), ("batched",)) for batch, m in ((32, 1024), (8, 2048), (4, 4096))),
)


def products(case: Symmetric) -> list[Product]:
    """The product; every element below the diagonal must be that above it, bit for bit."""
    count = math.prod(case.batch)

    def look(args: Any, out: Any, theirs: Any) -> Any:
        (a,) = (x.astype(jnp.float32) for x in args)
        ref = oracle.reference(a, a, "nt")
        diagonal = jnp.diagonal(ref, axis1=-2, axis2=-1)
        off = jnp.abs(jnp.diagonal(out, axis1=-2, axis2=-1).astype(jnp.float32) - diagonal)
        outside = 1 - jnp.eye(case.m, dtype=jnp.float32)
        distances = oracle.distances(out * outside.astype(out.dtype), ref * outside, case.k)
        return *distances, jnp.max(off / diagonal), jnp.all(out == out.mT)

    def judge(seen: Any) -> tuple[float, str]:
        relative, worst, diagonal, symmetric = seen
        least = oracle.tolerance("bfloat16", case.k, count * case.m * case.m)
        error = oracle.Error(float(relative), float(worst), least)
        if not error.ok:
            return error.relative, f"wrong: {error}"
        if not float(diagonal) <= 2**-8 + DIAGONAL:
            return error.relative, f"wrong: the diagonal is off by {float(diagonal):.3g} of its value"
        return error.relative, "" if symmetric else "wrong: not symmetric"

    def ours(config: cutjax.Config | None) -> Any:
        return lambda a: cutjax.syrk(a, config=config)

    return [
        Product(
            "",
            count * case.m * (case.m + 1) * case.k,
            2 * count * case.m * (case.k + case.m),
            ours,
            {"xla": Peer(lambda: lambda a: jnp.matmul(a, a.mT), check=False)},
            look,
            judge,
            targets={} if case.target is None else {"xla": case.target},
        )
    ]


SUITE = Suite("syrk", CASES, Symmetric.inputs, products)
