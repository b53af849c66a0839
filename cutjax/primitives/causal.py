"""A causal convolution of each channel by itself with an activation, whose gradients are one pass over memory.

The result is a product's. Its tangent is one linear operation, made of products too; that transposes to one operation
which has a kernel of its own, and is products where that does not serve.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from cutjax.binding.define import define
from cutjax.binding.lowering import Target
from cutjax.binding.partition import Rules, mark_of
from cutjax.binding.placement import Placement, Rule
from cutjax.binding.rules import batch_axis, is_linear, is_zero, match_varying, with_rank
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import ACC, Epilogue
from cutjax.epilogue.trace import trace
from cutjax.kernels.device import device_of
from cutjax.kernels.direct import causal
from cutjax.primitives import derivative
from cutjax.primitives import product as products
from cutjax.primitives.convolution import Convolution
from cutjax.primitives.factors import Factors
from cutjax.runtime.choice import Choice


@dataclasses.dataclass(frozen=True)
class Causal:
    """The parameters of a convolution of x ``[images, length, channels]`` by w ``[width, channels]``, and of a bias.

    Attributes:
      activation: an elementwise function of the sums, without operands.
      dtype: of the result.
      precision, backend: as conv's.
      config: pins the kernel of the result.
    """

    activation: Epilogue
    dtype: np.dtype
    precision: Canonical
    backend: str
    config: Any = None

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitives."""
        names = "activation", "dtype", "precision", "backend"
        return {name: getattr(self, name) for name in names}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def convolved(of: Causal, x: jax.Array, w: jax.Array, bias: list[jax.Array]) -> jax.Array:
    """Returns the activation of the convolution plus a bias, a list of one or none; of what came before x is zero."""
    return _forward(x, w, *bias, config=of.config, **of.params)


def _convolved_jvp(of: Causal, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, w, bias = primals
    dots = [tangents[0], tangents[1], *tangents[2]]
    moving = tuple(not isinstance(dot, SymbolicZero) for dot in dots)
    y = convolved(of, x, w, bias)
    if not any(moving):
        return y, jnp.zeros_like(y)
    values = match_varying(x, w, *bias, *(dot for dot, moves in zip(dots, moving, strict=True) if moves))
    return y, _bind_tangent(*values, moving=moving, **of.params)


convolved.defjvp(_convolved_jvp, symbolic_zeros=True)


def _forward(
    x: jax.Array,
    w: jax.Array,
    *bias: jax.Array,
    activation: Epilogue,
    dtype: np.dtype,
    precision: Canonical,
    backend: str,
    config: Any = None,
) -> jax.Array:
    _, length, channels = x.shape
    width, one = w.shape[0], (1,)
    product = Convolution("forward", (length,), (width,), one, one, one, ((width - 1, 0),), channels)

    def finished(acc: jax.Array, *bias: jax.Array) -> jax.Array:
        for b in bias:
            acc = acc + with_rank(b.astype(acc.dtype), acc.ndim)
        return activation.apply([acc])[0]

    params: dict[str, Any] = {"precision": precision, "backend": backend, "config": config, "save": "recompute"}
    return products.call(product, finished, Factors(x, [w[:, None]]), bias, out_dtype=dtype, **params)


def _along(fn: Callable[..., Any], args: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """Returns a function of those of its arguments alone that are at some places."""

    def along(*moved: Any) -> Any:
        new = dict(zip(places, moved, strict=True))
        return fn(*(new.get(i, x) for i, x in enumerate(args)))

    return along


# The tangent of the result: x, w, the bias, and the tangents of those that are ``moving``.


def _bind_tangent(*values: jax.Array, **params: Any) -> jax.Array:
    return tangent_p.bind(*values, **params, mark=mark_of(params["backend"]))


def _tangent(*values: jax.Array, moving: tuple[bool, ...], **params: Any) -> jax.Array:
    primals, dots = values[: len(moving)], values[len(moving) :]
    places = [i for i, moves in enumerate(moving) if moves]
    along = _along(functools.partial(_forward, **params), primals, places)
    return jax.jvp(along, tuple(primals[i] for i in places), dots)[1]


def _tangent_aval(x: Any, *_: Any, dtype: np.dtype, **__: Any) -> Any:
    return x.update(dtype=dtype, weak_type=False)


def _tangent_transpose(g: Any, *values: Any, moving: tuple[bool, ...], **params: Any) -> list[Any]:
    found: list[Any] = [None] * len(values)
    if is_zero(g):
        return found
    primals = match_varying(*values[: len(moving)], g)
    of_moving = [d for d, moves in zip(_bind_gradients(*primals, **params), moving, strict=True) if moves]
    for i, d in enumerate(of_moving, len(moving)):
        found[i] = d if is_linear(values[i]) else None
    return found


def _tangent_batch(args: Any, dims: Any, *, moving: tuple[bool, ...], **params: Any) -> tuple[jax.Array, int]:
    """Batches as further sequences where weights are for all."""
    of_sequences = [0, len(moving)] if moving[0] else [0]
    alone = all(dim is None for i, dim in enumerate(dims) if i not in of_sequences)
    if not alone:
        return jax.vmap(functools.partial(_tangent, moving=moving, **params), dims)(*args), 0
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    merged, (images, *rest) = list(args), jax.typeof(args[0]).shape[dims[0] == 0 :]
    for i in of_sequences:
        (x,) = batch_axis([args[i]], [dims[i]], 0)
        x = jnp.broadcast_to(x, (size, *x.shape[1:]))
        merged[i], (images, *rest) = x.reshape(-1, *x.shape[2:]), x.shape[1:]
    y = _bind_tangent(*merged, moving=moving, **params)
    return y.reshape(size, images, *rest), 0


def _tangent_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, jax.Array]:
    return _composed_jvp(_bind_tangent, _tangent, primals, tangents, params)


def _composed_jvp(
    bind: Callable[..., Any], composed: Callable[..., Any], primals: Any, tangents: Any, params: Any
) -> Any:
    """Returns results and tangents, those of the operation as it is composed of products."""
    places = [i for i, dot in enumerate(tangents) if not is_zero(dot)]
    along = _along(functools.partial(composed, **params), primals, places)
    _, dots = jax.jvp(along, tuple(primals[i] for i in places), tuple(tangents[i] for i in places))
    return bind(*primals, **params), dots


tangent_p = define(
    "cutjax_causal_tangent",
    abstract=_tangent_aval,
    reference=_tangent,
    batch=_tangent_batch,
    jvp=_tangent_jvp,
    transpose=_tangent_transpose,
)


# The gradients of x, w and the bias: of those and of the result's gradient.


def _bind_gradients(*values: jax.Array, wide: bool = False, **params: Any) -> list[jax.Array]:
    """Binds the primitive; ``wide`` gradients of w and the bias are in float32."""
    return gradients_p.bind(*values, wide=wide, **params, mark=mark_of(params["backend"]))


@functools.lru_cache(maxsize=256)
def gradient_before(activation: Epilogue, dtype: np.dtype) -> Epilogue | None:
    """Returns the gradient of what an activation is of, of that and of its result's, an operand in a dtype.

    None where the derivative is no elementwise function. It is not rounded.
    """

    def gradient(before: jax.Array, dy: jax.Array) -> jax.Array:
        y, pull = jax.vjp(lambda x: activation.apply([x])[0], before)
        return pull(dy.astype(y.dtype))[0]

    shape = (2, 2)
    try:
        traced = trace(gradient, [jax.ShapeDtypeStruct(shape, ACC)], (np.zeros(shape, dtype),))
    except NotImplementedError:
        return None
    return None if traced.outside else derivative.rounded_once(traced.epilogue, dtype)


def _gradients(
    *values: jax.Array, wide: bool, backend: str, on_cuda: bool = False, **params: Any
) -> Sequence[jax.Array]:
    *primals, g = values
    dx, *sums = jax.vjp(functools.partial(_forward, backend=backend, **params), *primals)[1](g)
    return [dx, *(d.astype(ACC) if wide else d for d in sums)]


def _gradient_avals(*avals: Any, wide: bool, **_: Any) -> list[Any]:
    x, *others = (aval.update(weak_type=False) for aval in avals[:-1])
    return [x, *(other.update(dtype=ACC) if wide else other for other in others)]


def _choose(
    *avals: Any,
    activation: Epilogue,
    dtype: np.dtype,
    wide: bool,
    target: Target,
    **_: Any,
) -> Choice[causal.Gradients, causal.Kernel]:
    x, w, *bias, g = avals
    gradient = gradient_before(activation, dtype)
    sums = tuple(ACC if wide else aval.dtype for aval in (w, *bias))
    of_bias = bias[0].dtype if bias else None
    images, length, channels = x.shape
    device = device_of(target)
    problem = causal.Gradients(images, length, channels, w.shape[0], x.dtype, of_bias, sums, gradient, device)
    if {x.dtype, w.dtype} != {g.dtype}:
        return Choice(problem, (f"x in {x.dtype}, w in {w.dtype}, the gradient in {g.dtype}",))
    return causal.choose(problem)


def _gradients_batch(args: Any, dims: Any, **params: Any) -> tuple[Sequence[jax.Array], list[int]]:
    outs = jax.vmap(functools.partial(_gradients, **params), dims)(*args)
    return outs, [0] * len(outs)


def _gradients_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return _composed_jvp(_bind_gradients, _gradients, primals, tangents, params)


def _rule(*avals: Any, **_: Any) -> Rule:
    of_sequences, of_sums = ("m", None, "n"), [(None, "n"), ("n",)][: len(avals) - 2]
    return Rule((of_sequences, *of_sums, of_sequences), (of_sequences, *of_sums), len(avals), ())


def _shard(
    placement: Placement, *shards: jax.Array, avals: Any, wide: bool, mark: Any, **params: Any
) -> Sequence[jax.Array]:
    over = placement.axes.get("m", ())
    dx, *sums = _bind_gradients(*shards, wide=wide or bool(over), **params)
    if over:
        sums = [lax.psum(d, over).astype(ACC if wide else x.dtype) for d, x in zip(sums, avals[1:-1], strict=True)]
    return [dx, *sums]


gradients_p = define(
    "cutjax_causal_gradients",
    abstract=_gradient_avals,
    reference=_gradients,
    choose=_choose,
    required=False,
    batch=_gradients_batch,
    jvp=_gradients_jvp,
    divided=Rules(_rule, _shard),
    multiple_results=True,
)
