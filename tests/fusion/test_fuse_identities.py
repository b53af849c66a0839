"""cutjax.fuse around identities that mean something: gradients, names for jax.checkpoint, barriers, shardings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, integers, mesh_of, same, scaled
from identities import MEANING, SHARDING, lowered, names, products
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata

import cutjax

always = functools.partial(cutjax.fuse, policy="always")
policies = jax.checkpoint_policies
B, S, N = 2, 3, 4
SIZES = jnp.array([2, 0, 3])  # of six rows: one is of no group
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
            kind = rng.integers(3 + seed % 2)
            if kind == 0:
                return y @ w
            if kind == 1:
                return jnp.einsum("bsk,bkn->bsn", y, w * g[:B])
            if kind == 2:  # windows of rows
                return lax.conv_general_dilated(y, g, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
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


@pytest.mark.parametrize("seed", range(6))  # after a change of what fusion keeps: 100
def test_random_programs(seed):
    check(seed)


@pytest.mark.parametrize("seed", range(2))  # as many
def test_forward_mode_of_random_programs(seed):
    fn, args = program(100 + seed, forward=True), arguments()
    dots = tuple(jnp.cos(x) for x in args)

    def forward(fn):
        value, dot = jax.jvp(fn, args, dots)
        again, linear = jax.linearize(fn, *args)
        return value, dot, again, linear(*dots), jax.vjp(fn, *args)[1](value)

    got, expected = jax.jit(lambda: (forward(always(fn)), forward(fn)))()
    close(got, expected, 1e-4)


# One of each, where the values are exact.


def step(x, w):
    return lax.stop_gradient(x @ w) * 2 + x @ w


def rounded(x, w):
    z = x @ w
    return z + lax.stop_gradient(jnp.round(z * 0.25) - z)


def grouped(x, w):
    z = lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([3, 5]))
    return lax.stop_gradient(z) * 2 + z


def precise(x, w):
    return lax.reduce_precision(x @ w, 8, 1) * 2


CASES = [(fn, policy) for fn in (step, rounded, grouped) for policy in ("auto", "always")] + [(precise, "always")]


@pytest.mark.parametrize(("fn", "policy"), CASES)
def test_gradients(fn, policy):
    size = 1024 if policy == "auto" else 8
    x, w = integers(1, (size, 8), jnp.bfloat16), integers(2, (8, size), jnp.bfloat16)
    fuse = functools.partial(cutjax.fuse, policy=policy)
    if policy == "auto":
        reports = cutjax.explain(fuse(fn), platform="cuda")(x, w).fusion
        assert [report.runs for report in reports] == ["fused"] * len(reports)
    gradient = lambda fn: jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum(), (0, 1))  # noqa: E731
    expected = jax.jit(gradient(fn))(x, w)
    same(jax.jit(fuse(fn))(x, w), jax.jit(fn)(x, w))
    ways = gradient(fuse(fn)), fuse(gradient(fn)), fuse(gradient(fuse(fn)))
    for got in jax.jit(lambda x, w: [way(x, w) for way in ways])(x, w):
        same(got, expected)


def primitives(fn, *args):
    return [eqn.primitive.name for eqn in lowered(fn, *args)]


@pytest.mark.parametrize("name", ["barrier", "barrier of two", "constraint", "placed"])
@pytest.mark.parametrize("nested", [False, True])
def test_what_xla_is_told_stays(name, nested):
    """Where it stood: no kernel computes it, inside of a function or not."""
    kind = {"constraint": "sharding_constraint"}.get(name, "optimization_barrier")
    tell = jax.jit(MEANING[name]) if nested else MEANING[name]
    fn = lambda x, w: jnp.tanh(tell(x @ w + 1.0) * 2)  # noqa: E731
    args = arguments()[0], arguments()[1]
    found = lowered(always(fn), *args)
    if name == "placed":
        assert any(eqn.params.get("out_shardings") == (SHARDING,) for eqn in found)
    else:
        assert kind in [eqn.primitive.name for eqn in found]
    (report,) = cutjax.explain(always(fn))(*args).fusion
    assert report.runs == "fused"  # with what is before it
    assert "acc + 1" in report.epilogue
    assert "tanh" not in report.epilogue


def test_metadata_stays():
    def fn(x, w):
        with set_xla_metadata(key="value"):
            return jnp.tanh(jnp.sin(x @ w))

    x, w, *_ = arguments()
    assert primitives(always(fn), x, w).count("dot_general") == 1
    metadata = [
        eqn.ctx.xla_metadata for eqn in lowered(always(fn), x, w) if eqn.primitive.name in ("sin", "dot_general")
    ]
    assert metadata == [{"key": "value"}] * 2


@pytest.mark.parametrize("key", ["xla_metadata_payload", "ragged_dot_tiling"])
def test_metadata_that_is_nothing_to_xla_is_no_hindrance(key):
    def fn(x, w):
        with set_xla_metadata(**{key: "value"}):
            return jnp.tanh(jnp.sin(x @ w))

    (report,) = cutjax.explain(always(fn))(*arguments()[:2]).fusion
    assert "tanh(sin(" in report.epilogue


def test_scopes():
    """Of an equation that stays, of a kernel that of its product; through jitted functions that are opened."""

    @jax.jit
    def inner(x, w):
        with jax.named_scope("product"):
            y = x @ w
        with jax.named_scope("tail"):
            y = jnp.tanh(y)
        with jax.named_scope("sum"):
            return jnp.cumsum(y)

    def fn(x, w):
        with jax.named_scope("outer"):
            return inner(x, w)

    x, w, *_ = arguments()
    found = {eqn.params.get("name"): str(eqn.source_info.name_stack) for eqn in lowered(always(fn), x, w)}
    assert found["cutjax_fused"] == "outer/jit(inner)/product"
    assert found["cumsum"] == "outer/jit(inner)/sum"


def residuals(fn, *args):
    """What jax.checkpoint saves of a function's values: shapes, sorted."""
    _, pull = jax.vjp(fn, *args)
    return sorted(x.shape for x in jax.tree.leaves(pull) if all(x is not y for y in args))


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_names_are_saved(where):
    """A value that has a name inside of a tail is saved by it, and the product is not made again."""

    def fn(x, w):
        return jnp.sin(jnp.sin(checkpoint_name(x @ w + 1.0, "a")) @ w)

    save = functools.partial(jax.checkpoint, policy=policies.save_only_these_names("a"))
    x, w, *_ = arguments()
    ours = save(always(fn)) if where == "outside" else always(save(fn))
    of = lambda fn: jax.value_and_grad(lambda *args: fn(*args).sum(), (0, 1))  # noqa: E731
    close(of(ours)(x, w), of(fn)(x, w), 1e-5)
    assert residuals(ours, x, w) == residuals(save(fn), x, w)
    assert products(of(ours), x, w) == products(of(save(fn)), x, w) < products(of(jax.checkpoint(fn)), x, w)
    # Where nothing is differentiated, and where all is before, one kernel has all of it.
    assert primitives(ours, x, w).count("sin") == 0
    assert [report.runs for report in cutjax.explain(always(of(fn)))(x, w).fusion].count("fused") >= 3


@pytest.mark.parametrize("name", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
@pytest.mark.parametrize("batch", [False, True])
def test_policies_inside_know_what_was_a_dot_general(name, batch):
    def fn(x, w):
        w = jnp.broadcast_to(w, (B, N, N)) if batch else w
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    saved = jax.checkpoint(fn, policy=getattr(policies, name))
    x, w, *_ = arguments()
    of = lambda fn: jax.grad(lambda *args: fn(*args).sum(), (0, 1))  # noqa: E731
    assert products(of(always(saved)), x, w) == products(of(saved), x, w)
    close(of(always(saved))(x, w), of(fn)(x, w), 1e-5)


def cast(x, w):
    return lax.pcast(x @ w + 1, "a", to="varying")


def summed(x, w):
    """The tail's first value is the same on all devices, the second is not."""
    y = x @ w + 1
    return y, lax.psum(jnp.sin(y) * (1 + lax.axis_index("a").astype(jnp.float32)), "a")


@pytest.mark.parametrize("fn", [cast, summed])
def test_what_varies_over_devices(fn):
    """A value varies over the axes of a mesh that it varied over: transposed, a cast is a sum over them."""
    mesh = mesh_of(a=2)

    def mapped(inner):
        return jax.shard_map(inner, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("a") if fn is cast else jax.P())

    def of(fn):
        return jax.value_and_grad(lambda *args: sum(jnp.sin(y).sum() for y in jax.tree.leaves(fn(*args))), (0, 1))

    x, w, *_ = arguments()
    expected = jax.jit(of(mapped(fn)))(x, w)
    for got in (of(mapped(always(fn))), of(always(mapped(fn))), always(of(mapped(fn)))):
        close(jax.jit(got)(x, w), expected, 1e-5)
