"""Runs kernels of mma, direct and halo, and the gather, on the host: their text over tests/native/kernel_shim.h."""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import gxx
import jax.numpy as jnp
import numpy as np

from cutjax.epilogue.expression import identity
from cutjax.kernels import gather
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import MATHS
from cutjax.kernels.problem import Problem
from cutjax.runtime.architectures import number
from cutjax.runtime.launch import Int32, Int64, Param, Pointer, TensorMap

DEVICE = pathlib.Path(__file__).parents[1] / "ffi" / "device"
MATH = "mma/math.cuh"  # which the shim needs before its own
# What the shim has instead, and what goes before it.
REPLACED = ("common/atoms.cuh", "common/tma.cuh", "sm90/atoms.cuh", "mma/atoms.cuh", "mma/instruction.cuh", MATH)
REPLACED += ("halo/atoms.cuh",)
_LOAD = re.compile(r'asm volatile\("ld\.global\.nc\.(?:v\d\.)?u(\d+)[^"]*"\s*:([^;]*?):\s*"l"\(([^;]*)\)\);')


class Map(ctypes.Structure):
    """A tensor map, as the shim has it."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("dims", ctypes.c_longlong * 5),
        ("strides", ctypes.c_longlong * 4),
        ("box", ctypes.c_int * 5),
        ("bytes", ctypes.c_int),
        ("span", ctypes.c_int),
        ("tf32", ctypes.c_int),
    )


_LAUNCH = """
struct Arguments {{ {fields} }};
static const Arguments* given;
static std::vector<bool> done;
static void thread() {{
  {name}({values});
  done[threadIdx.x] = true;
  while (true) wait_for_others();
}}
extern "C" void launch(int blocks, int from, int count, const char** firsts, const long long* sizes,
                       const Arguments* arguments) {{
  constexpr size_t STACK = 1 << 18;
  static std::vector<char> stacks(STACK * THREADS);
  given = arguments, block_threads = THREADS, gridDim.x = blocks, arrays.clear();
  for (int i = 0; i < count; ++i) arrays.push_back({{firsts[i], static_cast<size_t>(sizes[i])}});
  for (blockIdx.x = from; blockIdx.x < blocks; ++blockIdx.x) {{
    std::memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
    contexts.assign(THREADS, {{}}), done.assign(THREADS, false);
    for (int i = 0; i < THREADS; ++i) {{
      getcontext(&contexts[i]);
      contexts[i].uc_stack.ss_sp = &stacks[STACK * i], contexts[i].uc_stack.ss_size = STACK;
      makecontext(&contexts[i], thread, 0);
    }}
    while (std::find(done.begin(), done.end(), false) != done.end())
      for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
        if (!done[threadIdx.x]) swapcontext(&outside, &contexts[threadIdx.x]);
  }}
}}
"""


def problem(dtype: str, math: str = "", layout: str = "nn", arch: str = "sm_80", m=64, n=64, k=64, **fields) -> Problem:
    """A product of a dtype, in the dtype that its products are added up in; of 32 bits, where that is wider."""
    of = next(math for math in MATHS[dtype, math] if number(arch) in math.archs)
    dtype, accumulator = jnp.dtype(dtype), np.dtype(of.accumulator)
    return Problem.of(
        m,
        n,
        k,
        layout,
        dtype,
        dtype,
        accumulator,
        epilogue=identity(accumulator, accumulator),
        arch=arch,
        math=math,
        **fields,
    )


def _load(found: re.Match[str]) -> str:
    """Returns the call of the shim in place of an instruction that loads words."""
    bits, outputs, place = found.groups()
    return f"load_words<u{bits}>({place}, {', '.join(re.findall(r'=.*?[(](.*?)[)]', outputs))});"


def text(kernel: mma.Kernel | gather.Kernel) -> str:
    """The text that g++ compiles."""
    parts = re.split(r'^(?=#line 1 ")', kernel.source, flags=re.M)
    kept = [part for part in parts if not part.startswith(tuple(f'#line 1 "{name}"' for name in REPLACED))]
    wgmma = (gxx.NATIVE / "wgmma_shim.h").read_text()
    kept = [wgmma if part.startswith('#line 1 "wgmma (generated)"') else part for part in kept]
    body = re.sub(r"^#line.*$|^ *extern __shared__.*$", "", "".join(kept), flags=re.M)
    body = _LOAD.sub(_load, body)
    names = [argument.name for argument in kernel.arguments]
    launch = _LAUNCH.format(
        fields=" ".join(f"{argument.declaration};" for argument in kernel.arguments),
        name=kernel.name,
        values=", ".join(f"given->{name}" for name in names),
    )
    shims = [path.read_text() for path in (gxx.NATIVE / "device_shim.h", DEVICE / MATH, gxx.NATIVE / "kernel_shim.h")]
    return "\n".join([f"#define __CUDA_ARCH__ {number(kernel.problem.device.arch)}0", *shims, body, launch])


# Instead of the sanitizer's own library.
_OVERFLOWS = "".join(
    f'extern "C" void __ubsan_handle_{name}_overflow(...) {{ fail("a signed integer overflows"); }}\n'
    for name in ("add", "sub", "mul", "negate", "divrem")
)


_libraries: dict[tuple[str, bool], ctypes.CDLL] = {}  # kernels of other sizes have the same text


def _library(folder: pathlib.Path, name: str, text: str, sanitized: bool) -> ctypes.CDLL:
    if (text, sanitized) not in _libraries:
        flags = ["-w", *["-fsanitize=signed-integer-overflow"] * sanitized]
        _libraries[text, sanitized] = gxx.build(folder, text + _OVERFLOWS * sanitized, *flags, name=name)
    return _libraries[text, sanitized]


def run(
    kernel: mma.Kernel | gather.Kernel,
    arrays: Sequence[np.ndarray],
    folder: pathlib.Path,
    blocks: int = 2,
    first: int = 0,
    sanitized: bool = False,
) -> None:
    """Launches a kernel's blocks from the first on, on arrays, the last of which it writes.

    Where it is sanitized, a signed integer that overflows ends the process, as an address outside of arrays does.
    """
    library = _library(folder, kernel.name, text(kernel), sanitized)
    types = {Pointer: ctypes.c_void_p, Int32: ctypes.c_int, Int64: ctypes.c_longlong, TensorMap: Map}
    values = [argument.value for argument in kernel.arguments]
    fields = [(f"field{i}", types[type(value)]) for i, value in enumerate(values)]
    structure = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    given = structure(*(_passed(value, arrays) for value in values))
    firsts = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
    sizes = (ctypes.c_longlong * len(arrays))(*(x.nbytes for x in arrays))
    library.launch(blocks, first, len(arrays), firsts, sizes, ctypes.byref(given))


def _passed(value: Param, arrays: Sequence[np.ndarray]) -> Any:
    """Returns a parameter as the library takes it."""
    if isinstance(value, Pointer):
        return arrays[value.buffer].ctypes.data + value.byte_offset
    if not isinstance(value, TensorMap):
        return value.value
    found = Map(arrays[value.buffer].ctypes.data, value.dims, value.strides, value.box)
    found.bytes, found.span, found.tf32 = value.dtype.itemsize, value.swizzle, value.element == "tfloat32"
    return found


def aligned(x: np.ndarray) -> np.ndarray:
    """The array where a device has it: at a multiple of 256 bytes."""
    memory = np.zeros(x.nbytes + 512, np.uint8)
    first = -memory.ctypes.data % 256
    found = memory[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    found[...] = x
    return found


def multiply(a: np.ndarray, b: np.ndarray, asked: Problem, config: Config, folder: pathlib.Path) -> np.ndarray:
    """The product of ``a[m, k]`` and ``b[k, n]``, which lie as the problem's layout says."""
    kernel = mma.resolved(asked, config)
    a, b = (x.T if turned == "t" else x for x, turned in zip((a, b), kernel.problem.layout, strict=True))
    result = aligned(np.full((asked.m, asked.n), 7).astype(asked.out_dtype))
    run(kernel, [aligned(a), aligned(b), result], folder)
    return result


def check_small_integers(asked: Problem, config: Config, folder: pathlib.Path) -> None:
    """Asserts that a product of random integers, up to 8 either way, is exact."""
    rng, dtype = np.random.default_rng(0), asked.a.dtype
    least = 0 if dtype.kind == "u" else -8
    shapes = (asked.m, asked.k), (asked.k, asked.n)
    a, b = (rng.integers(least, 9, shape).astype(np.float64) for shape in shapes)
    if dtype.kind == "c":
        a, b = (x + 1j * rng.integers(-8, 9, shape) for x, shape in zip((a, b), shapes, strict=True))
    if asked.math == "f16":
        a, b = np.sign(a), np.sign(b)  # sums that 11 bits hold
    found = multiply(a.astype(dtype), b.astype(dtype), asked, config, folder)
    np.testing.assert_array_equal(found.astype(a.dtype), a @ b)


def installed() -> bool:
    """True where there is a g++, and a checkout's device text."""
    return gxx.installed() and DEVICE.exists()
