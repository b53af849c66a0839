"""Products of rows in groups by numpy, in a loop over the groups, for any sizes, hostile ones too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

MOST = np.iinfo(np.int32).max
HOSTILE = (-1, -MOST - 1, 1 << 30, MOST - 1, MOST)


def spans(sizes: Sequence[int], m: int, leading: bool = False) -> list[tuple[int, int]]:
    """First row and end of each group: what the documentation says of any sizes, in integers that do not overflow."""
    ends = itertools.accumulate(sizes, lambda end, size: min(end + max(int(size), 0), m), initial=0)
    return list(itertools.pairwise(ends))[int(leading) :]


def over_batch(fn, core: Sequence[int], *arrays) -> np.ndarray:
    """A function of arrays of these ranks, for each index of the batch axes in front of them, which broadcast."""
    arrays = [np.asarray(x) for x in arrays]
    batch = np.broadcast_shapes(*(x.shape[: x.ndim - c] for x, c in zip(arrays, core, strict=True)))
    full = [np.broadcast_to(x, (*batch, *x.shape[x.ndim - c :])) for x, c in zip(arrays, core, strict=True)]
    results = [fn(*(x[i] for x in full)) for i in np.ndindex(*batch)]
    return np.stack(results).reshape(*batch, *results[0].shape)


def wide(x) -> np.ndarray:
    """The array in 64-bit floats, or complex ones."""
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def multiply(x, w, sizes, layout="nn", leading=False) -> np.ndarray:
    """[*B, m, k], [*B, g, k, n] -> [*B, m, n], in 64-bit floats."""

    def one(x, w, sizes):
        w = w if layout == "nn" else w.swapaxes(-1, -2)
        d = np.zeros((len(x), w.shape[-1]), x.dtype)
        for matrix, (start, end) in zip(w, spans(sizes, len(x), leading), strict=True):
            d[start:end] = x[start:end] @ matrix
        return d

    return over_batch(one, (2, 3, 1), wide(x), wide(w), sizes)


def outer(a, b, sizes, leading=False) -> np.ndarray:
    """[*B, m, k], [*B, m, n] -> [*B, g, k, n], in 64-bit floats."""

    def one(a, b, sizes):
        return np.stack([a[start:end].T @ b[start:end] for start, end in spans(sizes, len(a), leading)])

    return over_batch(one, (2, 2, 1), wide(a), wide(b), sizes)
