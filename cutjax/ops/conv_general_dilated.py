"""Drop-ins for jax.lax.conv_general_dilated and jax.lax.conv_transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic
from cutjax.binding.rules import any_reduced
from cutjax.ops.conv import conv
from cutjax.ops.convolution_plan import by_lax, planned, unknown_sizes
from cutjax.ops.quantized import Weights, as_quantized, is_quantized, values_of
from cutjax.primitives.accumulators import converted
from cutjax.primitives.arrays import is_array_like, unwrapped
from cutjax.primitives.product import multiply
from cutjax.runtime import backends


def conv_general_dilated(
    lhs: Weights,
    rhs: Weights,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.lax.conv_general_dilated``, to which it is equal to rounding: ``cutjax.conv`` in that function's signature.

    Arrays that do not have their channels last are transposed around the product; ``explain`` says which. What no
    kernel could ever compute is left to ``jax.lax.conv_general_dilated``: no spatial axes or more than three, sizes but
    that of the batch that are symbolic (``jax.export``), and images that are divided over explicit mesh axes.

    Args:
      lhs: images; or `cutjax.Quantized`, as rhs: the convolution is then that of ``cutjax.conv``.
      rhs: weights.
      window_strides: as in ``jax.lax.conv_general_dilated``.
      padding: as in ``jax.lax.conv_general_dilated``.
      lhs_dilation: as in ``jax.lax.conv_general_dilated``.
      rhs_dilation: as in ``jax.lax.conv_general_dilated``.
      dimension_numbers: as in ``jax.lax.conv_general_dilated``.
      feature_group_count: as in ``jax.lax.conv_general_dilated``.
      batch_group_count: as in ``jax.lax.conv_general_dilated``.
      precision: as in ``jax.lax.conv_general_dilated``.
      preferred_element_type: as in ``jax.lax.conv_general_dilated``.
      out_sharding: as in ``jax.lax.conv_general_dilated``.

    Returns:
      The array that ``jax.lax.conv_general_dilated`` returns.

    Raises:
      TypeError, ValueError: as ``jax.lax.conv_general_dilated``.
      NotImplementedError: where the backend is "cuda" and ``jax.lax.conv_general_dilated`` would run; and when
        compiled, as ``cutjax.conv``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> x, w = jnp.ones((2, 3, 8, 8)), jnp.ones((16, 3, 3, 3))  # lax's default layouts
      >>> cutjax.conv_general_dilated(x, w, (1, 1), "SAME").shape
      (2, 16, 8, 8)
    """
    given = {
        "window_strides": window_strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    lhs, rhs = as_quantized(lhs), as_quantized(rhs)
    if is_quantized((lhs, rhs)):
        if out_sharding is not None:
            raise NotImplementedError(f"conv_general_dilated: out_sharding of quantized operands, got {out_sharding}")
        of_lhs, of_rhs = (jnp.shape(unwrapped(x)) for x in values_of((lhs, rhs)))
        del given["out_sharding"]
        given["dimension_numbers"] = lax.conv_dimension_numbers(of_lhs, of_rhs, dimension_numbers)
        return conv(lhs, rhs, **given)
    return _drop_in("conv_general_dilated", lhs, rhs, given)


def conv_transpose(
    lhs: ArrayLike,
    rhs: ArrayLike,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
) -> jax.Array:
    """``jax.lax.conv_transpose``, to which it is equal to rounding; see ``cutjax.conv_general_dilated``.

    Weights of a transposed kernel are read as they lie, and neither flipped nor copied.

    Args:
      lhs: images, with channels last by default.
      rhs: weights.
      strides: as in ``jax.lax.conv_transpose``.
      padding: as in ``jax.lax.conv_transpose``.
      rhs_dilation: as in ``jax.lax.conv_transpose``.
      dimension_numbers: as in ``jax.lax.conv_transpose``.
      transpose_kernel: as in ``jax.lax.conv_transpose``.
      precision: as in ``jax.lax.conv_transpose``.
      preferred_element_type: as in ``jax.lax.conv_transpose``.
      use_consistent_padding: as in ``jax.lax.conv_transpose``.

    Returns:
      The array that ``jax.lax.conv_transpose`` returns.

    Raises:
      TypeError, ValueError: as ``jax.lax.conv_transpose``.
      NotImplementedError: as ``cutjax.conv_general_dilated``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> x, w = jnp.ones((2, 8, 8, 3)), jnp.ones((2, 2, 3, 16))
      >>> cutjax.conv_transpose(x, w, (2, 2), "SAME").shape
      (2, 16, 16, 16)
    """
    given = {
        "strides": strides,
        "padding": padding,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "use_consistent_padding": use_consistent_padding,
        "transpose_kernel": transpose_kernel,
    }
    return _drop_in("conv_transpose", lhs, rhs, given, flipped=bool(transpose_kernel))


def _drop_in(where: str, lhs: Any, rhs: Any, given: dict[str, Any], flipped: bool = False) -> jax.Array:
    """Computes one of lax's functions of two arrays as a product, or by that function where there is no product."""
    lhs, rhs = unwrapped(lhs), unwrapped(rhs)
    of_lax, traced = by_lax(where, given)
    if not (is_array_like(lhs) and is_array_like(rhs)):
        return of_lax(lhs, rhs)  # says what is wrong
    found = traced.trace(lhs, rhs).jaxpr  # says what is wrong with the rest
    (out,), params = found.out_avals, found.eqns[-1].params
    backend = backends.resolve(None, where)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if 0 in (*lhs.shape, *rhs.shape, *out.shape):  # zeros, or nothing at all
        return of_lax(lhs, rhs)
    if reason := _left_to_lax(lhs, rhs, params, out):
        if backend == "cuda":
            raise NotImplementedError(f"{where}: backend 'cuda' has no kernel: {reason}")
        return of_lax(lhs, rhs)
    return _product(lhs, rhs, where=where, params=params, out=out, flipped=flipped, backend=backend)


@automatic(lambda out, **_: lambda result: list(out.sharding.spec))
def _product(
    lhs: jax.Array, rhs: jax.Array, *, where: str, params: Any, out: Any, flipped: bool, backend: str
) -> jax.Array:
    plan = planned(params, lhs.shape, rhs.shape, out.shape, flipped, gradients=True)
    d = multiply(
        plan.product,
        *plan.operands(lhs, rhs),
        out_dtype=out.dtype,
        precision=dot_precision.canonical(params["precision"], where),
        backend=backend,
        hints=plan.hints(lhs, rhs, out, ("lhs", "rhs")),
    )
    return converted(plan.result(d), out.dtype, out.weak_type)


def _left_to_lax(lhs: jax.Array, rhs: jax.Array, params: Any, out: Any) -> str:
    """Returns the reason against a kernel whatever the sizes; "" where there is none."""
    if not 3 <= lhs.ndim <= 5:
        return f"images have one to three axes, got {lhs.ndim - 2}"
    if reason := unknown_sizes(params, lhs, rhs):
        return reason
    image = params["dimension_numbers"].lhs_spec[2:]
    if not len(image) == len(params["lhs_dilation"]) == len(params["rhs_dilation"]):
        return "steps must be given for each axis"
    if min(*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"]) < 1:
        return "steps must be positive"
    if any_reduced(lhs, rhs, out):
        return "operands and results that are reduced, or not yet, over mesh axes are jax.lax's"
    if any(jax.typeof(lhs).sharding.spec[axis] is not None for axis in image):
        return "images that are divided over explicit mesh axes are jax.lax's"
    return ""
