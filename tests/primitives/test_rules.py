"""Functions with derivatives of their own in epilogues: each derivative is that of f(a @ b) in plain JAX."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_rules import ELEMENTWISE, OTHERS, clip, lsq, normed

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.primitives.derivative import differentiated

X, W, B = (
    np.asarray(jax.random.normal(jax.random.key(seed), shape))
    for seed, shape in enumerate(((3, 5, 6), (6, 4), (4,)), start=3)
)
W2, SIZES = np.stack([W, 0.5 * W]), np.array([2, 2], np.int32)


class Refused:
    """A derivative that is refused, and the error."""

    def __init__(self, error):
        self.error = error


def derivative(take, fn, *args):
    try:
        return jax.jit(take(fn))(*args)
    except (TypeError, NotImplementedError) as error:  # TypeError: what JAX says to the forward mode of a custom_vjp
        return Refused(error)


def agree(got, wanted, what=""):
    if isinstance(wanted, Refused):
        assert isinstance(got, Refused), f"{what}: {got}"
        return
    if isinstance(got, Refused):
        raise got.error
    jax.tree.map(lambda x, y: _close(np.asarray(x), np.asarray(y), what), got, wanted)


def _close(got, wanted, what):
    # sin(3 y) of results up to 100, and its second derivative, magnify f32's rounding by up to a thousand; a rule that
    # is left out, or taken twice, is off by the size of the whole.
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), err_msg=what)
    got, wanted = np.nan_to_num(got), np.nan_to_num(wanted)
    error, size = np.abs(got - wanted).max(initial=0), np.abs(wanted).max(initial=0)
    assert error <= 2e-4 * size + 1e-5, f"{what}: off by {error} of {size}"


def tangent(args):
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), args)


GRADIENT = {"grad": lambda f: lambda *args: jax.grad(f, range(len(args)))(*args)}
DERIVATIVES = {
    "jvp": lambda f: lambda *args: jax.jvp(f, args, tangent(args))[1],
    "forward over reverse": lambda f: lambda *args: jax.jvp(jax.grad(f, range(len(args))), args, tangent(args)),
    "reverse over reverse": lambda f: jax.grad(lambda *args: sum(jnp.vdot(*p) for p in _pairs(jax.grad(f), args))),
    "jit of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
}


def _pairs(grad, args):
    found = grad(*args)
    return [(found, tangent(found))]


def check(fn, *operands, x=X[0], w=W, takes=DERIVATIVES, forward=True):
    """Compares fn(x @ w, *operands) in an epilogue with plain JAX: its values and its derivatives in everything."""

    def fused(x, w, *operands):
        return cutjax.gemm(x, w, epilogue=fn, operands=operands)

    def plain(x, w, *operands):
        return fn(x @ w, *operands)

    def loss(product):
        return lambda *args: sum(jnp.sum(jnp.sin(3 * y)) for y in jax.tree.leaves(product(*args)))

    args = (x, w, *operands)
    if forward:
        agree(*jax.jit(lambda *args: (fused(*args), plain(*args)))(*args))
    all_of(takes, loss(fused), loss(plain), args)


def both(take, fused, plain, args, what=""):
    all_of({what: take}, fused, plain, args)


def all_of(takes, fused, plain, args):
    """Compares the derivatives of two functions, in one program unless one of them is refused."""
    try:
        found = jax.jit(lambda *args: {k: [take(f)(*args) for f in (fused, plain)] for k, take in takes.items()})(*args)
    except (TypeError, NotImplementedError):
        if len(takes) > 1:
            for name, take in (GRADIENT | takes).items():  # else forward over reverse has the gradient in it
                both(take, fused, plain, args, name)
            return
        found = {name: [derivative(take, f, *args) for f in (fused, plain)] for name, take in takes.items()}
    for name, pair in found.items():
        agree(*pair, name)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_rules(name):
    check(ELEMENTWISE[name])


@pytest.mark.parametrize("name", OTHERS)
def test_other_rules(name):
    fn, operands = OTHERS[name]
    check(fn, *operands)


@pytest.mark.parametrize("fn", [lambda v: clip(3 * normed(v)), lambda v: normed(clip(3 * v))])
def test_rules_of_both_kinds_beside_each_other(fn):
    """A custom_jvp that is taken outside beside a custom_vjp that need not be: reverse mode is all that there is."""

    def gradient(layer):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(layer)(x)))))(X)

    agree(
        gradient(lambda x: cutjax.mlp(x, W, W.T, activation=fn)),
        gradient(lambda x: fn(x @ W) @ W.T),
    )


def test_a_key_beside_a_rule():
    key = jax.random.key(2)

    def loss(product):
        gradient = jax.jit(jax.grad(lambda x, s, k: jnp.sum(jnp.sin(product(x, s, k))), (0, 1)))
        return gradient(X[0], np.float32(0.3), key)

    def fn(v, s, k):
        return lsq(v, s) * jax.random.uniform(k, v.shape)

    fused = loss(lambda x, s, k: cutjax.gemm(x, W, epilogue=fn, operands=(s, k)))
    agree(fused, loss(lambda x, s, k: fn(x @ W, s, k)))


def test_the_derivative_of_captured_arrays():
    def loss(product):
        return lambda x, b: jnp.sum(jnp.sin(product(x, lambda v: lsq(v, b[0]) + clip(b))))

    fused = loss(lambda x, fn: cutjax.gemm(x, W, epilogue=fn))
    plain = loss(lambda x, fn: fn(x @ W))
    agree(*jax.jit(lambda *args: [jax.grad(f, (0, 1))(*args) for f in (fused, plain)])(X[0], B))


@pytest.mark.parametrize("name", [*list(ELEMENTWISE)[::2], *OTHERS])
def test_vmap_and_batch_axes(name):
    fn, operands = OTHERS.get(name) or (ELEMENTWISE[name], ())

    def loss(product, *args):
        return jnp.sum(jnp.sin(3 * product(*args)))

    def fused(x, *operands):
        return cutjax.gemm(x, W, epilogue=fn, operands=operands)

    def plain(x, *operands):
        return fn(x @ W, *operands)

    for in_axes in [(0, *(None for _ in operands)), *([(None, *(0 for _ in operands))] if operands else [])]:
        given = zip(map(np.asarray, (X[0], *operands)), in_axes, strict=True)
        args = [np.stack([y, 2 * y]) if axis == 0 else y for y, axis in given]
        numbers = range(len(args))
        takes = {
            "sum": lambda f: jax.grad(lambda *a, f=f: loss(jax.vmap(f, in_axes), *a), numbers),  # noqa: B023
            "each": lambda f: jax.vmap(jax.grad(functools.partial(loss, f), numbers), in_axes),  # noqa: B023
        }
        all_of({f"{name} {in_axes} {how}": take for how, take in takes.items()}, fused, plain, args)
    if name != "scales of fp8":  # whose maximum is over the batch here
        axes = [np.broadcast_to(y, X.shape[:1] + y.shape) if y.ndim > 1 else y for y in operands]
        numbers = range(1 + len(axes))
        both(lambda f: jax.grad(functools.partial(loss, f), numbers), fused, plain, (X, *axes))


@pytest.mark.parametrize(
    ("name", "gated"),
    [*((name, i % 2 == 0) for i, name in enumerate(list(ELEMENTWISE)[::2])), ("forward rule with a mean", True)],
)
def test_layers_of_two_products(name, gated):
    fn = ELEMENTWISE.get(name) or normed
    v = W.T

    def loss(layer):
        return lambda x, w, v: jnp.sum(jnp.sin(3 * layer(x, w, v)))

    fused = loss(lambda x, w, v: cutjax.mlp(x, w, v, activation=fn, gate=0.5 * w if gated else None))
    plain = loss(lambda x, w, v: (fn(x @ (0.5 * w)) * (x @ w) if gated else fn(x @ w)) @ v)
    recomputed = loss(
        lambda x, w, v: cutjax.mlp(x, w, v, activation=fn, gate=0.5 * w if gated else None, save="recompute")
    )

    both(DERIVATIVES["forward over reverse"], fused, plain, (X, W, v))
    both(GRADIENT["grad"], recomputed, plain, (X[0], W, v))


@pytest.mark.parametrize("name", [*list(ELEMENTWISE)[1::2], *OTHERS])
def test_groups(name):
    fn, operands = OTHERS.get(name) or (ELEMENTWISE[name], ())
    inside = jnp.arange(5)[:, None] < 4  # the last row is of no group

    def plain(x, w, *operands):
        acc = jnp.concatenate([x[:2] @ w[0], x[2:4] @ w[1], jnp.zeros((1, 4))])
        return jnp.where(inside, fn(acc, *operands), 0.0)

    def fused(x, w, *operands):
        return cutjax.grouped_gemm(x, w, SIZES, epilogue=fn, operands=operands)

    def loss(product):
        return lambda *args: jnp.sum(jnp.sin(3 * product(*args)))

    take = "forward over reverse" if name in OTHERS else "grad"  # the one has the other in it
    both((GRADIENT | DERIVATIVES)[take], loss(fused), loss(plain), (X[0], W2, *operands), take)


def test_operands_of_groups():
    bias = jnp.stack([B, -B])[:, None]

    def fused(x, bias):
        return jnp.sum(cutjax.grouped_gemm(x, W2, SIZES, epilogue=lambda v, b: 3 * (v + clip(b)), operands=(bias,)))

    rows = np.ravel(jax.jit(jax.grad(fused, 1))(X[0], bias))
    np.testing.assert_allclose(rows, 2.0)  # two rows in a group, each cotangent of 3 clipped to 1


def test_grouped_layers():
    def loss(layer):
        return lambda x, w: jnp.sum(3 * layer(x, w))

    fused = loss(lambda x, w: cutjax.grouped_mlp(x, w, jnp.swapaxes(w, 1, 2), SIZES, activation=clip))
    plain = loss(lambda x, w: jnp.concatenate([clip(x[2 * i : 2 * i + 2] @ w[i]) @ w[i].T for i in (0, 1)]))
    agree(*jax.jit(lambda *args: [jax.grad(f, (0, 1))(*args) for f in (fused, plain)])(X[0], W2))


def test_a_rule_that_raises_runs_forward():
    def backward(_, g):
        raise RuntimeError("no derivative")

    forward = jax.custom_vjp(lambda x: 2 * x)
    forward.defvjp(lambda x: (2 * x, None), backward)
    expected = 2 * (np.asarray(X[0]) @ np.asarray(W))
    np.testing.assert_allclose(cutjax.gemm(X[0], W, epilogue=forward), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="no derivative"):
        jax.grad(lambda x: cutjax.gemm(x, W, epilogue=forward).sum())(X[0])


def test_a_reduction_over_groups_is_refused_by_name():
    def fn(v, s):
        y = lsq(v, s)
        return y, y.sum(0)

    args = X[0], W2, SIZES
    cutjax.grouped_gemm(*args, epilogue=fn, operands=(jnp.float32(0.3),))
    with pytest.raises(NotImplementedError, match=r"reduction over rows in groups.*custom_vjp lsq"):
        jax.grad(lambda x: cutjax.grouped_gemm(x, W2, SIZES, epilogue=fn, operands=(jnp.float32(0.3),))[0].sum())(X[0])


def test_forward_mode_of_a_custom_vjp_is_refused_as_jax_refuses_it():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: cutjax.gemm(x, W, epilogue=clip), (X[0],), (X[0],))


def test_what_each_element_has_stays_in_the_kernel():
    """Such as what the backward pass of a layer makes of its accumulators: softplus's rule calls softplus."""
    acc = jax.ShapeDtypeStruct((5, 4), jnp.float32)
    for fn in (lambda v, z: v * jax.nn.softplus(z), lambda v, z: jax.vjp(jax.nn.softplus, z)[1](v)[0]):
        assert len(trace(fn, [acc], (jnp.ones((5, 4)),)).operands) == 1
    assert (
        len(trace(lambda v, b: v * clip(b) * b, [acc], (B,)).operands) == 2
    )  # its cotangents are added up before clip


def test_dropout_beside_a_rule_keeps_its_bits():
    """The values beside a derivative are traced from the expression: its random bits stay one node."""

    def fn(v, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, v.shape), jax.nn.relu(v), 0.0)

    acc = jax.ShapeDtypeStruct((5, 4), jnp.float32)
    traced = trace(fn, [acc], (jax.random.key(0),))
    again = differentiated(traced.epilogue, acc, traced.operands, (True,), (False, False))
    assert sorted(x.op for x in again.epilogue.primal.nodes) == sorted(x.op for x in traced.epilogue.primal.nodes)
    check(fn, jax.random.key(0), takes={"grad": lambda f: jax.grad(f, (0, 1))})


def test_eager_calls_of_functions_with_rules_compile_once():
    key = jax.monitoring
    seen = []
    key.register_event_duration_secs_listener(lambda name, *_, **__: seen.append(name))
    cutjax.gemm(X[0], W, epilogue=jax.nn.relu).block_until_ready()
    before = seen.count("/jax/core/compile/backend_compile_duration")
    cutjax.gemm(X[0], W, epilogue=jax.nn.relu).block_until_ready()
    assert seen.count("/jax/core/compile/backend_compile_duration") == before


def test_fp8_layers_of_flax():
    fp8_ops = pytest.importorskip("flax.linen.fp8_ops")
    scale, history = jnp.float32(0.5), jnp.zeros(8)

    def loss(product):
        def run(x, scale, history):
            def epilogue(v, scale, history):
                v = fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, v, scale, history)
                return fp8_ops.out_qdq(jnp.float32, jnp.float8_e5m2, v, scale, history)

            return jnp.sum(jnp.sin(product(x, epilogue, scale, history)))

        return jax.jit(jax.grad(run, (0, 1, 2)))

    fused = loss(lambda x, fn, *operands: cutjax.gemm(x, W, epilogue=fn, operands=operands))
    plain = loss(lambda x, fn, *operands: fn(x @ W, *operands))
    agree(fused(X[0], scale, history), plain(X[0], scale, history))


FORWARDS = [
    jnp.sin,
    jnp.tanh,
    lambda x: jnp.round(x),
    lambda x: x * x,
    lambda x: jnp.maximum(x, 0.1),
    lambda x: 0.7 * x,
]
BACKWARDS = [
    lambda x, g: g,
    lambda x, g: g * jnp.cos(x),
    lambda x, g: jnp.clip(g, -0.5, 0.5),
    lambda x, g: jnp.where(x > 0, 2 * g, 0.0),
    lambda x, g: g * g,
    lambda x, g: jnp.sign(g) * jnp.abs(x),
    lambda x, g: g - jnp.mean(g),
]
PUSHES = [
    lambda x, t: t,
    lambda x, t: t * jnp.cos(x),
    lambda x, t: jnp.where(x > 0, 2 * t, 0.5 * t),
    lambda x, t: t + jnp.mean(t) * x,
]


def random_function(choose):
    """A random function with a rule; the rule may call the function itself, another one, or neither."""
    forward, other = choose.choice(FORWARDS), choose.choice(FORWARDS)
    again = choose.choice(["itself", "plain", "other"])
    if choose.random() < 0.5:
        fn = jax.custom_jvp(lambda x: forward(x))
        push = choose.choice(PUSHES)
        value = {"itself": fn, "plain": forward, "other": lambda x: forward(x) + other(x) - other(x)}[again]
        fn.defjvp(lambda primals, tangents: (value(*primals), push(*primals, *tangents)))
        return fn
    fn = jax.custom_vjp(lambda x: forward(x))
    backward = choose.choice(BACKWARDS)
    value = {"itself": fn, "plain": forward, "other": lambda x: forward(x) + other(x) - other(x)}[again]
    fn.defvjp(lambda x: (value(x), x), lambda x, g: (backward(x, g),))
    return fn


def random_epilogue(choose):
    functions = [random_function(choose) for _ in range(choose.randint(1, 3))]
    ways = [choose.randint(0, 3) for _ in functions]
    on_bias = choose.random() < 0.3

    def epilogue(v, b):
        y = v + (functions[0](b) if on_bias else b)
        for fn, way in zip(functions, ways, strict=True):
            y = [fn(y), y * fn(0.5 * y), fn(y) + jnp.sin(v), fn(fn(y))][way]
        return y

    return epilogue


@pytest.mark.parametrize("seed", range(5))  # after a change of how rules are traced: 300
def test_random_rules(seed):
    fn = random_epilogue(random.Random(seed))
    try:
        check(fn, B)
    except NotImplementedError as error:
        assert "no second derivative, since custom_vjp" in str(error)  # noqa: PT017
        check(fn, B, takes=GRADIENT)


def test_second_derivatives_that_are_refused_by_name():
    """JAX adds up all cotangents of a value before a backward rule sees them; where that matters there is no number."""

    @jax.custom_vjp
    def limited(x):
        return jnp.tanh(x)

    limited.defvjp(lambda x: (limited(x), None), lambda _, g: (jnp.clip(g, -0.5, 0.5),))

    def loss(x):
        return jnp.sum(cutjax.gemm(x, W, epilogue=lambda v: v * limited(v)))

    assert np.isfinite(jax.jit(jax.grad(loss))(X[0])).all()
    with pytest.raises(NotImplementedError, match="no second derivative, since custom_vjp limited has a backward rule"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(X[0])
