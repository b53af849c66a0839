"""Which dtypes the mma family multiplies on which architecture, by which instruction, and what it refuses."""

import pytest
from cubin import instructions_of_all, multiplies, nvdisasm
from kernel_host import problem

import cutjax
from cutjax.kernels.mma import family
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import MATHS, math_of
from cutjax.runtime import compiler

needs_tools = pytest.mark.skipif(
    compiler.compiler_missing() is not None or nvdisasm() is None, reason="needs NVRTC and nvidia-cuda-nvdisasm"
)

# By dtype and Problem.math: the instruction, on an architecture.
INSTRUCTIONS = {
    ("bfloat16", ""): ("HMMA.16816.F32.BF16", "sm_86"),
    ("float16", ""): ("HMMA.1688.F32", "sm_75"),
    ("float16", "f16"): ("HMMA.16816.F16", "sm_80"),
    ("float32", ""): ("FFMA", "sm_90a"),
    ("float32", "tf32"): ("HMMA.1688.F32.TF32", "sm_80"),
    ("float32", "tf32x3"): ("HMMA.1688.F32.TF32", "sm_89"),
    ("float32", "bf16"): ("HMMA.16816.F32.BF16", "sm_80"),
    ("float32", "bf16x3"): ("HMMA.16816.F32.BF16", "sm_120a"),
    ("float32", "bf16x6"): ("HMMA.16816.F32.BF16", "sm_90a"),
    ("float32", "bf16x9"): ("HMMA.16816.F32.BF16", "sm_80"),
    ("float64", ""): ("DMMA.16x8x8", "sm_90a"),
    ("complex64", ""): ("FFMA", "sm_80"),
    ("complex64", "tf32"): ("HMMA.1688.F32.TF32", "sm_80"),
    ("complex128", ""): ("DMMA", "sm_80"),
    ("int32", ""): ("IMAD", "sm_86"),
    ("uint32", ""): ("IMAD", "sm_80"),
    ("int64", ""): ("IMAD.WIDE", "sm_80"),
    ("uint64", ""): ("IMAD.WIDE", "sm_90a"),
    ("int8", ""): ("IMMA.16832.S8.S8", "sm_90a"),
    ("uint8", ""): ("IMMA.8816.U8.U8", "sm_75"),
    ("float8_e4m3fn", ""): ("QMMA.16832.F32.E4M3", "sm_89"),
    ("float8_e5m2", ""): ("QMMA.16832.F32.E5M2", "sm_120a"),
}
# Where it is another one.
OTHERS = [
    ("float64", "", "sm_80", "DMMA.8"),
    ("float64", "", "sm_86", "DFMA"),
    ("complex128", "", "sm_120a", "DFMA"),
    ("float8_e4m3fn", "", "sm_90a", "HMMA.16816.F32"),
]
CASES = [(*way, arch, opcode) for way, (opcode, arch) in INSTRUCTIONS.items()] + OTHERS


def test_every_way_has_an_instruction():
    assert INSTRUCTIONS.keys() == MATHS.keys()


@needs_tools
@pytest.mark.parametrize("arch", sorted({arch for _, _, arch, _ in CASES}))
def test_instructions(arch):
    cases = [case for case in CASES if case[2] == arch]
    images = [compiled(dtype, math, arch) for dtype, math, *_ in cases]
    for (dtype, math, _, opcode), found in zip(cases, instructions_of_all(images, arch), strict=True):
        assert [code for code in found if code.startswith(opcode)], (dtype, math)
        if not opcode.startswith("IMAD"):  # nor another that multiplies
            others = [code for code in found if multiplies(code) and not code.startswith((opcode, "HFMA2.MMA"))]
            assert not others, (dtype, math)


def compiled(dtype, math, arch):
    asked = problem(dtype, math, "nn", arch)
    way = math_of(asked)
    config = Config(16, 32, way.depths[0], 16, 16 if way.words > 8 else 32, stages=2)
    kernel = mma.resolved(asked, config)
    cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch=arch)
    assert "warning" not in cubin.log
    assert cubin.resources.spill_store_bytes == 0
    return cubin.image


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_every_dtype_has_configs(arch):
    """But bf16, TF32 and parts on sm_75, and float8 before sm_89."""
    for dtype, math in MATHS:
        try:
            asked = problem(dtype, math, "nn", arch, 512, 512, 512)
        except StopIteration:
            refused = dtype.startswith("float8") and arch in ("sm_75", "sm_80", "sm_86")
            assert refused or (arch == "sm_75" and (dtype == "bfloat16" or math.startswith(("tf32", "bf16"))))
            continue
        serving = [config for config in family.configs(asked) if not isinstance(family.resolve(asked, config), tuple)]
        assert serving, (dtype, math)
        assert all(family.resolve(asked, config).time_us(asked.device) > 0 for config in serving)


def test_operands_of_8_bits_are_transposed():
    kernel = mma.resolved(problem("int8", "", "nn"), Config(64, 64, 64, 32, 32))
    (copied,) = kernel.prepared
    assert (copied.buffer, copied.read, copied.written) == (1, 64 * 64, 64 * 64)
    assert kernel.notes == ("b transposed",)
    assert mma.resolved(problem("int8", "", "nt"), kernel.config).notes == ()


def test_what_is_refused_says_why():
    def why(asked, config=None):
        found = mma.resolve(asked, config or Config())
        assert isinstance(found, tuple)
        return " ".join(found)

    narrow = cutjax.Problem.of(64, 64, 64, "nt", "float8_e4m3fn", "float8_e4m3fn", "float32", arch="sm_80")
    assert "f8_e4m3fn x f8_e4m3fn on sm_80" in why(narrow)
    two = cutjax.Problem.of(64, 64, 64, "nt", "int8", "float8_e4m3fn", "int32", arch="sm_89")
    assert "s8 x f8_e4m3fn on sm_89" in why(two)
    assert "bk=64: one of 8, 16" in why(problem("float32"), Config(bk=64))
