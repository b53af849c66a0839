"""syrk under every transformation, against plain JAX: what must hold whoever runs the product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

import cutjax
from cutjax.binding.rules import live

P = jax.P
LAYOUTS = ("n", "t")
M, K = 6, 5
H = jnp.bfloat16
EXPLICIT = jax.sharding.AxisType.Explicit
# The largest difference found of derivatives is 1.2e-6 of an array's largest value in f32, of second ones, and 2.7e-16
# in f64: other orders of adding. With 2 g for g + g^T it is 0.02 and more.
NEAR = {"float32": 4e-6, "float64": 1e-15}


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def integers(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """-2..2: every order of summation is exact, so results must be equal."""
    return jax.device_put(np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype))


def symmetric(seed: int, *batch: int) -> jax.Array:
    x = normal(seed, *batch, M, M)
    return x + x.mT


def plain(a: jax.Array, layout: str = "n") -> jax.Array:
    return jnp.matmul(a, a.mT) if layout == "n" else jnp.matmul(a.mT, a)


def same(got: Any, expected: Any) -> None:
    def check(x, y):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)

    jax.tree.map(check, got, expected)


def close(got: Any, expected: Any) -> None:
    def check(x, y):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, rtol=0, atol=NEAR[x.dtype.name] * np.abs(y).max())

    jax.tree.map(check, got, expected)


def compare(take: Callable[..., Any], functions: Any, *args: Any, check: Callable[..., None] = close) -> None:
    """Compares ``take(f)(*args)`` of two functions, in one program."""
    check(*jax.jit(lambda *args: [take(f)(*args) for f in functions])(*args))


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int32", "complex64", "float64", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype):
    with jax.enable_x64(dtype == "float64"):
        xs = [integers(i, *batch, M, K, dtype=dtype) for i, batch in enumerate([(), (3,), (2, 1, 3)])]

        def both(xs):
            wide = [x.astype("float32") if dtype.startswith("float8") else x for x in xs]
            expected = [plain(y, layout).astype(dtype) for y in wide for layout in LAYOUTS]
            return [cutjax.syrk(x, layout=layout) for x in xs for layout in LAYOUTS], expected

        same(*jax.jit(both)(xs))


@pytest.mark.parametrize(("dtype", "out"), [("bfloat16", "float32"), ("int8", "int32"), ("float32", "bfloat16")])
def test_out_dtype(dtype, out):
    a = jnp.full((M, 300), 3, dtype)
    got = cutjax.syrk(a, out_dtype=out)
    assert got.dtype == out
    np.testing.assert_array_equal(got, np.full((M, M), 2700).astype(out))


def test_weak_types_and_numpy_arrays():
    weak = jnp.broadcast_to(jax.jit(lambda x: x)(2.0), (2, 2))
    for x in (weak, jnp.ones((2, 2)), np.ones((2, 2), np.float32)):
        got, expected = (jax.jit(jax.value_and_grad(lambda x, f=f: f(x).sum()))(x) for f in (cutjax.syrk, plain))
        types = [[(y.dtype, y.weak_type) for y in values] for values in (got, expected)]
        assert types[0] == types[1]
    assert cutjax.syrk(weak).weak_type
    assert not cutjax.syrk(weak, out_dtype=jnp.float32).weak_type


def test_integers_have_no_gradient():
    s = jnp.float32(3)
    a = integers(0, M, K, dtype=jnp.int32)

    def f(s):
        return cutjax.syrk(a, epilogue=lambda acc, s: acc.astype(jnp.float32) * s, operands=(s,), out_dtype="float32")

    same(jax.grad(lambda s: f(s).sum())(s), plain(a).sum().astype(jnp.float32))


@jax.custom_vjp
def _activation(x):
    return jnp.tanh(x)


# Not the derivative of tanh: what rules say is what must come out.
_activation.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * jnp.cos(x),))


def fused(epilogue: Callable[..., Any], **how: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function by syrk, and the same in plain JAX."""
    return (
        lambda a, *operands: cutjax.syrk(a, epilogue=epilogue, operands=operands, **how),
        lambda a, *operands: epilogue(plain(a, how.get("layout", "n")), *operands),
    )


# Ours and plain JAX's, and the shapes of operands: "s" is symmetric.
FORMS: dict[str, tuple[tuple[Callable[..., Any], Callable[..., Any]], list[Any]]] = {
    "n": ((cutjax.syrk, plain), []),
    "t": ((functools.partial(cutjax.syrk, layout="t"), lambda a: plain(a, "t")), []),
    "elementwise": (fused(lambda acc: jnp.tanh(acc / 4)), []),
    "scalar": (fused(lambda acc, s: jnp.sin(acc * s)), [()]),
    "one a matrix": (fused(lambda acc, s: acc * acc * s, layout="t"), [(1, 1)]),
    "symmetric": (fused(lambda acc, s, x: jnp.tanh(acc * s + x) * x), [(), "s"]),
    "linear in acc": (fused(lambda acc, s, x: 2 * acc + s * x), [(), "s"]),
    "two results": (fused(lambda acc, x: (acc * x, jnp.exp(-acc * acc / 16)), layout="t"), ["s"]),
    "reductions": (fused(lambda acc, x: (acc * x, acc.sum(-1), acc.min((-2, -1)))), ["s"]),
    "custom_vjp": (fused(lambda acc, x: _activation(acc / 4 + x)), ["s"]),
    "recompute": (fused(lambda acc, s, x: jnp.tanh(acc * s + x), save="recompute"), [(), "s"]),
}


def arguments(name: str, *batch: int) -> list[jax.Array]:
    layout = "t" if name in ("t", "one a matrix", "two results") else "n"
    found = [normal(0, *batch, *((M, K) if layout == "n" else (K, M)))]
    for i, shape in enumerate(FORMS[name][1]):
        found.append(symmetric(i + 1, *batch) if shape == "s" else normal(i + 1, *(batch if shape else ()), *shape))
    return found


def loss(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A scalar whose cotangents are not symmetric, with second derivatives."""

    def scalar(*args):
        outs = jax.tree.leaves(f(*args))
        return sum((jnp.sin(y) * normal(9 + i, *y.shape[-2:], dtype=y.dtype)).sum() for i, y in enumerate(outs))

    return scalar


@pytest.mark.parametrize("name", FORMS)
def test_derivatives(name):
    """Values, both modes, and both ways to multiply with the second derivative; batched."""
    args = arguments(name, 2)
    dots = [normal(20 + i, *x.shape) for i, x in enumerate(args)]
    wrt = tuple(range(len(args)))

    def take(f):
        gradient = jax.grad(loss(f), wrt)

        def all_of_them(args, dots):
            found = [f(*args), gradient(*args), jax.vjp(gradient, *args)[1](tuple(dots))]
            if name != "custom_vjp":
                found += [jax.jvp(f, args, dots)[1], jax.jvp(gradient, args, dots)[1]]
            return found

        return all_of_them

    compare(take, FORMS[name][0], args, dots)


@pytest.mark.parametrize("name", ["n", "t", "symmetric"])
def test_derivatives_in_64_bits(name):
    with jax.enable_x64(True):
        args = [x.astype(jnp.float64) / 3 for x in arguments(name)]  # of 53 bits
        compare(lambda f: jax.value_and_grad(loss(f), tuple(range(len(args)))), FORMS[name][0], *args)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out", [None, "float32"])
def test_gradients_of_16_bits_round_the_sum_once(dtype, out):
    """g + g^T is added in float32 and rounded to a's dtype: not g, where the result is wider. Eager: XLA fuses less."""
    a, g = integers(0, M, K, dtype=dtype), normal(1, M, M, dtype=out or dtype)
    (got,) = jax.vjp(functools.partial(cutjax.syrk, out_dtype=out), a)[1](g)
    wide = np.asarray(g, np.float32)
    rounded = (wide + wide.T).astype(dtype).astype(np.float32)
    same(got, jnp.asarray(rounded @ np.asarray(a, np.float32), dtype))  # of six numbers that are -2..2 each


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap(layout, axis):
    a = jnp.stack([integers(i, M, K) for i in range(3)], axis)

    def take(f):
        return lambda a: [jax.vmap(functools.partial(f, layout=layout), axis, out)(a) for out in range(3)]

    compare(take, (cutjax.syrk, plain), a, check=same)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("recompute", (0, None, None)),
        ("symmetric", (None, 0, None)),
        ("recompute", (None, None, 0)),
        ("symmetric", (1, None, 2)),
    ],
    ids=str,
)
def test_vmap_of_operands(name, axes):
    """Also where nothing but an operand is mapped; values, gradients under vmap, and vmap under gradients."""
    args = [
        x if axis is None else jnp.stack([x, x / 2, -x], axis) for x, axis in zip(arguments(name), axes, strict=True)
    ]

    def take(f):
        def all_of_them(*args):
            summed = jax.grad(lambda *args: jax.vmap(loss(f), axes)(*args).sum(), (0, 1, 2))(*args)
            return jax.vmap(f, axes)(*args), jax.vmap(jax.grad(loss(f), (0, 1, 2)), axes)(*args), summed

        return all_of_them

    compare(take, FORMS[name][0], *args)


def test_vmap_nested():
    a, s, x = normal(0, 2, 3, M, K), normal(1, 3), symmetric(2, 2)

    def take(f):
        inner = jax.vmap(f, (0, 0, None))
        gradient = jax.vmap(jax.grad(loss(f), (0, 1, 2)), (0, 0, None))
        return lambda *args: [jax.vmap(g, (0, None, 0))(*args) for g in (inner, gradient)]

    compare(take, FORMS["symmetric"][0], a, s, x)


def test_scan():
    def iterate(f):
        def body(x, _):
            return jnp.matmul(f(x), x) / 8, None

        return lambda a: lax.scan(body, a, None, length=3)[0]

    a = normal(0, 2, M, K) / 2
    compare(lambda f: jax.value_and_grad(lambda a: (iterate(f)(a) ** 2).sum()), (cutjax.syrk, plain), a)


# Several devices.


def mesh_of(kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((4, 2), ("i", "j"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("order", ["grad outside", "grad inside"])
def test_shard_map(order):
    """The batch over one axis, the contraction over the other, added by hand; check_vma."""
    a, s = integers(0, 4, M, 8), jnp.float32(2)
    spec = P("i", None, "j")

    def total(f, a, s):
        return (f(a) * s).sum()

    def local(a, s):
        return lax.psum(total(cutjax.syrk, a, s), ("i", "j"))

    def ours(a, s):
        shard = functools.partial(jax.shard_map, mesh=mesh_of(), in_specs=(spec, P()))
        if order == "grad outside":
            return jax.grad(shard(local, out_specs=P()), (0, 1))(a, s)
        return shard(jax.grad(local, (0, 1)), out_specs=(spec, P()))(a, s)

    same(jax.jit(ours)(a, s), jax.grad(functools.partial(total, plain), (0, 1))(a, s))


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_jit_over_several_devices(kind, layout):
    a = integers(0, 4, 8, 8)
    spec = P("i", None, "j") if layout == "n" else P("i", "j", None)

    def f(product, a):
        return (product(a, layout=layout) ** 2).sum()

    expected = jax.value_and_grad(functools.partial(f, plain))(a)
    with jax.set_mesh(mesh_of(kind)):
        a = jax.device_put(a, jax.NamedSharding(mesh_of(kind), spec))
        got = jax.jit(jax.value_and_grad(functools.partial(f, cutjax.syrk)))(a)
        if kind == EXPLICIT:
            assert got[1].sharding.spec == spec
            assert jax.jit(functools.partial(cutjax.syrk, layout=layout))(a).sharding.spec == P("i", None, None)
    same(got, expected)


@pytest.mark.parametrize(("layout", "spec"), [("n", P("i", None)), ("t", P(None, "i"))])
def test_rows_over_an_explicit_mesh_are_refused(layout, spec):
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        a = jax.device_put(integers(0, 8, 8), jax.NamedSharding(mesh, spec))
        with pytest.raises(NotImplementedError, match=r"syrk: a is .*rows are divided over the mesh axis 'i'.*reshard"):
            cutjax.syrk(a, layout=layout)


# What derivatives keep.


def products(fn: Callable[..., Any], *args: Any) -> int:
    """How many products a call makes."""

    def count(jaxpr):
        own = sum(eqn.primitive.name in ("dot_general", "cutjax_gemm", "cutjax_syrk") for eqn in jaxpr.eqns)
        return own + sum(count(sub) for eqn in jaxpr.eqns for sub in core.jaxprs_in_params(eqn.params))

    traced = jax.jit(fn).trace(*args)
    return count(live(getattr(traced.jaxpr, "jaxpr", traced.jaxpr)))


def two_layers(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jnp.sin(f(jnp.sin(f(x)))).sum()


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("epilogue", [None, jnp.tanh])
def test_checkpoint_policies(policy, batch, epilogue):
    """What is saved is not multiplied again: everything, or what has no batch."""
    a = normal(0, *batch, M, M)
    f = two_layers(functools.partial(cutjax.syrk, epilogue=epilogue))
    kept = jax.value_and_grad(jax.checkpoint(f, policy=getattr(cutjax.checkpoint_policies, policy)))
    again = bool(batch) and policy != "dots_saveable"
    assert products(jax.value_and_grad(f), a) == 4
    assert products(kept, a) == (6 if again else 4)
    close(jax.jit(kept)(a)[1], jax.jit(jax.grad(f))(a))


def test_recompute_multiplies_again():
    a = normal(0, M, K)
    for save, count in (("default", 2), ("recompute", 3)):
        f = functools.partial(cutjax.syrk, epilogue=jnp.tanh, save=save)
        assert products(jax.value_and_grad(lambda a, f=f: f(a).sum()), a) == count
