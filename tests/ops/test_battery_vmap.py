"""Every operation under vmap against plain JAX: each operand, of products over each axis; pairs, nested, gradients."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from checks import compare, inexact, squares, stacked
from operations import FORMS, OPERATIONS, differentiable, in_turn, main, of_floats, operands, telling

TELLING = [form for form in FORMS if telling(form)]


def forms(found):
    return pytest.mark.parametrize(("name", "layout"), found, ids=lambda x: x or "only")


def floats(fn):
    return lambda *args: inexact(fn(*args))


def batched(args, axes):
    return [stacked(x, axis) for x, axis in zip(args, axes, strict=True)]


PRODUCTS = ("gemm", "syrk", "grouped_gemm", "grouped_outer")  # of which all others are made


def alone(args, every: bool) -> list[tuple[int | None, ...]]:
    """Each operand over each of its axes, or over one that changes from one to the next."""
    axes = [range(x.ndim + 1) if every else [i % (x.ndim + 1)] for i, x in enumerate(args)]
    return [tuple(axis if i == j else None for j in range(len(args))) for i, of in enumerate(axes) for axis in of]


def pairs(args) -> list[tuple[int | None, ...]]:
    """Pairs of operands, over axes that change from pair to pair: each fifth, and all of two operands."""
    found = []
    for turn, (i, j) in enumerate(itertools.combinations(range(len(args)), 2)):
        axes = {i: turn % (args[i].ndim + 1), j: (turn + 1) % (args[j].ndim + 1)}
        found.append(tuple(axes.get(at) for at in range(len(args))))
    return found[::5]


def gradient_of_each(fn, axes, args):
    def gradient(*args):
        f, xs = of_floats(floats(fn), args)
        return jax.grad(squares(f), range(len(xs)))(*xs)

    return jax.vmap(gradient, axes)(*args)


def gradient_of_sum(fn, axes, args):
    f, xs = of_floats(jax.vmap(floats(fn), axes), args)
    return jax.grad(squares(f), range(len(xs)))(*xs)


def tangents(fn, axes, args):
    f, xs = of_floats(jax.vmap(floats(fn), axes), args)
    return jax.jvp(f, xs, xs)


@forms(TELLING)
def test_values(name, layout):
    """Results' axes last for every other, the first else; of options every other operand."""
    op, args = OPERATIONS[name], operands(name)
    axes_of = alone(args, name in PRODUCTS and layout == next(iter(op.layouts), ""))
    axes_of = [*axes_of[:: 1 if main(name) else 2], *pairs(args)]

    def take(fn):
        return lambda *args: [
            jax.vmap(floats(fn), axes, -1 if i % 2 else 0)(*batched(args, axes)) for i, axes in enumerate(axes_of)
        ]

    compare(take, (op.of_layout(layout), op.plain), args, 1e-4)


@forms([(name, layout) for name, layout in TELLING if name in in_turn(0)])
def test_derivatives(name, layout):
    """Gradients of a sum with each operand batched, of many the first or the last; of each, and tangents, with all."""
    op, args = OPERATIONS[name], operands(name)
    ways = [(gradient_of_sum, axes) for axes in alone(args, False)]
    if len(args) > 3 or layout != next(iter(op.layouts), ""):
        ways = [ways[0 if len(name) % 2 else -1]]
    ways.append((gradient_of_each, (0,) * len(args)))
    if main(name):
        ways.append((tangents, tuple(x.ndim for x in args)))

    def take(fn):
        return lambda *args: [of(fn, axes, batched(args, axes)) for of, axes in ways]

    compare(take, (op.of_layout(layout), op.plain), args, 1e-4)


@pytest.mark.versions
@pytest.mark.parametrize("name", in_turn(1))
def test_nested(name):
    """A vmap of a vmap: all operands with one again, or of products the same one twice; and the gradient of those."""
    op, args = OPERATIONS[name], operands(name)
    n = len(args)
    last = differentiable(args)[-1]
    ways = [((0,) * n, tuple(1 if i == last else None for i in range(n)))]
    if name in PRODUCTS:
        ways.append(((0,) + (None,) * (n - 1),) * 2)

    def take(fn):
        def of(*args):
            found = []
            for inner, outer in ways:
                nested = jax.vmap(jax.vmap(floats(fn), inner), outer)
                f, xs = of_floats(nested, batched(batched(args, inner), outer))
                y, pull = jax.vjp(f, *xs)
                found.append((y, pull(jax.tree.map(jnp.cos, y))))
            return found

        return of

    compare(take, (op.fn, op.plain), args, 1e-4)
