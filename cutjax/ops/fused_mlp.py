"""The operation fused_mlp: a network of small layers, as one kernel, forward, backward, and for any derivative."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic, axes
from cutjax.dot_precision import Canonical
from cutjax.epilogue.captured import on_automatic_axes
from cutjax.kernels.network.program import Affine, Builder, Kind, Map, NotElementwise, Program, Term, elementwise
from cutjax.ops.arguments import elementwise_of, promote
from cutjax.ops.gemm import gemm
from cutjax.primitives import network
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.runtime import backends

Function = Callable[[jax.Array], jax.Array]
_WHERE = "fused_mlp"
_DTYPES = ("bfloat16", "float16", "float32")


def fused_mlp(
    x: ArrayLike,
    weights: Sequence[ArrayLike] | jax.Array,
    biases: Sequence[ArrayLike | None] | jax.Array | None = None,
    activation: Function = jax.nn.relu,
    *,
    output_activation: Function | None = None,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
) -> jax.Array:
    """A network of small layers: ``h = activation(h @ w + b)`` of each but the last, and ``h @ w + b`` of that.

    Experimental: its kernels have been timed on an H200 alone.

    The layers are one kernel: weights stay in shared memory, and what lies between layers in registers, where a row of
    x and of the result is all that plain layers would have to move. So are derivatives of any order: a gradient makes
    the layers again, and sums those of weights over its rows; ``jax.jvp``, and the Laplacian of a network that solves
    a differential equation, propagate tangents beside the values.

    Sums are in float32. What lies between layers is rounded to the dtype of the weights where it is multiplied.
    Differentiable in both modes and any number of times, and batchable, over x, over weights (ensembles) and both.

    Args:
      x: ``[..., d_in]``: any number of axes of rows, or none.
      weights: one ``[d_i, d_i+1]`` for each layer, in one dtype, or one array ``[layers, d, d]``. Kernels are of widths
        16 to 256 that are multiples of 16, between layers; of others products run as in ``cutjax.gemm``.
      biases: ``[d_i+1]`` for each layer, or None for it; or None.
      activation: an elementwise function written in JAX, of float32.
      output_activation: that of the last layer; None leaves it as it is.
      precision: of all products, as in ``cutjax.gemm``.
      backend: "cuda" for kernels, "xla", or "auto", which takes them for bfloat16 of 64 columns or fewer. See
        ``cutjax.use_backend``, which sets the default.

    Returns:
      ``[..., d_out]`` in the promoted dtype of x and the weights.

    Raises:
      TypeError: if an operand is no array, or x and weights are no floating-point numbers of 16 bits or more.
      ValueError: if shapes do not fit.
      NotImplementedError: if an activation is no elementwise function.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> weights = [jnp.ones((3, 64)), jnp.ones((64, 64)), jnp.ones((64, 1))]
      >>> cutjax.fused_mlp(jnp.ones((10, 3)), weights, None, jnp.tanh).shape
      (10, 1)
    """
    ws, bs = _layers(weights, biases)
    a = _array(x, "x")
    if not a.ndim:
        raise ValueError(f"{_WHERE}: x must have rank 1 or more, got a scalar")
    widths = [a.shape[-1], *(w.shape[1] for w in ws)]
    for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
        if w.shape[0] != widths[i]:
            of = "x" if i == 0 else f"weights[{i - 1}]"
            came = a.shape if i == 0 else ws[i - 1].shape
            raise ValueError(f"{_WHERE}: weights[{i}] is {w.shape}, expected {widths[i]} rows, as {of} is {came}")
        if b is not None and b.shape != w.shape[1:]:
            raise ValueError(
                f"{_WHERE}: biases[{i}] is {b.shape}, expected {w.shape[1:]}, as weights[{i}] is {w.shape}"
            )
    for name, function in (("activation", activation), ("output_activation", output_activation)):
        if not callable(function) and (name == "activation" or function is not None):
            raise TypeError(f"{_WHERE}: {name} must be a function, got {type(function).__name__}")
    a, *ws, dtype, _ = promote(a, ws, None, _WHERE)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(
            f"{_WHERE}: x and weights must be floating-point numbers of 16 bits or more, got products of {dtype}"
        )
    how: dict[str, Any] = {
        "precision": dot_precision.canonical(precision, _WHERE),
        "backend": backends.resolve(backend, _WHERE),
    }
    return _network(a, ws, bs, activation=activation, output_activation=output_activation, **how)


def _as_rows(x: jax.Array, **_: Any) -> Callable[[Any], list[Any]]:
    return lambda result: [*(axes(x, i - result.ndim) for i in range(result.ndim - 1)), None]


@automatic(_as_rows, on_automatic_axes)
def _network(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    *,
    activation: Function,
    output_activation: Function | None,
    precision: Canonical,
    backend: str,
) -> jax.Array:
    dtype = x.dtype
    between = _checked(activation, "activation")
    last = None if output_activation is None else _checked(output_activation, "output_activation")
    program = _program([w.shape for w in weights], [b is not None for b in biases], between, last)
    if program is None or dtype.name not in _DTYPES:
        return _composed(x, weights, biases, between, last, precision=precision, backend=backend)
    rows = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
    given = [y[None] for y in (*weights, *(b for b in biases if b is not None))]
    params: dict[str, Any] = {"dtypes": [dtype], "dtype": dtype, "precision": precision, "backend": backend}
    (y,) = network.bind(program, rows, *given, **params)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _program(
    shapes: Sequence[tuple[int, ...]], biased: Sequence[bool], activation: Function, last: Function | None
) -> Program | None:
    """Returns the program of the layers; None where an activation is of captured arrays, or more than a kernel has."""
    try:
        functions = [elementwise(lambda x, f=f: [f(x)], 1)[0] if f else None for f in (activation, last)]
    except (NotElementwise, TypeError, ValueError):  # one that captures an array may be of its width alone
        return None
    kinds = [Kind("matrix", shape) for shape in shapes]
    of_biases = [Kind("vector", shape[1:]) for shape, has in zip(shapes, biased, strict=True) if has]
    b = Builder([Kind("rows", shapes[0][:1]), *kinds, *of_biases])
    vectors = iter(range(1 + len(shapes), 1 + len(shapes) + len(of_biases)))
    value = 0
    for i, has in enumerate(biased):
        (value,) = b.add(Affine((Term(value, 1 + i),), (next(vectors),) if has else ()))
        function = functions[i == len(shapes) - 1]
        if function is not None:
            (value,) = b.add(Map(function, (value,)))
    return b.build([value])


def _composed(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    activation: Function,
    last: Function | None,
    **how: Any,
) -> jax.Array:
    """Computes the layers one by one, of what no program is made of."""
    h = x[None] if x.ndim == 1 else x
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        function = last if i == len(weights) - 1 else activation

        def finished(acc: jax.Array, *bias: jax.Array, function: Function | None = function) -> jax.Array:
            acc = functools.reduce(lambda acc, one: acc + one.astype(acc.dtype), bias, acc)
            return acc if function is None else function(acc)

        h = gemm(h, w, epilogue=finished, operands=() if b is None else (b,), out_dtype=x.dtype, **how)
    return h[0] if x.ndim == 1 else h


def _checked(function: Function, name: str) -> Function:
    """Returns an activation; where it returns anything but an array of its argument's shape it raises."""

    @functools.wraps(function)
    def call(x: jax.Array) -> jax.Array:
        return elementwise_of(x, function(x), x.dtype, _WHERE, name).astype(x.dtype)

    return call


def _layers(weights: Any, biases: Any) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Returns the weights and the bias of each layer."""
    if isinstance(weights := unwrapped(weights), jax.Array | np.ndarray):
        if weights.ndim != 3:
            expected = "[layers, d, d], or a sequence of [d_i, d_i+1]"
            raise ValueError(f"{_WHERE}: weights is one array {weights.shape}: expected {expected}")
        weights = list(weights)
    if not isinstance(weights, list | tuple):
        raise TypeError(f"{_WHERE}: weights must be a sequence of arrays, got {type(weights).__name__}")
    if not weights:
        raise ValueError(f"{_WHERE}: weights is empty: expected one matrix for each layer")
    ws = [matrix(w, f"weights[{i}]", _WHERE) for i, w in enumerate(weights)]
    for i, w in enumerate(ws):
        if w.ndim != 2:
            raise ValueError(f"{_WHERE}: weights[{i}] is {w.shape}: expected [d_i, d_i+1]; use jax.vmap for ensembles")
        if w.dtype != ws[0].dtype:
            raise TypeError(f"{_WHERE}: weights are in one dtype: weights[0] is {ws[0].dtype}, weights[{i}] {w.dtype}")
    if biases is None:
        return ws, [None] * len(ws)
    if isinstance(biases := unwrapped(biases), jax.Array | np.ndarray):
        biases = list(biases) if biases.ndim == 2 else [biases]
    if not isinstance(biases, list | tuple) or len(biases) != len(ws):
        came = f"{len(biases)}" if isinstance(biases, list | tuple) else type(biases).__name__
        raise ValueError(f"{_WHERE}: biases must be as many as weights, {len(ws)}, got {came}")
    bs = [None if b is None else _array(b, f"biases[{i}]") for i, b in enumerate(biases)]
    for i, b in enumerate(bs):
        if b is not None and not (jnp.issubdtype(b.dtype, jnp.number) and jnp.isrealobj(b)) and b.dtype != bool:
            raise TypeError(f"{_WHERE}: biases[{i}] must be real numbers, got {b.dtype}")
    return ws, bs


def _array(x: Any, name: str) -> jax.Array:
    x = unwrapped(x)
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{_WHERE}: {name} must be an array, got {type(x).__name__}")
    return jnp.asarray(x)
