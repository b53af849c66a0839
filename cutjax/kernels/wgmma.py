"""The text of wgmma, Hopper's instruction of a warpgroup, for exactly the shape in use."""

from __future__ import annotations

import numpy as np

from cutjax.dtypes import DTYPES


def _type(dtype: np.dtype) -> str:
    return "tf32" if dtype == np.float32 else DTYPES[dtype.name].stored


def wgmma(n: int, a: np.dtype, b: np.dtype, a_k_major: bool, b_k_major: bool, of_registers: bool = False) -> str:
    """Returns ``wgmma.mma_async`` of 64 x n and 32 bytes of k, with both operands in shared memory, or a in registers.

    It accumulates in f32, or integers in 32 bits.
    """
    count, k, integers = n // 2, 32 // a.itemsize, a.kind in "iu"
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{"r" if integers else "f"}"(d[{i}])' for i in range(count))
    types = f"{'s32' if integers else 'f32'}.{_type(a)}.{_type(b)}"
    modes = "" if integers else ", 1, 1"  # signs
    modes += "" if a.itemsize != 2 else f", {int(not a_k_major)}" * (not of_registers) + f", {int(not b_k_major)}"
    of_a, first, inputs = "u64 a", f"%{count}", '"l"(a)'
    if of_registers:
        of_a, inputs = "const u32 (&a)[4]", ", ".join(f'"r"(a[{i}])' for i in range(4))
        first = f"{{{', '.join(f'%{count + i}' for i in range(4))}}}"
    last = count + (4 if of_registers else 1)
    return f"""#line 1 "wgmma (generated)"
DEVICE void wgmma(Acc (&d)[{count}], {of_a}, u64 b, int accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{last + 1}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types} "
      "{{{registers}}}, {first}, %{last}, p{modes};\\n}}"
      : {outputs}
      : {inputs}, "l"(b), "r"(accumulate));
}}
"""
