"""Rows gathered by expert, beside XLA's gather and the rate of a copy: ``python -m benchmarks run --op gather``.

The product "rows" is the kernel that ships; "4x4x8192" and the like are others: warps that copy, stages of each, bytes
of a stage. A row's ratio "copy" is the share of the rate of a plain copy that it reaches, each token's row read once
and each result's written; the shares in cutjax/kernels/gather.py, by which "auto" chooses, are read off these.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import cutjax
from benchmarks.suite import Function, Peer, Product, Suite
from cutjax.binding import lowering
from cutjax.kernels import gather
from cutjax.kernels.device import device_of
from cutjax.primitives.routing import dispatch_p

CONFIGS = tuple(gather.Config(*sizes) for sizes in ((2, 4, 8192), (4, 4, 8192), (6, 4, 4096), (4, 6, 2048)))


@dataclasses.dataclass(frozen=True)
class Gather:
    """Rows of x [tokens, d] in bf16, each for k of the experts."""

    name: str
    tokens: int
    k: int
    d: int
    experts: int
    tags: tuple[str, ...] = ()

    def inputs(self, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random normal rows; a permutation by random experts, and its inverse."""
        keys = jax.random.split(jax.random.key(seed, impl="rbg"))
        routing = cutjax.route(jax.random.normal(keys[0], (self.tokens, self.experts), jnp.float32), self.k)
        return jax.random.normal(keys[1], (self.tokens, self.d), jnp.bfloat16), routing.permutation, routing.inverse


# Layers of models; the first is that of docs/moe.md, 3.76 GB of rows read and written.
CASES = (
    Gather("deepseek", 16384, 8, 7168, 256, ("suite",)),
    Gather("mixtral", 4096, 2, 4096, 8, ("suite",)),
    Gather("qwen3", 16384, 8, 2048, 128, ("suite",)),
    Gather("gpt-oss", 16384, 4, 2880, 128, ("suite",)),
    Gather("arrived", 65536, 1, 7168, 32, ("suite",)),  # rows that come from other devices
    Gather("few", 256, 8, 7168, 256, ("few",)),
    Gather("short", 65536, 8, 256, 64, ("few",)),
)


def products(case: Gather) -> list[Product]:
    """The kernel that ships, then others, of the same rows."""
    moved = (1 + case.k) * case.tokens * case.d * 2

    def by_xla(*arrays: jax.Array) -> jax.Array:
        return dispatch_p.bind(*arrays, fill=False, backend="xla")

    def shipped(config: Any) -> Function:
        return lambda *arrays: dispatch_p.bind(*arrays, fill=False, backend="cuda")

    def look(args: Any, out: jax.Array, theirs: jax.Array) -> jax.Array:
        return jnp.sum(out != theirs, dtype=jnp.int32)

    def judge(seen: Any) -> tuple[float, str]:
        return float(seen > 0), f"wrong: {int(seen)} elements differ" if seen else ""

    def product(name: str, ours: Any) -> Product:
        peers = {"xla": Peer(lambda: by_xla, check=False)}
        return Product(name, 0, moved, ours, peers, look, judge, beside="xla", targets={"copy": 0.95})

    others = {f"{c.warps}x{c.stages}x{c.stage_bytes}": c for c in CONFIGS}
    return [
        product("rows", shipped),
        *(product(name, lambda _, config=config: pinned(config)) for name, config in others.items()),
    ]


def pinned(config: gather.Config) -> Function:
    """Returns the kernel of a config as a function; XLA's gather where there is no GPU of its architecture."""

    def run(x: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
        problem = gather.Problem.of(x, permutation, inverse, device_of(lowering.target()))
        if not lowering.on_cuda() or gather.why_not(problem):
            return dispatch_p.bind(x, permutation, inverse, fill=False, backend="xla")
        result = jax.ShapeDtypeStruct((problem.rows, problem.d), x.dtype)
        return lowering.launch(gather.Kernel(problem, config).call(), [result], x, permutation, inverse)[0]

    return run


SUITE = Suite("gather", CASES, Gather.inputs, products)
