"""The operation conv: its arguments, checked, and the product that they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes
from cutjax.binding.rules import with_rank
from cutjax.dtypes import are_narrow
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.kernels.families import AnyConfig
from cutjax.ops.arguments import check_config, check_epilogue, integer, promote, weights
from cutjax.ops.convolution_plan import by_lax, planned
from cutjax.ops.quantized import Quantized, Weights, as_quantized, is_quantized
from cutjax.ops.scales import Scales, wide_dtype
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import converted
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.factors import Factors
from cutjax.runtime import backends

CHANNELS_LAST = {3: ("NWC", "WIO", "NWC"), 4: ("NHWC", "HWIO", "NHWC"), 5: ("NDHWC", "DHWIO", "NDHWC")}


def conv(
    x: Weights,
    w: Weights | tuple[Weights, ...],
    *,
    window_strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[Any] = "SAME",
    lhs_dilation: int | Sequence[int] | None = None,
    rhs_dilation: int | Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    out_dtype: DTypeLike | tuple[DTypeLike | None, ...] | None = None,
    backend: str | None = None,
    config: AnyConfig | None = None,
    save: str = "default",
) -> Any:
    """Convolves images of one to three axes with weights, ``jax.lax.conv_general_dilated`` with channels last.

    ``d[i, p, n] = sum_t,c x[i, window_strides * p + rhs_dilation * t - low, c] * w[t, c, n]``, of pixels p and taps t
    along each axis, accumulated in float32. Differentiable and batchable like any JAX function; the gradients are
    products of the same kind.

    With an epilogue the result is that of ``epilogue(acc, *operands)``, computed on the accumulators before they leave
    the kernel, as in ``cutjax.gemm``: elementwise functions of ``acc[n, *spatial, c]``, and of operands that broadcast
    against it, and as further results reductions over channels, over axes of the batch and of the image, or both.

    Args:
      x: images ``[n, *spatial, c]``.
      w: weights ``[*window, c / groups, channels]``. dtypes promote as in ``cutjax.gemm``. With an epilogue also a
        tuple of two or three of equal shape and dtype; the epilogue then takes as many accumulators. Scales of a
        `cutjax.Quantized` w that are one for each of its channels, or one for all, multiply the sums; other operands
        that are quantized are dequantized before, to the dtype of the arrays.
      window_strides: an int, or one for each axis.
      padding: "SAME", "SAME_LOWER", "VALID", or for each axis a pair ``(low, high)``, negative too; an int, and an int
        for each axis, pads both sides alike.
      lhs_dilation: steps between pixels of x, with zeros between; 1 by default.
      rhs_dilation: steps between taps; 1 by default.
      dimension_numbers: as in ``jax.lax.conv_general_dilated``, but that None stands for channels last. Where it is
        another order XLA transposes arrays around the product, as ``explain`` says; the epilogue and its operands have
        channels last all the same.
      feature_group_count: groups of channels.
      batch_group_count: groups of the batch.
      precision: as in ``jax.lax.conv_general_dilated``.
      preferred_element_type: dtype of the result, as in ``jax.lax.conv_general_dilated``.
      epilogue: a function ``(acc, *operands)`` that returns an array or a pytree of them.
      operands: its further arguments: scalars, and arrays that broadcast against ``[n, *spatial, c]``.
      out_dtype: dtype of the result, as in ``cutjax.gemm``; it goes before ``preferred_element_type``.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      config: pins the kernel of this product. Its gradients choose their own.
      save: what the derivative of an epilogue keeps, "default" or "recompute", see ``cutjax.gemm``.

    Returns:
      The convolution, ``[n, *spatial, channels]``, or what the epilogue returns.

    Raises:
      TypeError, ValueError: as ``jax.lax.conv_general_dilated``.
      NotImplementedError: if the epilogue is no elementwise function; and when compiled, if backend is "cuda" and no
        kernel serves the problem; lists every reason.

    Example:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 16))
      >>> cutjax.conv(x, w, window_strides=2).shape
      (2, 4, 4, 16)
      >>> bias = jnp.ones(16)
      >>> cutjax.conv(x, w, epilogue=lambda acc, b: jax.nn.silu(acc + b), operands=(bias,)).shape
      (2, 8, 8, 16)
    """
    where = "conv"
    check_config(config, where)
    backend = backends.resolve(backend, where)
    out_dtype = tuple(out_dtype) if isinstance(out_dtype, list) else out_dtype
    out_dtype = preferred_element_type if out_dtype is None else out_dtype
    check_epilogue(w, epilogue, operands, out_dtype, save, where, "w")
    x, w, scales = _dequantized(as_quantized(x), as_quantized(w), dimension_numbers is None)
    x, ws = matrix(x, "x", where), weights(w, "w", where)
    rank = x.ndim
    if rank not in CHANNELS_LAST or ws[0].ndim != rank:
        raise ValueError(
            f"{where}: x is {list(x.shape)}, w is {list(ws[0].shape)}: expected [n, *spatial, c] and "
            "[*window, c / groups, channels] of the same one to three spatial axes"
        )
    given = {
        "window_strides": _along(window_strides, rank - 2, "window_strides"),
        "padding": _padding(padding, rank - 2),
        "lhs_dilation": _along(1 if lhs_dilation is None else lhs_dilation, rank - 2, "lhs_dilation"),
        "rhs_dilation": _along(1 if rhs_dilation is None else rhs_dilation, rank - 2, "rhs_dilation"),
        "dimension_numbers": CHANNELS_LAST[rank] if dimension_numbers is None else dimension_numbers,
        "feature_group_count": integer(feature_group_count, "feature_group_count", where),
        "batch_group_count": integer(batch_group_count, "batch_group_count", where),
    }
    return _conv(
        x,
        tuple(ws),
        scales=scales,
        given=given,
        precision=dot_precision.canonical(precision, where),
        epilogue=epilogue,
        operands=tuple(operands),
        out_dtype=out_dtype,
        backend=backend,
        config=config,
        save=save,
    )


def _of_rows(x: Any, ws: Any, given: Any, **_: Any) -> Callable[[Any], list[Any]]:
    """Returns the division of a result over explicit mesh axes: images as those of x, channels as those of w."""
    numbers = lax.conv_dimension_numbers(x.shape, ws[0].shape, given["dimension_numbers"])
    lhs, rhs, out = numbers

    def lies(result: Any) -> list[Any]:
        found: list[Any] = [None] * result.ndim
        if result.ndim == x.ndim:
            found[out[0]], found[out[1]] = axes(x, lhs[0] - x.ndim), axes(ws[0], rhs[0] - x.ndim)
        return found

    return lies


@automatic(_of_rows, on_automatic_axes)
def _conv(
    x: jax.Array,
    ws: tuple[jax.Array, ...],
    *,
    scales: Scales,
    given: dict[str, Any],
    precision: Any,
    epilogue: Callable[..., Any] | None,
    operands: tuple[Any, ...],
    out_dtype: Any,
    backend: str,
    config: Any,
    save: str,
) -> Any:
    where, several = "conv", isinstance(out_dtype, tuple)
    x, *bs, dtype, weak = promote(x, ws, None if several else out_dtype, where, narrow=True)
    epilogue, taken, out = scales.before(epilogue, operands, x.dtype, out_dtype if several else dtype)
    try:
        avals = (jax.ShapeDtypeStruct(y.shape, x.dtype) for y in (x, bs[0]))
        found = by_lax("conv_general_dilated", given)[1].trace(*avals).jaxpr
    except Exception as error:
        raise type(error)(f"{where}: {error}") from None
    shapes = x.shape, bs[0].shape, found.out_avals[0].shape
    plan = planned(found.eqns[-1].params, *shapes, gradients=epilogue is None)
    hints = plan.hints(x, bs[0], found.out_avals[0], ("x", "w"))
    params: dict[str, Any] = {"precision": precision, "backend": backend, "hints": hints, "config": config}
    if epilogue is None:
        d = products.multiply(plan.product, *plan.operands(x, bs[0]), out_dtype=dtype, **params)
        return converted(plan.result(d), dtype, weak)
    a, *bs = plan.images(x), *map(plan.weights, bs)
    taken = jax.tree.map(unwrapped, taken)
    d = products.call(plan.product, epilogue, Factors(a, bs), taken, out_dtype=out, save=save, **params)
    return jax.tree.map(plan.result, d)


def _dequantized(x: Any, w: Any, channels_last: bool) -> tuple[Any, Any, Scales]:
    """Returns images and weights as arrays, and the scales that multiply the sums: those of channels of the result."""
    several = isinstance(w, tuple)
    ws = w if several else (w,)
    if not is_quantized((x, *ws)):
        return x, w, Scales(None, [None for _ in ws])
    arrays = [np.dtype(unwrapped(y).dtype) for y in (x, *ws) if not isinstance(y, Quantized)]
    floats = [dtype for dtype in arrays if jnp.issubdtype(dtype, jnp.inexact)]
    dtype = floats[0] if floats else wide_dtype(x.scale if isinstance(x, Quantized) else ws[0].scale)
    x = x.dequantize(dtype) if isinstance(x, Quantized) else x
    found, columns = [], []
    for y in ws:
        scale = _of_channels(y) if channels_last and isinstance(y, Quantized) else None
        columns.append(scale)
        if scale is not None:
            values = jnp.asarray(unwrapped(y.values))
            found.append(values if are_narrow(dtype, values.dtype) else values.astype(dtype))
        else:
            found.append(y.dequantize(dtype) if isinstance(y, Quantized) else y)
    return x, tuple(found) if several else found[0], Scales(None, columns)


def _of_channels(w: Quantized) -> jax.Array | None:
    """Returns the scales of the channels of the result, or the one of all, as the sums have them; None of others."""
    scale, shape = unwrapped(w.scale), np.shape(unwrapped(w.values))
    last = np.shape(scale)[-1:]
    if w.zero_point is not None or last not in ((), (1,), shape[-1:]) or np.size(scale) not in (1, shape[-1]):
        return None
    return with_rank(jnp.reshape(jnp.asarray(scale), (-1,)).astype(wide_dtype(scale)), len(shape))


def _along(given: Any, count: int, name: str) -> tuple[int, ...]:
    """Returns a positive integer for each axis, of one for all or a sequence."""
    found = given if isinstance(given, Sequence | np.ndarray) else (given,) * count
    found = tuple(integer(x, name, "conv") for x in found)
    if len(found) != count or min(found) < 1:
        raise ValueError(f"conv: {name} must be positive, an int or {count} of them, one a spatial axis, got {given}")
    return found


def _padding(given: Any, count: int) -> Any:
    """Returns padding as lax takes it."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Sequence | np.ndarray):
        return ((integer(given, "padding", "conv"),) * 2,) * count
    if len(given) != count:
        raise ValueError(f"conv: padding must be a string, an int, or {count} of ints or pairs, got {given!r}")
    return tuple(
        tuple(x) if isinstance(x, Sequence | np.ndarray) else (integer(x, "padding", "conv"),) * 2 for x in given
    )
