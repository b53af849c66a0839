"""ragged_dot and ragged_dot_general against jax.lax's: three modes, every order of dimensions, dtypes, errors."""

from __future__ import annotations

import functools
import inspect
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import compare, integers, mesh_of
from jax import lax

import cutjax

M, K, N, G = 20, 8, 6, 4
X, W, S = integers(0, (M, K)), integers(1, (G, K, N)), jnp.array([5, 0, 7, 6], jnp.int32)
Dims = lax.RaggedDotDimensionNumbers


def check(lhs, rhs, sizes, dims, **options):
    def take(f):
        return lambda lhs, rhs, sizes: f(lhs, rhs, sizes, dims, **options)

    compare(take, (cutjax.ragged_dot_general, lax.ragged_dot_general), (lhs, rhs, sizes))


@pytest.mark.versions
@pytest.mark.parametrize("name", ["ragged_dot", "ragged_dot_general"])
def test_signature(name):
    """jax's, whose older versions have no out_sharding."""
    ours, theirs = (list(inspect.signature(getattr(module, name)).parameters.values()) for module in (cutjax, lax))
    assert [(p.name, p.kind, p.default) for p in ours][: len(theirs)] == [(p.name, p.kind, p.default) for p in theirs]
    assert [p.name for p in ours[len(theirs) :]] in ([], ["out_sharding"])


@pytest.mark.versions
@pytest.mark.parametrize("sizes", [(5, 0, 7, 6), (20, 0, 0, 0), (0, 0, 0, 0), (1, 18, 0, 1)], ids=str)
def test_values_and_gradients(sizes):
    def take(f):
        def both(x, w):
            value, vjp = jax.vjp(lambda x, w: f(x, w, jnp.array(sizes)), x, w)
            return value, vjp(integers(2, value.shape))

        return both

    compare(take, (cutjax.ragged_dot, lax.ragged_dot), (X, W))


# A letter for each dimension: b batch, x before the ragged m, y after it, g groups, k, l, n, o contracted or not.
LENGTHS = {"b": 2, "x": 2, "m": 12, "y": 3, "k": 4, "l": 5, "g": 4, "n": 3, "o": 2}
ORDERS = list(itertools.permutations(range(6)))


def array(seed: int, letters: str) -> jax.Array:
    return integers(seed, [LENGTHS[c] for c in letters])


def some_orders(lhs: str, rhs: str) -> list[tuple[str, str]]:
    """The given orders, in which nothing moves, and five others: 100 after a change of how they are moved."""
    pairs = [(ORDERS[i * 149 % 720], ORDERS[i * 331 % 720]) for i in range(6)]
    return [tuple("".join(x[i] for i in order) for x, order in zip((lhs, rhs), pair, strict=True)) for pair in pairs]


def numbers(lhs: str, rhs: str, contracted: str) -> Dims:
    dot = tuple(tuple([[side.index(c) for c in letters] for side in (lhs, rhs)]) for letters in (contracted, "b"))
    return Dims(dot, [lhs.index("m")], [rhs.index("g")] if "g" in rhs else [])


def all_sizes(dims: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.array([5, 0, 4, 2]), jnp.asarray(rng.integers(0, 5, [*(LENGTHS[c] for c in dims), 4]))


@pytest.mark.parametrize(("lhs", "rhs"), some_orders("bxmykl", "bgklno"))
def test_ragged_rows(lhs, rhs):
    free = "".join(c for c in lhs if c in "xmy")
    for sizes in all_sizes("b" + free[: free.index("m")]):
        check(array(0, lhs), array(1, rhs), sizes, numbers(lhs, rhs, "kl"))


@pytest.mark.parametrize(("lhs", "rhs"), some_orders("bxmykl", "bxmyno"))
def test_ragged_contraction(lhs, rhs):
    contracted = "ymx" if lhs.index("x") < lhs.index("y") else "xmy"  # their order need not be that in lhs
    for sizes in all_sizes("b" + contracted[:1]):
        check(array(0, lhs), array(1, rhs), sizes, numbers(lhs, rhs, contracted))


@pytest.mark.versions
def test_ragged_batch():
    """As in jax the sizes change nothing."""
    dims = Dims((([2], [1]), ([0], [0])), [0], [])
    check(integers(0, (6, 3, 4)), integers(1, (6, 4, 5)), jnp.array([2, 3]), dims)
    dims = Dims((([3], [2]), ([1, 0], [0, 1])), [0], [])
    check(integers(0, (2, 6, 3, 4)), integers(1, (6, 2, 4, 5)), jnp.ones((6, 3), jnp.int32), dims)


def test_natural_orders_move_no_data():
    """The weights of both layouts of grouped_gemm, and the operands of grouped_outer, are taken as they lie."""
    rows = Dims((([1], [2]), ([], [])), [0], [0])
    batched = Dims((([2], [2]), ([0], [0])), [1], [1])
    contraction = Dims((([0], [0]), ([], [])), [0], [])
    for dims, lhs, rhs in ((rows, "mk", "gnk"), (batched, "bmk", "bgkn"), (contraction, "mk", "mn")):
        args = array(0, lhs), array(1, rhs), all_sizes("")[0]
        jaxpr = jax.make_jaxpr(functools.partial(cutjax.ragged_dot_general, ragged_dot_dimension_numbers=dims))(*args)
        for eqn in jaxpr.jaxpr.eqns:
            if eqn.primitive.name == "transpose":
                assert list(eqn.params["permutation"]) == sorted(eqn.params["permutation"])
        assert "cutjax_grouped" in str(jaxpr)


DTYPES = [
    ("bfloat16", "bfloat16", None),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float32", "bfloat16"),
    ("float32", "bfloat16", None),
    ("bfloat16", "float16", None),
    ("int8", "float32", None),
    ("int8", "int8", None),
    ("int8", "int8", "int32"),
    ("int8", "int32", None),
    ("complex64", "complex64", None),
    ("bool", "bool", None),
]


@pytest.mark.versions
@pytest.mark.parametrize(("lhs", "rhs", "preferred"), DTYPES, ids=str)
def test_dtypes(lhs, rhs, preferred):
    x, w = (x.astype(t) for x, t in ((X, lhs), (W, rhs)))
    got, expected = (
        jax.eval_shape(functools.partial(f, preferred_element_type=preferred), x, w, S)
        for f in (cutjax.ragged_dot, lax.ragged_dot)
    )
    assert got == expected
    y = cutjax.ragged_dot(x, w, S, preferred_element_type=preferred)
    whole = lax.ragged_dot(*(v.astype(jnp.complex64 if "complex" in lhs else jnp.float32) for v in (x, w)), S)
    np.testing.assert_array_equal(y, whole.astype(y.dtype))


PRECISIONS = [None, "highest", lax.Precision.HIGH, ("high", "default"), ["default", "high"], "F32_F32_F32"]


@pytest.mark.versions
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision(precision):
    """That of XLA's product, forward and backward."""
    if precision == "F32_F32_F32":
        precision = lax.DotAlgorithmPreset.F32_F32_F32

    def loss(f, x, w):
        return (f(x, w, S, precision) ** 2).sum()

    def take(f):
        return jax.value_and_grad(functools.partial(loss, f), (0, 1))

    compare(take, (cutjax.ragged_dot, lax.ragged_dot), (X, W))
    if precision in ("highest", lax.Precision.HIGH):
        text = jax.jit(jax.grad(functools.partial(loss, cutjax.ragged_dot), (0, 1))).lower(X, W).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) == 3
        assert all("HIGH" in line for line in products)


def test_group_offset():
    """jax has the argument, and no implementation."""
    full = np.zeros((G, K, N), np.float32)
    full[1:3] = W[1:3]
    expected = lax.ragged_dot(X, full, S)
    for offset in (1, jnp.array([1])):
        np.testing.assert_array_equal(cutjax.ragged_dot(X, W[1:3], S, group_offset=offset), expected)
    outer = Dims((([0], [0]), ([], [])), [0], [])
    dw = cutjax.ragged_dot_general(X, X, S, outer)
    shifted = cutjax.ragged_dot_general(X, X, S, outer, group_offset=1)
    np.testing.assert_array_equal(shifted, jnp.concatenate([dw[1:], jnp.zeros_like(dw[:1])]))


@pytest.mark.versions
def test_inside_shard_map():
    mesh = mesh_of(i=8)
    specs = jax.P(None, "i"), jax.P(None, "i")

    def loss(f, x, w):
        return (f(x, w) ** 2).sum()

    def local(x, w):
        return lax.psum(cutjax.ragged_dot(x, w, S), "i")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())
    functions = sharded, lambda x, w: lax.ragged_dot(x, w, S)
    compare(lambda f: jax.grad(functools.partial(loss, f), (0, 1)), functions, (X, W))


def test_second_mode_has_gradients():
    """jax's has none."""
    dims = Dims((([1, 0], [1, 0]), ([], [])), [0], [])
    x, y = integers(0, (M, 3, K)), integers(1, (M, 3, N))

    def loss(x, y):
        return (cutjax.ragged_dot_general(x, y, S, dims) ** 2).sum()

    def plain(x, y):
        ends = [0, *np.cumsum(np.asarray(S))]
        return sum((jnp.einsum("rik,rin->kn", x[a:b], y[a:b]) ** 2).sum() for a, b in itertools.pairwise(ends))

    compare(lambda f: jax.grad(f, (0, 1)), (loss, plain), (x, y))


def test_scope_decides_who_runs():
    with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match="cutjax_grouped_gemm"):
        cutjax.ragged_dot(X, W, S)


BAD = [
    (TypeError, "exactly one lhs ragged dimension", X, W, S, Dims((([1], [1]), ([], [])), [], [0])),
    (TypeError, "exactly one rhs group dimension", X, W, S, Dims((([1], [1]), ([], [])), [0], [])),
    (
        TypeError,
        "expected rhs group dimension size to be 3, got 4",
        X,
        W,
        S[:3],
        Dims((([1], [1]), ([], [])), [0], [0]),
    ),
    (TypeError, "contracting", X[:, :7], W, S, Dims((([1], [1]), ([], [])), [0], [0])),
    (
        TypeError,
        "ragged_dot_general: group_sizes must be integers",
        X,
        W,
        jnp.ones(4),
        Dims((([1], [1]), ([], [])), [0], [0]),
    ),
]


@pytest.mark.versions
@pytest.mark.parametrize(("error", "match", "lhs", "rhs", "sizes", "dims"), BAD, ids=[case[1][:30] for case in BAD])
def test_refused(error, match, lhs, rhs, sizes, dims):
    """jax says what is wrong with the dimension numbers."""
    with pytest.raises(error, match=match):
        cutjax.ragged_dot_general(lhs, rhs, sizes, dims)


@pytest.mark.versions
def test_out_sharding_is_refused():
    with pytest.raises(
        NotImplementedError, match=r"ragged_dot_general: out_sharding must be None, got .*jax.shard_map"
    ):
        cutjax.ragged_dot(X, W, S, out_sharding=jax.P(None, None))
    with pytest.raises(ValueError, match="Precision argument must be one of"):
        cutjax.ragged_dot(X, W, S, "fast")


CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


@pytest.mark.versions
@pytest.mark.parametrize(("kind", "backend"), [("ragged_dot", "xla"), ("contracted", "auto"), ("gradient", "auto")])
def test_symbolic_sizes(kind, backend):
    """A program exported for any number of rows."""
    functions = {
        "ragged_dot": lambda x, w, sizes: cutjax.ragged_dot(x, w, sizes),
        "contracted": lambda x, w, sizes: cutjax.ragged_dot_general(x, x, sizes, CONTRACTED),
        "gradient": jax.grad(lambda x, w, sizes: (cutjax.ragged_dot(x, w, sizes) ** 2).sum(), (0, 1)),
    }
    (m,) = jax.export.symbolic_shape("m")
    w, sizes = jnp.arange(3 * 4 * 5, dtype=jnp.float32).reshape(3, 4, 5), jnp.array([2, 0, 3], jnp.int32)
    with cutjax.use_backend(backend):
        exported = jax.export.export(jax.jit(functions[kind]), platforms=["cpu"])(
            jax.ShapeDtypeStruct((m, 4), jnp.float32), w, sizes
        )
    for rows in (5, 9):
        x = jnp.arange(rows * 4, dtype=jnp.float32).reshape(rows, 4)
        jax.tree.map(np.testing.assert_array_equal, exported.call(x, w, sizes), functions[kind](x, w, sizes))


def test_symbolic_sizes_have_no_kernel():
    (m,) = jax.export.symbolic_shape("m")
    args = jax.ShapeDtypeStruct((m, 4), jnp.float32), jnp.ones((3, 4, 5)), jnp.array([2, 0, 3], jnp.int32)
    with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match=r"ragged_dot.*'cuda' needs known sizes"):
        jax.export.export(jax.jit(lambda *args: cutjax.ragged_dot(*args)), platforms=["cuda"])(*args)
    with pytest.raises(NotImplementedError, match=r"ragged_dot.*group_offset needs known sizes"):
        jax.export.export(jax.jit(lambda *args: cutjax.ragged_dot(*args, group_offset=0)))(*args)


@pytest.mark.versions
def test_quantized_operands():
    """Either is, in every mode, with scales of groups, of columns and of blocks along the contraction."""
    x, w, dy = (
        np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(((12, 32), (3, 32, 8), (12, 8)))
    )
    sizes = jnp.array([5, 0, 6])
    q = cutjax.quantize(jnp.asarray(w, jnp.float32), "int8", block=(16, 1))
    rows = cutjax.quantize(jnp.asarray(x, jnp.float32), "float8_e4m3fn", block=(1, -1))
    of_dy = cutjax.quantize(jnp.asarray(dy, jnp.float32), "float8_e4m3fn", block=(4, 1))
    turned = cutjax.Quantized(q.values.mT, q.scale.mT)
    numbers = jax.lax.RaggedDotDimensionNumbers(((([1], [2])), ([], [])), [0], [0])
    outer = jax.lax.RaggedDotDimensionNumbers(((([0], [0])), ([], [])), [0], [])
    batched = jax.lax.RaggedDotDimensionNumbers(((([2], [1])), ([0], [0])), [0], [])

    @jax.jit
    def run(rows, q, of_dy):
        by_batch = jnp.stack([rows.dequantize()] * 3), q
        return (
            cutjax.ragged_dot(rows, q, sizes),
            cutjax.ragged_dot_general(rows, turned, sizes, numbers),
            cutjax.ragged_dot(rows.dequantize(), q, sizes),
            cutjax.ragged_dot_general(rows, of_dy, sizes, outer),
            cutjax.ragged_dot_general(*by_batch, sizes, batched),
            cutjax.ragged_dot(rows, q, jnp.array([2, 5, 0, 5]), group_offset=jnp.array(1)),
        )

    a, b, c = (np.asarray(y.dequantize(), np.float64) for y in (rows, q, of_dy))
    plain = np.concatenate([a[:5] @ b[0], a[5:11] @ b[2], np.zeros((1, 8))])
    offset = np.concatenate([np.zeros((2, 8)), a[2:7] @ b[0], a[7:] @ b[2]])
    by_group = np.stack([a[:5].T @ c[:5], np.zeros((32, 8)), a[5:11].T @ c[5:11]])
    wanted = plain, plain, plain, by_group, np.stack([a @ y for y in b]), offset
    for found, exact in zip(run(rows, q, of_dy), wanted, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
