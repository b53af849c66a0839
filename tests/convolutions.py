"""Random convolutions as arguments of lax's, and their oracle by hand: XLA's own reads outside of some operands."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import jax
import numpy as np
import windows
from jax import lax

from cutjax.kernels.operand import Im2col


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


class _Parts(NamedTuple):
    """A convolution with channels last, as products of windows: one of all images, or each of a block of the batch.

    Attributes:
      x, w: images ``[blocks, n, *spatial, c]`` and weights ``[blocks, *window, c / groups, columns]``.
      view: the windows of a block's images.
      orders: the axes of images, weights and the result in lax's arrays.
      shape: of the result, with channels last.
    """

    x: np.ndarray
    w: np.ndarray
    view: Im2col
    orders: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    def of_blocks(self, y: Any) -> np.ndarray:
        """The rows ``[blocks, rows, columns]`` of an array of the result's shape."""
        y = np.transpose(np.asarray(y, np.float64), self.orders[2])
        return np.moveaxis(y.reshape(self.view.rows, len(self.x), self.w.shape[-1]), 1, 0)


def _parts(x: Any, w: Any, conv: Convolution) -> _Parts:
    eqn = equation(conv)
    p, (out,) = eqn.params, [y.aval for y in eqn.outvars]
    orders = tuple((n, *axes, c) for n, c, *axes in p["dimension_numbers"])
    o, i, *window = p["dimension_numbers"][1]
    orders = orders[0], (*window, i, o), orders[2]
    x, w = (np.transpose(np.asarray(y, np.float64), order) for y, order in zip((x, w), orders, strict=False))
    shape, blocks = tuple(out.shape[axis] for axis in orders[2]), p["batch_group_count"]
    x = x.reshape(blocks, len(x) // blocks, *x.shape[1:])
    w = np.moveaxis(w.reshape(*w.shape[:-1], blocks, -1), -2, 0)
    strides, dilation, spread = (p[name] for name in ("window_strides", "rhs_dilation", "lhs_dilation"))
    low, groups = tuple(low for low, _ in p["padding"]), p["feature_group_count"]
    sizes = x.shape[1], x.shape[2:-1], shape[1:-1], w.shape[1:-2]
    view = Im2col(*sizes, strides, dilation, spread, low, x.shape[-1] // groups, groups)
    return _Parts(x, w, view, orders, shape)


def convolved(x: Any, w: Any, conv: Convolution) -> np.ndarray:
    """The convolution by hand, in float64."""
    p = _parts(x, w, conv)
    blocks = [windows.forward(images, taps, p.view, taps.shape[-1]) for images, taps in zip(p.x, p.w, strict=True)]
    return np.transpose(np.concatenate(blocks, -1).reshape(p.shape), np.argsort(p.orders[2]))


def gradients(x: Any, w: Any, cotangent: Any, conv: Convolution) -> tuple[np.ndarray, np.ndarray]:
    """Both gradients by hand, in float64."""
    p = _parts(x, w, conv)
    of_x, of_w, view = [], [], p.view
    for images, taps, rows in zip(p.x, p.w, p.of_blocks(cotangent), strict=True):
        columns = taps.shape[-1]
        of_w.append(windows.weight_gradient(images, rows, view, columns).reshape(taps.shape))
        # Which element of the images one of a window is: numbered from 1, as 0 is outside.
        elements = windows.windows(1 + np.arange(images.size).reshape(images.shape), view).astype(int)
        by = windows.weights(taps, view, columns, None, "mn")
        given = np.einsum("rgj,tgcj->rtgc", rows.reshape(view.rows, view.groups, columns // view.groups), by)
        of_x.append(np.bincount(elements.ravel(), given.ravel(), images.size + 1)[1:].reshape(images.shape))
    of_x, of_w = np.concatenate(of_x), np.concatenate(of_w, -1)
    return np.transpose(of_x, np.argsort(p.orders[0])), np.transpose(of_w, np.argsort(p.orders[1]))
