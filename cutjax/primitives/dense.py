"""The dense product: one matrix by another, with batch axes that broadcast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.binding.placement import Labels, Placement, batch_labels
from cutjax.binding.rules import any_divided, names_of, on_devices, on_mesh
from cutjax.dot_precision import Canonical
from cutjax.dtypes import FLOAT8
from cutjax.epilogue.expression import Epilogue, identity
from cutjax.epilogue.merge import merged
from cutjax.kernels.device import Device
from cutjax.kernels.families import in_order
from cutjax.kernels.problem import Problem
from cutjax.primitives.accumulators import accumulator, as_wide, is_half
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Folded, Product
from cutjax.primitives.product_rules import define_product
from cutjax.primitives.sums import summed

FLIP = {"n": "t", "t": "n"}


@define_product("cutjax_gemm")
@dataclasses.dataclass(frozen=True)
class Dense(Product):
    """``a [..., m, k] @ b [..., k, n]``; where a letter of the layout is "t", that operand's last axes are swapped.

    Attributes:
      layout: "nn", "nt", "tn" or "tt".
      orders: hints, of a, b and the result: the order in which the array's axes lie in memory, the slowest first and
        the last axis last; () is row-major. Axes in front of those named are slower. A kernel reads and writes arrays
        in that order, so that transposes beside it move no data. Values and shapes are the same whatever the hints.
      added: batch axes over which the products of matrices are added up, counted from the rows outwards. The result has
        size 1 there.
      lies: over which explicit mesh axes the last axes of the result are divided, as many as it names. Where it is
        None, and along an axis that is UNCONSTRAINED there, the result lies as the operand that has the axis.
    """

    layout: str
    orders: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())
    added: tuple[int, ...] = ()
    lies: jax.P | None = None

    where = "gemm"
    axes = (2, 2)

    def __post_init__(self):
        if len(self.orders) != 3:
            raise ValueError(f"gemm: orders={self.orders}, expected three: of a, b and the result")
        of_a, of_b, of_result = map(_order, self.orders)
        object.__setattr__(self, "orders", (of_a, of_b, of_result))

    def check(self, *avals: Any) -> None:
        super().check(*avals)
        if max(map(len, self.orders)) > avals[0].ndim:
            raise ValueError(f"gemm: orders={self.orders} of arrays of {avals[0].ndim} axes")

    def tile(self, a: Any, *rest: Any) -> Any:
        m, n = a.shape[-2 if self.layout[0] == "n" else -1], rest[0].shape[-1 if self.layout[1] == "n" else -2]
        batch = self._without_added(lax.broadcast_shapes(a.shape[:-2], *(b.shape[:-2] for b in rest)), 1)
        spec = self._spec(*(x.sharding.spec for x in (a, *rest)))
        sharding = on_mesh(a, *rest).update(spec=jax.P(*spec))
        # From an operand's aval, not a new one: it carries the mesh axes it varies over inside shard_map.
        weak = all(x.weak_type for x in (a, *rest))
        return a.update(shape=(*batch, m, n), weak_type=weak, sharding=sharding)

    def _spec(self, of_a: Sequence[Any], *of_bs: Sequence[Any]) -> list[Any]:
        """Returns the mesh axes that divide each axis of the result, from those of a and the bs."""
        m, ns = of_a[-2 if self.layout[0] == "n" else -1], [b[-1 if self.layout[1] == "n" else -2] for b in of_bs]
        found = [*zip(of_a[:-2], *(b[:-2] for b in of_bs), strict=True), (m,), ns]
        free = jax.P.UNCONSTRAINED
        asked = [free] * len(found) if self.lies is None else [free] * (len(found) - len(self.lies)) + [*self.lies]
        taken = {axis for over in asked if over is not free for axis in names_of(over)}
        spec: list[Any] = []
        for over, operands in zip(asked, found, strict=True):
            if over is free:  # a mesh axis divides one axis alone, the first
                over = tuple(axis for axis in next(filter(None, map(names_of, operands)), ()) if axis not in taken)
                over = over if len(over) > 1 else over[0] if over else None
                taken |= {*names_of(over)}
            spec.append(over)
        return [*self._without_added(spec[:-2], None), *spec[-2:]]

    def _without_added(self, batch: Sequence[Any], value: Any) -> tuple[Any, ...]:
        last = len(batch) - 1
        return tuple(value if last - i in self.added else x for i, x in enumerate(batch))

    @property
    def summed(self) -> tuple[str, ...]:
        return "k", *(f"b{i}" for i in self.added)

    def labels(self, a: Any, *rest: Any) -> tuple[list[Labels], Labels]:
        full = dataclasses.replace(self, added=()).tile(a, *rest).shape
        of_a, of_b = ("m", "k"), ("k", "n")
        matrices = [of_a if self.layout[0] == "n" else of_a[::-1]]
        matrices += [of_b if self.layout[1] == "n" else of_b[::-1]] * len(rest)
        own = [batch_labels(x.shape[:-2], full) + matrix for x, matrix in zip((a, *rest), matrices, strict=True)]
        return own, (*self._without_added(batch_labels(full[:-2], full), None), "m", "n")

    def reference(self, *arrays: jax.Array, **params: Any) -> jax.Array:
        sharding = self.tile(*map(jax.typeof, arrays)).sharding
        return reference(*arrays, layout=self.layout, added=self.added, sharding=sharding, **params)

    def problem(self, *avals: Any, out_dtype: Any, device: Device) -> Problem:
        return Problem.of_arrays(*avals, layout=self.layout, out_dtype=out_dtype, device=device)

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Dense, tuple[jax.Array, jax.Array], Canonical]:
        (of_a, of_b), (order_a, order_b, order_g) = self.layout, self.orders
        if i == 0:
            g_first, g_last = (order_g, order_b, order_a), (order_b, order_g, order_a)
            if of_a == "n":  # [m, k] = g [m, n] @ b [n, k]
                return Dense("n" + FLIP[of_b], g_first), (g, other), precision
            # [k, m] = b [k, n] @ g [n, m]
            return Dense(of_b + "t", g_last), (other, g), dot_precision.swapped(precision)
        g_first, g_last = (order_g, order_a, order_b), (order_a, order_g, order_b)
        if of_b == "n":  # [k, n] = a [k, m] @ g [m, n]
            return Dense(FLIP[of_a] + "n", g_last), (other, g), dot_precision.swapped(precision)
        return Dense("t" + of_a, g_first), (g, other), precision  # [n, k] = g [n, m] @ a [m, k]

    def shard(self, placement: Placement, factors: Factors) -> tuple[Product, Factors]:
        return dataclasses.replace(self, lies=None), factors

    def laid(self, like: Any, *avals: Any) -> Dense:
        if not any_divided(like, *avals):
            return self
        spec = list(like.sharding.spec)
        for i in range(like.ndim - 2):  # one that broadcast lies as what is added up there
            spec[i] = jax.P.UNCONSTRAINED if like.shape[i] == 1 and spec[i] is None else spec[i]
        return dataclasses.replace(self, lies=jax.P(*spec))

    def why_not(self) -> str:
        return "products of a batch are added up" if self.added else ""

    def sum_of(self, count: int) -> Product | None:
        return None if self.added or any(self.orders) else summed(self, count)

    def in_order(self, problem: Problem) -> Problem:
        return in_order(problem, self.orders) if any(self.orders) else problem

    def batched(self, at: int, rank: int) -> Dense:
        added = tuple(i + (rank - 1 - i < at) for i in self.added)
        orders = tuple(_with_axis(order, at, rank + 2) for order in self.orders)
        lies = self.lies
        if lies is not None and (place := at - (rank + 2 - len(lies))) >= 0:
            lies = jax.P(*lies[:place], jax.P.UNCONSTRAINED, *lies[place:])
        return dataclasses.replace(self, orders=orders, added=added, lies=lies)

    def adding(self, to: Sequence[int], *avals: Any) -> Dense:
        """Returns the product that adds up over the batch axes which an operand of that shape broadcasts over.

        On one device only where they merge into the contraction. Where arrays lie on several, axes stay apart until
        each has its shard, and the sum over some is a part of the product's.
        """
        a, b = avals
        axes = [i for i in range(a.ndim - 2) if to[i] == 1 and a.shape[i] == b.shape[i] != 1]
        if self.layout != "tn" or any(self.orders):
            return self
        product = dataclasses.replace(self, added=tuple(a.ndim - 3 - i for i in axes))
        return product if on_devices(*avals) or product._merges else self

    def fold(self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array]) -> Folded | None:
        """Merges batch axes into rows where one matrix b is for all of a: every gradient is a plain GEMM too."""
        a, bs = factors.a, factors.bs
        if self.lies is not None or on_devices(a, *bs, *operands) or any_divided(a, *bs, *operands):
            return None
        if self.added:
            return self._fold_added(epilogue, a, bs[0])
        if self.layout[0] != "n" or a.ndim < 3 or any(math.prod(b.shape[:-2]) != 1 for b in bs):
            return None
        if any(self.orders):
            return None
        rows = a.shape[:-1]
        found = merged(epilogue, a.ndim - 2)
        if found is None or any(x.shape[:-1] not in (rows, (1,) * len(rows)) for x in operands):
            return None
        a, *operands = (lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])) for x in (a, *operands))
        matrices = [lax.reshape(b, b.shape[-2:]) for b in bs]
        return Folded(self, found, Factors(a, matrices), operands, lambda x: lax.reshape(x, (*rows, *x.shape[1:])))

    @property
    def _merges(self) -> bool:
        """True if the axes over which matrices are added lie next to the contracted one: merging copies nothing."""
        return self.layout == "tn" and sorted(self.added) == [*range(len(self.added))] and not any(self.orders)

    def _fold_added(self, epilogue: Epilogue, a: jax.Array, b: jax.Array) -> Folded:
        """Merges the batch axes over which matrices are added into the contracted axis, or adds up the products."""
        count = len(self.added)
        product, at = dataclasses.replace(self, added=()), a.ndim - 2 - count
        if self._merges and a.shape[at:-2] == b.shape[at:-2]:
            a, b = (lax.reshape(x, (*x.shape[:at], math.prod(x.shape[at:-1]), x.shape[-1])) for x in (a, b))
            return Folded(product, epilogue, Factors(a, [b]), [], lambda d: lax.expand_dims(d, range(at, at + count)))
        (out,), axes = epilogue.outputs, [a.ndim - 3 - i for i in self.added]
        wide = accumulator(a.dtype, np.dtype(out.dtype))
        apart = identity(wide, wide)
        return Folded(product, apart, Factors(a, [b]), [], lambda d: d.sum(axes, keepdims=True).astype(out.dtype))


def _order(order: Sequence[int]) -> tuple[int, ...]:
    """Returns an order of axes in memory, () of one that is row-major."""
    axes, order = tuple(range(len(order))), tuple(order)
    if tuple(sorted(order)) != axes or order[-1:] != axes[-1:]:
        raise ValueError(f"gemm: {order} is no order of axes in memory: each of them once, and the last axis last")
    return () if order == axes else order


def _with_axis(order: tuple[int, ...], at: int, rank: int) -> tuple[int, ...]:
    """Returns the order of an array of that rank once it has a new axis: the slowest, where the order says anything."""
    if not order:
        return ()
    before = rank - len(order)
    order = (*range(before), *(before + axis for axis in order))
    return (at, *(axis + (axis >= at) for axis in order))


def reference(
    a: jax.Array,
    b: jax.Array,
    *,
    layout: str,
    out_dtype: np.dtype,
    on_cuda: bool,
    precision: Canonical = None,
    added: Sequence[int] = (),
    sharding: jax.NamedSharding | None = None,
) -> jax.Array:
    """Computes the product by one dot_general; on explicit mesh axes ``sharding`` says how the result lies.

    An axis of size 1 that broadcasts is dropped from its operand, so nothing is copied.
    """
    b = as_wide(b, a.dtype)
    axes = range(a.ndim - 2)
    summed = [a.ndim - 3 - i for i in added]
    a_only = [i for i in axes if b.shape[i] == 1 != a.shape[i]]
    b_only = [i for i in axes if a.shape[i] == 1 != b.shape[i]]
    both = [i for i in axes if a.shape[i] == b.shape[i] and i not in summed]
    a_axes = [*(i for i in axes if i not in b_only), *("mk" if layout[0] == "n" else "km")]
    b_axes = [*(i for i in axes if i not in a_only), *("kn" if layout[1] == "n" else "nk")]
    contracted = ["k", *summed]
    d_axes = [
        *both,
        *(i for i in a_axes if i not in both and i not in contracted),
        *(i for i in b_axes if i not in both and i not in contracted),
    ]
    kept = [i for i in (*axes, "m", "n") if i not in summed]
    order = [d_axes.index(i) for i in kept]
    if sharding is not None and any_divided(a, b, sharding):
        spec = [axis for i, axis in enumerate(sharding.spec) if i not in summed]
        sharding = sharding.update(spec=jax.P(*(spec[order.index(i)] for i in range(len(order)))))
    else:
        sharding = None
    preferred = accumulator(a.dtype, out_dtype)
    of_halves = is_half(a.dtype) and out_dtype in (a.dtype, np.dtype(np.float32))
    if on_cuda and (of_halves or (a.dtype.name in FLOAT8 and is_half(out_dtype))):
        # On CUDA, XLA's GEMMs accumulate 16-bit floats, and float8, in f32 anyway, and a conversion would be a pass:
        # 143 us beside the 217 of 4096 x 24576 x 1536 in float8. 16-bit floats have no kernel for a result in the other
        # 16-bit dtype.
        preferred = out_dtype
    elif not on_cuda or preferred != accumulator(a.dtype):
        # XLA's CPU backend lacks some products of narrow operands with a wider result, depending on layout and batch;
        # on CUDA too those are added up in the result's dtype only where the operands have it.
        if a.dtype.itemsize == 1:  # of wider operands lax refuses a float8 algorithm
            precision = dot_precision.of_wider(precision)
        a, b = a.astype(preferred), b.astype(preferred)
    d = lax.dot_general(
        lax.squeeze(a, b_only),
        lax.squeeze(b, a_only),
        (
            ([a_axes.index(i) for i in contracted], [b_axes.index(i) for i in contracted]),
            ([a_axes.index(i) for i in both], [b_axes.index(i) for i in both]),
        ),
        precision=precision or dot_precision.DEFAULT,  # of None lax would make what the scope says now
        preferred_element_type=preferred,
        out_sharding=sharding,
    )
    return lax.expand_dims(lax.transpose(d, order), sorted(summed)).astype(out_dtype)
