"""Rows scattered by the order of a sort: gathered by its inverse, and added in a fixed order."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from cutjax.fusion.contraction import RAGGED
from cutjax.fusion.integers import Values, is_followed, results
from cutjax.fusion.jaxprs import BODIES, bodies, carried, is_literal, is_marked, opened, variables, with_equations
from cutjax.fusion.narrow import in_place_of
from cutjax.primitives.routing import combined, dispatched, inverse_of
from cutjax.runtime import backends

_SCATTERS = frozenset(["scatter", "scatter-add"])
_GROUPED = frozenset([RAGGED, "cutjax_grouped_gemm", "cutjax_grouped_outer"])
_MOVING = _SCATTERS | {"sort", "gather"}
_CALLS_OF_ONE = "jit pjit closed_call eval_jaxpr core_call checkpoint remat2 scan shard_map"
_FOLLOWED = frozenset(_CALLS_OF_ONE.split())

# Of an array: "all" elements are a number, it "counts" from 0, or each of so many "places" comes equally often.
Fact = tuple[str, int]
Given = tuple[Fact | None, ...]


def moves_rows(jaxpr: Any) -> bool:
    """True if a program sorts, gathers or scatters: such calls are opened where something is sorted."""
    return any(eqn.primitive.name in _MOVING or any(map(moves_rows, bodies(eqn))) for eqn in opened(jaxpr).eqns)


def gathered(jaxpr: Any, given: Given = ()) -> tuple[Any, dict[int, Given]]:
    """Returns a program that gathers where it scattered rows by the order of a sort, and adds what comes to one place.

    Results of experts go back to their tokens so, and JAX's gradient of a gather does: a scatter, which on a GPU adds
    by atomics, in any order, and rounds each time. Where the places are ``order // k`` of a permutation, or ``order %
    places``, each gets the k rows that the inverse says. What is none by what the program itself does stays. Rows that
    are gathered so for products in groups, and nothing else, are dispatched: there is a kernel for that.

    Args:
      jaxpr: the program.
      given: what is known of its arguments; () where that is nothing.

    Returns:
      The program, and what is so known of the arguments of programs inside, by their ids.
    """
    if not any(given) and not sorts(jaxpr):
        return jaxpr, unknown(jaxpr)
    follower = _Follower(opened(jaxpr), given, replaces=not _is_divided())
    eqns = [made for eqn in opened(jaxpr).eqns for made in follower.follow(eqn)]
    return (with_equations(jaxpr, eqns) if follower.changed else jaxpr), unknown(jaxpr) | follower.inside


def unknown(jaxpr: Any) -> dict[int, Given]:
    """Returns that nothing is known of the arguments of programs inside."""
    return {id(body): () for eqn in opened(jaxpr).eqns for body in bodies(eqn)}


def _is_divided() -> bool:
    """True where XLA divides arrays over a mesh: of rows elsewhere it makes a sum over devices for each gather."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind != AxisType.Manual and mesh.shape[name] > 1 for name, kind in kinds)


def sorts(jaxpr: Any) -> bool:
    """True if there is a sort in a program, however deep."""
    return any(eqn.primitive.name == "sort" or any(map(sorts, bodies(eqn))) for eqn in opened(jaxpr).eqns)


class _Sorted(NamedTuple):
    """A permutation that no variable has: the inverse of the one that sorts a variable."""

    of: Any


class _Follower:
    """The values of integers in a program, as far as they follow from iotas and the orders of sorts.

    Attributes:
      inside: what is known of the arguments of programs inside, by their ids.
      changed: whether an equation has been replaced.
    """

    def __init__(self, jaxpr: Any, given: Given, replaces: bool) -> None:
        readers: dict[bool, set[Any]] = {True: set(), False: {x for x in jaxpr.outvars if not is_literal(x)}}
        for eqn in jaxpr.eqns:
            readers[eqn.primitive.name in _GROUPED].update(variables(eqn))
        self._multiplied = readers[True] - readers[False]  # by products in groups, and read by nothing else
        self._found: dict[Any, Values] = {}
        self._inverses: dict[Any, Any] = {}  # of permutations, both ways
        self._zeros: set[Any] = set()
        self._parts: dict[Any, tuple[Any, Fact]] = {}  # what each part of an array has that a loop or devices made
        self._replaces = replaces
        self.inside: dict[int, Given] = {}
        self.changed = False
        for x, fact in zip(jaxpr.invars, given, strict=False):
            self._has(x, fact)

    def follow(self, eqn: Any) -> list[Any]:
        """Returns the equations that take the place of the next one of the program."""
        name, out, made = eqn.primitive.name, next(iter(eqn.outvars), None), None
        if name == "sort":
            self._sort(eqn)
        elif name in _SCATTERS and not is_marked(eqn):
            made = self._scattered(eqn)
        elif name == "gather" and not is_marked(eqn):
            made = self._copied(eqn)
        elif name == "broadcast_in_dim" and is_literal(eqn.invars[0]) and not eqn.invars[0].val:
            self._zeros.add(out)
        if made is not None:
            self.changed = True
            return made
        if eqn.outvars and all(is_followed(x.aval) for x in eqn.outvars):
            args = [self._of(x) for x in eqn.invars]
            values = () if None in args else results(eqn, [x for x in args if x is not None])
            for x, found in zip(eqn.outvars, values, strict=False):
                self._found.setdefault(x, found)
        if name in BODIES:
            self._call(eqn)
        return [eqn]

    def known(self, x: Any) -> Fact | None:
        """Returns the fact about an array that a program inside is told."""
        found = self._of(x)
        if found is None:
            return None
        if found.order is None:
            one = ("all", int(found.values.reshape(-1)[0])) if found.values.size == 1 else None
            return ("counts", x.aval.size) if _counts(found.values, x) else one
        values = found.values.astype(np.int64)
        if x.aval.dtype.kind == "b" or values.size == 0 or values.min() < 0 or values.max() >= values.size:
            return None
        counts = np.bincount(values)
        return ("places", counts.size) if counts.min() == counts.max() else None

    def _has(self, x: Any, fact: Fact | None) -> None:
        """Notes a fact about an array."""
        if fact is None or x.aval.size == 0:
            return
        (kind, number), dtype, count = fact, x.aval.dtype, x.aval.size
        if kind == "all":
            self._found[x] = Values(np.asarray(number).astype(dtype))
        elif kind == "counts":
            self._found[x] = Values(np.arange(count, dtype=dtype))
        else:
            order = x if number == count else _Sorted(x)
            self._found[x] = Values(np.arange(count, dtype=dtype) // (count // number), order)

    def _call(self, eqn: Any) -> None:
        """Follows the program of a call, of a loop's step or of each device."""
        found, params, kind = bodies(eqn), eqn.params, eqn.primitive.name
        if kind not in _FOLLOWED or len(found) != 1 or len(opened(found[0]).invars) != len(eqn.invars):
            self.inside |= dict.fromkeys(map(id, found), ())
            return
        (body,), whole, kept = found, len(eqn.invars), len(eqn.outvars)
        tags_in: list[Any] = [None] * whole
        tags_out: list[Any] = [None] * kept
        if kind == "scan":
            first = carried(eqn, "jaxpr")
            whole, kept = first.count(False), 0
            tags_in[len(first) :] = [kind] * (len(eqn.invars) - len(first))
            tags_out[len(first) - whole :] = [kind] * (len(eqn.outvars) - len(first) + whole)
        elif kind == "shard_map":
            whole = kept = 0
            tags_in, tags_out = ([(params["mesh"], x) for x in params[name]] for name in ("in_specs", "out_specs"))
        given: list[Fact | None] = []
        for i, (x, tag) in enumerate(zip(eqn.invars, tags_in, strict=True)):
            part = (None, None) if is_literal(x) else self._parts.get(x, (None, None))
            given.append(self.known(x) if i < whole else part[1] if tag is not None and part[0] == tag else None)
        known = tuple(given) if any(given) else ()
        self.inside[id(body)] = () if self.inside.get(id(body), known) != known else known
        if not known and not sorts(body):
            return
        follower = _Follower(opened(body), known, replaces=False)
        for inner in opened(body).eqns:
            follower.follow(inner)
        for i, (x, out, tag) in enumerate(zip(opened(body).outvars, eqn.outvars, tags_out, strict=True)):
            fact = follower.known(x)
            if i < kept and out not in self._found:
                self._has(out, fact)
            elif tag is not None and fact is not None:
                self._parts[out] = tag, fact

    def _of(self, x: Any) -> Values | None:
        if is_literal(x):
            return Values(np.asarray(x.val, x.aval.dtype)) if is_followed(x.aval) else None
        return self._found.get(x)

    def _sort(self, eqn: Any) -> None:
        """Follows a sort of keys with an iota, which becomes a permutation: of a permutation its inverse."""
        count, inverse = eqn.params["num_keys"], None
        if count == 1 and (key := self._of(eqn.invars[0])) is not None and not isinstance(key.order, _Sorted):
            inverse = key.order if _counts(key.values, eqn.invars[0]) else None
        for x, out in zip(eqn.invars[count:], eqn.outvars[count:], strict=True):
            values = self._of(x)
            if out.aval.ndim == 1 and values is not None and values.order is None and _counts(values.values, x):
                self._permutes(out, inverse)

    def _permutes(self, out: Any, inverse: Any) -> None:
        self._has(out, ("places", out.aval.size))
        if inverse is not None:
            self._inverses[out], self._inverses[inverse] = inverse, out

    def _scattered(self, eqn: Any) -> list[Any] | None:
        """Returns the equations of gathers in the place of a scatter; None where it stays."""
        (operand, indices, updates), (out,) = eqn.invars, eqn.outvars
        places, *window = out.aval.shape or (0,)
        index = self._index(indices, places)
        if index is None or not _is_of_rows(eqn) or is_literal(updates) or updates.aval.dtype != out.aval.dtype:
            return None
        if eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None:  # x.at[...].apply
            return None
        adds, given, (order, each, turned) = eqn.primitive.name == "scatter-add", self._of(updates), index
        if not adds and given is not None and given.order is None and each == 1 and _counts(given.values, updates):
            self._permutes(out, order)  # a permutation inverted in the usual way
            return None
        if not self._replaces or 0 in window or not (adds or each == 1):
            return None
        to = [operand] if adds and not is_literal(operand) and operand not in self._zeros else []
        arrange = functools.partial(_both, places=places, turned=turned, is_sorted=isinstance(order, _Sorted))

        def function(rows: jax.Array, *given: jax.Array) -> jax.Array:
            pairs, back = arrange(*given[len(to) :])
            found = combined(rows.reshape(pairs.size, math.prod(window)), pairs, back).reshape(places, *window)
            return lax.add(given[0], found) if to else found

        return in_place_of(eqn, function, [updates, *to, *self._orders(order)])

    def _copied(self, eqn: Any) -> list[Any] | None:
        """Returns the equations of a copy of rows that products in groups read; None where it is none."""
        (x, indices), (out,), dims = eqn.invars, eqn.outvars, eqn.params["dimension_numbers"]
        if (
            not self._replaces
            or out not in self._multiplied
            or is_literal(x)
            or x.aval.ndim != 2
            or indices.aval.ndim != 2
        ):
            return None
        index = self._index(indices, x.aval.shape[0])
        rows = dims.offset_dims == (1,) and dims.collapsed_slice_dims == dims.start_index_map == (0,)
        if index is None or not rows or out.aval.shape != (indices.aval.shape[0], x.aval.shape[1]):
            return None
        order, _, turned = index
        if isinstance(order, _Sorted):  # a sort would take what a copy saves
            return None

        def function(x: jax.Array, *given: jax.Array) -> jax.Array:
            return dispatched(x, *_both(*given, places=x.shape[0], turned=turned), backends.resolve(None, "dispatch"))

        return in_place_of(eqn, function, [x, *self._orders(order)])

    def _index(self, x: Any, places: int) -> tuple[Any, int, bool] | None:
        """Returns the permutation by which indices have each place equally often, how often, and whether in turns."""
        index = self._of(x)
        if index is None or index.order is None:
            return None
        each, rest = divmod(index.values.size, max(1, places))
        numbers = np.arange(each * places)
        if rest or not each:
            return None
        if np.array_equal(index.values, numbers // each):
            return index.order, each, False
        return (index.order, each, True) if np.array_equal(index.values, numbers % places) else None

    def _orders(self, order: Any) -> list[Any]:
        """The variables that a permutation is made of, and of its inverse where the program has it by now."""
        if isinstance(order, _Sorted):
            return [order.of]
        return [order, self._inverses[order]] if order in self._inverses else [order]


def _both(
    order: jax.Array, *inverse: jax.Array, places: int, turned: bool, is_sorted: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns for each row its pair, as a routing has them, and for each place its rows.

    Args:
      order: a permutation; or what the inverse of one sorts.
      *inverse: of the permutation, if there is one.
      places: how many there are.
      turned: whether the permutation makes places in turns, and not by division.
      is_sorted: whether the order is what is to be sorted.
    """
    pairs = order.reshape(-1).astype(jnp.int32)  # a short dtype may not hold their number
    if is_sorted:
        back = jnp.argsort(pairs)
        pairs = inverse_of(back)
    else:
        back = inverse[0].reshape(-1).astype(jnp.int32) if inverse else inverse_of(pairs)
    each = pairs.size // places
    if turned:
        return pairs % places * each + pairs // places, back.reshape(each, places).T
    return pairs, back.reshape(places, each)


def _counts(values: np.ndarray, x: Any) -> bool:
    """True if the values of all elements of a variable are those of an iota."""
    return np.array_equal(values.reshape(-1), np.arange(x.aval.size))


def _is_of_rows(eqn: Any) -> bool:
    """True of a scatter of whole rows of the first axis, each at an index of its own."""
    operand, indices, updates = (x.aval for x in eqn.invars)
    dims, window = eqn.params["dimension_numbers"], operand.shape[1:]
    if indices.shape[-1:] != (1,) or updates.shape != (*indices.shape[:-1], *window) or dims.operand_batching_dims:
        return False
    first = dims.inserted_window_dims == dims.scatter_dims_to_operand_dims == (0,)
    return first and dims.update_window_dims == tuple(range(indices.ndim - 1, updates.ndim))
