"""Fused epilogues of grouped GEMMs on the device: operands of groups, rows and columns, gated pairs, gradients.

Small integers unless said otherwise: equal to a loop over the groups by numpy, bit for bit, or wrong.
"""

from __future__ import annotations

import dataclasses

import grouped_problems as grouped
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from grouped_epilogues import EPILOGUES, Fused

import cutjax

pytestmark = pytest.mark.gpu

BACKEND = "cuda"
CALL = "@cutjax_launch"
H = np.dtype(jnp.bfloat16)
PINNED = (None, 0.0, 0.4, 0.7, 0.99)
ITEMS = [Fused(name, layout, pinned=pinned) for name in EPILOGUES for layout in ("nn", "nt") for pinned in PINNED]
ITEMS += [Fused(name, "nn", (2,), pinned, m=1250) for name in EPILOGUES for pinned in PINNED[::2]]


def check(item: Fused, got: list[np.ndarray], what: object = "") -> None:
    for out, expected in zip(got, item.expected, strict=True):
        assert out.dtype == expected.dtype
        assert np.array_equal(out, expected), f"{what}: {problems.mismatch(out, expected)}"


def _prepare(item: Fused):
    config = item.config
    assert item.expected is not None  # made here, in a thread
    return item.compiled(config, BACKEND), config


@pytest.fixture(scope="module")
def prefetch(gpus):
    prefetch = problems.Prefetch(ITEMS, _prepare)
    yield prefetch
    prefetch.close()


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_exact(item, prefetch):
    """Results land in donated NaN; rows of no group, and all that is of empty groups, are NaN."""
    executable, config = prefetch.get(item)
    check(item, item.run(executable), config)


@pytest.mark.parametrize("name", ["every operand", "gated with biases"])
def test_every_config(name, gpus):
    item = Fused(name, "nt")
    configs = problems._by_name(item.problem)
    prefetch = problems.Prefetch(configs, lambda config: item.compiled(config, BACKEND))
    for config in configs:
        check(item, item.run(prefetch.get(config)), config)
    prefetch.close()


def test_nan_of_a_group_stays_in_it(gpus):
    item = Fused("gated with biases")
    x, ws, sizes, (a, b, s) = item.arrays
    function = jax.jit(item.gemm(backend=BACKEND))
    for group in np.flatnonzero(sizes)[::7]:
        start, end = grouped.spans(sizes, item.m)[group]
        keep = np.ones(item.m, bool)
        keep[start:end] = False
        for name in ("rows", "weights", "bias", "scale"):
            x_bad, w_bad, a_bad, s_bad = (value.copy() for value in (x, ws[1], a, s))
            if name in ("rows", "scale"):
                (x_bad if name == "rows" else s_bad)[start:end] = np.nan
            else:
                (w_bad if name == "weights" else a_bad)[group] = np.nan
            out = np.asarray(function(x_bad, (ws[0], w_bad), sizes, (a_bad, b, s_bad)))
            assert np.array_equal(out[keep], item.expected[0][keep]), name
            assert np.isnan(out[~keep]).all(), name


def test_the_same_kernel_with_other_sizes(gpus):
    item = Fused("every operand")
    executable = item.compiled(None, BACKEND)
    rng = np.random.default_rng(5)
    for kind in grouped.KINDS:
        other = dataclasses.replace(item)
        other.__dict__["sizes"] = grouped.draw_sizes(rng, kind, item.m, item.groups)
        out = np.asarray(executable(*jax.device_put((*other.arrays, other.poison()))))
        assert np.array_equal(out, other.expected[0]), f"{kind}: {problems.mismatch(out, other.expected[0])}"


def test_one_kernel_and_nothing_beside_it():
    item = Fused("gated with biases")
    text = jax.jit(item.gemm(backend=BACKEND)).lower(*item.arrays).as_text()
    assert text.count(CALL) == 1
    assert "stablehlo.gather" not in text  # a bias is read by the kernel, never spread over the rows


def test_the_same_bits_every_time(gpus):
    item = Fused("two results", "nt", (2,), m=1250)
    function = jax.jit(item.gemm(backend=BACKEND))
    first = [np.asarray(x) for x in function(*item.arrays)]
    for _ in range(10):
        for out, again in zip(first, function(*item.arrays), strict=True):
            assert np.array_equal(out, again)


def plain(fn, x, ws, sizes, operands, kinds, layout="nn"):
    """In plain JAX and f32, a matrix for each row: few rows only."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(x.shape[0])
    group = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), len(sizes) - 1)
    axes = "mk,mkn->mn" if layout == "nn" else "mk,mnk->mn"
    accs = [jnp.einsum(axes, x, w[group], precision="highest") for w in ws]
    seen = [value[group][:, 0] if "g" in kind else value for value, kind in zip(operands, kinds, strict=True)]
    return jnp.where((rows < ends[-1])[:, None], fn(*accs, *seen), 0)


SMALL_SIZES = np.array([40, 0, 130, 1, 64, 50], np.int32)


def small(products: int, kinds: tuple[str, ...], layout="nn", m=300, n=136, k=72, g=6):
    """Gaussian arrays in bf16, products of unit variance, and a cotangent."""
    rng = np.random.default_rng(3)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), H)

    shapes = {"gn": (g, 1, n), "g1": (g, 1, 1), "m1": (m, 1), "mn": (m, n), "n": (n,)}
    ws = tuple(draw(g, *((k, n) if layout == "nn" else (n, k))) * H.type(k**-0.5) for _ in range(products))
    return (draw(m, k), ws, tuple(draw(*shapes[kind]) for kind in kinds)), draw(m, n)


LAYERS = {
    "gelu": (lambda acc, b: jax.nn.gelu(acc + b), 1, ("gn",)),
    "gated silu": (lambda g, u, a, b, s: jax.nn.silu(g + a) * (u + b) * s, 2, ("gn", "gn", "m1")),
    "residual": (lambda acc, t, r: jax.nn.relu(acc) * t + r, 1, ("g1", "mn")),
}


@pytest.mark.parametrize("save", ["default", "recompute"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name, layout, save):
    epilogue, products, kinds = LAYERS[name]
    (x, ws, operands), g = small(products, kinds, layout)

    def fused(x, ws, operands):
        def fn(*args):  # in f32, as the reference
            return epilogue(*(value.astype(jnp.float32) for value in args))

        more = {"layout": layout, "save": save, "backend": BACKEND, "out_dtype": H}
        sizes = jnp.asarray(SMALL_SIZES)
        return cutjax.grouped_gemm(x, ws if products > 1 else ws[0], sizes, epilogue=fn, operands=operands, **more)

    def expected(x, ws, operands):
        return plain(epilogue, x, ws, jnp.asarray(SMALL_SIZES), operands, kinds, layout)

    wide = jax.tree.map(lambda v: v.astype(jnp.float32), ((x, ws, operands), g))
    out, pull = jax.vjp(jax.jit(fused), x, ws, operands)
    ref, pull_ref = jax.vjp(jax.jit(expected), *wide[0])
    got, wanted = jax.tree.leaves((out, pull(g))), jax.tree.leaves((ref, pull_ref(wide[1])))
    for value, right in zip(got, wanted, strict=True):
        value, right = np.asarray(value, np.float64), np.asarray(right, np.float64)
        error = np.linalg.norm(value - right) / np.linalg.norm(right)
        problems.note_worst("gradient of a grouped layer", float(error) / 6e-3)
        assert error <= 6e-3, error


def test_vmap_of_a_fused_product():
    """Over x, the sizes and an operand: one kernel."""
    item = Fused("gated with biases", "nn", (2,), m=1250)
    x, ws, sizes, (a, b, s) = item.arrays
    one = Fused("gated with biases").gemm(backend=BACKEND)
    function = jax.jit(jax.vmap(lambda x, sizes, s: one(x, ws, sizes, (a[0], b[0], s))))
    assert function.lower(x, sizes, s).as_text().count(CALL) == 1
    check(item, [np.asarray(function(x, sizes, s))])


def test_group_offset_with_an_epilogue():
    item = Fused("group bias")
    x, (w,), sizes, (b,) = item.arrays
    first, count = 7, 11

    @jax.jit
    def function(x, w, b, sizes, offset):
        def bias(acc, b):
            return acc + b.astype(acc.dtype)

        return cutjax.grouped_gemm(x, w, sizes, epilogue=bias, operands=(b,), group_offset=offset, backend=BACKEND)

    out = np.asarray(function(x, w[first : first + count], b[first : first + count], sizes, first))
    spans = grouped.spans(sizes, item.m)[first : first + count]
    inside = np.zeros((item.m, 1), bool)
    inside[spans[0][0] : spans[-1][1]] = True
    assert np.array_equal(out, np.where(inside, item.expected[0].astype(np.float32), 0).astype(H))
