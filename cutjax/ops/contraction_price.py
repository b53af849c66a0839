"""The choice among the plans of a contraction, and XLA, by predicted time."""

from __future__ import annotations

import math
from collections.abc import Collection
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
from cutjax.kernels.prepared import along_k, passing_us
from cutjax.kernels.problem import Problem
from cutjax.ops.contraction import Contraction, Move

# The share of the rate of a copy at which XLA transposes, besides a launch: seven that move 34 to 250 MB reach 0.79 to
# 0.96 of it, whether the last axis stays or not (experiments/deep-tf32-h200.json).
_TRANSPOSED = 0.93
# Columns of which XLA's kernel by Triton has all in one tile, so that it reads rows once, wherever they lie. Up to 96
# of TF32 were measured, and 16 of 16 bits.
_ONE_TILE, _ONE_TILE_HALVES = 128, 16


def fastest(
    plans: tuple[Contraction, ...], lhs: Any, rhs: Any, out_dtype: Any, precision: Canonical, backend: str, lead: float
) -> tuple[Contraction | None, str]:
    """Returns the plan that is predicted to be the fastest, copies included, and the backend that is to multiply it.

    The plan is None where XLA's own contraction is faster than any. What nobody knows the time of is left as it was:
    the first plan, which copies the fewest bytes.

    XLA's own has the matrices of the last plan: it merges the rows of each operand to one axis and transposes arrays
    for that. Told that plan it copies as much, but where its kernel takes the copies into its loads and stores.

    Args:
      plans: of one product, as `contractions` returns them.
      lhs, rhs: operands.
      out_dtype: of the result.
      precision: of the product.
      backend: "cuda" asks for a kernel, whatever XLA takes, and "xla" for none.
      lead: how many times as fast as XLA's product a kernel must be.
    """
    if (len(plans) == 1 and not plans[0].copied) or backend == "xla":
        return plans[0], backend
    dtypes = np.dtype(lhs.dtype), np.dtype(rhs.dtype), np.dtype(out_dtype)
    device = device_of(lowering.target())
    kernels: list[tuple[float, Contraction]] = []
    xla_us, in_one = None, False
    for plan in plans:
        problem = _problem(plan, dtypes, device)
        asked = problem and in_precision(problem, precision)
        if not asked or isinstance(asked, Choice):
            return plans[0], backend
        kernel = choose(asked, backend=backend, lead=lead)  # none where XLA would multiply this plan instead
        if kernel.time_us is not None and kernel.resolved is not None:
            # A copy of what the kernel reads another copy of is one pass over memory: XLA fuses them.
            again = {operand.buffer for operand in kernel.resolved.prepared}
            kernels.append((kernel.time_us * lead + _copies_us(plan, device, again), plan))
        if plan is plans[-1]:
            measured = (entry.xla_us for entry in tuned.find(asked) if entry.xla_us)
            # What it copies it may as well put along k, which its products of TF32 read faster.
            xla_us = next(measured, None) or xla.time_us(along_k(asked) if plan.a.copied or plan.b.copied else asked)
            in_one = _in_one_kernel(plan, asked)
            if xla_us is not None and in_one and asked.a.bits == 16:  # told after our kernels, which take longer
                xla_us = min(xla_us, xla.LAUNCH_US + passing_us(asked))
            if xla_us is not None and not in_one:
                xla_us += _copies_us(plan, device)
    us, plan = min(kernels, key=lambda found: found[0], default=(math.inf, plans[0]))
    if backend == "cuda" or xla_us is None or us <= xla_us:
        return plan, backend
    return (plans[-1], "xla") if in_one else (None, backend)


def _copies_us(plan: Contraction, device: Device, again: Collection[int] = ()) -> float:
    """Returns the microseconds of a plan's copies, but for those of some operands, 0 for a and 1 for b."""
    copies = [x.copied for i, x in enumerate((plan.a, plan.b, plan.d)) if x.copied and i not in again]
    return device.moving_us(2 * sum(copies), _TRANSPOSED) + len(copies)


def _in_one_kernel(plan: Contraction, problem: Problem) -> bool:
    """True if XLA multiplies a plan, copies and all, in one kernel, as it does not where it makes the plan itself.

    So it does few columns by rows of a that lie on both sides of the contraction, as those of the result lie on both
    sides of the columns: a product along an axis in the middle. That was measured of TF32 and of 16 bits alone. Before
    an axis of 3 it copies a all the same, and takes 0.76 of its own contraction's time.
    """
    most = _ONE_TILE if problem.math == "tf32" else _ONE_TILE_HALVES if problem.a.bits == 16 else 0
    few = problem.batch_size == 1 and problem.n <= most
    copied = plan.a.copied > 0 and not plan.b.copied
    return few and copied and problem.layout[0] == "t" and _turns(plan.a) and _turns(plan.d)


def _turns(move: Move) -> bool:
    """True if a transposition swaps two runs of neighbouring axes and leaves the others."""
    moved = [axis for place, axis in enumerate(move.permutation) if axis != place]
    first = moved.index(min(moved)) if moved else 0
    return moved[first:] + moved[:first] == sorted(moved)


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
