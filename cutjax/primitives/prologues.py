"""Prologues of factors as expressions: their operands, in which dtype their results are, and batch axes made rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, Output
from cutjax.epilogue.merge import merged
from cutjax.kernels.operand import Operand


def operand_with(like: Operand, values: Any, arrays: Sequence[Any], prologue: Epilogue) -> Operand:
    """Returns the operand of a kernel's problem that is like another, of values of which a prologue makes it."""
    prologue = dataclasses.replace(prologue, operands=specs_of(arrays)).primal
    batch = tuple(values.shape[:-2])
    return dataclasses.replace(like, dtype=values.dtype, bits=0, batch=batch, prologue=prologue)


def specs_of(operands: Sequence[Any]) -> tuple[OperandSpec, ...]:
    """Returns the specs of a prologue's operands: the axes of the array that each varies along, and its dtype."""
    return tuple(
        OperandSpec(x.dtype.name, x.shape[-2] != 1, x.shape[-1] != 1, tuple(size != 1 for size in x.shape[:-2]))
        for x in operands
    )


def in_dtype(prologue: Epilogue, dtype: np.dtype) -> Epilogue:
    """Returns a prologue whose result, rounded as it is, is in another dtype."""
    (out,), nodes = prologue.outputs, prologue.nodes
    if out.dtype == dtype.name:
        return prologue
    if nodes[out.node].dtype != out.dtype:
        nodes, out = (*nodes, Node("convert_element_type", (out.node,), out.dtype)), Output(len(nodes), out.dtype)
    return dataclasses.replace(prologue, nodes=nodes, outputs=(dataclasses.replace(out, dtype=dtype.name),))


def into_rows(
    prologue: Epilogue, x: jax.Array, into: jax.Array, operands: Sequence[jax.Array]
) -> tuple[Epilogue, tuple[jax.Array, ...]] | None:
    """Returns a prologue of an array and its operands with batch axes merged into rows; None where that moves data."""
    at, count = into.ndim - 2, x.ndim - into.ndim
    rows, found = x.shape[at:-1], merged(prologue, count)
    if found is None or any(y.shape[at:-1] not in (rows, (1,) * len(rows)) for y in operands):
        return None
    return found, tuple(y.reshape(*y.shape[:at], math.prod(y.shape[at:-1]), y.shape[-1]) for y in operands)
