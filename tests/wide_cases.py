"""Ways in which wgmma multiplies other operands than of 16 bits, for tests here and on a device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from cutjax.binding.lowering import launch
from cutjax.epilogue.expression import identity
from cutjax.epilogue.trace import trace
from cutjax.kernels.sm90 import kernel as sm90

F32, S32 = np.dtype(np.float32), np.dtype(np.int32)
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)


class Kind(NamedTuple):
    """Dtypes of the operands and of the accumulators, and how float32 is multiplied."""

    a: np.dtype
    b: np.dtype
    acc: np.dtype
    math: str = ""


KINDS = {math: Kind(F32, F32, F32, math) for math in ("tf32", "tf32x3", "bf16", "bf16x3", "bf16x6", "bf16x9")} | {
    "s8": Kind(np.dtype(np.int8), np.dtype(np.int8), S32),
    "u8": Kind(np.dtype(np.uint8), np.dtype(np.uint8), np.dtype(np.uint32)),
    "s8xu8": Kind(np.dtype(np.int8), np.dtype(np.uint8), S32),
    "e4m3": Kind(E4M3, E4M3, F32),
    "e5m2": Kind(E5M2, E5M2, F32),
    "e4m3xe5m2": Kind(E4M3, E5M2, F32),
}


def problem(kind: str, m: int, n: int, k: int, layout: str = "nn", out: Any = None, **fields: Any) -> cutjax.Problem:
    """The plain product, in the accumulators' dtype unless said otherwise."""
    a, b, acc, math = KINDS[kind]
    fields = {"epilogue": identity(np.dtype(out or acc), acc), **fields}
    return cutjax.Problem.of(m, n, k, layout, a, b, math=math, **fields)


def fused(kind: str, m: int, n: int, k: int, fn: Any, *operands: Any, **fields: Any) -> cutjax.Problem:
    """The product with an epilogue."""
    acc = jax.ShapeDtypeStruct((m, n), KINDS[kind].acc)
    return problem(kind, m, n, k, epilogue=trace(fn, [acc], operands).epilogue, **fields)


def call(asked: cutjax.Problem, config: cutjax.Config | None = None) -> Any:
    """The function of the operands that launches the kernel of a config, or of the fastest."""
    config = config or cutjax.candidates(asked)[0]
    called = sm90.resolved(asked, config).call()
    shape = (*asked.batch, *[asked.groups_along("k")] * (asked.divided == "k"), asked.m, asked.n)
    results = [jax.ShapeDtypeStruct(shape, np.dtype(out.dtype)) for out in asked.epilogue.outputs]
    return jax.jit(functools.partial(launch, called, called.results or results, {}))
