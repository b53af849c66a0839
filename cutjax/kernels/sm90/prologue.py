"""Prologues of x that kernels compute in shared memory, where operands are swapped: x is the operand of the columns.

Warpgroups change a stage's tile of x once TMA has brought it, and multiply then (ffi/device/sm90/change.cuh).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.epilogue.expression import OperandSpec
from cutjax.kernels.problem import Problem
from cutjax.kernels.prologue import told
from cutjax.kernels.sm90.config import Sizes
from cutjax.kernels.staging import instructions

MOST_UNITS = 8  # of 16 bytes that a thread changes of a block, each in text of its own
MOST_REGISTERS = 40  # of operands that a thread holds
CYCLES_A_US = 1755


def is_in(problem: Problem) -> bool:
    """True if a problem, as it is multiplied, has a prologue of the columns' operand."""
    return problem.bs[0].prologue is not None


def units(config: Sizes, problem: Problem) -> tuple[Any, Any]:
    """Returns the lines, and the units of 16 bytes of each, that a thread changes of a block of k."""
    threads = 128 * config.bm // (64 * config.m_blocks)
    if problem.bs[0].contiguous == "k":
        return -(-config.bn * 8 // threads), config.depth(problem) // 64
    chunk = config.chunk(problem.bs[0], 1)
    return -(-config.depth(problem) * chunk // 8 // threads), -(-config.bn // chunk)


def registers(config: Sizes, problem: Problem) -> Any:
    """Returns the registers of the operands of a thread's places."""
    prologue = problem.bs[0].prologue
    assert prologue is not None
    lines, parts = units(config, problem)
    return sum(_registers(spec, lines, parts) for spec in prologue.operands)


def _registers(spec: OperandSpec, lines: Any, parts: Any) -> Any:
    of_pair = max(1, np.dtype(spec.dtype).itemsize // 2)
    return of_pair * (4 * parts if spec.col else 1) * (lines if spec.row else 1)


def change_us(config: Sizes, problem: Problem) -> Any:
    """Returns the microseconds in which a block of threads computes a k block's change; 0 where there is none.

    Counted, not measured: each of an SM's four schedulers issues one instruction a cycle, for a warp of each warpgroup.
    """
    prologue = problem.bs[0].prologue
    if prologue is None:
        return 0.0
    lines, parts = units(config, problem)
    return config.consumers * lines * parts * (8 * (instructions(prologue) + 1.5) + 6) / CYCLES_A_US


def text(problem: Problem) -> str:
    """Returns the text of ``Told``, what a prologue is told, and ``Beside``, the operands of a thread's places."""
    b = problem.bs[0]
    prologue = b.prologue
    assert prologue is not None
    _, columns = b.array(problem.n, problem.k)
    unit = 8 if columns % 8 == 0 else 2 if columns % 2 == 0 else 1
    stored = DTYPES[b.dtype.name].stored
    fields, fixed, moving, values = "", "", "", []
    for i, spec in enumerate(prologue.operands):
        dtype, size = f"Dtype::{DTYPES[spec.dtype].stored}", np.dtype(spec.dtype).itemsize
        of_line, of_column = "[LINES]" * spec.row, "[PARTS]" * spec.col
        fields += f"\n  Pair<{dtype}> x{i}{of_line}{of_column}{'[4]' * spec.col};"
        at = f"told.x{i}" + (f" + static_cast<i64>(at.line_of(l)) * {'told.columns * ' * spec.col}{size}" * spec.row)
        name = f"x{i}{'[l]' * spec.row}{'[c]' * spec.col}"
        load = f"load_eight<{unit}>({name}, {at}, at.element_of(c), told.columns);" if spec.col else ""
        load = load or f"{name}.load_one({at});"
        for index, count in (("c", "PARTS"),) * spec.col + (("l", "LINES"),) * spec.row:
            load = f"\n#pragma unroll\n    for (int {index} = 0; {index} < {count}; ++{index}) {load}"
        line = load if spec.row or spec.col else f"\n    {load}"
        moves = spec.col if b.contiguous == "k" else spec.row
        fixed, moving = fixed + line * (not moves), moving + line * moves
        values.append(f"x{i}{'[l]' * spec.row}{'[c][j]' * spec.col}[{'e' if spec.col else 0}]")
    called = ", ".join(["value", *values, "line", "element + 2 * j + e", "y[e]"])
    return f"""{emit.emit(prologue, "prologue")}#line 1 "change (generated)"
{told(prologue)}
template <int LINES, int PARTS>
struct Beside {{{fields}

  // What is the same along k, and what is not.
  template <typename Places>
  DEVICE void begin(const Told& told, const Places& at) {{{fixed}
  }}
  template <typename Places>
  DEVICE void fetch(const Told& told, const Places& at) {{{moving}
  }}

  DEVICE void change(u32 (&x)[4], int l, int c, int line, int element) const {{
#pragma unroll
    for (int j = 0; j < 4; ++j) {{
      Pair<Dtype::{stored}> pair;
      pair.bits[0] = x[j];
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {{
        const float value[1] = {{pair[e]}};
        prologue_element({called});
      }}
      x[j] = pack<Dtype::{stored}>(y[0], y[1]);
    }}
  }}
}};
"""


def refused(config: Sizes, problem: Problem) -> tuple[Any, Any]:
    """Returns truth, where a thread would change more units or hold more registers than it may; and these registers."""
    lines, parts = units(config, problem)
    held = registers(config, problem)
    return (lines * parts > MOST_UNITS) | (held > MOST_REGISTERS), held
