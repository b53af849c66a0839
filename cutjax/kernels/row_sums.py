"""Sums over the rows of what an expression makes of matrices, in one pass: the kernel, its plan, and its price."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.dtypes import DTYPES, short
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue
from cutjax.epilogue.nodes import OperandSpec
from cutjax.kernels import reasons
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.device import Device
from cutjax.kernels.entry import Entry
from cutjax.kernels.staging import instructions, not_inlined
from cutjax.runtime import choice, sources
from cutjax.runtime.architectures import too_old
from cutjax.runtime.choice import Choice
from cutjax.runtime.launch import Call, Pointer

# Fitted to 40 of benchmarks/results/experiments/row-sums-h200.json: the share of a copy's rate at which it reads; the
# microseconds of a launch, and of the pass in which XLA adds up the shares of blocks, for each sum and each share.
SHARE, LAUNCH_US, SUM_US, SHARE_US = 0.9, 2.0, 1.5, 0.002
_THREADS, _LANES, _WAVES = 256, 32, 8  # of a block at most; along columns at most; blocks for each SM at least
_VALUES = 64  # that a thread keeps of what rows share, and of sums: registers are short
_SPECIAL = frozenset(["cos", "div", "exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt", "sin", "sqrt", "tanh"])
_FEW = 32  # of those, with which an SM has three blocks at one time, not two


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sums over rows of an expression of matrices ``[matrices, rows, columns]``.

    Attributes:
      matrices, rows, columns: sizes; rows of all their axes.
      dtype: of the first operand, the expression's accumulator.
      expression: what is added up; all of its outputs are sums over rows, in float32.
      axes: the sizes of the axes of rows.
      device: which.
    """

    matrices: int
    rows: int
    columns: int
    dtype: np.dtype
    expression: Epilogue
    axes: tuple[int, ...]
    device: Device

    @classmethod
    def of(cls, x: Any, *_: Any, expression: Epilogue, device: Device) -> Problem:
        """Makes one of the avals and the parameters of ``row_sums_p``."""
        matrices, *axes, columns = x.shape
        return cls(matrices, math.prod(axes), columns, np.dtype(x.dtype), expression, tuple(axes), device)

    @property
    def arch(self) -> str:
        """The architecture it is compiled for."""
        return self.device.arch

    @property
    def operands(self) -> tuple[OperandSpec, ...]:
        """All operands, the first one too, as of one axis of matrices and one of rows."""
        found = [OperandSpec(self.dtype.name, True, True, (True,))]
        for spec in self.expression.operands:
            row = any(self._along(spec))
            found.append(OperandSpec(spec.dtype, row, spec.col, spec.batch[: len(spec.batch) - len(self.axes) + 1]))
        return tuple(found)

    def _along(self, spec: OperandSpec) -> list[bool]:
        """Returns, of each axis of rows that is longer than 1, whether an operand varies along it."""
        varies = (*spec.batch, spec.row)[-len(self.axes) :]
        return [each for each, size in zip(varies, self.axes, strict=True) if size != 1]

    @property
    def mixed(self) -> bool:
        """True if an operand varies along some axes of rows, and not along others."""
        return any(len(set(self._along(spec))) > 1 for spec in self.expression.operands)

    @property
    def elements(self) -> int:
        """The elements of all matrices."""
        return self.matrices * self.rows * self.columns

    @property
    def flops(self) -> int:
        """0 where there is nothing to add up, else the elements; no arithmetic counts."""
        return self.elements

    @property
    def bytes(self) -> int:
        """The least bytes that are moved, those of operands of full size."""
        large = (spec for spec in self.operands if spec.row and spec.col)
        matrices = {True: self.matrices, False: 1}
        return sum(
            matrices[spec.batch[-1]] * self.rows * self.columns * np.dtype(spec.dtype).itemsize for spec in large
        )

    def __str__(self) -> str:
        shape = ",".join(map(str, (self.matrices, self.rows, self.columns)))
        return f"sums over rows of {self.expression.text(f'{short(self.dtype.name)}[{shape}]')}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel for a problem: text, arguments and launch."""

    problem: Problem

    @functools.cached_property
    def count(self) -> int:
        """The neighbours along columns that a thread has: up to 16 bytes of the widest operand."""
        p = self.problem
        large = [spec for spec in p.operands if spec.row and spec.col]
        most = 16 // max(np.dtype(spec.dtype).itemsize for spec in large)
        while most > 1 and (p.columns % most or most * self.kept > _VALUES):
            most //= 2
        return most

    @property
    def kept(self) -> int:
        """The values that a thread keeps for each of its columns: of operands that rows share, and sums."""
        p = self.problem
        return sum(spec.col and not spec.row for spec in p.operands) + len(p.expression.outputs)

    @property
    def tiles(self) -> int:
        """The blocks along columns."""
        return -(-self.problem.columns // (_LANES * self.count))

    @property
    def lanes(self) -> int:
        """The threads of a block along columns."""
        return -(-self.problem.columns // (self.tiles * self.count))

    @property
    def lines(self) -> int:
        """The rows that a block has at a time."""
        return _THREADS // self.lanes

    @property
    def unroll(self) -> int:
        """The rows that a thread loads at once: some 128 bytes."""
        size = sum(np.dtype(s.dtype).itemsize * self.count for s in self.problem.operands if s.row and s.col)
        return max(1, min(8, 128 // size))

    @property
    def chunks(self) -> int:
        """The parts that rows of a matrix are divided into: each has some rows for every thread."""
        p = self.problem
        wanted = -(-_WAVES * p.device.sms // (p.matrices * self.tiles))
        return max(1, min(wanted, p.rows // (2 * self.lines * self.unroll)))

    @property
    def name(self) -> str:
        """The entry symbol: the dtype, the threads' shape and the expression."""
        p = self.problem
        shape = f"{self.lanes}x{self.count}_{self.unroll}"
        return f"row_sums_{short(p.dtype.name)}_{shape}_e{p.expression.digest}"

    @property
    def time_us(self) -> float:
        """Predicted microseconds: of reading, of instructions where they are more, and of adding up shares."""
        p, d = self.problem, self.problem.device
        each = instructions(p.expression) + 8 * _specials(p.expression)
        issue = 1e6 * p.elements * each / (dict(d.flops).get("float32", math.inf) / 2)
        shares = len(p.expression.outputs) * (SUM_US + SHARE_US * p.matrices * self.chunks)
        return LAUNCH_US + max(d.moving_us(p.bytes, SHARE), issue) + shares

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        return tuple(self._arguments())

    def _arguments(self) -> Iterator[Argument]:
        p = self.problem
        for i in range(len(p.operands)):
            yield Argument(f"const char* base{i}", Pointer(i), "given")
        for i in range(len(p.expression.outputs)):
            yield Argument(f"float* sum{i}", Pointer(len(p.operands) + i), "results")
        rows_of_chunk = -(-p.rows // self.chunks)
        sizes = {"rows": p.rows, "columns": p.columns, "tiles": self.tiles, "chunks": self.chunks}
        for name, value in (sizes | {"rows_of_chunk": rows_of_chunk}).items():
            yield integer(name, value)

    @property
    def entry(self) -> Entry:
        """The launch."""
        p = self.problem
        constants = {"LANES": self.lanes, "LINES": self.lines, "COUNT": self.count, "UNROLL": self.unroll}
        constants |= {"SUMS": len(p.expression.outputs), "BLOCKS_PER_SM": 3 if self.kept * self.count <= _FEW else 2}
        head = f"#define ACCUMULATOR float\n#define PARAMETERS {', '.join(a.declaration for a in self.arguments)}\n"
        for to, form in (("given", "{{{}}}"), ("results", ", {}")):
            passed = ", ".join([*(a.name for a in self.arguments if a.to == to), *["columns"] * (to == "given")])
            head += f"#define {to.upper()} {form.format(passed)}\n"
        common = "common/atoms.cuh", *sources.MATH, "common/elements.cuh", head, "direct/vector.cuh"
        source = sources.source(self.name, constants, [*common, _text(p, self.count), "rows/sums.cuh"])
        blocks, threads = self.tiles * self.chunks * p.matrices, self.lanes * self.lines
        shared_bytes = 4 * constants["SUMS"] * threads * self.count
        return Entry(p, self.name, source, self.arguments, blocks, threads, shared_bytes)

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch."""
        entry, p = self.entry, self.problem
        share = jax.ShapeDtypeStruct((p.matrices, self.chunks, p.columns), np.dtype(np.float32))
        return Call((entry.launch(entry.compile().image),), (share,) * len(p.expression.outputs), _finish)


def _specials(expression: Epilogue) -> int:
    """Returns the special functions of an element, of which an SM computes an eighth as many as of others."""
    return sum(2 if node.op == "logistic" else node.op in _SPECIAL for node in expression.nodes)


def _finish(shares: Sequence[jax.Array], _: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(x, 1) for x in shares]


def _text(problem: Problem, count: int) -> str:
    """Returns the structs of what is loaded, of each row and of what rows share, and the functions of sums."""
    of_rows, of_all, loads, begins, values = [], [], [], [], []
    for i, spec in enumerate(problem.operands):
        size, dtype = np.dtype(spec.dtype).itemsize, f"Dtype::{DTYPES[spec.dtype].stored}"
        vector = f"Vector<{dtype}, {count if spec.col else 1}> x{i};"
        where, line = ("own", "row" if spec.batch[-1:] == (True,) else "own_row") if spec.row else ("same", "")
        if spec.row:
            at = f"({line} * given.columns + column)" if spec.col else line
            of_rows.append(vector)
            loads.append(f"x{i}.load(given.base{i} + {at} * {size}ll, there);")
        else:
            matrix = "matrix" if spec.batch[-1:] == (True,) else "0"
            at = f"(static_cast<i64>({matrix}) * given.columns + column)" if spec.col else matrix
            of_all.append(vector)
            begins.append(f"x{i}.load(given.base{i} + {at} * {size}ll);")
        values.append(f"{where}.x{i}[{'v' if spec.col else '0'}]")
    outputs = range(len(problem.expression.outputs))
    results = ", ".join(f"y[{i}]" for i in outputs)
    first, *rest = values
    given = "".join(f" const char* base{i};" for i in range(len(values)))
    stores = "".join(f"\n  if (s == {i}) sum{i}[at] = sum;" for i in outputs)

    def lines(statements: list[str], indent: str = "  ") -> str:
        return "".join(f"\n{indent}{statement}" for statement in statements)

    return f"""{emit.emit(problem.expression)}#line 1 "rows (generated)"
struct Given {{{given}
  int columns;
}};
struct Own {{{lines(of_rows)}
  DEVICE void load(const Given& given, i64 row, i64 own_row, int column, bool there) {{{lines(loads, "    ")}
  }}
}};
struct Shared {{{lines(of_all)}
  DEVICE void load(const Given& given, int matrix, int column) {{{lines(begins, "    ")}
  }}
}};
DEVICE void add(float (&sums)[SUMS][COUNT], const Shared& same, const Own& own, int v) {{
  const float value[1] = {{static_cast<float>({first})}};
  float y[SUMS];
  epilogue_element({", ".join(["value", *rest, "0", "0", results])});
#pragma unroll
  for (int s = 0; s < SUMS; ++s) sums[s][v] += y[s];
}}
DEVICE void store_sum(int s, i64 at, float sum{"".join(f", float* sum{i}" for i in outputs)}) {{{stores}
}}
"""


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, backend: str) -> Choice[Problem, Kernel]:
    """Returns the kernel that runs under a backend, or the reasons why XLA does."""
    one = tuple(why_not(problem)) or Kernel(problem)
    return choice.fastest(problem, [one], "one pass", problem.device.moving_us(problem.bytes))


def why_not(problem: Problem) -> list[str]:
    """Returns the reasons against the kernel."""
    p = problem
    if not p.elements:
        return ["a size is 0: nothing to launch"]
    found = [*emit.reasons(p.expression), *too_old(p.arch, 75), *not_inlined(p.expression, "an expression")]
    rows = {"row", *(f"b{i}" for i in range(len(p.axes) - 1))}
    if any(out.reduce != "sum" or {*out.axes} != rows or out.dtype != "float32" for out in p.expression.outputs):
        found.append("a result that is no sum over rows in float32")
    if p.expression.positions:
        found.append("an expression that counts rows or columns")
    if p.mixed:
        found.append("an operand along some axes of rows alone")
    blocks = -(-p.columns // _LANES) * (p.matrices + _WAVES * p.device.sms)
    return [*found, *reasons.of_counters({"rows": p.rows + 2**16, "columns": p.columns, "blocks": blocks})]
