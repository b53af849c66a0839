"""Transpositions around products under cutjax.fuse: which a kernel takes in, and what it then computes."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cutjax
from cutjax.fusion.build import NAME
from cutjax.fusion.jaxprs import bodies, opened

BF16 = jnp.bfloat16


def runs(fn, *args):
    return [report.runs for report in cutjax.explain(cutjax.fuse(fn), platform="cuda")(*args).fusion]


def transpositions(fn, *args):
    """Returns how many a program has outside of our products' calls."""

    def count(jaxpr):
        eqns = [eqn for eqn in opened(jaxpr).eqns if eqn.params.get("name") != NAME]
        return sum(eqn.primitive.name == "transpose" or sum(map(count, bodies(eqn))) for eqn in eqns)

    return count(jax.make_jaxpr(fn)(*args))


def ints(seed, shape):
    return jax.device_put(np.random.default_rng(seed).integers(-2, 3, shape).astype(BF16))


def draw(seed):
    """A dot_general of transposed operands, its result transposed too."""
    chance = random.Random(seed)
    counts = [chance.choice((0, 1, 2)), chance.choice((1, 2)), chance.choice((1, 2)), chance.choice((1, 2))]
    batch, left, right, contracted = ([chance.choice((2, 3, 5, 8)) for _ in range(count)] for count in counts)

    def operand(free):
        """Its shape, the permutation of it, and where the contracted axes and those of the batch are afterwards."""
        sizes = [*contracted, *batch, *free]
        places = chance.sample(range(len(sizes)), len(sizes))  # of each axis, in what dot_general reads
        shape = [0] * len(sizes)
        for size, place in zip(sizes, places, strict=True):
            shape[place] = size
        order = chance.sample(range(len(sizes)), len(sizes))
        stored = [0] * len(sizes)
        for axis, place in enumerate(order):
            stored[place] = shape[axis]
        return stored, order, places[: len(contracted)], places[len(contracted) : len(contracted) + len(batch)]

    x, x_order, lc, lb = operand(left)
    y, y_order, rc, rb = operand(right)
    rank = len(batch) + len(left) + len(right)
    permutation = chance.sample(range(rank), rank)

    def fn(x, y):
        d = lax.dot_general(lax.transpose(x, x_order), lax.transpose(y, y_order), ((lc, rc), (lb, rb)))
        return lax.transpose(d, permutation)

    return fn, ints(seed, x), ints(seed + 1000, y)


@pytest.mark.parametrize("seed", range(12))  # after a change of what moves: 500
def test_random_transpositions(seed, kernels_win):
    """Small integers: any order of summation gives the same."""
    fn, x, y = draw(seed)

    @jax.jit
    def program(x, y):
        expected, pull = jax.vjp(fn, x, y)
        found, fused_pull = jax.vjp(cutjax.fuse(fn), x, y)
        return (found, *fused_pull(expected)), (expected, *pull(expected))

    assert all(itertools.starmap(np.array_equal, zip(*program(x, y), strict=True)))  # of shapes too


def test_most_random_products_become_kernels(kernels_win):
    """But for those of which an operand would be copied, or rows would be walked as a batch."""
    drawn = [draw(seed) for seed in range(24)]
    assert sum(runs(*each) == ["kernel"] for each in drawn) >= 9


def test_rows_that_a_kernel_would_walk_as_a_batch(kernels_win):
    """Grouped queries: what reads the scores is best served by an order of memory that XLA chooses."""
    q, k = jnp.ones((2, 64, 2, 3, 32), BF16), jnp.ones((2, 64, 2, 32), BF16)
    assert runs(lambda q, k: jnp.einsum("btkqd,bskd->bkqts", q, k), q, k) == ["XLA"]
    assert runs(lambda q, k: jnp.einsum("btkd,bskd->bkts", q[:, :, :, 0], k), q, k) == ["kernel"]


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def test_attention_of_odd_lengths_moves_nothing():
    """Of the six products of a pass and its backward pass, those that XLA copies for are kernels."""
    args = [jax.ShapeDtypeStruct((64, 197, 12, 64), BF16)] * 4

    def both(cotangent, *args):
        out, pull = jax.vjp(attention, *args)
        return out, pull(cotangent)

    assert sorted(runs(both, *args)) == ["XLA"] * 2 + ["kernel"] * 4
    assert transpositions(cutjax.fuse(both), *args) < transpositions(both, *args)


def test_the_transposition_of_a_result_is_computed_by_its_kernel(kernels_win):
    def fn(x, w):
        return lax.transpose(jnp.einsum("bmk,bkn->bmn", x, w), (1, 0, 2))

    args = ints(0, (3, 16, 24)), ints(1, (3, 24, 8))
    assert (transpositions(fn, *args), transpositions(cutjax.fuse(fn), *args)) == (1, 0)


def test_what_else_reads_a_transposed_array_still_does(kernels_win):
    def fn(x, w):
        y = lax.transpose(x, (1, 0, 2))
        d = jnp.einsum("bmk,bkn->bmn", y, w)
        return lax.transpose(d, (1, 0, 2)), d + 1, y

    args = ints(0, (16, 3, 24)), ints(1, (3, 24, 8))
    for found, expected in zip(jax.jit(cutjax.fuse(fn))(*args), jax.jit(fn)(*args), strict=True):
        assert np.array_equal(found, expected)


def test_a_transposition_that_would_make_a_batch_stays(kernels_win):
    """Rows of one product are not taken apart into a batch of small ones."""

    def fn(x, w):
        return jnp.einsum("qbk,kn->qbn", lax.transpose(x, (1, 0, 2)), w).transpose(0, 2, 1)

    x, w = jax.ShapeDtypeStruct((8, 128, 64), BF16), jax.ShapeDtypeStruct((64, 512), BF16)
    assert transpositions(cutjax.fuse(fn), x, w) == 2
