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
from collections.abc import Iterator
from typing import Any

import numpy as np

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
    in_order = Taps(view.window, view.window, (0,) * len(view.window), (1,) * len(view.window), view.groups)
    taps = dataclasses.replace(taps or in_order, groups=view.groups)
    if taps == in_order and not transposed:
        b = Operand(np.dtype(dtype), "mn")
    else:
        b = Operand(np.dtype(dtype), "k" if transposed else "mn", view=taps)
    a = Operand(np.dtype(dtype), "k", view=view)
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
    a = Operand(np.dtype(dtype), "mn", view=view)
    return _problem(view.columns, n, view.rows, a, Operand(np.dtype(dtype), "mn"), out_dtype, epilogue, device)


def _problem(
    m: int, n: int, k: int, a: Operand, b: Operand, out_dtype: Any, epilogue: Epilogue | None, device: Device | None
) -> Problem:
    if epilogue is not None:
        return Problem(m, n, k, a, (b,) * epilogue.products, epilogue=epilogue, device=device)  # pyright: ignore
    plain = Problem.of(m, n, k, "nn", a.dtype, b.dtype, out_dtype, device=device)
    return dataclasses.replace(plain, a=a, bs=(b,))


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
