"""The ways to multiply: what each takes, what it adds up in, and which instruction and fragments it has."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from cutjax.kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Math:
    """One way to multiply.

    Attributes:
      name: of the instruction (ffi/device/mma/instruction.cuh).
      accumulator: the C++ type of the sums.
      fragments: the file that reads fragments and multiplies them.
      archs: numbers of the architectures that have it, 80 for sm_80; from the first to the last.
      rate: of the device's rates, by name (`Device.flops`).
      k: elements of the contraction that one slice of fragments takes.
      words: of 32 bits, of the accumulators of 16 x 8 elements that a thread holds.
    """

    name: str
    accumulator: str
    fragments: str
    archs: range
    rate: str
    k: int
    words: int = 4


_ALL, _AMPERE, _ADA = range(75, 1000), range(80, 1000), range(89, 1000)
BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)
# By dtype of the operands and Problem.math.
MATHS = {
    (BF16, ""): Math("bf16", "float", "tensor", _AMPERE, "bfloat16", 16),
    (F16, ""): Math("f16", "float", "tensor", _ALL, "float16", 16),
    (F16, "f16"): Math("f16_f16", "float", "tensor", _ALL, "float16_f16", 16, 2),
}


def arch_number(arch: str) -> int:
    """Returns 80 for "sm_80", 90 for "sm_90a"."""
    return int("".join(c for c in arch if c.isdigit()) or 0)


def math_of(problem: Problem) -> Math | None:
    """Returns how the operands are multiplied on the problem's architecture; None where the family cannot."""
    found = MATHS.get((problem.a_dtype, problem.math))
    return found if found and arch_number(problem.arch) in found.archs else None
