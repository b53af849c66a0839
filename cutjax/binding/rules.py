"""Functions that the rules of every primitive share: zero tangents, live equations, axes of a mesh, ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, partial_eval
from jax.sharding import AxisType


def is_zero(tangent: Any) -> bool:
    """True if a tangent is zero, known as such while tracing."""
    return isinstance(tangent, ad.Zero)


def none_if_zero(tangents: Sequence[Any]) -> list[Any]:
    """Returns the tangents, None in place of those that are zero."""
    return [None if is_zero(x) else x for x in tangents]


def written_out(tangents: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Returns the tangents, zeros as arrays."""
    return tuple(map(ad.instantiate_zeros, tangents))


def is_linear(operand: Any) -> bool:
    """True if an operand, in a transpose, is one of which a cotangent is wanted."""
    return ad.is_undefined_primal(operand)


def transposed(reference: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Returns the rule that transposes plain JAX's operation, where it is linear in some operands."""

    def rule(cotangents: Any, *args: Any, **params: Any) -> list[Any]:
        places = [i for i, x in enumerate(args) if is_linear(x)]

        def run(*linear: Any) -> Any:
            given: dict[int, Any] = dict(zip(places, linear, strict=True))
            return reference(*(given.get(i, x) for i, x in enumerate(args)), **params)

        back: Any = jax.linear_transpose(run, *(args[i].aval for i in places))
        found = dict(zip(places, back(list(written_out(cotangents))), strict=True))
        return [found.get(i) for i in range(len(args))]

    return rule


def zero_tangent(primal: Any) -> Any:
    """Returns the tangent that is zero, of a primal of any dtype."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def dce(rule: Callable[..., Any], used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Removes unused results of an equation: returns a flag for each operand that it still reads, and what remains."""
    eqn = rest[-1]  # after jax 0.10 an argument about references came before it
    if not any(used):
        return [False] * len(eqn.invars), None
    if all(used):
        return [True] * len(eqn.invars), eqn
    reading, params = rule(used, **eqn.params)
    outvars = [x for x, use in zip(eqn.outvars, used, strict=True) if use]
    invars = [x for x, read in zip(eqn.invars, reading, strict=True) if read]
    return reading, eqn.replace(invars=invars, outvars=outvars, params=params)


def reads(fn: Callable[..., Any], *args: Any) -> list[bool]:
    """Returns, for each leaf of the arguments, True if the results of a function depend on it."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return list(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def live(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns the equations that jit lowers: those whose results something uses."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def varying_axes(aval: Any) -> frozenset[Any]:
    """Returns the mesh axes of an enclosing shard_map over which a value varies."""
    return aval.mat.varying


def match_varying(*trees: Any) -> list[Any]:
    """Returns arrays, or pytrees of them, each varying over all axes any does, as shard_map(check_vma=True) asks."""
    leaves, tree = jax.tree.flatten(list(trees))
    varying = [varying_axes(jax.typeof(x)) for x in leaves]
    missing = [tuple(frozenset().union(*varying) - axes) for axes in varying]
    found = [lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(leaves, missing, strict=True)]
    return tree.unflatten(found)


def check_varying(where: str, avals: Sequence[Any]) -> None:
    """Raises if operands vary over different mesh axes."""
    if any(varying_axes(x) != varying_axes(avals[0]) for x in avals):
        shown = ", ".join(x.str_short() for x in avals)
        raise ValueError(f"{where}: operands vary over different mesh axes: {shown}")


def on_mesh(*avals: Any) -> Any:
    """Returns a sharding on the mesh that any of the operands lies on."""
    return next((x.sharding for x in avals if not x.sharding.mesh.empty), avals[0].sharding)


def broadcast_together(xs: Sequence[Any]) -> list[jax.Array]:
    """Returns arrays of one shape; under explicit sharding all lie as those that have an axis do, constants too."""
    shape = lax.broadcast_shapes(*(np.shape(x) for x in xs))
    spec: list[Any] = [None] * len(shape)
    mesh = None
    for x in xs:
        sharding = jax.typeof(x).sharding
        for i, axes in enumerate(sharding.spec, len(shape) - np.ndim(x)):
            if axes is not None and spec[i] is None:
                spec[i], mesh = axes, sharding.mesh
    if mesh is None:
        return [jnp.broadcast_to(x, shape) for x in xs]
    out = jax.NamedSharding(mesh, jax.P(*spec))
    return [x if np.shape(x) == shape else jnp.broadcast_to(x, shape, out_sharding=out) for x in xs]


def sharded(x: jax.Array) -> bool:
    """True if an axis but the last lies on a mesh axis, under explicit sharding: merging axes would move data."""
    return any_reduced(x) or any(axes is not None for axes in jax.typeof(x).sharding.spec[:-1])


def names_of(over: Any) -> tuple[str, ...]:
    """Returns the mesh axes that a spec names for one axis of an array: a name, several or None."""
    return () if over is None else (over,) if isinstance(over, str) else tuple(over)


def any_divided(*arrays: Any) -> bool:
    """True if any of arrays, avals or shardings says, by its type, how it lies on explicit mesh axes."""
    return any_reduced(*arrays) or any(over is not None for x in arrays for over in _spec(x))  # no sum's can be walked


def lying_as(x: jax.Array, like: Any) -> jax.Array:
    """Returns an array that lies on explicit mesh axes as an aval does."""
    return x if jax.typeof(x).sharding.spec == like.sharding.spec else jax.reshard(x, like.sharding)


def any_reduced(*arrays: Any) -> bool:
    """True if the type of any says that it is a sum over mesh axes, or yet to be added up."""
    return any(_spec(x).unreduced or _spec(x).reduced for x in arrays)


def refuse_reduced(where: str, avals: Sequence[Any], what: str = "operands") -> None:
    """Raises for arrays that are sums over mesh axes, or yet to be added up: no kernel is divided over such."""
    if any_reduced(*avals):
        shown = ", ".join(aval.str_short() for aval in avals)
        raise NotImplementedError(f"{where}: {what} must not be reduced over mesh axes, or not yet, got {shown}")


def _spec(x: Any) -> jax.P:
    aval: Any = jax.typeof(x) if isinstance(x, jax.Array | np.ndarray | np.generic) else x
    return getattr(aval, "sharding", aval).spec


def leaves_axes(mesh: Any, manual: Any = ()) -> bool:
    """True if a shard_map over axes of a mesh leaves some to XLA; those of one around it are the mesh's manual ones."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(mesh.shape[x] > 1 and x not in manual for x, kind in kinds if kind != AxisType.Manual)


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """Returns the explicit axes of a mesh, on which types say how arrays lie."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def on_devices(*arrays: jax.Array) -> bool:
    """True if arrays are known to lie on a mesh over which XLA divides: merging axes could move data."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return any(not mesh.empty and leaves_axes(mesh) for mesh in meshes)


def symbolic(x: Any) -> bool:
    """True if a size of an array is not known until a program that is exported runs."""
    return any(map(jax.export.is_symbolic_dim, x.shape))


def with_rank(x: jax.Array, rank: int) -> jax.Array:
    """Returns the array with axes of size 1 in front, up to a rank."""
    return x if x.ndim == rank else lax.expand_dims(x, range(rank - x.ndim))


def batch_axis(args: Sequence[jax.Array], dims: Sequence[int | None], at: int) -> list[jax.Array]:
    """Returns the arrays with the axis that vmap maps at one place, of size 1 where one is not mapped."""
    moved = zip(args, dims, strict=True)
    return [lax.expand_dims(x, [at]) if dim is None else jnp.moveaxis(x, dim, at) for x, dim in moved]
