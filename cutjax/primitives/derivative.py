"""The derivative of a product with an epilogue, dense or grouped: kept by the forward pass, made of that by XLA."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from cutjax.binding.rules import reads, zero_tangent
from cutjax.epilogue.expression import ACC, Epilogue, Node, Output, normal
from cutjax.epilogue.trace import Traced, trace
from cutjax.primitives.factors import Factors

SAVE = ("default", "recompute")
PREACTIVATION = "cutjax_preactivation"  # the name jax.checkpoint policies see


def saved_dtype(epilogue: Epilogue, dtype: np.dtype) -> np.dtype:
    """Returns the dtype, of at least 16 bits, in which a derivative keeps accumulators of products of ``dtype``."""
    acc = epilogue.accumulator
    if not jnp.issubdtype(dtype, jnp.inexact) or any(
        out.reduce is None and out.dtype == acc.name for out in epilogue.outputs
    ):
        return acc
    return dtype if dtype.itemsize > 1 else np.dtype(jnp.bfloat16)


def derivative(
    epilogue: Epilogue,
    factors: Factors,
    operands: Sequence[Any],
    operand_dots: Sequence[Any],
    acc: jax.ShapeDtypeStruct,
    *,
    bind: Callable[[Epilogue, Sequence[jax.Array]], list[jax.Array]],
    tangents: Callable[[np.dtype], list[jax.Array | None]],
    multiply: Callable[[Factors, np.dtype], list[jax.Array]],
    pushed: Callable[..., Any],
    dtype: np.dtype,
    save: str,
    groups: int | None = None,
    rows: int = 1,
) -> tuple[list[jax.Array], list[Any]]:
    """Returns results and tangents of a fused product, dense or grouped.

    The tangents are those of the epilogue, in plain JAX, at the products of tangents. The accumulators that takes are
    further outputs of the same kernel. Reverse mode follows by transposition: two products for each b, and one
    elementwise pass, whose derivative is computed there and not before (hence jax.checkpoint).

    Args:
      epilogue: what runs on the accumulators.
      factors: what is multiplied.
      operands: those of the epilogue.
      operand_dots: tangents of the operands; None is zero.
      acc: an accumulator, abstract.
      bind: the fused product of the factors with another epilogue and its operands.
      tangents: the tangents of the products in a dtype; None is zero.
      multiply: the plain products, ``(factors, dtype)``.
      pushed: ``push`` without its first two arguments.
      dtype: in which accumulators are kept, the ``saved_dtype``.
      save: as gemm's.
      groups: the number of groups of rows, None where there are none.
      rows: the axes of the rows, as ``trace`` takes them.
    """
    acc_dots = tangents(dtype)
    moves = moving(acc_dots), moving(operand_dots)
    needed = accumulators_needed(epilogue, *moves)
    values = differentiated(epilogue, acc, operands, *moves, groups, rows)

    if save == "recompute":
        outs = values.finish(bind(values.epilogue, values.operands))
        kept = factors

        def accumulators(kept: Any) -> list[Any]:
            accs = multiply(kept, dtype)  # what is not needed is not lowered
            return [acc if need else None for acc, need in zip(accs, needed, strict=True)]

    else:
        extended, places = with_accumulators(values.epilogue, needed, dtype)
        results = bind(extended, values.operands)
        outs = values.finish(results[: len(values.epilogue.outputs)])
        kept = [None if i is None else checkpoint_name(results[i], PREACTIVATION) for i in places]

        def accumulators(kept: Any) -> list[Any]:
            return kept

    def along(kept: Any, *rest: Any) -> Any:
        return pushed(accumulators(kept), *rest)

    along = jax.checkpoint(along, prevent_cse=save == "recompute")
    dots = along(kept, operands, acc_dots, operand_dots)
    return outs, [zero_tangent(out) if dot is None else dot for out, dot in zip(outs, dots, strict=True)]


def moving(dots: Sequence[Any]) -> tuple[bool, ...]:
    """Returns True for each tangent that is not zero."""
    return tuple(dot is not None for dot in dots)


def differentiated(
    epilogue: Epilogue,
    acc: jax.ShapeDtypeStruct,
    operands: Sequence[Any],
    moving_accs: tuple[bool, ...],
    moving_operands: tuple[bool, ...],
    groups: int | None = None,
    rows: int = 1,
) -> Traced:
    """Returns the epilogue with the values that JAX computes beside a derivative in the inputs that move.

    The values are the same. But a rule says them anew, and what it says is what a second derivative is taken of.
    """
    moves = moving_accs + moving_operands
    if not epilogue.rules or not any(moves):
        return Traced(epilogue, tuple(operands), list)

    def values(*args: jax.Array) -> list[jax.Array]:
        def along(*moved: jax.Array) -> list[jax.Array]:
            new = iter(moved)
            full = [next(new) if moves else x for x, moves in zip(args, moves, strict=True)]
            return list(epilogue.apply(full[: epilogue.products], full[epilogue.products :]))

        return jax.vjp(along, *(x for x, moves in zip(args, moves, strict=True) if moves))[0]

    traced = trace(values, [acc] * epilogue.products, operands, groups, refusing=True, rows=rows)
    return traced._replace(epilogue=rounded_once(traced.epilogue))


def rounded_once(epilogue: Epilogue, dtype: np.dtype | None = None) -> Epilogue:
    """Returns the epilogue with its full-size results rounded once, from the accumulators' dtype.

    To the dtype that a last cast in the function names, else to ``dtype``.
    """
    outputs, acc = [], epilogue.accumulator.name
    for out in epilogue.outputs:
        node = epilogue.nodes[out.node]
        if out.reduce is None and node.op == "convert_element_type" and node.dtype in ("bfloat16", "float16"):
            if epilogue.nodes[node.args[0]].dtype == acc:
                out = dataclasses.replace(out, node=node.args[0])
        elif out.reduce is None and out.dtype == acc and dtype is not None:
            out = dataclasses.replace(out, dtype=dtype.name)
        outputs.append(out)
    return normal(epilogue.products, epilogue.operands, epilogue.nodes, outputs)


def outside(reverse_only: bool, fused: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """Returns ``fused(*args)``, with the derivative of ``plain(*args)``: JAX runs rules there, and policies see names.

    Args:
      reverse_only: whether the derivative exists in reverse mode alone, as with custom_vjp.
      fused, plain: the same function of pytrees of arrays.
      args: theirs.
    """
    if reverse_only:
        run = jax.custom_vjp(fused)
        run.defvjp(lambda *args: jax.vjp(plain, *args), lambda pull, g: pull(g))
        return run(*args)

    def rule(primals: Any, tangents: Any) -> Any:
        leaves, tree = jax.tree.flatten(primals)
        dots = jax.tree.leaves(tangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
        places = [i for i, dot in enumerate(dots) if not isinstance(dot, SymbolicZero)]

        def along(*moved: Any) -> Any:
            new = dict(zip(places, moved, strict=True))
            return plain(*tree.unflatten(new.get(i, x) for i, x in enumerate(leaves)))

        return jax.jvp(along, [leaves[i] for i in places], [dots[i] for i in places])

    run = jax.custom_jvp(fused)
    run.defjvp(rule, symbolic_zeros=True)
    return run(*args)


class Applied(Protocol):
    """An epilogue that is differentiated: an Epilogue, or one of rows in groups."""

    @property
    def products(self) -> int: ...

    def apply(self, accs: Sequence[jax.Array], operands: Sequence[jax.Array] = ()) -> Sequence[jax.Array]: ...


def push(epilogue: Applied, shape: tuple[int, ...], accs: Any, operands: Any, acc_dots: Any, operand_dots: Any) -> Any:
    """Computes tangents of the epilogue's outputs, None for those of integers.

    A tangent of None is zero; an accumulator of None is not needed, and zeros take its place.
    """
    # One of several products may have fewer batch axes than what it is combined with, which is what was saved.
    acc_dots = [
        dot if x is None or dot is None else jnp.broadcast_to(dot, x.shape)
        for x, dot in zip(accs, acc_dots, strict=True)
    ]
    operand_dots = list(operand_dots)
    for i, j in biases(epilogue) if isinstance(epilogue, Epilogue) else ():
        dot, bias = acc_dots[i], operand_dots[j]
        if (
            accs[i] is not None
            and dot is not None
            and bias is not None
            and dot.dtype.itemsize < 4
            and bias.size < dot.size
        ):
            acc_dots[i], operand_dots[j] = _rounded(dot.astype(ACC) + bias.astype(ACC), dot.dtype), None
    dots = [dot for dot in (*acc_dots, *operand_dots) if dot is not None]
    along, at = restrict(epilogue, shape, accs, operands, acc_dots, operand_dots)
    out_dots = jax.jvp(along, at, tuple(dots))[1]
    return [None if dot.dtype == jax.dtypes.float0 else dot for dot in out_dots]


@functools.lru_cache(maxsize=256)
def biases(epilogue: Epilogue) -> tuple[tuple[int, int], ...]:
    """Returns (product, operand) for each operand that is added to an accumulator, where neither is read elsewhere.

    Other terms may be added between: the derivatives in both are the same all along a chain of additions.
    """
    nodes = epilogue.nodes
    readers = collections.defaultdict(list)
    for node in (*nodes, *(Node("output", (out.node,)) for out in epilogue.outputs)):
        for arg in node.args:
            readers[arg].append(node)
    found = []
    for i, node in enumerate(nodes):
        product = node.params[0] if node.op == "acc" else -1
        while product >= 0 and len(readers[i]) == 1 and (node := readers[i][0]).op == "add":
            for j in node.args:
                j = nodes[j].args[0] if nodes[j].op == "convert_element_type" and len(readers[j]) == 1 else j
                if nodes[j].op == "operand" and len(readers[j]) == 1:
                    found.append((product, nodes[j].params[0]))
            i = nodes.index(node)
    return tuple(found)


def _rounded(dot: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns a tangent in the dtype of products, and so its cotangent: also what sums that sums rounded values.

    XLA drops a conversion to 16 bits and back, and would sum what is not rounded: it writes that to memory in float32,
    for the sum and for the rounding to read (458 us, where one pass takes 239). To reduce the precision of 16 bits to
    16 bits changes nothing, but stands between the conversions.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(dot.astype(dtype), info.nexp, info.nmant)


def restrict(
    epilogue: Applied, shape: tuple[int, ...], accs: Any, operands: Any, acc_dots: Any, operand_dots: Any
) -> tuple[Callable[..., list[jax.Array]], tuple[jax.Array, ...]]:
    """Returns the epilogue as a function of those arguments that have a tangent, and their values."""
    accs = [
        (jnp.zeros(shape, ACC) if dot is None else jnp.zeros_like(dot)) if x is None else x
        for x, dot in zip(accs, acc_dots, strict=True)
    ]
    args = (*accs, *operands)
    places = [i for i, dot in enumerate((*acc_dots, *operand_dots)) if dot is not None]

    def along(*values: jax.Array) -> list[jax.Array]:
        new = dict(zip(places, values, strict=True))
        full: list[Any] = [new.get(i, x) for i, x in enumerate(args)]
        return list(epilogue.apply(full[: epilogue.products], full[epilogue.products :]))

    return along, tuple(args[i] for i in places)


def accumulators_needed(
    epilogue: Epilogue, moving_accs: tuple[bool, ...], moving_operands: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Returns, for each accumulator, True if the derivative reads its value, given the inputs that have tangents."""
    # No other epilogue is equal to one with a rule, so none is kept.
    found = _accumulators_needed.__wrapped__ if epilogue.rules else _accumulators_needed
    return found(epilogue, moving_accs, moving_operands)


@functools.lru_cache(maxsize=4096)
def _accumulators_needed(
    epilogue: Epilogue, moving_accs: tuple[bool, ...], moving_operands: tuple[bool, ...]
) -> tuple[bool, ...]:
    ranks = [len(spec.batch) for spec in epilogue.operands]
    ranks += [1 + node.params[1] for node in epilogue.nodes if node.op == "iota" and len(node.params) > 1]
    ranks += [-min(out.places(0)) - 2 for out in epilogue.outputs if out.axes]
    shape = (2,) * (2 + max(ranks, default=0))
    accs = [jax.ShapeDtypeStruct(shape, epilogue.accumulator)] * epilogue.products
    operands = [
        jax.ShapeDtypeStruct([1 + v for v in (*spec.batch, spec.row, spec.col)], spec.dtype)
        for spec in epilogue.operands
    ]
    dots = [x if moves else None for x, moves in zip(accs, moving_accs, strict=True)]
    operand_dots = [x if moves else None for x, moves in zip(operands, moving_operands, strict=True)]
    if not any(moving_accs + moving_operands):
        return (False,) * epilogue.products
    found = reads(functools.partial(push, epilogue, shape), accs, operands, dots, operand_dots)
    return tuple(found[: epilogue.products])


def with_accumulators(epilogue: Epilogue, needed: Sequence[bool], dtype: np.dtype) -> tuple[Epilogue, list[int | None]]:
    """Returns the epilogue with accumulators among its outputs, and where each is; None where it is not needed."""
    outputs, places = list(epilogue.outputs), []
    for i, need in enumerate(needed):
        if not need:
            places.append(None)
            continue
        node = next(j for j, node in enumerate(epilogue.nodes) if node.op == "acc" and node.params == (i,))
        out = Output(node, dtype.name)
        if out not in outputs:
            outputs.append(out)
        places.append(outputs.index(out))
    return dataclasses.replace(epilogue, outputs=tuple(outputs)), places
