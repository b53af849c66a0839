"""Convolutions of a program as kernels have them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from cutjax import dot_precision
from cutjax.fusion.flips import FLIPPED
from cutjax.fusion.form import Form, unfit_dtypes
from cutjax.ops.convolution_plan import Plan, planned
from cutjax.primitives.convolution import Convolution
from cutjax.primitives.hints import Hints


@dataclasses.dataclass(frozen=True)
class Convolved(Form):
    """A convolution of an equation, or a gradient of one.

    Attributes:
      convolution: the product that is bound.
      plan: what makes its arrays of the equation's; None where they are those of the equation, which is ours.
    """

    convolution: Convolution
    plan: Plan | None = None

    @property
    def product(self) -> Convolution:
        return self.convolution

    def operands(self, left: Any, right: Any) -> tuple[jax.Array, jax.Array]:
        return (left, right) if self.plan is None else self.plan.operands(left, right)

    def result(self, d: jax.Array, shape: Sequence[int]) -> jax.Array:
        return d if self.plan is None else self.plan.result(d)

    def avals(self, left: Any, right: Any) -> tuple[Any, Any]:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            a, b = jax.make_jaxpr(lambda *arrays: arrays)(*super().avals(left, right)).in_avals
        return a, b


def convolved(eqn: Any) -> Convolved | str:
    """Returns the product of a convolution of lax's, or why a kernel has none. Of a ``Flip``'s too."""
    (left, right), (out,), params = (x.aval for x in eqn.invars), (x.aval for x in eqn.outvars), eqn.params
    if why := unfit_dtypes(left, right, out):
        return why
    if not 3 <= left.ndim <= 5:
        return f"images of {left.ndim - 2} axes: of one to three they would have a kernel"
    if 0 in (*left.shape, *right.shape, *out.shape):
        return "it is empty"
    plan = planned(params, left.shape, right.shape, out.shape, params.get(FLIPPED, False), gradients=True)
    a, b = (x.shape for x in jax.eval_shape(plan.operands, left, right))
    moved = plan.moved(left, right, out)
    nbytes = (math.prod(x.shape) * x.dtype.itemsize for x in (left, right, out))
    return Convolved(
        a,
        b,
        plan.sizes,
        dot_precision.canonical(params["precision"], "fuse"),
        plan.product,
        plan,
        hints=Hints(plan.copies(left, right, out, ("lhs", "rhs"))),
        moved=sum(size for size, moves in zip(nbytes, moved, strict=True) if moves),
        tailless="XLA transposes its result" if moved[2] else "",
    )
