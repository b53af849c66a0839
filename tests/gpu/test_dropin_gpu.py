"""The drop-ins on random contractions: values and gradients, on small integers and on Gaussian data."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from contractions import equation, random_contraction

import cutjax
from benchmarks import oracle

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 3, 8, 16, 24, 40, 64, 72, 129, 136, 200)
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Contraction:
    """An einsum of two arrays that is one dot_general, its result permuted."""

    index: int
    spec: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, shape)) for shape in (self.lhs, self.rhs))
        return f"{self.index}-{self.spec}-{shapes}-{self.dtype}"

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        left, right, _ = re.split(",|->", self.spec)
        return dict(zip(left + right, self.lhs + self.rhs, strict=True))

    @functools.cached_property
    def depth(self) -> int:
        return math.prod(size for letter, size in self.sizes.items() if letter not in self.spec.split("->")[1])


def _drawn(index: int) -> Contraction:
    """Contraction number ``index`` that is large enough for a tile and small enough for numpy."""
    rng = np.random.default_rng([problems.SEED, index, 12])
    while True:
        lhs, rhs, dims = random_contraction(rng, SIZES, rank=4)
        rank = len(lhs) + len(rhs) - 2 * len(dims[0][0]) - len(dims[1][0])
        permutation = [int(i) for i in rng.permutation(rank)] if rng.random() < 0.5 else range(rank)
        spec = equation(lhs, rhs, dims, tuple(permutation))
        item = Contraction(index, spec, lhs, rhs, np.dtype(str(rng.choice(DTYPES))))
        out = math.prod(item.sizes[c] for c in spec.split("->")[1])
        if 1 << 16 < math.prod(item.sizes.values()) < 1 << 27 and max(out, math.prod(lhs), math.prod(rhs)) < 1 << 21:
            return item


def _compiled(item: Contraction):
    """Value and gradients in one program; kernels run all products of 16-bit operands."""

    def both(x, y, g):
        fn = functools.partial(cutjax.einsum, item.spec, precision="highest" if item.dtype == np.float32 else None)
        value, pull = jax.vjp(fn, x, y)
        return value, *pull(g)

    out = tuple(item.sizes[c] for c in item.spec.split("->")[1])
    avals = [jax.ShapeDtypeStruct(shape, item.dtype) for shape in (item.lhs, item.rhs, out)]
    with cutjax.use_backend("auto" if item.dtype == np.float32 else "cuda"):
        return jax.jit(both).lower(*avals).compile()


def _expected(item: Contraction, x, y, g, dtype):
    left, right, out = re.split(",|->", item.spec)
    x, y, g = (v.astype(dtype) for v in (x, y, g))
    specs = (f"{left},{right}->{out}", x, y), (f"{out},{right}->{left}", g, y), (f"{left},{out}->{right}", x, g)
    return [np.einsum(*args, optimize=True) for args in specs]


def _operands(item: Contraction, draw):
    rng = np.random.default_rng(item.index)
    out = tuple(item.sizes[c] for c in item.spec.split("->")[1])
    return [draw(rng, shape).astype(item.dtype) for shape in (item.lhs, item.rhs, out)]


def _prepare_exact(item: Contraction):
    args = _operands(item, lambda rng, shape: rng.integers(-2, 3, shape, np.int8))
    expected = [x.astype(item.dtype) for x in _expected(item, *args, np.float32)]  # sums that f32 holds, rounded once
    return _compiled(item), args, expected


def _prepare_gaussian(item: Contraction):
    args = _operands(item, lambda rng, shape: rng.standard_normal(shape, np.float32))
    return _compiled(item), args, _expected(item, *args, np.float64)


EXACT = [_drawn(index) for index in range(48)]
GAUSSIAN = [_drawn(index) for index in range(1000, 1016)]
exact = problems.prefetching(EXACT, _prepare_exact)
gaussian = problems.prefetching(GAUSSIAN, _prepare_gaussian)


@pytest.mark.parametrize("item", EXACT, ids=str)
def test_exact(item, exact):
    executable, args, expected = exact.get(item)
    found = executable(*jax.device_put(args))
    for name, got, want in zip(("value", "left", "right"), map(np.asarray, found), expected, strict=True):
        assert got.dtype == want.dtype
        assert np.array_equal(got, want), f"{name}: {problems.mismatch(got, want)}"


@pytest.mark.parametrize("item", GAUSSIAN, ids=str)
def test_gaussian(item, gaussian):
    executable, args, expected = gaussian.get(item)
    found = executable(*jax.device_put(args))
    depths = item.depth, *(math.prod(item.sizes.values()) // math.prod(shape) for shape in (item.lhs, item.rhs))
    for name, got, want, depth in zip(("value", "left", "right"), found, expected, depths, strict=True):
        error = oracle.compare(np.asarray(got), want, depth)
        assert error.ok, f"{name}: {error}"


def test_attention_moves_no_data(gpus):
    """Both products of attention, and their gradients, read and write heads where they lie."""
    q, k = (jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16) for _ in range(2))

    def scores(q, k, g):
        value, pull = jax.vjp(functools.partial(cutjax.einsum, "bqhd,bkhd->bhqk"), q, k)
        return value, *pull(g)

    g = jax.ShapeDtypeStruct((2, 4, 256, 256), jnp.bfloat16)
    with cutjax.use_backend("cuda"):
        text = jax.jit(scores).lower(q, k, g).compile().as_text()
    assert text.count('custom_call_target="cutjax_launch"') == 3
    assert not re.search(r"= \S+ (copy|transpose|fusion)\(", text), text
