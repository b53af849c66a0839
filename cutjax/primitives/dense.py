"""The product of two matrices as a primitive, gemm_p: what the public operations are made of."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax import dot_precision
from cutjax.dot_precision import Canonical
from cutjax.kernels.choose import Choice, choose
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90.config import Config
from cutjax.primitives.define import define, match_varying, varying_axes

FLIP = {"n": "t", "t": "n"}

# a and b have equal rank, batch axes equal or 1. Everything below works on that form.


def multiply(a: jax.Array, b: jax.Array, **params: Any) -> jax.Array:
    """Binds gemm_p for operands whose batch axes broadcast."""
    a, b = match_varying(a, b)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if params["layout"][0] == "n" and batch and math.prod(b.shape[:-2]) == 1 and not sharded(a):
        # One matrix b for all of a: the batch axes are more rows, and so every gradient is a plain GEMM too.
        rows = lax.reshape(a, (math.prod(a.shape[:-1]), a.shape[-1]))
        d = gemm_p.bind(rows, lax.reshape(b, b.shape[-2:]), **params)
        return lax.reshape(d, (*batch, a.shape[-2], d.shape[-1]))
    return gemm_p.bind(with_rank(a, len(batch) + 2), with_rank(b, len(batch) + 2), **params)


def with_rank(x: jax.Array, rank: int) -> jax.Array:
    """The array with axes of size 1 in front, up to a rank."""
    return x if x.ndim == rank else lax.expand_dims(x, range(rank - x.ndim))


def converted(x: jax.Array, dtype: np.dtype, weak_type: bool | None = None) -> jax.Array:
    """The array in a dtype, weak or not: as it is by default."""
    given = jax.typeof(x)  # not x's own: a cotangent may be numpy's
    weak_type = given.weak_type if weak_type is None else weak_type
    if (given.dtype, given.weak_type) == (dtype, weak_type):
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak_type, sharding=None)


def sharded(x: jax.Array) -> bool:
    """Whether a batch axis or the rows lie on a mesh axis, under explicit sharding: merging them would move data."""
    return any(axes is not None for axes in jax.typeof(x).sharding.spec[:-1])


def abstract(a: Any, b: Any, *, layout: str, out_dtype: np.dtype, **_: Any) -> Any:
    if varying_axes(a) != varying_axes(b):
        raise ValueError(f"gemm: operands vary over different mesh axes: {a.str_short()}, {b.str_short()}")
    problem = Problem.of(a, b, layout=layout, out_dtype=out_dtype)
    # From an operand's aval, not a new one: it carries the mesh axes it varies over inside shard_map.
    return a.update(
        shape=(*problem.batch, problem.m, problem.n),
        dtype=out_dtype,
        weak_type=a.weak_type and b.weak_type,
        sharding=on_mesh(a, b).update(spec=jax.P(*out_spec(a, b, layout))),
    )


def on_mesh(*avals: Any) -> Any:
    """A sharding on the mesh that any of the operands lies on."""
    return next((x.sharding for x in avals if not x.sharding.mesh.empty), avals[0].sharding)


def out_spec(a: Any, b: Any, layout: str) -> list[Any]:
    """Explicit sharding of the result: each axis as in the operand it comes from, and a sharded sum is reduced."""
    (*a_batch, m, k), (*b_batch, k_of_b, n) = a.sharding.spec, b.sharding.spec
    if layout[0] == "t":
        m, k = k, m
    if layout[1] == "t":
        k_of_b, n = n, k_of_b
    if k != k_of_b:
        raise ValueError(
            f"gemm: the contracted axes are sharded differently: a is {a.str_short()}, b is {b.str_short()}, "
            f"layout {layout!r}; jax.reshard one of them"
        )
    return [*(q if p is None else p for p, q in zip(a_batch, b_batch, strict=True)), m, n]


def accumulator(dtype: np.dtype, out_dtype: np.dtype | None = None) -> np.dtype:
    """The dtype in which products of a dtype are added up: at least 32 bits, and as wide as the result."""
    if out_dtype is not None:
        if jnp.issubdtype(out_dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
            out_dtype = np.dtype(jnp.finfo(out_dtype).dtype)
        own, out = accumulator(dtype), accumulator(out_dtype)
        if jnp.issubdtype(own, jnp.integer) and jnp.issubdtype(out, jnp.integer):
            return max(out, own, key=lambda dtype: dtype.itemsize)  # of whatever sign: sums are exact, modulo 2^bits
        with jax.numpy_dtype_promotion("standard"):
            return jnp.promote_types(own, out)
    if dtype.itemsize < 4:
        if jnp.issubdtype(dtype, jnp.floating):
            return np.dtype(np.float32)
        if jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint32)
    return dtype


def reference(
    a: jax.Array,
    b: jax.Array,
    *,
    layout: str,
    out_dtype: np.dtype,
    on_cuda: bool,
    precision: Canonical = None,
    **_: Any,
) -> jax.Array:
    """One dot_general. An axis of size 1 that broadcasts is dropped from its operand, so nothing is copied."""
    axes = range(a.ndim - 2)
    a_only = [i for i in axes if b.shape[i] == 1 != a.shape[i]]
    b_only = [i for i in axes if a.shape[i] == 1 != b.shape[i]]
    both = [i for i in axes if a.shape[i] == b.shape[i]]
    a_axes = [*(i for i in axes if i not in b_only), *("mk" if layout[0] == "n" else "km")]
    b_axes = [*(i for i in axes if i not in a_only), *("kn" if layout[1] == "n" else "nk")]
    d_axes = [
        *both,
        *(i for i in a_axes if i not in both and i != "k"),
        *(i for i in b_axes if i not in both and i != "k"),
    ]
    order = [d_axes.index(i) for i in (*axes, "m", "n")]
    sharding = None
    aval = jax.typeof(a)
    if aval.sharding.spec[-1 if layout[0] == "n" else -2] is not None:  # dot_general adds over devices only when told
        spec = out_spec(aval, jax.typeof(b), layout)
        sharding = aval.sharding.update(spec=jax.P(*(spec[order.index(i)] for i in range(len(order)))))
    preferred = accumulator(a.dtype, out_dtype)
    if on_cuda and is_half(a.dtype) and out_dtype in (a.dtype, np.dtype(np.float32)):
        # On CUDA, XLA's GEMMs accumulate 16-bit floats in f32 anyway, and a conversion would make another fusion. They
        # have no kernel for a result in the other 16-bit dtype.
        preferred = out_dtype
    elif not on_cuda or preferred != accumulator(a.dtype):
        # XLA's CPU backend lacks some products of narrow operands with a wider result, depending on layout and batch;
        # on CUDA too those are added up in the result's dtype only where the operands have it.
        a, b = a.astype(preferred), b.astype(preferred)
    d = lax.dot_general(
        lax.squeeze(a, b_only),
        lax.squeeze(b, a_only),
        (
            ([a_axes.index("k")], [b_axes.index("k")]),
            ([a_axes.index(i) for i in both], [b_axes.index(i) for i in both]),
        ),
        precision=precision or dot_precision.DEFAULT,  # of None lax would make what the scope says now
        preferred_element_type=preferred,
        out_sharding=sharding,
    )
    return lax.transpose(d, order).astype(out_dtype)


def _choose(
    a: Any,
    b: Any,
    *,
    layout: str,
    out_dtype: np.dtype,
    precision: Canonical,
    config: Config | None,
    arch: str,
    **_: Any,
) -> Choice:
    return choose(Problem.of(a, b, layout=layout, out_dtype=out_dtype, arch=arch), config, precision=precision)


def _batch(args: Any, dims: Any, *, layout: str, **params: Any) -> tuple[jax.Array, int]:
    a, b = args
    i, j = dims
    if j is None and a.ndim == 3 and layout[0] == "n" and i < 2 and not sharded(a):
        # One matrix b for all of a: the batch is more rows, wherever among the rows it lies.
        d = gemm_p.bind(lax.reshape(a, (a.shape[0] * a.shape[1], a.shape[2])), b, layout=layout, **params)
        return lax.reshape(d, (*a.shape[:2], d.shape[-1])), i
    # A batch axis where one operand has it already, so that only an axis among the matrix's own must move.
    at = next((dim for dim, x in ((i, a), (j, b)) if dim is not None and dim < x.ndim - 2), 0)
    a, b = (lax.expand_dims(x, [at]) if dim is None else jnp.moveaxis(x, dim, at) for x, dim in ((a, i), (b, j)))
    return gemm_p.bind(a, b, layout=layout, **params), at


def is_half(dtype: np.dtype) -> bool:
    """True if a dtype is a float of 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


def cotangent_dtype(dtype: np.dtype, g: np.dtype) -> np.dtype:
    """The dtype in which a cotangent in the dtype ``g`` is multiplied by an operand in ``dtype``: the operand's.

    Where that has fewer than 16 bits, too few to hold a cotangent, one that holds the values of both.
    """
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 1:
        return dtype
    return np.dtype(jnp.bfloat16 if g.itemsize == 1 or g == jnp.bfloat16 else np.float32)


def with_cotangent(g: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A cotangent and the operand it is multiplied by, in one dtype."""
    dtype = cotangent_dtype(x.dtype, g.dtype)
    if jnp.issubdtype(g.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        g = lax.real(g)  # of a real product made complex
    return converted(g, dtype), converted(x, dtype)


def _cotangent(g: jax.Array, x: jax.Array, to: Any, swap: bool, **params: Any) -> jax.Array:
    """The cotangent of the operand with aval ``to`` from that of the result and the other operand ``x``."""
    axes = [i for i in range(g.ndim - 2) if to.shape[i] == 1 != g.shape[i]]
    # Partial sums of a 16-bit gradient are added in f32, and rounded once. One narrower is of f32 that a kernel writes.
    wide = accumulator(to.dtype) if axes or to.dtype.itemsize == 1 else to.dtype
    g, x = with_cotangent(g, x)
    precision = dot_precision.of_cotangents(params["precision"], g.dtype, "gemm")
    params |= {"precision": dot_precision.swapped(precision) if swap else precision}
    params |= {"out_dtype": wide, "config": None}  # a pinned kernel is for the product it was pinned to
    d = gemm_p.bind(*((x, g) if swap else (g, x)), **params)
    d = d.sum(axes, keepdims=True) if axes else d
    return d if d.dtype == to.dtype else converted(d, to.dtype, to.weak_type)


def _transpose_a(g: jax.Array, a: Any, b: jax.Array, *, layout: str, **params: Any) -> jax.Array:
    if layout[0] == "n":  # [m, k] = g [m, n] @ b [n, k]
        return _cotangent(g, b, a.aval, False, layout="n" + FLIP[layout[1]], **params)
    return _cotangent(g, b, a.aval, True, layout=layout[1] + "t", **params)  # [k, m] = b [k, n] @ g [n, m]


def _transpose_b(g: jax.Array, a: jax.Array, b: Any, *, layout: str, **params: Any) -> jax.Array:
    if layout[1] == "n":  # [k, n] = a [k, m] @ g [m, n]
        return _cotangent(g, a, b.aval, True, layout=FLIP[layout[0]] + "n", **params)
    return _cotangent(g, a, b.aval, False, layout="t" + layout[0], **params)  # [n, k] = g [n, m] @ a [m, k]


gemm_p = define(
    "cutjax_gemm",
    abstract=abstract,
    reference=reference,
    choose=_choose,
    launch=sm90.launch,
    batch=_batch,
    bilinear=(_transpose_a, _transpose_b),
)
