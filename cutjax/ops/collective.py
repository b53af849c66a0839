"""Products that overlap with the network, in shard_map: all_gather_gemm, gemm_reduce_scatter, and mlp made of both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.rules import is_zero, match_varying
from cutjax.epilogue.expression import Epilogue, identity
from cutjax.kernels.choose import Config
from cutjax.kernels.problem import LAYOUTS
from cutjax.ops.arguments import check_config, check_epilogue, contracted, matrix, promote, result_dtype, result_of, unwrapped
from cutjax.ops.arguments import weights as weights_of
from cutjax.ops.ring import Ring, ring_of, wide
from cutjax.primitives import derivative
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.chain import HIDDEN, Chain, tangent_of_second
from cutjax.primitives.dense import Dense
from cutjax.primitives.product import abstract_accumulator, aligned, multiply, trace_with_dtype
from cutjax.runtime import backends

GATHERED = "cutjax_gathered"  # the name jax.checkpoint policies see, of the rows of other devices


def all_gather_gemm(
    x: ArrayLike,
    w: ArrayLike | tuple[ArrayLike, ...],
    *,
    axis_name: str,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    layout: str = "nn",
    out_dtype: DTypeLike | tuple[DTypeLike | None, ...] | None = None,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
    config: Config | None = None,
    save: str = "default",
    route: str = "direct",
) -> Any:
    """Multiplies the rows of all devices: ``gemm(all_gather(x), w)``, each device's rows as they arrive.

    For ``jax.shard_map``, with rows divided over a mesh axis and w's columns too: the first product of a layer under
    tensor parallelism with sequence sharding. One product runs for each device's rows, beside the transfer of the next;
    nothing waits for all of them. With an epilogue, each product has it.

    The gradient in x is a ``gemm_reduce_scatter`` of the same kind: products beside transfers. That in w is one
    product, of the rows as they were gathered, which are kept: named "cutjax_gathered" for ``jax.checkpoint`` policies.

    Args:
      x: ``[..., m, k]``, this device's rows, or ``[..., k, m]`` where ``layout[0]`` is "t".
      w: ``[..., k, n]``, this device's columns, or ``[..., n, k]``; with an epilogue also a tuple of two or three.
      axis_name: the mesh axis over which the rows are divided.
      epilogue: as in ``cutjax.gemm``, of the accumulators of all rows. It reduces along columns alone, and does not use
        positions of rows.
      operands: its further arguments. Those with rows have all, ``[devices * m, n]`` or ``[devices * m, 1]``.
      layout, out_dtype, precision, backend, save: as in ``cutjax.gemm``.
      config: pins the kernel of each product of one device's rows.
      route: how rows travel. "direct": each share to each device, for a switch such as NVSwitch. "ring": from neighbour
        to neighbour, both ways at once.

    Returns:
      ``[..., devices * m, n]``, the rows in the order of the devices, or what the epilogue returns.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``cutjax.gemm`` does; and if the axis is not one name, is not bound,
        or the epilogue depends on which row is which.

    Example:
      >>> import cutjax, functools, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> rows, columns = jax.P("model", None), jax.P(None, "model")
      >>> f = functools.partial(cutjax.all_gather_gemm, axis_name="model", epilogue=jax.nn.gelu)
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=(rows, columns), out_specs=columns)
      >>> jax.jit(f)(jnp.ones((8, 16)), jnp.ones((16, 32))).shape
      (8, 32)
    """
    where = "all_gather_gemm"
    ring = ring_of(axis_name, route, where)
    _check(layout, config, where)
    out_dtype = tuple(out_dtype) if isinstance(out_dtype, list) else out_dtype
    check_epilogue(w, epilogue, operands, out_dtype, save, where, "w")
    several = isinstance(out_dtype, tuple)
    a, *ws, dtype, _ = promote(
        matrix(x, "x", where), weights_of(w, "w", where), None if several else out_dtype, where
    )
    _check_shapes(a, ws[0], layout, where)
    a, *ws = match_varying(*aligned(Dense(layout), ring.varying(a), ws, ()))
    spec = Gathered(
        ring,
        Dense(layout),
        identity(dtype, accumulator(a.dtype, dtype)),
        dot_precision.canonical(precision, where),
        backends.resolve(backend, where),
        config,
        save,
    )
    if epilogue is None:
        return ring.assembled([out for (out,) in gathered(spec, a, ws, [()] * ring.size)], -2)
    given = jax.tree.map(unwrapped, tuple(operands))
    return _fused(spec, epilogue, a, ws, given, out_dtype if several else dtype, where)


def gemm_reduce_scatter(
    x: ArrayLike,
    w: ArrayLike,
    *,
    axis_name: str,
    layout: str = "nn",
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
    config: Config | None = None,
    route: str = "direct",
    reduce_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies, adds up over devices, and leaves each its rows: ``psum_scatter(gemm(x, w))``, in parts.

    For ``jax.shard_map``, with the contraction divided over a mesh axis: the second product of a layer under tensor
    parallelism with sequence sharding. The product of each device's rows is sent as the next runs.

    The gradient in x is an ``all_gather_gemm``, with the cotangent's rows in its dtype; that in w is one product of all
    of them.

    Args:
      x: ``[..., devices * m, k]``, or ``[..., k, devices * m]`` where ``layout[0]`` is "t".
      w: ``[..., k, n]``, or ``[..., n, k]``.
      axis_name: the mesh axis to add up over, and to divide the rows over.
      layout, out_dtype, precision, backend: as in ``cutjax.gemm``.
      config: pins the kernel of each product of one device's rows.
      route: how parts travel, as in ``cutjax.all_gather_gemm``.
      reduce_dtype: dtype in which parts of the sum travel. By default that of the accumulators, float32 for 16-bit
        operands; bfloat16 halves what is sent and rounds each part. They are added up in the accumulators' dtype.

    Returns:
      ``[..., m, n]``, this device's rows of the sum.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``cutjax.gemm`` does; and if the axis is not one name, is not bound,
        or does not divide the rows.

    Example:
      >>> import cutjax, functools, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> f = functools.partial(cutjax.gemm_reduce_scatter, axis_name="model")
      >>> specs = jax.P(None, "model"), jax.P("model", None)
      >>> f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=jax.P("model", None))
      >>> jax.jit(f)(jnp.ones((8, 16)), jnp.ones((16, 32))).shape
      (8, 32)
    """
    where = "gemm_reduce_scatter"
    ring = ring_of(axis_name, route, where)
    _check(layout, config, where)
    a, b, dtype, _ = promote(matrix(x, "x", where), [matrix(w, "w", where)], out_dtype, where)
    _check_shapes(a, b, layout, where)
    rows = -2 if layout[0] == "n" else -1
    if a.shape[rows] % ring.size:
        raise ValueError(f"{where}: x is {a.shape}: its rows do not divide over the {ring.size} devices of {axis_name!r}")
    a, b = match_varying(*aligned(Dense(layout), ring.varying(a), [b], ()))
    spec = Scattered(
        ring,
        Dense(layout),
        accumulator(a.dtype, dtype),
        travel_dtype(reduce_dtype, accumulator(a.dtype, dtype), where),
        dot_precision.canonical(precision, where),
        backends.resolve(backend, where),
        config,
    )
    return scattered(spec, ring.divided(a, rows), b).astype(dtype)


def travel_dtype(asked: DTypeLike | None, wide: np.dtype, where: str) -> np.dtype:
    """Returns the dtype in which parts of a sum travel."""
    if asked is None:
        return wide
    found = result_dtype(asked, where, "reduce_dtype")
    if accumulator(found) != wide or found.itemsize < 2:
        raise TypeError(f"{where}: reduce_dtype is {found}, but parts of the sum are {wide}: expected it, or 16 bits")
    return found


def _check(layout: str, config: Any, where: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: unknown layout {layout!r}, expected one of {LAYOUTS}")
    check_config(config, where)


def _check_shapes(x: jax.Array, w: jax.Array, layout: str, where: str) -> None:
    if contracted(x, layout[0] == "n") != contracted(w, layout[1] == "t"):
        raise ValueError(f"{where}: contracting dimensions differ: x is {x.shape}, w is {w.shape}, layout {layout!r}")
    try:
        np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    except ValueError:
        raise ValueError(f"{where}: batch axes do not broadcast: x is {x.shape}, w is {w.shape}") from None


# Rows gathered, multiplied as they arrive. Results are by chunk, in the order of the ring.


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The parameters of the products of gathered rows; the last five are as gemm's."""

    ring: Ring
    product: Dense
    epilogue: Epilogue
    precision: Any
    backend: str
    config: Config | None
    save: str

    @property
    def rows(self) -> int:
        """The axis of x that has the rows."""
        return -2 if self.product.layout[0] == "n" else -1

    @property
    def params(self) -> dict[str, Any]:
        return {"precision": self.precision, "backend": self.backend}

    def bind(self, epilogue: Epilogue, x: jax.Array, ws: Sequence[jax.Array], operands: Sequence[jax.Array]) -> Any:
        """Binds the products of one device's rows."""
        return products.bind(
            self.product, epilogue, x, ws, (), operands, config=self.config, save=self.save, **self.params
        )

    def accumulator(self, x: jax.Array, ws: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
        """Returns an accumulator of one device's rows, abstract."""
        return abstract_accumulator(self.epilogue.accumulator, self.product.tile(*map(jax.typeof, (x, *ws))))

    def tangents(
        self, xs: Sequence[jax.Array], ws: Sequence[jax.Array], x_dot: Any, w_dots: Any, dtype: np.dtype
    ) -> list[list[Any]]:
        """Returns the tangents of the products, by chunk; None is zero.

        Those of x travel as wide as accumulators: transposed, they are parts of a sum. Those of w are one product.
        """
        found: list[list[Any]] = [[None] * len(ws) for _ in xs]
        if x_dot is not None:
            dots = self.ring.gather(x_dot.astype(accumulator(x_dot.dtype)))
            found = [[wide(self.product, dot, w, out_dtype=dtype, **self.params) for w in ws] for dot in dots]
        for j, w_dot in enumerate(w_dots):
            if w_dot is None:
                continue
            parts = self.divided_product(xs, w_dot, dtype)
            for dots, part in zip(found, parts, strict=True):
                dots[j] = part if dots[j] is None else dots[j] + part
        return found

    def divided_product(self, xs: Sequence[jax.Array], w: jax.Array, dtype: np.dtype) -> Sequence[jax.Array]:
        return one_product(self.product, xs, w, dtype, **self.params)


def one_product(product: Dense, xs: Sequence[jax.Array], w: jax.Array, dtype: np.dtype, **params: Any) -> Any:
    """Returns the products of chunks of rows with one matrix, made as one: its cotangent in w is one product too."""
    rows = -2 if product.layout[0] == "n" else -1
    whole = multiply(product, jnp.concatenate(xs, rows), w, out_dtype=dtype, **params)
    return lax.split(whole, [whole.shape[-2] // len(xs)] * len(xs), whole.ndim - 2)


def _fused(
    spec: Gathered, fn: Callable[..., Any], x: jax.Array, ws: Sequence[jax.Array], given: Any, out_dtype: Any, where: str
) -> Any:
    """Returns what a function makes of the accumulators of all rows."""
    ring, m = spec.ring, x.shape[spec.rows]
    tile = spec.product.tile(*map(jax.typeof, (x, *ws)))
    everything = tile.update(shape=(*tile.shape[:-2], ring.size * m, tile.shape[-1]))
    acc = abstract_accumulator(x.dtype, everything, out_dtype)
    traced = trace_with_dtype(where, fn, [acc] * len(ws), given, out_dtype)
    check_rows(traced.epilogue, where)
    if traced.outside is not None:  # each call takes its derivative as gemm does
        chunks = ring.gather(x)
        params = {"out_dtype": out_dtype, "config": spec.config, "save": spec.save, **spec.params}
        leaves, tree = jax.tree.flatten(given)
        outs = [
            products.call(spec.product, fn, chunk, ws, (), tree.unflatten(mine), **params)
            for chunk, mine in zip(chunks, by_chunk(ring, leaves, acc.shape[-2]), strict=True)
        ]
        return jax.tree.map(lambda *parts: ring.assembled(parts, parts[0].ndim - acc.ndim - 2), *outs)
    x, *rest = match_varying(x, *ws, *traced.operands)
    ws, operands = rest[: len(ws)], rest[len(ws) :]
    spec = dataclasses.replace(spec, epilogue=traced.epilogue)
    outs = gathered(spec, x, ws, by_chunk(ring, operands, acc.shape[-2]))
    axes = [-1 if "col" in out.axes else -2 for out in traced.epilogue.outputs]
    return traced.finish([ring.assembled(parts, axis) for parts, axis in zip(zip(*outs, strict=True), axes, strict=True)])


def by_chunk(ring: Ring, operands: Sequence[Any], m: int) -> list[list[Any]]:
    """Returns each chunk's operands: of those with all rows its own."""
    found = [
        ring.divided(x, -2) if np.ndim(x) > 1 and x.shape[-2] == m != 1 else [x] * ring.size for x in operands
    ]
    return [[parts[i] for parts in found] for i in range(ring.size)]


def check_rows(epilogue: Epilogue, where: str) -> None:
    """Raises if an epilogue depends on which row is which: each of its kernels has those of one device."""
    if any("row" in out.axes for out in epilogue.outputs):
        raise NotImplementedError(f"{where}: the epilogue reduces over rows, which come in parts: reduce its result")
    if any(node.op == "iota" and ("row" in node.params or len(node.params) > 1) for node in epilogue.nodes):
        raise NotImplementedError(f"{where}: the epilogue uses positions of rows, which come in parts: pass an operand")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def gathered(spec: Gathered, x: jax.Array, ws: Any, operands: Any) -> list[list[jax.Array]]:
    """Returns the results of the epilogue for each chunk."""
    chunks = spec.ring.gather(x)
    return [spec.bind(spec.epilogue, chunk, ws, mine) for chunk, mine in zip(chunks, operands, strict=True)]


def _gathered_jvp(spec: Gathered, primals: Any, tangents: Any) -> Any:
    x, ws, operands = primals
    x_dot, w_dots, operand_dots = without_zeros(tangents)
    xs = [checkpoint_name(chunk, GATHERED) for chunk in spec.ring.gather(x)]
    epilogue = spec.epilogue
    plain = np.dtype(epilogue.outputs[0].dtype) if epilogue.plain else derivative.saved_dtype(epilogue, x.dtype)
    acc_dots = spec.tangents(xs, ws, x_dot, w_dots, plain)
    outs, dots = [], []
    for chunk, mine, acc_dot, dot in zip(xs, operands, acc_dots, operand_dots, strict=True):
        if epilogue.plain:
            results, found = spec.bind(epilogue, chunk, ws, ()), acc_dot
        else:
            results, found = _one(spec, chunk, ws, mine, acc_dot, dot)
        outs.append(results)
        dots.append([zeros(out) if is_none(d) else d for out, d in zip(results, found, strict=True)])
    return outs, dots


def _one(spec: Gathered, x: jax.Array, ws: Any, operands: Any, acc_dots: Any, operand_dots: Any) -> Any:
    """Returns results and tangents of one chunk."""
    acc = spec.accumulator(x, ws)
    return derivative.derivative(
        spec.epilogue,
        (x, ws, operands),
        operand_dots,
        acc,
        bind=lambda epilogue, operands: spec.bind(epilogue, x, ws, operands),
        tangents=lambda dtype: acc_dots,
        multiply=lambda x, ws, dtype: products.plain_products(spec.product, x, ws, (), dtype, **spec.params),
        pushed=functools.partial(derivative.push, spec.epilogue, acc.shape),
        save=spec.save,
    )


gathered.defjvp(_gathered_jvp, symbolic_zeros=True)


def without_zeros(tangents: Any) -> Any:
    """Returns the tangents, None in place of those that are zero."""
    none = lambda t: None if isinstance(t, SymbolicZero) or t.dtype == jax.dtypes.float0 else t  # noqa: E731
    return jax.tree.map(none, tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))


def is_none(dot: Any) -> bool:
    return dot is None or is_zero(dot)


def zeros(out: jax.Array) -> Any:
    """Returns the tangent that is zero."""
    if jnp.issubdtype(out.dtype, jnp.inexact):
        return jnp.zeros_like(out)
    return np.zeros(out.shape, jax.dtypes.float0)


# Rows multiplied, added up over the devices.


@dataclasses.dataclass(frozen=True)
class Scattered:
    """The parameters of products whose rows are added up: the dtypes of the sum and of what travels; others as gemm's."""

    ring: Ring
    product: Dense
    dtype: np.dtype
    travel: np.dtype
    precision: Any
    backend: str
    config: Config | None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def scattered(spec: Scattered, xs: Any, w: jax.Array) -> jax.Array:
    """Returns this device's rows of the sum, in the accumulators' dtype."""
    params = {"precision": spec.precision, "backend": spec.backend, "config": spec.config}
    parts = [multiply(spec.product, x, w, out_dtype=spec.dtype, **params) for x in reversed(xs)]
    return spec.ring.scatter(parts[::-1], spec.travel)


def _scattered_jvp(spec: Scattered, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Tangents travel in the operands' dtype: transposed, they are the rows of a cotangent."""
    xs, w = primals
    x_dots, w_dot = without_zeros(tangents)
    out = scattered(spec, xs, w)
    params: dict[str, Any] = {"precision": spec.precision, "backend": spec.backend}
    narrow = cotangents_dtype(w.dtype)
    if all(dot is None for dot in x_dots) and w_dot is None:
        return out, jnp.zeros_like(out)
    terms: list[Any] = [None] * len(xs)
    if any(dot is not None for dot in x_dots):
        full = [jnp.zeros_like(x) if dot is None else dot for x, dot in zip(xs, x_dots, strict=True)]
        terms = [multiply(spec.product, dot, w, out_dtype=narrow, **params) for dot in full]
    if w_dot is not None:
        parts = one_product(spec.product, xs, w_dot, narrow, **params)
        terms = [part if term is None else term + part for term, part in zip(terms, parts, strict=True)]
    return out, spec.ring.scatter(terms, narrow).astype(out.dtype)


scattered.defjvp(_scattered_jvp, symbolic_zeros=True)


def cotangents_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which cotangents of a product of ``dtype`` travel: its own, of at least 16 bits."""
    return dtype if dtype.itemsize > 1 else np.dtype(jnp.bfloat16)


# Two products: rows gathered for the first, added up for the second. Nothing between leaves its chunk.


@dataclasses.dataclass(frozen=True)
class Overlapped:
    """The parameters of mlp over devices: of its two products on one, and how rows travel."""

    ring: Ring
    chain: Chain
    travel: np.dtype

    @property
    def first(self) -> Gathered:
        chain = self.chain
        return Gathered(self.ring, chain.product, chain.hidden, chain.precision, chain.backend, None, chain.save)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def overlapped(spec: Overlapped, x: jax.Array, ws: Any, w2: jax.Array, operands: Any) -> jax.Array:
    """Returns this device's rows, in the accumulators' dtype."""
    first = spec.first
    hs = [first.bind(first.epilogue, *each) for each in _each(spec.ring.gather(x), ws, operands)]
    return _summed(spec, [h for (h,) in hs], w2)


def _each(xs: Sequence[jax.Array], ws: Any, operands: Any) -> list[tuple[Any, Any, Any]]:
    return [(x, ws, mine) for x, mine in zip(xs, operands, strict=True)]


def _summed(spec: Overlapped, hs: Sequence[jax.Array], w2: jax.Array) -> jax.Array:
    parts = [spec.chain.second(h, w2, ()) for h in reversed(hs)]
    return spec.ring.scatter(parts[::-1], spec.travel)


def _overlapped_jvp(spec: Overlapped, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """As the derivative of a chain, by chunk; the weights' terms are one product each."""
    x, ws, w2, operands = primals
    x_dot, w_dots, w2_dot, operand_dots = without_zeros(tangents)
    first, hidden = spec.first, spec.chain.hidden
    narrow = cotangents_dtype(x.dtype)
    chain = dataclasses.replace(spec.chain, out_dtype=narrow)
    dtype = derivative.saved_dtype(hidden, x.dtype)
    xs = [checkpoint_name(chunk, GATHERED) for chunk in spec.ring.gather(x)]
    acc_dots = first.tangents(xs, ws, x_dot, w_dots, dtype)
    acc = first.accumulator(xs[0], ws)

    def forward(xs: Any, ws: Any, operands: Any) -> tuple[list[jax.Array], list[Any]]:
        hs, kept = [], []
        for (chunk, ws, mine), *dots in zip(_each(xs, ws, operands), acc_dots, operand_dots, strict=True):
            moves = derivative.moving(dots[0]), derivative.moving(dots[1])
            needed = derivative.accumulators_needed(hidden, *moves)
            traced = derivative.differentiated(hidden, acc, mine, *moves)
            extended, places = derivative.with_accumulators(traced.epilogue, needed, dtype)
            outs = first.bind(extended, chunk, ws, traced.operands)
            hs.append(checkpoint_name(outs[0], HIDDEN))
            kept.append([None if i is None else checkpoint_name(outs[i], derivative.PREACTIVATION) for i in places])
        return hs, kept

    def terms(hs: Any, kept: Any, w2: Any, operands: Any, acc_dots: Any, operand_dots: Any, w2_dot: Any) -> list[Any]:
        found: list[Any] = [None] * len(hs)
        for i, (h, accs, mine, *dots) in enumerate(zip(hs, kept, operands, acc_dots, operand_dots, strict=True)):
            found[i] = tangent_of_second(chain, (), h.shape, accs, mine, w2, *dots)
        if w2_dot is not None:
            parts = one_product(chain.product, hs, w2_dot, narrow, **chain.params)
            found = [part if term is None else term + part for term, part in zip(found, parts, strict=True)]
        return found

    if spec.chain.save == "recompute":
        out = overlapped(spec, x, ws, w2, operands)

        def again(xs: Any, ws: Any, w2: Any, operands: Any, *dots: Any) -> list[Any]:
            return terms(*forward(xs, ws, operands), w2, operands, *dots)

        found = jax.checkpoint(again)(xs, ws, w2, operands, acc_dots, operand_dots, w2_dot)
    else:
        hs, kept = forward(xs, ws, operands)
        out = _summed(spec, hs, w2)
        found = terms(hs, kept, w2, operands, acc_dots, operand_dots, w2_dot)
    if all(term is None for term in found):
        return out, jnp.zeros_like(out)
    return out, spec.ring.scatter(found, narrow).astype(out.dtype)


overlapped.defjvp(_overlapped_jvp, symbolic_zeros=True)


def divided_mlp(
    ring: Ring,
    layout: str,
    hidden: Callable[..., jax.Array],
    x: jax.Array,
    ws: Sequence[jax.Array],
    w2: jax.Array,
    given: dict[str, jax.Array],
    last: Sequence[jax.Array],
    *,
    dtype: np.dtype,
    out_dtype: DTypeLike | None,
    reduce_dtype: DTypeLike | None,
    **params: Any,
) -> jax.Array:
    """Returns ``hidden(x @ w, ..., given) @ w2`` over the devices of a ring, with ``last``, an array or none, added."""
    where, product = "mlp", Dense(layout)
    x, *rest = match_varying(*aligned(product, ring.varying(x), [*ws, w2], ()), *given.values())
    ws, w2, given = rest[: len(ws)], rest[len(ws)], dict(zip(given, rest[len(ws) + 1 :], strict=True))
    tile = product.tile(*map(jax.typeof, (x, *ws)))
    m = ring.size * x.shape[-2]
    acc = abstract_accumulator(x.dtype, tile.update(shape=(*tile.shape[:-2], m, tile.shape[-1])))
    traced = trace_with_dtype(where, hidden, [acc] * len(ws), (given,), (dtype,))
    check_rows(traced.epilogue, where)
    out = dtype if out_dtype is None else result_of(dtype, out_dtype, where)
    wide = accumulator(dtype, out)
    travel = travel_dtype(reduce_dtype, wide, where)
    chain = Chain(product, traced.epilogue, wide, params["precision"], params["backend"], params["save"])
    if traced.outside is not None:  # each call takes its derivative as gemm does
        first = Gathered(ring, product, traced.epilogue, chain.precision, chain.backend, None, chain.save)
        more = {"out_dtype": (dtype,), "save": chain.save, **first.params}
        names = list(given)
        hs = [
            products.call(product, hidden, chunk, ws, (), (dict(zip(names, mine, strict=True)),), **more)
            for chunk, mine in zip(ring.gather(x), by_chunk(ring, list(given.values()), m), strict=True)
        ]
        y = scattered(Scattered(ring, product, wide, travel, chain.precision, chain.backend, None), hs, w2)
    else:
        x, w2, *rest = match_varying(x, w2, *ws, *traced.operands)
        ws, operands = rest[: len(ws)], rest[len(ws) :]
        y = overlapped(Overlapped(ring, chain, travel), x, ws, w2, by_chunk(ring, operands, m))
    for b in last:
        y, b = match_varying(y, b)
        y = y + b.astype(y.dtype)
    return y.astype(out)
