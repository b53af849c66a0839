"""Random products over a mesh: the values of jnp's, and no more is moved, forward and in gradients."""

from __future__ import annotations

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers
from jax import lax
from partitions import MESH, D, T, laid, moved

import cutjax

DRAWS = 3  # of each seed; 30 were drawn after the last change
# Of gradients: XLA makes one of jnp's two equal gathers, forward and backward, and divides by what lies further away.
SLACK = 2


def drawn(draw: random.Random):
    """Shapes, how they lie, and the layout, of two operands of any rank."""
    batch = draw.choice([(), (), (8,), (8,), (2, 8)])
    shared = draw.choice([(), (), batch])
    m, k, n = (draw.choice([8, 16, 64, 256]) for _ in range(3))
    layout = draw.choice(["nn", "nt", "tn"])
    shapes = (*batch, *((m, k) if layout[0] == "n" else (k, m))), (*shared, *((k, n) if layout[1] == "n" else (n, k)))
    return layout, shapes, [spec(draw, shape) for shape in shapes]


def spec(draw: random.Random, shape: tuple[int, ...]):
    found, used = [], set()
    for size in shape:
        over = draw.choice([(), (), (D,), (T,), (D, T)])
        if used & {*over} or size % math.prod(MESH.shape[axis] for axis in over):
            over = ()
        used |= {*over}
        found.append(over or None)
    return tuple(found)


def loss(f):
    def of(x, w):
        y = f(x, w)
        return (y * (lax.stop_gradient(y) % 3 - 1)).sum()

    return of


def check(layout, shapes, specs):
    args = laid([integers(i, shape) for i, shape in enumerate(shapes)], specs)

    def plain(x, w):
        return jnp.matmul(x if layout[0] == "n" else x.mT, w if layout[1] == "n" else w.mT)

    def ours(x, w):
        return cutjax.gemm(x, w, layout=layout)

    for gradient in (False, True):
        programs = [jax.jit(jax.grad(loss(f), (0, 1)) if gradient else f).lower(*args).compile() for f in (ours, plain)]
        got, expected = (jax.device_get(program(*args)) for program in programs)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        here, there = (moved(program.as_text()) for program in programs)
        most = sum(there.values()) * (SLACK if gradient else 1)
        assert sum(here.values()) <= most, (layout, shapes, specs, gradient, here, there)


@pytest.mark.parametrize("seed", range(2))
def test_moves_no_more_than_jnp(seed):
    draw = random.Random(seed)
    for _ in range(DRAWS):
        check(*drawn(draw))


@pytest.mark.parametrize(
    ("shapes", "specs"),
    [
        (((4, 8, 64), (64, 1024)), ((None, None, T), ())),  # rows are less than sums, and the weights lie whole
        (((8, 8, 64), (8, 64, 256)), ((D, T), ((D, T),))),  # rows move from one division to the other
        (((2, 8, 64, 256), (256, 256)), ((None, None, None, (D, T)), (D,))),  # of k they agree in one axis
    ],
    ids=str,
)
def test_where_operands_disagree(shapes, specs):
    check("nn", shapes, specs)
