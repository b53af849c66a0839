"""The problem: the frozen description of one GEMM, from which everything about its kernel follows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from cutjax.dot_precision import accumulator
from cutjax.dtypes import short
from cutjax.epilogue.expression import Epilogue, identity
from cutjax.kernels.columns import each, minimum
from cutjax.kernels.device import Device, reference
from cutjax.kernels.joined import Joined
from cutjax.kernels.operand import Gathered, Groups, Operand, Order, floors, merged, strides
from cutjax.kernels.work import Work
from cutjax.runtime.architectures import DEFAULT

BF16 = np.dtype(jnp.bfloat16)
_A, _BS = Operand(BF16, "k"), (Operand(BF16, "mn"),)  # row-major
LAYOUTS = ("nn", "nt", "tn", "tt")
# Ways to multiply other than operands as they are: float32; float16 added up in float16; float8 in fewer bits.
MATHS = ("tf32", "tf32x3", "bf16", "bf16x3", "bf16x6", "bf16x9", "f16", "fast")


@dataclasses.dataclass(frozen=True)
class Problem(Work):
    """One GEMM: ``d[..., m, n] = a @ b`` with batch axes that broadcast, and an epilogue.

    ``Problem(4096, 4096, 4096)`` is of bfloat16, of row-major a and b; ``Problem.of`` makes one of a layout and dtypes.

    Attributes:
      m, n, k: sizes of the product.
      a: the operand of the rows.
      bs: the operands of the columns, each of which is multiplied with a: one a product.
      groups: those of a grouped GEMM; None for any other.
      batch: batch shape of the result.
      epilogue: what is made of the products before they are stored; without one, the identity in a's dtype.
      order: of the axes of the results in memory. Rows are contiguous in any, and reductions are row-major.
      device: what the kernel runs on; without one, the reference of sm_90a.
      in_place: pairs of an operand of the epilogue and a result that may share memory.
      symmetric: whether b is a itself, so that the product is symmetric: a a^T where a lies along k, else a^T a. Only
        what is on and below the diagonal is multiplied, so the epilogue must treat (i, j) and (j, i) alike.
      math: how products are computed. "": those of the operands as they are, exactly or by the IEEE operations of their
        dtype, and added up in ``accumulator``. "tf32": of float32 (or complex64) rounded to TF32; "bf16": rounded to
        bfloat16; "tf32x3", "bf16x3", "bf16x6", "bf16x9": as so many products of parts. "f16": of float16, added up in
        float16. "fast": of float8, added up in as many bits as the tensor cores have, if that is faster.
      turned: whether it is the transpose of what was asked: of several products each has an a of its own then, all
        alike, and all the same b.

    Raises:
      TypeError: a size is no integer, or a or one of bs no operand.
      ValueError: a size is negative, batch shapes do not broadcast, or fields contradict each other; says which.

    Examples:
      >>> import cutjax
      >>> problem = cutjax.Problem(4096, 4096, 512)
      >>> print(problem)
      4096x4096x512 nn bf16 x bf16 -> bf16
      >>> cutjax.reasons(cutjax.Config(bm=128, bn=256), problem)  # none against this kernel
      ()
    """

    m: int
    n: int
    k: int
    a: Operand = _A
    bs: tuple[Operand, ...] = _BS
    groups: Groups | None = None
    batch: tuple[int, ...] = ()
    epilogue: Epilogue = None  # pyright: ignore[reportAssignmentType]  # made the identity below
    order: Order = ()
    device: Device = None  # pyright: ignore[reportAssignmentType]  # made the reference below
    in_place: tuple[tuple[int, int], ...] = ()
    symmetric: bool = False
    math: str = ""
    turned: bool = False

    def __post_init__(self):
        if not (isinstance(self.a, Operand) and self.bs and all(isinstance(b, Operand) for b in self.bs)):
            raise TypeError(f"Problem: a={self.a!r}, bs={self.bs!r}: expected operands; Problem.of takes dtypes")
        if not all(isinstance(size, int | np.integer) for size in (self.m, self.n, self.k)):
            raise TypeError(f"Problem: sizes must be integers, got m={self.m!r}, n={self.n!r}, k={self.k!r}")
        if min(self.m, self.n, self.k) < 0:
            raise ValueError(f"Problem: negative size in m={self.m}, n={self.n}, k={self.k}")
        batches = [operand.batch for operand in (self.a, *self.bs)]
        batches += [self.groups.batch] if self.groups else []
        if any(len(batch) != len(self.batch) for batch in batches):
            raise ValueError(f"Problem: batch ranks differ: {self.batch}, {', '.join(map(str, batches))}")
        for batch in batches:
            if any(size not in (1, full) for size, full in zip(batch, self.batch, strict=True)):
                raise ValueError(f"Problem: batch shapes {batches} do not broadcast to {self.batch}")
        if self.device is None:
            object.__setattr__(self, "device", reference(DEFAULT))
        epilogue = self.epilogue or identity(self.a.dtype, accumulator(self.a.dtype, self.a.dtype))
        object.__setattr__(self, "epilogue", epilogue.primal)
        if len(self.bs) != self.products:
            raise ValueError(f"Problem: {len(self.bs)} operands b of an epilogue of {self.products} products")
        if self.strided:
            self._check_orders()
        if self.symmetric and (self.m != self.n or self.bs != (self.a,) or self.groups):
            raise ValueError(f"Problem: {self} is no product of a matrix and its transpose")
        views = [x.view for x in (self.a, *self.bs)]
        if isinstance(views[0], Joined) and (len(set(views)) > 1 or sum(views[0].ks) != self.k):
            raise ValueError(f"Problem: operands {views} of a sum of products, whose parts of k={self.k} differ")
        if self.math and self.math not in MATHS:
            raise ValueError(f"Problem: unknown math {self.math!r}, expected one of {('', *MATHS)}")
        for operand, result in self.in_place:
            if operand >= len(self.epilogue.operands) or result >= len(self.epilogue.outputs):
                raise ValueError(f"Problem: in_place={self.in_place} names an operand or a result that is not there")

    def _check_orders(self) -> None:
        axes = tuple(range(len(self.batch) + 2))
        for order in self.orders:
            if order and (tuple(sorted(order)) != axes or order == axes or order[-1] < axes[-2]):
                raise ValueError(f"Problem: {order} is no order of axes in memory, other than row-major, of {self}")
        if self.groups or self.symmetric:
            raise ValueError(f"Problem: orders={self.orders} of a product with groups, or a symmetric one")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # asked for with every config, and an epilogue may be long
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, object]:  # hashes differ from process to process
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        layout: str = "nn",
        a_dtype: Any = BF16,
        b_dtype: Any = BF16,
        out_dtype: Any = BF16,
        batch: tuple[int, ...] = (),
        a_batch: tuple[int, ...] = (),
        b_batch: tuple[int, ...] = (),
        arch: str = "",
        epilogue: Epilogue | None = None,
        groups: int = 0,
        ragged: str = "",
        leading: bool = False,
        sizes_batch: tuple[int, ...] = (),
        device: Device | None = None,
        orders: tuple[Order, Order, Order] = ((), (), ()),
        **more: Any,
    ) -> Problem:
        """Makes a problem of a layout and dtypes, of plain operands.

        Args:
          m: rows of the result.
          n: columns of the result.
          k: length of the contraction.
          layout: two letters: of a, whose last two axes are ``[m, k]`` ("n") or ``[k, m]`` ("t"), and of b, ``[k, n]``
            ("n") or ``[n, k]`` ("t").
          a_dtype: of a.
          b_dtype: of each b.
          out_dtype: of the result, where there is no epilogue.
          batch: batch shape of the result.
          a_batch: batch shape of a.
          b_batch: batch shape of each b, of the rank of a's.
          arch: the architecture, e.g. "sm_80", instead of a device: its reference.
          epilogue: as the problem's.
          groups: how many groups; 0 for a dense product.
          ragged: the axis that groups divide, "m" or "k"; "" for none.
          leading: as in ``Groups``.
          sizes_batch: batch shape of their sizes.
          device: as the problem's.
          orders: how the axes of a, b and the results lie in memory, the slowest first; () is row-major.
          more: in_place, symmetric and math.

        Raises:
          TypeError: a size is no integer, or a dtype none.
          ValueError: the layout is none of these, or fields contradict each other; says which.

        Examples:
          >>> import cutjax
          >>> cutjax.Problem.of(4096, 4096, 512, "nt", "int8", "int8", "int32").layout
          'nt'
        """
        if layout not in LAYOUTS:
            raise ValueError(f"Problem: unknown layout {layout!r}, expected one of {LAYOUTS}")
        if ragged not in ("", "m", "k") or (groups and not ragged) or groups < 0:
            raise ValueError(f"Problem: {groups} groups with ragged={ragged!r}, expected 'm' or 'k' with groups")
        if device is not None and arch not in (device.arch, ""):
            raise ValueError(f"Problem: arch={arch!r}, but {device.name} is {device.arch}")
        a = Operand(np.dtype(a_dtype), "k" if layout[0] == "n" else "mn", tuple(a_batch), orders[0])
        b = Operand(np.dtype(b_dtype), "k" if layout[1] == "t" else "mn", tuple(b_batch), orders[1])
        epilogue = epilogue or identity(np.dtype(out_dtype), accumulator(a.dtype, np.dtype(out_dtype)))
        bs, divided = (b,) * epilogue.products, Groups(groups, ragged, leading, tuple(sizes_batch)) if ragged else None
        device = device or reference(arch or DEFAULT)
        return cls(m, n, k, a, bs, divided, tuple(batch), epilogue, orders[2], device, **more)

    @classmethod
    def of_arrays(
        cls, a: Any, b: Any, *, layout: str, out_dtype: Any, arch: str = "", device: Device | None = None
    ) -> Problem:
        """Makes the problem of two arrays or avals of equal rank whose batch axes are equal or 1."""
        m, k = a.shape[-2:] if layout[0] == "n" else a.shape[:-3:-1]
        n = b.shape[-1] if layout[1] == "n" else b.shape[-2]
        a_batch, b_batch = tuple(a.shape[:-2]), tuple(b.shape[:-2])
        batch = tuple(np.broadcast_shapes(a_batch, b_batch))
        return cls.of(m, n, k, layout, a.dtype, b.dtype, out_dtype, batch, a_batch, b_batch, arch, device=device)

    @property
    def arch(self) -> str:
        """The architecture that kernels are compiled for, e.g. "sm_80"."""
        return self.device.arch

    @functools.cached_property
    def layout(self) -> str:
        """One of "nn", "nt", "tn", "tt": "n" for a of ``[m, k]``, and for b of ``[k, n]``; else "t"."""
        return ("n" if self.a.contiguous == "k" else "t") + ("t" if self.bs[0].contiguous == "k" else "n")

    @functools.cached_property
    def orders(self) -> tuple[Order, Order, Order]:
        """The orders in memory of a, of each b, and of the results."""
        return self.a.order, self.bs[0].order, self.order

    @functools.cached_property
    def strided(self) -> bool:
        """True if an array lies in an order of its own."""
        return any((self.order, self.a.order, *(b.order for b in self.bs)))

    @functools.cached_property
    def out_dtype(self) -> np.dtype:
        """The dtype of the first result of full size."""
        outputs = self.epilogue.outputs
        return np.dtype(next((out for out in outputs if out.reduce is None), outputs[0]).dtype)

    @functools.cached_property
    def plain(self) -> bool:
        """True if the epilogue is the identity."""
        return self.epilogue.plain

    @functools.cached_property
    def bare(self) -> Problem:
        """These products without an epilogue, in the accumulators' dtype."""
        epilogue = identity(self.accumulator, self.accumulator, self.products).primal
        return self.derived(epilogue=epilogue, in_place=(), order=())

    def derived(self, **fields: Any) -> Problem:
        """Returns the problem with other fields, which need no check."""
        (found := object.__new__(Problem)).__dict__.update(self.__getstate__(), **fields)
        return found

    def on(self, device: Device) -> Problem:
        """Returns the same problem on another device."""
        return dataclasses.replace(self, device=device)

    def fused(self, epilogue: Epilogue, in_place: tuple[tuple[int, int], ...] = ()) -> Problem:
        """Returns the problem of one b with an epilogue, of as many equal ones as that has products."""
        return dataclasses.replace(self, bs=self.bs[:1] * epilogue.products, epilogue=epilogue, in_place=in_place)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a, b and the result, without groups."""
        (b, *_), a = self.bs, self.a
        of_a = (self.m, self.k) if a.contiguous == "k" else (self.k, self.m)
        of_b = (self.n, self.k) if b.contiguous == "k" else (self.k, self.n)
        return (*a.batch, *of_a), (*b.batch, *of_b), (*self.batch, self.m, self.n)

    @functools.cached_property
    def transposed(self) -> Problem:
        """The problem of the transposed result, ``d^T = b^T a^T``, of the same arrays.

        Results, and operands of the epilogue that vary along rows and columns, lie in memory as they did.

        Raises:
          ValueError: the result is its own transpose.
        """
        if self.symmetric:
            raise ValueError(f"Problem: {self} is its own transpose")
        places = {(rank := len(self.batch)): rank + 1, rank + 1: rank}
        order = tuple(places.get(axis, axis) for axis in self.order)
        sides = {"m": self.n, "n": self.m, "a": self.bs[0], "bs": (self.a,) * self.products, "order": order}
        of = {"groups": self.groups and self.groups.transposed, "turned": not self.turned}
        return self.derived(**sides, **of, epilogue=self.epilogue.transposed.primal)

    def tiles(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Returns the tiles of that size along m and n, of an average group along what groups divide."""
        m, n = (-(-size // max(1, self.groups_along(axis))) for axis, size in (("m", self.m), ("n", self.n)))
        return -(-m // height), -(-n // width)

    def most_tiles(self, height: Any, width: Any) -> Any:
        """Returns the number of tiles of that size in all results; where there are groups, the most there may be.

        Of a symmetric result they are those with anything on or below the diagonal.
        """
        if self.symmetric:
            return self.batch_size * each(self._tiles_to_diagonal, height, width)
        tiles = {"m": -(-self.m // height), "n": -(-self.n // width)}
        if self.divided in tiles:  # every group, and what is of none before and after, may end in a tile of its own
            size = self.m if self.divided == "m" else self.n
            tiles[self.divided] = minimum(tiles[self.divided] + self.groups_along(self.divided) + 1, size)
        return tiles["m"] * tiles["n"] * self.results

    def _tiles_to_diagonal(self, height: int, width: int) -> int:
        rows = -(-self.m // height)  # each ends at the tile with its last place on the diagonal
        return floors(rows - 1, height, height + width - 1, width) - (-self.m // width)

    @functools.cached_property
    def products(self) -> int:
        """Number of matrices b that share a, each multiplied by it."""
        return self.epilogue.products

    @functools.cached_property
    def beside(self) -> tuple[int, int]:
        """Numbers of matrices a, and b, that are multiplied with the same one of the other."""
        return (self.products, 1) if self.turned else (1, self.products)

    @functools.cached_property
    def factors(self) -> tuple[Operand, ...]:
        """The operands of all arrays that are multiplied, those of a first; a symmetric product has b too."""
        of_a, of_b = self.beside
        return (self.a,) * of_a + self.bs[:of_b]

    @property
    def few_rows(self) -> bool:
        """True of a product that decodes a few tokens: it takes as long as reading the weights."""
        alone = self.batch_size == 1 and not self.groups and not self.symmetric
        return alone and self.m <= 64 and self.a.contiguous == "k"

    @property
    def streams(self) -> bool:
        """True of up to 32 rows by weights of 16 bits and 16 MB or more: they take as long as these are read."""
        long = self.m <= 32 and self.n * self.k >= 1 << 23
        return long and self.few_rows and all(x.bits == 16 for x in (self.a, *self.bs))

    @property
    def accumulator(self) -> np.dtype:
        """The dtype in which the products are added up."""
        return np.dtype(self.epilogue.accumulator)

    @functools.cached_property
    def arrays(self) -> int:
        """Number of arrays before the epilogue's operands: those told, then scales and operands of prologues."""
        return self.told + sum(x.arrays for x in self.factors)

    @property
    def told(self) -> int:
        """Number of arrays that are multiplied, or told beside them: sizes of groups, the indices of rows."""
        gathered = self.a.view.arrays if isinstance(self.a.view, Gathered) else 0
        return 1 + (0 if self.symmetric else self.products) + bool(self.groups) + gathered

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
        batches = (self.a.batch, self.bs[0].batch, *((self.groups.batch,) if self.groups else ()))
        moves = [tuple(size != 1 for size in batch) for batch in batches]
        for i, spec in enumerate(self.epilogue.operands):
            moves.insert(2 + i, (False,) * (len(self.batch) - len(spec.batch)) + spec.batch)
        apart = [strides(*x) for x in zip(self.shapes, self.orders, strict=True)] if self.strided else []
        found = merged(self.batch, moves, apart)
        if self.groups:
            of_group = [self.divided == "k" or spec.group for spec in self.epilogue.operands]
            of_each = self.divided == "n", self.divided == "m", *of_group, False
            found.append((len(self.batch), (self.groups.count, *of_each)))
        return tuple(found)

    def __str__(self) -> str:
        operands = f"{short(self.a.dtype.name)} x {short(self.bs[0].dtype.name)}"
        operands += f" by {self.math}" if self.math else ""
        dtypes = f"{operands} -> {', '.join(short(out.dtype) for out in self.epilogue.outputs)}"
        batch = f" batch {'x'.join(map(str, self.batch))}" if self.batch else ""
        of = {"m": "rows", "n": "columns", "k": "k"}
        groups = f" in {self.groups.count} groups of {of[self.divided]}" if self.groups else ""
        symmetric = " symmetric" if self.symmetric else ""
        named = [name for name, order in zip("abd", self.orders, strict=True) if order]
        strided = f", {' and '.join(named)} by strides" if named else ""
        views = "".join(x.text(name) for name, x in (("a", self.a), ("b", self.bs[0])))
        return f"{self.m}x{self.n}x{self.k} {self.layout} {dtypes}{batch}{groups}{symmetric}{strided}{views}"
