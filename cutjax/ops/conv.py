"""The operation conv: its arguments, checked, and the product that they become; lax's convolutions are its drop-ins."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes
from cutjax.binding.rules import any_reduced
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.kernels.families import AnyConfig
from cutjax.ops.arguments import check_config, check_epilogue, integer, promote, weights
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import converted
from cutjax.primitives.arrays import is_array_like, matrix, unwrapped
from cutjax.primitives.convolution import Convolution
from cutjax.primitives.factors import Factors
from cutjax.primitives.hints import Hints
from cutjax.runtime import backends

CHANNELS_LAST = {3: ("NWC", "WIO", "NWC"), 4: ("NHWC", "HWIO", "NHWC"), 5: ("NDHWC", "DHWIO", "NDHWC")}


class Plan(NamedTuple):
    """A convolution of lax's as a product.

    Attributes:
      product: the product, of groups of the batch as of channels.
      lhs, rhs, out: the axes of each array in the product's order.
      batches: groups of the batch.
      sizes: of the result in the product's order.
    """

    product: Convolution
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    batches: int
    sizes: tuple[int, ...]

    def images(self, x: jax.Array) -> jax.Array:
        """Returns the images with channels last, the groups of a batch beside each other among the channels."""
        x = lax.transpose(x, self.lhs)
        if self.batches == 1:
            return x
        n, *image, c = x.shape
        x = jnp.moveaxis(x.reshape(self.batches, n // self.batches, *image, c), 0, -2)
        return x.reshape(n // self.batches, *image, self.batches * c)

    def weights(self, w: jax.Array) -> jax.Array:
        """Returns the weights, ``[*window, channels / groups, n]``."""
        return lax.transpose(w, self.rhs)

    def result(self, d: jax.Array) -> jax.Array:
        """Returns a result of full size with its axes as lax's."""
        if d.shape != self.sizes:
            return d
        return lax.transpose(d, np.argsort(self.out))

    def copies(self, x: Any, w: Any, out: Any, names: tuple[str, str]) -> tuple[str, str, str]:
        """Returns the notes for explain of arrays that are transposed around the product."""
        found = []
        for name, array, order in zip((*names, "the result"), (x, w, out), (self.lhs, self.rhs, self.out), strict=True):
            moving = [axis for axis in order if array.shape[axis] != 1]
            size = math.prod(array.shape) * array.dtype.itemsize
            found.append("" if moving == sorted(moving) else f"{name} is transposed, of {size} bytes")
        if self.batches > 1:
            found[0] = f"{names[0]} is transposed for groups of its batch"
        return found[0], found[1], found[2]


def conv(
    x: ArrayLike,
    w: ArrayLike | tuple[ArrayLike, ...],
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
        tuple of two or three of equal shape and dtype; the epilogue then takes as many accumulators.
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
    try:
        avals = (jax.ShapeDtypeStruct(y.shape, x.dtype) for y in (x, bs[0]))
        found = _by_lax("conv_general_dilated", given)[1].trace(*avals).jaxpr
    except Exception as error:
        raise type(error)(f"{where}: {error}") from None
    plan = planned(found.eqns[-1].params, x.shape, bs[0].shape, found.out_avals[0].shape)
    hints = Hints(plan.copies(x, bs[0], found.out_avals[0], ("x", "w")))
    params: dict[str, Any] = {"precision": precision, "backend": backend, "hints": hints, "config": config}
    a, *bs = plan.images(x), *map(plan.weights, bs)
    if epilogue is None:
        d = products.multiply(plan.product, a, bs[0], out_dtype=dtype, **params)
        return converted(plan.result(d), dtype, weak)
    operands, out = jax.tree.map(unwrapped, operands), out_dtype if several else dtype
    d = products.call(plan.product, epilogue, Factors(a, bs), operands, out_dtype=out, save=save, **params)
    return jax.tree.map(plan.result, d)


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


def planned(params: Any, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int], flipped: bool = False) -> Plan:
    """Returns the product of one of lax's equations, told its parameters and the shapes of its arrays.

    Args:
      params: the parameters.
      lhs, rhs, out: the shapes.
      flipped: whether the equation is of the weights with taps flipped and axes "I" and "O" in each other's place.
    """
    numbers, batches = params["dimension_numbers"], params["batch_group_count"]
    n, c, *image = numbers.lhs_spec
    o, i, *window = numbers.rhs_spec
    of_images, of_weights = (n, *image, c), (*window, i, o)
    n, c, *grid = numbers.out_spec
    order = (n, *grid, c)
    product = Convolution(
        "transposed" if flipped else "forward",
        tuple(lhs[axis] for axis in image),
        tuple(rhs[axis] for axis in window),
        tuple(params["window_strides"]),
        tuple(params["rhs_dilation"]),
        tuple(params["lhs_dilation"]),
        tuple(map(tuple, params["padding"])),
        params["feature_group_count"] * batches,
    )
    return Plan(product, of_images, of_weights, order, batches, tuple(out[axis] for axis in order))


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
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
      lhs: images.
      rhs: weights.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers: as ``jax.lax.conv_general_dilated``.
      feature_group_count, batch_group_count, precision, preferred_element_type, out_sharding: as there.

    Returns:
      The array that ``jax.lax.conv_general_dilated`` returns.

    Raises:
      TypeError, ValueError: as ``jax.lax.conv_general_dilated``.
      NotImplementedError: where the backend is "cuda" and ``jax.lax.conv_general_dilated`` would run; and when
        compiled, as ``cutjax.conv``.

    Example:
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
      strides, padding, rhs_dilation, dimension_numbers, transpose_kernel: as ``jax.lax.conv_transpose``.
      precision, preferred_element_type, use_consistent_padding: as there.

    Returns:
      The array that ``jax.lax.conv_transpose`` returns.

    Raises:
      TypeError, ValueError: as ``jax.lax.conv_transpose``.
      NotImplementedError: as ``cutjax.conv_general_dilated``.

    Example:
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
    of_lax, traced = _by_lax(where, given)
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
    plan = planned(params, lhs.shape, rhs.shape, out.shape, flipped)
    d = products.multiply(
        plan.product,
        plan.images(lhs),
        plan.weights(rhs),
        out_dtype=out.dtype,
        precision=dot_precision.canonical(params["precision"], where),
        backend=backend,
        hints=Hints(plan.copies(lhs, rhs, out, ("lhs", "rhs"))),
    )
    return converted(plan.result(d), out.dtype, out.weak_type)


def _by_lax(name: str, given: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
    """Returns lax's function with arguments, and the same one jitted; the same objects for the same."""
    arguments = tuple(sorted((key, _as_tuples(value)) for key, value in given.items()))
    try:
        return _kept(name, arguments, repr(arguments))
    except TypeError:  # not hashable, so nothing that lax takes
        return _kept.__wrapped__(name, arguments, "")


@functools.lru_cache(maxsize=4096)
def _kept(name: str, arguments: tuple[tuple[str, Any], ...], shown: str) -> tuple[Callable[..., Any], Any]:
    """Returns the same objects for the same arguments, ``shown`` too, since 1, 1.0 and True are equal."""
    function = functools.partial(getattr(lax, name), **dict(arguments))
    return function, jax.jit(function)


def _as_tuples(value: Any) -> Any:
    """Returns sequences as tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) or type(value) is tuple else value


def _left_to_lax(lhs: jax.Array, rhs: jax.Array, params: Any, out: Any) -> str:
    """Returns the reason against a kernel whatever the sizes; "" where there is none."""
    if not 3 <= lhs.ndim <= 5:
        return f"images have one to three axes, got {lhs.ndim - 2}"
    batch, _, *image = params["dimension_numbers"].lhs_spec
    known = (*(size for axis, size in enumerate(lhs.shape) if axis != batch or params["batch_group_count"] > 1),)
    if any(map(jax.export.is_symbolic_dim, (*known, *rhs.shape))):
        return f"it needs known sizes but that of the batch, got {lhs.shape}, {rhs.shape}"
    if min(*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"]) < 1:
        return "steps must be positive"
    if any_reduced(lhs, rhs, out):
        return "operands and results that are reduced, or not yet, over mesh axes are jax.lax's"
    if any(jax.typeof(lhs).sharding.spec[axis] is not None for axis in image):
        return "images that are divided over explicit mesh axes are jax.lax's"
    return ""
