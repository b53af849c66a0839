"""Random contractions: shapes and dimension numbers of dot_general."""

from __future__ import annotations

from typing import Any

import numpy as np

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def random_contraction(
    rng: np.random.Generator, sizes: tuple[int, ...] = (1, 2, 3, 5), rank: int = 5
) -> tuple[tuple[int, ...], tuple[int, ...], Dims]:
    """Shapes of lhs and rhs, up to a rank, and dimension numbers; every second time most axes lie in order."""
    contracted, batch = (int(rng.integers(0, n)) for n in (3, 3))
    free = [int(rng.integers(0, rank - contracted - batch + 1)) for _ in range(2)]
    mixed = rng.random() < 0.5
    of = {name: int(rng.choice(sizes)) for name in range(contracted + batch + sum(free))}
    names = list(of)
    shared_c, shared_b = names[:contracted], names[contracted : contracted + batch]
    own = [names[contracted + batch :][: free[0]], names[contracted + batch + free[0] :]]
    arrays: list[list[int]] = []
    for i in range(2):
        groups = [shared_b, *([own[i], shared_c] if rng.random() < 0.5 else [shared_c, own[i]])]
        axes = [name for group in groups for name in group]
        swaps = 4 if mixed else int(rng.integers(0, 2))
        for _ in range(swaps if len(axes) > 1 else 0):
            p, q = rng.choice(len(axes), 2, replace=False)
            axes[p], axes[q] = axes[q], axes[p]
        arrays.append(axes)

    def places(group: list[int]) -> Any:
        shuffled = [group[i] for i in rng.permutation(len(group))]
        return tuple(tuple(axes.index(name) for name in shuffled) for axes in arrays)

    lhs, rhs = (tuple(of[name] for name in axes) for axes in arrays)
    return lhs, rhs, (places(shared_c), places(shared_b))
