"""Prologues that kernels of the family compute themselves: what they take of a thread, and their device text.

A thread changes what it copied to shared memory before anybody reads it (ffi/device/mma/load_changed.cuh), and in a
slim kernel what it holds of a in registers.
"""

from __future__ import annotations

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.problem import Problem
from cutjax.kernels.prologue import told

REGISTERS = 24  # of a thread, calibrated on the compiler's report


def slim_reasons(problem: Problem) -> list[str]:
    """Returns the reasons against computing it in a slim kernel."""
    across = problem.a.prologue is not None and problem.a.contiguous != "k"
    return ["slim kernels compute prologues along k"] * across


def slim_registers(problem: Problem) -> int:
    """Returns the registers of a thread of a slim kernel beside others': for what operands are read along k."""
    specs = problem.a.prologue.operands if problem.a.prologue else ()
    return 8 * (sum(spec.col for spec in specs) > 1)


def text(problem: Problem) -> str:
    """Returns the text of ``Told``, what a prologue is told, and ``Change``, which computes it of 8 elements."""
    prologue = problem.a.prologue
    assert prologue is not None
    _, columns = problem.a.array(problem.m, problem.k)
    even = columns % 2 == 0
    stored = DTYPES[problem.a.dtype.name].stored
    before, each, values = _loads(prologue, even)
    c, c1 = ("min(c, told.columns - 2)", "") if even else ("min(c, told.columns - 1)", "min(c + 1, told.columns - 1)")
    return f"""{emit.emit(prologue, "prologue")}#line 1 "change (generated)"
{told(prologue)}struct Change {{
  Told told;

  template <typename Source>
  DEVICE void begin(const Source& source) {{ told = source.told; }}

  DEVICE void operator()(u32 (&x)[4], int line, int element, int valid) const {{
    int row = min(line, told.rows - 1);{before}
#pragma unroll
    for (int j = 0; j < 4; ++j) {{
      int c = element + 2 * j;
      int at = {c};{f"{chr(10)}      int next = {c1};" if c1 else ""}{each}
      Pair<Dtype::{stored}> pair;
      pair.bits[0] = x[j];
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {{
        const float value[1] = {{pair[e]}};
        prologue_element({", ".join(["value", *values, "row", "c + e", "y[e]"])});
      }}
      int there = valid - 4 * j;  // elements past the end of k are zero, whatever it makes of them
      x[j] = pack<Dtype::{stored}>(y[0], y[1]) & (there >= 4 ? ~0u : there <= 0 ? 0u : 0xffffu);
    }}
  }}
}};
"""


def _loads(prologue: Epilogue, even: bool) -> tuple[str, str, list[str]]:
    """Returns the loads of operands for a line, those for two elements of it, and each operand of element e."""
    before, each, values = "", "", []
    for i, spec in enumerate(prologue.operands):
        size, name = np.dtype(spec.dtype).itemsize, f"o{i}"
        line = f"told.x{i}" + (f" + static_cast<i64>(row) * {'told.columns * ' * spec.col}{size}" if spec.row else "")
        declared = f"Pair<Dtype::{DTYPES[spec.dtype].stored}> {name};"
        if not spec.col:
            before += f"\n    {declared}\n    {name}.load_one({line});"
            values.append(f"{name}[0]")
            continue
        places = f"{line} + at * {size}ll" if even else f"{line} + at * {size}ll, {line} + next * {size}ll"
        each += f"\n      {declared}\n      {name}.load{'' if even else '_each'}({places});"
        values.append(f"{name}[e]")
    return before, each, values
