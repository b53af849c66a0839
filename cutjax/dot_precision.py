"""The precision of a product: the meaning of ``precision=``, for the references and for the kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Canonical = None | tuple[lax.Precision, lax.Precision] | lax.DotAlgorithmPreset | lax.DotAlgorithm

DEFAULT = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
# What the kernels do, by the operands' dtype: exact products, added up in float32.
_KERNELS = {
    np.dtype(jnp.bfloat16): lax.DotAlgorithmPreset.BF16_BF16_F32,
    np.dtype(np.float16): lax.DotAlgorithmPreset.F16_F16_F32,
}
_FLOAT8 = tuple(preset for preset in lax.DotAlgorithmPreset if preset.name.startswith("ANY_F8"))


def canonical(precision: Any, where: str) -> Canonical:
    """Returns what jax.lax makes of a precision at this place of the program; None takes that of the scope.

    The scope's is ``jax.default_matmul_precision``. Hashable; again canonical it is the same. An error says in which
    operation it was.
    """
    precision = tuple(precision) if type(precision) is list else precision
    try:
        hash(precision)
        return _canonical(precision, jax.config.jax_default_matmul_precision)  # pyright: ignore[reportAttributeAccessIssue]
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError):
            raise ValueError(f"{where}: {error}") from None
        raise ValueError(f"{where}: precision must be one that jax.lax.dot takes, got {precision!r}") from None


@functools.cache
def _canonical(precision: Any, scope: str | None) -> Canonical:
    """Returns the parameter of the dot_general that jax.lax makes; it depends on the scope."""
    x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    dot = functools.partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), precision=precision)
    (eqn,) = jax.make_jaxpr(dot)(x, x).jaxpr.eqns
    return eqn.params["precision"]


def swapped(precision: Canonical) -> Canonical:
    """Returns the precision of a product whose operands have changed places."""
    if isinstance(precision, lax.DotAlgorithm):
        p = precision
        return p._replace(
            lhs_precision_type=p.rhs_precision_type,
            rhs_precision_type=p.lhs_precision_type,
            lhs_component_count=p.rhs_component_count,
            rhs_component_count=p.lhs_component_count,
        )
    return (precision[1], precision[0]) if isinstance(precision, tuple) else precision


def of_cotangents(precision: Canonical, dtype: np.dtype, where: str) -> Canonical:
    """Returns the precision of a product with a cotangent, in ``dtype``, of a product in that precision: the same.

    As in lax None is again what the scope says. A float8 algorithm takes no wider operands.
    """
    return canonical(None if precision in _FLOAT8 and dtype.itemsize > 1 else precision, where)


def reasons(precision: Canonical, dtype: np.dtype) -> list[str]:
    """Returns why no kernel multiplies operands of a dtype in this precision; empty when one does."""
    algorithm = precision
    if isinstance(precision, lax.DotAlgorithm):
        left, right, acc = (np.dtype(x) for x in precision[:3])
        if left == right == dtype and acc == np.float32 and precision[3:6] == (1, 1, 1):
            algorithm = _KERNELS.get(dtype)
    if (
        algorithm is None
        or type(algorithm) is tuple
        or algorithm in (lax.DotAlgorithmPreset.DEFAULT, _KERNELS.get(dtype))
    ):
        return []
    return [f"precision {precision}: kernels accumulate 16-bit operands in float32"]
