"""Products of rows in groups in plain JAX.

A loop over blocks of rows of one group, so that only as much is multiplied as there are rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding.rules import match_varying
from cutjax.dot_precision import Canonical
from cutjax.primitives import dense
from cutjax.primitives.accumulators import accumulator, as_wide
from cutjax.primitives.groups import rows_of_groups

_WIDEST = 128


class _Blocks:
    """The blocks of rows of one group, in the order of the rows, batch index by batch index."""

    def __init__(self, sizes: jax.Array, m: int, leading: bool, batch: Sequence[int], on_cuda: bool):
        starts, ends = rows_of_groups(sizes, m, leading)
        self.groups = starts.shape[-1]
        starts, ends = (jnp.broadcast_to(x, (*batch, self.groups)).reshape(-1) for x in (starts, ends))
        # Of 64 rows on a CPU, where wider ones do more that is cut off; of 128 on CUDA, where a step costs a launch.
        widest = _WIDEST if on_cuda else 64
        self.m, self.block, self.on_cuda = m, widest, on_cuda
        if not jax.export.is_symbolic_dim(m):
            self.block = min(m, widest, max(8, 1 << (m // self.groups).bit_length()))
        counts = (ends - starts + (self.block - 1)) // self.block
        lasts = _sums(counts) if jax.export.is_symbolic_dim(m) else jnp.cumsum(counts, dtype=jnp.int32)
        self.count, self.bound = lasts[-1], math.prod(batch) * (m // self.block + self.groups)
        # All groups in a row, one of no rows at the end; and whose visit each is: the group's before which as many end.
        self.starts, self.ends, self.firsts = (jnp.pad(x, (0, 1)) for x in (starts, ends, lasts - counts))
        self.index = jnp.cumsum(jnp.zeros(self.bound, jnp.int32).at[lasts].add(1, mode="drop"))

    def __getitem__(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Visit i: the batch index, the group, the first row of the block, and which of its rows are the group's."""
        at = _at(self.index, i)
        first = _at(self.starts, at) + (i - _at(self.firsts, at)) * self.block
        start = jnp.minimum(first, self.m - self.block)
        rows = start + jnp.arange(self.block, dtype=jnp.int32)
        batch, group = lax.div(at, np.int32(self.groups)), lax.rem(at, np.int32(self.groups))
        return batch, group, start, ((rows >= first) & (rows < _at(self.ends, at)))[:, None]

    def loop(self, body: Any, init: jax.Array) -> jax.Array:
        # On CUDA a number of blocks that is data would come to the host after each of them.
        known = self.on_cuda and not jax.export.is_symbolic_dim(self.bound)
        return lax.fori_loop(0, self.bound if known else self.count, body, init)


def _sums(x: jax.Array) -> jax.Array:
    """Returns the cumulative sums of integers.

    What ``jnp.cumsum`` becomes in a program that is exported for several platforms, with symbolic sizes, XLA's compiler
    for CPUs cannot compile, and ends the process (jax 0.12).
    """
    (size,) = x.shape
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (size,), (1,), [(size - 1, 0)])


def _flat_index(batch: Sequence[int], full: Sequence[int]) -> jax.Array:
    """Returns for each index into the flattened batch axes ``full`` that into an operand's, some of size 1."""
    of: Any = jnp if any(map(jax.export.is_symbolic_dim, full)) else np
    return jnp.asarray(of.broadcast_to(of.arange(math.prod(batch), dtype=np.int32).reshape(batch), full).reshape(-1))


def _padded(x: jax.Array) -> jax.Array:
    """Returns an array with a block of rows more, zeros, where their number is not known: so that one always fits."""
    if not jax.export.is_symbolic_dim(x.shape[-2]):
        return x
    return jnp.pad(x, [(0, _WIDEST if axis == x.ndim - 2 else 0) for axis in range(x.ndim)])


def _block(x: jax.Array, batch: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """Returns x[batch, start : start + rows]."""
    at = batch, start, jnp.zeros_like(start)
    return lax.dynamic_slice(x, at, (1, rows, x.shape[-1]), allow_negative_indices=False)[0]


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    """Returns x[i] of an index that is not negative: programs of half the length."""
    return lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False)


def reference_gemm(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    layout: str,
    out_dtype: np.dtype,
    leading: bool,
    on_cuda: bool = False,
    precision: Canonical = None,
    **_: Any,
) -> jax.Array:
    """Computes ``Rows`` in plain JAX."""
    w = as_wide(w, x.dtype)
    rows_of_x, x = x.shape[-2], _padded(x)
    batch, m = lax.broadcast_shapes(x.shape[:-2], w.shape[:-3], sizes.shape[:-1]), x.shape[-2]
    n = w.shape[-1 if layout[1] == "n" else -2]
    d = jnp.zeros((math.prod(batch), m, n), out_dtype)
    d, x, w, sizes = match_varying(d, x, w, sizes)
    if 0 in (*batch, m, n, *x.shape, *w.shape):
        return d.reshape(*batch, m, n)
    x_index, w_index = _flat_index(x.shape[:-2], batch), _flat_index(w.shape[:-3], batch)
    x, w = x.reshape(-1, *x.shape[-2:]), w.reshape(-1, *w.shape[-2:])
    blocks = _Blocks(sizes, m, leading, batch, on_cuda)
    dot = functools.partial(dense.reference, on_cuda=on_cuda, precision=precision)

    def block(i: jax.Array, d: jax.Array) -> jax.Array:
        b, group, start, mine = blocks[i]
        rows = _block(x, _at(x_index, b), start, blocks.block)
        weights = _at(w, _at(w_index, b) * blocks.groups + group)
        product = dot(rows, weights, layout=layout, out_dtype=out_dtype)
        product = jnp.where(mine, product, _block(d, b, start, blocks.block))
        return lax.dynamic_update_slice(
            d, product[None], (b, start, jnp.zeros_like(start)), allow_negative_indices=False
        )

    d = blocks.loop(block, d).reshape(*batch, m, n)
    return d if m == rows_of_x else lax.slice_in_dim(d, 0, rows_of_x, axis=d.ndim - 2)


def reference_outer(
    a: jax.Array,
    b: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: np.dtype,
    leading: bool,
    on_cuda: bool = False,
    precision: Canonical = None,
    **_: Any,
) -> jax.Array:
    """Computes ``Depth`` in plain JAX."""
    a, b = _padded(a), _padded(b)
    batch, m = lax.broadcast_shapes(a.shape[:-2], b.shape[:-2], sizes.shape[:-1]), a.shape[-2]
    shape = (*batch, sizes.shape[-1] - leading, a.shape[-1], b.shape[-1])
    acc = accumulator(a.dtype, out_dtype)
    d = jnp.zeros((math.prod(shape[:-2]), *shape[-2:]), acc)
    d, a, b, sizes = match_varying(d, a, b, sizes)
    if 0 in (m, *shape):
        return d.reshape(shape).astype(out_dtype)
    a_index, b_index = _flat_index(a.shape[:-2], batch), _flat_index(b.shape[:-2], batch)
    a, b = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    blocks = _Blocks(sizes, m, leading, batch, on_cuda)
    dot = functools.partial(dense.reference, on_cuda=on_cuda, precision=precision)

    def block(i: jax.Array, d: jax.Array) -> jax.Array:
        at, group, start, mine = blocks[i]
        # Rows of other groups may hold NaN, which no multiplication by zero would take out.
        rows_a = jnp.where(mine, _block(a, _at(a_index, at), start, blocks.block), jnp.zeros((), a.dtype))
        rows_b = jnp.where(mine, _block(b, _at(b_index, at), start, blocks.block), jnp.zeros((), b.dtype))
        product = dot(rows_a, rows_b, layout="tn", out_dtype=acc)
        at = at * blocks.groups + group
        product = product + _at(d, at)
        return lax.dynamic_update_index_in_dim(d, product, at, 0, allow_negative_indices=False)

    return blocks.loop(block, d).reshape(shape).astype(out_dtype)
