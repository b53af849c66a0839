"""The problem: the frozen description of one GEMM, from which everything about its kernel follows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from cutjax.dot_precision import accumulator
from cutjax.dtypes import are_narrow, short
from cutjax.epilogue.expression import Epilogue, Node, Output, identity
from cutjax.kernels.device import Device, reference
from cutjax.runtime.architectures import DEFAULT

BF16 = np.dtype(jnp.bfloat16)
LAYOUTS = ("nn", "nt", "tn", "tt")
# Ways to multiply other than operands as they are: float32, and, last, float16 added up in float16.
MATHS = ("tf32", "tf32x3", "bf16", "bf16x3", "bf16x6", "bf16x9", "f16")
Order = tuple[int, ...]  # an array's axes as they lie in memory, the slowest first; () is row-major


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix that is multiplied.

    Attributes:
      dtype: its elements'.
      contiguous: the axis whose neighbours are neighbours in memory: the contraction, or the other one.
      batch: batch shape, each axis the result's or 1.
      order: of its axes in memory.
    """

    dtype: np.dtype
    contiguous: Literal["k", "mn"]
    batch: tuple[int, ...]
    order: Order = ()


@dataclasses.dataclass(frozen=True)
class Problem:
    """One GEMM: ``d[..., m, n] = a @ b`` with batch axes that broadcast.

    Operands are row-major, or as ``orders`` says. ``layout[0]`` says whether the last two axes of ``a`` are ``[m, k]``
    ("n") or ``[k, m]`` ("t"), ``layout[1]`` whether those of ``b`` are ``[k, n]`` ("n") or ``[n, k]`` ("t").

    Attributes:
      m, n, k: sizes of the product.
      layout: one of "nn", "nt", "tn", "tt".
      a_dtype, b_dtype, out_dtype: numpy dtypes (``ml_dtypes`` for bfloat16).
      batch: batch shape of the result.
      a_batch, b_batch: batch shapes of the operands, of the same rank, each axis either the result's or 1.
      arch: the architecture the kernel is compiled for, e.g. "sm_80"; by default the device's, or "sm_90a".
      epilogue: what is made of the products before they are stored; without one, the identity in ``out_dtype``. Its
        outputs say the results' dtypes, and ``out_dtype`` is that of an identity.
      groups: number of groups of a grouped GEMM, whose sizes are data; 0 for any other.
      ragged: the axis the groups divide. "m": the rows of a, each group with its own matrix in
        ``b[..., groups, k, n]``; rows of no group are zero in the result. "k": the contraction, in the layout "tn",
        each group with its own result in ``d[..., groups, m, n]``. "" where there are no groups.
      leading: whether the sizes start with that of the rows before the first group: ``int32[..., leading + groups]``.
      sizes_batch: batch shape of the sizes.
      device: what the kernel runs on, and whose architecture ``arch`` is; without one, the reference of ``arch``.
      in_place: pairs of an operand of the epilogue and a result that may share memory.
      symmetric: whether b is a itself, so that the product is symmetric: a a^T in the layout "nt", a^T a in "tn". Only
        what is on and below the diagonal is multiplied, so the epilogue must treat (i, j) and (j, i) alike.
      orders: how the axes of a, b and the results lie in memory, the slowest first; () is row-major. Rows of matrices
        are contiguous in any order, and reductions are row-major.
      math: how products are computed. "": those of the operands as they are, exactly or by the IEEE operations of their
        dtype, and added up in ``accumulator``. "tf32": of float32 (or complex64) rounded to TF32; "bf16": rounded to
        bfloat16; "tf32x3", "bf16x3", "bf16x6", "bf16x9": as so many products of parts. "f16": of float16, added up in
        float16.
    """

    m: int
    n: int
    k: int
    layout: str = "nn"
    a_dtype: np.dtype = BF16
    b_dtype: np.dtype = BF16
    out_dtype: np.dtype = BF16
    batch: tuple[int, ...] = ()
    a_batch: tuple[int, ...] = ()
    b_batch: tuple[int, ...] = ()
    arch: str = ""
    epilogue: Epilogue = None  # pyright: ignore[reportAssignmentType]  # made the identity below
    groups: int = 0
    ragged: str = ""
    leading: bool = False
    sizes_batch: tuple[int, ...] = ()
    device: Device = None  # pyright: ignore[reportAssignmentType]  # made the architecture's reference below
    in_place: tuple[tuple[int, int], ...] = ()
    symmetric: bool = False
    orders: tuple[Order, Order, Order] = ((), (), ())
    math: str = ""

    def __post_init__(self):
        for field in ("a_dtype", "b_dtype", "out_dtype"):
            object.__setattr__(self, field, np.dtype(getattr(self, field)))
        if self.layout not in LAYOUTS:
            raise ValueError(f"Problem: unknown layout {self.layout!r}, expected one of {LAYOUTS}")
        if min(self.m, self.n, self.k) < 0:
            raise ValueError(f"Problem: negative size in m={self.m}, n={self.n}, k={self.k}")
        if not len(self.batch) == len(self.a_batch) == len(self.b_batch):
            raise ValueError(f"Problem: batch ranks differ: {self.batch}, {self.a_batch}, {self.b_batch}")
        for full, a, b in zip(self.batch, self.a_batch, self.b_batch, strict=True):
            if a not in (1, full) or b not in (1, full):
                raise ValueError(f"Problem: {self.a_batch} and {self.b_batch} do not broadcast to {self.batch}")
        if self.ragged not in ("", "m", "k") or (self.groups and not self.ragged) or self.groups < 0:
            raise ValueError(
                f"Problem: {self.groups} groups with ragged={self.ragged!r}, expected 'm' or 'k' with groups"
            )
        if self.groups and len(self.sizes_batch) != len(self.batch):
            raise ValueError(f"Problem: batch ranks differ: {self.batch}, {self.sizes_batch} of the sizes")
        if self.device is not None and self.arch not in (self.device.arch, ""):
            raise ValueError(f"Problem: arch={self.arch!r}, but {self.device.name} is {self.device.arch}")
        object.__setattr__(self, "device", self.device or reference(self.arch or DEFAULT))
        object.__setattr__(self, "arch", self.device.arch)
        own = accumulator(self.a_dtype, self.out_dtype)
        epilogue = self.epilogue.primal if self.epilogue else identity(self.out_dtype, own)
        object.__setattr__(self, "epilogue", epilogue)
        if self.plain:
            object.__setattr__(self, "out_dtype", np.dtype(self.epilogue.outputs[0].dtype))
        same = (self.m, self.a_dtype, self.a_batch) == (self.n, self.b_dtype, self.b_batch)
        if self.symmetric and not (same and self.layout in ("nt", "tn") and self.products == 1 and not self.ragged):
            raise ValueError(f"Problem: {self} is no product of a matrix and its transpose")
        if self.math and self.math not in MATHS:
            raise ValueError(f"Problem: unknown math {self.math!r}, expected one of {('', *MATHS)}")
        axes = tuple(range(len(self.batch) + 2))
        for order in self.orders:
            if order and (tuple(sorted(order)) != axes or order == axes or order[-1] < axes[-2]):
                raise ValueError(f"Problem: {order} is no order of axes in memory, other than row-major, of {self}")
        if any(self.orders) and (self.ragged or self.symmetric):
            raise ValueError(f"Problem: orders={self.orders} of a product with groups, or a symmetric one")
        for operand, result in self.in_place:
            if operand >= len(self.epilogue.operands) or result >= len(self.epilogue.outputs):
                raise ValueError(f"Problem: in_place={self.in_place} names an operand or a result that is not there")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # asked for with every config, and an epilogue may be long
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __getstate__(self) -> dict[str, object]:  # hashes differ from process to process
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def of(cls, a, b, *, layout: str, out_dtype, arch: str = "", device: Device = None) -> Problem:  # pyright: ignore[reportArgumentType]
        """Returns the problem of two arrays or avals of equal rank whose batch axes are equal or 1."""
        m, k = a.shape[-2:] if layout[0] == "n" else a.shape[:-3:-1]
        n = b.shape[-1] if layout[1] == "n" else b.shape[-2]
        a_batch, b_batch = tuple(a.shape[:-2]), tuple(b.shape[:-2])
        batch = tuple(np.broadcast_shapes(a_batch, b_batch))
        return cls(m, n, k, layout, a.dtype, b.dtype, out_dtype, batch, a_batch, b_batch, arch, device=device)

    def key(self) -> str:
        """Returns what names the problem on any device, the same in every process and version of Python."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("arch", "device", "epilogue"):
            del fields[name]
        for name, there in (("symmetric", self.symmetric), ("orders", any(self.orders)), ("math", self.math)):
            if not there:  # keys made before there was such a thing are still found
                del fields[name]
        for name in ("a_dtype", "b_dtype", "out_dtype"):
            fields[name] = fields[name].name
        if not self.plain:
            text = json.dumps(dataclasses.astuple(self.epilogue), separators=(",", ":"), default=np.generic.item)
            fields["epilogue"] = hashlib.sha256(text.encode()).hexdigest()
        return json.dumps(fields, separators=(",", ":"), default=int)

    @functools.cached_property
    def plain(self) -> bool:
        """True if the epilogue is the identity."""
        return self.epilogue.plain

    @functools.cached_property
    def bare(self) -> Problem:
        """The same products as they are: in the accumulators' dtype, without an epilogue."""
        acc = self.accumulator
        nodes = tuple(Node("acc", (), acc.name, (i,)) for i in range(self.products))
        outputs = tuple(Output(i, acc.name) for i in range(self.products))
        epilogue = Epilogue(self.products, (), nodes, outputs)
        orders = (*self.orders[:2], ())
        return dataclasses.replace(self, epilogue=epilogue, out_dtype=acc, in_place=(), orders=orders)

    def on(self, device: Device) -> Problem:
        """Returns the same problem on another device."""
        return dataclasses.replace(self, arch=device.arch, device=device)

    def in_order(self, orders: Sequence[Order]) -> Problem:
        """Returns the problem of arrays in these orders of memory, as far as kernels read and write them so.

        Axes of size 1 lie anywhere, and orders are of the last axes. Results stay row-major where an operand of their
        size is, and on sm_90a where TMA cannot store them: where their rows are no whole units of 16 bytes.
        """
        rank = len(self.batch) + 2
        full = [np.dtype(out.dtype).itemsize for out in self.epilogue.outputs if not out.reduce]
        whole = self.arch != "sm_90a" or all(self.n * size % 16 == 0 for size in full)
        beside = any(spec.row and spec.col for spec in self.epilogue.operands)
        found = []
        for order, shape in zip(orders, self.shapes, strict=True):
            before = rank - len(order)
            order = (*range(before), *(before + axis for axis in order))
            moving = [axis for axis in order if shape[axis] != 1]
            found.append(() if moving == sorted(moving) else order)
        return dataclasses.replace(self, orders=(*found[:2], found[2] if whole and not beside else ()))

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a, b and the result, without groups."""
        a = (self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)
        b = (self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)
        return (*self.a_batch, *a), (*self.b_batch, *b), (*self.batch, self.m, self.n)

    @functools.cached_property
    def a(self) -> Operand:
        """The operand of the rows."""
        return Operand(self.a_dtype, "k" if self.layout[0] == "n" else "mn", self.a_batch, self.orders[0])

    @functools.cached_property
    def bs(self) -> tuple[Operand, ...]:
        """The operands of the columns, one a product."""
        contiguous = "k" if self.layout[1] == "t" else "mn"
        return (Operand(self.b_dtype, contiguous, self.b_batch, self.orders[1]),) * self.products

    @functools.cached_property
    def transposed(self) -> Problem:
        """The problem of the transposed result, ``d^T = b^T a^T``, of the same arrays; of one product, without groups.

        Results, and operands of the epilogue that vary along rows and columns, lie in memory as they did.

        Raises:
          ValueError: there are several products or groups, or the result is its own transpose.
        """
        if self.products > 1 or self.ragged or self.symmetric:
            raise ValueError(f"Problem: {self} has no transpose: one b, no groups, not symmetric")
        other = {"n": "t", "t": "n"}
        of_a, of_b, of_result = self.orders
        rank = len(self.batch)
        turned = {rank: rank + 1, rank + 1: rank}
        return dataclasses.replace(
            self,
            m=self.n,
            n=self.m,
            layout=other[self.layout[1]] + other[self.layout[0]],
            a_dtype=self.b_dtype,
            b_dtype=self.a_dtype,
            a_batch=self.b_batch,
            b_batch=self.a_batch,
            epilogue=self.epilogue.transposed,
            orders=(of_b, of_a, tuple(turned.get(axis, axis) for axis in of_result)),
        )

    @property
    def along_k(self) -> Problem:
        """The problem of the same operands where they lie along k; those that do not are transposed for it."""
        (of_a, of_b, of_d), (a, b) = self.orders, self.layout
        orders = of_a if a == "n" else (), of_b if b == "t" else (), of_d
        return dataclasses.replace(self, layout="nt", orders=orders)

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Returns the tiles of that size along m and n; where rows have groups, those along m of an average group."""
        m = -(-self.m // self.groups) if self.ragged == "m" else self.m
        return -(-m // height), -(-self.n // width)

    def most_tiles(self, height: int, width: int) -> int:
        """Returns the number of tiles of that size in all results; where there are groups, the most there may be.

        Of a symmetric result they are those with anything on or below the diagonal.
        """
        if self.symmetric:
            rows = -(-self.m // height)  # each ends at the tile with its last place on the diagonal
            return self.batch_size * (_floors(rows - 1, height, height + width - 1, width) - (-self.m // width))
        tiles_m = -(-self.m // height)
        if self.ragged == "m":  # every group, and what is of none before and after, may end in a tile of its own
            tiles_m = min(tiles_m + self.groups + 1, self.m)
        groups = self.groups if self.ragged == "k" else 1
        return tiles_m * -(-self.n // width) * self.batch_size * groups

    @functools.cached_property
    def batch_size(self) -> int:
        """Number of matrices in the result."""
        return math.prod(self.batch)

    @functools.cached_property
    def products(self) -> int:
        """Number of matrices b that share a, each multiplied by it."""
        return self.epilogue.products

    @property
    def narrow(self) -> bool:
        """True if b has elements of 8 bits that are multiplied as a's, of 16."""
        return are_narrow(self.a_dtype, self.b_dtype)

    @property
    def wide(self) -> Problem:
        """The problem with b in a's dtype."""
        return dataclasses.replace(self, b_dtype=self.a_dtype)

    @property
    def accumulator(self) -> np.dtype:
        """The dtype in which the products are added up."""
        return np.dtype(self.epilogue.accumulator)

    @functools.cached_property
    def arrays(self) -> int:
        """Number of arrays before the epilogue's operands: those that are multiplied, and the sizes of groups."""
        return 1 + (0 if self.symmetric else self.products) + bool(self.groups)

    @functools.cached_property
    def flops(self) -> int:
        """Floating-point operations of the products: 2 m n k for each matrix of the result.

        Where that is symmetric, of what is on and below its diagonal.
        """
        if self.symmetric:
            return self.m * (self.m + 1) * self.k * self.batch_size
        grouped = 0 if self.ragged and not self.groups else 1
        return 2 * self.m * self.n * self.k * self.batch_size * self.products * grouped

    @functools.cached_property
    def result_bytes(self) -> int:
        """Bytes of all results."""
        full = self.m * self.n * self.batch_size * (self.groups if self.ragged == "k" else 1)
        axes = {"row": self.m, "col": self.n}
        return sum(
            full // math.prod(axes[x] for x in out.axes) * np.dtype(out.dtype).itemsize for out in self.epilogue.outputs
        )

    @functools.cached_property
    def bytes(self) -> int:
        """The fewest bytes device memory must move: each operand read once, each result written once."""
        a = self.m * self.k * math.prod(self.a_batch) * self.a_dtype.itemsize
        b = self.k * self.n * math.prod(self.b_batch) * self.b_dtype.itemsize * self.products
        b *= 0 if self.symmetric else self.groups if self.ragged == "m" else 1
        operands = 0
        for i, spec in enumerate(self.epilogue.operands):
            matrices = math.prod(size for size, *moves in self.batch_groups if moves[2 + i])
            operands += (
                matrices * (self.m if spec.row else 1) * (self.n if spec.col else 1) * np.dtype(spec.dtype).itemsize
            )
        return a + b + operands + self.result_bytes

    @functools.cached_property
    def batch_groups(self) -> tuple[tuple[int, ...], ...]:
        """The batch axes, outermost first, as the fewest ``(size, a moves, b moves, operand 0 moves, ...)``.

        Axes of size 1 are dropped and neighbours that move the same arrays are merged, so a kernel sees one group for a
        plain batch and an empty tuple for none. Where there are groups (of rows, of the contraction), the sizes are one
        more array at the end, which moves too, and the groups are one more axis at the end, merged with no other.
        """
        return tuple(group for _, group in self.batch_axes)

    @functools.cached_property
    def batch_axes(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The ``batch_groups``, each with the last of the axes that it is made of.

        In orders of memory, neighbours are merged where a step along the outer one is as many along the inner one as
        that is long, in each array that moves.
        """
        batches = (self.a_batch, self.b_batch, *((self.sizes_batch,) if self.groups else ()))
        flags = [tuple(size != 1 for size in batch) for batch in batches]
        for i, spec in enumerate(self.epilogue.operands):
            flags.insert(2 + i, (False,) * (len(self.batch) - len(spec.batch)) + spec.batch)
        known = [strides(*x) for x in zip(self.shapes, self.orders, strict=True)] if any(self.orders) else []

        def follow(outer: int, inner: int) -> bool:
            return all(of[outer] == of[inner] * self.batch[inner] for of in known if of[inner] and of[outer])

        groups: list[tuple[int, tuple[int, ...]]] = []
        for axis, (size, *moves) in enumerate(zip(self.batch, *flags, strict=True)):
            if size == 1:
                continue
            if groups and groups[-1][1][1:] == tuple(moves) and follow(groups[-1][0], axis):
                groups[-1] = (axis, (groups[-1][1][0] * size, *moves))
            else:
                groups.append((axis, (size, *moves)))
        if self.groups:
            specs = self.epilogue.operands
            of_group = [self.ragged == "k" or spec.group for spec in specs]
            groups.append((len(self.batch), (self.groups, False, self.ragged == "m", *of_group, False)))
        return tuple(groups)

    def __str__(self) -> str:
        operands = f"{short(self.a_dtype.name)} x {short(self.b_dtype.name)}" + (
            f" by {self.math}" if self.math else ""
        )
        dtypes = f"{operands} -> {', '.join(short(out.dtype) for out in self.epilogue.outputs)}"
        batch = f" batch {'x'.join(map(str, self.batch))}" if self.batch else ""
        groups = f" in {self.groups} groups of {'rows' if self.ragged == 'm' else 'k'}" if self.groups else ""
        symmetric = " symmetric" if self.symmetric else ""
        named = [name for name, order in zip("abd", self.orders, strict=True) if order]
        strided = f", {' and '.join(named)} by strides" if named else ""
        return f"{self.m}x{self.n}x{self.k} {self.layout} {dtypes}{batch}{groups}{symmetric}{strided}"


def _floors(count: int, step: int, first: int, divisor: int) -> int:
    """Returns the sum of ``(first + i * step) // divisor`` over so many i from 0 on, in Euclid's steps."""
    total = 0
    while count > 0 and divisor:
        total += count * (count - 1) // 2 * (step // divisor) + count * (first // divisor)
        step, first = step % divisor, first % divisor
        last = step * count + first  # the points below a line, counted along the other axis
        count, first, step, divisor = last // divisor, last % divisor, divisor, step
    return total


def strides(shape: Sequence[int], order: Order = ()) -> list[int]:
    """Returns the elements between neighbours along each axis of an array; 0 where there is but one."""
    found, step = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        found[axis] = step if shape[axis] != 1 else 0
        step *= shape[axis]
    return found
