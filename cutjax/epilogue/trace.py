"""From a JAX function of accumulators and operands to an Epilogue: a jaxpr, steps (flatten.py), nodes (build.py)."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util

from cutjax.binding.rules import lying_as
from cutjax.epilogue.build import Builder
from cutjax.epilogue.expression import Epilogue
from cutjax.epilogue.flatten import TILE, Flat, aval_of, refuse_effects
from cutjax.epilogue.jaxpr import any_equation, evaluate, names_of_results, reverse_only

# No line of this package is the user's.
source_info_util.register_exclusion(os.path.dirname(os.path.dirname(__file__)) + os.sep)


class Traced(NamedTuple):
    """A traced function.

    Attributes:
      epilogue: the expression.
      operands: its operands, one array for each ``epilogue.operands``, of the result's rank, each axis of full size
        where its spec varies and 1 elsewhere; one of groups is ``[..., groups, 1, n or 1]``. The caller's, and what the
        function captured or computed of these alone, ready to be differentiated. What the function does not use is not
        among them.
      finish: from what ``epilogue.apply`` (or a kernel) returns to what the function returns.
      outside: the function as JAX has it, where its derivative is not the epilogue's; else None.
      names: whether ``finish`` gives results the names of ``checkpoint_name``.
    """

    epilogue: Epilogue
    operands: tuple[jax.Array, ...]
    finish: Callable[[Sequence[jax.Array]], Any]
    outside: Outside | None = None
    names: bool = False


class Outside(NamedTuple):
    """A function that is differentiated as JAX does it: a rule in it is no elementwise function, or a name is within.

    Attributes:
      function: ``(accs, leaves)``, what the traced function returns; the leaves are ``leaves``, or what replaces them.
      leaves: the leaves of its operands, and what it captured.
      groups: of each leaf, whether it is an operand of groups, of which ``function`` takes what the rows have.
      reverse_only: whether the derivative exists in reverse mode alone, as with custom_vjp.
      why: what is not elementwise or has a name, and where.
    """

    function: Callable[[Sequence[Any], Sequence[Any]], Any]
    leaves: tuple[Any, ...]
    groups: tuple[bool, ...]
    reverse_only: bool
    why: str


def trace(
    fn: Callable[..., Any],
    accs: Sequence[Any],
    operands: Sequence[Any] = (),
    groups: int | None = None,
    refusing: bool = False,
    rows: int = 1,
    what: str = "epilogue",
) -> Traced:
    """Traces ``fn(*accs, *operands)`` once.

    Args:
      fn: the function.
      accs: abstract accumulators (``jax.ShapeDtypeStruct`` or arrays), ``[..., m, n]``, all of one shape and dtype.
      operands: arrays, or pytrees of them.
      groups: of a grouped GEMM, the number of groups. An operand with one axis more than the result is then one of
        groups, ``[..., groups, 1, n or 1]``, and the function sees what each row has of it: ``[..., m, n or 1]``.
      rows: how many axes before the last are rows of the product, over which the function may reduce.
      what: what the function is to its user, an epilogue or a prologue.
      refusing: whether a derivative that is no elementwise function is refused when it is taken, not taken outside.

    Raises:
      TypeError: if the function takes another number of arguments, or computes in a dtype that no kernel has.
      ValueError: if a result is neither ``[..., m, n]`` nor made of reductions.
      NotImplementedError: if it does to an accumulator what is not elementwise, or has side effects.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    of = "accumulator" if what == "epilogue" else "array"
    try:
        inspect.signature(fn).bind(*accs, *operands)
    except TypeError as error:
        raise TypeError(
            f"{what}: {name} is called with {len(accs)} {of}(s) and {len(operands)} operand(s): {error}"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    shape = tuple(accs[0].shape)
    leaves, structure = jax.tree.flatten(tuple(operands))
    grouped = [groups is not None and np.ndim(x) == len(shape) + 1 for x in leaves]
    seen = [_row_aval(x, shape, groups) if each else x for x, each in zip(leaves, grouped, strict=True)]
    operands = jax.tree.unflatten(structure, seen)
    try:
        # A new function each time: jax caches traces by function, but what a function captures may change.
        closed, shapes = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*accs, *operands)
    except Exception as error:
        types = ", ".join(f"{x.dtype}{list(x.shape)}" for x in map(aval_of, jax.tree.leaves((accs, operands))))
        error.add_note(f"while tracing the {what} {name} with {len(accs)} {of}(s), then operands: {types}")
        raise
    refuse_effects(closed.jaxpr)
    names, named = names_of_results(closed.jaxpr)
    flat = Flat(shape, refusing, named)
    accumulators = [flat.add_value(x.shape, x.dtype, TILE) for x in accs]
    inputs = [flat.add_outside(x, aval_of(y), bake=False) for x, y in zip(leaves, seen, strict=True)]
    consts = [flat.add_outside(c, aval_of(c)) for c in closed.consts]
    group_inputs = frozenset(i for i, each in zip(inputs, grouped, strict=True) if each)
    flat.group_values.update(group_inputs)
    outs = flat.inline(closed.jaxpr, consts, [*accumulators, *inputs])
    tree = jax.tree.structure(shapes)
    epilogue, arrays, finish = Builder(flat, len(accs), outs, tree, name, group_inputs, rows).build()
    traced = Traced(epilogue, arrays, _naming(finish, names) if named else finish, names=bool(named))
    if any(over is not None for x in closed.out_avals for over in x.sharding.spec):
        traced = traced._replace(finish=functools.partial(_lying, traced.finish, tree.unflatten(closed.out_avals)))
    if not flat.irregular:
        return traced

    def function(accs: Sequence[Any], leaves: Sequence[Any]) -> Any:
        given, captured = leaves[: len(seen)], leaves[len(seen) :]
        return tree.unflatten(evaluate(closed.jaxpr, captured, (*accs, *given)))

    captured = tuple(closed.consts)
    leaf_of_groups = (*grouped, *(False for _ in captured))
    why = "; ".join(dict.fromkeys(flat.irregular))
    return traced._replace(
        outside=Outside(
            function, (*leaves, *captured), leaf_of_groups, any_equation(closed.jaxpr.eqns, reverse_only), why
        )
    )


def _naming(finish: Callable[..., Any], names: Sequence[Sequence[str]]) -> Callable[[Sequence[jax.Array]], Any]:
    """Returns ``finish``, whose results bear names."""

    def finished(results: Sequence[jax.Array]) -> Any:
        leaves, tree = jax.tree.flatten(finish(results))
        return tree.unflatten(functools.reduce(checkpoint_name, n, x) for n, x in zip(names, leaves, strict=True))

    return finished


def _lying(finish: Callable[[Sequence[Any]], Any], avals: Any, outs: Sequence[Any]) -> Any:
    """Returns the results, each where the function's lies on explicit mesh axes: an operand's may divide it further."""
    return jax.tree.map(lying_as, finish(outs), avals)


def _row_aval(x: Any, shape: tuple[int, ...], groups: int | None) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an operand of groups when it is spread to the rows of the result."""
    aval = jax.typeof(jnp.asarray(x))
    *batch, g, one, n = aval.shape
    fits = all(size in (1, full) for size, full in zip((*batch, n), (*shape[:-2], shape[-1]), strict=True))
    if (g, one) != (groups, 1) or not fits:
        raise ValueError(
            f"epilogue: an operand is {aval.str_short()}, one axis more than the product {shape}, so it is one of "
            f"groups: expected {(*shape[:-2], groups, 1, shape[-1])}, where all but the {groups} groups may be 1"
        )
    spec = [*aval.sharding.spec[:-3], None, aval.sharding.spec[-1]]
    aval = aval.update(shape=(*batch, shape[-2], n), sharding=aval.sharding.update(spec=jax.P(*spec)))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.mat)
