"""The arrays of a product as one value: what travels from an operation to the primitive, and from rule to rule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from cutjax.epilogue.expression import Epilogue
from cutjax.primitives.accumulators import converted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factors:
    """The arrays of a product, or what stands for each: an aval, a tangent, the axis of a batch. A pytree.

    Attributes:
      a: the first factor.
      bs: the second factor of each of the products that an epilogue takes; none of a unary product.
      context: what the product is told beside them.
      scales: of a, and then of each b, what lies beside it: the scales of its blocks and their zero points, operands of
        its prologue, or further arrays; () where there is nothing.
    """

    a: Any
    bs: Sequence[Any] = ()
    context: Sequence[Any] = ()
    scales: Sequence[Sequence[Any]] = ()

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All of them in the primitive's order."""
        return (self.a, *self.bs, *self.context, *(x for of in self.scales for x in of))

    @property
    def each(self) -> list[tuple[Any, ...]]:
        """The arrays of each of the products, a and one b, the context, and the scales of the two."""
        of_a, *of_bs = self.scales or ((),) * (1 + len(self.bs))
        pairs = zip(self.bs, of_bs, strict=True)
        return [(self.a, b, *self.context, *of_a, *of_b) for b, of_b in pairs] or [(self.a, *self.context)]

    @property
    def unscaled(self) -> Factors:
        """The factors without their scales."""
        return dataclasses.replace(self, scales=()) if self.scales else self

    def like(self, values: Sequence[Any]) -> Factors:
        """Returns other values, one for each array."""
        of_a, *rest = values
        it = iter(rest)
        bs, context, *scales = (tuple(next(it) for _ in of) for of in (self.bs, self.context, *self.scales))
        return Factors(of_a, bs, context, tuple(scales))


class Folded(NamedTuple):
    """A product with batch axes merged into rows, or into the contracted axis; ``unfold`` takes its results back."""

    product: Any
    epilogue: Epilogue
    factors: Factors
    operands: list[jax.Array]
    unfold: Callable[[jax.Array], jax.Array]


def summed_tangents(
    multiply: Callable[..., list[jax.Array]], by_a: Any, by_bs: Any, bs: Sequence[Any], b_dots: Sequence[Any]
) -> list[jax.Array | None]:
    """Returns tangents of products of a and each b, told the product, and its a, that each kind of them is."""
    (of_a, a_dot), (of_b, a) = by_a, by_bs
    moving = [i for i, dot in enumerate(b_dots) if dot is not None]
    of_a = [] if a_dot is None else enumerate(multiply(of_a, a_dot, bs))
    of_bs = zip(moving, multiply(of_b, a, [b_dots[i] for i in moving]) if moving else (), strict=True)
    terms: list[list[jax.Array]] = [[] for _ in bs]
    for i, d in (*of_a, *of_bs):
        terms[i].append(d)
    return [functools.reduce(lax.add, of) if of else None for of in terms]


def batch_axes(a: Any, b: Any, own: int = 2) -> tuple[int, ...]:
    """Returns the batch axes of a product that are both operands', told how many of a's axes are its own."""
    batches = zip(*(x.shape[: a.ndim - own] for x in (a, b)), strict=True)
    return tuple(i for i, (p, q) in enumerate(batches) if p != 1 != q)


def sum_to(d: jax.Array, to: Any) -> jax.Array:
    """Returns a cotangent added up over the batch axes that its operand broadcast over, in the operand's dtype."""
    axes = [i for i, (size, full) in enumerate(zip(to.shape, d.shape, strict=True)) if size == 1 != full]
    d = d.sum(axes, keepdims=True) if axes else d
    return d if d.dtype == to.dtype else converted(d, to.dtype, to.weak_type)
