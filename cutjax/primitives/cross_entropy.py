"""Cross-entropy of logits that are a product: its losses and gradients, of chunks of rows, whose logits no one writes.

A chunk is one product, whose epilogue sums ``exp(l - c)`` over the vocabulary for a shift c of each row. Where
gradients are wanted it writes those powers too, in the dtype of x. They are what the gradient of the logits is before
it is scaled by row, but at the label, where one element a row is set. So the other two products read them as they are:
that of x scales its rows in its epilogue, and that of w reads rows of x that are scaled.

The shift is known before the product: the largest of some logits, plus a constant. Powers in float32 and bfloat16 reach
from 2^-126 to 2^127: any shift near the largest logit will do, and sums are as exact as with the largest itself. Where
it is not near, which the sums tell, the chunk is multiplied again, with the largest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from cutjax import dot_precision
from cutjax.binding.rules import on_devices, symbolic
from cutjax.dot_precision import Canonical
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.dense import FLIP, Dense
from cutjax.primitives.factors import Factors

CHUNK_BYTES = 320 * 2**20  # of what is kept of a chunk of rows
LOG2_E = math.log2(math.e)
SAMPLE = 256  # columns, of which the largest logit is taken for a shift
ABOVE = 24.0  # how far the shift is above it, in units of log(2): no row's largest logit is below that of the sample
REACH = 88  # sums of 2^-88 to 2^88 are kept: powers, and what is scaled by the inverse of a sum, fit float32


@dataclasses.dataclass(frozen=True)
class Head:
    """The parameters of a linear cross-entropy.

    Attributes:
      layout: of x and w, "nn" or "nt".
      label_smoothing, z_loss, softcap: as linear_cross_entropy's.
      axis_name: the mesh axis over which the vocabulary is divided.
      precision, backend: of all products.
    """

    layout: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    axis_name: str | None
    precision: Canonical
    backend: str

    def vocabulary(self, w: Any) -> int:
        """Returns the number of columns of the logits on this device."""
        return w.shape[1 if self.layout[1] == "n" else 0]

    def logits(self, acc: jax.Array, b: Sequence[jax.Array]) -> jax.Array:
        """Returns the logits, of accumulators and of the bias, a list of one array or none."""
        logits = functools.reduce(lambda x, b: x + b.astype(x.dtype), b, acc)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def slope(self, logits: jax.Array) -> jax.Array | float:
        """Returns the derivative of logits in what they were before they were capped."""
        return 1.0 if self.softcap is None else 1 - (logits / self.softcap) ** 2

    def loss(self, lse: jax.Array, picked: jax.Array, total: Any, size: int) -> jax.Array:
        """Returns the loss of rows, of their log-sum-exp, their label's logit and the sum of the logits of ``size``."""
        at = picked if total is None else (1 - self.label_smoothing) * picked + self.label_smoothing / size * total
        return lse - at + self.z_loss * lse**2 if self.z_loss else lse - at

    def over(self, reduce: Callable[..., Any], x: Any) -> Any:
        """Returns a sum or maximum over the devices that share the vocabulary."""
        return x if self.axis_name is None else reduce(x, self.axis_name)

    def local(self, labels: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the columns of labels on this device, and for each label whether it is among them."""
        size = self.vocabulary(w)
        at = labels if self.axis_name is None else labels - lax.axis_index(self.axis_name) * size
        return at, (at >= 0) & (at < size)

    def size(self, w: Any) -> int:
        """Returns the size of the vocabulary on all devices."""
        return self.vocabulary(w) * (1 if self.axis_name is None else lax.axis_size(self.axis_name))

    def multiply(
        self, layout: str, a: jax.Array, b: jax.Array, fn: Callable[..., Any], operands: Any, dtype: Any, **params: Any
    ) -> Any:
        """Returns the results of a product with an epilogue."""
        params |= {"precision": self.precision, "backend": self.backend}
        return products.call(Dense(layout), fn, Factors(a, [b]), operands, out_dtype=dtype, **params)

    @property
    def backward(self) -> Head:
        """The head with the precision of products of cotangents."""
        precision = dot_precision.of_cotangents(self.precision, np.dtype(np.float32), "linear_cross_entropy")
        return dataclasses.replace(self, precision=precision)


class Rows(NamedTuple):
    """The sums over rows of the logits that a product makes, and the powers that it keeps.

    Attributes:
      sums: of ``2^(l log2(e) - shift)``.
      picked: the label's logit, NaN where the label is outside of the vocabulary.
      total: the sum of the logits, where labels are smoothed, else None.
      kept: those powers times the slope of softcap, ``[rows, vocabulary]`` in the dtype of x, or None.
    """

    sums: jax.Array
    picked: jax.Array
    total: jax.Array | None
    kept: jax.Array | None

    def lse(self, shift: jax.Array) -> jax.Array:
        """Returns the log-sum-exp of each row."""
        return (shift + jnp.log2(self.sums)) / LOG2_E


# The losses of rows, and their derivative in plain JAX on products.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def token_losses(head: Head, x: jax.Array, w: jax.Array, b: list[jax.Array], labels: jax.Array) -> jax.Array:
    """Returns the loss of each row of x; labels outside of the vocabulary give NaN."""

    def step(_: None, chunk: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        shift, rows = _rows(head, chunk[0], w, b, chunk[1], keep=False)
        return None, head.loss(rows.lse(shift), rows.picked, rows.total, head.size(w))

    return _in_chunks(step, head, w, x.dtype.itemsize, x, labels)[1]


def _token_losses_jvp(head: Head, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    *floats, labels = primals
    return _along(lambda x, w, b: _recomputed(head, x, w, b, labels), floats, tangents[:-1])


token_losses.defjvp(_token_losses_jvp, symbolic_zeros=True)


def _recomputed(head: Head, x: jax.Array, w: jax.Array, b: list[jax.Array], labels: jax.Array) -> jax.Array:
    """Returns the losses by logits in memory, which a derivative makes again chunk by chunk."""
    wide = accumulator(x.dtype)

    @jax.checkpoint
    def losses(x: jax.Array, w: jax.Array, b: list[jax.Array], labels: jax.Array) -> jax.Array:
        acc = products.multiply(
            Dense(head.layout), x, w, out_dtype=wide, precision=head.precision, backend=head.backend
        )
        logits = head.logits(acc, b)
        most = head.over(lax.pmax, lax.stop_gradient(logits).max(1))
        most = jnp.where(jnp.isfinite(most), most, 0)
        lse = most + jnp.log(head.over(lax.psum, jnp.exp(logits - most[:, None]).sum(1)))
        at, _ = head.local(labels, w)
        picked = head.over(lax.psum, _picked(logits, at[:, None]))
        total = head.over(lax.psum, logits.sum(1)) if head.label_smoothing else None
        return head.loss(lse, _known(head, picked, labels, w), total, head.size(w))

    def step(_: None, chunk: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        return None, losses(chunk[0], w, b, chunk[1])

    return _in_chunks(step, head, w, wide.itemsize, x, labels)[1]


def _picked(logits: jax.Array, at: jax.Array) -> jax.Array:
    """Returns of each row the logit at one column, 0 where that is not there."""
    there = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == at
    return lax.select(there, logits, jnp.zeros_like(logits)).sum(1)


def _known(head: Head, picked: jax.Array, labels: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the labels' logits, NaN where a label is outside of the vocabulary."""
    known = head.over(lax.psum, head.local(labels, w)[1].astype(jnp.int32)) > 0
    return jnp.where(known, picked, jnp.nan)


def _along(fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the results of a function and their tangents, along those of its arguments that are not zero."""
    leaves, tree = jax.tree.flatten(list(primals))
    dots = jax.tree.leaves(list(tangents), is_leaf=lambda x: isinstance(x, SymbolicZero))
    moved = [i for i, dot in enumerate(dots) if not isinstance(dot, SymbolicZero)]

    def along(*values: jax.Array) -> Any:
        given = dict(zip(moved, values, strict=True))
        return fn(*tree.unflatten(given.get(i, x) for i, x in enumerate(leaves)))

    return jax.jvp(along, tuple(leaves[i] for i in moved), tuple(dots[i] for i in moved))


# A weighted sum of losses, whose gradients are made beside it, by three products in all.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def weighted_loss(
    head: Head, x: jax.Array, w: jax.Array, b: list[jax.Array], labels: jax.Array, weights: jax.Array
) -> jax.Array:
    """Returns the sum of the rows' losses, each times a weight, which has no derivative."""
    return (weights * token_losses(head, x, w, b, labels)).sum()


def _weighted_loss_jvp(head: Head, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, w, b, labels, weights = primals
    dots = jax.tree.leaves(list(tangents[:3]), is_leaf=lambda x: isinstance(x, SymbolicZero))
    wanted = tuple(not isinstance(dot, SymbolicZero) for dot in dots)
    losses, *found = gradients(head, wanted, x, w, b, labels, weights)
    moved = [dot for dot in dots if not isinstance(dot, SymbolicZero)]
    terms = [(g.astype(losses.dtype) * dot.astype(losses.dtype)).sum() for g, dot in zip(found, moved, strict=True)]
    total = (weights * losses).sum()
    return total, head.over(lax.psum, sum(terms)) if terms else jnp.zeros_like(total)


weighted_loss.defjvp(_weighted_loss_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def gradients(
    head: Head,
    wanted: tuple[bool, ...],
    x: jax.Array,
    w: jax.Array,
    b: list[jax.Array],
    labels: jax.Array,
    weights: jax.Array,
) -> list[jax.Array]:
    """Returns the rows' losses, and the gradients of their weighted sum: those wanted of x, w and b, on this device."""

    def step(sums: Any, chunk: Sequence[jax.Array]) -> tuple[Any, Any]:
        x, labels, weights = chunk
        shift, rows = _rows(head, x, w, b, labels, keep=True)
        lse = rows.lse(shift)
        scale = (1 + 2 * head.z_loss * lse) / rows.sums
        kept = _at_labels(head, w, labels, rows, shift, scale)
        scale = (weights * scale)[:, None]
        of_x = _of_x(head, kept, w, scale) if wanted[0] else None
        loss = head.loss(lse, rows.picked, rows.total, head.size(w))
        return _sums(head, wanted, sums, kept, x, b, scale), (loss, of_x)

    sums, (losses, of_x) = _in_chunks(step, head, w, x.dtype.itemsize, x, labels, weights)
    found = [of_x, *sums]
    found[2:] = [g.astype(b[0].dtype) for g in found[2:] if g is not None]
    return [losses, *(g for g in found if g is not None)]


def _gradients_jvp(head: Head, wanted: tuple[bool, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, w, b, labels, weights = primals

    def again(x: jax.Array, w: jax.Array, b: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        leaves, tree = jax.tree.flatten([x, w, b])
        places = [i for i, asked in enumerate(wanted) if asked]

        def of(*values: jax.Array) -> jax.Array:
            given = dict(zip(places, values, strict=True))
            return token_losses(head, *tree.unflatten(given.get(i, x) for i, x in enumerate(leaves)), labels)

        losses, pull = jax.vjp(of, *(leaves[i] for i in places))
        return [losses, *pull(weights)]

    return _along(again, (x, w, b, weights), (*tangents[:3], tangents[4]))


gradients.defjvp(_gradients_jvp, symbolic_zeros=True)


def _at_labels(
    head: Head, w: jax.Array, labels: jax.Array, rows: Rows, shift: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns the powers, less the inverse of the scale at the labels: the difference is rounded, not its terms."""
    assert rows.kept is not None
    at, here = head.local(labels, w)
    value = head.slope(rows.picked) * (jnp.exp2(rows.picked * LOG2_E - shift) - 1 / scale)
    column = jnp.where(here, at, rows.kept.shape[1])  # past the end nothing is set
    where = jnp.arange(rows.kept.shape[0], dtype=jnp.int32), column
    options: dict[str, Any] = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    return rows.kept.at[where].set(value.astype(rows.kept.dtype), **options)


def _of_x(head: Head, kept: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the gradient of rows of x."""
    layout = "n" + FLIP[head.layout[1]]
    return head.backward.multiply(layout, kept, w, lambda acc, s: acc * s.astype(acc.dtype), (scale,), w.dtype)


def _sums(
    head: Head, wanted: tuple[bool, ...], sums: Any, kept: jax.Array, x: jax.Array, b: list[jax.Array], scale: jax.Array
) -> Any:
    """Returns the gradients of w and b, each None or of the rows so far."""
    of_w, of_b = (None, None) if sums is None else sums
    if wanted[1]:
        scaled = (x.astype(scale.dtype) * scale).astype(x.dtype)
        factors = (scaled, kept) if head.layout[1] == "n" else (kept, scaled)
        before, in_place = ((), ()) if of_w is None else ((of_w,), ((0, 0),))

        def added(acc: jax.Array, *before: jax.Array) -> jax.Array:
            return functools.reduce(lambda acc, to: acc + to.astype(acc.dtype), before, acc)

        of_w = head.backward.multiply("tn", *factors, added, before, x.dtype, in_place=in_place)
    if b and wanted[2]:
        new = (kept.astype(scale.dtype) * scale).sum(0, keepdims=True)
        of_b = new if of_b is None else of_b + new
    return of_w, of_b


# One chunk of rows.


def _rows(
    head: Head, x: jax.Array, w: jax.Array, b: list[jax.Array], labels: jax.Array, *, keep: bool
) -> tuple[jax.Array, Rows]:
    """Returns the shift of each row, in units of log(2), and what the product finds with it."""
    at, _ = head.local(labels, w)

    def multiplied(x: jax.Array, shift: jax.Array) -> Rows:
        def epilogue(acc: jax.Array, at: jax.Array, shift: jax.Array, b: list[jax.Array]) -> Rows:
            logits = head.logits(acc, b)
            powers = jnp.exp2(logits * LOG2_E - shift)
            picked = _picked(logits, at)
            total = logits.sum(1) if head.label_smoothing else None
            return Rows(powers.sum(1), picked, total, powers * head.slope(logits) if keep else None)

        rows = head.multiply(head.layout, x, w, epilogue, (at[:, None], shift[:, None], b), x.dtype)
        sums, picked = (head.over(lax.psum, v) for v in rows[:2])
        total = None if rows.total is None else head.over(lax.psum, rows.total)
        return Rows(sums, _known(head, picked, labels, w), total, rows.kept)

    def far(rows: Rows) -> jax.Array:
        return jnp.any((rows.sums < 2.0**-REACH) | (rows.sums > 2.0**REACH))

    def again(state: Any) -> Any:
        once = lax.select(
            jnp.broadcast_to(state[0], x.shape), x, jnp.zeros_like(x)
        )  # or XLA multiplies before the loop
        shift = _largest(head, once, w, b)
        return state[0] & ~state[0], shift, multiplied(once, shift)

    n = min(SAMPLE, head.vocabulary(w))
    some = w[:, :n] if head.layout[1] == "n" else w[:n]
    shift = _largest(head, x, some, [v[:, :n] for v in b]) + ABOVE
    rows = multiplied(x, shift)
    _, shift, rows = lax.while_loop(lambda state: state[0], again, (far(rows), shift, rows))
    return shift, rows


def _largest(head: Head, x: jax.Array, w: jax.Array, b: list[jax.Array]) -> jax.Array:
    """Returns the largest logit of each row in units of log(2); 0 where it is not finite."""
    most = head.multiply(head.layout, x, w, lambda acc, b: head.logits(acc, b).max(1), (b,), x.dtype)
    most = head.over(lax.pmax, most)
    return jnp.where(jnp.isfinite(most), most * LOG2_E, 0)


def _in_chunks(
    step: Callable[..., Any], head: Head, w: jax.Array, itemsize: int, *arrays: jax.Array
) -> tuple[Any, Any]:
    """Returns ``step(sums, chunk)`` of all rows: sums that go from chunk to chunk, and what each row has.

    The first chunk's sums are None, so that nothing is zeroed for it.
    """
    rows = arrays[0].shape[0]
    each = rows_of_chunk(rows, head.vocabulary(w), itemsize, arrays[0], w)
    if each == rows:
        return step(None, arrays)
    count = -(-rows // each)
    padded = [jnp.pad(x, [(0, count * each - rows)] + [(0, 0)] * (x.ndim - 1)) for x in arrays]
    chunks = [x.reshape(count, each, *x.shape[1:]) for x in padded]
    sums, first = step(None, [x[0] for x in chunks])
    sums, others = lax.scan(step, sums, [x[1:] for x in chunks])

    def joined(first: jax.Array, others: jax.Array) -> jax.Array:
        whole = jnp.concatenate([first[None], others])
        return whole.reshape(count * each, *first.shape[1:])[:rows]

    return sums, jax.tree.map(joined, first, others)


def rows_of_chunk(rows: int, columns: int, itemsize: int, *arrays: jax.Array) -> int:
    """Returns the number of rows whose logits are made at once.

    All rows, where arrays lie on a mesh over which XLA divides: rows beside each other lie on one device.
    """
    if any(map(symbolic, arrays)) or on_devices(*arrays) or rows * columns * itemsize <= CHUNK_BYTES:
        return rows
    most = max(CHUNK_BYTES // (columns * itemsize) // 128, 1) * 128
    count = -(-rows // most)
    return min(rows, -(-rows // (count * 128)) * 128)
