"""Products of a program that become float8 ones: which, and what their operands are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from cutjax.fusion.jaxprs import is_literal, is_marked, opened, with_equations
from cutjax.fusion.narrow import in_place_of
from cutjax.fusion.report import Report
from cutjax.ops.fp8 import Fp8DotGeneral, fp8_dot_general
from cutjax.ops.fp8_product import ACTIVATIONS, GRADIENTS, WEIGHTS, Roles

Recipes = str | Fp8DotGeneral | Callable[[Any, Any], Any] | None


def recipe_of(fp8: Recipes, lhs: Any, rhs: Any) -> Fp8DotGeneral | None:
    """Returns the function for a product of two arrays, or None.

    Raises:
      TypeError: if ``fp8`` is, or makes of the two, none of what ``cutjax.fuse`` takes.
    """
    if callable(fp8) and not isinstance(fp8, Fp8DotGeneral):
        fp8 = fp8(lhs, rhs)
    if fp8 is None or isinstance(fp8, Fp8DotGeneral):
        return fp8
    if not isinstance(fp8, str):
        raise TypeError(f"fuse: fp8 must be a recipe, cutjax.fp8_dot_general(...) or a function of both, got {fp8!r}")
    return fp8_dot_general(fp8)


def quantized(jaxpr: Any, fp8: Recipes, scope: str) -> tuple[Any, list[Report], dict[Any, str]]:
    """Returns a program with float8 products in the place of some, a report of each, and why others are none.

    These are dense products of two arrays of one dtype of 16 bits: batched ones, as attention's, have no weights, and
    what is computed in float32 is so for a reason.

    Args:
      jaxpr: the program.
      fp8: as ``cutjax.fuse`` has it.
      scope: the names of the scopes that the program is in.
    """
    eqns: list[Any] = []
    reports, wide = [], {}
    for eqn in opened(jaxpr).eqns:
        made = None
        if eqn.primitive is jax.lax.dot_general_p and not is_marked(eqn):
            made = _made(eqn, fp8, scope)
            if isinstance(made, str):
                wide[eqn.outvars[0]], made = made, None
            elif made is not None:
                made, why = made
                reports.append(Report(eqn, "float8", why))
        eqns += [eqn] if made is None else made
    return (with_equations(jaxpr, eqns) if reports else jaxpr), reports, wide


def _made(eqn: Any, fp8: Recipes, scope: str) -> tuple[list[Any], str] | str | None:
    """Returns the equations of a float8 product and its recipe, why it is none, or None of what is none of these."""
    lhs, rhs = (x.aval for x in eqn.invars)
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    if any(map(is_literal, eqn.invars)) or lhs.dtype != rhs.dtype or lhs.dtype.name not in ("bfloat16", "float16"):
        return None
    if numbers[1][0] or min(lhs.ndim, rhs.ndim) < 2:
        return None
    function = recipe_of(fp8, lhs, rhs)
    if function is None:
        return "kept out"
    roles = _roles(f"{scope}/{eqn.source_info.name_stack}", numbers)
    if why := function.why_not(lhs, rhs, numbers, eqn.params["precision"], out, roles):
        return why
    params = eqn.params
    how = numbers, params["precision"], params["preferred_element_type"], params["out_sharding"], roles
    made = in_place_of(eqn, lambda x, y: function.of_roles(x, y, *how), eqn.invars)
    recipe = function.recipe
    return None if made is None else (made, f"{recipe.name}, {' by '.join(roles)}, gradients {recipe.gradients}")


def _roles(scope: str, numbers: Any) -> Roles:
    """Returns the roles of a product's operands, by the names that jax gives those it differentiates.

    In the transpose of a product jax puts the cotangent first. It contracts its rows, the first axis, for the gradient
    of weights, and its columns for that of activations.
    """
    backward = "transpose(jvp" in scope and "rematted_computation" not in scope
    if not backward:
        return ACTIVATIONS, WEIGHTS
    ((contracted, _), _) = numbers
    return GRADIENTS, ACTIVATIONS if 0 in contracted else WEIGHTS
