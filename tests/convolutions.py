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


def drawn(seed: int) -> Convolution:
    """A convolution of one to three axes that lax takes: in any layout, of groups, spread, with padding of any sign."""
    for attempt in itertools.count():
        found = _drawn(random.Random(1000 * seed + attempt))
        try:
            equation(found)
        except ValueError:  # lax refuses to leave out more than there is
            continue
        return found
    raise AssertionError


def _drawn(r: random.Random) -> Convolution:
    d = r.choice((1, 1, 2, 2, 3))
    axes, small = "DHW"[-d:], d == 3
    kind = r.choice(("plain", "plain", "groups", "depthwise", "batch"))
    groups = 1 if kind == "plain" else r.choice((2, 3))
    channels, n = (1 if kind == "depthwise" else r.randint(1, 3)), r.randint(1, 3)
    spread = [r.choice((1, 1, 1, 2, 3)) for _ in axes]
    padding = r.choice(("SAME", "VALID", "SAME_LOWER", None, None))
    if padding is None or set(spread) != {1}:
        padding = [(r.randint(-2, 4), r.randint(-2, 4)) for _ in axes]
    sizes = {axis: r.randint(1, 4 if small else 9) for axis in axes}
    sizes |= {"N": n * (groups if kind == "batch" else 1), "C": channels * (1 if kind == "batch" else groups)}
    window = {axis: r.randint(1, 3 if small else 4) for axis in axes} | {"I": channels, "O": groups * r.randint(1, 3)}
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


def convolved(x: Any, w: Any, conv: Convolution) -> np.ndarray:
    """The convolution by hand, in float64."""
    eqn = equation(conv)
    p, (out,) = eqn.params, [y.aval for y in eqn.outvars]
    (n, c, *image), (o, i, *window), (rows, columns, *grid) = p["dimension_numbers"]
    x = np.transpose(np.asarray(x, np.float64), (n, *image, c))
    w = np.transpose(np.asarray(w, np.float64), (*window, i, o))
    blocks, groups = p["batch_group_count"], p["feature_group_count"]
    width, per = w.shape[-2], w.shape[-1] // (blocks * groups)
    found = np.zeros((out.shape[rows], *(out.shape[axis] for axis in grid), w.shape[-1]))
    steps = list(
        zip(p["window_strides"], p["rhs_dilation"], p["lhs_dilation"], p["padding"], x.shape[1:], strict=False)
    )
    for place in itertools.product(*map(range, found.shape[1:-1])):
        for tap in itertools.product(*map(range, w.shape[:-2])):
            at = [
                (*divmod(stride * q + dilation * t - low, spread), size)
                for q, t, (stride, dilation, spread, (low, _), size) in zip(place, tap, steps, strict=True)
            ]
            if any(rest or not 0 <= q < size for q, rest, size in at):
                continue
            pixels = x[(slice(None), *(q for q, _, _ in at))]
            for g in range(blocks * groups):
                of = np.split(pixels, blocks)[g] if blocks > 1 else pixels[:, g * width : (g + 1) * width]
                columns_of = slice(g * per, (g + 1) * per)
                found[(slice(None), *place, columns_of)] += of @ w[tap][:, columns_of]
    return np.transpose(found, np.argsort((rows, *grid, columns)))
