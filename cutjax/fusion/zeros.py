"""Variables that are zero where others are: what a tail beside rows in groups must be in rows of no group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cutjax.epilogue.jaxpr import CALLS, callee
from cutjax.fusion.jaxprs import is_literal

_NAMES = (
    "abs asin asinh atan atanh cbrt ceil convert_element_type copy erf erf_inv expm1 floor imag log1p name neg pcast "
    "pvary real reduce_precision reshape round sign sin sinh sqrt square squeeze expand_dims stop_gradient tan tanh"
)
_ODD = frozenset(_NAMES.split())  # zero of zero


def zeros(eqns: Iterable[Any], given: set[Any]) -> set[Any]:
    """Returns the variables of elementwise equations that are zero wherever those given are, as far as that is seen."""
    found = set(given)

    def is_zero(x: Any) -> bool:
        return bool(np.all(np.asarray(x.val) == 0)) if is_literal(x) else x in found

    for eqn in eqns:
        name, args = eqn.primitive.name, [is_zero(x) for x in eqn.invars]
        if name in CALLS:
            jaxpr, _ = callee(eqn)
            inner = zeros(jaxpr.eqns, {x for x, zero in zip(jaxpr.invars, args, strict=True) if zero})
            found.update(x for x, y in zip(eqn.outvars, jaxpr.outvars, strict=True) if not is_literal(y) and y in inner)
            continue
        match name:
            case "mul":
                zero = any(args)
            case "div" | "broadcast_in_dim":
                zero = args[0]
            case "integer_pow":
                zero = args[0] and eqn.params["y"] > 0
            case "select_n":
                zero = all(args[1:])
            case "add" | "sub" | "add_any" | "max" | "min":
                zero = all(args)
            case _:
                zero = name in _ODD and all(args)
        if zero:
            found.update(eqn.outvars)
    return found
