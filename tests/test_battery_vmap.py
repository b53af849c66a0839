"""Every operation under vmap against plain JAX: each operand over each axis, pairs, all, nested, with gradients."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from checks import compare, inexact, squares, stacked
from operations import FORMS, OPERATIONS, differentiable, of_floats, operands


def _mapped(name: str, layout: str) -> bool:
    """True if the layout is the first, or that of a product: other layouts of layers are those of their products."""
    op = OPERATIONS[name]
    return layout == next(iter(op.layouts), "") or " " in op.linear or " " not in op.operands


SOME = [form for form in FORMS if _mapped(*form)]
forms = pytest.mark.parametrize(("name", "layout"), SOME, ids=lambda x: x or "only")


def floats(fn):
    return lambda *args: inexact(fn(*args))


def batched(args, axes):
    return [stacked(x, axis) for x, axis in zip(args, axes, strict=True)]


def alone(args) -> list[tuple[int | None, ...]]:
    """Each operand over each of its axes."""
    return [
        tuple(axis if i == j else None for j in range(len(args)))
        for i, x in enumerate(args)
        for axis in range(x.ndim + 1)
    ]


def pairs(args) -> list[tuple[int | None, ...]]:
    """Each pair of operands, over axes that change from pair to pair; and all of them, over the first and the last."""
    found = []
    for turn, (i, j) in enumerate(itertools.combinations(range(len(args)), 2)):
        axes = {i: turn % (args[i].ndim + 1), j: (turn + 1) % (args[j].ndim + 1)}
        found.append(tuple(axes.get(at) for at in range(len(args))))
    return [*found, (0,) * len(args), tuple(x.ndim for x in args)]


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
    return jax.jvp(f, xs, xs)[1]


@forms
def test_values(name, layout):
    """Results' axes last for every other, the first else."""
    op, args = OPERATIONS[name], operands(name)

    def take(fn):
        return lambda *args: [
            jax.vmap(floats(fn), axes, -1 if i % 2 else 0)(*batched(args, axes))
            for i, axes in enumerate(alone(args) + pairs(args))
        ]

    compare(take, (op.of_layout(layout), op.plain), args, 1e-4)


@forms
@pytest.mark.parametrize("which", ["each alone", "pairs and all"])
def test_derivatives(name, layout, which):
    op, args = OPERATIONS[name], operands(name)
    derivatives = [gradient_of_sum, gradient_of_each if which == "each alone" else tangents]
    if which == "each alone":
        axes_of = [axes for axes in alone(args) if 0 in axes]
    elif len(args) > 1:
        axes_of = [*pairs(args)[:: 1 if len(args) < 4 else 5], (0,) * len(args)]
    else:
        axes_of = [(args[0].ndim,)]

    def take(fn):
        return lambda *args: [of(fn, axes, batched(args, axes)) for axes in axes_of for of in derivatives]

    compare(take, (op.of_layout(layout), op.plain), args, 1e-4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_nested(name):
    """A vmap of a vmap: the same operand twice, another one, both; and the gradient of those."""
    op, args = OPERATIONS[name], operands(name)
    n = len(args)
    last = differentiable(args)[-1]
    ways = [((0,) + (None,) * (n - 1),) * 2]
    ways.append((ways[0][0], tuple(0 if i == last else None for i in range(n))))
    ways.append(((0,) * n, tuple(1 if i == last else None for i in range(n))))
    ways.append(((0,) * n, (1,) * n))

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
