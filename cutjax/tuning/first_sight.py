"""Measured choices as programs are lowered, for who asks for them: what a new problem runs is timed, and kept."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from cutjax.binding import lowering, walk
from cutjax.kernels import tuned
from cutjax.kernels.choose import Choice
from cutjax.runtime import compiler, tuning_file
from cutjax.tuning import autotune, measure

SECONDS = 0.2  # of the device for a problem whose calls are long, beside what checks them

_seen: set[tuple[Any, int]] = set()  # also of those whose measurement failed: once a process


def look(primitive: core.Primitive, avals: Sequence[Any], params: dict[str, Any]) -> None:
    """Times the kernels of a product about to be lowered, if `use_tuning` asks for it and nobody has timed them."""
    count = tuned.measured()
    if not count or params["backend"] == "xla" or not _possible():
        return
    choice = lowering.choosers[primitive](*avals, target=lowering.target(), **params)
    if not isinstance(choice, Choice) or not choice.problem.flops or (choice.problem, count) in _seen:
        return
    _seen.add((choice.problem, count))
    if tuned.find(choice.problem):
        return
    operands = [types.SimpleNamespace(aval=aval) for aval in avals]
    eqn = types.SimpleNamespace(primitive=primitive, params=params, invars=operands)
    run = functools.partial(
        autotune.run, most=count, path=tuning_file.user_path(), progress=True, seconds=SECONDS, again=False
    )
    # In a thread of its own, where none of the scopes holds that the program is lowered in: meshes, devices, tuning.
    measure.parallel(run, [[walk.Found(eqn, 1, True, False)]])


def _possible() -> bool:
    """Returns True if this process times kernels: alone, on a GPU, with a compiler, into a file that it may write."""
    if not lowering.on_cuda() or compiler.compiler_missing():
        return False
    if jax.process_count() > 1:
        _warn("a job of several processes times no kernels: all must compile one program. Measure in one process first")
        return False
    try:
        tuning_file.check_writable(tuning_file.user_path())
    except (OSError, ValueError) as error:
        _warn(f"no kernels are timed: {error}")
        return False
    return True


@functools.cache
def _warn(why: str) -> None:
    warnings.warn(f"use_tuning(measure=): {why}", RuntimeWarning, stacklevel=3)
