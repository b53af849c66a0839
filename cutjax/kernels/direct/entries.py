"""The launches of a kernel: of each its device text, its arguments and its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.direct.geometry import places_of
from cutjax.kernels.direct.resolved import Resolved, accumulator_of
from cutjax.kernels.direct.text import OF_THREAD, as_large, epilogue_text, reduced, source
from cutjax.kernels.entry import Entry
from cutjax.kernels.staging import instructions
from cutjax.runtime.launch import Pointer

SUM_THREADS, MOST_SLICES = 512, 16
# Instructions of an epilogue, of which a kernel has a copy for each place of a strip, and each step; of all steps. Of
# several channels at once, beside sums, a call would take a stack: steps share a copy then.
MOST_INLINED = 60
_TENSOR = ("mma/atoms.cuh", "mma/math.cuh", "mma/instruction.cuh")


def entries(kernel: Resolved) -> tuple[Entry, ...]:
    """Returns the launches of a kernel, in order: of a weight gradient two."""
    by_matrices = kernel.config.toeplitz
    if kernel.geometry.gradient:
        return _toeplitz_parts(kernel) if by_matrices else _parts(kernel), _sum(kernel)
    return (_toeplitz(kernel) if by_matrices else _forward(kernel),)


def _entry(
    kernel: Resolved,
    name: str,
    constants: dict[str, int],
    arguments: Iterator[Argument],
    files: Sequence[str],
    *sizes: int,
) -> Entry:
    p, taken = kernel.problem, tuple(arguments)
    files = [epilogue_text(p.epilogue, taken, *_epilogue(kernel)) if file == "epilogue" else file for file in files]
    text = source(name, p.a.dtype.name, accumulator_of(p), constants, taken, files)
    return Entry(p, name, text, taken, *sizes)


def _epilogue(kernel: Resolved) -> tuple[str, bool, bool]:
    """The neighbours that the epilogue computes at once, as device text; whether it is called, and by stages."""
    if kernel.geometry.gradient:
        return "1", False, False
    toeplitz = kernel.config.toeplitz
    at_once = toeplitz and as_large(kernel.problem.epilogue)
    if at_once:  # of two places: a thread has registers for the vectors of so few channels throughout
        return str(min(kernel.tensor.unit, OF_THREAD)), False, True
    return "2" if toeplitz else "COLUMNS", _instructions(kernel) > MOST_INLINED, toeplitz


def _copied_once(kernel: Resolved) -> bool:
    """True if steps of a kernel by Toeplitz matrices share the code that computes results and copies them to memory."""
    epilogue = kernel.problem.epilogue
    return as_large(epilogue) and (bool(reduced(epilogue)) or _instructions(kernel) > MOST_INLINED)


def _instructions(kernel: Resolved) -> int:
    """Returns the instructions of an epilogue in all copies of the code of a step."""
    copies = kernel.geometry.rows.window if kernel.config.toeplitz else 1
    return copies * instructions(kernel.problem.epilogue)


def _constants(kernel: Resolved) -> dict[str, int]:
    c, g = kernel.config, kernel.geometry
    d, h, w = g.planes, g.rows, g.columns
    return {
        "PAIRS": c.pairs,
        "STRIP": c.strip,
        "LANES": kernel.shape.lanes,
        "THREADS": kernel.shape.threads,
        "BLOCKS_PER_SM": c.blocks,
        "MULTIPLIER": g.multiplier,
        "CHANNELS": g.channels,
        "WINDOW_D": d.window,
        "WINDOW_H": h.window,
        "WINDOW_W": w.window,
        "STRIDE_D": d.stride,
        "STRIDE_H": h.stride,
        "STRIDE_W": w.stride,
        "DILATION_D": d.dilation * d.every,
        "DILATION_H": h.dilation,
        "DILATION_W": w.dilation,
        "SPREAD_D": d.spread,
        "SPREAD_H": h.spread,
        "SPREAD_W": w.spread,
        "LOW_H": h.low,
        "LOW_W": w.low,
        "EVERY_H": h.every,
        "EVERY_W": w.every,
        "ALONG": g.along,
    }


def _sizes(kernel: Resolved) -> Iterator[Argument]:
    c, g, p = kernel.config, kernel.geometry, kernel.problem
    d, h, w = g.planes, g.rows, g.columns
    sizes = {
        "items": g.items(c.strip, c.rows),
        "strips": g.strips(c.strip),
        "chunks": g.chunks(c.strip, c.rows),
        "rows": c.rows,
        **{f"grid_{name}": axis.grid for name, axis in zip("dhw", (d, h, w), strict=True)},
        **{f"image_{name}": axis.image for name, axis in zip("dhw", (d, h, w), strict=True)},
        "low_d": d.low - d.first * d.spread,
        "first_h": h.first,
        "first_w": w.first,
        "channels": g.view.groups * g.channels,
    }
    for name, value in sizes.items():
        yield integer(name, value, "sizes")
    yield integer("tiles", kernel.shape.tiles)
    yield integer("pairs", g.pairs)
    yield integer("columns", p.n)


def _extras(kernel: Resolved) -> Iterator[Argument]:
    p = kernel.problem
    for i in range(len(p.epilogue.operands)):
        yield Argument(f"const char* base{i}", Pointer(p.arrays + i), "extras")
    for i in range(len(p.epilogue.outputs)):
        yield Argument(f"char* d{i}", Pointer(p.arrays + len(p.epilogue.operands) + i), "extras")


def _forward(kernel: Resolved) -> Entry:
    p, c, g, shape = kernel.problem, kernel.config, kernel.geometry, kernel.shape

    def arguments() -> Iterator[Argument]:
        yield Argument("const char* x", Pointer(0))
        yield Argument("const char* w", Pointer(1))
        yield from _sizes(kernel)
        for name, value in zip(("first", "step_d", "step_h", "step_w"), places_of(p), strict=True):
            yield integer(f"tap_{name}", value, "tap_places")
        yield integer("n", p.n, "tap_places")
        yield integer("inputs", g.view.groups * g.channels, "tap_places")
        yield from _extras(kernel)

    read, done = g.rows.steps
    first, count = g.rows.open
    constants = _constants(kernel) | {
        "B_K_MAJOR": kernel.k_major,
        "IN_REGISTERS": shape.in_registers,
        "UNROLL": c.ahead,
        "IMAGE_ROWS": read,
        "RESULT_ROWS": done,
        "FIRST_OPEN": first,
        "WHOLE_STRIPS": shape.whole_strips,
        "ROWS_OPEN": count,
    }
    if shape.slides:
        constants["ACROSS"] = g.pairs
    files = ("direct/window.cuh", "epilogue", "direct/slide.cuh" if shape.slides else "direct/forward.cuh")
    return _entry(kernel, kernel.name, constants, arguments(), files, shape.blocks, shape.threads, shape.shared_bytes)


def _images(to: str, height: int, width: int, channels: int, low_h: int = 0, low_w: int = 0) -> Iterator[Argument]:
    sizes = {"height": height, "width": width, "channels": channels, "low_h": low_h, "low_w": low_w}
    for name, value in sizes.items():
        yield integer(f"{to}_{name}", value, to)


def _chunks(kernel: Resolved) -> Iterator[Argument]:
    """Yields the arguments of both kernels by Toeplitz matrices: how images are divided, and the images."""
    shape, g = kernel.tensor, kernel.geometry
    h, w = g.rows, g.columns
    sizes = {"images": g.view.images, "rows": kernel.config.rows, "chunks": shape.chunks, "pieces": shape.pieces}
    for name, value in (sizes | {"parts": shape.parts}).items():
        yield integer(f"chunks_{name}", value, "chunks")
    yield from _images("images", h.image, w.image, g.pairs, -h.first, -w.first)
    yield integer("tiles", shape.tiles)


def _of_tensor(kernel: Resolved) -> dict[str, int]:
    c, g, shape = kernel.config, kernel.geometry, kernel.tensor
    return {
        "WINDOW_H": g.rows.window,
        "WINDOW_W": g.columns.window,
        "STRIPS": shape.strips,
        "SUBS": shape.subs,
        "PIECES": shape.pieces,
        "READ_PIXELS": shape.read[0],
        "READ_PLACES": shape.read[1],
        "WARPS": shape.lanes,
        "THREADS": shape.threads,
        "BLOCKS_PER_SM": c.blocks,
        "STAGES": c.ahead,
        "UNIT": shape.unit,
        "COPIED_ONCE": _copied_once(kernel),
    }


def _toeplitz(kernel: Resolved) -> Entry:
    p, g, shape = kernel.problem, kernel.geometry, kernel.tensor

    def arguments() -> Iterator[Argument]:
        yield Argument("const char* x", Pointer(0))
        yield Argument("const char* w", Pointer(1))
        yield from _chunks(kernel)
        first, _, step_h, step_w = places_of(p)
        sizes = {"grid_h": g.rows.grid, "grid_w": g.columns.grid}
        sizes |= {"tap_first": first, "tap_step_h": step_h, "tap_step_w": step_w}
        for name, value in sizes.items():
            yield integer(name, value)
        yield from _extras(kernel)

    files = [*_TENSOR, "direct/staged.cuh", "epilogue", "direct/toeplitz.cuh"]
    sizes = shape.blocks, shape.threads, shape.shared_bytes
    return _entry(kernel, kernel.name, _of_tensor(kernel), arguments(), files, *sizes)


def _toeplitz_parts(kernel: Resolved) -> Entry:
    g, shape = kernel.geometry, kernel.tensor

    def arguments() -> Iterator[Argument]:
        yield Argument("const char* x", Pointer(0))
        yield Argument("const char* g", Pointer(1))
        yield _sums(kernel, "")
        yield from _chunks(kernel)
        yield from _images("gradients", g.rows.grid, g.columns.grid, g.pairs)

    files = [*_TENSOR, "direct/staged.cuh", "direct/toeplitz_gradient.cuh"]
    sizes = shape.blocks, shape.threads, shape.shared_bytes
    return _entry(kernel, kernel.name, _of_tensor(kernel), arguments(), files, *sizes)


def _parts(kernel: Resolved) -> Entry:
    shape = kernel.shape

    def arguments() -> Iterator[Argument]:
        yield Argument("const char* x", Pointer(0))
        yield Argument("const char* g", Pointer(1))
        yield _sums(kernel, "")
        yield from _sizes(kernel)
        yield integer("parts", shape.parts)

    constants = _constants(kernel) | {
        "WINDOW_ROWS": shape.window_rows,
        "ROW_SLICES": shape.row_slices,
        "SLICES": shape.slices,
        "TAPS_AT_ONCE": shape.taps_at_once,
    }
    files = ("direct/window.cuh", "direct/gradient.cuh")
    return _entry(kernel, kernel.name, constants, arguments(), files, shape.blocks, shape.threads, shape.shared_bytes)


def _sum(kernel: Resolved) -> Entry:
    p, g = kernel.problem, kernel.geometry

    def arguments() -> Iterator[Argument]:
        yield _sums(kernel, "const ")
        for name, value in {"parts": kernel.parts, "taps": g.taps, "pairs": g.pairs, "columns": p.n}.items():
            yield integer(name, value)
        yield from _extras(kernel)

    slices = slices_of(kernel.parts)
    constants = {"THREADS": SUM_THREADS, "SLICES": slices, "CHANNELS": g.channels}
    blocks = -(-g.taps * g.pairs // (SUM_THREADS // slices))
    shared_bytes = SUM_THREADS * kernel.scratch.dtype.itemsize
    files = ("epilogue", "direct/sum.cuh")
    name = f"{kernel.name}_{slices}_sum"
    return _entry(kernel, name, constants, arguments(), files, blocks, SUM_THREADS, shared_bytes)


def slices_of(parts: int) -> int:
    """Returns the threads that add up one element of so many parts: a power of two, of which none is idle."""
    return min(MOST_SLICES, 1 << (parts - 1).bit_length())


def _sums(kernel: Resolved, const: str) -> Argument:
    p = kernel.problem
    carrier = "double" if accumulator_of(p) == "float64" else "float"
    buffer = p.arrays + len(p.epilogue.operands) + len(p.epilogue.outputs)
    return Argument(f"{const}{carrier}* sum_of_parts", Pointer(buffer))
