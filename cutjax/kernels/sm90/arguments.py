"""The arguments of a kernel of the family: its tensor maps, and everything beside them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

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
from cutjax.kernels.operand import Operand, Taps
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import decode, scales, windows
from cutjax.kernels.sm90.config import Config
from cutjax.kernels.sm90.operands import decoded, row_bytes
from cutjax.kernels.sm90.resolved import Resolved
from cutjax.kernels.sums import blocks, extent, summands
from cutjax.runtime.launch import Int64, Pointer, TensorMap

# Bytes that L2 fetches at once, of operands and of those beside few rows: weights are asked for once there, at the rate
# of memory, and 256 took 3 to 6% longer (experiments/streams-h200.json).
LINE, STREAMED_LINE = 256, 128


@functools.lru_cache(maxsize=1024)
def matrices_of(p: Problem, operand: Operand, length: int, count: int = 1, steps: tuple[int, ...] = ()) -> Matrices:
    """Returns the matrices of an operand whose m or n axis is so long; count and steps are those of dense ones."""
    rows, pitch = operand.array(length, p.k)[0], row_bytes(operand, length, p.k)
    if p.strided:
        return matrices(p, operand.batch, rows, pitch, operand.order)
    return Matrices(pitch, pitch * rows, count, steps)


def result_matrices(p: Problem, dtype: np.dtype) -> Matrices:
    """Returns the matrices of a result that has an order of its own."""
    return matrices(p, p.batch, p.m, p.n * dtype.itemsize, p.order)


def arguments(kernel: Resolved) -> tuple[Argument, ...]:
    """Returns the arguments of a kernel, in order.

    Buffers are a, the bs (none where b is a), sizes of groups, indices of rows, the epilogue's operands, further
    terms of a and of the bs, and results, in order.
    """
    return tuple(_arguments(kernel))


def _arguments(kernel: Resolved) -> Iterator[Argument]:
    p, c, staging = kernel.multiplied, kernel.config, kernel.staging
    epilogue = p.epilogue
    (sizes, moves), steps = batch_moves(p), array_steps(p)
    more, terms = sum(operand.copies - 1 for operand in kernel.prepared), kernel.way.terms
    first_more = p.arrays + len(epilogue.operands)
    first_result = first_more + more + (c.stream_k or kernel.has_counter)  # zeros are an argument too
    results = [(first_result + i, out) for i, out in staging.results]
    maps = [(place, buffer, np.dtype(out.dtype)) for place, (buffer, out) in enumerate(results) if staging.by_tma(out)]

    of_a, of_b = (_matrices(summands(p)[0], i, steps) for i in (0, 1))
    if p.a.gathered:
        yield Argument("const char* base_a", Pointer(int(c.swap)), "a")
        yield Argument("i64 a_row_bytes", Int64(of_a.row_bytes), "a")
        yield integer("a_valid_bytes", p.a.bytes(p.k if p.a.contiguous == "k" else p.m), "a")
        yield from gathered(p)
    view = windows.view_of(p)
    given = () if p.a.gathered else _buffers(p, 0, c.swap, terms, first_more)
    line = STREAMED_LINE if kernel.asked.few_rows else LINE
    for i, (of, buffer) in enumerate(given):
        if view:
            value = _windows_map(buffer, kernel)
        else:
            chunk = c.decoded_chunk(p) if decoded(p.a, p.bs[0]) else p.a.elements(128)
            value = _operand_map(buffer, of.a, p.m, of, _matrices(of, 0, steps), c.bm, chunk, c, c.cluster_n, line)
        yield _map(f"map_a{i}" if i else "map_a", value, "a")
    for i, of in enumerate(summands(p)[:-1]):
        yield integer(f"depth{i}", blocks(of, c.depth(p)) * c.depth(p), "a")
    yield from decode.arguments(c, p)
    if view:
        yield from windows.of_windows(p, c.depth(p), kernel.phases)
    for i, (of, buffer) in enumerate(_buffers(p, 1, c.swap, terms, first_more)):
        if isinstance(p.bs[0].view, Taps):
            value = _taps_map(buffer, kernel)
        else:
            chunk = c.chunk(p.bs[0], p.beside[1])
            value = _operand_map(buffer, of.bs[0], p.n, of, _matrices(of, 1, steps), c.bn, chunk, c, c.cluster_m, line)
        yield _map(f"map_b{i}", value, "b")
    if isinstance(p.bs[0].view, Taps):
        yield from windows.of_taps(p)
    d_matrices = c.splits * p.results
    in_order = [result_matrices(kernel.problem, dtype) for _, _, dtype in maps if p.order]
    for i, (place, buffer, dtype) in enumerate(maps):
        of_d = in_order[i] if in_order else d_matrices
        yield _map(f"map_d{place}", _tile_map(buffer, dtype, kernel, of_d, c.swap), "d")
    for place, buffer, dtype in maps if p.symmetric else ():
        yield _map(f"map_t{place}", _tile_map(buffer, dtype, kernel, d_matrices, transposed=True), "d")
    for i, spec in staging.operands:
        count = math.prod(size for size, move in zip(sizes, moves[2 + i], strict=True) if move)
        yield _map(f"map_x{i}", _tile_map(p.arrays + i, np.dtype(spec.dtype), kernel, count, c.swap), "extras")

    scalars = {"m": p.m, "n": p.n, "k": extent(p, c.depth(p)), "raster": c.raster, "batch": p.batch_size}
    scalars |= {"batch1": sizes[1], "batch2": sizes[2]}
    if kernel.phases:
        scalars |= {"batch": kernel.matrices, "batch2": kernel.matrices}
        yield from windows.of_pixels(kernel.phases)
    moving = [] if view else [("a", of_a), ("b", of_b)]  # images and their weights have no batch
    for name, of in (*moving, *(("d", of) for of in in_order[:1])):
        scalars |= {f"{name}_step{j}": step for j, step in enumerate(of.steps)}
    for name, value in scalars.items():
        yield integer(name, value)
    if c.splits > 1:
        yield integer("splits", c.splits, "splits")
    yield from scales.of_scales(kernel.given, c.swap)
    yield from prologue.arguments(kernel.problem, "changes")
    yield from extras(p, loaded=dict(staging.operands))
    yield from partials(staging, first_result)
    if c.stream_k:  # after the results
        yield Argument("Acc* scratch", Pointer(first_result + len(epilogue.outputs)), "scheduler")
        yield Argument("int* tickets", Pointer(first_result + len(epilogue.outputs) + 1), "scheduler")
    if kernel.has_counter:
        yield Argument("int* counter", Pointer(first_result + len(epilogue.outputs)), "items")
    yield from groups(p)
    for place, (buffer, out) in enumerate(results):
        if p.divided in ("m", "n") or not staging.by_tma(out):  # TMA clips at the matrix, not at a group's end
            yield Argument(f"char* d{place}", Pointer(buffer), "rows")


def _map(name: str, value: TensorMap, to: str = "") -> Argument:
    return Argument(f"const __grid_constant__ TensorMap {name}", value, to)


def _matrices(p: Problem, i: int, steps: Sequence[Sequence[int]]) -> Matrices:
    """Returns the matrices of a (i = 0) or of each b (1), told the steps of both."""
    return matrices_of(p, (p.a, *p.bs)[i], (p.m, p.n)[i], p.matrices[i], tuple(steps[i]))


def _buffers(p: Problem, i: int, swap: bool, terms: int, first_more: int) -> Iterator[tuple[Problem, int]]:
    """Yields the arrays of a (i = 0) or of the bs (1): of each its product and its buffer.

    Of terms, the first of each array is an argument of the kernel, and the others follow; those of the first product
    of a sum come before the others.
    """
    first = int(swap) if i == 0 else int(not (p.symmetric or swap))
    for term in range(terms):
        for buffer in range(first, first + p.beside[i]):
            yield summands(p)[0], buffer if term == 0 else first_more + buffer * (terms - 1) + term - 1
    further = scale_buffers(p, swap)
    for j, of in enumerate(summands(p)[1:]):
        for place in range(p.beside[i]):
            yield of, further[i * p.beside[0] + place][j]


def _operand_map(
    buffer: int,
    operand: Operand,
    rows: int,
    p: Problem,
    of: Matrices,
    tile: int,
    chunk: int,
    config: Config,
    share: int,
    line: int,
) -> TensorMap:
    """The tensor map of an operand whose m or n axis is `rows` long, as Plain in load_plain.cuh loads it."""
    # Rows off the lines of memory: fetching 256 bytes at once costs 15% more than 128 there.
    l2_bytes, span = line if of.on_lines else 128, operand.bytes(chunk)
    if operand.bits < 8:  # as bytes
        box = operand.bytes(chunk), config.depth(p) // (1 if -(-tile // chunk) % share == 0 else share)
        return matrix_map(buffer, np.dtype(np.uint8), (operand.bytes(rows), p.k), of, box, span, l2_bytes)
    if operand.contiguous == "k":
        found = matrix_map(buffer, operand.dtype, (p.k, rows), of, (chunk, tile // share), span, l2_bytes)
        return dataclasses.replace(found, element="tfloat32" if operand.dtype == np.float32 else "")
    depth = config.depth(p) // (1 if -(-tile // chunk) % share == 0 else share)
    return matrix_map(buffer, operand.dtype, (rows, p.k), of, (chunk, depth), span, l2_bytes)


def _windows_map(buffer: int, kernel: Resolved) -> TensorMap:
    """The tensor map of a's windows, as Im2col in load_im2col.cuh loads it."""
    p, c = kernel.multiplied, kernel.config
    tile, depth = c.bm, c.depth(p)
    if p.a.contiguous == "mn":
        chunks = c.bm // windows.chunk(p)
        tile = depth if chunks % c.cluster_n == 0 else depth // c.cluster_n
    else:
        tile //= c.cluster_n
    if packing := windows.packed(kernel.problem):
        strides = packing.strides(p.a.bytes(1))
    else:
        view = windows.view_of(p)
        assert view is not None
        strides = [row_bytes(p.a, p.m, p.k)]
        for size in view.image[::-1]:
            strides.append(strides[-1] * size)
    found = windows.windows_map(buffer, p, strides, tile)
    return dataclasses.replace(found, element="tfloat32" if p.a.dtype == np.float32 else "")


def _taps_map(buffer: int, kernel: Resolved) -> TensorMap:
    """The tensor map of weights, as Taps in load_taps.cuh loads it."""
    p, c, b = kernel.multiplied, kernel.config, kernel.multiplied.bs[0]
    length, pitch = windows.chunk(p), row_bytes(b, p.n, windows.depth(p))
    l2_bytes = 256 if pitch % 128 == 0 else 128
    if b.contiguous == "k":
        found = windows.taps_map(buffer, p, b, pitch, (length, c.bn // c.cluster_m), b.bytes(length), l2_bytes)
        return dataclasses.replace(found, element="tfloat32" if b.dtype == np.float32 else "")
    chunk = c.chunk(b, p.products)
    depth = length if -(-c.bn // chunk) % c.cluster_m == 0 else length // c.cluster_m
    return windows.taps_map(buffer, p, b, pitch, (chunk, depth), b.bytes(chunk), l2_bytes)


def _tile_map(buffer: int, dtype: np.dtype, kernel: Resolved, of: Matrices | int, transposed: bool) -> TensorMap:
    """The tensor map of a result, or an operand of its shape, as staging.cuh or transposed.cuh stores and loads it.

    `of` is its matrices, or how many dense ones there are.
    """
    p, columns, rows = kernel.stored, kernel.chunk, 64
    if transposed:
        columns, rows = rows, columns
    if isinstance(of, int):
        of = Matrices(p.n * dtype.itemsize, p.m * p.n * dtype.itemsize, of, ())
    span = min(128, columns * dtype.itemsize)  # bytes of a row of the tile, which its swizzle spans too
    return matrix_map(buffer, dtype, (p.n, p.m), of, (span // dtype.itemsize, rows), span, 256)
