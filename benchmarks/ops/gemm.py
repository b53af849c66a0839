"""Dense products beside XLA's: ``python -m benchmarks run --op gemm --tag suite``."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

import cutjax
from benchmarks import oracle
from benchmarks.cases import Dense
from benchmarks.ops import compile_cost, launch
from benchmarks.suite import Extra, Peer, Product, Suite

# (m, n, k, target): the products of language models, from one full wave to many, and the shapes where waves run out.
_DENSE = (
    (8192, 8192, 8192, 0.97),
    (4096, 4096, 4096, 0.97),
    (2048, 2048, 2048, 0.97),
    (1024, 1024, 1024, 0.90),
    (8192, 14336, 4096, 0.97),
    (8192, 4096, 14336, 0.97),
    (16384, 16384, 4096, 0.97),
    (4096, 28672, 8192, 0.97),
    (512, 4096, 14336, 0.90),
    (128, 28672, 4096, 0.90),
    (16384, 1024, 1024, 0.97),
)

# Bound by reading b, or by too few tiles: split-K and skinny kernels are still to come, so no target.
_SKINNY = ((1, 14336, 4096), (16, 14336, 4096), (256, 256, 65536))

_LAYOUTS = ((8192, 8192, 8192), (8192, 14336, 4096), (2048, 2048, 2048))

# Attention's first product, q @ k^T: heads times sequences in the batch, a short contraction.
_BATCHED = (
    (1024, 128, 128, 64),
    (1024, 256, 256, 64),
    (512, 512, 512, 64),
    (512, 512, 512, 128),
    (256, 1024, 1024, 64),
    (256, 1024, 1024, 128),
    (64, 2048, 2048, 64),
    (64, 2048, 2048, 128),
    (128, 2048, 2048, 128),
)

# Attention's second product, p @ v: reported, no target.
_PV = ((256, 1024, 64, 1024), (256, 1024, 128, 1024), (64, 2048, 128, 2048))


def _all() -> tuple[Dense, ...]:
    cases = []
    for m, n, k, target in _DENSE:
        tags = ("suite", "layouts") if (m, n, k) in _LAYOUTS else ("suite",)
        cases.append(Dense(m, n, k, tags=tags, target=target))
    cases += [Dense(m, n, k, tags=("suite", "skinny")) for m, n, k in _SKINNY]
    for m, n, k in _LAYOUTS:
        cases += [Dense(m, n, k, layout, tags=("layouts",), target=0.97) for layout in ("nt", "tn", "tt")]
    for batch, m, n, k in _BATCHED:
        cases += [Dense(m, n, k, layout, (batch,), tags=("batched",), target=0.95) for layout in ("nn", "nt")]
    cases += [Dense(m, n, k, batch=(batch,), tags=("pv",)) for batch, m, n, k in _PV]
    return tuple(cases)


CASES = _all()


def products(case: Dense) -> list[Product]:
    """The product, checked against float32 on the same device."""

    def ours(config: cutjax.Config | None) -> Any:
        return lambda a, b: cutjax.gemm(a, b, layout=case.layout, backend="cuda", config=config)

    def look(args: Any, out: Any, theirs: Any) -> Any:
        a, b = (x.astype(jnp.float32) for x in args)
        return oracle.distances(out, oracle.reference(a, b, case.layout), case.k)

    def judge(seen: Any) -> tuple[float, str]:
        elements = math.prod((*case.batch, case.m, case.n))
        relative, worst = map(float, seen)
        error = oracle.Error(relative, worst, oracle.tolerance(case.dtype, case.k, elements))
        return error.relative, "" if error.ok else f"wrong: {error}"

    return [
        Product(
            "",
            case.problem.flops,
            case.problem.bytes,
            ours,
            {"xla": Peer(lambda: oracle.xla(case.layout, case.dtype), check=False)},
            look,
            judge,
            targets={} if case.target is None else {"xla": case.target},
            figures={"of": case.of} if case.of else {},
        )
    ]


SUITE = Suite(
    "gemm",
    CASES,
    Dense.inputs,
    products,
    rough=3,
    extras={
        "launch": Extra(launch.in_processes, launch.show),
        "compile": Extra(compile_cost.in_processes, compile_cost.show),
    },
)
