"""The names of problems in files of measured kernels."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any

import numpy as np

from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.operand import Groups, Operand
from cutjax.kernels.problem import Problem


def fields(problem: Problem) -> dict[str, Any]:
    """Returns the arguments of ``Problem.of`` for a problem, but for device and epilogue."""
    p, groups = problem, problem.groups or Groups(0, "m")
    dtypes = {"a_dtype": p.a.dtype.name, "b_dtype": p.bs[0].dtype.name, "out_dtype": p.out_dtype.name}
    batches = {"batch": p.batch, "a_batch": p.a.batch, "b_batch": p.bs[0].batch}
    of_groups = {"groups": groups.count, "ragged": p.divided, "leading": groups.leading, "sizes_batch": groups.batch}
    found = {"m": p.m, "n": p.n, "k": p.k, "layout": p.layout, **dtypes, **batches, **of_groups, "in_place": p.in_place}
    return {**found, "symmetric": p.symmetric, "orders": p.orders, "math": p.math}


@functools.lru_cache(maxsize=4096)
def key(problem: Problem) -> str:
    """Returns the name of a problem on any device, the same in every process and version of Python.

    It is the fields that are not their defaults. Version 1, which does not say so, names operands by dtypes, a layout
    and orders. Version 2 adds the operands one by one, where that is not all of them: with bits, scales, views,
    prologues.
    """
    found = fields(problem)
    if not problem.strided:
        del found["orders"]
    if not problem.plain:
        found["epilogue"] = _hash(problem.epilogue)
    operands = problem.a, *problem.bs
    if len(set(problem.bs)) > 1 or not all(operand.plain for operand in operands):
        found |= {"version": 2, "operands": list(map(_described, operands))}
    return _text(found)


_encode = json.JSONEncoder(separators=(",", ":"), default=int).encode

# Of the fields of a problem.
_DEFAULTS = {"layout": "nn", "groups": 0, "ragged": "", "leading": False, "symmetric": False, "math": ""}
_DEFAULTS |= dict.fromkeys(("a_dtype", "b_dtype", "out_dtype"), "bfloat16")
_DEFAULTS |= {name: [] for name in ("batch", "a_batch", "b_batch", "sizes_batch", "in_place")}


def _text(found: dict[str, Any]) -> str:
    def is_default(name: str, x: Any) -> bool:
        return name in _DEFAULTS and _DEFAULTS[name] == (list(x) if isinstance(x, tuple) else x)

    said = {name: x for name, x in found.items() if not is_default(name, x)}
    return _encode(said)


def recorded(text: str) -> str:
    """Returns the key of today for one in a file, which may have been recorded with the defaults."""
    if '"sizes_batch":' not in text:
        return text
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return _text(found) if isinstance(found, dict) else text


def _described(operand: Operand) -> list[Any]:
    scale: Any = operand.scale
    if scale is not None:
        scale = (scale.dtype.name, scale.mn, scale.k, scale.zero and scale.zero.name)
    view = operand.view and (type(operand.view).__name__, dataclasses.astuple(operand.view))
    prologue = [_hash(operand.prologue)] if operand.prologue else []
    return [operand.dtype.name, operand.contiguous, operand.batch, operand.order, operand.bits, scale, view, *prologue]


def _hash(expression: Epilogue) -> str:
    text = json.dumps(dataclasses.astuple(expression), separators=(",", ":"), default=np.generic.item)
    return hashlib.sha256(text.encode()).hexdigest()
