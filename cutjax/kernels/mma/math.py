"""The ways to multiply: what each takes, what it adds up in, and which instruction and fragments it has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container

from cutjax.kernels.device import DMMA
from cutjax.kernels.mma.config import Config
from cutjax.kernels.problem import Problem
from cutjax.runtime.architectures import number


@dataclasses.dataclass(frozen=True)
class Math:
    """One way to multiply.

    Attributes:
      name: of the instruction (ffi/device/mma/instruction.cuh).
      accumulator: dtype of the sums.
      fragments: the file that reads fragments and multiplies them.
      archs: numbers of the architectures that have it, 80 for sm_80; from the first to the last.
      rate: of the device's rates, by name (`Device.flops`).
      k: elements of the contraction that one slice of fragments takes, at least.
      depths: of one stage, in elements.
      read: words of 32 bits of the fragments of k elements that a thread holds: of 16 rows, and of 8 columns.
      words: of the accumulators of 16 x 8 elements that a thread holds.
      instructions: how many products of that rate make one product.
      along_k: whether operands must lie along k.
      beside: registers of a thread that it takes beside others' needs.
    """

    name: str
    accumulator: str
    fragments: str
    archs: Container[int]
    rate: str
    k: int
    depths: tuple[int, ...]
    read: tuple[int, int] = (4, 2)
    words: int = 4
    instructions: int = 1
    along_k: bool = False
    beside: int = 0

    def slice(self, config: Config, arch: str) -> int:
        """Returns the elements of k that one slice takes, of those of a stage that a warp multiplies."""
        if self.accumulator != "float64" or self.fragments != "double":
            return self.k
        if halved(config):
            return self.k // 2
        # From sm_90 on, DMMA may be deeper: it reads and writes accumulators less often.
        return 16 if number(arch) >= 90 and config.bk // config.sliced_k >= 32 else self.k

    def stage_bytes(self, bm: int, bn: int, bk: int, products: int, size: int, in_units: bool = False) -> int:
        """Returns the shared memory of one stage, of elements of so many bytes, of those of FMA in units or not."""
        of_b = 1 if self.fragments == "decode" else size
        padding = 0 if self.fragments != "fma" else 8 if in_units else 16 * (1 + products)  # after a line
        return (bm * size + products * bn * of_b + padding) * bk


def halved(config: Config) -> bool:
    """True of warp tiles of float64 beside whose accumulators, and addresses, there is room for half as much of k."""
    return config.wm * config.wn >= 2048 and not config.tma


_ALL, _AMPERE, _ADA = range(75, 1000), range(80, 1000), range(89, 1000)


def _fma(accumulator: str, rate: str, words: int, instructions: int = 1, beside: int = 0) -> Math:
    read = 2 * words, 2 * words
    return Math("fma", accumulator, "fma", _ALL, rate, 1, (8, 16), read, 4 * words, instructions, beside=beside)


def _terms(name: str, instructions: int) -> Math:
    return Math(name, "float32", "terms", _AMPERE, "bfloat16", 16, (32,), (8, 4), 4, instructions, beside=40)


def _bytes(name: str, accumulator: str, archs: Container[int], rate: str, depths=(64, 128), beside: int = 0) -> Math:
    return Math(name, accumulator, "tensor", archs, rate, 32, depths, along_k=True, beside=beside)


# By dtype of the operands and Problem.math; the first that an architecture has.
MATHS = {
    ("bfloat16", ""): (Math("bf16", "float32", "tensor", _AMPERE, "bfloat16", 16, (32, 64)),),
    ("float16", ""): (Math("f16", "float32", "tensor", _ALL, "float16", 16, (32, 64)),),
    ("float16", "f16"): (Math("f16_f16", "float32", "tensor", _ALL, "float16_f16", 16, (32, 64), words=2),),
    ("float32", ""): (_fma("float32", "float32", 1),),
    ("float32", "tf32"): (Math("tf32", "float32", "tensor", _AMPERE, "tf32", 8, (16, 32), beside=8),),
    ("float32", "tf32x3"): (
        Math("tf32x3", "float32", "terms", _AMPERE, "tf32", 8, (16, 32), instructions=3, beside=40),
    ),
    ("float32", "bf16"): (_terms("bf16x1", 1),),
    ("float32", "bf16x3"): (_terms("bf16x3", 3),),
    ("float32", "bf16x6"): (_terms("bf16x6", 6),),
    ("float32", "bf16x9"): (_terms("bf16x9", 9),),
    ("float64", ""): (
        Math("dmma", "float64", "double", DMMA, "float64", 8, (16, 32), (8, 4), 8),
        _fma("float64", "float64", 2, beside=8),
    ),
    ("complex64", ""): (_fma("complex64", "float32", 2, 4),),
    ("complex64", "tf32"): (Math("tf32", "complex64", "double", _AMPERE, "tf32", 8, (16, 32), (8, 4), 8, 4),),
    ("complex128", ""): (
        Math("dmma", "complex128", "double", DMMA, "float64", 4, (8, 16), (8, 4), 16, 4),
        _fma("complex128", "float64", 4, 4),
    ),
    # A multiplication and an addition of integers issue half as often as FMA, of 64 bits an eighth.
    ("int32", ""): (_fma("int32", "float32", 1, 2),),
    ("uint32", ""): (_fma("uint32", "float32", 1, 2),),
    ("int64", ""): (_fma("int64", "float32", 2, 8, beside=48),),
    ("uint64", ""): (_fma("uint64", "float32", 2, 8, beside=48),),
    ("int8", ""): (_bytes("s8", "int32", _ALL, "int8"),),
    ("uint8", ""): (_bytes("u8", "uint32", _ALL, "int8"),),
    # Sums that are added apart take registers.
    ("float8_e4m3fn", ""): (_bytes("e4m3", "float32", _ADA, "float8_e4m3fn", (64,), 16),),
    ("float8_e5m2", ""): (_bytes("e5m2", "float32", _ADA, "float8_e5m2", (64,), 16),),
}

# The same of operands of two dtypes, by those of a and b. Sums of signed and unsigned integers are signed.
MIXED = {
    ("float8_e4m3fn", "float8_e5m2"): (_bytes("e4m3_e5m2", "float32", _ADA, "float8_e4m3fn", (64,), 16),),
    ("float8_e5m2", "float8_e4m3fn"): (_bytes("e5m2_e4m3", "float32", _ADA, "float8_e4m3fn", (64,), 16),),
    ("int8", "uint8"): (_bytes("s8_u8", "int32", _ALL, "int8"),),
    ("uint8", "int8"): (_bytes("u8_s8", "int32", _ALL, "int8"),),
}


@functools.lru_cache(maxsize=1024)
def math_of(problem: Problem) -> Math | None:
    """Returns the way to multiply a problem's operands on its architecture; None where the family has none."""
    a, b = problem.a.dtype.name, problem.bs[0].dtype.name
    math = "" if problem.math == "fast" else problem.math  # which it is not: sums of float8 are all added apart
    narrow = problem.bs[0].narrow_beside(problem.a) and not math
    if a == b or narrow:
        ways = MATHS.get((a, math), ())
    else:
        ways = () if math else MIXED.get((a, b), ())
    found = next((way for way in ways if number(problem.arch) in way.archs), None)
    # Of a narrow b fragments are bytes until they are multiplied.
    return dataclasses.replace(found, fragments="decode", read=(4, 1), beside=16) if found and narrow else found
