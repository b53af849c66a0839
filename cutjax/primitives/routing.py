"""Rows sorted by expert: a routing, its arrays, and the primitives that move rows there and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.typing import ArrayLike

from cutjax.binding.define import define
from cutjax.binding.explicit import automatic, axes, batched
from cutjax.binding.lowering import Target
from cutjax.binding.rules import is_zero, match_varying, on_mesh, zero_tangent
from cutjax.kernels import gather
from cutjax.kernels.device import device_of
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.arrays import matrix
from cutjax.runtime import backends
from cutjax.runtime.choice import Choice

ROUTING = "cutjax_routing"  # the name jax.checkpoint policies see


class Routing(NamedTuple):
    """The experts of each token, and the (token, expert) pairs sorted by expert: what ``cutjax.route`` returns.

    A pair's index is ``token * k + choice``. Sorted, the pairs of one expert are neighbours, in the order of their
    tokens: they are the rows of one group of a grouped product.

    Attributes:
      indices: int32 ``[..., tokens, k]``, the experts of each token, the best first.
      weights: float32 ``[..., tokens, k]``, the weight of each in the token's result.
      permutation: int32 ``[..., tokens * k]``, for each row the pair it belongs to.
      inverse: int32 ``[..., tokens, k]``, for each pair its row.
      group_sizes: int32 ``[..., experts]``, the number of rows of each expert.

    Raises:
      TypeError, ValueError: by its methods, if what they are given is no array, or has other rows.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> routing = cutjax.route(jnp.array([[0.0, 1.0], [3.0, 2.0], [1.0, 5.0]]), k=1)
      >>> routing.group_sizes.tolist()
      [1, 2]
      >>> rows = routing.dispatch(jnp.array([[10.0], [11.0], [12.0]]))
      >>> rows.ravel().tolist()
      [11.0, 10.0, 12.0]
      >>> routing.combine(rows * routing.row_weights()).ravel().tolist()
      [10.0, 11.0, 12.0]
    """

    indices: jax.Array
    weights: jax.Array
    permutation: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array

    @automatic(lambda x, **_: lambda out: [*[None] * (out.ndim - 1), axes(x, -1)])
    def dispatch(self, x: ArrayLike) -> jax.Array:
        """Returns each token's row for each of its experts, by expert: ``[..., tokens, d] -> [..., tokens * k, d]``.

        A gather, whose transpose is ``combine``. On Hopper there is a kernel for rows of whole 16 bytes, which
        ``cutjax.use_backend("cuda")`` chooses; all else is XLA's.

        Raises:
          TypeError: if x is no array.
          ValueError: if x has no row for each token.
        """
        return _bind(dispatch_p, matrix(x, "x", "dispatch"), self.permutation, self.inverse, self.inverse.shape[:-1])

    @automatic(lambda rows, **_: lambda out: [*[None] * (out.ndim - 1), axes(rows, -1)])
    def combine(self, rows: ArrayLike) -> jax.Array:
        """Computes the sum of the rows of each token: ``[..., tokens * k, d] -> [..., tokens, d]``.

        A gather and a sum in float32 in the order of the choices, rounded once: deterministic. Its transpose is
        ``dispatch``.

        Raises:
          TypeError: if rows are no array.
          ValueError: if there is no row for each pair.
        """
        return _bind(combine_p, matrix(rows, "rows", "combine"), self.permutation, self.inverse, self.permutation.shape)

    @automatic(lambda **_: lambda out: [None] * out.ndim)
    def row_weights(self) -> jax.Array:
        """Returns the weight of each row, ``[..., tokens * k, 1]``."""
        pairs = self.permutation.shape
        # Merged first: jax.vmap over a divided axis has no rule for a reshape that does both.
        weights, inverse = (x.reshape(pairs)[..., None] for x in (self.weights, self.inverse))
        return _bind(dispatch_p, weights, self.permutation, inverse, pairs)


def sorted_by(expert: jax.Array, experts: int, weights: jax.Array) -> Routing:
    """Returns the routing of rows of which each has one expert, and its weight ``[rows, 1]``.

    Rows whose expert is ``experts`` have none: they come last, and are of no group.
    """
    indices = expert[:, None]
    permutation, inverse, sizes = sorted_pairs(indices, experts)
    return Routing(indices, weights, *(checkpoint_name(x, ROUTING) for x in (permutation, inverse, sizes)))


def sorted_pairs(indices: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the permutation, the inverse and the group sizes of pairs."""
    pairs = indices.reshape(*indices.shape[:-2], -1)
    # To shard_map an argsort does not vary over the mesh axes its argument varies over, which it does.
    permutation = match_varying(jnp.argsort(pairs, stable=True).astype(jnp.int32), pairs)[0]
    inverse = jnp.vectorize(inverse_of, signature="(r)->(r)")(permutation).reshape(indices.shape)
    return permutation, inverse, histogram(pairs, experts)


def is_expert(indices: jax.Array, experts: int) -> jax.Array:
    """True if an index is that of an expert, for each and each, ``[..., experts]``."""
    return indices[..., None] == lax.broadcasted_iota(
        indices.dtype, (*(1 for _ in indices.shape), experts), indices.ndim
    )


def inverse_of(permutation: jax.Array) -> jax.Array:
    """Computes the inverse by a scatter, but of integers, each to a place of its own."""
    places = jnp.arange(permutation.size, dtype=permutation.dtype)
    return jnp.zeros_like(permutation).at[permutation].set(places, unique_indices=True, mode="promise_in_bounds")


def histogram(pairs: jax.Array, experts: int) -> jax.Array:
    """Counts the pairs of each expert: comparisons and a sum, in one kernel and with no scatter."""
    return is_expert(pairs, experts).sum(-2, dtype=jnp.int32)


def to_slots(x: jax.Array, pairs: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns rows ``[slots, d]`` of tokens' pairs, some of which have no slot, and zeros in slots of no pair.

    ``pairs [slots]`` and ``slots [tokens, k]`` are each other's inverses, past the end where there is none.
    """
    return dispatch_p.bind(*match_varying(x, pairs, slots), fill=True, backend=backends.resolve(None, "dispatch"))


def from_slots(rows: jax.Array, pairs: jax.Array, slots: jax.Array) -> jax.Array:
    """Computes the sum of each token's rows: the transpose of ``to_slots``."""
    return combine_p.bind(*match_varying(rows, pairs, slots), fill=True, backend=backends.resolve(None, "combine"))


def dispatched(x: jax.Array, permutation: jax.Array, inverse: jax.Array, backend: str) -> jax.Array:
    """Returns the row of each pair: ``Routing.dispatch`` of arrays of equal rank."""
    return dispatch_p.bind(*match_varying(x, permutation, inverse), fill=False, backend=backend)


def combined(rows: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
    """Computes the sum of each token's rows: ``Routing.combine`` of arrays of equal rank."""
    backend = backends.resolve(None, "combine")
    return combine_p.bind(*match_varying(rows, permutation, inverse), fill=False, backend=backend)


# Dispatch and combine: linear in their rows, and each the transpose of the other. JAX's own transpose of a gather is a
# scatter-add, which on a GPU adds with float atomics, in any order. Operands: rows, permutation [*B, rows], inverse
# [*B, tokens, k], of equal rank and with batch axes equal or 1. With fill, an index past the end means zeros. Dispatch
# has a kernel, and combine the backend for the dispatch that is its transpose.


def _bind(primitive: Primitive, x: jax.Array, permutation: jax.Array, inverse: jax.Array, rows: tuple[int, ...]) -> Any:
    if x.shape[:-1] != rows:
        name = "dispatch" if primitive is dispatch_p else "combine"
        raise ValueError(f"{name}: the routing is for rows [{', '.join(map(str, rows))}, d], got {x.shape}")
    backend = backends.resolve(None, primitive.name)
    return primitive.bind(*match_varying(x, permutation, inverse), fill=False, backend=backend)


def _in_batches(x: jax.Array, indices: jax.Array, **_: Any) -> Callable[[Any], list[Any]]:
    return lambda out: [*(axes(x, i) or axes(indices, i + 1) for i in range(-out.ndim, -2)), None, axes(x, -1)]


@automatic(_in_batches)
def _gather(x: jax.Array, indices: jax.Array, fill: bool) -> jax.Array:
    how: dict[str, Any] = {"mode": "fill", "fill_value": 0} if fill else {"mode": "promise_in_bounds"}
    return jnp.take_along_axis(x, indices[..., None], -2, **how)


def _dispatch(x: jax.Array, permutation: jax.Array, inverse: jax.Array, *, fill: bool, **_: Any) -> jax.Array:
    return _gather(x, permutation // inverse.shape[-1], fill)


def _combine(rows: jax.Array, permutation: jax.Array, inverse: jax.Array, *, fill: bool, **_: Any) -> jax.Array:
    wide = accumulator(rows.dtype)
    # A term for each choice and not a reduction: elementwise, so that XLA fuses the gathers and the sum into one loop.
    terms = [_gather(rows, inverse[..., i], fill).astype(wide) for i in range(inverse.shape[-1])]
    return functools.reduce(lax.add, terms).astype(rows.dtype)


def _choose(
    x: Any, permutation: Any, inverse: Any, *, backend: str, target: Target, **_: Any
) -> Choice[gather.Problem, gather.Kernel]:
    return gather.choose(gather.Problem.of(x, permutation, inverse, device_of(target)), backend)


def _define(
    name: str, apply: Callable[..., jax.Array], transposed: Callable[[], Primitive], choose: Any = None
) -> Primitive:
    def abstract(x: Any, permutation: Any, inverse: Any, **_: Any) -> Any:
        batch = lax.broadcast_shapes(x.shape[:-2], permutation.shape[:-1])
        rows = (permutation.shape if apply is _dispatch else inverse.shape[:-1])[-1]
        spec = batched(2, x.sharding.spec[:-2], permutation.sharding.spec[:-1])
        sharding = on_mesh(x, permutation).update(spec=spec)
        return x.update(shape=(*batch, rows, x.shape[-1]), weak_type=False, sharding=sharding)

    def batch(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
        moved = [
            lax.expand_dims(x, [0]) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(args, dims, strict=True)
        ]
        return primitive.bind(*moved, **params), 0

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, Any]:
        out, dot = primitive.bind(*primals, **params), tangents[0]
        return out, zero_tangent(out) if is_zero(dot) else primitive.bind(dot, *primals[1:], **params)

    def transpose(g: Any, x: Any, permutation: jax.Array, inverse: jax.Array, **params: Any) -> list[Any]:
        if is_zero(g):
            return [None] * 3
        d = transposed().bind(g, permutation, inverse, **params)
        shared = [i for i in range(d.ndim - 2) if x.aval.shape[i] == 1 != d.shape[i]]
        if shared:  # rows shared by several routings
            d = d.astype(accumulator(d.dtype)).sum(shared, keepdims=True).astype(d.dtype)
        return [d, None, None]

    primitive = define(
        name,
        abstract=abstract,
        reference=apply,
        batch=batch,
        choose=choose,
        required=False,
        jvp=jvp,
        transpose=transpose,
    )
    return primitive


dispatch_p = _define("cutjax_dispatch", _dispatch, lambda: combine_p, _choose)
combine_p = _define("cutjax_combine", _combine, lambda: dispatch_p)
