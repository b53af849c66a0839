"""Arrays in an order of memory of their own: random ones, and the products of attention. Exact, or within tolerance."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import cutjax
from benchmarks import oracle
from cutjax.kernels.families import in_order
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import call, multiply

pytestmark = pytest.mark.gpu

H = np.dtype(jnp.bfloat16)
LAYOUTS = ("nn", "nt", "tn", "tt")
CUDA = {"precision": None, "backend": "cuda"}


# Random problems: every layout, dtype and way to batch, each array in an order of its own.


def _drawn(index: int) -> problems.Random:
    """Random problem number ``index`` that has batch axes, of which some array lies in an order of its own."""
    rng = np.random.default_rng([problems.SEED, index, 71])
    while True:
        item = problems.generate(int(rng.integers(1 << 30)))
        p = item.problem
        if not p.batch or 0 in p.batch:
            continue
        rank = len(p.batch)
        p = in_order(p, [(*(int(axis) for axis in rng.permutation(rank + 1)), rank + 1) for _ in range(3)])
        if p.strided and len(p.batch_groups) <= 3:
            return problems.Random(index, p, True, item.pinned)


def _in_memory(x: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """The array with its axes as they lie in memory."""
    return np.ascontiguousarray(x.transpose(order or range(x.ndim)))


def _compiled(problem: cutjax.Problem, config: cutjax.Config | None) -> jax.stages.Compiled:
    """As problems.compiled, of arrays as they lie in memory; so is the one whose memory the result takes."""
    orders = [order or tuple(range(len(problem.batch) + 2)) for order in problem.orders]
    of_a, of_b, of_d = orders

    @functools.partial(jax.jit, donate_argnums=2, keep_unused=True)
    def gemm(a, b, poison):
        a, b = a.transpose(np.argsort(of_a)), b.transpose(np.argsort(of_b))
        product = Dense(problem.layout, problem.orders)
        return multiply(product, a, b, out_dtype=problem.out_dtype, config=config, **CUDA).transpose(of_d)

    dtypes = (problem.a.dtype, problem.bs[0].dtype, problem.out_dtype)
    avals = [
        jax.ShapeDtypeStruct([shape[axis] for axis in order], dtype)
        for shape, order, dtype in zip(problem.shapes, orders, dtypes, strict=True)
    ]
    return gemm.lower(*avals).compile()


def _run(executable, item, a, b) -> np.ndarray:
    """The result in the order of its own axes; what the kernel did not write is NaN."""
    of_a, of_b, of_d = item.problem.orders
    poison = _in_memory(problems.poison(item.problem), of_d)
    out = np.asarray(executable(*jax.device_put((_in_memory(a, of_a), _in_memory(b, of_b), poison))))
    return out.transpose(np.argsort(of_d)) if of_d else out


ITEMS = [_drawn(index) for index in range(30_000, 30_000 + 160)]
GAUSSIAN = [_drawn(index) for index in range(31_000, 31_000 + 24)]


def _prepare(item):
    a, b = problems.integers(item)
    expected = problems.reference(a, b, item.problem.layout, np.float32).astype(item.problem.out_dtype)
    return _compiled(item.problem, item.config), a, b, expected


prefetch = problems.prefetching(ITEMS, _prepare)


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_exact(item, prefetch):
    executable, a, b, expected = prefetch.get(item)
    out = _run(executable, item, a, b)
    assert out.dtype == expected.dtype
    what = f"{item.config} {item.problem.orders}"
    assert np.array_equal(out, expected), f"{what}: {problems.mismatch(out, expected)}"


def _prepare_gaussian(item):
    a, b = problems.gaussian(item)
    return _compiled(item.problem, item.config), a, b, problems.reference(a, b, item.problem.layout, np.float64)


prefetch_gaussian = problems.prefetching(GAUSSIAN, _prepare_gaussian)


@pytest.mark.parametrize("item", GAUSSIAN, ids=str)
def test_gaussian(item, prefetch_gaussian):
    executable, a, b, expected = prefetch_gaussian.get(item)
    error = oracle.compare(_run(executable, item, a, b), expected, item.problem.k)
    assert error.ok, f"{item.config} {item.problem.orders}: {error}"


def test_most_of_what_is_drawn_stores_by_strides():
    """And walks operands so, in every layout and kind of config."""
    for which in range(3):
        assert sum(bool(item.problem.orders[which]) for item in ITEMS) > len(ITEMS) // 4
    for layout in LAYOUTS:
        configs = [item.config for item in ITEMS if item.problem.layout == layout and item.config]
        assert {config.schedule for config in configs} == {"coop", "pingpong"}
    assert {config.swap for item in ITEMS if (config := item.config)} == {False, True}


# The products of attention, where batch axes lie between rows and columns.

HEADS = (0, 2, 1, 3)
GROUPED = (0, 2, 3, 1, 4)  # [b, q, kv, g, d] as [b, kv, g, q, d], and [b, k, kv, 1, d] alike
SIZES = [(2, 136, 200, 3, 64), (3, 129, 257, 5, 72), (1, 1, 500, 4, 128), (4, 512, 512, 8, 128), (2, 65, 33, 2, 33)]


def _order(axes):
    """How axes lie in memory once they are transposed by those."""
    return tuple(int(axis) for axis in np.argsort(axes))


def scores(q, k):
    """bqhd, bkhd -> bhqk."""
    product = Dense("nt", (HEADS, HEADS, ()))
    return multiply(product, q.transpose(HEADS), k.transpose(HEADS), out_dtype=q.dtype, **CUDA)


def mixed(p, v):
    """bhqk, bkhd -> bqhd."""
    product = Dense("nn", ((), HEADS, HEADS))
    return multiply(product, p, v.transpose(HEADS), out_dtype=p.dtype, **CUDA).transpose(HEADS)


def grouped(q, k):
    """bqngd, bknd -> bngqk: heads in groups that share a key."""
    product = Dense("nt", (_order(GROUPED), _order(GROUPED), ()))
    return multiply(product, q.transpose(GROUPED), k[:, :, :, None].transpose(GROUPED), out_dtype=q.dtype, **CUDA)


def tokens(q, k):
    """sbd, tbd -> bst: one batch axis between rows and columns."""
    product = Dense("nt", ((1, 0, 2), (1, 0, 2), ()))
    return multiply(product, q.swapaxes(0, 1), k.swapaxes(0, 1), out_dtype=q.dtype, **CUDA)


def _forms(b, s, t, h, d):
    return {
        "scores": (scores, "bqhd,bkhd->bhqk", (b, s, h, d), (b, t, h, d)),
        "mixed": (mixed, "bhqk,bkhd->bqhd", (b, h, s, t), (b, t, h, d)),
        "grouped": (grouped, "bqngd,bknd->bngqk", (b, s, h, 2, d), (b, t, h, d)),
        "tokens": (tokens, "sbd,tbd->bst", (s, b, d), (t, b, d)),
    }


FORMS = [
    pytest.param(*form, id=f"{name}-{'x'.join(map(str, sizes))}")
    for sizes in SIZES
    for name, form in _forms(*sizes).items()
]


def _integers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape, np.int8).astype(H)


def _einsum(spec: str, *arrays: np.ndarray, dtype=np.float32) -> np.ndarray:
    return np.einsum(spec, *(x.astype(dtype) for x in arrays), optimize=True)


@pytest.mark.parametrize(("fn", "spec", "left", "right"), FORMS)
def test_attention_with_gradients(fn, spec, left, right):
    """Small integers: sums of at most 1024 of up to 4 are exact in float32, and rounded once."""
    x, y = _integers(1, left), _integers(2, right)
    first, second, out = re.split(",|->", spec)
    g = _integers(3, _einsum(spec, x, y).shape)

    def both(x, y, g):
        value, pull = jax.vjp(fn, x, y)
        return value, *pull(g)

    executable = jax.jit(both).lower(x, y, g).compile()
    found = executable(*jax.device_put((x, y, g)))
    expected = _einsum(spec, x, y), _einsum(f"{out},{second}->{first}", g, y), _einsum(f"{first},{out}->{second}", x, g)
    for name, got, want in zip(("value", "left", "right"), found, expected, strict=True):
        got, want = np.asarray(got), want.astype(H)
        assert np.array_equal(got, want), f"{name}: {problems.mismatch(got, want)}"


@pytest.mark.parametrize("name", ["scores", "mixed", "grouped", "tokens"])
def test_nothing_is_copied(name):
    """Transposes are of no data: beside kernels the program has none, and no copies."""
    fn, _, left, right = _forms(2, 128, 256, 4, 64)[name]
    x, y = (jax.ShapeDtypeStruct(shape, H) for shape in (left, right))
    text = jax.jit(fn).lower(x, y).compile().as_text()
    assert text.count('custom_call_target="cutjax_launch"') == 1
    assert not re.search(r"= \S+ (copy|transpose|fusion)\(", text), text


@pytest.mark.parametrize("fn", [scores, mixed])
def test_attention_of_gaussian_data(fn):
    _, spec, left, right = _forms(2, 300, 520, 6, 128)[fn.__name__]
    rng = np.random.default_rng(7)
    x, y = (rng.standard_normal(shape, np.float32).astype(H) for shape in (left, right))
    depth = 128 if fn is scores else 520
    error = oracle.compare(np.asarray(jax.jit(fn)(x, y)), _einsum(spec, x, y, dtype=np.float64), depth)
    assert error.ok, error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_an_epilogue(layout):
    """A bias of columns, a scale of each row, and a sum of rows beside the result."""
    p = cutjax.Problem.of(136, 200, 72, layout, batch=(2, 3), a_batch=(2, 3), b_batch=(2, 3))
    a, b = (_integers(i, shape) for i, shape in enumerate(p.shapes[:2]))
    bias = np.random.default_rng(5).integers(-8, 9, 200).astype(np.float32)
    scale = np.exp2(np.random.default_rng(6).integers(-1, 2, (136, 1))).astype(np.float32)

    def fn(a, b, bias, scale):
        product = Dense(layout, (HEADS,) * 3)
        epilogue = lambda acc, bias, scale: (jnp.maximum(acc * scale + bias, 0), acc.sum(-1))  # noqa: E731
        return call(product, epilogue, Factors(a, [b]), (bias, scale), out_dtype=H, **CUDA)

    lying = jax.jit(lambda a, b, *more: fn(a.transpose(HEADS), b.transpose(HEADS), *more))
    got, sums = lying(_in_memory(a, HEADS), _in_memory(b, HEADS), bias, scale)
    acc = problems.reference(a, b, layout, np.float32)
    assert np.array_equal(np.asarray(got), np.maximum(acc * scale + bias, 0).astype(H))
    assert np.array_equal(np.asarray(sums), acc.sum(-1))


def test_not_a_number_stays_in_its_head():
    """Heads are neighbours in memory, so what is read past the end of a row would show; so would what is written."""
    q, k = _integers(1, (2, 65, 3, 72)), _integers(2, (2, 33, 3, 72))
    q[1, :, 1], k[0, :, 2] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        expected = _einsum("bqhd,bkhd->bhqk", q, k).astype(H)
    problem = cutjax.Problem.of(65, 33, 72, "nt", batch=(2, 3), a_batch=(2, 3), b_batch=(2, 3))
    problem = in_order(problem, (HEADS, HEADS, ()))
    for config in problems._by_name(problem)[:: max(1, len(cutjax.candidates(problem)) // 6)]:
        item = dataclasses.replace(ITEMS[0], problem=problem)
        out = _run(_compiled(problem, config), item, q.transpose(HEADS), k.transpose(HEADS))
        assert np.array_equal(out, expected, equal_nan=True), config
