"""grouped_gemm with an epilogue: derivatives of many, what is kept, and what runs. Else: the battery."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, compare, inexact, mesh_of, normal, squares, types
from checks import saved as residuals
from oracles import rows

import cutjax
from cutjax import grouped_gemm

M, N, K, G = 9, 6, 8, 4
H = jnp.bfloat16
SIZES = jnp.array([3, 0, 4, 1])  # the last row is of no group
POLICIES = jax.checkpoint_policies


X, W, V = normal(0, (M, K)), normal(1, (G, K, N)), normal(2, (G, K, N))
B, S, R = normal(3, (G, 1, N)), normal(4, (G, 1, 1)), normal(5, (M, N))  # of groups, and of rows
C, D = normal(6, (N,)), normal(7, (M, 1))


def many(acc, b, r):
    t = acc * b
    return jnp.tanh(t) + r, acc > 0, t.sum(0), jnp.max(acc * r), (t * t).sum(1)


# (epilogue, weights, operands)
CASES = {
    "bias": (lambda acc, b: jax.nn.gelu(acc + b), (W,), (B,)),
    "linear": (lambda acc, b, s, d: (acc + b) * 0.5 * s + d, (W,), (B, S, D)),
    "scales": (lambda acc, s, b: jnp.tanh(acc * s * b), (W,), (S, B)),
    "ungrouped": (lambda acc, c, d, r: jnp.sin(acc + c) * d * r, (W,), (C, D, R)),
    "gated": (lambda g, u, b, c: jax.nn.silu(g + b) * (u + c), (W, V), (B, C)),
    "three": (lambda p, q, r, s: jnp.sin(p) * q + r * s, (W, V, W - V), (S,)),
    "many": (many, (W,), (B, R)),
    "pole at zero": (lambda acc, b, c: jnp.sqrt(jnp.abs(acc)) * jnp.log(jnp.abs(b)) / c, (W,), (B, C)),
}


def plain(fn, x, ws, operands, sizes=SIZES):
    """In plain JAX: rows gather what is their group's, and only those that have one count."""
    group, has = rows(sizes, x.shape[0])
    x = jnp.where(has, x, 1)
    operands = [jnp.where(has, v[group, 0] if v.ndim == 3 else v, 1) for v in operands]
    accs = [jnp.where(has, jnp.einsum("mk,mkn->mn", x, w[group]), 1) for w in ws]
    if fn is many:
        y, positive, *_ = fn(*accs, *operands)
        t, r = accs[0] * operands[0], accs[0] * operands[1]
        zero = functools.partial(jnp.where, has)
        sums = zero(t, 0).sum(0), zero(r, -jnp.inf).max(), zero(t * t, 0).sum(1)
        return zero(y, 0), has & positive, *sums
    return jax.tree.map(lambda y: jnp.where(has, y, 0), fn(*accs, *operands))


def pair(name, **options):
    """The float results of x, the sizes, the weights and the operands, in an epilogue and in plain JAX."""
    fn, ws, operands = CASES[name]
    n = len(ws)

    def got(x, sizes, *args):
        w = args[:n] if n > 1 else args[0]
        return grouped_gemm(x, w, sizes, epilogue=fn, operands=args[n:], **options)

    def expected(x, sizes, *args):
        return plain(fn, x, args[:n], args[n:], sizes)

    return (lambda *args: inexact(got(*args)), lambda *args: inexact(expected(*args))), (X, SIZES, *ws, *operands)


def gradient(f, args):
    """Of cotangents that differ, in all but the sizes."""
    y, pull = jax.vjp(lambda x, *rest: f(x, args[1], *rest), args[0], *args[2:])
    return pull([normal(10 + i, v.shape, v.dtype) for i, v in enumerate(y)])


@pytest.mark.parametrize(
    ("name", "save"), [*((name, "default") for name in CASES if name not in ("bias", "scales")), ("gated", "recompute")]
)
def test_derivatives(name, save):
    """Second derivatives where accumulators are kept, of two in two ways: the Hessian is symmetric."""
    functions, args = pair(name, save=save)
    x, _, *rest = args
    dots = tuple(normal(20 + i, v.shape) for i, v in enumerate((x, *rest)))
    twice = name in ("many", "gated") and save == "default"

    @jax.jit
    def program(x, sizes, *rest):
        def first(f):
            def of(x, *rest):
                y, pull = jax.vjp(lambda x, *rest: f(x, sizes, *rest), x, *rest)
                return y, pull([normal(10 + i, v.shape, v.dtype) for i, v in enumerate(y)])

            return of

        found = [jax.jvp(first(f), (x, *rest), dots) if save == "default" else first(f)(x, *rest) for f in functions]
        return found, jax.vjp(lambda *xs: first(functions[0])(*xs)[1], x, *rest)[1](dots) if twice else None

    (got, expected), second = program(*args)
    close(got, expected, 1e-4)
    if twice:
        close(second, expected[1][1], 1e-4)


@pytest.mark.parametrize("name", ["ungrouped", "gated", "pole at zero"])
def test_nothing_of_rows_of_no_group_reaches_a_gradient(name):
    (got, _), (x, sizes, *rest) = pair(name)

    @jax.jit
    def gradients(x, *rest):
        def first(x, *rest):
            return gradient(got, (x, sizes, *rest))

        second = jax.grad(lambda *args: sum(jnp.nansum(v**2) for v in first(*args)), range(1 + len(rest)))
        return first(x, *rest), second(x, *rest)

    poisoned = tuple(v.at[-1].set(jnp.nan) if v.shape[0] == M else v for v in (x, *rest))
    found = gradients(*poisoned)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(found))
    close(found, gradients(x, *rest))


@pytest.mark.parametrize(
    ("name", "axes"),
    [("many", (None, None, None, 0)), ("many", (2, None, 3, 1)), ("gated", (1, 0, 0, None))],
    ids=str,
)
def test_vmap(name, axes):
    """Over x, the sizes, the weights and the operands: reductions, and several products."""
    functions, args = pair(name)
    n = len(CASES[name][1])
    dims = [axes[0], axes[1], *(axes[2] for _ in range(n)), *(axes[3] for _ in args[2 + n :])]
    dims = [dim if dim is None else min(dim, x.ndim) for dim, x in zip(dims, args, strict=True)]
    args = [x if dim is None else jnp.stack([x, x[::-1]], dim) for x, dim in zip(args, dims, strict=True)]
    real = tuple(i for i in range(len(args)) if i != 1)

    def take(f):
        mapped = jax.vmap(f, dims)
        each = jax.vmap(jax.grad(squares(f), real), dims) if name == "gated" else jax.grad(squares(mapped), real)
        return lambda *args: (mapped(*args), each(*args))

    compare(take, functions, args, 1e-4)


def test_vmap_of_what_depends_on_its_position():
    def fn(acc):
        i, j = jnp.arange(M)[:, None], jnp.arange(N)
        return jnp.where(i >= j, acc, 0)

    x = normal(0, (3, M, K))
    for dim in (0, 1, 2):
        moved = jnp.moveaxis(x, 0, dim)
        functions = lambda x: grouped_gemm(x, W, SIZES, epilogue=fn), lambda x: plain(fn, x, [W], [])
        compare(lambda f, dim=dim: jax.vmap(f, dim), functions, (moved,), 1e-5)


def rows_of(fn, *args, **options):
    return cutjax.explain(fn, **options)(*args).rows


def test_vmap_of_operands_alone_makes_one_product():
    b = normal(3, (5, G, 1, N))
    f = jax.vmap(lambda b: grouped_gemm(X, W, SIZES, epilogue=CASES["bias"][0], operands=(b,)))
    close(jax.jit(f)(b), jax.jit(jax.vmap(lambda b: plain(CASES["bias"][0], X, [W], [b])))(b))
    (row,) = rows_of(f, b)
    assert (row.choice.problem.batch, row.count) == ((1,), 1)


def test_captured_values_are_operands():
    def both(product):
        def loss(x, w, scale, c):
            return product(x, w, lambda acc: jnp.tanh(acc * scale + c)).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(X, W, jnp.float32(0.3), C)

    close(both(lambda x, w, fn: grouped_gemm(x, w, SIZES, epilogue=fn)), both(lambda x, w, fn: plain(fn, x, [w], [])))


def test_integer_operands_have_no_gradient():
    mask = jnp.arange(G)[:, None, None] % 2

    def fn(acc, mask):
        return jnp.where(mask == 1, jnp.exp(acc), acc)

    def loss(product):
        return jax.jit(jax.grad(lambda w, mask: (product(w, mask) ** 2).sum()))(W, mask)

    close(
        loss(lambda w, mask: grouped_gemm(X, w, SIZES, epilogue=fn, operands=(mask,))),
        loss(lambda w, mask: plain(fn, X, [w], [mask])),
        1e-4,
    )


# Over devices.


def test_shard_map_over_rows_and_columns():
    """Each device has groups of its own rows, and some columns of each weight and of each group's operand."""
    mesh, p = mesh_of(i=2, j=4), jax.P
    x, sizes = jnp.concatenate([X, X + 1]), jnp.concatenate([SIZES, SIZES[::-1]])
    w, b = normal(1, (G, K, 8)), normal(3, (G, 1, 8))
    specs = (p("i"), p("i"), p(None, None, "j"), p(None, None, "j"))

    def fused(x, sizes, w, b):
        return grouped_gemm(x, w, sizes, epilogue=CASES["bias"][0], operands=(b,))

    def reference(x, sizes, w, b):
        halves = zip(jnp.split(x, 2), jnp.split(sizes, 2), strict=True)
        return jnp.concatenate([plain(CASES["bias"][0], x, [w], [b], sizes) for x, sizes in halves])

    inside = jax.shard_map(fused, mesh=mesh, in_specs=specs, out_specs=p("i", "j"))
    compare(lambda f: jax.value_and_grad(squares(f), (0, 2, 3)), (inside, reference), (x, sizes, w, b), 1e-5)


def test_shard_map_over_groups():
    """Each device has some groups, their weights and operands, and takes the rows of those by an offset."""
    mesh = mesh_of(i=8)
    p, g = jax.P, 16
    sizes = jnp.array([0, 1] * 8)
    w, b = normal(1, (g, K, N)), normal(3, (g, 1, N))

    def local(x, w, b, d):
        offset = jax.lax.axis_index("i") * (g // 8)
        y = grouped_gemm(
            x, w, sizes, epilogue=lambda acc, b, d: jnp.tanh(acc + b) * d, operands=(b, d), group_offset=offset
        )
        return jax.lax.psum(y, "i")

    def reference(x, w, b, d):
        return plain(lambda acc, b, d: jnp.tanh(acc + b) * d, x, [w], [b, d], sizes)

    inside = jax.shard_map(local, mesh=mesh, in_specs=(p(), p("i"), p("i"), p()), out_specs=p())
    compare(lambda f: jax.value_and_grad(squares(f), (0, 1, 2, 3)), (inside, reference), (X, w, b, D), 1e-5)


def test_operands_divided_over_explicit_axes():
    """Any of them: rows, or an operand of the epilogue alone, of which the result's type says nothing."""
    mesh = mesh_of(jax.sharding.AxisType.Explicit, i=8)
    x, scale = normal(0, (8, K)), normal(1, (8, 1))
    scaled = lambda x, scale: grouped_gemm(x, W, SIZES, epilogue=jnp.multiply, operands=(scale,))  # noqa: E731
    gradients = jax.grad(squares(scaled), (0, 1))
    y, expected = scaled(x, scale), gradients(x, scale)
    with jax.set_mesh(mesh):
        for spec, lies in ((jax.P("i"), jax.P("i", None)), (jax.P(), jax.P(None, None))):
            there = jax.device_put(x, spec), jax.device_put(scale, jax.P("i"))
            out = jax.jit(scaled)(*there)
            assert out.sharding.spec == lies
            got = jax.jit(gradients)(*there)
            for a, b in zip((out, *got), (y, *expected), strict=True):  # float32, added up in another order
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


# What runs, and what is kept.

HX, HW, HV = normal(0, (64, 128), H), normal(1, (G, 128, 32), H), normal(2, (G, 128, 32), H)
HB, HSIZES = normal(3, (G, 1, 32), H), jnp.array([20, 0, 31, 7])
SAVED = "bf16[64,32]"


def layer(x, w, b, *, fn=None, **options):
    fn = fn or (lambda acc, b: jax.nn.gelu(acc + b.astype(acc.dtype)))
    return grouped_gemm(x, w, HSIZES, epilogue=fn, operands=(b,), **options)


def gated(x, w, v, **options):
    return grouped_gemm(x, (w, v), HSIZES, epilogue=lambda g, u: jax.nn.silu(g) * u, **options)


def problems(fn, *args):
    """The products of a function: sizes, the axis of the groups, and fused ones' results."""
    found = []
    for row in rows_of(fn, *args):
        p = row.choice.problem
        found += [(p.m, p.n, p.k, p.divided, p.groups.count if p.groups else 0, row.outputs)] * row.count
    return sorted(found)


FORWARD, BIAS = (64, 32, 128, "m", G, (SAVED,) * 2), (8, 32, 64, "k", G, ())
OF_X, OF_W = (64, 128, 32, "m", G, ()), (128, 32, 64, "k", G, ())


def test_forward_is_one_kernel_and_the_gradient_of_each_argument_one_product():
    assert problems(layer, HX, HW, HB) == [(64, 32, 128, "m", G, (SAVED,))]
    for argnums, more in (((0,), [OF_X]), ((1,), [OF_W]), ((2,), [BIAS]), ((0, 1, 2), [OF_X, OF_W, BIAS])):
        assert problems(jax.value_and_grad(squares(layer), argnums), HX, HW, HB) == sorted([FORWARD, *more])
    fn = jax.jit(jax.value_and_grad(squares(gated), (0, 1, 2)))
    both = (*OF_W[:-1], (f"bf16[{G},128,32]",) * 2)
    assert problems(fn, HX, HW, HV) == sorted([(64, 32, 128, "m", G, (SAVED,) * 3), (64, 128, 64, "m", G, ()), both])
    again = jax.value_and_grad(squares(functools.partial(layer, save="recompute")), (0, 1, 2))
    products = [(64, 32, 128, "m", G, (SAVED,)), (64, 32, 128, "m", G, ()), OF_X, OF_W, BIAS]
    assert problems(again, HX, HW, HB) == sorted(products)


def primitives(jaxpr) -> set[str]:
    inner = [sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params)]
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*map(primitives, inner))


def test_no_derivative_scatters():
    """A sum over a group's rows by atomics would differ from run to run."""
    for name in ("bias", "linear", "gated", "ungrouped"):
        (got, _), (x, sizes, *rest) = pair(name)
        first = jax.grad(lambda x, *rest, f=got, s=sizes: squares(f)(x, s, *rest), range(1 + len(rest)))
        second = jax.grad(squares(first), range(1 + len(rest)))
        found = primitives(jax.make_jaxpr(first)(x, *rest).jaxpr) | primitives(jax.make_jaxpr(second)(x, *rest).jaxpr)
        assert "cutjax_grouped_outer" in found
        assert not [x for x in found if "scatter" in x]


def saved(capsys, fn, *args) -> list[str]:
    """Types of the residuals that are no sizes."""
    return [x for x in types(residuals(capsys, fn, *args)) if not x.startswith("i32[")]


def test_what_is_saved(capsys):
    args = HX, HW, HB
    assert saved(capsys, layer, *args) == [SAVED]
    assert saved(capsys, functools.partial(layer, out_dtype=jnp.float32), *args) == ["f32[64,32]"]
    assert saved(capsys, functools.partial(layer, save="recompute"), *args) == []
    assert saved(capsys, functools.partial(layer, fn=lambda acc, b: acc * 0.5 + b.astype(acc.dtype)), *args) == []
    assert saved(capsys, gated, HX, HW, HV) == [SAVED] * 2
    for names, expected in ((("cutjax_preactivation",), [SAVED]), (("other",), [])):
        f = jax.checkpoint(layer, policy=POLICIES.save_only_these_names(*names))
        assert saved(capsys, f, *args) == expected
        close(jax.grad(squares(f), (0, 1, 2))(*args), jax.grad(squares(layer), (0, 1, 2))(*args))


def test_results_that_nothing_uses_are_not_written():
    def fused(fn):
        return [row.epilogue is not None for row in cutjax.explain(fn)(HX, HW, HB).rows]

    def two(x, w, b):
        return layer(x, w, b, fn=lambda acc, b: (acc.astype(H), acc + b.astype(acc.dtype)))

    assert fused(two) == [True]
    # The loss itself is not asked for, so the gradient of a sum needs the accumulator and no activation.
    for fn in (lambda *args: two(*args)[0], jax.grad(lambda *args: layer(*args).astype(jnp.float32).sum())):
        assert fused(fn)
        assert not any(fused(fn))


def test_gradients_in_bfloat16_are_those_of_plain_jax():
    fn = lambda acc, b: jax.nn.gelu(acc + b.astype(acc.dtype))  # noqa: E731

    def reference(x, w, b):
        x, w, b = (v.astype(jnp.float32) for v in (x, w, b))
        return plain(fn, x, [w], [b], HSIZES).astype(H)

    # One rounding to bfloat16 of the accumulator, one of its gradient: 2^-8 each of the largest.
    compare(lambda f: jax.grad(squares(f), (0, 1, 2)), (layer, reference), (HX, HW, HB), 0.02)


def test_explain():
    text = str(cutjax.explain(layer)(HX, HW, HB))
    assert re.search(r"epilogue +.*acc.*tanh", text)
    assert re.search(r"operands +x0 bf16\[4,1,32\]", text)
    assert re.search(r"outputs +bf16\[64,32\]\n", text)
    assert re.search(r"derivative +saves acc as bf16\n", text)
    assert "multiplies acc0, acc1 again" in str(cutjax.explain(functools.partial(gated, save="recompute"))(HX, HW, HV))


def test_gradients_of_groups_beside_integers():
    """The cotangent of an operand is no integer where the product is of integers."""
    x, w, scaled = jnp.int8(4 * X), jnp.int8(4 * W), lambda acc, b: acc.astype(jnp.float32) * b * 0.25
    ours = lambda b: grouped_gemm(x, w, SIZES, epilogue=scaled, operands=(b,)).sum()  # noqa: E731
    compare(jax.grad, (ours, lambda b: plain(scaled, jnp.float32(x), (jnp.float32(w),), (b,)).sum()), (B,))
