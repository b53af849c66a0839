"""The operation gemm: the public function and its primitive."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import _backend, _sm90
from cutjax._config import Config
from cutjax._primitive import define, match_varying, varying_axes
from cutjax._problem import LAYOUTS, Problem
from cutjax._select import Choice, choose

_FLIP = {"n": "t", "t": "n"}


def gemm(
    a: ArrayLike,
    b: ArrayLike,
    *,
    layout: str = "nn",
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Multiplies matrices: ``d[..., m, n] = sum_k a[..., m, k] * b[..., k, n]``, accumulated in float32.

    Differentiable and batchable like any JAX function. No operand is ever transposed in memory, in the backward pass
    neither; there the cotangent is first rounded to the operands' dtype, so that the same kernels serve it. (float64
    accumulates in float64, integers in at least int32.)

    Args:
      a: ``[..., m, k]``, or ``[..., k, m]`` where ``layout[0]`` is "t".
      b: ``[..., k, n]``, or ``[..., n, k]`` where ``layout[1]`` is "t". Batch axes broadcast and dtypes promote as in
        ``jnp.matmul``, but bfloat16 with float16 is refused.
      layout: "nn", "nt", "tn" or "tt".
      out_dtype: dtype of the result; the operands' by default.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      config: pins the kernel of this product. Its gradients choose their own.

    Returns:
      The product, ``[..., m, n]``.

    Raises:
      TypeError: if an operand is no array, or the dtypes have no product.
      ValueError: if shapes do not fit, or the layout or the backend is unknown.
      NotImplementedError: when compiled, if backend is "cuda" and no kernel serves the problem; lists every reason.

    Example:
      >>> import cutjax, jax.numpy as jnp
      >>> x, w = jnp.ones((2, 8, 16), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16)
      >>> cutjax.gemm(x, w, layout="nt").shape
      (2, 8, 32)
    """
    if layout not in LAYOUTS:
        raise ValueError(f"gemm: unknown layout {layout!r}, expected one of {LAYOUTS}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"gemm: config must be a cutjax.Config, got {type(config).__name__}")
    backend = _backend.resolve(backend, "gemm")
    x, y = _matrix(a, "a"), _matrix(b, "b")
    x, y, dtype = _promote(x, y, out_dtype)
    if _contracted(x, layout[0] == "n") != _contracted(y, layout[1] == "t"):
        raise ValueError(f"gemm: contracting dimensions differ: a is {x.shape}, b is {y.shape}, layout {layout!r}")
    try:
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError:
        raise ValueError(f"gemm: batch axes do not broadcast: a is {x.shape}, b is {y.shape}") from None

    x, y = match_varying(x, y)
    params = {"layout": layout, "out_dtype": dtype, "backend": backend, "config": config}
    if layout[0] == "n" and batch and math.prod(y.shape[:-2]) == 1 and not _sharded(x):
        # One matrix b for all of a: the batch axes are more rows, and so every gradient is a plain GEMM too.
        rows = lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        d = gemm_p.bind(rows, lax.reshape(y, y.shape[-2:]), **params)
        return lax.reshape(d, (*batch, x.shape[-2], d.shape[-1]))
    return gemm_p.bind(_rank(x, len(batch) + 2), _rank(y, len(batch) + 2), **params)


def _matrix(x: Any, name: str) -> jax.Array:
    """The operand as a JAX array of rank 2 or more, or an error that says what came."""
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    if isinstance(x, bool | int | float | complex | np.generic):
        raise ValueError(f"gemm: {name} must have rank 2 or more, got the scalar {x!r}")
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"gemm: {name} must be an array, got {type(x).__name__}")
    if x.ndim < 2:
        raise ValueError(f"gemm: {name} must have rank 2 or more, got shape {x.shape}; add an axis to a vector")
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        raise TypeError(f"gemm: {name} must be an array of numbers, got dtype {x.dtype}")
    if any(jax.export.is_symbolic_dim(size) for size in x.shape):
        raise NotImplementedError(
            f"gemm: {name} has a symbolic shape {x.shape}, but kernels are compiled for known sizes"
        )
    return jnp.asarray(x)


def _promote(a: jax.Array, b: jax.Array, out_dtype: DTypeLike | None) -> tuple[jax.Array, jax.Array, np.dtype]:
    """The operands in the dtype ``jnp.matmul`` would promote them to, and the result's dtype."""
    if {a.dtype, b.dtype} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        raise TypeError(f"gemm: a is {a.dtype}, b is {b.dtype}: no 16-bit dtype holds both, cast one of them")
    operand = jnp.result_type(a, b)
    if out_dtype is None:
        if a.dtype == b.dtype:
            return a, b, operand  # as they are: weak types stay weak
        return a.astype(operand), b.astype(operand), operand
    out = jax.dtypes.canonicalize_dtype(out_dtype)
    kinds = (jnp.complexfloating, jnp.floating, jnp.integer)
    rank_out, rank_in = (
        next((i for i, kind in enumerate(kinds) if jnp.issubdtype(t, kind)), 3) for t in (out, operand)
    )
    if rank_out > rank_in:
        raise TypeError(f"gemm: a product of {operand} has no meaning as out_dtype {out}")
    return lax.convert_element_type(a, operand), lax.convert_element_type(b, operand), out


def _contracted(x: Any, last: bool) -> int:
    return x.shape[-1 if last else -2]


def _rank(x: jax.Array, rank: int) -> jax.Array:
    """The array with axes of size 1 in front, up to a rank."""
    return x if x.ndim == rank else lax.expand_dims(x, range(rank - x.ndim))


def _sharded(x: jax.Array) -> bool:
    """Whether a batch axis or the rows lie on a mesh axis, under explicit sharding: merging them would move data."""
    return any(axes is not None for axes in jax.typeof(x).sharding.spec[:-1])


# The primitive: a and b of equal rank, batch axes equal or 1. Everything below works on that form.


def _abstract(a: Any, b: Any, *, layout: str, out_dtype: np.dtype, backend: str, config: Config | None) -> Any:
    if varying_axes(a) != varying_axes(b):
        raise ValueError(f"gemm: operands vary over different mesh axes: {a.str_short()}, {b.str_short()}")
    problem = Problem.of(a, b, layout=layout, out_dtype=out_dtype)
    # From an operand's aval, not a new one: it carries the mesh axes it varies over inside shard_map.
    return a.update(
        shape=(*problem.batch, problem.m, problem.n),
        dtype=out_dtype,
        weak_type=a.weak_type and b.weak_type,
        sharding=a.sharding.update(spec=jax.P(*_out_spec(a, b, layout))),
    )


def _out_spec(a: Any, b: Any, layout: str) -> list[Any]:
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


def _accumulator(dtype: np.dtype, out_dtype: np.dtype, on_cuda: bool) -> np.dtype | None:
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        # On CUDA, XLA's GEMMs accumulate 16-bit floats in f32 anyway, and a conversion would make another fusion. They have
        # no kernel for a result in the other 16-bit dtype.
        return out_dtype if on_cuda and out_dtype in (dtype, np.dtype(np.float32)) else np.dtype(np.float32)
    if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4:
        return np.dtype(np.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint32)
    return None


def _reference(a: jax.Array, b: jax.Array, *, layout: str, out_dtype: np.dtype, on_cuda: bool, **_: Any) -> jax.Array:
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
        spec = _out_spec(aval, jax.typeof(b), layout)
        sharding = aval.sharding.update(spec=jax.P(*(spec[order.index(i)] for i in range(len(order)))))
    d = lax.dot_general(
        lax.squeeze(a, b_only),
        lax.squeeze(b, a_only),
        (
            ([a_axes.index("k")], [b_axes.index("k")]),
            ([a_axes.index(i) for i in both], [b_axes.index(i) for i in both]),
        ),
        preferred_element_type=_accumulator(a.dtype, out_dtype, on_cuda),
        out_sharding=sharding,
    )
    return lax.transpose(d, order).astype(out_dtype)


def _choose(a: Any, b: Any, *, layout: str, out_dtype: np.dtype, config: Config | None, arch: str, **_: Any) -> Choice:
    return choose(Problem.of(a, b, layout=layout, out_dtype=out_dtype, arch=arch), config)


def _batch(args: Any, dims: Any, *, layout: str, **params: Any) -> tuple[jax.Array, int]:
    a, b = args
    i, j = dims
    if j is None and a.ndim == 3 and layout[0] == "n" and i < 2 and not _sharded(a):
        # One matrix b for all of a: the batch is more rows, wherever among the rows it lies.
        d = gemm_p.bind(lax.reshape(a, (a.shape[0] * a.shape[1], a.shape[2])), b, layout=layout, **params)
        return lax.reshape(d, (*a.shape[:2], d.shape[-1])), i
    # A batch axis where one operand has it already, so that only an axis among the matrix's own must move.
    at = next((dim for dim, x in ((i, a), (j, b)) if dim is not None and dim < x.ndim - 2), 0)
    a, b = (lax.expand_dims(x, [at]) if dim is None else jnp.moveaxis(x, dim, at) for x, dim in ((a, i), (b, j)))
    return gemm_p.bind(a, b, layout=layout, **params), at


def _cotangent(g: jax.Array, x: jax.Array, to: Any, swap: bool, *, layout: str, backend: str) -> jax.Array:
    """The cotangent of the operand with aval ``to`` from that of the result and the other operand ``x``."""
    axes = [i for i in range(g.ndim - 2) if to.shape[i] == 1 != g.shape[i]]
    # Partial sums of a 16-bit gradient are added in f32, and rounded once.
    wide = bool(axes) and jnp.issubdtype(to.dtype, jnp.floating) and to.dtype.itemsize < 4
    g = g.astype(x.dtype)
    d = gemm_p.bind(
        *((x, g) if swap else (g, x)),
        layout=layout,
        out_dtype=np.dtype(np.float32) if wide else to.dtype,
        backend=backend,
        config=None,  # a pinned kernel is for the product it was pinned to
    )
    return d.sum(axes, keepdims=True).astype(to.dtype) if axes else d


def _transpose_a(g: jax.Array, a: Any, b: jax.Array, *, layout: str, backend: str, **_: Any) -> jax.Array:
    if layout[0] == "n":  # [m, k] = g [m, n] @ b [n, k]
        return _cotangent(g, b, a.aval, False, layout="n" + _FLIP[layout[1]], backend=backend)
    return _cotangent(g, b, a.aval, True, layout=layout[1] + "t", backend=backend)  # [k, m] = b [k, n] @ g [n, m]


def _transpose_b(g: jax.Array, a: jax.Array, b: Any, *, layout: str, backend: str, **_: Any) -> jax.Array:
    if layout[1] == "n":  # [k, n] = a [k, m] @ g [m, n]
        return _cotangent(g, a, b.aval, True, layout=_FLIP[layout[0]] + "n", backend=backend)
    return _cotangent(g, a, b.aval, False, layout="t" + layout[0], backend=backend)  # [n, k] = g [n, m] @ a [m, k]


gemm_p = define(
    "cutjax_gemm",
    abstract=_abstract,
    reference=_reference,
    choose=_choose,
    launch=_sm90.launch,
    batch=_batch,
    bilinear=(_transpose_a, _transpose_b),
)
