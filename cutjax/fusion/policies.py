"""Policies of jax.checkpoint inside of a program: what they say of a product, they say of the kernel that has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax

from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import batch_axes


@dataclasses.dataclass(frozen=True)
class AsDotGeneral:
    """A policy that is asked about a dense product of ours as about the ``dot_general`` that it is."""

    policy: Callable[..., Any]

    @classmethod
    def of(cls, policy: Callable[..., Any]) -> AsDotGeneral:
        """Returns one of a policy, which may be one."""
        return policy if isinstance(policy, cls) else cls(policy)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """Returns the policy's answer for an equation: True, False, or where to offload its results."""
        product = params.get("product")
        if not isinstance(product, Dense):
            return self.policy(prim, *avals, **params)
        (a, b), batch = avals[:2], batch_axes(*avals[:2])
        contracted = a.ndim - (1 if product.layout[0] == "n" else 2), b.ndim - (2 if product.layout[1] == "n" else 1)
        dims = ((contracted[:1], contracted[1:]), (batch, batch))
        dot = {"precision": params["precision"], "preferred_element_type": None, "out_sharding": None}
        return self.policy(lax.dot_general_p, a, b, dimension_numbers=dims, **dot)
