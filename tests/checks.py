"""Helpers of all tests: operands from numpy, comparisons, two functions compared in one program, meshes, residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import print_saved_residuals

import cutjax
from cutjax.kernels import gather, keys, routing
from cutjax.kernels.network import problem as network
from cutjax.kernels.problem import Problem

# Operands are made by numpy and put on a device: jnp would compile a program for each of their shapes.


def integers(seed: int, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """-2..2: every order of summation is exact, so results must be equal."""
    return jax.device_put(np.random.default_rng(seed).integers(-2, 3, tuple(shape)).astype(dtype))


def normal(seed: int, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).standard_normal(tuple(shape)).astype(dtype))


def scaled(seed: int, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Normal numbers of which a product with the next to last axis as depth has values of about one."""
    found = np.random.default_rng(seed).standard_normal(tuple(shape)).astype(np.float32)
    return jax.device_put((found / (shape[-2] if len(shape) > 1 else 1) ** 0.5).astype(dtype))


def same(got: Any, expected: Any) -> None:
    """Asserts that two trees are equal, dtypes included."""

    def check(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)

    jax.tree.map(check, got, expected)


def close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Asserts that two trees are near each other, by an array's largest value, with the same dtypes."""

    def check(x, y):
        assert x.dtype == y.dtype
        wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
        x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1, np.abs(y).max(initial=0)))

    jax.tree.map(check, got, expected)


# conftest.py has fusions compiled without MLIR, by an emitter that rounds to float8 twice and has another tanh.
_ROUNDING = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


def rounding(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function under jit, each of its values rounded to its dtype, once."""
    return jax.jit(fn, compiler_options=_ROUNDING | {"xla_allow_excess_precision": False})


def compare(
    take: Callable[[Callable[..., Any]], Callable[..., Any]],
    functions: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    tolerance: float | None = None,
) -> None:
    """Asserts that ``take(f)(*args)`` is the same for two functions, or close: one program, for one compilation."""
    got, expected = jax.jit(lambda *args: [take(f)(*args) for f in functions])(*args)
    same(got, expected) if tolerance is None else close(got, expected, tolerance)


def squares(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A scalar with second derivatives in every result of a function."""
    return lambda *args: sum((y.astype(jnp.float32) ** 2).sum() for y in inexact(f(*args)))


def inexact(tree: Any) -> list[jax.Array]:
    return [y for y in jax.tree.leaves(tree) if jnp.issubdtype(y.dtype, jnp.inexact)]


def mesh_of(kind: Any = jax.sharding.AxisType.Auto, **axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def stacked(x: jax.Array, axis: int | None) -> jax.Array:
    """Three of an operand, different ones; the sizes of groups in other orders."""
    if axis is None:
        return x
    others = (jnp.roll(x, 1, -1), x[..., ::-1]) if jnp.issubdtype(x.dtype, jnp.integer) else (0.5 - x, x[::-1])
    return jnp.stack([x, *others], axis)


def saved(capsys: Any, fn: Callable[..., Any], *args: Any) -> list[str]:
    """Types of the residuals that are no arguments, sorted; what JAX says of each follows the type."""
    print_saved_residuals(fn, *args)
    return sorted(line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line)


def types(lines: Sequence[str]) -> list[str]:
    return [line.split()[0] for line in lines]


def problems(fn: Callable[..., Any], *args: Any) -> list[tuple[Any, ...]]:
    """The products of a function: sizes, layout, and fused ones' results."""
    found = []
    for row in cutjax.explain(fn)(*args).rows:
        p = row.choice.problem
        found += [(p.m, p.n, p.k, p.layout, row.outputs)] * row.count
    return sorted(found)


def multiplied(rows: Sequence[Any]) -> list[Any]:
    """The rows of products: not of routing, gathers and networks, which XLA runs where no kernel does."""
    others = gather.Problem | routing.Problem | network.Problem
    return [row for row in rows if not isinstance(row.choice.problem, others)]


def changed(problem: Problem, **fields: Any) -> Problem:
    """The problem with other values of some fields of ``Problem.of``."""
    same = {} if "out_dtype" in fields else {"epilogue": problem.epilogue}
    return Problem.of(**{**keys.fields(problem), "device": problem.device, **same, **fields})
