"""Every operation and its derivatives against plain JAX: both modes, both orders, layouts, dtypes, jit, checkpoint."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, inexact, normal, same
from operations import FORMS, NARROW, OPERATIONS, differentiable, expected, in_turn, main, of_floats, operands, telling

import cutjax

forms = pytest.mark.parametrize(("name", "layout"), FORMS, ids=lambda x: x or "only")


def cotangents(f, args):
    return [normal(30 + i, y.shape, y.dtype) for i, y in enumerate(jax.eval_shape(f, *args))]


def tangents(args):
    return tuple(normal(20 + i, x.shape, x.dtype) for i, x in enumerate(args))


def floats(fn):
    """The float results of a function, a list."""
    return lambda *args: inexact(fn(*args))


@forms
def test_derivatives(name, layout):
    """Values, tangents, gradients; second derivatives in three ways, of many operands in two, of options in one.

    The Hessian is symmetric, so plain JAX's is what each way must give.
    """
    op, args = OPERATIONS[name], operands(name)
    first = main(name) and layout == next(iter(op.layouts), "")
    xs = of_floats(op.fn, args)[1]
    dots = tangents(xs)

    def forward_over_reverse(fn, args):
        f, xs = of_floats(floats(fn), args)
        g = cotangents(f, xs)

        def both(*xs):
            y, pull = jax.vjp(f, *xs)
            return y, pull(g)

        return jax.jvp(both, xs, dots) if telling((name, layout)) else (both(*xs), None)

    def over_reverse(fn, args):
        f, xs = of_floats(floats(fn), args)
        g = cotangents(f, xs)
        found = [jax.vjp(lambda *xs: jax.vjp(f, *xs)[1](g), *xs)[1](dots)]
        if len(args) < 4:
            found.append(jax.vjp(lambda *xs: jax.jvp(f, xs, dots)[1], *xs)[1](g))
        return found

    @jax.jit
    def program(*args):
        ours = op.of_layout(layout)
        found = over_reverse(ours, args) if first else ()
        return found, forward_over_reverse(ours, args), forward_over_reverse(op.plain, args)

    seconds, got, wanted = program(*args)
    # f32 sums of up to 16 products in another order, through up to three products and their second derivatives.
    close(got, wanted, 1e-4)
    for second in seconds:
        close(second, wanted[1][1], 1e-4)


@pytest.mark.parametrize("name", in_turn(1))
def test_each_operand_alone(name):
    """What the others need is not made: gradients, the transpose where it is linear; of few operands Jacobians."""
    op, args = OPERATIONS[name], operands(name)
    linear = [i for i, x in enumerate(op.operands.split()) if x in op.linear.split()]
    assert len(linear) == len(op.linear.split())

    first, *_ = wrt = differentiable(args)

    @jax.jit
    def program(*args):
        def alone(fn, i):
            return lambda x: floats(fn)(*args[:i], x, *args[i + 1 :])

        f, xs = of_floats(floats(op.plain), args)
        g = cotangents(f, xs)
        gradients = [jax.vjp(alone(op.fn, i), args[i])[1](g)[0] for i in wrt]
        transposes = [jax.linear_transpose(alone(op.fn, i), args[i])(g)[0] for i in linear]
        take = (jax.jacfwd, op.fn), (jax.jacrev, op.fn), (jax.jacrev, op.plain)
        few = main(name) and len(args) < 4
        jacobians = [of(alone(fn, first))(args[first]) for of, fn in take if few]
        return gradients, transposes, jax.vjp(f, *xs)[1](g), jacobians

    gradients, transposes, wanted, jacobians = program(*args)
    close(gradients, list(wanted), 1e-5)
    close(transposes, [wanted[wrt.index(i)] for i in linear], 1e-5)
    for jacobian in jacobians:
        close(jacobian, jacobians[-1], 1e-5)


@pytest.mark.parametrize("name", in_turn(0))
def test_eager(name):
    """Outside jit, of arrays of numpy, and but for options with no jit at all."""
    op, args = OPERATIONS[name], operands(name)
    eager = op.fn(*args)
    close(eager, expected(name)[0])
    same(op.fn(*map(np.asarray, args)), eager)
    if main(name):
        with jax.disable_jit():
            close(op.fn(*args), eager)


# Roundings of the operands' dtype at each of up to three products and of what lies between them, each of the largest.
TOLERANCES = {"bfloat16": 2**-5, "float16": 2**-8, "float64": 1e-12}


# Of the two dtypes of 16 bits an operation has one, in turn: they differ in how they round. Options have one dtype.
DTYPES = [
    (name, dtype)
    for turn, (name, op) in enumerate(OPERATIONS.items())
    for dtype in [x for x in op.dtypes if x != NARROW[turn % 2]][: None if main(name) else 1]
]


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_dtypes(name, dtype):
    """Results and gradients have the operands' dtype, and are near those of the same numbers in more bits."""
    op = OPERATIONS[name]
    with jax.enable_x64(dtype == "float64"):
        at = differentiable(operands(name))
        args = [np.asarray(x).astype(dtype) if i in at else x for i, x in enumerate(operands(name))]
        wide = [x.astype("float64" if dtype == "float64" else "float32") if i in at else x for i, x in enumerate(args)]

        def both(fn, args):
            f, xs = of_floats(floats(fn), args)
            y, pull = jax.vjp(f, *xs)
            return y, pull([normal(30 + i, v.shape, dtype).astype(v.dtype) for i, v in enumerate(y)])

        got, expected = jax.jit(lambda args, wide: (both(op.fn, args), both(op.plain, wide)))(args, wide)
        assert {x.dtype.name for x in jax.tree.leaves(got)} == {dtype}
        close(jax.tree.map(lambda x, y: x.astype(y.dtype), got, expected), expected, TOLERANCES[dtype])


@pytest.mark.versions
@pytest.mark.parametrize("name", in_turn(1))
def test_checkpoint_and_control_flow(name):
    """Gradients through a scan whose steps are recomputed and branch; tangents through a while_loop, but of options."""
    op, args = OPERATIONS[name], operands(name)
    policy = cutjax.checkpoint_policies.dots_saveable if main(name) else None
    pairs = [np.stack([x, x[::-1]]) for x in map(np.asarray, args)]  # of which one takes the branch

    def chosen(*xs):
        return xs[0][0].sum() > xs[0][-1].sum()

    def zeros(f, *xs):
        return [jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(f, *xs)]

    def gradient(f, args):
        f, xs = of_floats(f, args)
        return jax.grad(lambda *xs: sum(jnp.sin(y).sum() for y in f(*xs)), range(len(xs)))(*xs)

    @jax.jit
    def ours(args, pairs):
        @functools.partial(jax.checkpoint, policy=policy)
        def step(count, xs):
            f = floats(op.fn)
            return count + 1, jax.lax.cond(chosen(*xs), f, functools.partial(zeros, f), *xs)

        def loop(*xs):
            def again(state):
                return state[0] + 1, [a + y for a, y in zip(state[1], f(*xs), strict=True)]

            return jax.lax.while_loop(lambda state: state[0] < 2, again, (0, zeros(f, *xs)))[1]

        f, xs = of_floats(floats(op.fn), args)
        found = gradient(lambda *pairs: jax.lax.scan(step, 0, pairs)[1], pairs)
        return found, jax.jvp(loop, xs, tangents(xs)) if main(name) else ()

    @jax.jit
    def plain(args, pairs):
        def step(*xs):
            return [jnp.where(chosen(*xs), y, 0) for y in floats(op.plain)(*xs)]

        f, xs = of_floats(floats(op.plain), args)
        found = gradient(jax.vmap(step), pairs)
        return found, jax.jvp(lambda *xs: [2 * y for y in f(*xs)], xs, tangents(xs)) if main(name) else ()

    close(ours(args, pairs), plain(args, pairs), 1e-4)
