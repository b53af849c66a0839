"""Products by a vocabulary: what is summed over rows of their logits, chunk by chunk, while no one writes the logits.

The powers that a product sums, and keeps where it is asked to, are of logits less a shift of each row, which is known
before the product: the largest of some logits, plus a constant. Powers in float32 and bfloat16 reach from 2^-126 to
2^127: any shift near the largest logit will do, and sums are as exact as with the largest itself. Where it is not near,
which the sums tell, the chunk is multiplied again, with the largest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.binding.rules import on_devices, symbolic, varying_axes
from cutjax.dot_precision import Canonical
from cutjax.primitives import product as products
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors

CHUNK_BYTES = 256 * 2**20  # of what is kept of a chunk of rows
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

    def keeps(self, dtype: Any) -> bool:
        """True if gradients can be made of powers in a dtype: its exponents hold any row's, and none is added to."""
        return not self.label_smoothing and dtype in (jnp.float32, jnp.bfloat16)

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

    def shared(self, g: jax.Array) -> jax.Array:
        """Returns the cotangent of what all devices that share the vocabulary have, to be transposed on each of them.

        Without check_vma the transpose of a sum over devices adds up all of theirs.
        """
        if self.axis_name is None or varying_axes(jax.typeof(lax.axis_index(self.axis_name))):
            return g
        return g / lax.axis_size(self.axis_name)

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


class Summed(Protocol):
    """Findings of a product by row, the sums of powers among them."""

    @property
    def sums(self) -> jax.Array: ...


Found = TypeVar("Found", bound=Summed)


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


def rows_with_shift(
    head: Head, x: jax.Array, w: jax.Array, b: list[jax.Array], labels: jax.Array, *, keep: bool
) -> tuple[jax.Array, Rows]:
    """Returns the shift of each row, in units of log(2), and what the product finds with it."""
    at, _ = head.local(labels, w)

    def multiplied(x: jax.Array, shift: jax.Array) -> Rows:
        def epilogue(acc: jax.Array, at: jax.Array, shift: jax.Array, b: list[jax.Array]) -> Rows:
            logits = head.logits(acc, b)
            powers = jnp.exp2(logits * LOG2_E - shift)
            picked = picked_at(logits, at)
            total = logits.sum(1) if head.label_smoothing else None
            return Rows(powers.sum(1), picked, total, powers * head.slope(logits) if keep else None)

        rows = head.multiply(head.layout, x, w, epilogue, (at[:, None], shift[:, None], b), x.dtype)
        sums, picked = (head.over(lax.psum, v) for v in rows[:2])
        total = None if rows.total is None else head.over(lax.psum, rows.total)
        return Rows(sums, known(head, picked, labels, w), total, rows.kept)

    return with_shift(head, x, w, b, multiplied)


def with_shift(
    head: Head, x: jax.Array, w: jax.Array, b: list[jax.Array], multiplied: Callable[[jax.Array, jax.Array], Found]
) -> tuple[jax.Array, Found]:
    """Returns the shift of each row, in units of log(2), and what a product finds with it.

    Args:
      head: whose logits are meant.
      x, w, b: the operands, and what the logits are made of beside the product, of which columns of w have their own.
      multiplied: of x and a shift, what the product finds; its ``sums`` are those of powers.
    """

    def far(rows: Found) -> jax.Array:
        return jnp.any((rows.sums < 2.0**-REACH) | (rows.sums > 2.0**REACH))

    def again(state: Any) -> Any:
        once = lax.select(
            jnp.broadcast_to(state[0], x.shape), x, jnp.zeros_like(x)
        )  # or XLA multiplies before the loop
        shift = largest(head, once, w, b)
        return state[0] & ~state[0], shift, multiplied(once, shift)

    n = 1 if symbolic(w) else min(SAMPLE, head.vocabulary(w))
    some = w[:, :n] if head.layout[1] == "n" else w[:n]
    shift = largest(head, x, some, [v[:, :n] for v in b]) + ABOVE
    rows = multiplied(x, shift)
    _, shift, rows = lax.while_loop(lambda state: state[0], again, (far(rows), shift, rows))
    return shift, rows


def largest(head: Head, x: jax.Array, w: jax.Array, b: list[jax.Array]) -> jax.Array:
    """Returns the largest logit of each row in units of log(2); 0 where it is not finite."""
    most = head.multiply(head.layout, x, w, lambda acc, b: head.logits(acc, b).max(1), (b,), x.dtype)
    most = head.over(lax.pmax, most)
    return jnp.where(jnp.isfinite(most), most * LOG2_E, 0)


def in_chunks(step: Callable[..., Any], head: Head, w: jax.Array, itemsize: int, *arrays: jax.Array) -> tuple[Any, Any]:
    """Returns ``step(sums, chunk)`` of all rows: sums that go from chunk to chunk, and what each row has.

    The first chunk's sums are None, so that nothing is zeroed for it; it may have fewer rows than the others.
    """
    rows = arrays[0].shape[0]
    each = rows_of_chunk(rows, head.vocabulary(w), itemsize, arrays[0], w)
    if each == rows:
        return step(None, arrays)
    first = rows - (-(-rows // each) - 1) * each  # what is over is in the first chunk: none is padded
    sums, found = step(None, [x[:first] for x in arrays])
    rest = [x[first:].reshape(-1, each, *x.shape[1:]) for x in arrays]
    sums, rest = lax.optimization_barrier((sums, rest))  # the memory of one chunk is another's
    sums, others = lax.scan(step, sums, rest)

    def joined(first: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.concatenate([first, others.reshape(-1, *first.shape[1:])])

    return sums, jax.tree.map(joined, found, others)


def rows_of_chunk(rows: int, columns: int, itemsize: int, *arrays: jax.Array) -> int:
    """Returns the number of rows whose logits are made at once.

    All rows, where arrays lie on a mesh over which XLA divides: rows beside each other lie on one device.
    """
    if any(map(symbolic, arrays)) or on_devices(*arrays) or rows * columns * itemsize <= CHUNK_BYTES:
        return rows
    most = max(CHUNK_BYTES // (columns * itemsize) // 128, 1) * 128
    count = -(-rows // most)
    return min(rows, -(-rows // (count * 128)) * 128)


def picked_at(logits: jax.Array, at: jax.Array) -> jax.Array:
    """Returns of each row the logit at one column, 0 where that is not there."""
    there = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == at
    return lax.select(there, logits, jnp.zeros_like(logits)).sum(1)


def known(head: Head, picked: jax.Array, labels: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the labels' logits, NaN where a label is outside of the vocabulary."""
    known = head.over(lax.psum, head.local(labels, w)[1].astype(jnp.int32)) > 0
    return jnp.where(known, picked, jnp.nan)
