"""The arguments of a kernel of the family: its tensor maps, and everything beside them."""

from __future__ import annotations

from collections.abc import Iterator

from cutjax.kernels.arguments import Argument, extras, integer, partials
from cutjax.kernels.halo.geometry import Geometry
from cutjax.kernels.halo.operands import taps_of
from cutjax.kernels.halo.resolved import Resolved
from cutjax.kernels.sm90.packed import padded_to
from cutjax.runtime.launch import Pointer, TensorMap


def arguments(kernel: Resolved) -> tuple[Argument, ...]:
    """Returns the arguments of a kernel, in order.

    Buffers are the images, the weights, the epilogue's operands and results, in order.
    """
    return tuple(_arguments(kernel))


def _arguments(kernel: Resolved) -> Iterator[Argument]:
    p, of = kernel.problem, kernel.geometry
    first_result = p.arrays + len(p.epilogue.operands)
    yield Argument("const __grid_constant__ TensorMap map_a", images_map(of), "a")
    for name, value in _of_images(of):
        yield integer(f"a_{name}", value, "a")
    yield Argument("const __grid_constant__ TensorMap map_b", weights_map(of), "b")
    for name, value in _of_weights(of):
        yield integer(f"b_{name}", value, "b")
    for name, value in {"n": p.n, "columns": of.columns, "runs": of.runs, "weight_bytes": of.weight_bytes}.items():
        yield integer(name, value)
    yield from extras(p)
    yield from partials(kernel.staging, first_result)
    for place, (i, _) in enumerate(kernel.staging.results):
        yield Argument(f"char* d{place}", Pointer(first_result + i), "rows")


def _of_images(of: Geometry) -> Iterator[tuple[str, int]]:
    view, more = of.view, [1] * (3 - of.axes)
    for name in ("pieces", "stage_bytes", "box_bytes", "group_bytes"):
        yield name, getattr(of, name)
    for i, count in enumerate([*of.taps, *more]):
        yield f"taps{i}", count
    steps = [pitch * dilation for pitch, dilation in zip(of.pitches, view.dilation[::-1], strict=False)]
    for i, step in enumerate([*steps, *more]):
        yield f"tap_bytes{i}", step
    for name, values in {"grid": view.grid[::-1], "tiles": of.tiles, "low": view.low[::-1]}.items():
        for i, value in enumerate(values):
            yield f"{name}{i}", value
    yield "images", view.images
    yield "step", of.step
    yield "apart", of.apart
    yield "steps", of.config.steps
    if of.packing or view.groups > 1:  # what others do not read
        yield "group_channels", view.channels
        yield "group_columns", of.problem.n // view.groups
    for i, stride in enumerate(view.strides[::-1] if of.packing else ()):
        yield f"strides{i}", stride


def _of_weights(of: Geometry) -> Iterator[tuple[str, int]]:
    taps, place, inner, steps = taps_of(of.problem), 0, 1, []
    for stored, first, step in zip(taps.stored[::-1], taps.first[::-1], taps.step[::-1], strict=True):
        place += first * inner
        steps.append(step * inner)
        inner *= stored
    yield "first", place
    for i, step in enumerate([*steps, *[0] * (3 - of.axes)]):
        yield f"step{i}", step
    yield "stacked", steps[-1]


def images_map(of: Geometry) -> TensorMap:
    """Returns the tensor map of images, of which a load takes the box of a step."""
    view, a, packing = of.view, of.problem.a, of.packing
    if packing:
        _, *strides = packing.strides(a.bytes(1))
        dims, strides = (of.row, strides[0] // a.bytes(of.row), *view.image[-2::-1]), [a.bytes(of.row), *strides]
    else:
        dims, strides = (view.groups * view.channels, *view.image[::-1]), [a.bytes(view.groups * view.channels)]
        for size in view.image[::-1]:
            strides.append(strides[-1] * size)
    return TensorMap(
        buffer=0,
        dtype=a.dtype,
        dims=(*dims, view.images),
        strides=tuple(strides),
        box=(of.row, *of.box),
        swizzle=0 if packing else of.span,
        l2_bytes=256 if strides[0] % 128 == 0 else 128,
    )


def weights_map(of: Geometry) -> TensorMap:
    """Returns the tensor map of the weights of a tap."""
    p, view, b = of.problem, of.view, of.problem.bs[0]
    dims = (p.n, view.channels) if of.of_columns else (view.groups * view.channels, p.n // view.groups)
    count, pitch = 1, b.bytes(padded_to(dims[0], 8))
    for size in taps_of(p).stored:
        count *= size
    return TensorMap(
        buffer=1,
        dtype=b.dtype,
        dims=(*dims, count),
        strides=(pitch, pitch * dims[1]),
        box=(of.n_chunk, of.chunk, 1) if of.of_columns else (of.chunk, of.config.bn, 1),
        swizzle=b.bytes(of.n_chunk) if of.of_columns else of.span,
        l2_bytes=128,
    )
