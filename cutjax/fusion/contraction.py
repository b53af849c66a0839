"""Products of a program as kernels have them: ``[*batch, m, k] @ [*batch, k, n]``, by reshapes that move nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType

from cutjax import dot_precision
from cutjax.binding.rules import any_divided, leaves_axes
from cutjax.epilogue.expression import identity
from cutjax.fusion.convolved import Convolved, convolved
from cutjax.fusion.flips import CONVOLUTION
from cutjax.fusion.form import Form, unfit_dtypes
from cutjax.fusion.jaxprs import is_marked
from cutjax.ops.contraction import Contraction as Plan
from cutjax.ops.contraction import contraction as contraction_plan
from cutjax.primitives.convolution import Convolution
from cutjax.primitives.dense import FLIP, Dense
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Product
from cutjax.primitives.ragged import Rows
from cutjax.primitives.scaled import Scaled

RAGGED = "ragged_dot_general"
OWN = ("cutjax_gemm", "cutjax_conv", "cutjax_scaled")
_PRODUCTS = ("dot_general", RAGGED, CONVOLUTION)


@dataclasses.dataclass(frozen=True)
class Contraction(Form):
    """A product of matrices of an equation.

    Attributes:
      layout: "nn", "nt", "tn" or "tt".
      plan: what makes the operands, where it takes more than a reshape: memory is walked in another order.
    """

    layout: str
    plan: Plan | None = None

    @property
    def product(self) -> Product:
        return Dense(self.layout) if self.plan is None else Dense(self.layout, self.plan.orders)

    def operands(self, left: Any, right: Any) -> tuple[jax.Array, jax.Array]:
        if self.plan is not None:
            return self.plan.operands(left, right)
        x, y = (right, left) if self.swapped else (left, right)
        return lax.reshape(x, self.a), lax.reshape(y, self.b)

    def result(self, d: jax.Array, shape: Sequence[int]) -> jax.Array:
        return super().result(d, shape) if self.plan is None else self.plan.result(d)

    def avals(self, left: Any, right: Any) -> Sequence[Any]:
        x, y = (right, left) if self.swapped else (left, right)
        return super().avals(x, y)

    def of_columns(self, n: int) -> Contraction:
        """Returns the product of so many columns."""
        k = self.a[-1 if self.layout[0] == "n" else -2]
        b = (k, n) if self.layout[1] == "n" else (n, k)
        return dataclasses.replace(self, b=(*self.b[:-2], *b), shape=(*self.shape[:-1], n))

    @property
    def transposed(self) -> Contraction:
        """The product whose result is transposed; of one without batch axes."""
        layout = FLIP[self.layout[1]] + FLIP[self.layout[0]]
        precision = dot_precision.swapped(self.precision)
        return Contraction(self.b, self.a, self.shape[::-1], precision, layout, swapped=not self.swapped)


@dataclasses.dataclass(frozen=True)
class Grouped(Contraction):
    """A product of rows in groups, ``[m, k] @ [g, k, n]``, or ``[g, n, k]`` in the layout "nt".

    Rows of no group are zero, and a kernel makes every result of its tail zero there: so the tail must.
    """

    grouped: ClassVar[bool] = True

    @property
    def product(self) -> Product:
        return Rows(False, self.layout)


@dataclasses.dataclass(frozen=True)
class Own(Contraction):
    """A plain product of this package, which stays as it is unless it gets a tail.

    Attributes:
      own: the product that is bound.
      beside: the shapes of the scales and zero points beside its operands.
    """

    own: Dense | Scaled = dataclasses.field(kw_only=True)
    beside: tuple[tuple[int, ...], ...] = ()

    @property
    def product(self) -> Product:
        return self.own

    def operands(self, left: Any, right: Any) -> tuple[jax.Array, jax.Array]:
        return left, right

    def factors(self, arrays: Sequence[Sequence[jax.Array]]) -> Factors:
        first, *others = (self.own.unpack(of, identity(np.dtype(np.float32)))[0] for of in arrays)
        scales = first.scales and (*first.scales, *(x.scales[1] for x in others))
        return dataclasses.replace(first, bs=(*first.bs, *(x.bs[0] for x in others)), scales=scales)

    def of_columns(self, n: int) -> Contraction:
        of_a = self.own.counts[0] if isinstance(self.own, Scaled) else 0
        axis, times = len(self.b) - (1 if self.layout[1] == "n" else 2), n // self.shape[-1]
        wider = (
            tuple(size * times if i == axis and size > 1 else size for i, size in enumerate(shape))
            for shape in self.beside[of_a:]
        )
        return dataclasses.replace(super().of_columns(n), beside=(*self.beside[:of_a], *wider))

    def avals(self, left: Any, right: Any, *beside: Any) -> list[Any]:
        more = map(jax.ShapeDtypeStruct, self.beside, beside)
        return [*super().avals(left, right), *more]


def is_product(eqn: Any) -> bool:
    """True if an equation is a product that may get a tail: of ours, one that has none, and may run as any kernel."""
    name, params = eqn.primitive.name, eqn.params
    if is_marked(eqn):
        return False
    if name not in OWN:
        return name in _PRODUCTS
    plain = params["epilogue"].primal.plain and not params["in_place"]
    product = params["product"]
    if isinstance(product, Scaled):
        plain = plain and isinstance(product.product, Dense) and product.prologues == (None, None)
    return plain and params["backend"] == "auto" and params["config"] is None


def contraction(eqn: Any) -> Form | str:
    """Returns a product as a kernel has it, or why none has."""
    of = {RAGGED: _grouped, CONVOLUTION: convolved} | dict.fromkeys(OWN, _own)
    return of.get(eqn.primitive.name, _dense)(eqn)


def _own(eqn: Any) -> Form | str:
    (a, b, *beside), (out,), params = (x.aval for x in eqn.invars), (x.aval for x in eqn.outvars), eqn.params
    product, same = params["product"], (a.shape, b.shape, out.shape, params["precision"])
    left, right = (x.update(dtype=product.multiplied(x.dtype)) for x in (a, b))
    if why := unfit_dtypes(left, right, out):
        return why
    if 0 in (*a.shape, *b.shape, *out.shape):
        return "it is empty"
    if isinstance(product, Convolution):
        return Convolved(*same, product, hints=params["hints"])
    dense: Any = product.product if isinstance(product, Scaled) else product
    return Own(*same, dense.layout, hints=params["hints"], own=product, beside=tuple(x.shape for x in beside))


def _grouped(eqn: Any) -> Grouped | str:
    params = eqn.params
    dims = params["ragged_dot_dimension_numbers"]
    contracted, batch = dims.dot_dimension_numbers
    left, right, sizes = (x.aval for x in eqn.invars[:3])
    of_rows = (tuple(dims.lhs_ragged_dimensions), tuple(dims.rhs_group_dimensions)) == ((0,), (0,))
    if not of_rows or tuple(map(tuple, batch)) != ((), ()) or (left.ndim, right.ndim, sizes.ndim) != (2, 3, 1):
        return "what is around it is fused only beside rows in groups, [m, k] x [g, k, n]"
    if params.get("group_offset") is not None or len(eqn.invars) != 3 or 0 in (*left.shape, *right.shape):
        return "it is empty, or of some of the groups"
    if why := unfit_dtypes(left, right, eqn.outvars[0].aval):
        return why
    layout = "nn" if tuple(map(tuple, contracted)) == ((1,), (1,)) else "nt"
    n = right.shape[2 if layout == "nn" else 1]
    return Grouped(left.shape, right.shape, (left.shape[0], n), params["precision"], layout)


def _dense(eqn: Any) -> Contraction | str:
    """Returns the product of a dot_general, by reshapes where these do: tails want its batch axes apart."""
    if why := _unfit(eqn):
        return why
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    left, right = (x.aval for x in eqn.invars)
    batch = len(lb)
    several = are_divided(left, right) and left.ndim - batch - len(lc) > 1
    if several or tuple(lb) != tuple(range(batch)) or tuple(rb) != tuple(range(batch)):
        return planned(eqn)
    pairs = sorted(zip(lc, rc, strict=True))
    a = _matrix(left.shape, [i for i, _ in pairs], batch, "nt")
    b = _matrix(right.shape, [j for _, j in pairs], batch, "tn")
    if a is None or b is None:
        return planned(eqn)
    (of_a, a_shape, m), (of_b, b_shape, n) = a, b
    return Contraction(a_shape, b_shape, (*left.shape[:batch], m, n), eqn.params["precision"], of_a + of_b)


def _unfit(eqn: Any) -> str:
    """Returns the reason against a kernel for a dot_general, whatever its dimensions, or ""."""
    left, right = (x.aval for x in eqn.invars)
    return unfit_dtypes(left, right, eqn.outvars[0].aval) or ("it is empty" if 0 in (*left.shape, *right.shape) else "")


def planned(eqn: Any, permutation: Sequence[int] | None = None) -> Contraction | str:
    """Returns the product of a dot_general whose arrays may be walked in another order than they lie in memory.

    Args:
      eqn: its equation.
      permutation: that of the result. None where its rows and columns must be what they are, as for a tail.
    """
    if why := _unfit(eqn):
        return why
    left, right = (x.aval for x in eqn.invars)
    out, params = eqn.outvars[0].aval, eqn.params
    itemsizes = tuple(x.dtype.itemsize for x in (left, right, out))
    dims = tuple(tuple(map(tuple, pair)) for pair in params["dimension_numbers"])
    order = None if permutation is None else tuple(permutation)
    apart = are_divided(left, right)
    plan = contraction_plan(left.shape, right.shape, dims, order, itemsizes=itemsizes, apart=apart)
    if any(plan.copies):
        return "; ".join(filter(None, plan.copies))
    shape = out.shape
    if order is None:
        if plan.d.order or plan.d.permutation != tuple(range(len(plan.d.permutation))):
            return "its rows and columns are no neighbours in the result"
        shape = tuple(math.prod(shape[i] for i in axes) for axes in plan.axes)
    precision = dot_precision.swapped(params["precision"]) if plan.swapped else params["precision"]
    return Contraction(plan.a.shape, plan.b.shape, shape, precision, plan.layout, plan, swapped=plan.swapped)


def are_divided(*avals: Any) -> bool:
    """True if arrays are known to lie on a mesh over which XLA divides: of merged rows it divides one axis alone."""
    meshes = [x.sharding.mesh for x in avals]
    return any(not mesh.empty and leaves_axes(mesh) for mesh in meshes)


def is_divided(mesh: Any, manual: Sequence[str]) -> bool:
    """True inside a shard_map that leaves explicit axes of a mesh, or several, over which no kernel is divided.

    Explicit axes become automatic around a kernel, and of that JAX has no derivative inside a shard_map.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    left = [name for name, kind in kinds.items() if name not in manual and kind != AxisType.Manual]
    explicit = any(kinds[name] == AxisType.Explicit for name in left)
    return len(left) < len(kinds) and (explicit or sum(mesh.shape[name] > 1 for name in left) > 1)


def is_sharded(sharding: Any) -> bool:
    """True if an axis lies on a mesh axis, under explicit sharding, or is a sum over one: merging axes moves data."""
    return sharding is not None and any_divided(sharding)


def _matrix(
    shape: Sequence[int], contracted: list[int], batch: int, letters: str
) -> tuple[str, tuple[int, ...], int] | None:
    """Returns the letter of an operand, its shape with merged axes, and the size of its own axis; None if axes move."""
    rank = len(shape)
    last = contracted == list(range(rank - len(contracted), rank))
    if not contracted or not (last or contracted == list(range(batch, batch + len(contracted)))):
        return None
    k = math.prod(shape[i] for i in contracted)
    own = math.prod(shape[batch:]) // max(k, 1)
    if len(contracted) == rank - batch:
        return None  # a vector
    return (letters[0], (*shape[:batch], own, k), own) if last else (letters[1], (*shape[:batch], k, own), own)


def transposes(eqn: Any, rank: int, left: int) -> bool:
    """True if an equation swaps rows and columns of a result of that rank, whose first ``left`` axes are its rows."""
    return eqn.primitive.name == "transpose" and tuple(eqn.params["permutation"]) == (*range(left, rank), *range(left))
