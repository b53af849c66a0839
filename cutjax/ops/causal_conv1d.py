"""The operations causal_conv1d and causal_conv1d_update: each channel of a sequence convolved with its own past."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes
from cutjax.binding.rules import explicit_axes, match_varying, with_rank
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.epilogue.trace import Traced, trace
from cutjax.kernels.families import AnyConfig
from cutjax.ops.arguments import check_config, check_save, elementwise_of, promote
from cutjax.ops.conv import conv
from cutjax.primitives import causal
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.tracing import abstract_accumulator
from cutjax.runtime import backends

Activation = str | Callable[[jax.Array], jax.Array] | None
_NAMED = {"silu": jax.nn.silu, "swish": jax.nn.silu}


def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    state: ArrayLike | None = None,
    activation: Activation = None,
    return_state: bool = False,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
    config: AnyConfig | None = None,
    save: str = "recompute",
) -> Any:
    """Convolves each channel of sequences with its own weights over the past, as state-space models do.

    ``y[..., t, c] = activation(sum_k w[k, c] x[..., t - (width - 1) + k, c] + bias[c])``, accumulated in float32 and
    rounded once, bias and activation in the kernel's epilogue. What is before a sequence is its state, or zero.
    Differentiable and batchable like any JAX function: the gradients of x, w and the bias are one pass over memory.
    That is ``causal_conv1d_fn`` of Mamba's package causal-conv1d (github.com/Dao-AILab/causal-conv1d), with channels
    last and the axis of the width first: any width, any activation.

    Args:
      x: sequences ``[..., length, channels]``.
      w: weights ``[width, channels]``; dtypes promote as in ``cutjax.conv``. ``w[-1]`` is that of the same time.
      bias: ``[channels]``.
      state: what is before each sequence, ``[..., width - 1, channels]``; zero by default.
      activation: None, "silu" (or "swish"), or an elementwise function written in JAX.
      return_state: whether the state after the sequences is returned too: the last width - 1 inputs.
      precision: as in ``cutjax.conv``.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      config: pins the kernel, as in ``cutjax.conv``.
      save: what the derivative keeps, see ``cutjax.conv``. By default the sums before the activation are made again:
        reading x takes no longer than reading them.

    Returns:
      ``[..., length, channels]`` in the promoted dtype of x and w, or with ``return_state`` a pair of that and the new
      state, ``[..., width - 1, channels]`` in x's dtype: that of ``causal_conv1d_update``, and of the next call.

    Raises:
      TypeError, ValueError: shapes that are none of these, or an unknown activation; as ``cutjax.conv``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> x, w, bias = jnp.ones((2, 10, 8)), jnp.ones((4, 8)), jnp.zeros(8)
      >>> y, state = cutjax.causal_conv1d(x, w, bias, activation="silu", return_state=True)
      >>> y.shape, state.shape
      ((2, 10, 8), (2, 3, 8))
    """
    where = "causal_conv1d"
    check_save(save, where)
    function, x, w = _activation(activation, where), matrix(x, "x", where), matrix(w, "w", where)
    *batch, _, channels = x.shape
    width = _width(w, channels, where, f"x is {x.shape}")
    bias = None if bias is None else _checked(bias, "bias", (channels,), where)
    state = None if state is None else _checked(state, "state", (*batch, width - 1, channels), where)
    how: dict[str, Any] = {"activation": function, "precision": precision, "backend": backend, "config": config}
    return _sequences(x, w, bias, state, return_state=return_state, save=save, **how)


def causal_conv1d_update(
    x: ArrayLike,
    state: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
) -> tuple[jax.Array, jax.Array]:
    """Takes one step of ``causal_conv1d``, as decoding does: the next result, and the state after it.

    It is elementwise JAX, which XLA compiles to what moves the state once: no kernel could be faster. That is
    ``causal_conv1d_update`` of Mamba's package, but that the new state is returned: donate the old one, and XLA
    writes it in place.

    Args:
      x: the next inputs, ``[..., channels]``.
      state: the width - 1 inputs before, ``[..., width - 1, channels]``, the last one the latest.
      w: weights ``[width, channels]``.
      bias: ``[channels]``.
      activation: as in ``causal_conv1d``.

    Returns:
      The result ``[..., channels]`` in the promoted dtype of x and w, and the new state, in the old one's dtype.

    Raises:
      TypeError, ValueError: as ``causal_conv1d``.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> state, w = jnp.zeros((2, 3, 8)), jnp.ones((4, 8))
      >>> y, state = cutjax.causal_conv1d_update(jnp.ones((2, 8)), state, w, activation="silu")
      >>> y.shape, state.shape
      ((2, 8), (2, 3, 8))
    """
    where = "causal_conv1d_update"
    function, state, w = _activation(activation, where), matrix(state, "state", where), matrix(w, "w", where)
    width = _width(w, state.shape[-1], where, f"state is {state.shape}")
    x = _checked(x, "x", (*state.shape[:-2], state.shape[-1]), where)
    bias = None if bias is None else _checked(bias, "bias", x.shape[-1:], where)
    _checked(state, "state", (*x.shape[:-1], width - 1, x.shape[-1]), where)
    _, _, dtype, _ = promote(x, [w], None, where)
    return _step(x, state, w, bias, activation=function, dtype=dtype)


def _as_sequences(x: jax.Array, **_: Any) -> Callable[[Any], list[Any]]:
    """Returns the division of a result over explicit mesh axes: as x, and a state's steps are whole."""

    def lies(result: Any) -> list[Any]:
        *batch, length, channels = (axes(x, i) for i in range(-x.ndim, 0))
        return [*batch, length if result.shape == x.shape else None, channels]

    return lies


@automatic(_as_sequences, on_automatic_axes)
def _sequences(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, state: jax.Array | None, *, return_state: bool, **how: Any
) -> Any:
    *batch, length, channels = x.shape
    width = len(w)
    if state is not None and explicit_axes(jax.sharding.get_abstract_mesh()):
        x = jax.reshard(x, jax.P())  # or the first results would lie on the mesh that is set, and the others nowhere

    def convolved(x: jax.Array, before: int) -> jax.Array:
        sequences = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        y = _convolved(sequences, w, bias, before=before, **how)
        return y.reshape(*batch, *y.shape[1:])

    y = convolved(x, width - 1)
    before = jnp.zeros((*batch, width - 1, channels), x.dtype) if state is None else state.astype(x.dtype)
    if state is not None and width > 1 and length:
        # Only the first results know the state: they are made apart, of few rows, and the others in place.
        head = jnp.concatenate([before, x[..., : width - 1, :]], -2)
        y = lax.dynamic_update_slice(y, convolved(head, 0), (0,) * y.ndim)
    if not return_state:
        return y
    if width == 1:
        return y, before
    last = jnp.concatenate([before, x[..., 1 - width :, :]], -2)  # a symbolic length is not compared with the width
    return y, last[..., 1 - width :, :]


def _as_step(x: jax.Array, **_: Any) -> Callable[[Any], list[Any]]:
    """Returns the division of a result over explicit mesh axes: as x, and a state's steps are whole."""

    def lies(result: Any) -> list[Any]:
        *batch, channels = (axes(x, i) for i in range(-x.ndim, 0))
        return [*batch, *[None] * (result.ndim - x.ndim), channels]

    return lies


@automatic(_as_step, on_automatic_axes)
def _step(
    x: jax.Array,
    state: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Callable[[jax.Array], jax.Array],
    dtype: np.dtype,
) -> tuple[jax.Array, jax.Array]:
    wide = dot_precision.accumulator(dtype, dtype)
    taps = [with_rank(tap, x.ndim) for tap in w.astype(wide)]
    acc = x.astype(wide) * taps[-1]
    for k, tap in enumerate(taps[:-1]):
        acc = acc + state[..., k, :].astype(wide) * tap
    acc = acc if bias is None else _plus(acc, bias)
    rows = acc if acc.ndim > 1 else acc[None]
    function, _ = _elementwise(activation, abstract_accumulator(wide, jax.typeof(rows)), "causal_conv1d_update")
    y = function(rows).reshape(acc.shape).astype(dtype)
    after = jnp.concatenate([state, x.astype(state.dtype)[..., None, :]], -2)[..., 1:, :]
    return y, after


def _convolved(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    before: int,
    activation: Callable[[jax.Array], jax.Array],
    precision: lax.PrecisionLike,
    backend: str | None,
    config: AnyConfig | None,
    save: str,
) -> jax.Array:
    """Convolves ``[images, length, channels]`` with so many zeros before."""
    where, channels = "causal_conv1d", x.shape[-1]
    a, b, dtype, _ = promote(x, [w], None, where)
    length = x.shape[1] + before - len(w) + 1
    acc = abstract_accumulator(a.dtype, jax.typeof(a).update(shape=(x.shape[0], length, channels)), dtype)
    function, traced = _elementwise(activation, acc, where)
    if not channels:
        return jnp.zeros(acc.shape, dtype)
    alone = not (traced.outside or traced.operands or traced.epilogue.positions)
    if alone and save == "recompute" and before == len(w) - 1 and jnp.issubdtype(dtype, jnp.floating):
        check_config(config, where)
        named = backends.resolve(backend, where)
        of = causal.Causal(traced.epilogue, dtype, dot_precision.canonical(precision, where), named, config)
        a, b, *given = match_varying(a, b, *[bias] * (bias is not None))
        return causal.convolved(of, a, b, given)
    return conv(
        x,
        w[:, None],
        padding=[(before, 0)],
        feature_group_count=channels,
        precision=precision,
        epilogue=lambda acc, *bias: function(_plus(acc, *bias)),
        operands=() if bias is None else (bias,),
        out_dtype=dtype,
        backend=backend,
        config=config,
        save=save,
    )


def _elementwise(
    activation: Callable[[jax.Array], jax.Array], acc: Any, where: str
) -> tuple[Callable[[jax.Array], jax.Array], Traced]:
    """Returns an activation, its result in the dtype of its argument, and what it was traced to; raises if it is none.

    ``acc`` is abstract.
    """

    def function(acc: jax.Array) -> jax.Array:
        y = elementwise_of(acc, activation(acc), acc.dtype, where, "activation")
        return y.astype(acc.dtype) if jnp.issubdtype(acc.dtype, jnp.floating) else y

    try:
        traced = trace(function, [acc])
    except (NotImplementedError, ValueError) as error:
        message = str(error)
        if not message.startswith("epilogue: "):
            raise
        told = message.removeprefix("epilogue: ").split("; ")[0]
        raise type(error)(f"{where}: activation is no elementwise function: {told}") from None
    if any(out.reduce for out in traced.epilogue.outputs):
        raise NotImplementedError(f"{where}: activation is no elementwise function: it reduces its argument")
    return function, traced


def _plus(acc: jax.Array, *bias: jax.Array) -> jax.Array:
    return acc + with_rank(bias[0].astype(acc.dtype), acc.ndim) if bias else acc


def _activation(activation: Activation, where: str) -> Callable[[jax.Array], jax.Array]:
    if activation is None:
        return lambda acc: acc
    if isinstance(activation, str):
        if activation not in _NAMED:
            known = ", ".join(repr(name) for name in (None, *_NAMED))
            raise ValueError(f"{where}: unknown activation {activation!r}, expected one of {known}, or a function")
        return _NAMED[activation]
    if not callable(activation):
        raise TypeError(f"{where}: activation must be a name, a function or None, got {type(activation).__name__}")
    return activation


def _width(w: jax.Array, channels: int, where: str, of_x: str) -> int:
    if w.ndim != 2 or w.shape[1] != channels or not w.shape[0]:
        raise ValueError(
            f"{where}: {of_x}, w is {w.shape}: expected weights [width, {channels}], of a width of 1 or more"
        )
    return w.shape[0]


def _checked(x: Any, name: str, shape: tuple[int, ...], where: str) -> jax.Array:
    x = unwrapped(x)
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{where}: {name} must be an array, got {type(x).__name__}")
    if x.shape != shape:
        raise ValueError(f"{where}: {name} is {x.shape}, expected {shape}")
    return jnp.asarray(x)
