"""Functions that capture arrays on explicit mesh axes, where those axes are automatic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import source_info_util

from cutjax.binding.rules import explicit_axes
from cutjax.epilogue.jaxpr import CALLS, bind_equation, callee, evaluate, has_rule, is_open, placed_anywhere
from cutjax.epilogue.rules import Irregular, Rule


def on_automatic_axes(fn: Callable[..., Any], mesh: Any, lies: Callable[[Any], jax.P]) -> Callable[..., Any]:
    """Returns a function of arrays on automatic axes; what it captures may lie on the explicit axes of ``mesh``.

    The function is traced as on the mesh. Where it captures what lies there, its equations are computed again, of that
    as automatic axes have it.

    Args:
      fn: the function.
      mesh: the mesh.
      lies: of an argument, returns how it is taken to lie on the mesh, first of all; then it is taken to be whole.
    """

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        for of in (lies, lambda _: jax.P()):
            try:
                given = [_struct(jax.typeof(x), jax.NamedSharding(mesh, of(x))) for x in leaves]
                with jax.sharding.use_abstract_mesh(mesh):
                    traced = jax.make_jaxpr(lambda *xs: fn(*tree.unflatten(xs)), return_shape=True)
                    closed, shapes = traced(*given)
            except Exception:  # of any type, where an operation refuses arrays that lie so
                continue  # the function's own error is raised below, where it runs as it stands
            explicit = [bool(explicit_axes(jax.typeof(x).sharding.mesh)) for x in closed.consts]
            if not any(explicit):
                break
            consts = [jax.reshard(x, jax.P()) if each else x for x, each in zip(closed.consts, explicit, strict=True)]
            found = evaluate(closed.jaxpr, consts, leaves, functools.partial(_bind, mesh=mesh))
            return jax.tree.structure(shapes).unflatten(found)
        return fn(*args)

    return call


def _struct(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type, manual_axis_type=aval.mat
    )


def _bind(eqn: Any, args: list[Any], mesh: Any) -> list[Any]:
    """Computes an equation that was traced on the explicit axes of a mesh, as of the line it was traced at."""
    with source_info_util.user_context(eqn.source_info.traceback):
        return _bound(eqn, args, mesh)


def _bound(eqn: Any, args: list[Any], mesh: Any) -> list[Any]:
    name = eqn.primitive.name
    if has_rule(eqn):
        try:
            with jax.sharding.use_abstract_mesh(mesh):
                rule = Rule(eqn)
        except Irregular as why:
            raise NotImplementedError(
                f"epilogue: {why}, in a function that captures an array on explicit mesh axes; give it as an operand"
            ) from None
        return rule(*args)
    if name in CALLS and is_open(eqn):
        return evaluate(*callee(eqn), args, functools.partial(_bind, mesh=mesh))
    return args if name == "reshard" else bind_equation(placed_anywhere(eqn), args)
