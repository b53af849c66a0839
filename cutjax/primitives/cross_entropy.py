"""Cross-entropy of logits that are a product: its losses and gradients.

The gradients of a chunk are three products. The first keeps powers of its logits (`vocabulary`), in the dtype of x.
They are what the gradient of the logits is before it is scaled by row, but at the label, where one element a row is
set. So the other two products read them as they are: that of x scales its rows in its epilogue, and that of w reads
rows of x that are scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from cutjax.binding.define import define
from cutjax.binding.partition import mark_of
from cutjax.binding.rules import is_linear, is_zero, match_varying, none_if_zero
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.dense import FLIP, Dense
from cutjax.primitives.vocabulary import LOG2_E, Head, Rows, in_chunks, known, picked_at, rows_with_shift

LEAST = 2.0**-24  # of a factor of probabilities that are added up in float32
Mapped = tuple[tuple[int | None, ...], ...]  # of each vmap, the innermost first: whether it maps the first axis of each


def _differentiable(
    name: str, fn: Callable[..., Any], abstract: Callable[..., Any], rule: Callable[..., Any], several: bool = False
) -> Callable[..., Any]:
    """Returns a function of arrays and parameters, the head among them, with a derivative of its own.

    It is a primitive: what JAX knows of custom_jvp alone it forgets where it divides a scan into parts. Over a mesh
    axis by name it is not, since the axis has a name only where the function is traced.

    Args:
      name: the primitive's.
      fn: ``(*arrays, **parameters) -> array(s)``.
      abstract: ``(*avals, **parameters) -> aval(s)``.
      rule: ``(primals, tangents, **parameters) -> array(s), tangent(s)``, told None for tangents that are zero.
      several: whether the results are a list.
    """

    def reference(*values: jax.Array, mapped: Mapped, **params: Any) -> Any:
        return _mapped(functools.partial(fn, **params), mapped)(*values)

    def batch(args: Any, dims: Any, mapped: Mapped, **params: Any) -> Any:
        args = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]
        mapped = (*mapped, tuple(None if dim is None else 0 for dim in dims))
        out = primitive.bind(*args, mapped=mapped, **params, mark=mark_of(params["head"].backend))
        return (out, [0] * len(out)) if several else (out, 0)

    def jvp(primals: Any, tangents: Any, mapped: Mapped, **params: Any) -> Any:
        places = [i for i, dot in enumerate(tangents) if not is_zero(dot)]

        def of_one(*args: Any) -> Any:
            dots = dict(zip(places, args[len(primals) :], strict=True))
            return rule(args[: len(primals)], [dots.get(i) for i in range(len(primals))], **params)

        mapped = tuple((*dims, *(dims[i] for i in places)) for dims in mapped)
        return _mapped(of_one, mapped)(*primals, *(tangents[i] for i in places))

    def of_avals(*avals: Any, mapped: Mapped, **params: Any) -> Any:
        sizes = []
        for dims in reversed(mapped):
            sizes += {x.shape[0] for x, dim in zip(avals, dims, strict=True) if dim is not None}
            avals = tuple(x if dim is None else _with_shape(x, x.shape[1:]) for x, dim in zip(avals, dims, strict=True))
        out = abstract(*avals, **params)
        return jax.tree.map(lambda x: _with_shape(x, (*sizes, *x.shape)), out)

    primitive = define(name, abstract=of_avals, reference=reference, batch=batch, jvp=jvp, multiple_results=several)

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def over_axis(params: tuple[tuple[str, Any], ...], *values: jax.Array) -> Any:
        return fn(*values, **dict(params))

    def over_axis_jvp(params: tuple[tuple[str, Any], ...], primals: Any, tangents: Any) -> Any:
        return rule(primals, [None if isinstance(dot, SymbolicZero) else dot for dot in tangents], **dict(params))

    over_axis.defjvp(over_axis_jvp, symbolic_zeros=True)

    def call(*values: jax.Array, **params: Any) -> Any:
        if params["head"].axis_name is not None:
            return over_axis(tuple(params.items()), *values)
        return primitive.bind(*values, mapped=(), **params, mark=mark_of(params["head"].backend))

    return call


def _mapped(fn: Callable[..., Any], mapped: Mapped) -> Callable[..., Any]:
    """Returns a function of arrays with the axes that are mapped, those of the last first."""
    return functools.reduce(jax.vmap, mapped, fn)


def _with_shape(x: Any, shape: Sequence[int]) -> Any:
    """Returns an aval with another shape, of axes that are not divided."""
    return x.update(shape=tuple(shape), sharding=x.sharding.update(spec=jax.P(*[None] * len(shape))))


# The losses of rows, and their derivative in plain JAX on products. Arrays are x, w, the bias or none, and labels.


def _losses(*values: jax.Array, head: Head) -> jax.Array:
    x, w, *b, labels = values

    def step(_: None, chunk: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        shift, rows = rows_with_shift(head, chunk[0], w, b, chunk[1], keep=False)
        return None, head.loss(rows.lse(shift), rows.picked, rows.total, head.size(w))

    return in_chunks(step, head, w, x.dtype.itemsize, x, labels)[1]


def _losses_abstract(x: Any, *rest: Any, head: Head) -> Any:
    return rest[-1].update(dtype=accumulator(x.dtype), weak_type=False)


def _losses_jvp(primals: Any, tangents: Any, head: Head) -> tuple[jax.Array, jax.Array]:
    *given, labels = primals
    dots = tangents[:-1]
    if head.axis_name is not None or not head.keeps(given[0].dtype):
        return _along(lambda x, w, *b: _recomputed(head, x, w, b, labels), given, dots)
    present, moved = tuple(dot is not None for dot in dots), [dot for dot in dots if dot is not None]
    tangent = dot_p.bind(*primals, *moved, head=head, present=present, mark=mark_of(head.backend))
    return token_losses(*primals, head=head), tangent


token_losses = _differentiable("cutjax_token_losses", _losses, _losses_abstract, _losses_jvp)
"""Returns the loss of each row of x; labels outside of the vocabulary give NaN."""


def _recomputed(head: Head, x: jax.Array, w: jax.Array, b: Sequence[jax.Array], labels: jax.Array) -> jax.Array:
    """Returns the losses by logits in memory, which a derivative makes again chunk by chunk."""
    wide = accumulator(x.dtype)

    @jax.checkpoint
    def losses(x: jax.Array, w: jax.Array, b: list[jax.Array], labels: jax.Array) -> jax.Array:
        acc = products.multiply(
            Dense(head.layout), x, w, out_dtype=wide, precision=head.precision, backend=head.backend
        )
        logits = head.logits(acc, b)
        most = head.over(lax.pmax, lax.stop_gradient(logits).max(1))
        most = jnp.where(jnp.isfinite(most), most, 0)
        lse = most + jnp.log(head.over(lax.psum, jnp.exp(logits - most[:, None]).sum(1)))
        at, _ = head.local(labels, w)
        picked = head.over(lax.psum, picked_at(logits, at[:, None]))
        total = head.over(lax.psum, logits.sum(1)) if head.label_smoothing else None
        return head.loss(lse, known(head, picked, labels, w), total, head.size(w))

    def step(_: None, chunk: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        return None, losses(chunk[0], w, list(b), chunk[1])

    return in_chunks(step, head, w, wide.itemsize, x, labels)[1]


def _along(fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the results of a function and their tangents, along those of its arguments that are not None."""
    moved = [i for i, dot in enumerate(tangents) if dot is not None]

    def along(*values: jax.Array) -> Any:
        given: dict[int, Any] = dict(zip(moved, values, strict=True))
        return fn(*(given.get(i, x) for i, x in enumerate(primals)))

    return jax.jvp(along, tuple(primals[i] for i in moved), tuple(tangents[i] for i in moved))


# The tangent of the losses, along those of x, w and the bias that are ``present``: linear, and its transpose is the
# three products of `gradients`.


def _dot(*values: jax.Array, head: Head, present: tuple[bool, ...]) -> jax.Array:
    n = len(present)
    moved = [i for i, given in enumerate(present) if given]

    def along(*moving: jax.Array) -> jax.Array:
        given: dict[int, Any] = dict(zip(moved, moving, strict=True))
        x, w, *b = (given.get(i, v) for i, v in enumerate(values[:n]))
        return _recomputed(head, x, w, b, values[n])

    return jax.jvp(along, tuple(values[i] for i in moved), values[n + 1 :])[1]


def _dot_abstract(x: Any, *rest: Any, head: Head, present: tuple[bool, ...]) -> Any:
    return rest[len(present) - 1].update(dtype=accumulator(x.dtype), weak_type=False)


def _dot_batch(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    return jax.vmap(functools.partial(_dot, **params), dims)(*args), 0


def _dot_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, jax.Array]:
    return _along(functools.partial(_dot, **params), primals, none_if_zero(tangents))


def _dot_transpose(g: Any, *values: Any, head: Head, present: tuple[bool, ...]) -> list[Any]:
    n = len(present)
    if is_zero(g):
        return [None] * len(values)
    linear = iter([is_linear(dot) for dot in values[n + 1 :]])
    wanted = tuple(given and next(linear) for given in present)
    found = iter(gradients(*values[: n + 1], g, head=head, wanted=wanted)[1:])
    return [None] * (n + 1) + [next(found) if is_linear(dot) else None for dot in values[n + 1 :]]


dot_p = define(
    "cutjax_token_losses_dot",
    abstract=_dot_abstract,
    reference=_dot,
    batch=_dot_batch,
    jvp=_dot_jvp,
    transpose=_dot_transpose,
)


# A weighted sum of losses, whose gradients are made beside it, by three products in all.


def _weighted_loss(*values: jax.Array, head: Head) -> jax.Array:
    *given, weights = values
    return _weighted(token_losses(*given, head=head), weights)


def _weighted(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the weighted sum of losses, of which those without a weight may be infinite or NaN."""
    return jnp.where(weights == 0, 0, weights * losses).sum()


def _weighted_loss_abstract(x: Any, *rest: Any, head: Head) -> Any:
    return _with_shape(rest[-2].update(dtype=accumulator(x.dtype), weak_type=False), ())


def _weighted_loss_jvp(primals: Any, tangents: Any, head: Head) -> tuple[jax.Array, jax.Array]:
    dots = tangents[:-2]
    losses, *found = gradients(*primals, head=head, wanted=tuple(dot is not None for dot in dots))
    moved = [dot for dot in dots if dot is not None]
    terms = [(g.astype(losses.dtype) * dot.astype(losses.dtype)).sum() for g, dot in zip(found, moved, strict=True)]
    total = _weighted(losses, primals[-1])
    return total, head.over(lax.psum, sum(terms)) if terms else jnp.zeros_like(total)


weighted_loss = _differentiable("cutjax_weighted_loss", _weighted_loss, _weighted_loss_abstract, _weighted_loss_jvp)
"""Returns the sum of the rows' losses, each times a weight, the last array, which has no derivative."""


def _gradients(*values: jax.Array, head: Head, wanted: tuple[bool, ...]) -> list[jax.Array]:
    x, w, *b, labels, weights = values

    def step(sums: Any, chunk: Sequence[jax.Array]) -> tuple[Any, Any]:
        x, labels, weights = chunk
        shift, rows = rows_with_shift(head, x, w, b, labels, keep=True)
        lse = rows.lse(shift)
        scale = _scale(head, lse, rows.sums)
        kept = _at_labels(head, w, labels, rows, shift, scale)
        scale = (weights * scale)[:, None]
        of_x = _of_x(head, kept, w, scale) if wanted[0] else None
        loss = head.loss(lse, rows.picked, rows.total, head.size(w))
        return _sums(head, wanted, sums, kept, x, b, scale), (loss, of_x)

    sums, (losses, of_x) = in_chunks(step, head, w, x.dtype.itemsize, x, labels, weights)
    found = [of_x, *sums]
    found[2:] = [g.astype(b[0].dtype) for g in found[2:] if g is not None]
    return [losses, *(g for g in found if g is not None)]


def _gradients_abstract(*avals: Any, head: Head, wanted: tuple[bool, ...]) -> list[Any]:
    losses = _losses_abstract(*avals[:-1], head=head)
    return [losses, *(x.update(weak_type=False) for x, asked in zip(avals, wanted, strict=False) if asked)]


def _gradients_jvp(primals: Any, tangents: Any, head: Head, wanted: tuple[bool, ...]) -> tuple[Any, Any]:
    *given, labels, weights = primals
    *dots, _, of_weights = tangents
    places = [i for i, asked in enumerate(wanted) if asked]

    def again(*values: jax.Array) -> list[jax.Array]:
        *given, weights = values

        def of(*moving: jax.Array) -> jax.Array:
            found: dict[int, Any] = dict(zip(places, moving, strict=True))
            x, w, *b = (found.get(i, v) for i, v in enumerate(given))
            return _recomputed(head, x, w, b, labels)

        losses, pull = jax.vjp(of, *(given[i] for i in places))
        _, weights = match_varying(losses, weights)
        return [losses, *pull(head.shared(weights))]

    return _along(again, (*given, weights), (*dots, of_weights))


gradients = _differentiable("cutjax_token_losses_gradients", _gradients, _gradients_abstract, _gradients_jvp, True)
"""Returns the rows' losses, and the gradients of their weighted sum: those ``wanted`` of x, w and b, on this device."""


def _scale(head: Head, lse: jax.Array, sums: jax.Array) -> jax.Array:
    """Returns the factor of each row's powers, never zero: labels are divided by it."""
    if not head.z_loss:
        return 1 / sums
    slope = 1 + 2 * head.z_loss * lse
    slope = jnp.where(jnp.abs(slope) < LEAST, LEAST, slope)
    return lax.optimization_barrier(slope / sums)  # one value for all that read it, where it is a small difference


def _at_labels(
    head: Head, w: jax.Array, labels: jax.Array, rows: Rows, shift: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns the powers, less the inverse of the scale at the labels: the difference is rounded, not its terms."""
    assert rows.kept is not None
    at, here = head.local(labels, w)
    value = head.slope(rows.picked) * (jnp.exp2(rows.picked * LOG2_E - shift) - 1 / scale)
    column = jnp.where(here, at, rows.kept.shape[1])  # past the end nothing is set
    where = jnp.arange(rows.kept.shape[0], dtype=jnp.int32), column
    options: dict[str, Any] = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    return rows.kept.at[where].set(value.astype(rows.kept.dtype), **options)


def _of_x(head: Head, kept: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the gradient of rows of x."""
    layout = "n" + FLIP[head.layout[1]]
    return head.backward.multiply(layout, kept, w, lambda acc, s: acc * s.astype(acc.dtype), (scale,), w.dtype)


def _sums(
    head: Head, wanted: tuple[bool, ...], sums: Any, kept: jax.Array, x: jax.Array, b: list[jax.Array], scale: jax.Array
) -> Any:
    """Returns the gradients of w and b, each None or of the rows so far."""
    of_w, of_b = (None, None) if sums is None else sums
    if wanted[1]:
        scaled = (x.astype(scale.dtype) * scale).astype(x.dtype)
        factors = (scaled, kept) if head.layout[1] == "n" else (kept, scaled)
        before, in_place = ((), ()) if of_w is None else ((of_w,), ((0, 0),))

        def added(acc: jax.Array, *before: jax.Array) -> jax.Array:
            return functools.reduce(lambda acc, to: acc + to.astype(acc.dtype), before, acc)

        of_w = head.backward.multiply("tn", *factors, added, before, x.dtype, in_place=in_place)
    if b and wanted[2]:
        new = (kept.astype(scale.dtype) * scale).sum(0, keepdims=True)
        of_b = new if of_b is None else of_b + new
    return of_w, of_b
