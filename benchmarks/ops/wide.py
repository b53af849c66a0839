"""Other operands than of 16 bits through wgmma, beside XLA's: ``python -m benchmarks run --op wide --tag suite``.

The kernels are launched as they are, with what is made of their operands before: tf32, 8-bit integers, float8, and
float32 by parts, which XLA computes too where it is told the algorithm, and at its precision "highest".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from benchmarks import oracle
from benchmarks.cases import Dense, operands
from benchmarks.suite import Peer, Product, Suite
from cutjax.binding.lowering import launch
from cutjax.epilogue.expression import identity
from cutjax.kernels.choose import choose
from cutjax.kernels.sm90 import kernel as sm90

_PRESETS = lax.DotAlgorithmPreset


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to multiply operands, and what XLA is told for the same.

    Attributes:
      operand, result, accumulator: dtypes.
      math: of float32.
      algorithm: what XLA is told.
      error: the bound on ||out - ref|| / ||ref||: of rounding operands, and of adding up (tests/gpu/test_wide_gpu.py).
    """

    operand: str
    result: str
    accumulator: str
    math: str = ""
    algorithm: Any = None
    error: float = 0.0


KINDS = {
    "tf32": Kind("float32", "float32", "float32", "tf32", _PRESETS.TF32_TF32_F32, 3.5e-4),
    "bf16": Kind("float32", "float32", "float32", "bf16", _PRESETS.BF16_BF16_F32, 2.7e-3),
    "bf16x3": Kind("float32", "float32", "float32", "bf16x3", _PRESETS.BF16_BF16_F32_X3, 1e-5),
    "bf16x6": Kind("float32", "float32", "float32", "bf16x6", _PRESETS.BF16_BF16_F32_X6, 1e-5),
    "bf16x9": Kind("float32", "float32", "float32", "bf16x9", _PRESETS.BF16_BF16_F32_X9, 1e-5),
    "tf32x3": Kind("float32", "float32", "float32", "tf32x3", _PRESETS.TF32_TF32_F32_X3, 1e-5),
    "int8": Kind("int8", "int32", "int32"),
    "float8_e4m3fn": Kind("float8_e4m3fn", "bfloat16", "float32", error=3e-3),
}


@dataclasses.dataclass(frozen=True)
class Wide(Dense):
    """A product of a kind."""

    kind: str = ""

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.layout} {self.kind}"

    @property
    def problem(self) -> cutjax.Problem:
        kind = KINDS[self.kind]
        operand = np.dtype(jnp.dtype(kind.operand))
        epilogue = identity(np.dtype(jnp.dtype(kind.result)), np.dtype(kind.accumulator))
        sizes = self.m, self.n, self.k, self.layout
        return cutjax.Problem.of(*sizes, operand, operand, epilogue=epilogue, math=kind.math)

    def inputs(self, seed: int) -> tuple[jax.Array, jax.Array]:
        """Random normal operands, integers 32 times as large."""
        return operands((self.a_shape, self.b_shape), (KINDS[self.kind].operand,) * 2)(seed)


# Against XLA's own algorithm of that name.
_TARGETS = {"tf32": 1.0, "int8": 1.0, "bf16x9": 1.0}
_HIGHEST = {"bf16x6": 2.2}  # of float32's precision "highest"

CASES = tuple(
    Wide(size, size, size, layout, tags=("suite",) if layout in ("nn", "nt") else ("layouts",), kind=kind)
    for kind in KINDS
    for size in (4096, 8192)
    for layout in ("nn", "nt", "tn", "tt")
)


def products(case: Wide) -> list[Product]:
    """The product, checked against float32 on the same device, of integers against XLA's, bit for bit."""
    asked, kind = case.problem, KINDS[case.kind]
    integers, result = kind.operand == "int8", jnp.dtype(kind.result)

    def ours(config: cutjax.Config | None) -> Any:
        def product(a, b):
            choice = choose(asked) if config is None else sm90.resolved(asked, config)
            shape = jax.ShapeDtypeStruct((case.m, case.n), result)
            called = choice.call()
            (out,) = launch(called, called.results or [shape], a, b)
            return out

        return product

    def xla(precision: Any) -> Callable[[], Any]:
        return lambda: lambda a, b: oracle.reference(a, b, case.layout, result, precision)

    def look(args: Any, out: Any, theirs: Any) -> Any:
        if integers:
            a, b = args
            ref = oracle.reference(a, b, case.layout, result, None)
            return jnp.mean(out != ref), jnp.zeros(())
        a, b = (x.astype(jnp.float32) for x in args)
        return oracle.distances(out, oracle.reference(a, b, case.layout), case.k)

    def judge(seen: Any) -> tuple[float, str]:
        relative = float(seen[0])
        return relative, "" if relative <= kind.error else f"wrong: {relative:.3g}, at most {kind.error:.3g}"

    peers = {"xla": Peer(xla(kind.algorithm), check=False)}
    targets = {"xla": _TARGETS[case.kind]} if case.kind in _TARGETS else {}
    if kind.math.endswith(("x3", "x6", "x9")):
        peers["highest"] = Peer(xla(lax.Precision.HIGHEST), check=False)
        targets |= {"highest": _HIGHEST[case.kind]} if case.kind in _HIGHEST else {}
    return [Product("", asked.flops, asked.bytes, ours, peers, look, judge, targets=targets)]


SUITE = Suite("wide", CASES, Wide.inputs, products, rough=3)
