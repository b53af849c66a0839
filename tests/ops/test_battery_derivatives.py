"""Every operation and its derivatives against plain JAX: both modes, both orders, layouts, dtypes, jit, checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, compare, inexact, normal, same
from operations import FORMS, NARROW, OPERATIONS, differentiable, of_floats, operands, telling

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
    """Values, tangents, gradients; second derivatives in three ways, of products' other layouts in one."""
    op = OPERATIONS[name]
    first = layout == next(iter(op.layouts), "")

    def take(fn):
        def of(*args):
            f, xs = of_floats(floats(fn), args)
            dots, g = tangents(xs), cotangents(f, xs)

            def gradient(*xs):
                return jax.vjp(f, *xs)[1](g)

            def tangent(*xs):
                return jax.jvp(f, xs, dots)[1]

            found = [jax.jvp(f, xs, dots)]
            found.append(jax.jvp(gradient, xs, dots) if telling((name, layout)) else gradient(*xs))
            if first:
                found += [jax.vjp(gradient, *xs)[1](dots), jax.vjp(tangent, *xs)[1](g)]
            return found

        return of

    # f32 sums of up to 16 products in another order, through up to three products and their second derivatives.
    compare(take, (op.of_layout(layout), op.plain), operands(name), 1e-4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operand_alone(name):
    """What the others need is not made: gradients, the transpose where it is linear; of few operands Jacobians."""
    op, args = OPERATIONS[name], operands(name)
    linear = [i for i, x in enumerate(op.operands.split()) if x in op.linear.split()]

    def take(fn):
        def of(*args):
            def alone(i):
                return lambda x: floats(fn)(*args[:i], x, *args[i + 1 :])

            found = []
            for i in differentiable(args):
                g = cotangents(alone(i), (args[i],))
                found += [jax.vjp(alone(i), args[i])[1](g), jax.jvp(alone(i), (args[i],), (args[i],))]
                if i in linear:
                    found.append(jax.linear_transpose(alone(i), args[i])(g))
            if len(args) < 4:
                first = differentiable(args)[0]
                found += [jax.jacfwd(alone(first))(args[first]), jax.jacrev(alone(first))(args[first])]
            return found

        return of

    assert len(linear) == len(op.linear.split())
    compare(take, (op.fn, op.plain), args, 1e-5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_eager(name):
    """Outside jit, of arrays of numpy, and with no jit at all."""
    op, args = OPERATIONS[name], operands(name)
    expected = op.fn(*args)
    close(jax.jit(op.fn)(*args), expected)
    same(op.fn(*map(np.asarray, args)), expected)
    with jax.disable_jit():
        close(op.fn(*args), expected)


# Roundings of the operands' dtype at each of up to three products and of what lies between them, each of the largest.
TOLERANCES = {"bfloat16": 2**-5, "float16": 2**-8, "float64": 1e-12}


# Of the two dtypes of 16 bits an operation has one, in turn: they differ in how they round.
DTYPES = [
    (name, dtype)
    for turn, (name, op) in enumerate(OPERATIONS.items())
    for dtype in op.dtypes
    if dtype != NARROW[turn % 2]
]


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_dtypes(name, dtype):
    """Results and gradients have the operands' dtype, and are near those of the same numbers in more bits."""
    op = OPERATIONS[name]
    with jax.enable_x64(dtype == "float64"):
        at = differentiable(operands(name))
        args = [x.astype(dtype) if i in at else x for i, x in enumerate(operands(name))]
        wide = [x.astype("float64" if dtype == "float64" else "float32") if i in at else x for i, x in enumerate(args)]

        def both(fn, args):
            f, xs = of_floats(floats(fn), args)
            y, pull = jax.vjp(f, *xs)
            return y, pull([normal(30 + i, v.shape, dtype).astype(v.dtype) for i, v in enumerate(y)])

        got, expected = jax.jit(lambda args, wide: (both(op.fn, args), both(op.plain, wide)))(args, wide)
        assert {x.dtype.name for x in jax.tree.leaves(got)} == {dtype}
        close(jax.tree.map(lambda x, y: x.astype(y.dtype), got, expected), expected, TOLERANCES[dtype])


@pytest.mark.versions
@pytest.mark.parametrize("name", OPERATIONS)
def test_checkpoint_and_control_flow(name):
    """Gradients through jax.checkpoint, and of it a scan whose steps branch; tangents through a while_loop."""
    op, args = OPERATIONS[name], operands(name)

    def take(fn):
        def kept(f):
            return f if fn is op.plain else jax.checkpoint(f, policy=cutjax.checkpoint_policies.dots_saveable)

        def of(*args):
            def gradient(f):
                f, xs = of_floats(f, args)
                return jax.grad(lambda *xs: sum(jnp.sin(y).sum() for y in f(*xs)), range(len(xs)))(*xs)

            def branch(*xs):
                return jax.lax.cond(xs[0].sum() > 0, floats(fn), lambda *xs: [2 * y for y in floats(fn)(*xs)], *xs)

            def scanned(*args):
                pairs = [jnp.stack([x, x[::-1]]) for x in args]
                return jax.lax.scan(lambda c, xs: (c + 1, branch(*xs)), 0, pairs)[1]

            f, xs = of_floats(floats(fn), args)

            def loop(*xs):
                zeros = [jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(f, *xs)]

                def step(state):
                    return state[0] + 1, [a + y for a, y in zip(state[1], f(*xs), strict=True)]

                return jax.lax.while_loop(lambda state: state[0] < 2, step, (0, zeros))[1]

            return gradient(kept(floats(fn))), gradient(jax.checkpoint(scanned)), jax.jvp(loop, xs, tangents(xs))

        return of

    compare(take, (op.fn, op.plain), args, 1e-4)
