"""The arguments of a kernel, once: the signature in its text and the parameters of its launch are read off one list."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.kernels.operand import Gathered, Order, strides
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import Staging
from cutjax.runtime.launch import Int32, Param, Pointer, TensorMap


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a kernel.

    Attributes:
      declaration: as the signature has it.
      value: what a launch passes.
      to: which part of the kernel takes it: "" the kernel itself, "a" and "b" what loads those operands, "d" the list
        of its tensor maps, "splits" what counts those, or a constructor, "extras", "partials", "scheduler", "rows",
        "promotion" or "changes"; or two of these.
    """

    declaration: str
    value: Param
    to: str = ""

    @property
    def name(self) -> str:
        """Its name in the kernel."""
        return self.declaration.split()[-1]

    @property
    def passed(self) -> str:
        """The expression by which a kernel passes it on."""
        return f"&{self.name}" if isinstance(self.value, TensorMap) else self.name

    @property
    def taken(self) -> str:
        """The parameter of who takes it."""
        return f"const TensorMap* {self.name}" if isinstance(self.value, TensorMap) else self.declaration


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The matrices of an array in memory, as the last two dimensions of a tensor map: rows, and matrices.

    Where the array is in an order of its own, matrices are numbered by the greatest stride that all batch axes are
    multiples of, so that most numbers are nobody's, and matrices lie in each other: in [batch, sequence, heads,
    elements] a head is one number and a sequence as many as it has rows. TMA clips by rows and elements, which are a
    matrix's own.

    Attributes:
      row_bytes, bytes: between neighbours along either dimension.
      count: one more than the last matrix's number.
      steps: how far the number moves for each of the result's three batch indices.
    """

    row_bytes: int
    bytes: int
    count: int
    steps: tuple[int, ...]

    @property
    def on_lines(self) -> bool:
        """True if all rows begin on lines of memory."""
        return self.row_bytes % 128 == self.bytes % 128 == 0


def matrices(problem: Problem, batch: tuple[int, ...], rows: int, row_bytes: int, order: Order) -> Matrices:
    """Returns the matrices of an array of the problem.

    Args:
      problem: which.
      batch: the array's batch shape.
      rows: of a matrix.
      row_bytes: what a row takes.
      order: in memory, of axes whose last is a row's.
    """
    *of_batch, of_rows, _ = strides((*batch, rows, row_bytes), order)
    moved = [(of_batch[axis], size) for axis, (size, *_) in problem.batch_axes]
    moved = [(0, 1)] * (3 - len(moved)) + moved
    step = math.gcd(*(stride for stride, _ in moved)) or rows * row_bytes
    steps = [stride // step for stride, _ in moved]
    count = 1 + sum(x * (size - 1) for x, (_, size) in zip(steps, moved, strict=True))
    return Matrices(of_rows or row_bytes, step, count, tuple(steps))


def matrix_map(
    buffer: int, dtype: np.dtype, dims: tuple[int, int], of: Matrices, box: tuple[int, int], span: int, l2_bytes: int
) -> TensorMap:
    """Returns the tensor map of matrices, dims and box being elements of a row, and rows."""
    return TensorMap(
        buffer=buffer,
        dtype=dtype,
        dims=(*dims, of.count),
        strides=(of.row_bytes, of.bytes),
        box=(*box, 1),
        swizzle=span,
        l2_bytes=l2_bytes,
    )


def batch_steps(moves: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns the step of an array's batch index for each of the result's three batch indices."""
    steps, stride = [], 1
    for move, size in zip(reversed(moves), reversed(sizes), strict=True):
        steps.append(stride if move else 0)
        stride *= size if move else 1
    return steps[::-1]


def batch_moves(problem: Problem) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """Returns the result's three batch sizes, and which of the indices each array moves with: a, b, operands, sizes."""
    unmoved = (1, *(False,) * (2 + len(problem.epilogue.operands) + bool(problem.groups)))
    sizes, *moves = zip(*[unmoved] * (3 - len(problem.batch_groups)), *problem.batch_groups, strict=True)
    return sizes, moves


def array_steps(problem: Problem) -> list[list[int]]:
    """Returns the `batch_steps` of each array: a, b, the epilogue's operands, and the sizes of groups."""
    sizes, moves = batch_moves(problem)
    return [batch_steps(move, sizes) for move in moves]


def integer(name: str, value: int, to: str = "") -> Argument:
    """Returns an argument of 32 bits, with a sign."""
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name} = {value:,} does not fit 32 bits")
    return Argument(f"int {name}", Int32(value), to)


def extras(problem: Problem, loaded: Container[int] = ()) -> Iterator[Argument]:
    """Yields the arguments of an epilogue: operands that TMA does not load, their steps, and batch sizes."""
    for i, of in enumerate(array_steps(problem)[2 : 2 + len(problem.epilogue.operands)]):
        if i not in loaded:
            yield Argument(f"const char* base{i}", Pointer(problem.arrays + i), "extras")
        for j, step in enumerate(of):
            yield integer(f"step{i}_{j}", step, "extras")
    for (axis, i), (stride, size) in zip(emit.places(problem.epilogue), place_steps(problem), strict=True):
        yield integer(f"{axis}{i}_stride", stride, "extras")
        yield integer(f"{axis}{i}_size", size, "extras")


def partials(staging: Staging, first_result: int) -> Iterator[Argument]:
    """Yields the pointers to the results of reductions."""
    for i, out in staging.reductions:
        yield Argument(f"{DTYPES[out.dtype].carrier}* partial{i}", Pointer(first_result + i), "partials")


def groups(problem: Problem) -> Iterator[Argument]:
    """Yields the sizes of groups, where there are such."""
    if problem.groups:
        yield Argument("const int* sizes", Pointer(1 + problem.products), "scheduler")
        yield integer("leading", problem.groups.leading, "scheduler")
        for j, step in enumerate(array_steps(problem)[-1][:2]):
            yield integer(f"sizes_step{j}", step, "scheduler")


def gathered(problem: Problem) -> Iterator[Argument]:
    """Yields the indices of the rows of a, and the numbers of both, where they are gathered."""
    if isinstance(view := problem.a.view, Gathered):
        yield Argument("const int* index_a", Pointer(problem.told - view.arrays), "a")
        yield integer("count_a", problem.m if problem.a.contiguous == "k" else problem.k, "a")
        yield integer("rows_a", view.rows, "a")
        yield integer("each_a", max(1, view.pairs), "a")


def scale_buffers(problem: Problem, swap: bool = False) -> dict[int, tuple[int, ...]]:
    """Returns the arguments beside operands, by operand, 0 for a: scales and zero points, or those of its prologue.

    Told as ``scales`` is.
    """
    found, first, operands = {}, problem.told, list(enumerate(problem.factors))
    of_a = problem.beside[0]  # those of the b that were asked, where operands are swapped
    for i, operand in (*operands[of_a:], *operands[:of_a]) if swap else operands:
        if operand.arrays:
            found[i] = tuple(range(first, first + operand.arrays))
            first += operand.arrays
    return found


def scales(problem: Problem, swap: bool = False) -> Iterator[Argument]:
    """Yields the pointers to scales and zero points, and the elements between rows and between matrices of either.

    Those of a are ``scale_a``, ``zero_a``, ``scale_row_a``, ``scale_matrix_a``; of the first b ``scale_b0`` and so on.
    A matrix of scales has the number of the operand's.

    Args:
      problem: as it is multiplied.
      swap: whether its operands are swapped: arrays come in the order of the problem that was asked.
    """
    operands = problem.a, *problem.bs
    for i, buffers in scale_buffers(problem, swap).items():
        operand, (name, to) = operands[i], (f"b{i - 1}", "b") if i else ("a", "a")
        if operand.scale is None:
            continue
        for what, buffer in zip(("scale", "zero"), buffers, strict=False):
            yield Argument(f"const char* {what}_{name}", Pointer(buffer), to)
        rows, columns = operand.blocks(problem.n if i else problem.m, problem.k)
        yield integer(f"scale_row_{name}", columns, to)
        yield integer(f"scale_matrix_{name}", rows * columns, to)


def place_steps(problem: Problem) -> list[tuple[int, int]]:
    """Returns the stride and the size of each batch index that the epilogue reads, counted in results."""
    found = []
    for axis, i in emit.places(problem.epilogue):
        inner = math.prod(problem.batch[len(problem.batch) - i :])
        found.append((inner, problem.batch[-1 - i]) if axis == "batch" else (1, inner))
    return found
