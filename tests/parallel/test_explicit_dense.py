"""Dense products of operands on explicit mesh axes, beside jnp's: the same result, lying alike, or the same refusal."""

from __future__ import annotations

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, mesh_of
from jax import lax

import cutjax

P = jax.P
MESH = mesh_of(jax.sharding.AxisType.Explicit, d=2, m=4)
DRAWS = 3  # of each form; 12 to 60 while this was written


def specs(rank: int) -> list[jax.P]:
    """Every way to divide an array over the two axes of the mesh, each or both, in either order."""
    found = set()
    for over in itertools.product([None, "d", "m", ("d", "m"), ("m", "d")], repeat=rank):
        names = [name for axes in over if axes for name in ((axes,) if isinstance(axes, str) else axes)]
        if len(set(names)) == len(names):
            found.add(P(*over))
    return sorted(found, key=str)


def transposed(x, w, **how):
    return jnp.matmul(x.T, w.T, **how)


# What is multiplied: shapes, ours and jnp's; the axes of 8 and 16 divide evenly by all.
DIMS = (((2,), (1,)), ((0,), (0,)))
FORMS = {
    "matmul": ((16, 8), (8, 16), cutjax.matmul, jnp.matmul),
    "gemm": ((16, 8), (8, 16), cutjax.gemm, jnp.matmul),
    "gemm tt": ((8, 16), (16, 8), functools.partial(cutjax.gemm, layout="tt"), transposed),
    "gemm of a batch": ((8, 16, 8), (8, 16), cutjax.gemm, jnp.matmul),
    "gemm of two batches": ((8, 16, 8), (8, 8, 16), cutjax.gemm, jnp.matmul),
    "gemm of a batch of matrices": ((16, 8), (8, 8, 16), cutjax.gemm, jnp.matmul),
    "matmul of a batch": ((8, 16, 8), (8, 16), cutjax.matmul, jnp.matmul),
    "dot": ((8, 16, 8), (8, 16), cutjax.dot, jnp.dot),
    "matmul of a vector": ((8,), (8, 16), cutjax.matmul, jnp.matmul),
    "tensordot": ((8, 8, 16), (8, 16, 8), cutjax.tensordot, jnp.tensordot),
    "einsum": (
        (8, 16, 8),
        (8, 8, 8),
        functools.partial(cutjax.einsum, "bsk,khd->bshd"),
        functools.partial(jnp.einsum, "bsk,khd->bshd"),
    ),
    "dot_general": (
        (8, 16, 8),
        (8, 8, 16),
        functools.partial(cutjax.dot_general, dimension_numbers=DIMS),
        functools.partial(lax.dot_general, dimension_numbers=DIMS),
    ),
    "with an epilogue": (
        (16, 8),
        (8, 16),
        lambda x, w, **how: cutjax.gemm(x, w, epilogue=lambda acc: jax.nn.relu(acc) + 1, **how),
        lambda x, w, **how: jax.nn.relu(jnp.matmul(x, w, **how)) + 1,
    ),
}  # fmt: skip


def outcome(fn, x, w):
    """Its value and gradients, each with how it lies; or the kind of its refusal."""

    def loss(x, w):
        y = fn(x, w)
        return sum((z * (lax.stop_gradient(z) % 3 - 1)).sum() for z in jax.tree.leaves(y)), y

    try:
        grads, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, w)
    except Exception as error:
        return type(error).__name__
    return [(np.asarray(z), z.sharding.spec, z.dtype) for z in jax.tree.leaves((y, grads))]


def check(ours, plain, x, w, of_x, of_w, **how):
    with jax.set_mesh(MESH):
        there = jax.device_put(x, of_x), jax.device_put(w, of_w)
        expected = outcome(functools.partial(plain, **how), *there)
        got = outcome(functools.partial(ours, **how), *there)
    if isinstance(expected, str) or isinstance(got, str):
        assert got == expected, (of_x, of_w, how)
        return
    for (y, lies, dtype), (want, there, kind) in zip(got, expected, strict=True):
        assert (lies, dtype) == (there, kind), (of_x, of_w, how)
        np.testing.assert_array_equal(y, want, err_msg=str((of_x, of_w, how)))


def drawn(name: str, count: int):
    form = FORMS[name]
    pairs = list(itertools.product(specs(len(form[0])), specs(len(form[1]))))
    return random.Random(name).sample(pairs, min(count, len(pairs)))


@pytest.mark.parametrize("name", FORMS)
def test_each_pair_of_specs(name):
    of_x, of_w, ours, plain = FORMS[name]
    for pair in drawn(name, DRAWS):
        check(ours, plain, integers(0, of_x), integers(1, of_w), *pair)


def test_epilogues():
    """What an operand divides further, and results of several kinds, lie as in plain jnp."""

    def epilogue(acc, bias):
        y = jax.nn.relu(acc + bias)
        return y, y.sum(-1), jnp.max(y, -2), (acc - bias).sum()

    draw = random.Random(0)
    for _ in range(DRAWS):
        of = [draw.choice(specs(rank)) for rank in (3, 2, 1)]
        put = lambda seed, shape, spec: jax.device_put(integers(seed, shape), spec)  # noqa: E731
        with jax.set_mesh(MESH):
            x, w, b = (put(i, shape, of[i]) for i, shape in enumerate(((8, 8, 16), (16, 8), (8,))))
            ours = outcome(lambda x, w, b=b: cutjax.gemm(x, w, epilogue=epilogue, operands=(b,)), x, w)
            plain = outcome(lambda x, w, b=b: epilogue(x @ w, b), x, w)
        assert str(ours) == str(plain), of


def test_mlp_of_weights_that_lie_in_any_way():
    """Values and gradients are those on one device; the result lies as rows of x and columns of w2."""
    args = integers(0, (8, 16, 8)), integers(1, (8, 16)), integers(2, (16, 8))
    f = lambda x, w, v: cutjax.mlp(x, w % 2, v % 2, activation=jax.nn.relu, gate=w % 2).sum()  # noqa: E731
    expected = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*args)
    draw = random.Random(1)
    for _ in range(DRAWS // 2):
        of = [draw.choice(specs(x.ndim)) for x in args]
        with jax.set_mesh(MESH):
            there = list(map(jax.device_put, args, of))
            got = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*there)
        assert [g.sharding.spec for g in got[1]] == of
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(expected))


def test_asked_for():
    """With an out_sharding: what lax adds up over devices, puts together or divides; or refuses."""
    of_x, of_w, outs = specs(2), specs(2), specs(2)
    draw = random.Random(0)
    for _ in range(DRAWS):
        pair = draw.choice(of_x), draw.choice(of_w)
        out = draw.choice(outs)
        for name in ("matmul", "gemm", "with an epilogue"):
            x, w, ours, plain = FORMS[name]
            check(ours, plain, integers(0, x), integers(1, w), *pair, out_sharding=out)


@pytest.mark.parametrize("explicit", ["d", "m"])
def test_a_mesh_of_explicit_and_automatic_axes(explicit):
    """Results lie where their types say, along the axis that has types; XLA divides over the other."""
    kinds = tuple(getattr(jax.sharding.AxisType, "Explicit" if x == explicit else "Auto") for x in "dm")
    mesh, automatic = jax.make_mesh((2, 4), ("d", "m"), axis_types=kinds), "m" if explicit == "d" else "d"
    x, w = integers(0, (8, 16)), integers(1, (16, 8))
    some = [P(explicit, None), P(None, explicit), P(None, None)]
    with jax.set_mesh(mesh):
        for of_x, of_w in random.Random(explicit).sample(list(itertools.product(some, some)), DRAWS):
            there = jax.device_put(x, of_x), jax.device_put(w, of_w)

            def within(f, x, w, of_w=of_w):
                w = lax.with_sharding_constraint(w, P(of_w[0], automatic)) if of_w[1] is None else w
                return f(x, w)

            found = [outcome(functools.partial(within, f), *there) for f in (jnp.matmul, cutjax.gemm, cutjax.matmul)]
            assert str(found[1]) == str(found[2]) == str(found[0]), (of_x, of_w)


@pytest.mark.parametrize(("up", "gate"), [(None, "m"), ("m", None)])
def test_gradients_of_a_gate_lie_as_its_weights(gate, up):
    """Each as its own, where gate and up are divided differently."""

    def plain(x, u, d, g):
        return (jnp.tanh(x @ g) * (x @ u)) @ d

    def ours(x, u, d, g):
        return cutjax.mlp(x, u, d, gate=g, activation=jnp.tanh)

    shapes = (((8, 8), P()), ((8, 16), P(None, up)), ((16, 8), P()), ((8, 16), P(None, gate)))
    with jax.set_mesh(MESH):
        args = [jax.device_put(integers(i, shape) / 8, spec) for i, (shape, spec) in enumerate(shapes)]
        grads = [jax.jit(jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1, 2, 3)))(*args) for f in (ours, plain)]
        for x, y in zip(*grads, strict=True):
            assert jax.typeof(x) == jax.typeof(y)
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)  # sums in another order


def test_several_weights_on_a_mixed_mesh():
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit))
    with jax.set_mesh(mesh):
        put = lambda i, shape, *spec: jax.device_put(integers(i, shape), jax.NamedSharding(mesh, P(*spec)))  # noqa: E731
        x, a, b = put(0, (8, 8), None, ("d", "m")), put(1, (8, 16), None, ("m", "d")), put(2, (8, 16), None, "m")
        got = jax.jit(lambda x, a, b: cutjax.gemm(x, (a, b), epilogue=lambda p, q: p * q))(x, a, b)
        expected = jax.jit(lambda x, a, b: (x @ a) * (x @ b))(x, a, b)
        assert jax.typeof(got) == jax.typeof(expected)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.versions
def test_what_is_whole_on_an_explicit_axis_lies_whole_beside_an_automatic_one():
    """The gradient of a whole w where x is divided, and a result that something divides later."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit))

    def program(f, x, w):
        y = f(w, w)
        return jax.grad(lambda w: jnp.sin(f(x, w)).sum())(w), y, jax.reshard(y, P("m"))

    with jax.set_mesh(mesh):
        args = jax.device_put(integers(0, (2, 8)), P(None, "m")), jax.device_put(integers(1, (8, 8)), P())
        for f in (cutjax.gemm, lambda x, w: cutjax.gemm(x, w, epilogue=jnp.sin)):
            gradient, whole, divided = jax.jit(functools.partial(program, f))(*args)
            assert not any((*gradient.sharding.spec, *whole.sharding.spec))
            assert divided.sharding.spec[0] == "m"


def test_sums_over_axes_are_refused():
    """What types call reduced over a mesh axis, or yet to be: drop-ins leave it to XLA, all else names what it got."""
    with jax.set_mesh(jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])):
        whole, square = jax.device_put(jnp.ones((8, 8)), P()), jnp.ones((2, 8, 8))
        reduced = jax.device_put(whole, P(None, None, reduced={"d"}))
        sizes, groups = jnp.array([3, 5]), jax.device_put(square, P(None, None, None, reduced={"d"}))
        calls = {
            "gemm": lambda: cutjax.gemm(reduced, whole),
            "mlp": lambda: cutjax.mlp(whole, reduced, whole),
            "syrk": lambda: cutjax.syrk(reduced),
            "grouped_gemm": lambda: cutjax.grouped_gemm(whole, groups, sizes),
            "conv": lambda: cutjax.conv(whole[None], jax.device_put(square, P(None, None, None, reduced={"d"}))),
            "linear_cross_entropy": lambda: cutjax.linear_cross_entropy(whole, reduced, jnp.zeros(8, jnp.int32)),
        }
        for name, call in calls.items():
            with pytest.raises(NotImplementedError, match=rf"^{name}: operands must not be reduced.*\{{R:d\}}"):
                call()
        columns, rows = (jax.device_put(whole, P(*spec)) for spec in ((None, "d"), ("d",)))
        partial = P(None, None, unreduced={"d"})
        with pytest.raises(NotImplementedError, match=r"^gemm: results must not be reduced"):
            cutjax.gemm(columns, rows, out_sharding=partial)
        for fn in (jnp.matmul, cutjax.matmul):
            assert jax.typeof(fn(columns, rows, out_sharding=partial)).sharding.spec == partial
