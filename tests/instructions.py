"""The instructions that multiply, by what is multiplied and the architecture: those that each kernel must have.

All were found by compiling one instruction for each architecture (tests/kernels/test_instructions.py). Where an
architecture is not listed, ptxas refuses the instruction or makes it of others: of the 4-bit one on sm_90a 2 of 8 bits
and 190 more.
"""

from __future__ import annotations

from typing import NamedTuple

from cutjax.runtime.architectures import ARCHITECTURES

AMPERE_ON = tuple(arch for arch in ARCHITECTURES if arch != "sm_75")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      ptx: the shape and the types of mma.sync.
      registers: of d, a and b that a thread has.
      sass: what its name in machine code begins with.
      archs: where it is one.
    """

    ptx: str
    registers: tuple[int, int, int]
    sass: str
    archs: tuple[str, ...]


# By the rate of a Device that it has.
MMA = {
    "float16": [
        Instruction("m16n8k8.row.col.f32.f16.f16.f32", (4, 2, 1), "HMMA.1688.F32", ("sm_75",)),
        Instruction("m16n8k16.row.col.f32.f16.f16.f32", (4, 4, 2), "HMMA.16816.F32", AMPERE_ON),
    ],
    "float16_f16": [
        Instruction("m16n8k8.row.col.f16.f16.f16.f16", (2, 2, 1), "HMMA.1688.F16", ("sm_75",)),
        Instruction("m16n8k16.row.col.f16.f16.f16.f16", (2, 4, 2), "HMMA.16816.F16", AMPERE_ON),
    ],
    "bfloat16": [Instruction("m16n8k16.row.col.f32.bf16.bf16.f32", (4, 4, 2), "HMMA.16816.F32.BF16", AMPERE_ON)],
    "tf32": [Instruction("m16n8k8.row.col.f32.tf32.tf32.f32", (4, 4, 2), "HMMA.1688.F32.TF32", AMPERE_ON)],
    "int8": [
        Instruction("m8n8k16.row.col.s32.s8.s8.s32", (2, 1, 1), "IMMA.8816.S8.S8", ("sm_75",)),
        Instruction("m16n8k32.row.col.s32.s8.s8.s32", (4, 4, 2), "IMMA.16832.S8.S8", AMPERE_ON),
    ],
    "uint8": [
        Instruction("m8n8k16.row.col.s32.u8.u8.s32", (2, 1, 1), "IMMA.8816.U8.U8", ("sm_75",)),
        Instruction("m16n8k32.row.col.s32.u8.u8.s32", (4, 4, 2), "IMMA.16832.U8.U8", AMPERE_ON),
    ],
    "int4": [
        Instruction("m8n8k32.row.col.s32.s4.s4.s32", (2, 1, 1), "IMMA.8832.S4.S4", ("sm_75",)),
        Instruction("m16n8k64.row.col.s32.s4.s4.s32", (4, 4, 2), "IMMA.16864.S4.S4", ("sm_80", "sm_86", "sm_89")),
    ],
    "int1": [
        Instruction(
            "m16n8k256.row.col.s32.b1.b1.s32.and.popc",
            (4, 4, 2),
            "BMMA.168256.AND.POPC",
            ("sm_80", "sm_86", "sm_89", "sm_90a"),
        )
    ],
    "float8_e4m3fn": [
        Instruction(
            "m16n8k32.row.col.f32.e4m3.e4m3.f32", (4, 4, 2), "QMMA.16832.F32.E4M3", ("sm_89", "sm_120a", "sm_121a")
        )
    ],
    "float8_e5m2": [
        Instruction(
            "m16n8k32.row.col.f32.e5m2.e5m2.f32", (4, 4, 2), "QMMA.16832.F32.E5M2", ("sm_89", "sm_120a", "sm_121a")
        )
    ],
    # On the chips without an FP64 tensor core there is the instruction, but FMA is as fast.
    "float64": [
        Instruction("m8n8k4.row.col.f64.f64.f64.f64", (2, 1, 1), "DMMA", AMPERE_ON),
        Instruction("m16n8k16.row.col.f64.f64.f64.f64", (4, 8, 4), "DMMA.16x8x16", ("sm_90a",)),
    ],
}
_WGMMA = {
    "bfloat16": "HGMMA",
    "float16": "HGMMA",
    "tf32": "HGMMA",
    "int8": "IGMMA",
    "uint8": "IGMMA",
    "float8_e4m3fn": "QGMMA",
    "float8_e5m2": "QGMMA",
}


def rate(dtype: str, math: str) -> str:
    """The name of the rate that products go by, as a Device has it."""
    if math == "f16":
        return "float16_f16"
    name = math.partition("x")[0]
    return {"tf32": "tf32", "bf16": "bfloat16"}.get(name, dtype)


def expected(family: str, dtype: str, math: str, arch: str) -> tuple[str, ...]:
    """Names of instructions, as they begin, of which every kernel must have one."""
    name = rate(dtype, math)
    if family == "sm90":
        return (_WGMMA[name],)
    found = tuple(x.sass for x in MMA.get(name, ()) if arch in x.archs)
    if name == "float64":
        return (*found, "DFMA")
    if name == "complex128":
        return ("DMMA", "DFMA")
    if name == "complex64" or not found:
        return ("FFMA", "HMMA")
    return found
