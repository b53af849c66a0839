"""The choice among the plans of a contraction, and XLA, by predicted time."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from cutjax.binding import lowering
from cutjax.dot_precision import Canonical
from cutjax.dtypes import are_narrow
from cutjax.kernels import tuned, xla
from cutjax.kernels.choose import Choice, choose, in_precision
from cutjax.kernels.device import Device, device_of
from cutjax.kernels.families import in_order
from cutjax.kernels.prepared import moved_us
from cutjax.kernels.problem import Problem
from cutjax.ops.contraction import Contraction


def fastest(
    plans: tuple[Contraction, ...], lhs: Any, rhs: Any, out_dtype: Any, precision: Canonical, backend: str, lead: float
) -> Contraction | None:
    """Returns the plan whose kernel is predicted to be the fastest, copies included; None where XLA's own product is.

    What nobody knows the time of is left as it was: the first plan, which copies the fewest bytes.

    Args:
      plans: of one product, as `contractions` returns them.
      lhs, rhs: operands.
      out_dtype: of the result.
      precision: of the product.
      backend: "cuda" asks for a kernel, whatever XLA takes, and "xla" for none.
      lead: how many times as fast as XLA's product a kernel must be.
    """
    if (len(plans) == 1 and not plans[0].copied) or backend == "xla":
        return plans[0]
    dtypes = np.dtype(lhs.dtype), np.dtype(rhs.dtype), np.dtype(out_dtype)
    device = device_of(lowering.target())
    kernels: list[tuple[float, Contraction]] = []
    xlas: list[float] = []
    for plan in plans:
        problem = _problem(plan, dtypes, device)
        asked = problem and in_precision(problem, precision)
        if not asked or isinstance(asked, Choice):
            return plans[0]
        copies = [move.copied for move in (plan.a, plan.b, plan.d) if move.copied]
        copied_us = moved_us(2 * sum(copies), device) + len(copies)
        kernel = choose(asked, backend="cuda")
        if kernel.time_us is not None:
            kernels.append((kernel.time_us * lead + copied_us, plan))
        measured = (entry.xla_us for entry in tuned.find(asked) if entry.xla_us)
        if (xla_us := next(measured, None) or xla.time_us(asked)) is not None:
            xlas.append(xla_us + copied_us)
    us, plan = min(kernels, key=lambda found: found[0], default=(math.inf, plans[0]))
    return plan if backend == "cuda" or not xlas or us <= min(xlas) else None


def _problem(plan: Contraction, dtypes: tuple[np.dtype, np.dtype, np.dtype], device: Device) -> Problem | None:
    """Returns the problem of a plan, of operands that are widened as products widen them; None where none does."""
    lhs, rhs, out = dtypes
    a, b = (rhs, lhs) if plan.swapped else (lhs, rhs)
    if are_narrow(b, a):
        a = b
    avals = jax.ShapeDtypeStruct(plan.a.shape, a), jax.ShapeDtypeStruct(plan.b.shape, b)
    try:
        problem = Problem.of_arrays(*avals, layout=plan.layout, out_dtype=out, device=device)
    except ValueError:
        return None
    return in_order(problem, plan.orders)
