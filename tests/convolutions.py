"""Random convolutions as arguments of lax's, and their oracle by hand: XLA's own reads outside of some operands."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax


class Convolution(NamedTuple):
    """Shapes of the images and the weights, and the further arguments of ``lax.conv_general_dilated``."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    arguments: dict[str, Any]


def drawn(seed: int, wide: bool = False) -> Convolution:
    """A convolution of one to three axes that lax takes: in any layout, of groups, spread, with padding of any sign.

    Of few elements, or ``wide``, so that kernels have whole tiles of some.
    """
    for attempt in itertools.count():
        found = _drawn(random.Random(1000 * seed + attempt), 1 + wide)
        try:
            equation(found)
        except ValueError:  # lax refuses to leave out more than there is
            continue
        return found
    raise AssertionError


def _drawn(r: random.Random, scale: int) -> Convolution:
    d = r.choice((1, 1, 2, 2, 3))
    axes, small = "DHW"[-d:], d == 3
    kind = r.choice(("plain", "plain", "groups", "depthwise", "batch"))
    groups = 1 if kind == "plain" else r.choice((2, 3)) if scale == 1 or kind != "depthwise" else r.choice((16, 40, 64))
    units = (1,) if scale == 1 else (1, 8, 16, 64)
    channels, n = (1 if kind == "depthwise" else r.choice(units) * r.randint(1, 3)), r.randint(1, 3)
    spread = [r.choice((1, 1, 1, 2, 3)) for _ in axes]
    padding = r.choice(("SAME", "VALID", "SAME_LOWER", None, None))
    if padding is None or set(spread) != {1}:
        padding = [(r.randint(-2, 4), r.randint(-2, 4)) for _ in axes]
    sizes = {axis: r.randint(1, scale * (4 if small else 9)) for axis in axes}
    sizes |= {"N": n * (groups if kind == "batch" else 1), "C": channels * (1 if kind == "batch" else groups)}
    window = {axis: r.randint(1, 3 if small else 4) for axis in axes} | {"I": channels}
    window["O"] = groups * r.randint(1, 3) * (1 if kind == "depthwise" else r.choice(units))
    shuffled = ["".join(r.sample(names, d + 2)) for names in ("NC" + axes, "IO" + axes, "NC" + axes)]
    layout = r.choice(
        (("N" + axes + "C", axes + "IO", "N" + axes + "C"), ("NC" + axes, "OI" + axes, "NC" + axes), shuffled)
    )
    return Convolution(
        tuple(sizes[name] for name in layout[0]),
        tuple(window[name] for name in layout[1]),
        {
            "window_strides": [r.choice((1, 1, 2, 3)) for _ in axes],
            "padding": padding,
            "lhs_dilation": spread,
            "rhs_dilation": [r.choice((1, 1, 2, 3)) for _ in axes],
            "dimension_numbers": None if layout[1].startswith("OI") else tuple(layout),
            "feature_group_count": 1 if kind == "batch" else groups,
            "batch_group_count": groups if kind == "batch" else 1,
        },
    )


def equation(conv: Convolution) -> Any:
    """The equation that lax makes of the arguments."""
    avals = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (conv.lhs, conv.rhs)]
    (eqn,) = jax.make_jaxpr(lambda x, w: lax.conv_general_dilated(x, w, **conv.arguments))(*avals).eqns
    return eqn


class Pieces(NamedTuple):
    """The arrays of a convolution with channels last, and the order of the result's axes.

    Attributes:
      x, w: images ``[n, *spatial, c]`` and weights ``[*window, c / groups, columns]``.
      orders: the axes of images, weights and the result in lax's arrays.
      shape: of the result.
      groups: of channels, or of the batch.
      of_batch: whether they are of the batch.
      meetings: index of a place of the result, a tap, and the image's pixel that meet.
    """

    x: np.ndarray
    w: np.ndarray
    orders: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    groups: int
    of_batch: bool
    meetings: list[tuple[Any, Any, Any]]

    def parts(self, g: int) -> tuple[Any, Any]:
        """The columns of a group, and its images and channels."""
        columns, channels, images = (size // self.groups for size in (self.w.shape[-1], self.x.shape[-1], len(self.x)))
        of_columns = slice(g * columns, (g + 1) * columns)
        if self.of_batch:
            return of_columns, (slice(g * images, (g + 1) * images), slice(None))
        return of_columns, (slice(None), slice(g * channels, (g + 1) * channels))


def _pieces(x: Any, w: Any, conv: Convolution) -> Pieces:
    eqn = equation(conv)
    p, (out,) = eqn.params, [y.aval for y in eqn.outvars]
    (n, c, *image), (o, i, *window), (rows, columns, *grid) = p["dimension_numbers"]
    of_images, of_weights, of_result = (n, *image, c), (*window, i, o), (rows, *grid, columns)
    x, w = (np.transpose(np.asarray(y, np.float64), order) for y, order in ((x, of_images), (w, of_weights)))
    shape = tuple(out.shape[axis] for axis in of_result)
    steps = list(
        zip(p["window_strides"], p["rhs_dilation"], p["lhs_dilation"], p["padding"], x.shape[1:-1], strict=True)
    )
    meetings = []
    for place in itertools.product(*map(range, shape[1:-1])):
        for tap in itertools.product(*map(range, w.shape[:-2])):
            at = [
                (*divmod(stride * q + dilation * t - low, spread), size)
                for q, t, (stride, dilation, spread, (low, _), size) in zip(place, tap, steps, strict=True)
            ]
            if all(rest == 0 and 0 <= q < size for q, rest, size in at):
                meetings.append((place, tap, tuple(q for q, _, _ in at)))
    blocks = p["batch_group_count"]
    return Pieces(
        x, w, (of_images, of_weights, of_result), shape, blocks * p["feature_group_count"], blocks > 1, meetings
    )


def convolved(x: Any, w: Any, conv: Convolution) -> np.ndarray:
    """The convolution by hand, in float64."""
    p = _pieces(x, w, conv)
    found = np.zeros(p.shape)
    for place, tap, at in p.meetings:
        for g in range(p.groups):
            columns, (rows, channels) = p.parts(g)
            found[(slice(None), *place, columns)] += p.x[(rows, *at, channels)] @ p.w[tap][:, columns]
    return np.transpose(found, np.argsort(p.orders[2]))


def gradients(x: Any, w: Any, cotangent: Any, conv: Convolution) -> tuple[np.ndarray, np.ndarray]:
    """Both gradients by hand, in float64."""
    p = _pieces(x, w, conv)
    of_x, of_w = np.zeros(p.x.shape), np.zeros(p.w.shape)
    cotangent = np.transpose(np.asarray(cotangent, np.float64), p.orders[2])
    for place, tap, at in p.meetings:
        for g in range(p.groups):
            columns, (rows, channels) = p.parts(g)
            given = cotangent[(slice(None), *place, columns)]
            of_x[(rows, *at, channels)] += given @ p.w[tap][:, columns].T
            of_w[tap][:, columns] += p.x[(rows, *at, channels)].T @ given
    return np.transpose(of_x, np.argsort(p.orders[0])), np.transpose(of_w, np.argsort(p.orders[1]))
