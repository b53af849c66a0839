"""Each product under jit over a mesh, for each way to divide its operands: values, gradients, and what moves.

Operands are small integers, so that sums are exact in any order. The program that plain jnp makes of the same moves
about as much or more; a grouped product is compared with a dense one of each row's own matrix where jax has none that
is divided well.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import oracles
import pytest
from checks import integers
from jax import lax
from partitions import MESH, D, T, at_most, laid, moved

import cutjax

pytestmark = pytest.mark.versions

X, W, V, B = integers(0, (8, 16)), integers(1, (16, 32)), integers(2, (32, 16)), integers(3, (32,))
XS = integers(4, (4, 8, 16))
ROWS, G, DY = integers(5, (16, 16)), integers(6, (8, 16, 32)), integers(7, (16, 32))
IMAGES = integers(17, (8, 6, 16))
SIZES = jnp.array([3, 0, 4, 1, 2, 0, 1, 2], jnp.int32)  # three rows are of no group
TO, OF_GROUPS, SCALE = integers(8, (8, 16, 32)), integers(9, (8, 1, 32)), integers(10, (16, 1))


def square(x):
    """An activation that is exact in integers."""
    return jnp.square(jax.nn.relu(x))


def positions(acc, b, of=jnp.int32):
    """An epilogue with every position, an operand and reductions of each kind."""
    row, col = (lax.broadcasted_iota(of, acc.shape, acc.ndim - 2 + i) for i in range(2))
    y = (acc + b) * ((3 * row + col) % 5).astype(acc.dtype)
    return y, acc.sum(-2), y.max(-1), jnp.min(acc + b, (-2, -1))


def grouped_positions(acc, s, b):
    row = lax.broadcasted_iota(jnp.int32, acc.shape, 0)
    y = (acc + b) * s * (row % 3).astype(acc.dtype)
    return y, (acc * s).sum(0), y.max(1), acc.sum()


def _convolved(x, w, stride):
    return lax.conv_general_dilated(x, w, (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def _moments(acc, b):
    return square(acc + b), acc.sum((0, 1)), acc.sum(1), acc.sum(-1)


def _depthwise(x, w):
    padded = jnp.repeat(jnp.pad(x, ((0, 0), (1, 1), (0, 0))), w.shape[-1] // x.shape[-1], -1)
    return sum(padded[:, t : t + x.shape[1]] * w[t] for t in range(3))


def _causal(x, w):
    padded = jnp.pad(x, ((0, 0), (len(w) - 1, 0), (0, 0)))
    return sum(padded[:, t : t + x.shape[1]] * w[t] for t in range(len(w)))


class Case(NamedTuple):
    """A product: the function, plain jnp's, its operands, and in which ways they are divided."""

    fn: Callable[..., Any]
    plain: Callable[..., Any]
    args: tuple[jax.Array, ...]
    specs: tuple[tuple[tuple[Any, ...], ...], ...]
    results: tuple[tuple[Any, ...], ...] = ()  # of a single result, where it is asked for
    more: int = 0  # elements that may move more


DENSE = (
    ((D,), (None, T)),
    ((D, T), (T,)),
    ((D,), (D, T)),
    ((None, T), (None, T)),
    (((D, T),), ()),
    ((), (T, D)),
    ((D, T), (T, D)),
)
BATCHED = (((D,), (None, T)), ((D, T), ()), ((D, None, T), (T,)), ((None, (D, T)), ()))
CASES = {
    "gemm": Case(lambda x, w: cutjax.gemm(x, w), jnp.matmul, (X, W), DENSE),
    "gemm, scattered": Case(
        lambda x, w: cutjax.gemm(x, w), jnp.matmul, (X, W), (((D, T), (T,)),) * 3, (((D, T),), (D, T), (T, D))
    ),
    "gemm of a batch": Case(lambda x, w: cutjax.gemm(x, w), jnp.matmul, (XS, W), BATCHED),
    "gemm of two batches": Case(
        lambda x, w: cutjax.gemm(x, w, layout="nt"),
        lambda x, w: x @ w.mT,
        (XS, integers(11, (4, 32, 16))),
        (((D, T), (D,)), ((D, None, T), (D, None, T)), ((D,), (None, T))),
    ),
    "fused": Case(
        lambda x, w, b: cutjax.gemm(x, w, epilogue=positions, operands=(b,)),
        lambda x, w, b: positions(x @ w, b),
        (X, W, B),
        (((D,), (None, T), (T,)), ((D, T), (T,), ()), (((D, T),), (), ())),
    ),
    "fused batch": Case(
        lambda x, w, b: cutjax.gemm(x, w, epilogue=lambda acc, b: square(acc + b), operands=(b,)),
        lambda x, w, b: square(x @ w + b),
        (XS, W, B),
        (((D,), (None, T), (T,)), ((D, T), (), ())),
    ),
    "mlp": Case(
        lambda x, g, w, v: cutjax.mlp(x, w, v, gate=g, activation=jax.nn.relu),
        lambda x, g, w, v: (jax.nn.relu(x @ g) * (x @ w)) @ v,
        (XS, integers(16, W.shape), W, V),
        (((D,), (None, T), (None, T), (T,)), ((D, T), (), (), ()), ((D,), (D, T), (D, T), (T, D))),
    ),
    "syrk": Case(cutjax.syrk, lambda a: a @ a.mT, (ROWS,), (((D,),), ((None, T),), ((D, T),))),
    "syrk, transposed": Case(
        lambda a: cutjax.syrk(a, layout="t", epilogue=lambda acc: acc * 2 + 1),
        lambda a: a.mT @ a * 2 + 1,
        (ROWS,),
        (((T,),), ((None, D),)),
    ),
    "grouped_gemm": Case(
        lambda x, w: cutjax.grouped_gemm(x, w, SIZES),
        lambda x, w: lax.ragged_dot(x, w, SIZES),
        (ROWS, G),
        (
            ((D,), ()),
            ((), (T,)),
            ((), (None, None, T)),
            ((D, T), (None, T)),
            ((D,), (T,)),
            ((None, T), (D, T)),
            ((D,), (D,)),  # tokens and experts over the same devices
            ((D, T), (T,)),
        ),
    ),
    "grouped_gemm, fused": Case(
        lambda x, w, s, b: cutjax.grouped_gemm(x, w, SIZES, epilogue=grouped_positions, operands=(s, b)),
        lambda x, w, s, b: _by_rows(grouped_positions, x, w, s, b),
        (ROWS, G, SCALE, OF_GROUPS),
        (((D,), (T,), (D,), (T,)), ((), (None, None, T), (), (None, None, T)), ((D, T), (None, T), (), ())),
        more=2 * 7 * 8 * 32,  # the gradient of what groups have is a product of eight columns, of which one counts
    ),
    "grouped_outer": Case(
        lambda x, dy: cutjax.grouped_outer(x, dy, SIZES),
        lambda x, dy: oracles.masked_outer(x, dy, SIZES),
        (ROWS, DY),
        (((D,), (D,)), ((None, D), (None, T)), ((D, T), (D,))),
    ),
    "grouped_outer, scattered": Case(
        lambda x, dy: cutjax.grouped_outer(x, dy, SIZES),
        lambda x, dy: oracles.masked_outer(x, dy, SIZES),
        (ROWS, DY),
        (((D,), (D,)), ((D, T), (D,))),
        ((D,), (D, T)),
    ),
    "grouped_outer, accumulate": Case(
        lambda x, dy, to: cutjax.grouped_outer(x, dy, SIZES, accumulate=to),
        lambda x, dy, to: to + oracles.masked_outer(x, dy, SIZES),
        (ROWS, DY, TO),
        (((D,), (D,), (T,)), ((None, T), (), (None, T))),
    ),
    "einsum": Case(
        lambda q, k: cutjax.einsum("bqhd,bkhd->bhqk", q, k),
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        (integers(12, (4, 8, 4, 8)), integers(13, (4, 8, 4, 8))),
        (((D, None, T), (D, None, T)), ((D, T), (D,))),
    ),
    "einsum, heads": Case(
        lambda x, w, o: cutjax.einsum("bshk,hkd->bsd", cutjax.einsum("bsd,dhk->bshk", x, w), o),
        lambda x, w, o: jnp.einsum("bshk,hkd->bsd", jnp.einsum("bsd,dhk->bshk", x, w), o),
        (XS, integers(14, (16, 4, 8)), integers(15, (4, 8, 16))),
        (((D,), (None, T), (T,)), ((D, T), (), ())),
    ),
    "conv": Case(
        lambda x, w: cutjax.conv(x, w, window_strides=2),
        lambda x, w: _convolved(x, w, 2),
        (IMAGES, integers(18, (3, 16, 32))),
        (
            ((D,), (None, None, T)),
            (((D, T),), ()),
            ((D, None, T), (None, T)),
            ((None, None, T), (None, T, D)),
            ((D,), (None, D, T)),
        ),
    ),
    "conv, fused": Case(
        lambda x, w, b: cutjax.conv(x, w, epilogue=_moments, operands=(b,)),
        lambda x, w, b: _moments(_convolved(x, w, 1), b),
        (IMAGES, integers(19, (3, 16, 32)), B),
        (((D,), (None, None, T), (T,)), ((D, None, T), (None, T), ()), (((D, T),), (), ())),
    ),
    "conv, depthwise": Case(
        lambda x, w: cutjax.conv(x, w, feature_group_count=16),
        _depthwise,  # lax's own is wrong where images alone are divided, on CPUs
        (IMAGES, integers(20, (3, 1, 32))),
        (((D, None, T), (None, None, T)), ((D,), ()), ((None, None, (D, T)), (None, None, (D, T)))),
    ),
    "causal": Case(
        lambda x, w, b: cutjax.causal_conv1d(x, w, b, activation=square),
        lambda x, w, b: square(_causal(x, w) + b),
        (IMAGES, integers(21, (4, 16)), integers(22, (16,))),
        (
            ((D,), (), ()),
            ((D, None, T), (None, T), (T,)),
            ((None, None, (D, T)), (None, (D, T)), ()),
            (((D, T),), (), ()),
        ),
    ),
    "dot_general": Case(lambda x, w: cutjax.dot_general(x, w, (((2,), (0,)), ((), ()))), jnp.matmul, (XS, W), BATCHED),
}


def _by_rows(epilogue, x, w, s, b):
    at, has = oracles.rows(SIZES, x.shape[0])
    acc = jnp.where(has, jnp.einsum("mk,mkn->mn", x, w[at]), 0)
    y, total, most, everything = epilogue(acc, s, b[at, 0])
    return jnp.where(has, y, 0), total, jnp.where(has[:, 0], most, 0), everything


def _loss(fn, *args):
    """A sum whose gradients are small integers too, and lie as the results do; and the results."""
    outs = fn(*args)
    return sum((y * (lax.stop_gradient(y) % 3 - 1)).sum() for y in jax.tree.leaves(outs)), outs


SHARE = 2  # one in so many ways of each product, at least one; all, 1, after a change of how products are divided


def _ways():
    for name, case in CASES.items():
        ways = random.Random(name).sample(range(len(case.specs)), -(-len(case.specs) // SHARE))
        for i, specs in ((i, case.specs[i]) for i in sorted(ways)):
            yield pytest.param(case, specs, case.results[i : i + 1], id=f"{name} {specs}{case.results[i : i + 1]}")


@pytest.mark.parametrize(("case", "specs", "result"), [*_ways()])
def test_values_gradients_and_collectives(case, specs, result):
    args = laid(case.args, specs)
    wrt = tuple(range(len(args)))

    def program(fn):
        def run(*args):
            if result:
                return lax.with_sharding_constraint(fn(*args), jax.NamedSharding(MESH, jax.P(*result[0])))
            return jax.grad(functools.partial(_loss, fn), wrt, has_aux=True)(*args)

        return run

    compiled = jax.jit(program(case.fn)).lower(*args).compile()
    plain = jax.jit(program(case.plain)).lower(*args).compile()
    got, expected = compiled(*args), plain(*args)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert jnp.array_equal(jax.device_get(x), jax.device_get(y))
    ours, theirs = moved(compiled.as_text()), moved(plain.as_text())
    assert at_most(ours, theirs, case.more), (ours, theirs)
