"""The walk over a program: every product in it, however deep in jit, scan, cond, custom rules or shard_map."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from cutjax.binding import lowering, rules

_annotations: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def annotate(jaxpr: Any, notes: tuple[Any, ...]) -> None:
    """Attaches notes to the program of a call, for ``explain`` to show."""
    _annotations[jaxpr] = notes


class Found(NamedTuple):
    """One product of a program.

    Attributes:
      eqn: its equation.
      count: how often it runs in one call.
      exact: False inside a while_loop or a cond, where ``count`` is of one iteration or of every branch.
      divided: whether XLA's partitioner divides the program there over several devices, and not the product.
      shard: of a product that is divided, what ``eqn`` is: the part of one device, and what moves between devices.
    """

    eqn: Any
    count: int
    exact: bool
    divided: bool
    shard: str = ""

    @property
    def avals(self) -> list[Any]:
        """The avals of its operands."""
        return [x.aval for x in self.eqn.invars]


def products(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    platform: str,
    notes: list[Any] | None = None,
) -> tuple[list[Found], str]:
    """Returns the products that jit would lower for a platform, those that nothing uses left out, in their order.

    And the platform that this process computes on.

    Args:
      fn: any function that ``jax.jit`` takes, jitted or not; it is traced, not run.
      args, kwargs: arrays or ``jax.ShapeDtypeStruct``; keyword arguments without any are handed on as they are, but
        to a function that is jitted, which says itself what is static.
      platform: "cuda", "cpu", ...; "" is this process's.
      notes: gets what was noted of the programs that it calls (`annotate`).
    """
    here = "cuda" if lowering.on_cuda() else jax.default_backend()
    where = platform or here
    jitted: Any = fn
    if not hasattr(fn, "trace"):
        jitted, args, kwargs = _of_arrays(fn, args, kwargs)
    traced = jitted.trace(*args, **kwargs)
    if notes is not None:
        notes += _notes(traced.jaxpr)
    divided = lowering.device_count(traced, (where, here)) > 1
    found = list(_walk(rules.live(opened(traced.jaxpr)), where, 1, True, divided))
    return list(_sharded(traced, found, where)), where


def within(jaxpr: Any) -> Iterator[Found]:
    """Yields the products of a program, as for CUDA on one device."""
    return _walk(opened(jaxpr), "cuda", 1, True, False)


def _of_arrays(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Returns a function of the arrays among some arguments, jitted, and these; all else stays as it is."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    places = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]

    def call(*arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
        return fn(*args, **kwargs)

    return jax.jit(call), [leaves[i] for i in places], {}


def _sharded(traced: Any, found: Sequence[Found], platform: str) -> Iterator[Found]:
    """Yields the products, each that is divided over devices replaced by its shards."""
    if not any(map(_divisible, found)):
        yield from found
        return
    try:
        seen = lowering.shards(traced)
    except Exception:  # what this process cannot compile: a program for other devices
        why = "of the whole product: a shard's is chosen when the program is compiled"
        yield from (x._replace(divided=False, shard=why) if _divisible(x) else x for x in found)
        return
    shards: dict[Any, dict[str, list[Found]]] = {}
    for x in seen:
        inside = list(_walk(rules.live(opened(x.jaxpr)), platform, 1, True, False))
        text = "; ".join(["a shard", *x.gathers, *_collectives(opened(x.jaxpr))])
        shards.setdefault(_key(x.primitive, x.avals, x.params), {})[f"{text} {x.jaxpr}"] = [
            y._replace(shard=text) for y in inside
        ]
    for x in found:
        several = shards.get(_key(x.eqn.primitive, x.avals, x.eqn.params), {}) if _divisible(x) else {}
        if not several:
            yield x
        for inside in several.values():  # one, unless equal products lie differently: then it is any of them
            exact = x.exact and len(several) == 1
            yield from (y._replace(count=x.count * y.count, exact=exact) for y in inside)


def _divisible(x: Found) -> bool:
    return x.divided and x.eqn.primitive in lowering.partitions and x.eqn.params["mark"] is not None


def _key(primitive: core.Primitive, avals: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Returns a key that is equal for products that are lowered alike."""
    return primitive, tuple((x.shape, x.dtype) for x in avals), tuple(sorted(params.items()))


def _collectives(jaxpr: Any) -> Iterator[str]:
    """Yields a sentence for each collective of a program: the operation, the dtype and the mesh axes."""
    for eqn in jaxpr.eqns:
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        if axes is not None and eqn.primitive.name != "axis_index":
            axes = axes if isinstance(axes, tuple) else (axes,)
            yield f"{eqn.primitive.name} of {eqn.invars[0].aval.dtype} over {', '.join(map(str, axes))}"
        for sub in core.jaxprs_in_params(eqn.params):
            yield from _collectives(sub)


def _notes(jaxpr: Any) -> Iterator[Any]:
    """Yields the notes that were attached to a program and to those that it calls."""
    yield from _annotations.get(jaxpr, ())
    for eqn in opened(jaxpr).eqns:
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                if hasattr(sub, "eqns"):
                    yield from _notes(sub)


def _walk(jaxpr: core.Jaxpr, platform: str, count: int, exact: bool, divided: bool) -> Iterator[Found]:
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        inner = divided
        composed = eqn.primitive in lowering.choosers and _composed(eqn, divided)
        if eqn.primitive in lowering.choosers and (not composed or eqn.primitive in lowering.optional):
            yield Found(eqn, count, exact, divided)
        if eqn.primitive in lowering.choosers and not composed:
            continue
        if eqn.primitive in lowering.compositions:
            subs = [_traced(lowering.compositions[eqn.primitive], eqn)]
        elif name == "cond" and params.get("branches_platforms"):  # lax.platform_dependent: one branch is lowered
            places = params["branches_platforms"]
            taken = next(i for i, names in enumerate(places) if names is None or platform in names)
            yield from _walk(opened(params["branches"][taken]), platform, count, exact, divided)
            continue
        else:
            subs = core.jaxprs_in_params(params)
        if name == "shard_map":
            manual = params.get("newly_manual_axes", params.get("manual_axes"))  # renamed after jax 0.10
            inner = lowering.leaves_axes(params["mesh"], manual)
        for sub in subs:
            times = params["length"] if name == "scan" else 1
            yield from _walk(sub, platform, count * times, exact and name not in ("while", "cond"), inner)


def _composed(eqn: Any, divided: bool) -> bool:
    """True if CUDA has no kernel for a product that is others in disguise then."""
    avals = [x.aval for x in eqn.invars]
    if not lowering.is_apart(eqn.primitive, avals, eqn.params):
        return False
    return lowering.decide(eqn.primitive, avals, eqn.params, platform="cuda", divided=divided).runs == "XLA"


def _traced(function: Callable[..., Any], eqn: Any) -> core.Jaxpr:
    """Returns the program that a primitive is in disguise."""
    avals: list[Any] = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    params = {name: value for name, value in eqn.params.items() if name != "mark"}
    return rules.live(jax.make_jaxpr(functools.partial(function, **params))(*avals).jaxpr)


def opened(jaxpr: Any) -> Any:
    """Returns the jaxpr of a closed one, which after jax 0.10 is the same."""
    return getattr(jaxpr, "jaxpr", jaxpr)
