"""Windows of images, and taps of weights, as TMA loads them: pieces of channels, tensor maps, what a kernel is told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax

from cutjax.kernels import reasons as shared
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.operand import Im2col, Operand, Taps
from cutjax.kernels.prepared import Step
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.packed import (
    Join,
    PackWeights,
    PadImages,
    Unfold,
    apart,
    chunk_of,
    in_order,
    packed,
    padded_to,
    patches,
    size_of,
    spread,
    taken,
    view_of,
)
from cutjax.kernels.sm90.phases import Phases, beside, counts
from cutjax.runtime import tensor_map
from cutjax.runtime.launch import Int64, TensorMap

_OFFSETS = {1: 2**16, 2: 2**8, 3: 2**5}  # of a load, by the axes of an image: the first that do not fit
_CORNERS = {1: 2**15, 2: 2**7, 3: 2**4}  # of the box that windows begin in, either way
_STRIDES = 8
_ALONG = 16  # phases along all axes, each of which has a parameter


def chunk(problem: Problem) -> int:
    """Returns the channels of a piece."""
    view = taken(problem)
    assert view is not None
    return chunk_of(view, size_of(problem))


def in_parts(problem: Problem, splits: int) -> bool:
    """True if a kernel's results are sums that XLA takes further: of splits, or with rows that are none of weights."""
    view = taken(problem)
    if splits > 1 or view is None or problem.a.contiguous == "k":
        return splits > 1
    return problem.m != view.taps * padded_to(view.channels, chunk(problem))


def as_multiplied(problem: Problem) -> Problem:
    """Returns the problem of whole pieces of channels, of groups that are joined, and of weights that are read so."""
    view = taken(problem)
    if view is None:
        return problem
    taps = max(1, view.taps)  # without a tap, one of zeros
    length, a = taps * padded_to(view.channels, chunk(problem)), dataclasses.replace(problem.a, view=view)
    if problem.a.contiguous == "mn":
        return dataclasses.replace(problem, m=length, a=a)
    b = problem.bs[0]
    if packed(problem):
        b = dataclasses.replace(b, view=in_order(view) if b.contiguous == "k" else None)
    if b.view or length != taps * view.channels:
        of = b.view if isinstance(b.view, Taps) else in_order(view)
        b = dataclasses.replace(b, view=dataclasses.replace(of, groups=view.groups))
    return dataclasses.replace(problem, k=length, a=a, bs=(b,) * len(problem.bs))


def taps(multiplied: Problem) -> int:
    """Returns the taps of windows along k."""
    view = view_of(multiplied)
    assert view is not None
    return view.taps


def depth(multiplied: Problem) -> int:
    """Returns the elements of a window that there are, along k of a problem as it is multiplied."""
    view = view_of(multiplied)
    if view is None or multiplied.a.contiguous == "mn":
        return multiplied.k
    return max(1, view.taps) * view.channels


def steps(problem: Problem, name: str) -> list[Step]:
    """Returns the steps that make an operand what a kernel reads, of patches, packed images or joined groups."""
    if name == "a" and (of_patches := patches(problem)):
        return [Unfold(of_patches)]
    view, of, b = view_of(problem), taken(problem), problem.bs[0]
    if view is None or of is None or view == of:
        return []
    if packing := packed(problem):
        if name == "a":
            return [PadImages(packing)]
        taps = b.view if isinstance(b.view, Taps) else in_order(view)
        return [PackWeights(packing, taps, b.contiguous == "k")] if problem.a.contiguous == "k" else []
    if name == "a" or problem.a.contiguous == "mn":
        return []
    rows = view.channels if b.contiguous == "mn" else problem.n // view.groups
    return [Join(rows, of.groups, view.groups // of.groups)]


def weights(problem: Problem, x: jax.Array) -> jax.Array:
    """Returns the gradient of weights, of the sums that a kernel makes for it; of other products these as they are."""
    view, of = view_of(problem), taken(problem)
    return x if view is None or of is None or problem.a.contiguous == "k" else apart(view, of, packed(problem), x)


def name(problem: Problem) -> str:
    """Returns the part of a kernel's name about the views that it reads by."""
    problem, _, runs = beside(problem)
    view = view_of(problem)
    if view is None:
        return ""
    axes, length, of = len(view.image), chunk(problem), as_multiplied(problem)
    taps = problem.a.contiguous == "k" and (isinstance(of.bs[0].view, Taps) or spread(view))
    phases = f"_phases{'x'.join(map(str, counts(view)))}" * spread(view) + f"_runs{runs}" * (runs > 1)
    grouped = isinstance(of.a.view, Im2col) and of.a.view.groups > 1
    return f"_im2col{axes}d_c{length}" + "_taps" * taps + "_grouped" * grouped + phases


def of_pixels(phases: Phases) -> Iterator[Argument]:
    """Yields the arguments of the pixels that rows of phases are, beside the grid that those count."""
    for i, (image, step) in enumerate(zip(phases.image[::-1], phases.step[::-1], strict=True)):
        yield _bits(f"pixels_image{i}", image | step << 32, "rows")
    for i, axis in enumerate(reversed(phases.along)):
        yield _bits(f"pixels_first{i}", sum(of.first << 4 * j for j, of in enumerate(axis)), "rows")


def reasons(problem: Problem) -> list[str]:
    """Returns the reasons against TMA for the windows of a problem."""
    view = view_of(problem)
    if view is None:
        return []
    found, axes = [], len(view.image)
    if problem.a.dtype.kind == "c":
        found.append("windows of complex numbers")
    if any(isinstance(b.view, Taps) for b in problem.bs) and problem.a.contiguous == "mn":
        found.append("taps of b in a weight gradient, whose b is the result's")
    if spread(view):
        found.append("images with zeros between their elements: kernels compute phases of their result")
    if min(view.grid) < 1 or min(view.image) < 1:
        return [*found, "a size of the windows is 0: nothing to launch"]
    offsets = [max(window - 1, 0) * dilation for window, dilation in zip(view.window, view.dilation, strict=True)]
    if max(offsets) >= _OFFSETS[axes]:
        found.append(f"windows that reach {max(offsets)} pixels: TMA's offsets are below {_OFFSETS[axes]}")
    corners = [x for pair in zip(*_corners(view), strict=True) for x in pair]
    if not all(-_CORNERS[axes] <= x < _CORNERS[axes] for x in corners):
        found.append(f"windows that begin {corners} pixels from the images' edges: TMA's corners have {_CORNERS[axes]}")
    if max(_strides(view)) > _STRIDES:
        found.append(f"strides of {max(view.strides)}: TMA's are up to {_STRIDES}")
    if packed(as_multiplied(problem)):
        found.append(f"{view.groups} groups of {view.channels} channels: as one they are few, and rows of them packed")
    if patches(as_multiplied(problem)):
        found.append(f"{view.groups} groups of {view.channels} channels: as one they are patches in rows of odd bytes")
    return found


def phase_reasons(problem: Problem, phases: Phases | None) -> list[str]:
    """Returns the reasons against the phases of a problem."""
    view = view_of(problem)
    if view is None or phases is None:
        return []
    found, most = [], _OFFSETS[len(view.image)]
    if (reach := phases.reach(view.dilation)) >= most:
        found.append(f"phases whose windows reach {reach} pixels: TMA's offsets are below {most}")
    if packed(problem):
        found.append("phases of windows of few channels")
    if (along := sum(map(len, phases.along))) > _ALONG:
        found.append(f"{along} phases along the axes: a launch has parameters for {_ALONG}")
    return found + shared.of_counters({"pixels": view.images * math.prod(phases.image)})


def group_width(problem: Problem) -> int:
    """Returns the columns of a group of channels, of which CTAs that share windows have their tiles; 0 of one group."""
    view = view_of(problem)
    return 0 if view is None or view.groups == 1 else problem.n // view.groups


def _bits(name: str, bits: int, to: str) -> Argument:
    """Returns an argument of 64 bits."""
    return Argument(f"u64 {name}", Int64(bits - (bits >> 63 << 64)), to)


def _strides(view: Im2col) -> tuple[int, ...]:
    return tuple(stride if grid > 1 else 1 for stride, grid in zip(view.strides, view.grid, strict=True))


def _corners(view: Im2col) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the places that windows begin at: the first from an image's first pixel, the last from its last."""
    along = zip(_strides(view), view.grid, view.low, view.image, strict=True)
    upper = [stride * (grid - 1) - low - (image - 1) for stride, grid, low, image in along]
    return tuple(-low for low in view.low), tuple(upper)


def windows_map(buffer: int, problem: Problem, strides: Sequence[int], rows: int) -> TensorMap:
    """Returns the tensor map of a's windows, of which a load takes so many pixels.

    Strides are the bytes between neighbours along the axes of an image, the innermost first, and images.
    """
    view, a = view_of(problem), problem.a
    assert view is not None
    lower, upper = (corner[::-1] for corner in _corners(view))
    return TensorMap(
        buffer=buffer,
        dtype=a.dtype,
        dims=(view.groups * view.channels, *view.image[::-1], view.images),
        strides=tuple(strides),
        box=tensor_map.Im2col(lower, upper, chunk(problem), rows),
        swizzle=a.bytes(chunk(problem)),
        l2_bytes=256 if strides[0] % 128 == 0 else 128,
        element_strides=(1, *_strides(view)[::-1], 1),
    )


def taps_map(
    buffer: int, problem: Problem, b: Operand, pitch: int, box: tuple[int, int], span: int, l2_bytes: int
) -> TensorMap:
    """Returns the tensor map of weights as taps, of which a load takes a box of one; the pitch of a row is in bytes."""
    view = view_of(problem)
    assert view is not None
    assert isinstance(b.view, Taps)
    dims = view.groups * view.channels, problem.n // view.groups
    dims = dims if b.contiguous == "k" else (problem.n, view.channels)
    taps = math.prod(b.view.stored)
    return TensorMap(
        buffer=buffer,
        dtype=b.dtype,
        dims=(*dims, taps),
        strides=(pitch, pitch * dims[1]),
        box=(*box, 1),
        swizzle=span,
        l2_bytes=l2_bytes,
    )


def of_windows(problem: Problem, depth: int, phases: Phases | None) -> Iterator[Argument]:
    """Yields the arguments of a's windows beside their map, for k blocks of so many elements."""
    view = view_of(problem)
    assert view is not None
    yield integer("a_pieces", -(-view.channels // chunk(problem)), "a")
    # TMA begins at multiples of 16 bytes of a row, outside of it too; elsewhere is an illegal instruction on an H200.
    yield integer("a_channels", view.groups * padded_to(view.channels, chunk(problem)), "a")
    for i, value in enumerate(reversed(view.grid)):
        yield integer(f"pixels_grid{i}", value, "a rows") if phases else integer(f"a_grid{i}", value, "a")
    for name in ("strides", "low", "dilation"):
        for i, value in enumerate(reversed(getattr(view, name))):
            yield integer(f"a_{name}{i}", value, "a")
    for i, axis in enumerate(reversed(phases.along) if phases else ()):
        for j, of in enumerate(axis):
            yield _bits(f"a_phase{i}_{j}", of.taps | of.offset << 16 | (of.weights & 0xFFFFFFFF) << 32, "a")
    for i, value in enumerate(() if phases else reversed(view.window)):
        yield integer(f"a_window{i}", value, "a")
    if view.groups > 1 or problem.a.contiguous == "mn":  # what others do not read
        yield integer("a_group_channels", view.channels, "a")
        yield integer("a_group_columns", problem.n // view.groups, "a")
    if problem.a.contiguous == "mn":
        for i, size in enumerate((*view.grid[::-1], 0)):
            yield integer(f"a_block{i}", depth % size if size else depth, "a")
            depth //= size or 1


def of_taps(problem: Problem) -> Iterator[Argument]:
    """Yields the arguments of b's taps beside their maps."""
    view, b = view_of(problem), problem.bs[0]
    assert view is not None
    assert isinstance(b.view, Taps)
    of_all = view.groups * padded_to(view.channels, chunk(problem))  # a multiple of 16 bytes, as a's
    yield integer("b_channels", of_all if b.contiguous == "k" else view.channels, "b")
    place, step, steps = 0, 1, []
    for stored, first, by in zip(b.view.stored[::-1], b.view.first[::-1], b.view.step[::-1], strict=True):
        place += first * step
        steps.append(by * step)
        step *= stored
    yield integer("b_first", place, "b")
    for i, by in enumerate(steps):
        yield integer(f"b_tap_step{i}", by, "b")
