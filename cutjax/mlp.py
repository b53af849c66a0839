"""A layer of two products, whose backward pass never writes the gradient of what lies between them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from cutjax import _backend, _fused, _product
from cutjax._expression import Epilogue
from cutjax._primitive import define, is_linear, is_zero, match_varying
from cutjax._product import FLIP
from cutjax._trace import trace
from cutjax.gemm import contracted, matrix, promote

HIDDEN = "cutjax_hidden"  # the name jax.checkpoint policies see, of what the second product reads


def mlp(
    x: ArrayLike,
    w1: ArrayLike,
    w2: ArrayLike,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    b1: ArrayLike | None = None,
    b2: ArrayLike | None = None,
    gate: ArrayLike | None = None,
    layout: str = "nn",
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    save: str = "default",
) -> jax.Array:
    """Two products with an activation between them: ``activation(x @ w1 + b1) @ w2 + b2``.

    With a gate ``(activation(x @ gate) * (x @ w1 + b1)) @ w2 + b2``: SwiGLU, where the activation is ``jax.nn.silu``.

    The activation runs in the first kernel's epilogue, in float32. In the backward pass its derivative, and the
    gradient of b1, run in the epilogue of the product with w2 transposed, so the gradient of what lies between the
    products is never written. Differentiable in both modes and any number of times, and batchable.

    Args:
      x: ``[..., m, k]``.
      w1: ``[..., k, h]``, or ``[..., h, k]`` in the layout "nt".
      w2: ``[..., h, n]``, or ``[..., n, h]`` in the layout "nt".
      activation: any elementwise function written in JAX.
      b1: what broadcasts against ``[..., m, h]``, such as ``[h]``.
      b2: what broadcasts against ``[..., m, n]``.
      gate: like w1.
      layout: "nn" or "nt", of the weights; see ``cutjax.gemm``.
      out_dtype: dtype of the result; that of x and the weights by default.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      save: what is kept for the backward pass. "default": the accumulators which the activation's derivative needs,
        named "cutjax_preactivation" for ``jax.checkpoint`` policies, and the operand of the second product,
        "cutjax_hidden". "recompute": neither, the first product is made again.

    Returns:
      ``[..., m, n]``.

    Raises:
      TypeError, ValueError, NotImplementedError: as ``cutjax.gemm`` does.

    Example:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w, v = jnp.ones((2, 8, 16)), jnp.ones((16, 64)), jnp.ones((64, 16))
      >>> cutjax.mlp(x, w, v, gate=w, activation=jax.nn.silu).shape
      (2, 8, 16)
    """
    if layout not in ("nn", "nt"):
        raise ValueError(f"mlp: unknown layout {layout!r}, expected 'nn' or 'nt'")
    if save not in _fused.SAVE:
        raise ValueError(f"mlp: unknown save {save!r}, expected one of {_fused.SAVE}")
    backend = _backend.resolve(backend, "mlp")
    a, v = matrix(x, "x", "mlp"), matrix(w2, "w2", "mlp")
    ws = [matrix(w, name, "mlp") for w, name in ((gate, "gate"), (w1, "w1")) if w is not None]
    if ws[0].shape != ws[-1].shape or ws[0].dtype != ws[-1].dtype:
        raise ValueError(f"mlp: gate is {jax.typeof(ws[0]).str_short()}, but w1 is {jax.typeof(ws[1]).str_short()}")
    a, *ws, dtype = promote(a, ws, None, "mlp")
    if v.dtype != dtype:
        raise TypeError(f"mlp: w2 is {v.dtype}, but the product of x and w1 is {dtype}: cast one of them")
    if contracted(a, True) != contracted(ws[0], layout[1] == "t"):
        raise ValueError(f"mlp: x is {a.shape}, w1 is {ws[0].shape}, layout {layout!r}: k differs")
    if contracted(ws[0], layout[1] == "n") != contracted(v, layout[1] == "t"):
        raise ValueError(f"mlp: w1 is {ws[0].shape}, w2 is {v.shape}, layout {layout!r}: h differs")
    try:
        batch = np.broadcast_shapes(a.shape[:-2], ws[0].shape[:-2], v.shape[:-2])
    except ValueError:
        shapes = f"x is {a.shape}, w1 is {ws[0].shape}, w2 is {v.shape}"
        raise ValueError(f"mlp: batch axes do not broadcast: {shapes}") from None

    def hidden(*args: jax.Array) -> jax.Array:
        *accs, bias = args if b1 is not None else (*args, None)
        z = accs[-1] if bias is None else accs[-1] + bias.astype(accs[-1].dtype)
        h = activation(z if gate is None else accs[0])
        if not isinstance(h, jax.Array) or h.shape != z.shape:
            raise ValueError("mlp: the activation must return one array of its argument's shape")
        return h if gate is None else h * z

    rows = (*batch, a.shape[-2])
    columns = contracted(v, layout[1] == "t"), contracted(v, layout[1] == "n")
    biases = [
        _bias(b, name, (*rows, n)) for b, name, n in zip((b1, b2), ("b1", "b2"), columns, strict=True) if b is not None
    ]
    a, v, *rest = match_varying(*(_product.with_rank(y, len(batch) + 2) for y in (a, v, *ws)), *biases)
    ws, biases = rest[: len(ws)], rest[len(ws) :]
    traced = trace(hidden, [_fused.accumulator(a, ws, layout)] * len(ws), () if b1 is None else biases[:1])
    (out,) = traced.epilogue.outputs
    epilogue = dataclasses.replace(traced.epilogue, outputs=(dataclasses.replace(out, dtype=dtype.name),))
    out_dtype = dtype if out_dtype is None else jax.dtypes.canonicalize_dtype(out_dtype)
    how = _How(epilogue, layout, np.dtype(out_dtype), backend, save)
    last = () if b2 is None else (_product.with_rank(biases[-1], len(batch) + 2),)
    a, v, *rest = match_varying(a, v, *ws, *traced.operands, *last)
    ws, operands = rest[: len(ws)], rest[len(ws) :]
    if batch and max(math.prod(w.shape[:-2]) for w in (*ws, v)) == 1:
        folded = _fused.fold(epilogue, a, operands)
        if folded is not None:  # the weights are shared: the batch axes are more rows
            ws, v = [lax.reshape(w, w.shape[-2:]) for w in ws], lax.reshape(v, v.shape[-2:])
            y = _block(how, folded[0], ws, v, *_parted(folded[1:], len(last)))
            return _fused.unfold(y, a.shape[:-1])
    return _block(how, a, ws, v, *_parted(operands, len(last)))


def _bias(b: Any, name: str, shape: tuple[int, ...]) -> jax.Array:
    b = jnp.asarray(b)
    if b.ndim > len(shape) or any(n not in (1, size) for n, size in zip(b.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"mlp: {name} is {b.shape}, which does not broadcast against {shape}")
    return b


def _parted(operands: Sequence[jax.Array], last: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """The epilogue's operands, and b2 if there is one."""
    return list(operands[: len(operands) - last]), list(operands[len(operands) - last :])


@dataclasses.dataclass(frozen=True)
class _How:
    hidden: Epilogue
    layout: str
    out_dtype: np.dtype
    backend: str
    save: str

    @property
    def first(self) -> dict[str, Any]:
        return {"layout": self.layout, "backend": self.backend, "config": None}

    @property
    def second(self) -> dict[str, Any]:
        return self.first | {"out_dtype": self.out_dtype}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _block(how: _How, x: Any, ws: Any, w2: Any, operands: Any, b2: Any) -> jax.Array:
    (h,) = _fused.bind(how.hidden, x, ws, operands, save=how.save, **how.first)
    return _second(how, h, w2, b2)


def _second(how: _How, h: jax.Array, w2: jax.Array, b2: Sequence[jax.Array]) -> jax.Array:
    if not b2:
        return _product.multiply(h, w2, **how.second)
    return _fused.call(lambda acc, b: acc + b.astype(acc.dtype), h, [w2], b2, save=how.save, **how.second)


def _block_jvp(how: _How, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """y' = h' @ w2 + h @ w2' + b2', where h' @ w2 is one operation, because its transpose is one kernel."""
    x, ws, w2, operands, b2 = primals
    x_dot, w_dots, w2_dot, operand_dots, b2_dot = jax.tree.map(
        _none_if_zero, tangents, is_leaf=lambda t: isinstance(t, SymbolicZero)
    )
    dtype = _fused.saved_dtype(how.hidden, x.dtype)
    acc_dots = _fused.product_dots(x, ws, x_dot, w_dots, dtype, **how.first)
    needed = _fused.accumulators_needed(how.hidden, _fused.moving(acc_dots), _fused.moving(operand_dots))
    extended, places = _fused.with_accumulators(how.hidden, needed, dtype)

    def forward(x: Any, ws: Any, operands: Any) -> tuple[jax.Array, list[Any]]:
        outs = _fused.bind(extended, x, ws, operands, save=how.save, **how.first)
        kept = [None if i is None else checkpoint_name(outs[i], _fused.PREACTIVATION) for i in places]
        return checkpoint_name(outs[0], HIDDEN), kept

    def tangent(h: Any, kept: Any, w2: Any, operands: Any, acc_dots: Any, operand_dots: Any, w2_dot: Any) -> list[Any]:
        terms = []
        if any(_fused.moving(acc_dots)):
            terms.append(_chain(how, kept, operands, w2, acc_dots, operand_dots))
        elif any(_fused.moving(operand_dots)):
            (dot,) = _fused.push(how.hidden, h.shape, kept, operands, acc_dots, operand_dots)
            terms.append(_product.multiply(dot, w2, **how.second))
        if w2_dot is not None:
            terms.append(_product.multiply(h, w2_dot, **how.second))
        return terms

    if how.save == "recompute":
        y = _block(how, x, ws, w2, operands, b2)

        def again(x: Any, ws: Any, w2: Any, operands: Any, *dots: Any) -> list[Any]:
            return tangent(*forward(x, ws, operands), w2, operands, *dots)

        terms = jax.checkpoint(again)(x, ws, w2, operands, acc_dots, operand_dots, w2_dot)
    else:
        h, kept = forward(x, ws, operands)
        y = _second(how, h, w2, b2)
        terms = tangent(h, kept, w2, operands, acc_dots, operand_dots, w2_dot)
    terms += [jnp.broadcast_to(dot.astype(y.dtype), y.shape) for dot in b2_dot if dot is not None]
    return y, functools.reduce(lax.add, terms) if terms else jnp.zeros_like(y)


_block.defjvp(_block_jvp, symbolic_zeros=True)


def _none_if_zero(dot: Any) -> Any:
    return None if isinstance(dot, SymbolicZero) or dot.dtype == jax.dtypes.float0 else dot


# h' @ w2, of the tangents of the accumulators and the operands. h' is made by XLA and read by the second kernel; the
# transpose is one kernel, the product with w2 transposed whose epilogue multiplies by the activation's derivative.
# None among the arguments stands for an accumulator that is not needed, or a tangent of zero: ``there`` says where.


def _chain(how: _How, accs: Any, operands: Any, w2: Any, acc_dots: Any, operand_dots: Any) -> jax.Array:
    args = (w2, *accs, *operands, *acc_dots, *operand_dots)
    there = tuple(x is not None for x in args)
    values = match_varying(*(x for x in args if x is not None))
    return chain_p.bind(*values, how=how, there=there)


def _parts(values: Sequence[Any], how: _How, there: tuple[bool, ...]) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """w2, the accumulators, the operands, and the tangents of both."""
    it = iter(values)
    w2, *rest = [next(it) if is_there else None for is_there in there]
    n, q = how.hidden.products, len(how.hidden.operands)
    return w2, rest[:n], rest[n : n + q], rest[n + q :]


def _composed(*values: Any, how: _How, there: tuple[bool, ...]) -> jax.Array:
    w2, accs, operands, dots = _parts(values, how, there)
    shape = next(dot.shape for dot in dots if dot is not None)
    n = how.hidden.products
    (h_dot,) = _fused.push(how.hidden, shape, accs, operands, dots[:n], dots[n:])
    return _product.multiply(h_dot, w2, **how.second)


def _abstract(*avals: Any, how: _How, there: tuple[bool, ...]) -> Any:
    w2, _, _, dots = _parts(avals, how, there)
    h = next(dot for dot in dots if dot is not None)
    return _product.abstract(h.update(dtype=w2.dtype), w2, **how.second)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, jax.Array]:
    places = [i for i, dot in enumerate(tangents) if not is_zero(dot)]

    def along(*values: jax.Array) -> jax.Array:
        new = dict(zip(places, values, strict=True))
        return _composed(*(new.get(i, x) for i, x in enumerate(primals)), **params)

    return jax.jvp(along, tuple(primals[i] for i in places), tuple(tangents[i] for i in places))


def _transpose(g: Any, *values: Any, how: _How, there: tuple[bool, ...]) -> list[Any]:
    if is_zero(g):
        return [None] * len(values)
    w2, accs, operands, dots = _parts(values, how, there)
    n = how.hidden.products
    wide = dataclasses.replace(how.hidden, outputs=(dataclasses.replace(how.hidden.outputs[0], dtype="float32"),))

    def pulled(acc: jax.Array, accs: Any, operands: Any) -> tuple[jax.Array, ...]:
        """The cotangents of what has a tangent, from that of h, before it was rounded."""
        like = [None if dot is None else jnp.zeros(acc.shape, dot.aval.dtype) for dot in dots[:n]]
        along, at = _fused.restrict(wide, acc.shape, accs, operands, like, dots[n:])
        return jax.vjp(lambda *args: along(*args)[0], *at)[1](acc)

    product = how.first | {"layout": "n" + FLIP[how.layout[1]], "out_dtype": _fused.ACC}
    g = g.astype(w2.dtype)
    shape = next(dot.aval.shape for dot in dots if dot is not None)
    axes = [i for i in range(g.ndim - 2) if shape[i] == 1 != np.broadcast_shapes(g.shape[:-2], w2.shape[:-2])[i]]
    try:
        if axes:
            raise NotImplementedError
        found = _fused.call(pulled, g, [w2], (accs, operands), save="default", **product)
    except NotImplementedError:  # a sum over batch axes: no kernel makes it
        acc = _product.multiply(g, w2, **product)
        found = pulled(acc.sum(axes, keepdims=True) if axes else acc, accs, operands)
    dots = values[len(values) - len(found) :]
    found = [x if is_linear(dot) else None for x, dot in zip(found, dots, strict=True)]
    return [None] * (len(values) - len(found)) + found


def _batch(args: Any, dims: Any, *, how: _How, there: tuple[bool, ...]) -> tuple[jax.Array, int]:
    """As rows where w2 is shared, as an axis where everything has it; elsewhere the transpose is no kernel."""
    n = how.hidden.products
    batched = [dim is not None for dim in dims]
    w2_batched, accs, operands, dots = _parts(batched, how, there)
    moved = [
        lax.expand_dims(x, [0]) if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)
    ]
    if all(batched):
        return chain_p.bind(*moved, how=how, there=there), 0
    alike = all(dot in (None, x) for x, dot in zip(operands, dots[n:], strict=True))
    if not w2_batched and all(x is not False for x in (*accs, *dots[:n])) and args[0].ndim == 2 and alike:
        tile = next(dot for dot in _parts(moved, how, there)[3] if dot is not None)
        folded = _fused.fold(how.hidden, tile, moved[1:])
        if folded is not None:
            return _fused.unfold(chain_p.bind(args[0], *folded[1:], how=how, there=there), tile.shape[:-1]), 0
    return jax.vmap(functools.partial(_composed, how=how, there=there), dims)(*args), 0


chain_p = define(
    "cutjax_chain",
    abstract=_abstract,
    reference=_composed,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)
