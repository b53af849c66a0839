"""A product whose epilogue runs on the accumulators: the primitive gemm_fused_p.

    outputs = epilogue(a @ b0, a @ b1, ..., operands)

a and the bs have equal rank, batch axes equal or 1; the operands have the result's rank, each axis equal or 1.
"""

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

from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, normal
from cutjax.epilogue.trace import Traced, trace
from cutjax.kernels.choose import Choice, choose
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90.config import Config
from cutjax.primitives import dense, derivative
from cutjax.primitives.define import define, is_zero, match_varying, varying_axes
from cutjax.primitives.dense import gemm_p, sharded


def call(
    fn: Callable[..., Any],
    a: jax.Array,
    bs: Sequence[jax.Array],
    operands: Sequence[Any],
    *,
    layout: str,
    out_dtype: Any,
    **params: Any,
) -> Any:
    """Traces a function and binds the primitive; what the function returns."""
    a, *bs = match_varying(a, *bs)
    acc = accumulator(a.dtype, tile(*map(jax.typeof, (a, *bs)), layout=layout), out_dtype)
    traced = trace_with_dtype(fn, [acc] * len(bs), operands, out_dtype)
    how = {"layout": layout, **params}
    if traced.outside is None:
        return traced.finish(bind(traced.epilogue, a, bs, traced.operands, **how))
    function = traced.outside.function

    def fused(a: jax.Array, bs: Sequence[jax.Array], leaves: Sequence[Any]) -> Any:
        again = trace_with_dtype(lambda *xs: function(xs[:-1], xs[-1]), [acc] * len(bs), (tuple(leaves),), out_dtype)
        return again.finish(bind(again.epilogue.primal, a, bs, again.operands, **how))

    def plain(a: jax.Array, bs: Sequence[jax.Array], leaves: Sequence[Any]) -> Any:
        accs = [dense.multiply(a, b, out_dtype=acc.dtype, **_plain(how)) for b in bs]
        return with_result_dtype(function(accs, leaves), acc, out_dtype)

    return derivative.outside(traced.outside, fused, plain, a, bs)


def trace_with_dtype(
    fn: Callable[..., Any], accs: Sequence[Any], operands: Sequence[Any], out_dtype: Any, groups: int | None = None
) -> Traced:
    """Traces a function; its float32 results are in ``out_dtype``, or each in that of a tuple."""
    if isinstance(out_dtype, tuple):
        fn, out_dtype = _casting(fn, out_dtype), None
    traced = trace(fn, accs, operands, groups)
    return traced._replace(epilogue=derivative.rounded_once(traced.epilogue, out_dtype))


def with_result_dtype(results: Any, acc: Any, out_dtype: Any) -> Any:
    """Returns results with those of full size and the accumulators' dtype in ``out_dtype``, as a kernel has them."""
    if out_dtype is None or isinstance(out_dtype, tuple):
        return results
    return jax.tree.map(lambda x: x.astype(out_dtype) if (x.shape, x.dtype) == (acc.shape, acc.dtype) else x, results)


def _plain(how: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the plain product beside one with an epilogue."""
    return {name: value for name, value in how.items() if name != "save"} | {"config": None}


def accumulator(dtype: np.dtype, full: Any, out_dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns what an epilogue is traced with, of a product of ``dtype`` with the shape of an aval."""
    acc = dense.accumulator(dtype, None if isinstance(out_dtype, tuple) else out_dtype)
    return jax.ShapeDtypeStruct(full.shape, acc, sharding=full.sharding, manual_axis_type=full.mat)


def _casting(fn: Callable[..., Any], dtypes: tuple[Any, ...]) -> Callable[..., Any]:
    """The function with each of its results in the dtype asked for."""

    @functools.wraps(fn)
    def casting(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(fn(*args))
        if len(leaves) != len(dtypes):
            raise ValueError(f"gemm: out_dtype has {len(dtypes)} entries, the epilogue returns {len(leaves)} arrays")
        return tree.unflatten(x if t is None else x.astype(t) for x, t in zip(leaves, dtypes, strict=True))

    return casting


def bind(
    epilogue: Epilogue, a: jax.Array, bs: Sequence[jax.Array], operands: Sequence[jax.Array], **params: Any
) -> list[jax.Array]:
    """Binds the primitive; one matrix b for all of a makes the batch axes more rows."""
    a, *rest = match_varying(a, *bs, *operands)
    bs, operands = rest[: len(bs)], rest[len(bs) :]
    batch = np.broadcast_shapes(a.shape[:-2], *(b.shape[:-2] for b in bs))
    if params["layout"][0] == "n" and batch and math.prod(bs[0].shape[:-2]) == 1:
        folded = fold(epilogue, a, operands)
        if folded is not None:
            epilogue, (rows, *operands) = folded
            outs = _bind(epilogue, rows, [lax.reshape(b, b.shape[-2:]) for b in bs], operands, **params)
            return [unfold(x, a.shape[:-1]) for x in outs]
    return _bind(epilogue, a, bs, operands, **params)


def _bind(epilogue: Epilogue, a: Any, bs: Sequence[Any], operands: Sequence[Any], **params: Any) -> list[jax.Array]:
    specs = [
        OperandSpec(x.dtype.name, x.shape[-2] != 1, x.shape[-1] != 1, tuple(size != 1 for size in x.shape[:-2]))
        for x in operands
    ]
    epilogue = dataclasses.replace(epilogue, operands=tuple(specs))
    return gemm_fused_p.bind(a, *bs, *operands, epilogue=epilogue, **params)


def fold(epilogue: Epilogue, a: jax.Array, operands: Sequence[jax.Array]) -> tuple[Epilogue, list[jax.Array]] | None:
    """The epilogue, and a and the operands, with the batch axes merged into the rows.

    None where that changes the result or moves data.
    """
    rows, all_rows = a.shape[:-1], ("row", a.ndim - 2)
    places = {node.params for node in epilogue.nodes if node.op == "iota"}
    mixed = any("row" in out.axes for out in epilogue.outputs) or places - {("col",), all_rows}
    if mixed or any(x.shape[:-1] not in (rows, (1,) * len(rows)) for x in operands):
        return None
    if sharded(a) or any(sharded(x) for x in operands):
        return None
    if places:
        row = Node("iota", (), "int32", ("row",))
        nodes = tuple(row if node.params == all_rows else node for node in epilogue.nodes)
        epilogue = dataclasses.replace(epilogue, nodes=nodes)
    return epilogue, [lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])) for x in (a, *operands)]


def unfold(x: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    return lax.reshape(x, (*rows, *x.shape[1:]))


# The primitive.


def _split(args: Sequence[Any], epilogue: Epilogue) -> tuple[Any, list[Any], list[Any]]:
    """a, the bs and the operands."""
    return args[0], list(args[1 : 1 + epilogue.products]), list(args[1 + epilogue.products :])


def tile(a: Any, *bs: Any, layout: str) -> Any:
    """The aval of ``[..., m, n]``, in a's dtype, from avals."""
    m, n = a.shape[-2 if layout[0] == "n" else -1], bs[0].shape[-1 if layout[1] == "n" else -2]
    batch = np.broadcast_shapes(a.shape[:-2], *(b.shape[:-2] for b in bs))
    specs = [dense.out_spec(a, b, layout) for b in bs]
    spec = [next((axis for axis in axes if axis is not None), None) for axes in zip(*specs, strict=True)]
    return a.update(shape=(*batch, m, n), weak_type=False, sharding=dense.on_mesh(a, *bs).update(spec=jax.P(*spec)))


def _abstract(*avals: Any, layout: str, epilogue: Epilogue, **_: Any) -> list[Any]:
    a, bs = _split(avals, epilogue)[:2]
    if any(varying_axes(x) != varying_axes(a) for x in avals):
        raise ValueError(f"gemm: operands vary over different mesh axes: {', '.join(x.str_short() for x in avals)}")
    return result_avals(tile(a, *bs, layout=layout), epilogue)


def result_avals(full: Any, epilogue: Epilogue) -> list[Any]:
    """The results' avals from that of ``[..., m, n]``."""
    results = []
    for out in epilogue.outputs:
        gone = [{"row": -2, "col": -1}[axis] + full.ndim for axis in out.axes]
        shape, spec = ([x for i, x in enumerate(y) if i not in gone] for y in (full.shape, full.sharding.spec))
        sharding = full.sharding.update(spec=jax.P(*spec))
        results.append(full.update(shape=tuple(shape), dtype=np.dtype(out.dtype), sharding=sharding))
    return results


def _reference(
    *args: jax.Array, layout: str, epilogue: Epilogue, precision: Canonical, on_cuda: bool, **_: Any
) -> tuple[jax.Array, ...]:
    a, bs, operands = _split(args, epilogue)
    how: dict[str, Any] = {"layout": layout, "precision": precision, "on_cuda": on_cuda}
    accs = [dense.reference(a, b, out_dtype=epilogue.accumulator, **how) for b in bs]
    return epilogue.primal.apply(accs, operands)


def _choose(
    *avals: Any, layout: str, epilogue: Epilogue, precision: Canonical, config: Config | None, arch: str, **_: Any
) -> Choice:
    a, bs = _split(avals, epilogue)[:2]
    out_dtype = next((out.dtype for out in epilogue.outputs if out.reduce is None), a.dtype)
    problem = Problem.of(a, bs[0], layout=layout, out_dtype=out_dtype, arch=arch)
    if len({b.shape for b in bs}) > 1:
        return Choice(problem, None, ("the matrices that share a differ in their batch axes",))
    return choose(dataclasses.replace(problem, epilogue=epilogue.primal), config, precision=precision)


def _batch(args: Any, dims: Any, *, epilogue: Epilogue, layout: str, **params: Any) -> tuple[Any, list[int]]:
    a, bs, operands = _split(args, epilogue)
    a_dim, b_dims, _ = _split(dims, epilogue)
    if a_dim is not None and all(dim is None for dim in b_dims) and a.ndim == 3 and layout[0] == "n" and a_dim < 2:
        # One matrix b for all of a: the batch is more rows, wherever among the rows it lies.
        operands = [
            lax.expand_dims(x, [a_dim]) if dim is None else jnp.moveaxis(x, dim, a_dim)
            for x, dim in zip(operands, dims[1 + epilogue.products :], strict=True)
        ]
        folded = fold(epilogue, a, operands)
        if folded is not None:
            epilogue, (rows, *operands) = folded
            outs = _bind(epilogue, rows, bs, operands, layout=layout, **params)
            outs = [unfold(x, a.shape[:-1]) for x in outs]
            return outs, [a_dim] * len(outs)
        operands = list(args[1 + epilogue.products :])
    # A batch axis where one has it already, so that only an axis among the matrices' own must move. But batch positions
    # are counted from the rows outwards, so an epilogue that uses them wants a new axis outermost.
    places = (dim for dim in dims if dim is not None and dim < a.ndim - (a_dim is not None) - 1)
    at = 0 if "batch" in epilogue.positions else next(places, 0)
    args = [
        lax.expand_dims(x, [at]) if dim is None else jnp.moveaxis(x, dim, at) for x, dim in zip(args, dims, strict=True)
    ]
    a, bs, operands = _split(args, epilogue)
    if any(dim is not None for dim in dims[: 1 + epilogue.products]):
        outs = _bind(epilogue, a, bs, operands, layout=layout, **params)
    else:  # only operands differ: one product serves them all
        accs = [multiply(a, b, epilogue.accumulator, layout=layout, **params) for b in bs]
        outs = list(epilogue.apply(accs, operands))
    return outs, [at] * len(outs)


def multiply(
    a: Any, b: Any, dtype: np.dtype, *, layout: str, precision: Canonical, backend: str, **_: Any
) -> jax.Array:
    """The plain product, of what the primitive takes."""
    return gemm_p.bind(a, b, layout=layout, out_dtype=dtype, precision=precision, backend=backend, config=None)


def _jvp(primals: Any, tangents: Any, *, epilogue: Epilogue, save: str, **params: Any) -> Any:
    a, bs, operands = _split(primals, epilogue)
    acc = accumulator(epilogue.accumulator, tile(*map(jax.typeof, (a, *bs)), layout=params["layout"]))

    def rebind(epilogue: Epilogue, operands: Sequence[jax.Array]) -> list[jax.Array]:
        return _bind(epilogue, a, bs, operands, save=save, **params)

    return derivative.derivative(
        epilogue,
        (a, bs, operands),
        _split([None if is_zero(x) else x for x in tangents], epilogue),
        acc,
        bind=rebind,
        multiply=functools.partial(multiply, **params),
        pushed=functools.partial(derivative.push, epilogue, acc.shape),
        save=save,
    )


def without(used: Sequence[bool], epilogue: Epilogue) -> tuple[Epilogue, list[bool]]:
    """The epilogue without the results that nothing uses, which a kernel would write all the same; the operands left.

    Also without their operands.
    """
    outputs = [out for out, use in zip(epilogue.outputs, used, strict=True) if use]
    epilogue = normal(epilogue.products, epilogue.operands, epilogue.nodes, outputs)
    kept = [Node("operand", (), spec.dtype, (i,)) in epilogue.nodes for i, spec in enumerate(epilogue.operands)]
    nodes = [
        dataclasses.replace(node, params=(sum(kept[: node.params[0]]),)) if node.op == "operand" else node
        for node in epilogue.nodes
    ]
    specs = [spec for spec, keep in zip(epilogue.operands, kept, strict=True) if keep]
    return normal(epilogue.products, specs, nodes, epilogue.outputs), kept


def plain_dtype(epilogue: Epilogue) -> np.dtype | None:
    """The dtype of the plain product that the epilogue leaves as it is; None where it does more.

    What a derivative that recomputes, or does without the values, wants of the forward pass is a plain product.
    """
    outs = list(epilogue.outputs)
    if epilogue.nodes != (Node("acc", params=(0,)),) or epilogue.products > 1 or len(outs) > 1 or outs[0].reduce:
        return None
    return np.dtype(outs[0].dtype)


def _drop(used: Sequence[bool], *, epilogue: Epilogue, save: str, **params: Any) -> tuple[Any, list[bool], Any]:
    epilogue, kept = without(used, epilogue)
    dtype = plain_dtype(epilogue)
    if dtype is not None:
        return gemm_p, [True, True, *kept], {"out_dtype": dtype, **params}
    return gemm_fused_p, [True] * (1 + epilogue.products) + kept, {"epilogue": epilogue, "save": save, **params}


gemm_fused_p = define(
    "cutjax_gemm_fused",
    abstract=_abstract,
    reference=_reference,
    choose=_choose,
    launch=sm90.launch,
    batch=_batch,
    jvp=_jvp,
    drop=_drop,
    multiple_results=True,
)
