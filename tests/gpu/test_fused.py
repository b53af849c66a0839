"""Fused epilogues on the device: random ones against XLA's, every operand and result, and what kernels refuse.

The products are of small multiples of powers of two, so that the accumulators are exact in any order of summation:
both sides apply the epilogue to the same numbers, and differ by what its functions may.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import strategies
from hypothesis import HealthCheck, Phase, given, settings

import cutjax

pytestmark = pytest.mark.gpu

COUNT, GRADIENTS = 520, 100
# Values between operations keep the roundings that the epilogue asks for, as in a kernel.
EXACT_CASTS: dict[str, Any] = {"xla_allow_excess_precision": False, "xla_gpu_autotune_level": 0}
LAYOUTS = ("nn", "nt", "tn", "tt")
H = jnp.bfloat16

# How far a function may be from the right result, relative to it: some units in the last place of f32. Ahead of a
# rounding to 16 bits, the fast form: docs/accuracy.md.
F32 = 2.0**-21
FAST = {"bfloat16": 2.0**-10, "float16": 2.0**-13}
# Sums inside that cancel are as exact as their terms, so the error is relative to the argument.
CANCELLING = ("gelu", "gelu_tanh", "silu")
EXACT = ("abs", "neg", "relu", "max", "min", "where", *strategies.STEPS)
SHAKES = 8
TIGHT: list[float] = []  # of each random result, the share of elements that are compared to a few units


@dataclasses.dataclass(frozen=True)
class Item:
    """A random epilogue and the product it belongs to."""

    index: int
    case: strategies.Case
    smooth: bool

    @functools.cached_property
    def problem(self) -> cutjax.Problem:
        """Sizes up to 300, in every layout, dtype and way to batch; the result's dtype means nothing."""
        rng = np.random.default_rng([problems.SEED, self.index, 7])
        layout = LAYOUTS[self.index % 4]
        aligned = self.smooth or layout[0] == "t"
        m = 8 * int(rng.integers(1, 39)) if aligned else int(rng.integers(1, 301))
        n, k = 8 * int(rng.integers(1, 39)), 8 * int(rng.integers(8, 26))
        dtype = np.dtype((jnp.bfloat16, np.float16)[rng.integers(2)])
        batch = ((), (), (), (3,), (2, 2))[rng.integers(5)]
        a_batch, b_batch = (tuple(1 if rng.random() < 0.3 else size for size in batch) for _ in range(2))
        batch = tuple(np.broadcast_shapes(a_batch, b_batch))
        return cutjax.Problem.of(m, n, k, layout, dtype, dtype, dtype, batch, a_batch, b_batch)

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """a, the bs and the operands. The products are multiples of 1/32, of a standard deviation near 1."""
        rng = np.random.default_rng([problems.SEED, self.index, 8])
        a, b, out = problems.shapes(self.problem)

        def draw(shape, scale):
            return (rng.integers(-2, 3, shape) * scale).astype(self.problem.a.dtype)

        operands = tuple(self.case.arrays(out, self.index))
        return draw(a, 0.125), tuple(draw(b, 0.25) for _ in range(self.case.products)), operands

    def gemm(self, backend: str, config: cutjax.Config | None = None):
        """The fused product as a function of what ``arrays`` holds."""

        def gemm(a, bs, operands):
            return cutjax.gemm(
                a,
                bs if len(bs) > 1 else bs[0],
                epilogue=self.case,
                operands=operands,
                layout=self.problem.layout,
                out_dtype=(None,) * len(self.case.trees),
                backend=backend,
                config=config,
            )

        return gemm

    @functools.cached_property
    def config(self) -> cutjax.Config | None:
        """For three in four any config that serves, else the cost model's choice."""
        rng = np.random.default_rng([problems.SEED, self.index, 9])
        if rng.random() < 0.25:
            return None
        (row,) = cutjax.explain(self.gemm("auto"), platform="cuda")(*self.arrays).rows
        served = problems._by_name(row.choice.problem)
        return served[rng.integers(len(served))]


@functools.cache
def items(count: int, smooth: bool) -> list[Item]:
    """The first random epilogues, the same everywhere with the same version of hypothesis."""
    found: dict[strategies.Case, None] = {}
    rounds = settings(
        max_examples=count + count // 10,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=tuple(HealthCheck),  # pyright: ignore[reportArgumentType]
    )

    @rounds
    @given(strategies.epilogues(smooth=smooth, kinds=sorted(strategies.KINDS)))
    def collect(case):
        found.setdefault(case)

    collect()
    return [Item(i, case, smooth) for i, case in enumerate(list(found)[:count])]


def shaken(tree: Any, args: tuple[Any, ...], rng: np.random.Generator) -> Any:
    """``strategies.evaluate``, each operation wrong by as much as it may be, up or down along a leading axis.

    The first entry of that axis is exact; the others show how far errors carry, across steps and through casts.
    """
    if tree[0] in ("arg", "const", "row", "col"):
        return strategies.evaluate(tree, args)
    signs = np.repeat([-1.0, 1.0], SHAKES // 2)
    signs = np.concatenate([[0.0], rng.permutation(signs)]).astype(np.float32)
    e = signs.reshape(-1, *(1,) * (args[0].ndim - 1))
    if tree[0] == "cast":
        x = shaken(tree[2], args, rng)
        return (x * (1 + FAST[tree[1]] * e)).astype(tree[1]).astype(jnp.float32)
    name, *below = tree
    values = [shaken(t, args, rng) for t in below]
    if name == "atan2":  # either zero: they are pi or 2 pi apart
        values[0] = values[0] + 1e-30 * e
    y = (strategies.UNARY | strategies.STEPS | strategies.BINARY)[name](*values)
    if name in EXACT:
        return y
    return y + F32 * e * (jnp.abs(y) + (jnp.abs(values[0]) if name in CANCELLING else 0))


def reference(item: Item):
    """What XLA makes of the same call, and how far each element of each result may be from it."""

    def fn(a, bs, operands):
        outs = item.gemm("xla")(a, bs, operands)
        outs = outs if isinstance(outs, tuple) else (outs,)
        accs = [product_f32(a, b, item.problem.layout) for b in bs]
        args = tuple(jnp.broadcast_to(acc, (1 + SHAKES, *acc.shape)) for acc in accs) + operands
        allowed = []
        for out, tree, dtype in zip(outs, item.case.trees, item.case.dtypes, strict=True):
            values = shaken(tree, args, np.random.default_rng(0))
            values = jnp.broadcast_to(values, (1 + SHAKES, *out.shape))
            spread = jnp.max(jnp.abs(values - values[:1]), 0)
            size = jnp.max(jnp.abs(values), 0)
            info = jnp.finfo(dtype)
            allowed.append(2 * spread + jnp.maximum(float(info.eps) * size, max(float(info.smallest_subnormal), 1e-30)))
        return outs, allowed

    return fn


def product_f32(a, b, layout: str):
    """The exact product in f32."""
    x = a.astype(jnp.float32) if layout[0] == "n" else a.astype(jnp.float32).mT
    y = b.astype(jnp.float32) if layout[1] == "n" else b.astype(jnp.float32).mT
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _compile(fn, arrays, options=None):
    return jax.jit(fn).lower(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)).compile(options)


def _prepare(item: Item):
    ours = _compile(item.gemm("cuda", item.config), item.arrays)
    return ours, _compile(reference(item), item.arrays, EXACT_CASTS)


@pytest.fixture(scope="module")
def prefetch(gpus):
    prefetch = problems.Prefetch(items(COUNT, False), _prepare, ahead=64)
    yield prefetch
    prefetch.close()


@pytest.mark.parametrize("index", range(COUNT))
def test_random(index, prefetch):
    item = items(COUNT, False)[index]
    ours, xla = prefetch.get(item)
    arrays = jax.device_put(item.arrays)
    got = ours(*arrays)
    for out, (ref, allowed) in zip(
        got if isinstance(got, tuple) else (got,), zip(*xla(*arrays), strict=True), strict=True
    ):
        assert out.dtype == ref.dtype
        out, ref, allowed = (np.asarray(x, np.float64) for x in (out, ref, allowed))
        finite = np.isfinite(ref) & np.isfinite(allowed)
        share = np.where(finite, np.abs(out - ref) / allowed, out != ref)
        share[np.isnan(out) & np.isnan(ref)] = 0
        TIGHT.append(float(np.mean(allowed <= 2.0**-6 * np.maximum(np.abs(ref), 2.0**-3))))
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(np.nan_to_num(share, nan=np.inf)), share.shape))
        problems.note_worst(f"random epilogue, {item.case.dtypes[0]}", share[worst].item())
        assert np.all(share <= 1), (
            f"{np.sum(~(share <= 1))} of {share.size} wrong, worst at {worst}: {out[worst]} for {ref[worst]}, "
            f"allowed {allowed[worst]}; {item.problem}, {item.config}, {item.case}"
        )


def test_the_tolerance_is_tight_for_nearly_all_elements():
    """Errors that an epilogue magnifies, or that pick another step, are rare: the comparison means something."""
    if len(TIGHT) < 50:
        pytest.skip("few random epilogues ran")
    assert np.mean(TIGHT) > 0.9


def _gradients(item: Item, backend: str):
    def loss(a, bs, operands):
        outs = item.gemm(backend)(a, bs, operands)
        outs = outs if isinstance(outs, tuple) else (outs,)
        draws = np.random.default_rng(item.index)
        return sum((out * draws.standard_normal(out.shape, np.float32)).sum() for out in outs)

    return jax.grad(loss, (0, 1, 2))


@pytest.fixture(scope="module")
def prefetch_gradients(gpus):
    def prepare(item):
        # The cotangent is a constant of both programs; neither side is tuned.
        return tuple(_compile(_gradients(item, backend), item.arrays, EXACT_CASTS) for backend in ("cuda", "xla"))

    prefetch = problems.Prefetch(items(GRADIENTS, True), prepare, ahead=32)
    yield prefetch
    prefetch.close()


@pytest.mark.parametrize("index", range(GRADIENTS))
def test_random_gradients(index, prefetch_gradients):
    item = items(GRADIENTS, True)[index]
    arrays = jax.device_put(item.arrays)
    got, expected = (jax.tree.leaves(executable(*arrays)) for executable in prefetch_gradients.get(item))
    for out, ref in zip(got, expected, strict=True):
        assert out.dtype == ref.dtype
        out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
        error = np.linalg.norm(out - ref) / max(np.linalg.norm(ref), 1e-3)
        problems.note_worst("random gradient", float(error) / 2**-8)
        assert error <= 2**-8, f"relative error {error}; {item.problem}, {item.case}"
        assert np.max(np.abs(out - ref)) <= 2**-6 * np.abs(ref).max() + 1e-6


# Exact values: integers throughout, equal or wrong.


def ints(seed: int, *shape: int, dtype: Any = H, low: int = -2, high: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape)).astype(dtype)


def product(a, b) -> np.ndarray:
    return np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32))


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
DTYPES += ("int16", "uint16", "int32", "uint32", "bool")


@pytest.mark.parametrize("kind", strategies.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_operands(kind, dtype):
    layout = LAYOUTS[DTYPES.index(dtype) % 4]
    batch, m, n, k = (2, 3), 136, 144, 72
    a, b = ints(1, *batch, m, k), ints(2, 2, 1, k, n)
    operand = ints(3, *strategies.KINDS[kind](*batch, m, n), dtype=dtype, low=0, high=2 if dtype == "bool" else 5)
    x, y = a if layout[0] == "n" else a.mT.copy(), b if layout[1] == "n" else b.mT.copy()

    def epilogue(acc, z):
        return acc * 2 + z.astype(acc.dtype)

    fn = functools.partial(cutjax.gemm, layout=layout, epilogue=epilogue, out_dtype=jnp.float32, backend="cuda")
    got = jax.jit(lambda x, y, z: fn(x, y, operands=(z,)))(x, y, operand)
    np.testing.assert_array_equal(got, 2 * product(a, b) + np.asarray(operand).astype(np.float32))


TAILS = [(1, 8), (7, 16), (63, 24), (65, 72), (127, 136), (129, 264), (200, 520), (257, 8)]


@pytest.mark.parametrize(("m", "n"), TAILS, ids=str)
def test_tails(m, n):
    """Nothing is left unwritten, nothing written past the end, and what lies beyond an operand is not read into it.

    The results land in donated NaN; each operand's neighbours in memory, its other batches, hold NaN.
    """
    k = 72
    x, w = ints(1, 3, m, k), ints(2, k, n)
    full = np.full((3, m, n), np.nan, np.float32)
    rows, columns = np.full((3, m, 1), np.nan, np.float32), np.full((3, 1, n), np.nan, np.float32)
    full[1], rows[1], columns[1] = np.arange(m * n).reshape(m, n) % 9, np.arange(m)[:, None], np.arange(n) % 50

    @functools.partial(jax.jit, donate_argnums=5, keep_unused=True)
    def fn(x, w, full, rows, columns, poison):
        def epilogue(acc, *operands):
            return sum(operands, acc)

        # The batch moves the rows, so that it is not folded into them.
        b = jnp.broadcast_to(w, (3, *w.shape))
        return cutjax.gemm(
            x, b, epilogue=epilogue, operands=(full, rows, columns), out_dtype=jnp.float32, backend="cuda"
        )

    got = np.asarray(fn(x, w, full, rows, columns, jnp.full((3, m, n), jnp.nan)))
    np.testing.assert_array_equal(got[1], product(x[1], w) + full[1] + rows[1] + columns[1])
    assert np.isnan(got[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [(), ("float32",), ("bfloat16", "float8_e4m3fn")], ids=str)
def test_results_of_every_dtype(dtype, others):
    m, n, k = 137, 272, 72
    x, w = ints(1, m, k), ints(2, k, n)

    def epilogue(acc):
        return tuple((acc > 0) if t == "bool" else acc.astype(t) for t in (dtype, *others))

    def call(backend):
        dtypes = (None,) * (1 + len(others))
        return jax.jit(lambda x, w: cutjax.gemm(x, w, epilogue=epilogue, out_dtype=dtypes, backend=backend))(x, w)

    for out, ref, t in zip(call("cuda"), call("xla"), (dtype, *others), strict=True):
        assert out.dtype == ref.dtype == jnp.dtype(t)
        np.testing.assert_array_equal(np.asarray(out).astype(np.float32), np.asarray(ref).astype(np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_several_products(layout, count, batch):
    m, n, k = 136, 200, 136
    a, bs = ints(1, *batch, m, k), [ints(2 + i, *batch, k, n) for i in range(count)]

    def combine(*accs):
        return jax.nn.relu(accs[0]) * accs[1] - accs[-1]

    x = a if layout[0] == "n" else a.mT.copy()
    ys = tuple(b if layout[1] == "n" else b.mT.copy() for b in bs)
    fn = functools.partial(cutjax.gemm, layout=layout, epilogue=combine, out_dtype=jnp.float32, backend="cuda")
    np.testing.assert_array_equal(jax.jit(fn)(x, ys), combine(*(product(a, b) for b in bs)))


def test_dropout_has_the_bits_of_jax_random():
    x, w, key = ints(1, 264, 72), ints(2, 72, 200), jax.random.key(7)

    def dropout(acc, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), acc * 2, 0)

    got = jax.jit(lambda *xs: cutjax.gemm(*xs[:2], epilogue=dropout, operands=xs[2:], out_dtype="float32"))(x, w, key)
    np.testing.assert_array_equal(got, dropout(jnp.asarray(product(x, w)), key))


def test_positions():
    x, w = ints(1, 3, 136, 72), ints(2, 3, 72, 136)

    def causal(acc):
        return jnp.where(jnp.arange(136)[:, None] >= jnp.arange(136), acc, -7)

    got = jax.jit(lambda x, w: cutjax.gemm(x, w, epilogue=causal, out_dtype="float32", backend="cuda"))(x, w)
    np.testing.assert_array_equal(got, causal(product(x, w)))


@pytest.mark.parametrize("batch", [(3,), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("weights", ["shared", "one each", "inner", "outer"])
def test_dropout_over_a_batch(weights, batch):
    """With one key: as rows where the weights are shared, else by the matrix's number."""
    shapes = {"shared": (), "one each": batch, "inner": batch[-1:], "outer": (batch[0], *(1 for _ in batch[1:]))}
    shape = shapes[weights]
    x, w, r = ints(1, *batch, 136, 72), ints(2, *shape, 72, 200), ints(3, *batch, 1, 200)
    key, keys = jax.random.key(7), jax.random.split(jax.random.key(8), batch[0])

    def dropout(acc, key, r):
        return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), acc * 2, 0) + r.astype(acc.dtype)

    def fused(x, w, key, r):
        return cutjax.gemm(x, w, epilogue=dropout, operands=(key, r), out_dtype="float32", backend="cuda")

    def plain(x, w, key, r):
        return dropout(jnp.matmul(x, w, preferred_element_type=jnp.float32), key, r)

    outer = 0 if weights in ("one each", "outer") or shape == batch else None
    for f, k, b in (
        (lambda f: f, key, r),
        (lambda f: f, key, r[(0,) * len(batch)]),
        (lambda f: jax.vmap(f, (0, outer, None, 0)), key, r),
        (lambda f: jax.vmap(f, (0, outer, 0, None)), keys, r[0]),
    ):
        got, expected = (jax.jit(f(g))(x, w, k, b) for g in (fused, plain))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("batch", [(3,), (3, 2), (2, 3, 2), (2, 1, 3)], ids=str)
def test_positions_in_the_batch(batch, shared):
    x, w = ints(1, *batch, 136, 72), ints(2, *(() if shared else batch), 72, 136)

    def epilogue(acc):
        for axis in range(acc.ndim):
            acc = acc + (axis + 1) * jax.lax.broadcasted_iota(jnp.float32, acc.shape, axis)
        return acc

    def fused(x, w):
        return cutjax.gemm(x, w, epilogue=epilogue, out_dtype="float32", backend="cuda")

    def plain(x, w):
        return epilogue(jnp.matmul(x, w, preferred_element_type=jnp.float32))

    dim = None if shared else 0
    for f in (lambda f: f, lambda f: jax.vmap(f, (0, dim)), lambda f: jax.vmap(f, (0, dim), 1)):
        got, expected = (jax.jit(f(g))(x, w) for g in (fused, plain))
        np.testing.assert_array_equal(got, expected)


def test_gradient_of_dropout_over_a_batch():
    x, w, key = ints(1, 3, 136, 72), ints(2, 72, 200), jax.random.key(7)

    def dropout(acc, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), acc * 2, 0)

    def fused(x, w):
        return cutjax.gemm(x, w, epilogue=dropout, operands=(key,), backend="cuda")

    def plain(x, w):
        return dropout(jnp.matmul(x, w, precision="highest"), key)

    g = ints(3, 3, 136, 200)
    got = jax.jit(lambda x, w: jax.vjp(fused, x, w)[1](g))(x, w)
    wide = [v.astype(jnp.float32) for v in (x, w)]
    expected = jax.jit(lambda x, w: jax.vjp(plain, x, w)[1](g.astype(jnp.float32)))(*wide)
    for out, ref in zip(got, expected, strict=True):
        np.testing.assert_array_equal(out, ref.astype(H))


SPECIAL = {
    "bias": lambda acc, b: acc + b,
    "gelu": lambda acc, b: jax.nn.gelu(acc + b),
    "gelu(erf)": lambda acc, b: jax.nn.gelu(acc + b, approximate=False),
    "relu": lambda acc, b: jax.nn.relu(acc + b),
    "silu": lambda acc, b: jax.nn.silu(acc + b),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "clip": lambda acc, b: jnp.clip(acc + b, -1.0, 1.0),
    "exp": lambda acc, b: jnp.exp(acc) + b,
    "tanh": lambda acc, b: jnp.tanh(acc) + b,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SPECIAL)
def test_specials_propagate(name, dtype):
    """NaN and infinities of the product and of an operand are where XLA has them."""
    x, w = np.array(ints(1, 64, 64), np.float32), np.eye(64, dtype=np.float32)
    x[3, 5], x[7, 9], x[11, 13] = np.nan, np.inf, -np.inf
    # Infinity times the zeros of w would be NaN in the whole row: products of the column itself.
    rows = jnp.asarray(x, H)
    b = np.zeros(64, np.float32)
    b[20:23] = np.nan, np.inf, -np.inf

    def call(backend):
        fn = functools.partial(cutjax.gemm, epilogue=SPECIAL[name], out_dtype=dtype, backend=backend)
        return jax.jit(lambda x, w, b: fn(x, w, operands=(b,)), compiler_options=EXACT_CASTS)(
            rows, jnp.asarray(w, H), b
        )

    got, expected = (np.asarray(call(backend), np.float32) for backend in ("cuda", "xla"))
    assert np.isnan(expected).any()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(expected))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))


@pytest.mark.parametrize("save", ["default", "recompute"])
@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_gradient_of_a_layer(form, save):
    x, w = ints(1, 264, 136) * H(0.125), ints(2, 136, 200) * H(0.25)
    b, g = ints(3, 200) * H(0.125), jnp.asarray(np.random.default_rng(4).standard_normal((264, 200)), H)

    def layer(acc, b):
        return jax.nn.gelu(acc + b.astype(acc.dtype), approximate=form == "tanh")

    def fused(x, w, b):
        return cutjax.gemm(x, w, epilogue=layer, operands=(b,), save=save, backend="cuda")

    def plain(x, w, b):
        return layer(jnp.matmul(x, w, precision="highest"), b)

    got = jax.jit(lambda *xs: jax.vjp(fused, *xs)[1](g))(x, w, b)
    wide = [v.astype(jnp.float32) for v in (x, w, b)]
    expected = jax.jit(lambda *xs: jax.vjp(plain, *xs)[1](g.astype(jnp.float32)))(*wide)
    for out, ref in zip(got, expected, strict=True):
        out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
        assert np.linalg.norm(out - ref) <= 6e-3 * np.linalg.norm(ref)


def test_the_same_bits_every_time():
    item = next(item for item in items(COUNT, False) if len(item.case.trees) == 2 and item.case.products > 1)
    ours, _ = _prepare(item)
    arrays = jax.device_put(item.arrays)
    first = [np.asarray(x) for x in jax.tree.leaves(ours(*arrays))]
    for _ in range(20):
        for out, again in zip(first, jax.tree.leaves(ours(*arrays)), strict=True):
            np.testing.assert_array_equal(out, again)


def test_reductions_of_integers():
    x, w = ints(1, 3, 64, 64), ints(2, 3, 64, 64)

    def run(backend):
        return cutjax.gemm(x, w, epilogue=lambda acc: (acc, (acc > 0).astype(jnp.int32).sum(-2)), backend=backend)

    for out, ref in zip(run("cuda"), run("xla"), strict=True):
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(ref, np.float32))


REDUCED = {
    "sums": lambda acc: (acc, acc.sum(-2), acc.sum(-1), acc.sum((-2, -1))),
    "largest": lambda acc: (acc.astype(jnp.float8_e4m3fn), jnp.abs(acc).max((-2, -1)), acc.max(-2)),
    "least": lambda acc: (acc, acc.min(-1), acc.min(-2)),
    "nothing else": lambda acc: (acc.sum(-1), acc.max(-1)),
    "one number": lambda acc: acc.max((-2, -1)),
}


@pytest.mark.parametrize("shape", [(64, 128), (264, 400), (1000, 1168)])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("name", REDUCED)
def test_reductions(name, batch, shape):
    """The accumulators are small integers, so sums are exact in any order."""
    m, n = shape
    x, w = ints(1, *batch, m, 64), ints(2, *batch, 64, n)
    ours, theirs = (
        jax.tree.leaves(jax.jit(functools.partial(cutjax.gemm, epilogue=REDUCED[name], backend=how))(x, w))
        for how in ("cuda", "xla")
    )
    for out, ref in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(ref, np.float32))
