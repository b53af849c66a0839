"""Operands as launches read them: the steps that make them of the arrays before, and the bytes that those move."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.dtypes import are_narrow, promoted, short
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.arguments import scale_buffers
from cutjax.kernels.device import Device, reference
from cutjax.kernels.joined import Joined
from cutjax.kernels.problem import Problem

COPIED_BYTES_PER_US = 3e6  # read and written, of an H200: other devices' speed is in proportion to their memory's
CONVERTED_US = 2.0  # of a conversion, beside moving its bytes
CONVERTED_SHARE = 0.52  # of the memory's bandwidth, at which XLA converts 8 bits to 16


def dequantized(values: jax.Array, arrays: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    """Returns ``(values - zero) * scale`` in float32, or a wider dtype, rounded once to a dtype.

    Args:
      values: ``[..., r, c]``.
      arrays: the scale and, where there are some, the zero points. Each axis of either is 1, or divides the values'.
      dtype: of the result. Values without arrays are converted.
    """
    if not arrays:
        return values.astype(dtype)
    wide = promoted(dtype, np.float32)
    scale, *zeros = (along(x.astype(wide), values.shape) for x in arrays)
    found = functools.reduce(lax.sub, zeros, values.astype(wide)) * scale
    return found.astype(dtype)


def along(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns an array that has an element for each block as one of a shape, with one for each of its own."""
    for axis, (count, size) in enumerate(zip(x.shape, shape, strict=True)):
        if count not in (1, size):
            each = (*x.shape[: axis + 1], size // count, *x.shape[axis + 1 :])
            x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), each)
            x = x.reshape(*each[:axis], size, *each[axis + 2 :])
    return jnp.broadcast_to(x, shape)


class Step(Protocol):
    """One thing that is done to an array; XLA fuses those of an operand."""

    @property
    def note(self) -> str:
        """The word of explain for it."""
        ...

    def made(self, x: jax.Array, *scales: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the array or arrays that take the place of one, told those beside it: scales, or operands."""
        ...


@dataclasses.dataclass(frozen=True)
class Convert:
    """Elements of another dtype, times the scales of their blocks where they have some."""

    dtype: np.dtype
    scaled: bool = False

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return f"{'dequantized' if self.scaled else 'converted'} to {short(self.dtype.name)}"

    def made(self, x: jax.Array, *scales: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the array in that dtype."""
        return (dequantized(x, scales if self.scaled else (), self.dtype),)


@dataclasses.dataclass(frozen=True)
class Prologue:
    """A prologue of the elements and its operands, in JAX."""

    expression: Epilogue

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return "made by its prologue before the product"

    def made(self, x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Returns its result."""
        return self.expression.apply([x], operands)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Float32 as a sum of terms of fewer bits.

    Attributes:
      count: how many.
      rounded: bits of the mantissa of a term.
      dtype: of a term.
    """

    count: int
    rounded: int
    dtype: np.dtype

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return f"split into {self.count}" if self.count > 1 else "rounded"

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the terms, each the nearest to what those before it leave of the number.

        Three of bf16, of 8 bits each, are exactly the number. The others of one that is not finite are NaN, which the
        kernels count as zero, as XLA does.
        """
        found = []
        for i in range(self.count):
            # Not by conversion there and back, which XLA takes for the number itself.
            term = lax.reduce_precision(x, 8, self.rounded)
            if i == 0 and self.count > 1:  # what would be rounded to infinity is cut off
                mask = np.uint32(2**32 - 2 ** (23 - self.rounded))
                cut = lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.uint32) & mask, np.float32)
                term = lax.select(lax.is_finite(x) & ~lax.is_finite(term), cut, term)
            found.append(term.astype(self.dtype))
            x = x - term
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Transpose:
    """Rows and columns in each other's place.

    Attributes:
      shape: what the array is taken as; () for as it is.
      groups: of the columns, each of which is transposed by itself; the transposes lie beside each other.
    """

    shape: tuple[int, ...] = ()
    note: str = "transposed"
    groups: int = 1

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the transposed matrices."""
        x = x.reshape(self.shape) if self.shape else x
        if self.groups == 1:
            return (jnp.matrix_transpose(x),)
        *lead, rows, columns = x.shape
        x = x.reshape(*lead, rows, self.groups, columns // self.groups).swapaxes(-1, -3)
        return (x.reshape(*lead, columns // self.groups, self.groups * rows),)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Two rows of real numbers for each row of complex ones: (real, -imag) and (imag, real)."""

    note: str = "made real"

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the real matrices."""
        real, imag = jnp.real(x), jnp.imag(x)
        rows = [jnp.stack([real, -imag], -1), jnp.stack([imag, real], -1)]  # each [.., n, k, 2]
        return (jnp.stack(rows, -3).reshape(*x.shape[:-2], 2 * x.shape[-2], 2 * x.shape[-1]),)


@dataclasses.dataclass(frozen=True)
class Pad:
    """Elements at the end of each row, which no kernel reads: tensor maps keep the arrays' sizes.

    Attributes:
      columns: how many of them.
      row_bytes: of a row with them.
    """

    columns: int
    row_bytes: int

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return f"padded to rows of {self.row_bytes} bytes"

    def made(self, x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the longer rows."""
        return (lax.pad(x, np.zeros((), x.dtype), [*((0, 0, 0) for _ in x.shape[1:]), (0, self.columns, 0)]),)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An operand of which a launch reads copies, made before it.

    Attributes:
      name: "a" or "b".
      buffer: which argument of the operation it is.
      steps: what makes the copies of the array, in order.
      read: bytes of the array.
      written: bytes of the copies.
      copies: how many there are.
      scales: which arguments are its scales and zero points, or its prologue's operands, where they go into it.
    """

    name: str
    buffer: int
    steps: tuple[Step, ...]
    read: int
    written: int
    copies: int = 1
    scales: tuple[int, ...] = ()

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def columns(self) -> int:
        """Elements added to the end of each row."""
        return sum(step.columns for step in self.steps if isinstance(step, Pad))

    @property
    def note(self) -> str:
        """The words of explain for it."""
        return f"{self.name} {' and '.join(step.note for step in self.steps)}"

    def made(self, x: jax.Array, *scales: jax.Array) -> list[jax.Array]:
        """Returns the copies."""
        found = [x]
        for step in self.steps:
            found = [made for one in found for made in step.made(one, *scales)]
        return found


def make(prepared: Iterable[Prepared], arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the arrays, each that is prepared as its first copy, and then the other copies of all.

    What was beside an array and went into it, scales or a prologue's operands, is left out.
    """
    found, more, gone = list(arrays), [], set()
    for operand in prepared:
        found[operand.buffer], *others = operand.made(found[operand.buffer], *(arrays[i] for i in operand.scales))
        more += others
        gone |= {*operand.scales}
    return [x for i, x in enumerate(found) if i not in gone], more


def notes(prepared: Iterable[Prepared]) -> tuple[str, ...]:
    """Returns the lines of explain for operands, each once."""
    return tuple(dict.fromkeys(operand.note for operand in prepared))


def copies_us(prepared: Sequence[Prepared], device: Device) -> float:
    """Returns the microseconds of copying a dense product's operands, each in a launch of its own."""
    return moved_us(sum(operand.moved for operand in prepared), device) + len(prepared)


def moved_us(size: int, device: Device) -> float:
    """Returns the microseconds of copying so many bytes, read and written."""
    if not size:  # a device may have no rates
        return 0.0
    speed = device.bytes_per_second / reference("sm_90a").bytes_per_second
    return size / (COPIED_BYTES_PER_US * speed)


def passing_us(problem: Problem, read: float = 1.0, write: float = 1.0) -> float:
    """Returns the time that the bytes of a problem take, read and written at these shares of the rate of a copy."""
    rate, written = problem.device.bytes_per_second, problem.result_bytes
    return 1e6 * ((problem.bytes - written) / read + written / write) / rate


def along_k(problem: Problem) -> Problem:
    """Returns the problem of the same operands along the contraction; others are transposed for it."""
    return dataclasses.replace(problem, a=problem.a.along_k, bs=tuple(b.along_k for b in problem.bs))


def applied(problem: Problem) -> Problem | None:
    """Returns the problem of what prologues make of the operands; None where there is no prologue."""
    operands = problem.a, *problem.bs
    if all(x.prologue is None for x in operands):
        return None
    a, *bs = (x.made for x in operands)
    return dataclasses.replace(problem, a=a, bs=tuple(bs))


def wide(problem: Problem) -> Problem | None:
    """Returns the problem of operands in the dtype of 16 bits that one of them has, without scales; None of another."""
    operands = problem.a, problem.bs[0]
    if applied(problem) is not None or isinstance(operands[0].view, Joined):  # of what that is; of all its arrays
        return None
    half = (x.dtype for x in operands if x.scale is None and x.dtype.name in ("bfloat16", "float16"))
    dtype = next(half, None)
    if dtype is None or not any(x.scale or are_narrow(dtype, x.dtype) for x in operands):
        return None
    return _all_in(problem, dtype)


def widest(problem: Problem) -> Problem:
    """Returns the problem of operands in float32, without scales."""
    return _all_in(problem, np.dtype(np.float32))


def _all_in(problem: Problem, dtype: np.dtype) -> Problem:
    a, *bs = (x.dequantized(dtype) if x.scale or x.dtype != dtype else x for x in (problem.a, *problem.bs))
    return dataclasses.replace(problem, a=a, bs=tuple(bs))


def widened(problem: Problem, into: Problem) -> tuple[Prepared, ...]:
    """Returns the operands that are converted to what kernels of another problem read, `wide` or `applied`."""
    found, buffers = [], scale_buffers(problem)
    lengths, given = (problem.m, *[problem.n] * problem.products), (problem.a, *problem.bs)
    of_all = zip(given, (into.a, *into.bs), problem.matrices, lengths, strict=True)
    for i, (operand, made, matrices, length) in enumerate(of_all):
        if operand != made:
            steps: tuple[Step, ...] = (Convert(made.dtype, operand.scale is not None),)
            if operand.prologue:
                steps = (Prologue(operand.prologue), *steps * (operand.made.dtype != made.dtype))
            read, written = (matrices * x.bytes(length * problem.k) for x in (operand, made))
            read += matrices * operand.beside(length, problem.k)
            found.append(Prepared("b" if i else "a", i, steps, read, written, scales=buffers.get(i, ())))
    return tuple(found)


def converted_us(converted: Sequence[Prepared], device: Device) -> float:
    """Returns the microseconds of conversions: each array is read and written, in a launch of its own."""
    moved = sum(operand.moved for operand in converted)
    return CONVERTED_US * len(converted) + 1e6 * moved / (CONVERTED_SHARE * device.bytes_per_second)
