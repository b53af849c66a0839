"""Policies of jax.checkpoint inside of a program: what they say of a product, they say of the kernel that has it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from cutjax.primitives.convolution import Convolution
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import batch_axes


@dataclasses.dataclass(frozen=True)
class AsDotGeneral:
    """A policy that is asked about a product of ours as about the ``dot_general`` or the convolution that it is."""

    policy: Callable[..., Any]

    @classmethod
    def of(cls, policy: Callable[..., Any]) -> AsDotGeneral:
        """Returns one of a policy, which may be one."""
        return policy if isinstance(policy, cls) else cls(policy)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """Returns the policy's answer for an equation: True, False, or where to offload its results."""
        product = params.get("product")
        if isinstance(product, Convolution):
            how = {"out_dtype": avals[0].dtype, "precision": params["precision"], "on_cuda": True}
            plain = jax.make_jaxpr(functools.partial(product.reference, **how))(*avals[:2])
            found = (eqn for eqn in plain.eqns if eqn.primitive is lax.conv_general_dilated_p)
            return all(self.policy(eqn.primitive, *(x.aval for x in eqn.invars), **eqn.params) for eqn in found)
        if not isinstance(product, Dense):
            return self.policy(prim, *avals, **params)
        (a, b), batch = avals[:2], batch_axes(*avals[:2])
        contracted = a.ndim - (1 if product.layout[0] == "n" else 2), b.ndim - (2 if product.layout[1] == "n" else 1)
        dims = ((contracted[:1], contracted[1:]), (batch, batch))
        dot = {"precision": params["precision"], "preferred_element_type": None, "out_sharding": None}
        return self.policy(lax.dot_general_p, a, b, dimension_numbers=dims, **dot)
