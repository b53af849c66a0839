"""A network of small layers as one primitive: a program that is local to rows, whose derivatives are such programs.

Arrays have one axis in front, of networks: rows ``[networks, rows, width]``, matrices ``[networks, k, n]``, vectors
``[networks, n]``; 1 is for all.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding import lowering
from cutjax.binding.define import define
from cutjax.binding.lowering import Target
from cutjax.binding.partition import Rules, mark_of
from cutjax.binding.placement import Labels, Placement, Rule
from cutjax.binding.rules import any_divided, is_linear, is_zero, match_varying, zero_tangent
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import ACC
from cutjax.kernels.device import device_of
from cutjax.kernels.network import derivative
from cutjax.kernels.network.choose import choose
from cutjax.kernels.network.kernel import Kernel
from cutjax.kernels.network.problem import Problem
from cutjax.kernels.network.program import Affine, Map, Outer, Program
from cutjax.primitives import product as products
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors
from cutjax.runtime.architectures import number
from cutjax.runtime.choice import Choice

# Under "auto" (benchmarks/results/experiments/networks-h200.json): the widest layers by dtype, those up to which all
# derivatives were faster, and the fewest rows.
WIDEST, ALWAYS = {"bfloat16": 128}, 64
LEAST_ROWS = 1 << 14
UNROLLED = 4  # tangents, or cotangents, of the same rows that one kernel propagates side by side; of more, rows repeat


def bind(
    program: Program,
    *arrays: jax.Array,
    dtypes: Sequence[Any],
    dtype: np.dtype,
    precision: Canonical,
    backend: str,
) -> list[jax.Array]:
    """Binds the primitive, or computes its products one by one where "auto" takes no kernels.

    Args:
      program: what is computed.
      arrays: its inputs.
      dtypes: of the results.
      dtype: to which rows are rounded before they are multiplied, that of the matrices.
      precision: of the products.
      backend: "cuda" for the kernels, "xla" for products of cutjax, "auto" for what was measured to be faster.
    """
    given = match_varying(*arrays)
    named = tuple(np.dtype(x).name for x in dtypes)
    params: dict[str, Any] = {"dtypes": named, "dtype": dtype, "precision": precision, "backend": backend}
    # Of what vmap maps over explicit mesh axes, products alone say how it lies.
    by_kernels = backend == "cuda" or (backend == "auto" and _wins(*given, program=program, **params))
    if not by_kernels or any_divided(*given):
        return _reference(*given, program=program, **params)
    return network_p.bind(*given, program=program, **params, mark=mark_of(backend))


def _wins(*arrays: jax.Array, program: Program, dtype: np.dtype, **params: Any) -> bool:
    """True if kernels were measured to be faster than products.

    Of layers wider than `ALWAYS` some kernels add up weights' gradients in memory, which took longer than plain JAX: a
    derivative that would have such a kernel is computed by products, from the layers that they compute again.
    """
    widest = max(x for kind in program.kinds for x in kind.sizes)
    rows = next(math.prod(x.shape[:2]) for x, kind in zip(arrays, program.inputs, strict=True) if kind.name == "rows")
    if not lowering.for_cuda() or widest > WIDEST.get(dtype.name, 0) or rows < LEAST_ROWS:
        return False
    if widest <= ALWAYS:
        return True
    choice = _choose(*arrays, program=program, dtype=dtype, target=lowering.target(), **params)
    if choice.resolved is None or number(choice.problem.arch) != 90:
        return False
    return choice.resolved.config.wgmma or not program.sums


def _abstract(*avals: Any, program: Program, dtypes: tuple[str, ...], **_: Any) -> list[Any]:
    networks = max(x.shape[0] for x in avals)
    rows = next(x for x, kind in zip(avals, program.inputs, strict=True) if kind.name == "rows")
    found = []
    for x, name in zip(program.outputs, dtypes, strict=True):
        kind = program.kinds[x]
        shape = (networks, *(rows.shape[1:2] if kind.name == "rows" else ()), *kind.sizes)
        sharding = rows.sharding.update(spec=jax.P(*[None] * len(shape)))
        found.append(rows.update(shape=shape, dtype=np.dtype(name), weak_type=False, sharding=sharding))
    return found


def _reference(
    *arrays: jax.Array,
    program: Program,
    dtypes: tuple[str, ...],
    dtype: np.dtype,
    precision: Canonical,
    backend: str,
    on_cuda: bool = False,
) -> list[jax.Array]:
    """Computes the program by products of cutjax, each with the function that alone reads it as its epilogue."""
    params: dict[str, Any] = {"precision": precision, "backend": "xla" if backend == "xla" else "auto"}
    readers = collections.Counter(x for step in program.steps for x in step.reads) + collections.Counter(
        program.outputs
    )
    multiplied = {t.rows for step in program.steps if isinstance(step, Affine) for t in step.terms}
    multiplied |= {x for step in program.steps if isinstance(step, Outer) for pair in step.pairs for x in pair}
    mapped = {x for step in program.steps if isinstance(step, Map) for x in step.values}
    values: list[Any] = list(arrays)

    def operand(x: int) -> jax.Array:
        return values[x].astype(dtype)

    def layout(transposed: bool) -> Dense:
        return Dense("nt" if transposed else "nn")

    def sum_of(step: Affine) -> jax.Array:
        found = [products.multiply(layout(t), operand(x), values[w], out_dtype=ACC, **params) for x, w, t in step.terms]
        found += [values[x][:, None].astype(ACC) for x in step.vectors]
        return _sum(found, rows)

    rows = next(x.shape[1] for x, kind in zip(arrays, program.inputs, strict=True) if kind.name == "rows")
    affine: dict[int, Affine] = {}  # what waits for the function that alone reads it
    for step, results in program.numbered:
        if isinstance(step, Affine):
            alone = len(step.terms) == 1 and readers[results[0]] == 1 and results[0] in mapped
            if alone:
                affine[results[0]] = step
            values.append(None if alone else sum_of(step))
        elif isinstance(step, Map):
            at = step.values[0]
            if len(step.values) == 1 and at in affine:
                (x, w, t), bias = affine[at].terms[0], [values[v][:, None] for v in affine[at].vectors]
                # A result that is only multiplied is written in the dtype in which it is.
                outs = tuple(dtype if i in multiplied and i not in mapped else ACC for i in results)

                def finished(acc: jax.Array, *bias: jax.Array, step: Map = step) -> Any:
                    return step.function.apply([_sum([acc, *(b.astype(acc.dtype) for b in bias)])])

                networks = max(y.shape[0] for y in (values[x], values[w], *bias))
                taken = operand(x)
                if taken.shape[0] < networks > values[w].shape[0]:  # only biases are many
                    taken = jnp.broadcast_to(taken, (networks, *taken.shape[1:]))
                factors = Factors(taken, [values[w]])
                values += products.call(layout(t), finished, factors, bias, out_dtype=outs, **params)
            else:
                for i in step.values:
                    if values[i] is None:
                        values[i] = sum_of(affine[i])
                shape = lax.broadcast_shapes(*(values[i].shape for i in step.values))
                taken = [jnp.broadcast_to(values[i].astype(ACC), shape) for i in step.values]
                values += step.function.apply(taken)
        elif isinstance(step, Outer):
            tn = Dense("tn")
            made = [products.multiply(tn, operand(a), operand(b), out_dtype=ACC, **params) for a, b in step.pairs]
            values.append(_sum(made))
        else:
            values.append(_sum([values[x].astype(ACC).sum(1) for x in step.values]))
    networks = max(x.shape[0] for x in arrays)
    found = [values[x].astype(name) for x, name in zip(program.outputs, dtypes, strict=True)]
    return [jnp.broadcast_to(x, (networks, *x.shape[1:])) for x in found]


def _sum(xs: Sequence[jax.Array], rows: Any = None) -> jax.Array:
    """Returns the sum of arrays that broadcast, of so many rows where all are vectors."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    if rows is not None and total.shape[1] != rows:
        total = jnp.broadcast_to(total, (total.shape[0], rows, *total.shape[2:]))
    return total


def _choose(
    *avals: Any,
    program: Program,
    dtypes: tuple[str, ...],
    dtype: np.dtype,
    precision: Canonical,
    target: Target,
    **_: Any,
) -> Choice[Problem, Kernel]:
    rows = next(x.shape[1] for x, kind in zip(avals, program.inputs, strict=True) if kind.name == "rows")
    networks = max(x.shape[0] for x in avals)
    given = tuple((np.dtype(x.dtype).name, x.shape[0] > 1) for x in avals)
    problem = Problem(program.primal, rows, networks, given, dtypes, dtype, precision, device_of(target))
    return choose(problem)


# Derivatives.


def _jvp(primals: Any, tangents: Any, program: Program, **params: Any) -> tuple[list[jax.Array], list[Any]]:
    moving = tuple(not is_zero(dot) for dot in tangents)
    outs = bind(program, *primals, **params)
    linear, found = derivative.tangents(program, moving)
    dtypes = [name for name, each in zip(params["dtypes"], found, strict=True) if each]
    moved = [dot for dot, moves in zip(tangents, moving, strict=True) if moves]
    dots = iter(bind(linear, *primals, *moved, **{**params, "dtypes": dtypes}) if dtypes else [])
    return outs, [next(dots) if each else zero_tangent(out) for out, each in zip(outs, found, strict=True)]


def _transpose(gs: Sequence[Any], *args: Any, program: Program, **params: Any) -> list[Any]:
    linear, given = tuple(map(is_linear, args)), tuple(not is_zero(g) for g in gs)
    found: list[Any] = [None] * len(args)
    if not any(given):
        return found
    pulled, made = derivative.cotangents(program, linear, given)
    wanted = [i for i, each in enumerate(linear) if each]
    wanted = [i for i, each in zip(wanted, made, strict=True) if each]
    arrays = [x for x, each in zip(args, linear, strict=True) if not each]
    arrays += [g for g, each in zip(gs, given, strict=True) if each]
    if not wanted:
        return found
    outs = bind(pulled, *arrays, **{**params, "dtypes": [args[i].aval.dtype for i in wanted]})
    for i, x in zip(wanted, outs, strict=True):
        shared = args[i].aval.shape[0] == 1 != x.shape[0]  # one for all networks
        found[i] = x.sum(0, keepdims=True, dtype=x.dtype) if shared else x
    return found


def _dce(used: Sequence[bool], program: Program, dtypes: tuple[str, ...], **params: Any) -> tuple[list[bool], Any]:
    less, reading = derivative.kept(program, used)
    dtypes = tuple(name for name, use in zip(dtypes, used, strict=True) if use)
    return list(reading), {"program": less, "dtypes": dtypes, **params}


# Batches.


def _batch(args: Any, dims: Any, program: Program, **params: Any) -> tuple[list[jax.Array], list[int]]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    args = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]
    mapped = [dim is not None for dim in dims]
    of_rows = [kind.name == "rows" for kind in program.inputs]
    if all(rows for rows, each in zip(of_rows, mapped, strict=True) if each):
        some = any(rows and not each for rows, each in zip(of_rows, mapped, strict=True))
        if some and size <= UNROLLED and size > 0:
            return _unrolled(args, mapped, size, program, params)
        if not program.sums:
            return _as_rows(args, mapped, size, program, params)
    return _as_networks(args, mapped, size, program, params)


def _unrolled(args: Any, mapped: Any, size: int, program: Program, params: Any) -> tuple[list[jax.Array], list[int]]:
    """Binds what does not depend on the batch once: tangents of the same rows, side by side."""
    whole, counts = derivative.unrolled(program, mapped, size)
    given = [x for arg, each in zip(args, mapped, strict=True) for x in (list(arg) if each else [arg])]
    dtypes = [name for name, count in zip(params["dtypes"], counts, strict=True) for _ in range(count)]
    outs = iter(bind(whole, *given, **{**params, "dtypes": dtypes}))
    found = [[next(outs) for _ in range(count)] for count in counts]
    return [jnp.stack(xs * (size // len(xs))) for xs in found], [0] * len(found)


def _as_rows(args: Any, mapped: Any, size: int, program: Program, params: Any) -> tuple[list[jax.Array], list[int]]:
    """Binds the program of all batches' rows: no result is a sum over rows."""
    given = []
    for x, each, kind in zip(args, mapped, program.inputs, strict=True):
        if kind.name == "rows":
            x = x if each else jnp.broadcast_to(x, (size, *x.shape))
            x = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], size * x.shape[2], x.shape[3])
        given.append(x)
    outs = bind(program, *given, **params)
    return [x.reshape(x.shape[0], size, x.shape[1] // max(size, 1), *x.shape[2:]) for x in outs], [1] * len(outs)


def _as_networks(args: Any, mapped: Any, size: int, program: Program, params: Any) -> tuple[list[jax.Array], list[int]]:
    """Binds as many times the networks; what is for all of them stays so."""
    networks = max(x.shape[int(each)] for x, each in zip(args, mapped, strict=True))
    given = []
    for x, each in zip(args, mapped, strict=True):
        own = x.shape[1:] if each else x.shape
        if each or own[0] > 1:
            x = jnp.broadcast_to(x if each else x[None], (size, networks, *own[1:]))
            x = x.reshape(size * networks, *own[1:])
        given.append(x)
    outs = bind(program, *given, **params)
    return [x.reshape(size, networks, *x.shape[1:]) for x in outs], [0] * len(outs)


# Devices.


def _labels(shapes: Sequence[Any], kinds: Sequence[Any]) -> list[Labels]:
    found = []
    for shape, kind in zip(shapes, kinds, strict=True):
        own: Labels = ("m", None) if kind.name == "rows" else (None,) * len(kind.sizes)
        found.append(("g" if shape[0] > 1 else None, *own))
    return found


def _rule(*avals: Any, program: Program, **_: Any) -> Rule:
    networks = max(x.shape[0] for x in avals)
    kinds = [program.kinds[x] for x in program.outputs]
    operands = _labels([x.shape for x in avals], program.inputs)
    return Rule(tuple(operands), tuple(_labels([(networks,)] * len(kinds), kinds)), len(avals), ())


def _shard(
    placement: Placement, *shards: jax.Array, avals: Any, program: Program, mark: Any, **params: Any
) -> Sequence[jax.Array]:
    over, dtypes = placement.axes.get("m", ()), params["dtypes"]
    sums = [program.kinds[x].name != "rows" for x in program.outputs]
    if not over or not any(sums):
        return bind(program, *shards, **params)
    wide = [ACC if each else name for each, name in zip(sums, dtypes, strict=True)]
    outs = bind(program, *shards, **{**params, "dtypes": wide})
    summed = [lax.psum(x, over) if each else x for x, each in zip(outs, sums, strict=True)]
    return [x.astype(name) for x, name in zip(summed, dtypes, strict=True)]


def _evaluated(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "program": params["program"].primal}


network_p = define(
    "cutjax_network",
    abstract=_abstract,
    reference=_reference,
    choose=_choose,
    required=False,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    dce=_dce,
    divided=Rules(_rule, _shard),
    evaluated=_evaluated,
    multiple_results=True,
)
