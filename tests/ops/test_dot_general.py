"""dot_general against jax.lax's: random contractions, errors, precision, sharding, and what runs on CUDA."""

from __future__ import annotations

import collections
import functools
import inspect
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, mesh_of
from contractions import arguments, checked, random_case
from jax import lax

import cutjax

CASES, CHUNK = 40, 20  # after a change of how contractions become products: 2000
MATRICES = (((1,), (0,)), ((), ()))


def equal(got, want) -> bool:
    """Whether two arrays are the same in shape, dtype and value."""
    kind = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    same = (got.shape, got.dtype) == (want.shape, want.dtype)
    return same and np.array_equal(np.asarray(got).astype(kind), np.asarray(want).astype(kind), equal_nan=True)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.versions), *range(CHUNK, CASES, CHUNK)])
def test_random_contractions(first):
    """Value, weak type, gradient, tangent and vmap; of small integers, so that all are equal but for no reason."""
    for seed in range(first, first + CHUNK):
        case = random_case(seed)
        with jax.enable_x64(case.wide):
            args = arguments(case)
            both = jax.jit(
                lambda *args, case=case: [checked(case, f)(*args) for f in (cutjax.dot_general, lax.dot_general)]
            )
            got, want = both(*args)
            assert jax.tree.all(jax.tree.map(equal, got, want)), case
            weak = [[x.weak_type for x in jax.tree.leaves(found)] for found in jax.eval_shape(both, *args)]
            assert weak[0] == weak[1], case


def test_random_contractions_are_of_every_kind():
    """Most become a product of this package; and dtypes, batch axes, copies and memory orders are all drawn."""
    found: collections.Counter[str] = collections.Counter()
    for seed in range(60):
        case = random_case(seed)
        with jax.enable_x64(case.wide):
            text = str(
                jax.make_jaxpr(lambda x, y, case=case: cutjax.dot_general(x, y, case.dims))(*arguments(case)[:2])
            )
        found.update({"ours": "cutjax_gemm" in text, "orders": "orders=((), (), ())" not in text and "orders" in text})
        found.update({"batch": len(case.dims[1][0]) > 0, "two": len(case.dims[0][0]) == 2, "weak": any(case.weak)})
        found.update(dict.fromkeys(case.dtypes, 1))
    assert found["ours"] > 30  # of others whose copies take longer XLA multiplies as it likes
    assert min(found[kind] for kind in ("orders", "batch", "two", "weak")) > 4
    assert min(found[dtype] for dtype in ("bfloat16", "float16", "float32", "float64", "complex64", "bool", "int8")) > 0
    assert found["float8_e4m3fn"] > 0


@pytest.mark.versions
def test_signature():
    ours, theirs = (inspect.signature(f).parameters.values() for f in (cutjax.dot_general, lax.dot_general))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


X, Y = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
WRONG = {
    "sizes": lambda f: f(X, X, MATRICES),
    "numbers": lambda f: f(X, Y, (((1,), (0, 1)), ((), ()))),
    "axis": lambda f: f(X, Y, (((2,), (0,)), ((), ()))),
    "negative axis": lambda f: f(X, Y, (((-1,), (0,)), ((), ()))),
    "an axis twice": lambda f: f(X, Y, (((1,), (0,)), ((1,), (0,)))),
    "batch sizes": lambda f: f(X, Y, (((), ()), ((0,), (0,)))),
    "no pairs": lambda f: f(X, Y, ((1,), (0,))),
    "a list": lambda f: f([1.0], [2.0], (((0,), (0,)), ((), ()))),
    "nothing": lambda f: f(None, X, MATRICES),
    "a string": lambda f: f("x", X, MATRICES),
    "a key": lambda f: f(jax.random.split(jax.random.key(0), (2, 3)), Y, MATRICES),
    "precision": lambda f: f(X, Y, MATRICES, "best"),
    "two precisions of three": lambda f: f(X, Y, MATRICES, ("high", "high", "high")),
    "dtype": lambda f: f(X.astype("int32"), Y.astype("int32"), MATRICES, preferred_element_type=jnp.int8),
    "no dtype": lambda f: f(X, Y, MATRICES, preferred_element_type="floats"),
    "no argument": lambda f: f(X, Y),
    "an unknown argument": lambda f: f(X, Y, MATRICES, layout="nn"),
}


@pytest.mark.versions
@pytest.mark.parametrize("what", WRONG)
def test_errors_are_those_of_lax(what):
    def error(f):
        try:
            WRONG[what](f)
        except Exception as e:
            return type(e), str(e).replace("of_lax", "dot_general")
        return None

    ours, theirs = error(cutjax.dot_general), error(lax.dot_general)
    assert ours == theirs
    assert theirs or what == "negative axis"  # which lax takes


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn")])
def test_both_kinds_of_float8(dtypes):
    """Weights by cotangents: value, gradient, and a kernel that multiplies them as they are."""
    x, y = integers(0, (3, 8, 16), dtypes[0]), integers(1, (3, 16, 24), dtypes[1])
    dims = (((2,), (1,)), ((0,), (0,)))

    def both(f):
        def loss(x, y):
            return (f(x, y, dims, preferred_element_type=jnp.float32) ** 2).sum()

        return f(x, y, dims, preferred_element_type=jnp.float32), jax.grad(loss, (0, 1))(x, y)

    got, want = jax.jit(lambda: [both(f) for f in (cutjax.dot_general, lax.dot_general)])()
    assert jax.tree.all(jax.tree.map(equal, got, want))
    with cutjax.use_backend("cuda"):
        report = cutjax.explain(
            lambda x, y: cutjax.dot_general(x, y, dims, preferred_element_type=jnp.float32),
            platform="cuda",
            arch="sm_89",
        )(x, y)
    (row,) = report.rows
    assert row.choice.resolved.name.startswith("mma_f8_e")
    assert "xf8_e" in row.choice.resolved.name


@pytest.mark.versions
@pytest.mark.parametrize(
    "dtypes", [("float32", "int32"), ("float32", "bfloat16"), ("int8", "float32"), ("int32", "int8")]
)
def test_results_of_another_kind(dtypes):
    """Whatever lax makes of them; values, gradients, and errors."""
    dtype, preferred = dtypes
    x, y = integers(0, (4, 3)).astype(dtype), integers(1, (3, 2)).astype(dtype)

    def found(f):
        try:
            return f(x, y, MATRICES, None, preferred)
        except TypeError as error:
            return str(error)

    got, want = found(cutjax.dot_general), found(lax.dot_general)
    assert got == want if isinstance(want, str) else equal(got, want)


@pytest.mark.versions
def test_scalars_numpy_arrays_and_objects_that_stand_for_arrays():
    class Parameter:
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return self.value

    none = (((), ()), ((), ()))
    for x, y in ((2.0, 3), (np.float32(2), 3.0), (np.ones(3, np.float32), 2.0), (True, np.int8(3))):
        got, want = (f(x, y, none) for f in (cutjax.dot_general, lax.dot_general))
        assert equal(got, want)
        assert got.weak_type == want.weak_type
    assert equal(cutjax.dot_general(Parameter(jnp.asarray(X)), Y, MATRICES), lax.dot_general(X, Y, MATRICES))
    axes = np.array([1]), [0]  # any sequences, of any integers
    assert equal(cutjax.dot_general(X, Y, [axes, ([], [])]), lax.dot_general(X, Y, MATRICES))


@pytest.mark.versions
@pytest.mark.parametrize("precision", [None, "high", ("high", "default"), lax.DotAlgorithmPreset.F32_F32_F32], ids=str)
@pytest.mark.parametrize("scope", [None, "highest", "BF16_BF16_F32_X3"])
def test_precision_is_that_of_lax(precision, scope):
    """Whichever operand becomes a."""
    x, y = jnp.asarray(X), jnp.asarray(Y)
    permuted = (((1,), (0,)), ((), ()))
    with jax.default_matmul_precision(scope):
        for fs in ((cutjax.dot_general, lax.dot_general), (cutjax.einsum, jnp.einsum)):
            calls = [
                (lambda x, y, f=f: f(x, y, permuted, precision))
                if f in (cutjax.dot_general, lax.dot_general)
                else (lambda x, y, f=f: f("mk,kn->nm", x, y, precision=precision))
                for f in fs
            ]
            text = [jax.jit(f).lower(x, y).as_text() for f in calls]
            asked = [re.findall(r"precision = \[[^\]]*\]|algorithm = <[^>]*>", t) for t in text]
            assert sorted(asked[0]) == sorted(asked[1])


def test_what_has_no_kernel_is_left_to_lax_and_refused_by_cuda():
    x, w = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 4))
    (m,) = jax.export.symbolic_shape("m")
    symbolic = jax.ShapeDtypeStruct((m, 8), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x, w: cutjax.dot_general(x, w, MATRICES)))(symbolic, w)
    assert exported.call(jnp.ones((3, 8)), w).shape == (3, 4)
    assert equal(cutjax.dot_general(x, w, MATRICES), lax.dot_general(x, w, MATRICES))
    with cutjax.use_backend("cuda"):
        with pytest.raises(NotImplementedError, match="one dtype, got bfloat16 and float32"):
            cutjax.dot_general(x, w, MATRICES)
        with pytest.raises(NotImplementedError, match=r"known sizes, got \(m, 8\), \(8, 4\)"):
            jax.eval_shape(lambda x, w: cutjax.dot_general(x, w, MATRICES), symbolic, w)
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
            cutjax.dot_general(x, x, (((1,), (1,)), ((), ())))
        assert cutjax.dot_general(x[:0], x, (((1,), (1,)), ((), ()))).shape == (0, 4)  # nothing to launch


@pytest.mark.versions
def test_explicit_sharding_is_that_of_lax():
    mesh = mesh_of(jax.sharding.AxisType.Explicit, i=4, j=2)
    cases = [
        (((4, 8), P("i", None)), ((8, 6), P(None, "j")), MATRICES, None),
        (((4, 3, 8), P("i", None, None)), ((8, 6), P(None, "j")), (((2,), (0,)), ((), ())), None),
        (((4, 8), P(None, "j")), ((8, 6), P("j", None)), MATRICES, P("i", None)),
        (((4, 2, 8), P("i", None, "j")), ((4, 8, 6), P("i", "j", None)), (((2,), (1,)), ((0,), (0,))), P("i")),
    ]
    with jax.set_mesh(mesh):
        for (x, x_spec), (y, y_spec), dims, out in cases:
            x, y = jax.device_put(integers(0, x), x_spec), jax.device_put(integers(1, y), y_spec)
            how = {"dimension_numbers": dims, "out_sharding": out and jax.NamedSharding(mesh, out)}
            got, want = (jax.jit(functools.partial(f, **how))(x, y) for f in (cutjax.dot_general, lax.dot_general))
            assert equal(got, want)
            assert jax.typeof(got).sharding == jax.typeof(want).sharding
            with (
                cutjax.use_backend("cuda"),
                pytest.raises(NotImplementedError, match=r"out_sharding|sharded|NVIDIA GPU"),
            ):
                cutjax.dot_general(x, y, **how)


P = jax.P
H = jnp.bfloat16
LOWERED = {  # equation: the kernel, and how many transpositions are beside it
    "mk,kn->mn": ("nn", 0),
    "bsk,kn->bsn": ("nn", 0),
    "bsk,nk->bsn": ("nt", 0),
    "bsk,bsn->kn": ("tn", 0),
    "bsk,bsn->nk": ("tn", 0),
    "bsk,khd->bshd": ("nn", 0),
    "bshd,hdn->bsn": ("nn", 0),
    "bhsd,bhtd->bhst": ("nt", 0),
    "bhgsd,bhtd->bhgst": ("nt", 0),
    "bskh,hkn->bsn": ("nn", 1),  # the weights are copied
}
SIZES = {"b": 4, "s": 512, "t": 512, "m": 2048, "k": 1024, "n": 1024, "h": 16, "d": 64, "g": 2}


@pytest.mark.versions
@pytest.mark.parametrize("equation", LOWERED)
def test_kernels_and_copies(equation):
    """What runs on CUDA beside the kernel, forward and backward."""
    layout, transpositions = LOWERED[equation]
    sizes = SIZES | ({"k": 64} if "h" in equation and "d" not in equation else {})
    args = [jax.ShapeDtypeStruct([sizes[c] for c in x], H) for x in equation.split("->")[0].split(",")]
    with cutjax.use_backend("cuda"):

        def backward(x, y):
            value, vjp = jax.vjp(lambda x, y: cutjax.einsum(equation, x, y), x, y)
            return vjp(value)

        for fn, products in ((lambda x, y: cutjax.einsum(equation, x, y), 1), (backward, 3)):
            text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            kernels = re.findall(r'@cutjax_launch.*kernel = "sm90_bf16_(\w\w)_', text)
            assert len(kernels) == products
            assert layout in kernels
            assert len(re.findall(r"stablehlo\.transpose", text)) == transpositions * (1 if products == 1 else 2)


def test_explain_says_what_is_copied_forward_and_backward():
    x, w = jax.ShapeDtypeStruct((4, 512, 64, 16), H), jax.ShapeDtypeStruct((16, 64, 1024), H)

    def loss(x, w):
        return (cutjax.einsum("bskh,hkn->bsn", x, w).astype(jnp.float32) ** 2).sum()

    rows = cutjax.explain(jax.grad(loss, (0, 1)), platform="cuda")(x, w).rows
    copy = "rhs is copied (2,097,152 bytes): its contracted axes do not lie as the other operand's"
    assert [copy in row.why for row in rows].count(True) == 2
    assert [f"the cotangent of {copy}" in row.why for row in rows].count(True) == 1
    assert len(rows) == 3
