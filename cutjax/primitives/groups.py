"""The rows of each group, and the group of each row. The sizes of groups are data, int32 ``[*B, leading + g]``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def rows_of_groups(sizes: jax.Array, m: int, leading: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the first row, and the row after the last, of each group: int32 [*B, g] each, ascending, all in 0 to m.

    Any sizes are served: a negative one counts as 0, and the sum stops at m.
    """
    # Two numbers up to m add up in 32 bits without a sign, whatever m; cut off at m their addition is associative.
    most = jnp.asarray(m, jnp.int32)  # of a size that is not known too
    clipped, most = jnp.clip(sizes, 0, most).astype(jnp.uint32), most.astype(jnp.uint32)
    ends = lax.associative_scan(lambda p, q: jnp.minimum(p + q, most), clipped, axis=sizes.ndim - 1)
    ends = ends.astype(jnp.int32)
    if leading:
        return ends[..., :-1], ends[..., 1:]
    return jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], -1), ends


def group_of_row(sizes: jax.Array, m: int, leading: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the group of each row, int32 [*B, m], and True where it has one; a row without counts as group 0."""
    ends = rows_of_groups(sizes, m, False)[1]
    row = lax.broadcasted_iota(np.int32, (*(1 for _ in ends.shape[:-1]), m, 1), ends.ndim - 1)
    before = ends[..., None, :] <= row
    group = jnp.sum(before, -1, dtype=jnp.int32) - int(leading)
    has = (group >= 0) & (group < sizes.shape[-1] - leading)
    return jnp.where(has, group, 0), has


def in_some_group(x: jax.Array, sizes: jax.Array, m: int, leading: bool, other: Any = 0) -> jax.Array:
    """Replaces the rows of no group by another value; x broadcasts against ``[*B, m, n]``."""
    starts, ends = rows_of_groups(sizes, m, leading)
    first = jnp.min(starts, -1, keepdims=True, initial=jnp.iinfo(jnp.int32).max)
    end = jnp.max(ends, -1, keepdims=True, initial=0)
    row = lax.broadcasted_iota(np.int32, (*(1 for _ in first.shape[:-1]), m), first.ndim - 1)
    has = (first <= row) & (row < end)
    return jnp.where(has[..., None], x, jnp.asarray(other, x.dtype))
