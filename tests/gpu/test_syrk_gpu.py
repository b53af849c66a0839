"""Symmetric products on the device: random ones, bitwise symmetry, every config, transformations, graphs.

Small integers unless said otherwise: equal to numpy's product, bit for bit, or wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import syrk_problems as syrks
from syrk_problems import F32, H

import cutjax
from benchmarks import oracle

pytestmark = pytest.mark.gpu

CALL = "@cutjax_launch"
COUNT = int(os.environ.get("CUTJAX_TEST_SYRK", "150"))
ITEMS = [syrks.generate(index) for index in range(COUNT)]
# Plain ones: what an epilogue does to rounded sums is what it does to whole numbers.
GAUSSIAN = [syrks.generate(index, name="plain") for index in range(10_000, 10_000 + 40)]


def check(out: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    assert out.dtype == expected.dtype
    assert np.array_equal(out, expected), f"{what}: {problems.mismatch(out, expected)}"


def check_symmetric(out: np.ndarray, what: object = "") -> None:
    assert np.array_equal(out, np.swapaxes(out, -1, -2)), f"{what}: {problems.mismatch(out, np.swapaxes(out, -1, -2))}"


def rounded(item: syrks.Random, *args: np.ndarray) -> list[np.ndarray]:
    """f32 holds these sums exactly; numpy then rounds to nearest even, as the kernel must."""
    return [x.astype(dtype) for x, dtype in zip(item.expected(*args), item.dtypes, strict=True)]


def _prepare(item):
    args = item.integers()
    return item.compiled(item.config), args, rounded(item, *args)


prefetch = problems.prefetching(ITEMS, _prepare)


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_exact(item, prefetch):
    """Results land in donated NaN."""
    executable, args, expected = prefetch.get(item)
    for out, ref in zip(item.run(executable, *args), expected, strict=True):
        check(out, ref, item.config)
        check_symmetric(out, item.config)


def test_what_is_drawn():
    """Every problem has kernels, and every schedule and cluster shape is pinned."""
    pinned = {item.config for item in ITEMS if item.config is not None}
    assert all(cutjax.candidates(item.problem) for item in ITEMS)
    assert {config.schedule for config in pinned} == {"coop", "pingpong"}
    assert {(config.cluster_m, config.cluster_n) for config in pinned} == {(1, 1), (2, 1), (1, 2)}


def _prepare_gaussian(item):
    a = item.gaussian()
    return item.compiled(item.config), a, item.expected(a, dtype=np.dtype(np.float64))[0]


prefetch_gaussian = problems.prefetching(GAUSSIAN, _prepare_gaussian)


@pytest.mark.parametrize("item", GAUSSIAN, ids=str)
def test_gaussian(item, prefetch_gaussian):
    """The diagonal apart: its sums are k on average, and the matrix unit truncates each addition to them.

    Of k = 2100 that is 4e-6 of the sum at most: 131 additions that each lose half of 2^-23 of what is there so far.
    """
    executable, a, expected = prefetch_gaussian.get(item)
    (out,) = item.run(executable, a)
    check_symmetric(out, item.config)
    diagonal = np.eye(item.m, dtype=bool)
    error = oracle.compare(np.where(diagonal, 0, out).astype(out.dtype), np.where(diagonal, 0, expected), item.k)
    problems.note_worst(f"syrk norm, {out.dtype}", error.relative / error.tolerance)
    problems.note_worst(f"syrk element, {out.dtype}", error.worst)
    assert error.ok, f"{item.config}: {error}"
    ours, right = (np.diagonal(x, axis1=-2, axis2=-1).astype(np.float64) for x in (out, expected))
    worst = float(np.max(np.abs(ours - right) / right)) / (oracle._HALF_ULP[out.dtype.name] + 1e-5)
    problems.note_worst(f"syrk diagonal, {out.dtype}", worst)
    assert worst <= 1, f"{item.config}: the diagonal is off by {worst:.3g} of what is allowed"


# Every config, on problems where every CTA of the largest tiles walks two tiles or more.
ALL = [
    syrks.Random("plain", 776, 136, batch=(16,)),
    syrks.Random("sum", 776, 136, "t", problems._INPUTS[1], F32, (16,)),
]
EVERY = [(item, config) for item in ALL for config in problems._by_name(item.problem)]


def _config_name(value):
    item, config = value
    return f"{item.name}-{config.name(item.problem)}"


@functools.cache
def _inputs(item):
    args = item.integers()
    return jax.device_put(args), rounded(item, *args)


prefetch_configs = problems.prefetching(EVERY, lambda value: value[0].compiled(value[1]))


@pytest.mark.parametrize("value", EVERY, ids=_config_name)
def test_every_config(value, prefetch_configs):
    item, config = value
    args, expected = _inputs(item)
    (out,) = item.run(prefetch_configs.get(value), *args)
    check(out, expected[0], config)


# What JAX makes of it.

FEW = [
    syrks.Random("two results", 264, 72, "n", H, F32),
    syrks.Random("plain", 1032, 520, "t", H, H),
    syrks.Random("plain", 200, 1024, "n", problems._INPUTS[1], F32, (5,)),
]


@pytest.mark.parametrize("item", FEW, ids=str)
def test_poison_is_the_result(item, gpus):
    """The array of NaN really is the memory the kernel writes: else unwritten elements would not be seen."""
    poison = jax.device_put(item.poison())
    addresses = [x.unsafe_buffer_pointer() for x in poison]
    outs = jax.tree.leaves(item.compiled(None)(poison, *jax.device_put(item.integers())))
    assert [x.unsafe_buffer_pointer() for x in outs] == addresses
    assert all(x.is_deleted() for x in poison)


@pytest.mark.parametrize("item", FEW, ids=str)
def test_the_same_bits_every_time(item, gpus):
    executable, args = item.compiled(None), jax.device_put((item.gaussian(), *item.integers()[1:]))
    first = item.run(executable, *args)
    for _ in range(10):
        for x, y in zip(item.run(executable, *args), first, strict=True):
            assert np.array_equal(x, y)


@pytest.mark.parametrize("row", [0, 63, 64, 127, 199, 263])
def test_one_nan_reaches_one_row_and_one_column(row, gpus):
    item = syrks.Random("plain", 264, 72)
    (a,) = item.integers()
    (expected,) = rounded(item, a)
    a[row, 3] = np.nan
    (out,) = item.run(_executable(item), a)
    there = np.zeros(out.shape, bool)
    there[row], there[:, row] = True, True
    assert np.isnan(out[there].astype(F32)).all()
    check(out[~there], expected[~there])


@functools.cache
def _executable(item):
    return item.compiled(None)


def ints(seed: int, *shape: int, dtype=H) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32), dtype)


@pytest.mark.parametrize("layout", ["n", "t"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_jit_eager_and_gradient(layout, batch):
    """The gradient is one kernel, of g + g^T, and all of it is exact."""
    item = syrks.Random("plain", 200, 136, layout, batch=batch)
    function = item.syrk()
    a, g = jnp.asarray(item.integers()[0]), ints(1, *batch, 200, 200)
    (expected,) = rounded(item, np.asarray(a))
    check(np.asarray(jax.jit(function)(a)), expected)
    check(np.asarray(function(a)), expected)
    pull = jax.jit(lambda a, g: jax.vjp(function, a)[1](g)[0])
    assert pull.lower(a, g).as_text().count(CALL) == 1
    x, y = np.asarray(a, np.float32), np.asarray(g, np.float32)
    y = y + np.swapaxes(y, -1, -2)
    check(np.asarray(pull(a, g)), (y @ x if layout == "n" else x @ y).astype(H))


@pytest.mark.parametrize("save", ["default", "recompute"])
@pytest.mark.parametrize("name", ["sum", "of a matrix", "nonlinear"])
def test_derivatives_as_xla(name, save):
    """Values, gradients in a and operands, and forward mode, with the same program on XLA's products."""
    item = syrks.Random("plain" if name == "nonlinear" else name, 136, 72, batch=(3,))
    fn = (lambda acc: jnp.tanh(acc / 16)) if name == "nonlinear" else syrks.EPILOGUES[name][0]
    _, *operands = item.integers()
    args = [jnp.asarray(item.gaussian()), *map(jnp.asarray, operands)]
    weights = ints(3, 3, 136, 136, dtype=np.float32)  # not symmetric

    def all_of_them(backend):
        def f(a, *operands):
            def epilogue(*args):
                return fn(*(x.astype(jnp.float32) for x in args))

            return cutjax.syrk(a, epilogue=epilogue, operands=operands, save=save, backend=backend)

        def loss(*args):
            return (f(*args).astype(jnp.float32) * weights).sum()

        def run(*args):
            return f(*args), jax.grad(loss, tuple(range(len(args))))(*args), jax.jvp(f, args, args)[1]

        return jax.jit(run)(*args)

    for ours, theirs in zip(*(jax.tree.leaves(all_of_them(x)) for x in ("cuda", "xla")), strict=True):
        x, y = (np.asarray(v, np.float64) for v in (ours, theirs))
        # Both are rounded to bfloat16, here and there of sums that differ in order: an ulp, of few. A gradient of g
        # alone, not of g + g^T, is off by 0.5 and more.
        share = np.linalg.norm(x - y) / np.linalg.norm(y)
        problems.note_worst(f"syrk derivative as XLA's, {name}", share / 4e-3)
        assert share <= 4e-3


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap(axis):
    """One kernel, and where operands alone are mapped one product."""
    item = syrks.Random("sum", 200, 136, batch=(3,))
    a, s, x = item.integers()
    (expected,) = rounded(item, a, s, x)
    function = item.syrk()
    mapped = jax.jit(jax.vmap(function, (axis, None, 0)))
    args = (jnp.moveaxis(jnp.asarray(a), 0, axis), s, x)
    assert mapped.lower(*args).as_text().count(CALL) == 1
    check(np.asarray(mapped(*args)), expected)
    shared = jax.jit(jax.vmap(function, (None, None, 0)))
    assert shared.lower(a[0], s, x).as_text().count(CALL) == 1
    (expected,) = rounded(item, np.broadcast_to(a[:1], a.shape), s, x)
    check(np.asarray(shared(a[0], s, x)), expected)


@pytest.mark.parametrize("options", [{}, {"xla_gpu_graph_min_graph_size": 1}], ids=["default", "graph"])
def test_graph_replay(options):
    """A run of launches as a CUDA graph: its replays read each call's buffers."""
    item = syrks.Random("sum", 264, 264)

    def iterate(a, s, x):
        for _ in range(5):
            a = jnp.clip(item.syrk()(a, s, x), -2, 2)
        return a

    function = jax.jit(iterate, compiler_options=options if jax.default_backend() == "gpu" else {})
    kept = []
    for i in range(20):
        a, s, x = dataclasses.replace(item, seed=i).integers()
        expected = a
        for _ in range(5):
            expected = np.clip(rounded(item, expected, s, x)[0].astype(F32), -2, 2).astype(H)
        kept.append((function(a, s, x), expected))  # alive: the next call gets other memory
    for out, expected in kept:
        check(np.asarray(out), expected)


@pytest.mark.parametrize("shape", [(0, 72), (64, 0), (0, 0), (3, 0, 8), (3, 64, 0)], ids=str)
def test_zero_sizes(shape):
    out = cutjax.syrk(jnp.ones(shape, H))
    check(np.asarray(out), np.zeros((*shape[:-1], shape[-2]), H))


def test_rows_that_are_copied_to_padded_ones():
    a = ints(1, 64, 100)  # rows of 200 bytes
    x = np.asarray(a, np.float32)
    check(np.asarray(cutjax.syrk(a, backend="cuda")), (x @ x.T.copy()).astype(H))


def test_no_kernel():
    a = ints(1, 64, 96).astype(np.float32)
    check(np.asarray(cutjax.syrk(a)), np.asarray(a, np.float32) @ np.asarray(a, np.float32).T.copy())
    with pytest.raises(NotImplementedError, match="f32 x f32"):
        cutjax.syrk(a, backend="cuda")
