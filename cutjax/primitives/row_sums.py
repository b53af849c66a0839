"""The primitive of sums over rows of what an expression makes of matrices, in one pass where a kernel serves it.

Its operands are x [matrices, *rows, columns], the expression's accumulator, and the expression's own, of size 1 along
axes on which they do not depend. Rows are one axis or more, which stay apart so that each may be divided over devices.
Its results are [matrices, columns] in float32, one for each output of the expression.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from cutjax.binding.define import define
from cutjax.binding.lowering import Target
from cutjax.binding.rules import transposed, written_out
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels import row_sums
from cutjax.kernels.device import device_of
from cutjax.runtime.choice import Choice


def _abstract(x: Any, *_: Any, expression: Epilogue, **__: Any) -> list[Any]:
    matrices, columns = x.shape[0], x.shape[-1]
    sharding = x.sharding.update(spec=jax.P(None, None))
    out = x.update(shape=(matrices, columns), dtype=np.dtype(np.float32), weak_type=False, sharding=sharding)
    return [out] * len(expression.outputs)


def _reference(x: jax.Array, *operands: jax.Array, expression: Epilogue, **_: Any) -> list[jax.Array]:
    return list(expression.apply([x], operands))


def _choose(*avals: Any, expression: Epilogue, backend: str, target: Target) -> Choice:
    problem = row_sums.Problem.of(*avals, expression=expression.primal, device=device_of(target))
    return row_sums.choose(problem, backend)


def _batch(args: Any, dims: Any, **params: Any) -> tuple[list[jax.Array], list[int]]:
    found = jax.vmap(functools.partial(_reference, **params), dims)(*args)
    return found, [0] * len(found)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Differentiates plain JAX's; a kernel makes the sums themselves."""
    _, found = jax.jvp(functools.partial(_reference, **params), tuple(primals), written_out(tangents))
    return row_sums_p.bind(*primals, **params), found


row_sums_p = define(
    "cutjax_row_sums",
    abstract=_abstract,
    reference=_reference,
    batch=_batch,
    choose=_choose,
    required=False,
    jvp=_jvp,
    transpose=transposed(_reference),
    multiple_results=True,
)
