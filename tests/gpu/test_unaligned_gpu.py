"""Sizes of no alignment on the device: every layout, dtype and operation, from a single element up, and NaN next door.

Small integers unless said otherwise: equal to numpy's product, bit for bit, or wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import grouped_problems as grouped
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import syrk_problems as syrks

import cutjax
from benchmarks import oracle

pytestmark = pytest.mark.gpu

H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
LAYOUTS = ("nn", "nt", "tn", "tt")
SIZES = (1, 2, 3, 7, 33, 1001, 50257)
_PRODUCTS, _ELEMENTS = 1 << 30, 1 << 22


def _drawn(layout: str, batched: bool, count: int, first: int) -> list[problems.Random]:
    """Random ones of all triples of sizes that are small enough; in every other, n is one that needs no care."""
    rng = np.random.default_rng([problems.SEED, first, 61])
    found = []
    triples = [(m, n, k) for m, n, k in itertools.product(SIZES, SIZES, SIZES) if m * n * k <= _PRODUCTS]
    while len(found) < count:
        m, n, k = triples[rng.integers(len(triples))]
        n = n if len(found) % 2 else -(-n // 8) * 8
        batch, a_batch, b_batch = problems._batches(rng) if batched else ((), (), ())
        if np.prod(batch, dtype=int) * max(m * n, m * k, n * k, m * n * k >> 8) > _ELEMENTS:
            continue
        dtype = problems._INPUTS[rng.integers(2)]
        out_dtype = (dtype, dtype, F32, *problems._INPUTS)[rng.integers(5)]
        problem = cutjax.Problem.of(m, n, k, layout, dtype, dtype, out_dtype, batch, a_batch, b_batch)
        pinned = float(rng.random()) if rng.random() < 0.75 else None
        found.append(problems.Random(first + len(found), problem, True, pinned))
    return found


ITEMS = [x for i, layout in enumerate(LAYOUTS) for x in _drawn(layout, False, 28, 20_000 + 100 * i)]
ITEMS += [x for i, layout in enumerate(LAYOUTS) for x in _drawn(layout, True, 10, 21_000 + 100 * i)]
GAUSSIAN = [x for i, layout in enumerate(LAYOUTS) for x in _drawn(layout, i == 0, 8, 22_000 + 100 * i)]


def check(out: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    assert out.dtype == expected.dtype
    assert np.array_equal(out, expected, equal_nan=True), f"{what}: {problems.mismatch(out, expected)}"


def _prepare(item):
    a, b = problems.integers(item)
    # f32 holds these sums exactly; numpy then rounds to nearest even, as the kernel must.
    expected = problems.reference(a, b, item.problem.layout, np.float32).astype(item.problem.out_dtype)
    return problems.compiled(item.problem, item.config, "cuda"), a, b, expected


prefetch = problems.prefetching(ITEMS, _prepare)


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_exact(item, prefetch):
    executable, a, b, expected = prefetch.get(item)
    check(np.asarray(executable(*jax.device_put((a, b, problems.poison(item.problem))))), expected, item.config)


def _prepare_gaussian(item):
    a, b = problems.gaussian(item)
    executable = problems.compiled(item.problem, item.config, "cuda")
    return executable, a, b, problems.reference(a, b, item.problem.layout, np.float64)


prefetch_gaussian = problems.prefetching(GAUSSIAN, _prepare_gaussian)


@pytest.mark.parametrize("item", GAUSSIAN, ids=str)
def test_gaussian(item, prefetch_gaussian):
    executable, a, b, expected = prefetch_gaussian.get(item)
    out = np.asarray(executable(*jax.device_put((a, b, problems.poison(item.problem)))))
    error = oracle.compare(out, expected, item.problem.k)
    assert error.ok, f"{item.config}: {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), [(66, 72, 3), (130, 136, 33), (129, 131, 65), (7, 8, 1001)], ids=str)
def test_not_a_number_stays_in_its_row_and_column(layout, m, n, k):
    """Rows are neighbours in memory, so what is read past the end of one, or of the last, would show."""
    problem = cutjax.Problem.of(m, n, k, layout)
    item = problems.Random(k, problem, True, None)
    a, b = problems.integers(item)
    rows, columns = (a if layout[0] == "n" else a.T), (b if layout[1] == "t" else b.T)
    rows[m // 2], columns[n // 3] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        expected = problems.reference(a, b, layout, np.float32).astype(H)
    for config in problems._by_name(problem)[:: max(1, len(cutjax.candidates(problem)) // 4)]:
        executable = problems.compiled(problem, config, "cuda")
        check(np.asarray(executable(*jax.device_put((a, b, problems.poison(problem))))), expected, config)


def _dyadic(rng, *shape):
    return (rng.integers(-2, 3, shape) * 0.25).astype(H)


def _operands(layout, m, n, k):
    rng = np.random.default_rng([problems.SEED, m, n, k])
    a = _dyadic(rng, *((m, k) if layout[0] == "n" else (k, m)))
    return rng, a, _dyadic(rng, *((k, n) if layout[1] == "n" else (n, k)))


SHAPES = [(130, 72, 33), (129, 131, 65), (7, 1001, 3), (1, 1, 1), (65, 50257, 7)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
def test_bias_and_gelu(layout, m, n, k):
    rng, a, b = _operands(layout, m, n, k)
    bias = rng.standard_normal(n, np.float32)

    def fused(acc, bias):
        return jax.nn.gelu(acc + bias)

    f = functools.partial(cutjax.gemm, layout=layout, epilogue=fused, backend="cuda", out_dtype=H)
    out = np.asarray(jax.jit(lambda a, b, bias: f(a, b, operands=(bias,)))(a, b, bias)).astype(np.float64)
    x = problems.reference(a, b, layout, np.float32) + bias
    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(jax.nn.gelu(x)).astype(np.float64)
    # Half a unit in the last place, and the fast form's error, which is relative to the argument: docs/accuracy.md.
    worst = np.abs(out - expected) / (2.0**-8 * np.abs(expected) + 2.0**-10 * np.abs(x) + 1e-30)
    assert worst.max() <= 1.01, np.unravel_index(worst.argmax(), worst.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
def test_residual_and_two_results(layout, m, n, k):
    rng, a, b = _operands(layout, m, n, k)
    residual, row = _dyadic(rng, m, n), _dyadic(rng, m, 1)

    def fused(acc, residual, row):
        return acc + residual.astype(jnp.float32), (acc * row.astype(jnp.float32)).astype(H)

    f = functools.partial(cutjax.gemm, layout=layout, epilogue=fused, backend="cuda", out_dtype=(F32, H))
    outs = jax.jit(lambda a, b, *xs: f(a, b, operands=xs))(a, b, residual, row)
    acc = problems.reference(a, b, layout, np.float32)
    check(np.asarray(outs[0]), acc + residual.astype(np.float32))
    check(np.asarray(outs[1]), (acc * row.astype(np.float32)).astype(H))


def test_a_reduction_beside_the_result(gpus):
    _rng, a, b = _operands("nt", 130, 136, 33)

    def fused(acc):
        return acc.astype(H), acc.sum(0)

    f = functools.partial(cutjax.gemm, layout="nt", epilogue=fused, out_dtype=(H, F32), backend="cuda")
    out, total = jax.jit(f)(a, b)
    acc = problems.reference(a, b, "nt", np.float32)
    check(np.asarray(out), acc.astype(H))
    check(np.asarray(total), acc.sum(0))


def _odd(index: int) -> grouped.Random:
    """A random grouped product whose contracted axis, or m, is odd; n too in every other."""
    item = grouped.generate(30_000 + index)
    p = item.problem
    fields = {"n": p.n - (index // 3 % 2) * (1 + index % 7)}
    fields |= {"m": p.m - 1 - index % 5} if p.divided == "k" else {"k": p.k - 1 - index % 5}
    return dataclasses.replace(item, problem=dataclasses.replace(p, **fields))


GROUPED = [_odd(index) for index in range(36)]


def _prepare_grouped(item):
    p, sizes = item.problem, grouped.all_sizes(item, 0)
    a, b = grouped.integers(p, item.index)
    expected = grouped.reference(p, a, b, sizes, np.float32).astype(p.out_dtype)
    return grouped.compiled(p, item.config, "cuda"), grouped.with_nan(p, a, b, sizes), sizes, expected


prefetch_grouped = problems.prefetching(GROUPED, _prepare_grouped)


@pytest.mark.parametrize("item", GROUPED, ids=str)
def test_grouped(item, prefetch_grouped):
    executable, (a, b), sizes, expected = prefetch_grouped.get(item)
    out = np.asarray(executable(*jax.device_put((a, b, sizes, grouped.poison(item.problem)))))
    check(out, expected, f"{item.config}, sizes {sizes.tolist()}"[:600])


SYMMETRIC = [
    dataclasses.replace(syrks.generate(31_000 + i), layout="n", k=(1, 3, 33, 65, 1001)[i % 5]) for i in range(14)
]


def _prepare_symmetric(item):
    args = item.integers()
    expected = [x.astype(dtype) for x, dtype in zip(item.expected(*args), item.dtypes, strict=True)]
    return item.compiled(item.config), args, expected


prefetch_symmetric = problems.prefetching(SYMMETRIC, _prepare_symmetric)


@pytest.mark.parametrize("item", SYMMETRIC, ids=str)
def test_symmetric_of_an_odd_k(item, prefetch_symmetric):
    executable, args, expected = prefetch_symmetric.get(item)
    for out, ref in zip(item.run(executable, *args), expected, strict=True):
        check(out, ref, item.config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [72, 257])
def test_gradients(layout, n):
    """Forwards and backwards with an odd k, and an odd vocabulary; cotangents are small integers too."""
    m, k = 66, 33
    rng, a, b = _operands(layout, m, n, k)
    g = rng.integers(-2, 3, (m, n)).astype(H)
    f = functools.partial(cutjax.gemm, layout=layout, backend="cuda")
    out, (da, db) = jax.jit(lambda a, b, g: (lambda y, back: (y, back(g)))(*jax.vjp(f, a, b)))(a, b, g)
    x, y, z = (v.astype(np.float32) for v in (a, b, g))
    check(np.asarray(out), problems.reference(a, b, layout, np.float32).astype(H))
    rows, columns = z @ (y.T if layout[1] == "n" else y), (x.T if layout[0] == "n" else x) @ z
    check(np.asarray(da), (rows if layout[0] == "n" else rows.T).astype(H))
    check(np.asarray(db), (columns if layout[1] == "n" else columns.T).astype(H))


def test_decode_in_a_loop(gpus):
    """A weight that does not change beside a token that does: copies and launches in a while loop, every time right."""
    _, x, w = _operands("nt", 3, 33, 33)
    f = functools.partial(cutjax.gemm, layout="nt", backend="cuda")

    @jax.jit
    def loop(x, w):
        return jax.lax.fori_loop(0, 5, lambda i, x: jnp.clip(f(x, w), -1, 1), x)

    expected = x.astype(np.float32)
    for _ in range(5):
        expected = np.clip(problems.reference(expected, w, "nt", np.float32).astype(H).astype(np.float32), -1, 1)
    check(np.asarray(loop(x, w)), expected.astype(H))
