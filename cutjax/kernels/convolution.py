"""The problems of convolutions: a forward one, its weight gradient, and the phases of one whose images are spread.

The views that they read operands by: ``Im2col`` of a, ``Taps`` of b (operand.py). Each of the three products of a
convolution, and each of its derivatives, is one of the first two:

  forward          d [windows, n] = im2col(x) [windows, (tap, channel)] @ w [(tap, channel), n]
  input gradient   the same of the result's gradient, spread by the strides, and of flipped weights along their n
  weight gradient  d [(tap, channel), n] = im2col(x)^T [(tap, channel), windows] @ g [windows, n]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.device import Device
from cutjax.kernels.operand import Im2col, Operand, Pixels, Taps
from cutjax.kernels.problem import BF16, Problem


def forward(
    view: Im2col,
    n: int,
    taps: Taps | None = None,
    *,
    transposed: bool = False,
    dtype: Any = BF16,
    out_dtype: Any = BF16,
    epilogue: Epilogue | None = None,
    device: Device | None = None,
) -> Problem:
    """Returns the problem of ``d [images * grid, n] = im2col(x) @ w``.

    Args:
      view: the windows of x.
      n: columns of the result, of all groups.
      taps: those of w; None for all of them in order.
      transposed: whether w is ``[*window, n / groups, groups * channels]`` instead of ``[*window, channels, n]``.
      dtype: of x and w.
      out_dtype: of the result, where there is no epilogue.
      epilogue: as the problem's.
      device: as the problem's.
    """
    view, taps = normal(view, taps)
    in_order = Taps(view.window, view.window, (0,) * len(view.window), (1,) * len(view.window), view.groups)
    taps = dataclasses.replace(taps or in_order, groups=view.groups)
    plain = (view.groups == 1 and math.prod(taps.stored) == 1) if transposed else taps == in_order
    b = Operand(np.dtype(dtype), "k" if transposed else "mn", view=None if plain else taps)
    a = Operand(np.dtype(dtype), "k", view=None if is_plain(view) else view)
    return _problem(view.rows, n, view.columns, a, b, out_dtype, epilogue, device)


def weight_gradient(
    view: Im2col,
    n: int,
    *,
    dtype: Any = BF16,
    out_dtype: Any = BF16,
    epilogue: Epilogue | None = None,
    device: Device | None = None,
) -> Problem:
    """Returns the problem of ``d [taps * channels, n] = im2col(x)^T @ g``, of g ``[images * grid, n]``."""
    view, _ = normal(view)
    a = Operand(np.dtype(dtype), "mn", view=None if is_plain(view) else view)
    return _problem(view.columns, n, view.rows, a, Operand(np.dtype(dtype), "mn"), out_dtype, epilogue, device)


def _problem(
    m: int, n: int, k: int, a: Operand, b: Operand, out_dtype: Any, epilogue: Epilogue | None, device: Device | None
) -> Problem:
    if epilogue is not None:
        return Problem(m, n, k, a, (b,) * epilogue.products, epilogue=epilogue, device=device)  # pyright: ignore
    plain = Problem.of(m, n, k, "nn", a.dtype, b.dtype, out_dtype, device=device)
    return dataclasses.replace(plain, a=a, bs=(b,))


def is_plain(view: Im2col) -> bool:
    """True if the matrix of windows is the array of the images: each is one pixel, and each pixel one of them."""
    return view.groups == 1 and all(map(_is_single, _axes(view)))


def normal(view: Im2col, taps: Taps | None = None) -> tuple[Im2col, Taps | None]:
    """Returns the view of the same matrix and memory that has the fewest axes, and the taps of weights along those.

    Where windows lie side by side along the last axis, as patches do, that becomes channels; along the first one, each
    is of an image of its own. Axes along which windows are single places are images before all others, and one axis
    between and behind them.
    """
    axes, images, channels = _axes(view), view.images, view.channels
    places = (
        [None] * len(axes) if taps is None else [*zip(taps.stored, taps.window, taps.first, taps.step, strict=True)]
    )
    image, grid, window, *rest = axes[-1]
    if window > 1 and rest == [window, 1, 1, 0] and image == grid * window and taps is None and view.groups == 1:
        axes[-1], channels = (grid, grid, 1, 1, 1, 1, 0), channels * window
    kept: list[tuple[Any, Any]] = []
    for i, (axis, place) in enumerate(zip(axes, places, strict=True)):
        if _is_single(axis) and not kept and i < len(axes) - 1:
            images *= axis[0]
        elif taps is None and not kept and axis[0] == axis[1] * axis[2] and axis[3:] == (axis[2], 1, 1, 0):
            images *= axis[1]
            kept.append(((axis[2], 1, axis[2], 1, 1, 1, 0), place))
        elif _is_single(axis) and kept and _is_single(kept[-1][0]):
            before = kept[-1][0]
            kept[-1] = (before[0] * axis[0], before[1] * axis[1], *axis[2:]), place
        else:
            kept.append((axis, place))
    sizes = (tuple(x) for x in zip(*(axis for axis, _ in kept), strict=True))
    view = dataclasses.replace(view, images=images, channels=channels, **dict(zip(_AXES, sizes, strict=True)))
    if taps is None:
        return view, None
    stored, window, first, step = (tuple(x) for x in zip(*(place for _, place in kept), strict=True))
    return view, Taps(stored, window, first, step, taps.groups)


def with_patches(problem: Problem) -> Problem:
    """Returns the problem of a plain product in which patches that do not overlap are columns, along the last axis.

    That is where the result is spread by as much as its windows are long, as the gradient of patches and what
    transposed convolutions of such make: each of its pixels along the axis is one of a column, in the same memory.
    """
    view, taps = problem.a.view, problem.bs[0].view
    if not isinstance(view, Im2col) or not isinstance(taps, Taps) or view.groups > 1:
        return problem
    image, grid, window, *rest = _axes(view)[-1]
    flipped = (taps.stored[-1], taps.first[-1], taps.step[-1]) == (window, window - 1, -1)
    if not flipped or problem.bs[0].contiguous == "mn" or rest != [1, 1, window, window - 1] or grid != image * window:
        return problem
    axes = [*_axes(view)[:-1], (image, image, 1, 1, 1, 1, 0)]
    view = dataclasses.replace(view, **dict(zip(_AXES, map(tuple, zip(*axes, strict=True)), strict=True)))
    stored, window_of, first, step = (x[:-1] for x in (taps.stored, taps.window, taps.first, taps.step))
    taps = Taps((*stored, 1), (*window_of, 1), (*first, 0), (*step, -1))
    how: dict[str, Any] = {"out_dtype": problem.out_dtype, "device": problem.device}
    found = forward(view, problem.n * window, taps, transposed=True, dtype=problem.a.dtype, **how)
    a, bs = (dataclasses.replace(x, batch=y.batch) for x, y in ((found.a, problem.a), (found.bs[0], problem.bs[0])))
    bs = (bs.of(problem.bs[0].dtype),)
    return dataclasses.replace(found, a=a, bs=bs, batch=problem.batch, epilogue=problem.epilogue)


_AXES = ("image", "grid", "window", "strides", "dilation", "spread", "low")


def _axes(view: Im2col) -> list[Any]:
    """Returns the sizes of each axis of a view."""
    return list(zip(*(getattr(view, name) for name in _AXES), strict=True))


def _is_single(axis: Sequence[int]) -> bool:
    """True if windows are single places along an axis, all in order."""
    image, grid, window, stride, _, spread, low = axis
    return window == spread == 1 and low == 0 and image == grid and (stride == 1 or grid == 1)


def as_read(problem: Problem, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the arrays of an operation as a problem's matrices, and as the arrays of their views."""
    p, shapes = problem, [(*problem.a.batch, *problem.a.array(problem.m, problem.k))]
    shapes += [(*b.batch, *b.array(p.n, p.k)) for b in p.bs]
    for spec in p.epilogue.operands:
        moves = (*(False,) * (len(p.batch) - len(spec.batch)), *spec.batch)
        batch = (size if moving else 1 for size, moving in zip(p.batch, moves, strict=True))
        shapes.append((*batch, p.m if spec.row else 1, p.n if spec.col else 1))
    return [lax.reshape(x, shape) for x, shape in zip(arrays, shapes, strict=True)]


def phases(view: Im2col, taps: Taps) -> Iterator[tuple[Im2col, Taps, Pixels]]:
    """Yields the parts of a forward convolution whose image is spread, in which no zeros are multiplied.

    A window at place p has an element of the image at each tap for which ``strides * p + dilation * tap - low`` is a
    multiple of ``spread``. Places that have the same remainder have the same taps: they are a phase, a convolution of
    the image as it is. Phases without a tap have windows of size 0; their results are zero.
    """
    axes = [
        list(_phases_along(*sizes))
        for sizes in zip(view.grid, view.window, view.strides, view.dilation, view.spread, view.low, strict=True)
    ]
    for along in itertools.product(*axes):
        grid, window, strides, dilation, low, first, step, tap, tap_step = (tuple(x) for x in zip(*along, strict=True))
        part = dataclasses.replace(
            view, grid=grid, window=window, strides=strides, dilation=dilation, spread=(1,) * len(grid), low=low
        )
        along_axes = zip(taps.first, taps.step, tap, tap_step, strict=True)
        chosen = [(start + by * t, by * every) for start, by, t, every in along_axes]
        places, steps = tuple(x for x, _ in chosen), tuple(x for _, x in chosen)
        of = dataclasses.replace(taps, window=window, first=places, step=steps)
        yield part, of, Pixels(grid, view.grid, first, step)


def _phases_along(
    grid: int, window: int, stride: int, dilation: int, spread: int, low: int
) -> Iterator[tuple[int, int, int, int, int, int, int, int, int]]:
    """Yields (grid, window, stride, dilation, low, first, step, first tap, step of taps) of each phase of an axis."""
    step = spread // math.gcd(stride, spread)  # places after which remainders are the same again
    every = spread // math.gcd(dilation, spread)  # taps after which they are
    for first in range(min(step, grid)):
        tap = next((t for t in range(min(every, window)) if (stride * first + dilation * t - low) % spread == 0), None)
        count = -(-(grid - first) // step)
        if tap is None:
            yield count, 0, 1, 1, 0, first, step, 0, 1
        else:
            begin = (stride * first + dilation * tap - low) // spread
            taps = -(-(window - tap) // every)
            yield count, taps, stride * step // spread, dilation * every // spread, -begin, first, step, tap, every
