"""The arguments of a kernel of the family: pointers, sizes and strides, in the order of its signature."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from cutjax.kernels import prologue
from cutjax.kernels.arguments import (
    Argument,
    Matrices,
    array_steps,
    batch_moves,
    extras,
    gathered,
    groups,
    integer,
    matrices,
    matrix_map,
    partials,
    scale_buffers,
)
from cutjax.kernels.mma import views
from cutjax.kernels.mma.resolved import Resolved
from cutjax.kernels.operand import Operand
from cutjax.kernels.problem import Problem
from cutjax.kernels.sums import extent, summands
from cutjax.runtime.launch import Int64, Pointer, TensorMap


@functools.lru_cache(maxsize=1024)
def matrices_of(p: Problem, operand: Operand, length: int, count: int = 1, steps: tuple[int, ...] = ()) -> Matrices:
    """Returns the matrices of an operand whose m or n axis is so long; count and steps are those of dense ones."""
    rows, columns = operand.array(length, p.k)
    row_bytes = operand.bytes(columns)
    if p.strided:
        return matrices(p, operand.batch, rows, row_bytes, operand.order)
    if of_groups := views.matrices(p, operand, row_bytes):
        return of_groups
    return Matrices(row_bytes, row_bytes * rows, count, steps)


@functools.lru_cache(maxsize=1024)
def operands_of(p: Problem) -> tuple[Matrices, Matrices]:
    """Returns the matrices of a and of each b."""
    steps = array_steps(p)
    b_matrices = p.matrices[1]
    of_a = matrices_of(p, p.a, p.m, p.matrices[0], tuple(steps[0]))
    return of_a, matrices_of(p, p.bs[0], p.n, b_matrices, tuple(steps[1]))


def unit(p: Problem, operand: Operand, length: int, of: Matrices) -> int:
    """Returns the largest power of two of bytes, at most 16, that divides the rows' offsets and lengths."""
    if p.divided == "k" and operand.contiguous == "k":  # groups begin anywhere
        return operand.bytes(1)
    if views.axes(p):
        return views.unit(p, operand)
    row = operand.bytes(operand.array(length, p.k)[1])
    return math.gcd(16, row, of.row_bytes, of.bytes if of.count > 1 else 0)


def arguments(kernel: Resolved) -> tuple[Argument, ...]:
    """Returns the arguments of a kernel, in order.

    Buffers are a, the bs (none where b is a), sizes of groups, indices of rows, the epilogue's operands and results, in
    order.
    """
    return tuple(_arguments(kernel))


def _arguments(kernel: Resolved) -> Iterator[Argument]:
    p, c, staging = kernel.multiplied, kernel.config, kernel.staging
    sizes, _ = batch_moves(p)
    first_result = p.arrays + len(p.epilogue.operands)
    of_a, of_b = operands_of(p)
    buffers = int(c.swap), *(0 if p.symmetric or c.swap else 1 + i for i in range(p.products))
    if c.tma:
        yield _map("map_a", _operand_map(kernel, buffers[0], p.a, p.m, of_a, c.bm), "a")
        for i, buffer in enumerate(buffers[1:]):
            yield _map(f"map_b{i}", _operand_map(kernel, buffer, p.bs[i], p.n, of_b, c.bn), "b")
    elif len(summands(p)) > 1:
        yield from _joined(p, c.swap)
    else:
        yield Argument("const char* base_a", Pointer(buffers[0]), "a")
        for i, buffer in enumerate(buffers[1:]):
            yield Argument(f"const char* base_b{i}", Pointer(buffer, views.first_byte(p, p.bs[i])), "b")
    column_groups = views.groups(p)
    plain = not c.tma and len(summands(p)) == 1
    scalars = {"m": p.m, "n": p.n, "k": extent(p, c.bk), "raster": c.raster, "batch": p.batch_size * column_groups}
    scalars |= {"batch1": sizes[1], "batch2": sizes[2] * column_groups}
    for name, of, operand in (("a", of_a, p.a), ("b", of_b, p.bs[0])):
        scalars |= {f"{name}_step{j}": step for j, step in enumerate(of.steps)}
        if plain:
            scalars[f"{name}_pitch"] = operand.elements(of.row_bytes)
    for name in views.constants(p):
        del scalars[name]
    for name, value in scalars.items():
        yield integer(name, value, {"a_pitch": "a", "b_pitch": "b"}.get(name, ""))
    for name, of, operand in (("a", of_a, p.a), ("b", of_b, p.bs[0])) if plain else ():
        yield Argument(f"i64 {name}_apart", Int64(operand.elements(of.bytes)), name)
    yield from gathered(p)
    yield from prologue.arguments(p, "a")
    for name, operand in (("a", p.a), ("b", p.bs[0])):
        yield from views.arguments(p, operand, name, c.bk)
    yield from views.pixels(kernel.pixels)
    if column_groups > 1:
        yield integer("columns", views.columns(p))
        yield integer("d_pitch", p.n, "rows")
        yield Argument("i64 d_apart", Int64(p.m * p.n), "rows")
    if p.order:
        of_d = matrices(p, p.batch, p.m, p.n, p.order)  # in elements: results of any size lie alike
        for j, step in enumerate(of_d.steps):
            yield integer(f"d_step{j}", step)
        yield integer("d_pitch", of_d.row_bytes, "rows")
        yield Argument("i64 d_apart", Int64(of_d.bytes), "rows")
    if c.splits > 1:
        yield integer("splits", c.splits, "splits")
    yield from extras(p)
    yield from partials(staging, first_result)
    yield from groups(p)
    for place, (i, _) in enumerate(staging.results):
        yield Argument(f"char* d{place}", Pointer(first_result + i), "rows")


def _joined(p: Problem, swap: bool) -> Iterator[Argument]:
    """Yields the arguments of operands that are several arrays each, in the order of ``Source`` in load_joined.cuh."""
    further, of_each = scale_buffers(p, swap), [(of, operands_of(of)) for of in summands(p)]
    for i, (name, operand) in enumerate((("a", p.a), ("b", p.bs[0]))):
        for j, buffer in enumerate((i ^ swap, *further[i])):
            yield Argument(f"const char* base_{name}{j}", Pointer(buffer), name)
        for j, (_, of) in enumerate(of_each):
            yield integer(f"{name}_pitch{j}", operand.elements(of[i].row_bytes), name)
        for j, (_, of) in enumerate(of_each):
            yield Argument(f"i64 {name}_apart{j}", Int64(operand.elements(of[i].bytes)), name)
        for j, (of, _) in enumerate(of_each):
            yield integer(f"{name}_depth{j}", of.k, name)


def _map(name: str, value: TensorMap, to: str) -> Argument:
    return Argument(f"const __grid_constant__ TensorMap {name}", value, to)


def _operand_map(kernel: Resolved, buffer: int, operand: Operand, length: int, of: Matrices, tile: int) -> TensorMap:
    """The tensor map of an operand whose m or n axis is so long, as Operand in boxes.cuh loads it: of real numbers."""
    p, bk, size = kernel.multiplied, kernel.config.bk, operand.bytes(1)
    dims, box = ((p.k, length), (bk, tile)) if operand.contiguous == "k" else ((length, p.k), (tile, bk))
    span = math.gcd(128, box[0] * size)
    numbers = kernel.numbers
    dtype = np.dtype(f"float{8 * size // numbers}") if numbers > 1 else operand.dtype
    found = matrix_map(
        buffer,
        dtype,
        (dims[0] * numbers, dims[1]),
        of,
        (span * numbers // size, box[1]),
        span,
        256 if of.on_lines else 128,
    )
    return dataclasses.replace(found, element="tfloat32" if kernel.way.name == "tf32" else "")
