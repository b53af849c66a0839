"""The operation linear_cross_entropy: a model's last product and its loss, whose logits are never in memory whole."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes
from cutjax.binding.rules import match_varying
from cutjax.ops.arguments import check_rows, check_shapes, promote, result_dtype, to_int32
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.cross_entropy import token_losses, weighted_loss
from cutjax.primitives.vocabulary import Head
from cutjax.runtime import backends

REDUCTIONS = ("mean", "sum", "none")
_WHERE = "linear_cross_entropy"


def _as_tokens(x: Any, **_: Any) -> Any:
    return lambda out: [axes(x, i - out.ndim - 1) for i in range(out.ndim)]


@automatic(_as_tokens)
def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    layout: str = "nn",
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    axis_name: str | None = None,
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
) -> jax.Array:
    """The cross-entropy of the logits ``x @ w + bias``, which are never in memory whole: the head of a language model.

    The loss of a token with the logits l and the label y is ``logsumexp(l) - l[y]``, in float32, as
    ``optax.softmax_cross_entropy_with_integer_labels`` computes it of float32 logits. What a pass over the logits would
    do runs in the products' epilogues, chunk by chunk of the tokens. The gradients of a mean or a sum are made in the
    forward pass, by three products in all; those of "none", of float16, of float64 and of smoothed labels multiply the
    logits again.

    Args:
      x: ``[..., tokens, d]``.
      w: ``[d, vocabulary]``, or ``[vocabulary, d]`` in the layout "nt", such as an embedding. Dtypes promote as in
        ``cutjax.gemm``.
      labels: integers ``[..., tokens]``. As in optax, those from ``-vocabulary`` to -1 count from the end, and any
        other outside of the vocabulary makes its loss NaN: leave padding out by ``where``.
      layout: "nn" or "nt".
      bias: ``[vocabulary]``.
      where: booleans that broadcast against labels: the tokens that count. Of others, x and labels may be anything.
      label_smoothing: the share of the label that is spread over the vocabulary, as by ``optax.smooth_labels``.
      z_loss: the coefficient of ``logsumexp(l) ** 2``, added to each token's loss.
      softcap: a bound c on logits, which are then ``c * tanh(l / c)``.
      reduction: "mean" over the tokens that count, "sum", or "none".
      axis_name: in ``jax.shard_map``, the mesh axis over which the vocabulary is divided: w and bias are this device's
        part, in order; labels count over the whole. Tokens that are divided need no name: their losses are added up
        by ``jax.lax.psum`` of a "sum".
      out_dtype: of the result; float32 by default, float64 of float64.
      precision: of all products, as in ``cutjax.gemm``.
      backend: "cuda" for kernels, "xla", or "auto", which takes the faster for each product. See
        ``cutjax.use_backend``, which sets the default.

    Returns:
      The loss: a scalar, or ``[..., tokens]`` of the reduction "none", zeros where tokens do not count.

    Raises:
      TypeError: if an operand is no array, x and w no floating-point numbers or labels no integers.
      ValueError: if shapes do not fit, or an option is unknown.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w, labels = jnp.ones((2, 8, 16)), jnp.zeros((16, 32)), jnp.zeros((2, 8), jnp.int32)
      >>> loss, gradients = jax.value_and_grad(cutjax.linear_cross_entropy, (0, 1))(x, w, labels)
      >>> bool(jnp.isclose(loss, jnp.log(32)))
      True
    """
    if layout not in ("nn", "nt"):
        raise ValueError(f"{_WHERE}: unknown layout {layout!r}, expected 'nn' or 'nt'")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{_WHERE}: unknown reduction {reduction!r}, expected one of {REDUCTIONS}")
    backend = backends.resolve(backend, _WHERE)
    a, v, dtype, _ = promote(matrix(x, "x", _WHERE), [matrix(w, "w", _WHERE)], None, _WHERE)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(
            f"{_WHERE}: x and w must be floating-point numbers of 16 bits or more, got a product of {dtype}"
        )
    if v.ndim != 2:
        raise ValueError(f"{_WHERE}: w must have rank 2, got shape {v.shape}; use jax.vmap for several")
    check_shapes(a, v, layout, _WHERE, ("x", "w"))
    head = Head(
        layout=layout,
        label_smoothing=_number(label_smoothing, "label_smoothing", 0, 1),
        z_loss=_number(z_loss, "z_loss", 0),
        softcap=None if softcap is None else _number(softcap, "softcap", above=0),
        axis_name=axis_name,
        precision=dot_precision.canonical(precision, _WHERE),
        backend=backend,
    )
    tokens = a.shape[:-1]
    wide = accumulator(dtype)
    out = wide if out_dtype is None else result_dtype(out_dtype, _WHERE)
    if not jnp.issubdtype(out, jnp.floating):
        raise TypeError(f"{_WHERE}: a loss has no meaning as out_dtype {out}")
    size = head.size(v)
    if head.vocabulary(v) == 0:
        raise ValueError(f"{_WHERE}: w is {v.shape}: expected a vocabulary of 1 or more")
    check_rows(size, _WHERE, "columns of the logits")
    y = _labels(labels, tokens, size)
    b = [] if bias is None else [_bias(bias, head.vocabulary(v), axis_name)]
    counted = None if where is None else _counted(where, tokens)
    if counted is not None:  # what does not count may be NaN: it is selected away, before the product and after it
        a, y = jnp.where(counted[..., None], a, 0), jnp.where(counted, y, 0)
    flat = a.reshape(math.prod(tokens), a.shape[-1])
    flat, v, b, y, _ = match_varying(flat, v, b, y.reshape(-1), [] if axis_name is None else lax.axis_index(axis_name))
    if reduction == "none" or not head.keeps(dtype):
        losses = token_losses(flat, v, *b, y, head=head).reshape(tokens)
        losses = losses if counted is None else jnp.where(counted, losses, 0)
        if reduction == "none":
            return losses.astype(out)
        total = losses.sum()
        return (total if reduction == "sum" else total / _count(counted, tokens, wide)).astype(out)
    count = _count(counted, tokens, wide) if reduction == "mean" else jnp.ones((), wide)
    weights = jnp.where(jnp.ones(tokens, bool) if counted is None else counted, 1 / count, 0)
    loss = weighted_loss(flat, v, *b, y, weights.reshape(math.prod(tokens)), head=head)
    return (loss + 0 / count).astype(out)  # the mean of no token is NaN, as jnp.mean's, and its gradients are zeros


def _count(counted: jax.Array | None, tokens: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Returns the number of tokens that count."""
    return jnp.asarray(math.prod(tokens), dtype) if counted is None else counted.sum(dtype=dtype)


def _number(x: Any, name: str, least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> float:
    """Returns an option that is a number; raises an error that says what came."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise TypeError(f"{_WHERE}: {name} must be a number, got {type(x).__name__}")
    if not (least <= x <= most and above < x < math.inf):
        expected = f"above {above}" if above > -math.inf else f"at least {least}"
        raise ValueError(
            f"{_WHERE}: {name} must be {expected}{f', at most {most}' if most < math.inf else ''}, got {x}"
        )
    return float(x)


def _array(x: Any, name: str, what: str) -> jax.Array:
    x = unwrapped(x)
    if not isinstance(x, jax.Array | np.ndarray | np.bool_ | bool):
        raise TypeError(f"{_WHERE}: {name} must be an array of {what}, got {type(x).__name__}")
    return jnp.asarray(x)


def _labels(labels: Any, tokens: tuple[int, ...], size: int) -> jax.Array:
    """Returns the labels as int32, those that count from the end as from the beginning, and -1 for what is no label."""
    y = _array(labels, "labels", "integers")
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise TypeError(f"{_WHERE}: labels must be integers, got {y.dtype}{list(y.shape)}")
    if y.shape != tokens:
        raise ValueError(f"{_WHERE}: labels must be {tokens}, one for each token of x, got {y.shape}")
    y = to_int32(y)
    return jnp.where((y >= -size) & (y < size), jnp.where(y < 0, y + size, y), -1)


def _bias(bias: Any, size: int, axis_name: str | None) -> jax.Array:
    """Returns the bias as one row."""
    b = _array(bias, "bias", "numbers")
    if b.shape != (size,):
        part = "" if axis_name is None else f" on this device of the axis {axis_name!r}"
        raise ValueError(f"{_WHERE}: bias must be {(size,)}, one for each column of the logits{part}, got {b.shape}")
    if not jnp.issubdtype(b.dtype, jnp.floating):
        raise TypeError(f"{_WHERE}: bias must be floating-point numbers, got {b.dtype}")
    return b[None]


def _counted(where: Any, tokens: tuple[int, ...]) -> jax.Array:
    mask = _array(where, "where", "booleans")
    if mask.dtype != bool:
        raise TypeError(f"{_WHERE}: where must be booleans, got {mask.dtype}{list(mask.shape)}")
    try:
        return jnp.broadcast_to(mask, tokens)
    except ValueError:
        raise ValueError(f"{_WHERE}: where is {mask.shape}, which does not broadcast against {tokens}") from None
