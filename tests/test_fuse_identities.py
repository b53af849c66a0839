"""cutjax.fuse around identities that mean something: gradients, names of jax.checkpoint, barriers, shardings, scopes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, integers, same, scaled
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from test_checkpoint_policies import OF_OURS

import cutjax
from cutjax.binding.rules import live

always = functools.partial(cutjax.fuse, policy="always")
policies = jax.checkpoint_policies
B, S, N = 2, 3, 4
SIZES = jnp.array([2, 0, 3])  # of six rows: one is of no group
MESH = jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDING = jax.NamedSharding(MESH, jax.P())


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def lowered(fn, *args):
    """The equations that a function needs."""
    jaxpr = jax.jit(fn).trace(*args).jaxpr
    return list(equations(live(getattr(jaxpr, "jaxpr", jaxpr))))


def products(fn, *args):
    """How many products a call makes."""
    return sum(eqn.primitive.name in ("dot_general", "ragged_dot_general", *OF_OURS) for eqn in lowered(fn, *args))


def names(fn, *args):
    """The names that policies see, but for those of this package."""
    found = {eqn.params["name"] for eqn in lowered(fn, *args) if eqn.primitive.name == "name"}
    return {name for name in found if not name.startswith("cutjax_")}


@jax.custom_jvp
def straight(x):
    return x * x


straight.defjvp(lambda primals, dots: (straight(*primals), 3 * dots[0]))


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), checkpoint_name(x, "c")), lambda x, g: (jnp.clip(g, -0.01, 0.01) * x,))


def estimator(x):
    """A straight-through estimator, without a step where rounding would decide."""
    return x + lax.stop_gradient(0.5 * x * x - x)


def scoped(x):
    with jax.named_scope("scope"):
        return jnp.tanh(x)


def remat(x):
    return jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.cos(x), "a")), policy=policies.everything_saveable)(x)


MEANING = {
    "stop_gradient": lax.stop_gradient,
    "estimator": estimator,
    "name": lambda x: checkpoint_name(x, "a"),
    "named twice": lambda x: checkpoint_name(checkpoint_name(x * 2, "b"), "a"),
    "barrier": lambda x: lax.optimization_barrier(x),
    "barrier of two": lambda x: sum(lax.optimization_barrier((x, jnp.sin(x)))),
    "precision": lambda x: lax.reduce_precision(x, 8, 20),
    "constraint": lambda x: lax.with_sharding_constraint(x, SHARDING),
    "placed": jax.jit(jnp.sin, out_shardings=SHARDING),
    "custom_jvp": straight,
    "relu": jax.nn.relu,
    "scope": scoped,
    "remat": remat,
    "jit": jax.jit(lambda x: lax.stop_gradient(x) * checkpoint_name(x, "b")),
    "custom_vjp": clipped,  # the last: it has no forward mode
}
UNARY = [jnp.tanh, jax.nn.silu, lambda x: x * 0.5, jnp.sin]
BINARY = [jnp.add, jnp.multiply, jnp.subtract]


def program(seed, forward=False):
    """A function of an array, matrices and a bias, with products and identities drawn by the seed.

    Even ones have no rows in groups: JAX has no second derivative of these.
    """
    kinds = list(MEANING.values())[: -1 if forward else None]

    def fn(x, w, g, bias):
        rng = np.random.default_rng(seed)

        def pick(values):
            return values[rng.integers(len(values))]

        def product(y):
            kind = rng.integers(2 + seed % 2)
            if kind == 0:
                return y @ w
            if kind == 1:
                return jnp.einsum("bsk,bkn->bsn", y, w * g[:B])
            return lax.ragged_dot(y.reshape(B * S, N), g, SIZES).reshape(B, S, N)

        values = [x, product(x)]
        for _ in range(int(rng.integers(4, 10))):
            kind, y = rng.integers(8), values[-1 if rng.integers(3) else rng.integers(len(values))]
            if kind < 3:
                y = pick(kinds)(y)
            elif kind < 5:
                y = pick(UNARY)(y)
            elif kind == 5:
                y = y + bias
            elif kind == 6:
                y = pick(BINARY)(y, pick(values))
            else:
                y = product(y)
            values.append(y)
        return values[-1], pick(values)

    return fn


def loss(fn):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in fn(*args))


def first(fn):
    return jax.grad(loss(fn), (0, 1, 2, 3))


def second(gradient):
    """The gradient of something of each first derivative."""
    return jax.grad(lambda *args: sum(jnp.sum(jnp.cos(y)) for y in gradient(*args)), (0, 1))


def arguments():
    return scaled(1, (B, S, N)), scaled(2, (N, N)), scaled(3, (3, N, N)), scaled(4, (N,))


# Of each, the policy for what fuse makes where it is called around that: JAX's know ``lax.dot_general`` alone.
POLICIES = {
    "nothing": (None, None),
    "a": (policies.save_only_these_names("a"),) * 2,
    "b, c": (policies.save_only_these_names("b", "c"),) * 2,
    "everything": (policies.everything_saveable,) * 2,
    "dots": (policies.dots_saveable, cutjax.checkpoint_policies.dots_saveable),
    "dots or a": (
        policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("a")),
        policies.save_from_both_policies(cutjax.checkpoint_policies.dots_saveable, policies.save_only_these_names("a")),
    ),
}


def check(seed):
    """Compares a program with itself under fuse, in every order, and what its derivatives save and multiply again."""
    fn, args = program(seed), arguments()
    fused = always(fn)
    gradient, inside, outside = first(fn), first(fused), always(first(fn))
    value, policy = list(POLICIES.values())[seed % len(POLICIES)]
    remat, again = jax.checkpoint(fn, policy=value), jax.checkpoint(fused, policy=policy)
    ours = {
        "grad(fuse(f))": inside,
        "fuse(grad(f))": outside,
        "fuse(grad(fuse(f)))": always(inside),
        "grad(checkpoint(fuse(f)))": first(again),
        "grad(fuse(checkpoint(f)))": first(always(remat)),
        "fuse(grad(checkpoint(f)))": always(first(remat)),
    }

    @jax.jit
    def everything(*args):
        firsts = [gradient(*args), *(g(*args) for g in ours.values())]
        twice = (gradient, inside, outside, ours["grad(checkpoint(fuse(f)))"]) if seed % 2 == 0 else ()
        seconds = [second(g)(*args) for g in twice]
        return [fn(*args), fused(*args)], firsts, seconds

    for kind, tolerance in zip(everything(*args), (1e-5, 1e-4, 1e-3), strict=True):
        for got in kind[1:]:
            close(got, kind[0], tolerance)  # float32 all through: only the order of sums differs
    # A kernel of several products of one operand is one; a product that is made twice may be.
    least = products(first(remat), *args)
    for name in ("grad(checkpoint(fuse(f)))", "grad(fuse(checkpoint(f)))"):
        assert products(ours[name], *args) <= least, name
        assert names(ours[name], *args) == names(first(remat), *args), name
    assert names(inside, *args) == names(gradient, *args)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    check(seed)


@pytest.mark.parametrize("seed", range(4))
def test_forward_mode_of_random_programs(seed):
    fn, args = program(100 + seed, forward=True), arguments()
    dots = [jnp.cos(x) for x in args]

    def forward(fn):
        value, dot = jax.jvp(fn, args, dots)
        again, linear = jax.linearize(fn, *args)
        return value, dot, again, linear(*dots), jax.vjp(fn, *args)[1](value)

    got, expected = jax.jit(lambda: (forward(always(fn)), forward(fn)))()
    close(got, expected, 1e-4)
