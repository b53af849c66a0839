"""Prices from columns of configs: those of the kernels resolved one by one, of every kind of problem."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from windows import asked, view

import cutjax
from cutjax.epilogue.expression import identity
from cutjax.epilogue.trace import trace
from cutjax.kernels import families
from cutjax.kernels.columns import each, where
from cutjax.kernels.device import reference
from cutjax.kernels.operand import Operand, Scale
from cutjax.kernels.prices import one_by_one
from cutjax.kernels.sm90 import cost, family, kernel
from cutjax.kernels.sm90.facts import facts_of, kind_of

BF16, F8, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32))


def fused(function, products, *shapes):
    def make(m, n, k):
        accs = [jax.ShapeDtypeStruct((m, n), F32)] * products
        kinds = {"bias": ((n,), F32), "residual": ((m, n), BF16), "matrix": ((m, n), F32)}
        epilogue = trace(function, accs, [np.zeros(*kinds[x]) for x in shapes]).epilogue.primal
        return cutjax.Problem.of(m, n, k, epilogue=epilogue)

    return make


def dense(layout="nn", dtype: Any = BF16, out: Any = None, **more):
    return lambda m, n, k: cutjax.Problem.of(m, n, k, layout, dtype, dtype, out or dtype, **more)


def weights(b, a=None):
    return lambda m, n, k: cutjax.Problem(m, n, k, a or Operand(BF16), (b,), epilogue=identity(BF16, F32))


def symmetric(n, _, k):
    return cutjax.Problem(n, n, k, Operand(BF16), (Operand(BF16),), symmetric=True)


def images(kind, **more):
    def make(m, n, k):
        of = view(2, (m % 40 + 9, k % 33 + 9), (3, 3), 16 + k % 64 // 8 * 8, low=(1, 1), high=(1, 1), **more)
        return asked(of, n // 8 * 8 + 8, kind)

    return make


KINDS = {
    "nn": dense(),
    "tn": dense("tn"),
    "batch": dense("nt", batch=(3, 4), a_batch=(3, 4), b_batch=(1, 4)),
    "strided": dense(batch=(3, 4), a_batch=(3, 4), b_batch=(3, 4), orders=((0, 2, 1, 3), (), ())),
    "groups of rows": dense(groups=8, ragged="m"),
    "groups of k": dense("tn", groups=5, ragged="k"),
    "symmetric": symmetric,
    "float32 in terms": dense(dtype=F32, math="tf32x3"),
    "complex numbers": dense(dtype="complex64", math="tf32"),
    "integers": dense(dtype="int8", out="int32"),
    "float8": dense("nt", F8, BF16),
    "float8 in blocks": weights(Operand(F8, "k", scale=Scale(F32, 128, 128)), Operand(F8, scale=Scale(F32, 1, 128))),
    "decoded": weights(Operand(np.dtype(np.int8), "mn")),
    "4 bits": weights(Operand(np.dtype(jnp.int4), "mn", scale=Scale(BF16, 1, 64))),
    "4 bits beside float8": weights(
        Operand(np.dtype(jnp.int4), "mn", scale=Scale(F32, 1, 128)), Operand(F8, scale=Scale(F32, 1, 128))
    ),
    "bias and residual": fused(lambda a, b, r: jax.nn.gelu(a + b).astype(BF16) + r, 1, "bias", "residual"),
    "gate": fused(lambda g, u: (jax.nn.silu(g) * u).astype(BF16), 2),
    "two results": fused(lambda a, r: (a.astype(BF16), a * r), 1, "matrix"),
    "reduction": fused(lambda a: (a.astype(BF16), jnp.sum(a * a, -1)), 1),
    "called": fused(lambda a, r: jnp.sin(jnp.cos(a) + r).astype(BF16), 1, "matrix"),
    "images": images("in order"),
    "gradient of weights": images("weights"),
    "phases": images("flipped", spread=(2, 2)),
    "channels in groups": images("in order", groups=4),
}


def problems(kind, count=3):
    """Problems of a kind: tokens, odd sizes, and such as divide k."""
    draw = random.Random(kind)
    for m, n, k in ((draw.randint(1, 64), 1536, 4096), (1000, 328, 1032), (draw.randint(65, 4096), 512, 8192))[:count]:
        multiple = 128 if kind in ("4 bits", "4 bits beside float8", "float8 in blocks") else 1
        yield KINDS[kind](m, -(-n // multiple) * multiple, -(-k // multiple) * multiple)


@pytest.mark.parametrize("kind", KINDS)
def test_prices_are_those_of_kernels_one_by_one(kind):
    served = 0
    for problem in problems(kind):
        if family.reasons(problem):
            continue
        found, expected = family.prices(problem), one_by_one(problem, family.configs(problem), family.resolve)
        assert [found.config(i) for i in range(len(found.us))] == expected.rows()
        np.testing.assert_allclose(found.us, expected.us, rtol=1e-12)
        kernels = [kernel.resolved(problem, config) for config in expected.rows()]
        ranked = np.array([cost.times(x, problem.device)[1:] for x in kernels]).reshape(-1, 2)
        np.testing.assert_allclose(found.ranked_us, family._least_l2(*ranked.T), rtol=1e-12)
        served += len(found.us)
        if len(found.us):
            fastest = families.fastest(problem, unmeasured=True)
            assert fastest is not None
            least = int(np.argmin(found.ranked_us))
            if families.offers(problem)[0].problem is problem and len(families.offers(problem)) == 1:
                assert fastest[1:] == (expected.us[least], len(expected.us))
                assert fastest[0].config == expected.config(least)
    assert served


def test_long_kernels_are_ranked_by_bytes_through_l2_where_they_are_near():
    us, l2_us = np.array([200.0, 201.0, 201.9, 203.0, 199.5]), np.array([90.0, 60.0, 70.0, 10.0, 100.0])
    ranked = family._least_l2(us, l2_us)
    assert ranked.argmin() == 1
    assert ranked[2:4].tolist() == [201.9, 203.0]  # more than 1% slower
    np.testing.assert_array_equal(family._least_l2(us / 4, l2_us), us / 4)


@pytest.mark.parametrize("sizes", [(1 << 27, 1 << 16, 64), (1 << 28, 64, 64), (1 << 30, 1 << 30, 64)])
def test_prices_of_sizes_that_counters_hardly_hold(sizes):
    problem = cutjax.Problem.of(*sizes)
    found, expected = family.prices(problem), one_by_one(problem, family.configs(problem), family.resolve)
    assert [found.config(i) for i in range(len(found.us))] == expected.rows()
    np.testing.assert_allclose(found.us, expected.us, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_facts_without_an_epilogue_are_those_of_the_bare_problem(kind):
    for problem in problems(kind):
        for swap in (False, True):
            facts = facts_of(problem, swap)
            if facts.reasons or problem.a.dtype == np.complex64:  # whose results are no sums of its own
                continue
            found, expected = facts.bare, facts_of(problem.bare, swap)
            for field in dataclasses.fields(found):
                if field.name != "reasons":
                    assert getattr(found, field.name) == getattr(expected, field.name), field.name


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_served_as_its_problems_are(kind):
    for problem in problems(kind):
        for swap in (False, True):
            found, expected = facts_of(kind_of(problem), swap), facts_of(problem, swap)
            assert (found.reasons, found.way) == (expected.reasons, expected.way)


def test_problems_of_a_kind_share_a_table():
    kinds = [kind_of(cutjax.Problem.of(m, 4096, k)) for m, k in ((128, 64), (4096, 8192))]
    assert kinds[0] is kinds[1]
    assert kind_of(cutjax.Problem.of(128, 4104, 64)) is not kinds[0]  # rows of other units
    (windows,) = problems("images", 1)
    assert kind_of(windows) == windows
    tables = [family._shipped(cutjax.Problem.of(m, 4096, k))[0][1].table for m, k in ((1024, 2048), (4096, 8192))]
    assert tables[0] is tables[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_the_first_is_near(kind):
    for problem in problems(kind):
        if not family.reasons(problem):
            prices = family.prices(problem)
            near = prices.near_us < np.inf
            np.testing.assert_array_equal(prices.near_us[near], prices.ranked_us[near])
            assert np.all(prices.ranked_us[~near] > prices.near_us.min(initial=np.inf))


def test_a_config_of_narrow_operands_is_offered_once():
    problem = KINDS["decoded"](16, 4096, 4096)
    narrow, wide = families.offers(problem)
    assert (narrow.converted, [x.name for x in wide.converted]) == ((), ["b"])
    assert not {*narrow.prices.rows()} & {*wide.prices.rows()}
    (alone,) = families.offers(wide.problem)
    kept = [i for i, row in enumerate(alone.prices.rows()) if row in {*wide.prices.rows()}]
    assert [wide.prices.config(i) for i in range(len(kept))] == [alone.prices.config(i) for i in kept]
    assert np.all(wide.prices.us > alone.prices.us[kept])  # of a conversion before


def test_prices_read_the_device():
    problem = cutjax.Problem.of(4096, 4096, 4096)
    shared = problem.on(reference("sm_90a").beside_transfers())
    for asked_of in (problem, shared):
        found, expected = family.prices(asked_of), one_by_one(asked_of, family.configs(asked_of), family.resolve)
        np.testing.assert_allclose(found.us, expected.us, rtol=1e-12)
    assert min(family.prices(problem).us) < min(family.prices(shared).us)


def test_each_calls_a_function_once_for_equal_rows():
    calls = []

    def product(x, y):
        calls.append((x, y))
        return x * y

    found = each(product, np.array([3, 2, 3, 2]), np.array([5, 7, 5, 9]))
    assert found.tolist() == [15, 14, 15, 18]
    assert len(calls) == 3
    assert each(product, 3, 4) == 12
    assert where(True, 1, 2) == 1
    assert where(np.array([True, False]), 1, 2).tolist() == [1, 2]
