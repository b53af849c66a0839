"""Arithmetic on numbers, or on columns of them: what follows from one config follows so from many at once.

Code that takes either has no ``if``, ``and`` or ``not`` on what may be a column, but these functions, ``&`` and ``|``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np


def where(true: Any, x: Any, y: Any) -> Any:
    """Returns x, or y, by a truth value or a column of them."""
    return np.where(true, x, y) if isinstance(true, np.ndarray) else x if true else y


def maximum(x: Any, y: Any) -> Any:
    """Returns the larger one."""
    return np.maximum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else max(x, y)


def minimum(x: Any, y: Any) -> Any:
    """Returns the smaller one."""
    return np.minimum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else min(x, y)


def ceil(x: Any) -> Any:
    """Returns the next whole number."""
    return np.ceil(x) if isinstance(x, np.ndarray) else math.ceil(x)


def log2(x: Any) -> Any:
    """Returns the logarithm to base 2."""
    return np.log2(x) if isinstance(x, np.ndarray) else math.log2(x)


def exp(x: Any) -> Any:
    """Returns e to the power of x."""
    return np.exp(x) if isinstance(x, np.ndarray) else math.exp(x)


def hypot(x: Any, y: Any) -> Any:
    """Returns the square root of the sum of squares."""
    return np.hypot(x, y) if isinstance(x, np.ndarray) else math.hypot(x, y)


def some(x: Any) -> bool:
    """True if a number, or one of a column, is other than 0."""
    return bool(x.any() if isinstance(x, np.ndarray) else x)


def floats(x: Any) -> Any:
    """Returns a number as it is, or a column in float64."""
    return x.astype(float) if isinstance(x, np.ndarray) else x


def each(function: Callable[..., Any], *numbers: Any) -> Any:
    """Returns the results of a function of each row of columns, which is called once for equal rows."""
    if not any(isinstance(x, np.ndarray) for x in numbers):
        return function(*numbers)
    if len(numbers) == 1:  # whole numbers of a config, none large
        counts = np.bincount(numbers[0])
        values = np.flatnonzero(counts)
        counts[values] = np.arange(len(values))
        return np.array([function(x) for x in values.tolist()])[counts[numbers[0]]]
    rows = list(zip(*(x.tolist() if isinstance(x, np.ndarray) else itertools.repeat(x) for x in numbers), strict=False))
    found = {row: function(*row) for row in dict.fromkeys(rows)}
    return np.array([found[row] for row in rows])


class Taken:
    """Some rows of a record of columns, which are taken as they are asked for."""

    def __init__(self, record: Any, rows: np.ndarray, /, **others: Any):
        """Takes rows of all columns but the others, which are given."""
        self.__dict__.update(others, _record=record, _rows=rows)

    def __getattr__(self, name: str) -> Any:
        x = getattr(self._record, name)
        self.__dict__[name] = x = x[self._rows] if isinstance(x, np.ndarray) else x
        return x
