"""cutjax.fuse: the products of a function with what is computed around them, as kernels, without a change to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cutjax.binding import walk
from cutjax.epilogue.jaxpr import bind_equation
from cutjax.fusion.rewrite import POLICIES, Rewriter


class _Static:
    """A leaf of the arguments that is no array, hashable whatever it is."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self.key: Any = (type(value), hash(value))
        except TypeError:
            self.key = id(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Static) or self.key != other.key:
            return False
        return self.value is other.value or (isinstance(self.key, tuple) and bool(self.value == other.value))


def fuse(fn: Callable[..., Any], *, policy: str = "auto") -> Callable[..., Any]:
    if policy not in POLICIES:
        raise ValueError(f"fuse: unknown policy {policy!r}, expected one of {POLICIES}")
    if not callable(fn):
        raise TypeError(f"fuse: expected a function, got {type(fn).__name__}")
    name = getattr(fn, "__name__", type(fn).__name__)

    def run(arrays: list[Any], static: tuple[_Static | None, ...], tree: Any) -> Any:
        structure = None

        def flat(*given: Any) -> list[Any]:
            nonlocal structure
            leaves = iter(given)
            args, kwargs = jax.tree.unflatten(tree, [next(leaves) if x is None else x.value for x in static])
            out, structure = jax.tree.flatten(fn(*args, **kwargs))
            return out

        flat.__name__ = name
        try:
            closed = jax.make_jaxpr(jax.jit(flat))(*arrays)
        except Exception as error:
            error.add_note(f"while cutjax.fuse traced {name}")
            raise
        (eqn,) = closed.eqns
        args = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *arrays), strict=True))
        rewriter = Rewriter(policy)
        program = rewriter.rewrite(eqn.params["jaxpr"])
        walk.annotate(program, tuple(rewriter.reports))
        eqn = eqn.replace(params={**eqn.params, "jaxpr": program})
        found = dict(zip(eqn.outvars, bind_equation(eqn, [args[x] for x in eqn.invars]), strict=True))
        return jax.tree.unflatten(structure, [found[x] for x in closed.jaxpr.outvars])

    jitted = jax.jit(run, static_argnums=(1, 2), inline=True)

    @functools.wraps(fn)
    def fused(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray | np.generic)]
        static = tuple(None if isinstance(x, jax.Array | np.ndarray | np.generic) else _Static(x) for x in leaves)
        return jitted(arrays, static, tree)

    return fused
