"""From a JAX function of accumulators and operands to an Epilogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from cutjax._expression import Epilogue


class Traced(NamedTuple):
    """A traced function.

    Attributes:
      epilogue: the expression.
      operands: its operands, one array for each ``epilogue.operands``, of the result's rank, each axis of full size where
        its spec varies and 1 elsewhere. The caller's, and what the function captured or computed of these alone, ready to
        be differentiated.
      finish: from what ``epilogue.apply`` (or a kernel) returns to what the function returns.
    """

    epilogue: Epilogue
    operands: tuple[jax.Array, ...]
    finish: Callable[[Sequence[jax.Array]], Any]


def trace(fn: Callable[..., Any], accs: Sequence[Any], operands: Sequence[Any] = ()) -> Traced:
    """Traces ``fn(*accs, *operands)`` once.

    Args:
      fn: the function.
      accs: abstract accumulators (avals, ``jax.ShapeDtypeStruct`` or arrays), float32 ``[..., m, n]``, all of one shape.
      operands: arrays (or pytrees of them).
    """
    raise NotImplementedError
