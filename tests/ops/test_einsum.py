"""dot, matmul, tensordot and einsum against jax.numpy's: grammar, promotion, permuted results, errors."""

from __future__ import annotations

import functools
import inspect
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers
from contractions import arguments, checked, equation, random_case

import cutjax

NAMES = ("dot", "matmul", "tensordot", "einsum")
SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 2, "i": 3, "j": 3, "x": 1}


def equal(got, want) -> bool:
    """Whether two arrays are the same in shape, dtype, weak type and value."""
    same = (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)
    return same and np.array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.versions
@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    """jax.numpy's: its annotations alone are shown in another way from version to version."""
    ours, theirs = (inspect.signature(getattr(of, name)).parameters.values() for of in (cutjax, jnp))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


GRAMMAR = [
    "ab,bc->ac", "ab,bc->ca", "ab,bc", "ba,cb", "ab,cb->ac", "abc,cd->abd", "abc,abd->cd", "abc,abd->dc",
    "abc,adc->abd", "abc,dbc->ad", "bac,bdc->adb", "abcd,aecd->caeb", "abc,acd->bad", "a,a", "a,a->a", "a,b->ba", "a,b",
    ",", "a,", ",a->a", "ab,->ba", "ab", "ba", "ii", "ii->i", "iij->j", "aii,ib->ab", "ij,ji", "ij,jj->i", "ijj,j->i",
    "...ab,...bc->...ac", "...ab,bc", "ab...,b->a...", "...a,...a->...", "...a,...a", "...,...", "a...->...a",
    "a...b,b...c->...ca", "ab,bc,cd->ad", "ab,bc,cd,de->ea", "ab,ab,ab->b", "a,b,c->cba", "abc,bcd,de->ae",
    "xab,bc->xac", "xa,ab->bx", "ax,xb->ab", "axb,bxc->ac", "ab,cd->", "ab,cd->ac", "abc->b", " ab , bc -> ac ",
]  # fmt: skip


def operands(equation: str, dtype=jnp.float32):
    found = []
    for i, names in enumerate(equation.replace(" ", "").split("->")[0].split(",")):
        names = names.replace("...", "ed" if i == 0 else "xd")
        found.append(integers(i, [SIZES[c] for c in names]).astype(dtype))
    return found


@pytest.mark.versions
@pytest.mark.parametrize("first", range(0, len(GRAMMAR), 13))
def test_grammar(first):
    """Values and gradients; a dozen equations a program."""
    equations = GRAMMAR[first : first + 13]
    args = [operands(equation) for equation in equations]

    def results(einsum, args):
        def one(equation, xs):
            value, vjp = jax.vjp(functools.partial(einsum, equation), *xs)
            return value, vjp(jnp.ones_like(value) + value % 2)

        return [one(equation, xs) for equation, xs in zip(equations, args, strict=True)]

    got, want = jax.jit(lambda args: [results(f, args) for f in (cutjax.einsum, jnp.einsum)])(args)
    assert jax.tree.all(jax.tree.map(equal, got, want))


@pytest.mark.versions
def test_interleaved_form_and_its_output():
    x, y = operands("ab,bc")
    for args in ((x, [0, 1], y, [1, 2]), (x, [0, 1], y, [1, 2], [2, 0]), (x, [0, ...], y, [1, ...], [0, 1])):
        x_or_t = args if args[1] != [0, ...] else (x, [0, ...], x, [1, ...], [0, 1, ...])
        assert equal(cutjax.einsum(*x_or_t), jnp.einsum(*x_or_t))


@pytest.mark.parametrize("optimize", [True, False, "greedy", "optimal", [(1, 2), (0, 1)]], ids=str)
def test_paths(optimize):
    equation = "ab,bc,cd->da"
    args = operands(equation)
    assert equal(cutjax.einsum(equation, *args, optimize=optimize), jnp.einsum(equation, *args, optimize=optimize))
    ours, theirs = (
        re.findall(r"\w+\[[\d,]+\](?= = (?:cutjax_gemm|dot_general))", str(jax.make_jaxpr(f)(*args)))
        for f in (functools.partial(of.einsum, equation, optimize=optimize) for of in (cutjax, jnp))
    )
    assert len(ours) == len(theirs) == 2


@pytest.mark.versions
def test_the_path_object_and_another_dot_general():
    x, y = operands("ab,bc")
    path, _ = jnp.einsum_path("ab,bc->ac", x, y)
    assert equal(cutjax.einsum("ab,bc->ac", x, y, optimize=path), jnp.einsum("ab,bc->ac", x, y))
    called = []

    def other(*args, **kwargs):
        called.append(args)
        return jax.lax.dot_general(*args, **kwargs)

    assert equal(cutjax.einsum("ab,bc->ac", x, y, _dot_general=other), jnp.einsum("ab,bc->ac", x, y))
    assert len(called) == 1
    assert equal(jnp.einsum("ab,bc->ac", x, y, _dot_general=cutjax.dot_general), jnp.einsum("ab,bc->ac", x, y))


@pytest.mark.parametrize("first", range(1, 26, 25))  # after a change of what is copied: 1000
def test_random_contractions_permuted(first):
    """As of dot_general, but the result's axes in any order: written so, not copied where memory allows that."""
    ours = 0
    for seed in range(first, first + 25):
        case = random_case(seed)
        if case.dtypes[0] != case.dtypes[1]:
            continue  # which jax.numpy promotes, or refuses to
        with jax.enable_x64(case.wide):
            args = arguments(case)
            text = equation(case.lhs, case.rhs, case.dims, case.permutation)

            def einsum(of, x, y, dims, precision, preferred, text=text):
                return of.einsum(text, x, y, precision=precision, preferred_element_type=preferred)

            args[2] = np.asarray(args[2]).transpose(case.permutation)
            both = jax.jit(
                lambda *args, case=case: [checked(case, functools.partial(einsum, of))(*args) for of in (cutjax, jnp)]
            )
            with jax.numpy_dtype_promotion("standard"):
                got, want = both(*args)
                ours += "cutjax_gemm" in str(jax.make_jaxpr(both)(*args))
            assert jax.tree.all(jax.tree.map(equal, got, want)), case
    assert ours > 10  # the others are empty


CALLS = {
    "dot": [((3, 4), (4, 2)), ((4,), (4,)), ((), (3,)), ((3,), ()), ((), ()), ((2, 3, 4), (5, 4, 2)), ((3, 4), (4,))],
    "matmul": [
        ((3, 4), (4, 2)),
        ((4,), (4,)),
        ((4,), (4, 2)),
        ((2, 3, 4), (4,)),
        ((5, 1, 2, 3), (4, 3, 2)),
        ((1, 2, 3), (4, 3, 2)),
    ],
    "tensordot": [((2, 3, 4), (3, 4, 5))],
}


@pytest.mark.versions
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "dtypes",
    [("float32",) * 2, ("bfloat16",) * 2, ("int8", "float16"), ("bool", "complex64"), ("int32", "uint8")],
    ids=str,
)
def test_values_and_promotion(name, dtypes):
    with jax.numpy_dtype_promotion("standard"):
        calls = [
            [np.abs(integers(i, s)).astype(t) for i, (s, t) in enumerate(zip(shapes, dtypes, strict=True))]
            for shapes in CALLS[name]
        ]
        hows = {}, {"precision": "highest"}, {"preferred_element_type": "complex64"}

        def results(of, calls):
            return [getattr(of, name)(*args, **hows[i % 3]) for i, args in enumerate((*calls, *calls[:2]))]

        got, want = jax.jit(lambda calls: [results(of, calls) for of in (cutjax, jnp)])(calls)
        assert all(map(equal, got, want)), dtypes
    for args in (
        (2, jnp.ones(3)),
        (jnp.ones(3, jnp.bfloat16), 2.0),
        (np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)),
    ):
        if name == "dot":
            assert equal(cutjax.dot(*args), jnp.dot(*args))


@pytest.mark.parametrize("axes", [0, 1, 2, ((2, 1), (1, 0)), ([-1], [1]), (1, 0)], ids=str)
def test_tensordot_axes(axes):
    x, y = integers(0, (4, 3, 4)), integers(1, (3, 4, 4))
    x, y = (x, y) if axes != 1 else (x, integers(1, (4, 3, 4)))
    y = y if axes != 2 else integers(1, (3, 4, 2))
    assert equal(cutjax.tensordot(x, y, axes), jnp.tensordot(x, y, axes))


X = np.ones((2, 3), np.float32)
WRONG = {
    "shapes of dot": lambda of: of.dot(X, X),
    "a list for dot": lambda of: of.dot([1.0], [2.0]),
    "nothing for dot": lambda of: of.dot(None, X),
    "a scalar for matmul": lambda of: of.matmul(2.0, X),
    "shapes of matmul": lambda of: of.matmul(X, X),
    "batches of matmul": lambda of: of.matmul(np.ones((2, 3, 4)), np.ones((3, 4, 5))),
    "axes of tensordot": lambda of: of.tensordot(X, X, 3),
    "axes that are no axes": lambda of: of.tensordot(X, X, "ab"),
    "a letter of two sizes": lambda of: of.einsum("ab,ac->bc", X, X[:1].repeat(3, 0)),
    "too few operands": lambda of: of.einsum("ab,bc->ac", X),
    "an unknown letter": lambda of: of.einsum("ab->c", X),
    "a letter twice in the result": lambda of: of.einsum("ab->aa", X),
    "too many letters": lambda of: of.einsum("abc->a", X),
    "no equation": lambda of: of.einsum(X, X),
    "nothing for einsum": lambda of: of.einsum(),
    "a list for einsum": lambda of: of.einsum("a,a", [1.0], X[0]),
    "out": lambda of: of.einsum("ab->a", X, out=X),
    "a path": lambda of: of.einsum("ab,ab,ab->a", X, X, X, optimize="best"),
    "precision": lambda of: of.matmul(X, X.T, precision="best"),
    "mixed dtypes": lambda of: of.matmul(X, X.T.astype(jnp.bfloat16)),  # promotion is strict in tests
}


@pytest.mark.versions
@pytest.mark.parametrize("what", WRONG)
def test_errors_are_those_of_numpy(what):
    def error(of):
        with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever jax.numpy raises
            WRONG[what](of)
        return caught.type, str(caught.value)

    assert error(cutjax) == error(jnp)


@pytest.mark.versions
def test_batches_of_symbolic_size():
    (m,) = jax.export.symbolic_shape("m")
    x, w = jax.ShapeDtypeStruct((m, 4, 3), jnp.float32), jnp.ones((3, 5))
    for fn in (lambda x: cutjax.einsum("mab,bc->cma", x, w), lambda x: cutjax.matmul(x, w), lambda x: cutjax.dot(x, w)):
        assert jax.export.export(jax.jit(fn))(x).call(jnp.ones((2, 4, 3))).size == 40
