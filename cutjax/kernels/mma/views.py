"""The views of a convolution's operands as kernels of the family read them: their arguments, matrices and reasons."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from cutjax.kernels import convolution, prepared
from cutjax.kernels.arguments import Argument, Matrices
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import Math
from cutjax.kernels.operand import Im2col, Operand, Pixels, Taps
from cutjax.kernels.problem import Problem
from cutjax.runtime.launch import MAX_LAUNCHES, Int64


def axes(problem: Problem) -> int:
    """Returns the axes of the images whose windows a is; 0 of any other a."""
    return len(problem.a.view.image) if isinstance(problem.a.view, Im2col) else 0


def spread(problem: Problem) -> bool:
    """True if there are zeros between the elements of the images whose windows a is."""
    return isinstance(problem.a.view, Im2col) and set(problem.a.view.spread) != {1}


@functools.lru_cache(maxsize=1024)
def phases(problem: Problem) -> tuple[tuple[Problem, Pixels], ...]:
    """Returns the parts of a forward convolution whose images are spread, and the pixels that their rows are.

    One that has no tap has a contraction of length 0. There are none where they were too many for a call.
    """
    view, b = problem.a.view, problem.bs[0]
    if not isinstance(view, Im2col) or not spread(problem) or problem.a.contiguous == "mn":
        return ()
    axes, found = len(view.window), []
    in_order = Taps(view.window, view.window, (0,) * axes, (1,) * axes, view.groups)
    for of, taps, pixels in convolution.phases(view, b.view if isinstance(b.view, Taps) else in_order):
        k = of.columns
        if k == 0:
            of = dataclasses.replace(of, window=(1,) * axes)
            taps = dataclasses.replace(taps, window=of.window, first=(0,) * axes)
        a, bs = dataclasses.replace(problem.a, view=of), (dataclasses.replace(b, view=taps),) * len(problem.bs)
        if of.rows > 0:
            found.append((dataclasses.replace(problem, m=of.rows, k=k, a=a, bs=bs), pixels))
    return tuple(found) if len(found) <= MAX_LAUNCHES else ()


def along_k(problem: Problem) -> Problem:
    """Returns the problem of operands along the contraction; taps are transposed in one group."""
    taken = prepared.along_k(problem)
    bs = [
        dataclasses.replace(b, view=dataclasses.replace(b.view, groups=1))
        if isinstance(b.view, Taps) and b != given
        else b
        for b, given in zip(taken.bs, problem.bs, strict=True)
    ]
    return dataclasses.replace(taken, bs=tuple(bs))


def constants(problem: Problem) -> dict[str, int]:
    """Returns constants for what kernels of other problems take as arguments, whose number a launch limits."""
    if not axes(problem):
        return {}
    found = {"batch1": 1, "a_step0": 0, "a_step1": 0, "b_step0": 0, "b_step1": 0}
    return found if groups(problem) > 1 else {**found, "batch": 1, "batch2": 1, "a_step2": 0, "b_step2": 0}


def groups(problem: Problem) -> int:
    """Returns the groups of channels, each with its own columns of the result."""
    return problem.a.view.groups if isinstance(problem.a.view, Im2col) else 1


def columns(problem: Problem) -> int:
    """Returns the columns of a group."""
    return problem.n // groups(problem)


def tiles(problem: Problem, bm: int, bn: int) -> tuple[int, int]:
    """Returns the tiles along m and n, each of one group of columns."""
    rows, of_group = problem.tiles(bm, bn)
    return (rows, groups(problem) * -(-columns(problem) // bn)) if groups(problem) > 1 else (rows, of_group)


def most_tiles(problem: Problem, bm: int, bn: int) -> int:
    """Returns the number of tiles in all results, or the most there may be."""
    return math.prod(tiles(problem, bm, bn)) if groups(problem) > 1 else problem.most_tiles(bm, bn)


def matrices(problem: Problem, operand: Operand, row_bytes: int) -> Matrices | None:
    """Returns the matrices of the groups in an operand with such rows; None where one serves all."""
    view, count = operand.view, groups(problem)
    if count > 1 and isinstance(view, Im2col):
        return Matrices(row_bytes, operand.bytes(view.channels), count, (0, 0, 1))
    if count > 1 and isinstance(view, Taps) and operand.contiguous == "k" and view.groups > 1:
        # The columns count on through the groups.
        apart = operand.bytes(_windows(problem).channels) - columns(problem) * row_bytes
        return Matrices(row_bytes, apart, count, (0, 0, 1))
    return None


def unit(problem: Problem, operand: Operand) -> int:
    """Returns the largest power of two of bytes, at most 16, that divides what a kernel copies in one piece."""
    if isinstance(operand.view, Im2col) or (isinstance(operand.view, Taps) and operand.contiguous == "k"):
        return math.gcd(16, operand.bytes(_windows(problem).channels))
    if operand.contiguous == "k":
        return math.gcd(16, operand.bytes(problem.k))
    return math.gcd(16, operand.bytes(columns(problem)))


def arguments(problem: Problem, operand: Operand, name: str, bk: int) -> Iterator[Argument]:
    """Yields the arguments of an operand's view, in the order of its `Source`, of blocks of so many elements of k."""
    view = operand.view
    if isinstance(view, Im2col):
        channels = view.channels
        along_k = operand.contiguous == "k"
        *digits, last = _digits(bk, (*view.window, channels) if along_k else (view.images, *view.grid))
        yield _two(f"{name}_channels", channels, last, name)
        for i, size in enumerate(view.image):
            yield _two(f"{name}_sizes{i}", size, view.grid[i], name)
            yield _two(f"{name}_window{i}", view.window[i], -view.low[i], name)
            yield _two(f"{name}_steps{i}", view.strides[i], view.dilation[i], name)
        for word, values in (("block", digits), ("spread", view.spread if spread(problem) else ())):
            for i in range(0, len(values), 2):
                x, y = (*values, 0)[i : i + 2]
                yield _two(f"{name}_{word}{i}", x, y, name)
    if isinstance(view, Taps):
        channels = _windows(problem).channels
        *digits, last = _digits(bk, (*view.window, channels))
        yield _two(f"{name}_channels", channels, last, name)
        for i, (size, digit, step) in enumerate(zip(view.window, digits, _tap_steps(problem, operand), strict=True)):
            yield _two(f"{name}_window{i}", size, digit, name)
            yield Argument(f"i64 {name}_tap{i}", Int64(view.step[i] * step), name)


def pixels(of: Pixels | None) -> Iterator[Argument]:
    """Yields the arguments of the pixels that rows of the result are."""
    along = zip(of.grid, of.image, of.first, of.step, strict=True) if of else ()
    for i, (grid, image, first, step) in enumerate(along):
        yield _two(f"pixels_sizes{i}", grid, image, "rows")
        yield _two(f"pixels_places{i}", first, step, "rows")


def first_byte(problem: Problem, operand: Operand) -> int:
    """Returns the place of an operand's first tap in its array, in bytes."""
    if not isinstance(operand.view, Taps):
        return 0
    steps = _tap_steps(problem, operand)
    return operand.bytes(sum(x * step for x, step in zip(operand.view.first, steps, strict=True)))


def counts(problem: Problem) -> dict[str, int]:
    """Returns the most that a kernel counts of a convolution, by name."""
    view = problem.a.view
    if not isinstance(view, Im2col):
        return {}
    reach = [
        stride * grid + dilation * window + abs(low) + spread * size
        for stride, grid, dilation, window, low, spread, size in zip(
            view.strides, view.grid, view.dilation, view.window, view.low, view.spread, view.image, strict=True
        )
    ]
    return {
        "pixels": view.images * math.prod(view.image),
        "places_of_windows": max(reach),
        "bytes_of_a_pixel": problem.a.bytes(view.groups * view.channels),
    }


def reasons(problem: Problem, way: Math | None) -> list[str]:
    """Returns the reasons against a convolution."""
    found, view = [], problem.a.view
    if not isinstance(view, Im2col):
        return []
    if isinstance(problem.bs[0].view, Taps) and problem.a.contiguous == "mn":
        found.append(f"taps of b in layout {problem.layout}: they lie along a contraction of channels")
    if way and way.along_k and problem.a.contiguous != "k":
        found.append(f"windows in layout {problem.layout}: operands of 8 bits lie along k")
    if view.groups > 1 and problem.n % view.groups:
        found.append(f"{problem.n} columns in {view.groups} groups")
    return found


def registers(problem: Problem, config: Config, way: Math, units: tuple[int, int]) -> int:
    """Estimates the registers that a thread has beside those of a product of plain operands.

    It holds digits of what goes on with k, and places of what does not, for each of its lines and for each place along
    them. Calibrated on the compiler's report: some 28 find room.
    """
    count = axes(problem)
    if not count:
        return 0
    held = more = 0
    for operand, tile, unit in ((problem.a, config.bm, units[0]), (problem.bs[0], config.bn, units[1])):
        if not isinstance(operand.view, Im2col | Taps):
            continue
        lines, places = _loads(operand, tile, config, way)
        along_k = operand.contiguous == "k"
        of_taps = places if along_k else lines
        held += (count + 1) * (lines + places if isinstance(operand.view, Im2col) else of_taps)
        if way.fragments != "fma" and unit < 16:
            more = max(more, 10 if unit > 4 else 14)
        if way.fragments != "fma" and unit < 4:  # each piece is loaded to a register of its own
            held += lines * places * (16 // unit - 5) + 40 * (count == 3 and not along_k)
    if min(units) >= 4:
        more += 8 * (groups(problem) > 1) + 4 * (problem.a.bits == 8)
    more += 45 * (way.name == "tf32x3" and config.wm * config.wn >= 2048)
    return max(0, held + 4 * count + more - 28)


def _loads(operand: Operand, tile: int, config: Config, way: Math) -> tuple[int, int]:
    """Returns the lines that a thread copies of, and on each the places, as planes.cuh and tile.cuh have them."""
    along_k, threads, size = operand.contiguous == "k", config.threads, operand.bytes(1)
    if way.fragments == "fma":
        count = -(-config.bk * tile // threads)
        across = 8 if along_k else min(tile, max(32, threads // config.bk))
        lines = max(1, tile // (threads // across)) if along_k else -(-count // (tile // across))
    else:
        rows, line = (tile, config.bk * size) if along_k else (config.bk, tile * size)
        count = -(-rows * line // 16 // threads)
        lines = max(1, rows // (threads // (math.gcd(128, line) // 16)))
    return lines, -(-count // lines)


def _windows(problem: Problem) -> Im2col:
    """Returns the view of a, which is one of windows."""
    assert isinstance(problem.a.view, Im2col)
    return problem.a.view


def _tap_steps(problem: Problem, operand: Operand) -> list[int]:
    """Returns the elements from a tap to its neighbours in the array along each axis."""
    assert isinstance(operand.view, Taps)
    rows, pitch = operand.array(problem.n, problem.k)
    step, found = rows * pitch, []
    for size in operand.view.stored:
        step //= size
        found.append(step)
    return found


def _digits(number: int, sizes: Sequence[int]) -> list[int]:
    """Returns a number by its digits, the last the fastest, of which each but the first begins again at its size."""
    found = []
    for size in reversed(sizes[1:]):
        number, digit = divmod(number, size)
        found.append(digit)
    return [number, *reversed(found)]


def _two(name: str, x: int, y: int, to: str) -> Argument:
    """Returns an argument of two integers of 32 bits, with a sign."""
    for value in (x, y):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{name} = {value:,} does not fit 32 bits")
    return Argument(f"Two {name}", Int64(y * 2**32 + x % 2**32), to)
