"""The operation conv: its arguments, checked, and the product that they become."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes
from cutjax.dtypes import NARROW, are_narrow, holds, promoted
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.kernels.families import AnyConfig
from cutjax.kernels.prepared import along
from cutjax.ops.arguments import check_config, check_epilogue, integer, promote, weights
from cutjax.ops.convolution_plan import by_lax, planned, unknown_sizes
from cutjax.ops.quantized import Quantized, Weights, as_quantized, blocked, is_quantized, values_of
from cutjax.ops.scales import Scales, may_wrap, wide_dtype
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import accumulator, converted
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.factors import Factors
from cutjax.primitives.tracing import casting, with_result_dtype
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
        tuple of two or three of equal shape and dtype; the epilogue then takes as many accumulators. Either operand
        may be `cutjax.Quantized`. Its scales multiply the sums where they are one for each image of x, or for each of
        w's channels, or one for all; an operand with others is dequantized before, to the dtype of the other, or to
        float32 where both are quantized.
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

    Examples:
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
    x, w = as_quantized(x), as_quantized(w)
    images, ws = matrix(values_of(x), "x", where), weights(values_of(w), "w", where)
    rank = images.ndim
    if rank not in CHANNELS_LAST or ws[0].ndim != rank:
        raise ValueError(
            f"{where}: x is {list(images.shape)}, w is {list(ws[0].shape)}: expected [n, *spatial, c] and "
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
    if is_quantized((x, w)):
        images, ws, scales, of_values = _factors(x, w if isinstance(w, tuple) else (w,), images, ws, given)
        out_dtype = of_values if out_dtype is None else out_dtype
    else:
        scales = Scales(None, [None for _ in ws])
    return _conv(
        images,
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
    if reason := unknown_sizes(found.eqns[-1].params, x, bs[0]):
        if backend == "cuda":
            raise NotImplementedError(f"{where}: backend 'cuda' has no kernel: {reason}")
        given = given | {"dimension_numbers": found.eqns[-1].params["dimension_numbers"], "precision": precision}
        d = _of_unknown_sizes(x, bs, given, epilogue, taken, out)
        return d if epilogue is not None else converted(d, dtype, weak)
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


def _of_unknown_sizes(
    x: jax.Array,
    ws: Sequence[jax.Array],
    given: dict[str, Any],
    epilogue: Callable[..., Any] | None,
    operands: Sequence[Any],
    out_dtype: Any,
) -> Any:
    """Computes by lax's function and plain JAX what no kernel is compiled for."""
    wide = accumulator(x.dtype, None if isinstance(out_dtype, tuple) else out_dtype)
    dtype = x.dtype if epilogue is None and out_dtype == x.dtype else wide  # lax has no derivative of two dtypes
    sums = [lax.conv_general_dilated(x.astype(dtype), w.astype(dtype), **given) for w in ws]
    if epilogue is None:
        return sums[0]
    n, c, *spatial = given["dimension_numbers"].out_spec
    order = n, *spatial, c
    accs = [lax.transpose(d, order) for d in sums]
    fn = casting("conv", epilogue, out_dtype) if isinstance(out_dtype, tuple) else epilogue
    results = with_result_dtype(fn(*accs, *operands), accs[0], out_dtype)
    return jax.tree.map(lambda d: lax.transpose(d, np.argsort(order)) if d.shape == accs[0].shape else d, results)


def _factors(
    x: Any, w: Sequence[Any], images: jax.Array, ws: Sequence[jax.Array], given: dict[str, Any]
) -> tuple[jax.Array, list[jax.Array], Scales, np.dtype]:
    """Returns images and weights as arrays, the scales that multiply the sums, and the result's dtype by default.

    The scales are those of images and of channels of the result, or one for all. Operands with others are dequantized:
    to the dtype of the arrays of floats, or to float32 where there are none.

    Args:
      x: as it was given.
      w: the same of each matrix.
      images: the values of x.
      ws: those of each w.
      given: the arguments of lax's function.
    """
    try:
        lhs, rhs, _ = lax.conv_dimension_numbers(images.shape, ws[0].shape, given["dimension_numbers"])
    except Exception as error:
        raise type(error)(f"conv: {error}") from None
    operands = [*zip((x, *w), (images, *ws), (lhs[0], *(rhs[0] for _ in w)), strict=True)]
    scales = [_of_axis(y, axis, values) if isinstance(y, Quantized) else None for y, values, axis in operands]
    if scales[0] is not None and scales[0].size > 1 and given["batch_group_count"] > 1:
        scales[0] = None  # an image of the result is of several of x
    quantized = [isinstance(y, Quantized) for y, *_ in operands]
    dtypes = [values.dtype for _, values, _ in operands]
    floats = [t for t, q in zip(dtypes, quantized, strict=True) if not q and jnp.issubdtype(t, jnp.inexact)]
    dtype = out = floats[0] if floats else np.dtype(np.float32)
    if not floats:
        out = functools.reduce(promoted, (wide_dtype(y.scale) for y, *_ in operands if isinstance(y, Quantized)))
        left = any(q and scale is None for q, scale in zip(quantized, scales, strict=True))
        dtype = dtype if left else _of_values(dtypes, ws[0].size // ws[0].shape[rhs[0]])
    found = []
    for i, (y, values, _) in enumerate(operands):
        if isinstance(y, Quantized) and (scales[i] is None or not holds(dtype, values.dtype)):
            values, scales[i] = y.dequantize(dtype), None
        found.append(values if floats and not quantized[i] else values.astype(dtype))
    if all(q and scale is not None for q, scale in zip(quantized[1:], scales[1:], strict=True)):
        found[1:] = [y if are_narrow(dtype, y.dtype) else z for y, z in zip(ws, found[1:], strict=True)]
    ones = (1,) * (images.ndim - 1)
    row, *columns = (x if x is None else x.reshape(1, *ones[1:], -1) for x in scales)
    return found[0], found[1:], Scales(row if row is None else row.reshape(-1, *ones), columns), out


def _of_values(dtypes: Sequence[np.dtype], k: int) -> np.dtype:
    """Returns the dtype in which values are multiplied, k of them, whose scales all multiply the sums."""
    if any(dtype.name not in NARROW for dtype in dtypes):
        return np.dtype(np.float32)
    found = {np.dtype(np.int8) if dtype.name == "int4" else dtype for dtype in dtypes}
    if len(found) == 1 and dtypes[0].name in ("int8", "uint8", "int4"):
        (dtype,) = found
        if not may_wrap(dtype, dtype, k):
            return dtype
    return np.dtype(jnp.bfloat16)  # which holds every value of 8 bits


def _of_axis(q: Quantized, axis: int, values: jax.Array) -> jax.Array | None:
    """Returns the scales, one for each place of an axis or one for all, of rank 1; None of an operand with others."""
    scale, zero = blocked(q, "an operand", "conv")
    if zero or any(count != 1 for i, count in enumerate(scale.shape) if i != axis):
        return None
    counts = [values.shape[axis] if i == axis and count > 1 else count for i, count in enumerate(scale.shape)]
    return jnp.reshape(along(scale, counts), (-1,)).astype(wide_dtype(scale))


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
