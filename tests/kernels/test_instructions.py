"""Which instructions multiply on which architecture: the table, and the rates of devices, held to the compiler."""

import pytest
from cubin import instructions, multiplies, nvdisasm
from instructions import MMA, expected

from cutjax.kernels import device
from cutjax.runtime import compiler
from cutjax.runtime.architectures import ARCHITECTURES

needs_tools = pytest.mark.skipif(
    compiler.compiler_missing() is not None or nvdisasm() is None, reason="needs NVRTC and nvidia-cuda-nvdisasm"
)


def one_instruction(ptx, registers):
    """A kernel of one mma.sync."""
    types = ptx.split(".")[-4:] if not ptx.endswith("popc") else ["s32", "b1", "b1", "s32"]
    result = {"f32": ("float", "f"), "f64": ("double", "d")}.get(types[0], ("unsigned", "r"))
    factor = ("double", "d") if types[1] == "f64" else ("unsigned", "r")
    names, sizes = "dab", registers
    first = [0, sizes[0], sizes[0] + sizes[1]]
    lists = ["{" + ",".join(f"%{at + i}" for i in range(size)) + "}" for at, size in zip(first, sizes, strict=True)]
    args = [
        ", ".join(f'"{constraint}"({name}[{i}])' for i in range(size))
        for name, size, constraint in zip(names, sizes, (f"+{result[1]}", factor[1], factor[1]), strict=True)
    ]
    loads = [
        f"for (int i = 0; i < {size}; ++i) {name}[i] = x[i * 3 + {i}];"
        for i, (name, size) in enumerate(zip(names[1:], sizes[1:], strict=True))
    ]
    return f"""
extern "C" __global__ void one({result[0]}* y, {factor[0]}* x) {{
  {result[0]} d[{sizes[0]}];
  {factor[0]} a[{sizes[1]}], b[{sizes[2]}];
  x += 64 * threadIdx.x;
  y += {sizes[0]} * threadIdx.x;
  for (int i = 0; i < {sizes[0]}; ++i) d[i] = y[i];
  {" ".join(loads)}
  asm volatile("mma.sync.aligned.{ptx} {lists[0]}, {lists[1]}, {lists[2]}, {lists[0]};"
               : {args[0]} : {args[1]}, {args[2]});
  for (int i = 0; i < {sizes[0]}; ++i) y[i] = d[i];
}}"""


def multiplying(texts, arch):
    """The instructions that multiply, of kernels in one cubin: the disassembler takes longer to start than to run."""
    names = [text.replace("void one(", f"void k{i}(") for i, text in enumerate(texts)]
    found = instructions(compiler.compile_kernel("\n".join(names), name="all", arch=arch).image)
    return sorted(code for code, count in found.items() for _ in range(count) if multiplies(code))


def compiles(text, arch):
    try:
        compiler.compile_kernel(text, name="one", arch=arch)
    except compiler.CompileError as error:
        if "sm_" not in error.log:  # "Feature ... requires .target sm_80 or higher"
            raise
        return False
    return True


@needs_tools
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_instructions(arch):
    rows = [row for of_rate in MMA.values() for row in of_rate]
    text = {row: one_instruction(row.ptx, row.registers) for row in rows}
    own = [row for row in rows if arch in row.archs]
    found = multiplying([text[row] for row in own], arch)
    # One instruction each, and of names that begin with another's, such as HMMA.16816.F32, the longer first.
    for row in sorted(own, key=lambda row: row.sass, reverse=True):
        found.remove(next(code for code in found if code.startswith(row.sass)))
    assert found == []
    # What is another's compiles to others; the shapes of sm_75 stay, at half the rate.
    others = [row for row in rows if arch not in row.archs and row.archs != ("sm_75",)]
    made = [row for row in others if compiles(text[row], arch)]
    if made:
        found = multiplying([text[row] for row in made], arch)
        assert not [code for code in found if code.startswith(tuple(row.sass for row in made))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_rate_is_that_of_an_instruction(arch):
    """Rates by wgmma and tcgen05 apart, a device has none that it has no instruction for."""
    rates = set(dict(device.reference(arch).flops)) - {"float32", "float64"}
    native = {name for name, rows in MMA.items() if any(arch in row.archs for row in rows)}
    wider = {"float8_e4m3fn", "float8_e5m2"} if arch in ("sm_90a", "sm_100a", "sm_103a") else set()
    assert rates <= native | wider
    assert native - rates <= {"uint8", "float64", "int1"}  # of one bit on sm_90a nothing is published


def test_what_kernels_must_have():
    assert expected("sm90", "bfloat16", "", "sm_90a") == expected("sm90", "float32", "tf32x3", "sm_90a") == ("HGMMA",)
    assert expected("mma", "float16", "", "sm_75") == ("HMMA.1688.F32",)
    assert expected("mma", "float32", "bf16x9", "sm_80") == ("HMMA.16816.F32.BF16",)
    assert expected("mma", "bfloat16", "", "sm_75") == ("FFMA", "HMMA")  # multiplied as f32, or by parts in f16
    assert expected("mma", "float32", "", "sm_89") == ("FFMA", "HMMA")
    assert expected("mma", "float64", "", "sm_75") == ("DFMA",)
