"""Programs as jaxprs: the parts that are rewritten, new equations put in their place, and what follows from which."""

from __future__ import annotations

import bisect
import collections
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from cutjax.binding.walk import opened
from cutjax.epilogue.flatten import INLINABLE, REDUCTIONS
from cutjax.epilogue.jaxpr import CALLS, is_open, needed_equations, reorders
from cutjax.fusion.policies import AsDotGeneral

# The parameters that hold the programs of an equation. Of a custom rule only what runs without a derivative.
BODIES = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),  # of jax 0.12, in its place
    "core_call": ("call_jaxpr",),
    "checkpoint": ("jaxpr",),
    "remat2": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vjp_call_jaxpr": ("fun_jaxpr",),
    "custom_vmap_call": ("call",),
    "remat_opt": ("fwd_jaxpr",),  # of a custom_vjp with optimize_remat
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "shard_map": ("jaxpr",),
}
# Metadata of which XLA for GPUs makes nothing: tokamax's names of its operations, and tiles for TPUs, as in MaxText.
_LABELS = frozenset(["xla_metadata_payload", "ragged_dot_tiling"])
# Of what XLA computes nothing.
MOVES = frozenset(["reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "name", "stop_gradient"])
# What XLA computes in one pass with what reads or makes it.
_IN_ONE_PASS = frozenset([*REDUCTIONS, "slice", "pad", "rev", "concatenate", "argmax", "argmin", "reduce_and"])


def is_literal(x: Any) -> bool:
    """True if an argument of an equation is a number written there."""
    return isinstance(x, core.Literal)


def variables(eqn: Any) -> list[Any]:
    """Returns the arguments of an equation that are no numbers."""
    return [x for x in eqn.invars if not isinstance(x, core.Literal)]


def renamed(eqn: Any, names: Mapping[Any, Any]) -> Any:
    """Returns an equation that reads other variables for some; itself where it reads none of these."""
    if names.keys().isdisjoint(variables(eqn)):
        return eqn
    return eqn.replace(invars=[x if is_literal(x) else names.get(x, x) for x in eqn.invars])


def makers_and_readers(jaxpr: Any) -> tuple[dict[Any, Any], dict[Any, int]]:
    """Returns the equation of each variable that is the one result of its equation, and how often each is read."""
    makers = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if len(eqn.outvars) == 1}
    reads = (x for x in (*jaxpr.outvars, *(x for eqn in jaxpr.eqns for x in eqn.invars)) if not is_literal(x))
    return makers, collections.Counter(reads)


def with_equations(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any] | None = None) -> Any:
    """Returns a jaxpr, closed or open as it is, with other equations."""
    inner = opened(jaxpr)
    new = inner.replace(eqns=list(eqns), outvars=inner.outvars if outvars is None else list(outvars))
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def new_var(x: Any) -> Any:
    """Returns a new variable like another."""
    return core.Var(x.aval)


def bodies(eqn: Any) -> list[Any]:
    """Returns the programs of an equation that are rewritten with it."""
    found: list[Any] = []
    for name in BODIES.get(eqn.primitive.name, ()):
        value = eqn.params.get(name)
        found += value if isinstance(value, tuple | list) else [] if value is None else [value]
    return found


def with_bodies(eqn: Any, rewrite: Callable[..., Any]) -> Any:
    """Returns an equation with each of its programs rewritten, told which of their arguments are theirs alone."""
    params = dict(eqn.params)
    for name in BODIES.get(eqn.primitive.name, ()):
        value = params.get(name)
        if value is not None:
            one = functools.partial(rewrite, donated=carried(eqn, name))
            params[name] = tuple(map(one, value)) if isinstance(value, tuple | list) else one(value)
    if params.get("policy") is not None:  # of jax.checkpoint
        params["policy"] = AsDotGeneral.of(params["policy"])
    return eqn.replace(params=params)


def carried(eqn: Any, name: str) -> tuple[bool, ...]:
    """Returns, for the first arguments of a loop's body, True if the loop carries them from step to step."""
    params = eqn.params
    if name == "body_jaxpr":
        return (False,) * params["body_nconsts"] + (True,) * len(eqn.outvars)
    if eqn.primitive.name != "scan":
        return ()
    # Counted by what a step does not take, or give, a slice of: the parameters' names differ between versions of jax.
    body = opened(params["jaxpr"])
    whole = [x.aval.shape == y.aval.shape for x, y in zip(eqn.invars, body.invars, strict=True)]
    kept = sum(x.aval.shape == y.aval.shape for x, y in zip(eqn.outvars, body.outvars, strict=True))
    return (False,) * (sum(whole) - kept) + (True,) * kept


def pointwise(eqn: Any) -> bool:
    """True if an equation computes each element of its results from those at the same place, or moves none.

    A barrier is none of these: XLA must see the very value.
    """
    if eqn.effects or is_marked(eqn) or reorders(eqn):
        return False
    name = eqn.primitive.name
    if name in CALLS:
        return name in BODIES and is_open(eqn) and all(map(_pointwise_inside, needed_equations(opened(bodies(eqn)[0]))))
    return name == "name" or (name in INLINABLE and name not in ("optimization_barrier", "transpose"))


def _pointwise_inside(eqn: Any) -> bool:
    return pointwise(eqn) or eqn.primitive.name == "transpose"


def is_marked(eqn: Any) -> bool:
    """True if an equation is to run on another kind of processor, or bears what XLA is told of it."""
    return bool(eqn.ctx.compute_type or not _LABELS.issuperset(eqn.ctx.xla_metadata or ()))


def has_side_effects(eqn: Any) -> bool:
    """True if an equation must run, after those before it that must; one like psum only names a mesh's axis."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def in_one_pass(eqn: Any) -> bool:
    """True if XLA computes an equation in one pass with what it reads, which then need not lie in memory."""
    name = eqn.primitive.name
    if name in _IN_ONE_PASS or name == "transpose" or reorders(eqn) or pointwise(eqn):
        return True
    return name in ("jit", "pjit") and all(in_one_pass(inner) for inner in opened(eqn.params["jaxpr"]).eqns)


@functools.lru_cache(maxsize=4096)
def full_size(aval: Any) -> int:
    """Returns the number of elements."""
    return math.prod(aval.shape)


def byte_count(x: Any) -> int:
    """Returns the bytes of an array."""
    return full_size(x.aval) * getattr(x.aval.dtype, "itemsize", 4)


class Graph:
    """The equations of a jaxpr, which of them are alive, and the regions that have replaced some.

    Nodes are numbered: an equation by its place, a region by the number of equations and its place among regions.

    Attributes:
      eqns: the equations.
      inputs: the variables that each reads.
      producer: the equation that makes a variable.
      above: of each variable that an equation makes, that equation and those it depends on, as bits of an integer;
        one with side effects depends on those before it that have some.
      consumers: of each variable, the nodes alive that read it.
      regions: what was put in the place of equations: ``inputs``, ``results``, ``equation()``.
      given: the program's arguments, and whether each is known to be donated: a result may take its memory.
      flips: the convolutions of weights that are flipped before, each as a ``Flip``.
      takes: of those donated, the result that is to take it: as jax.jit pairs them, in their order, by what they are.
    """

    def __init__(self, jaxpr: Any, donated: Sequence[bool] = ()):
        self.eqns = list(jaxpr.eqns)
        self.outvars = {x for x in jaxpr.outvars if not is_literal(x)}
        self.given: dict[Any, bool] = dict(itertools.zip_longest(jaxpr.invars, donated, fillvalue=False))
        self.flips: dict[int, Any] = {}
        self.takes: dict[Any, Any] = {}
        free: dict[Any, collections.deque[Any]] = collections.defaultdict(collections.deque)
        for x, flag in self.given.items():
            if flag:
                free[x.aval.shape, x.aval.dtype].append(x)
        for out in jaxpr.outvars if free else ():
            if alike := free.get((out.aval.shape, out.aval.dtype)):
                self.takes[alike.popleft()] = out
        self.producer: dict[Any, int] = {}
        self.above: dict[Any, int] = {}
        self.consumers: dict[Any, set[int]] = collections.defaultdict(set)
        self.regions: list[Any] = []
        self.definition: dict[Any, int] = {}  # of what a region makes
        # Of each region, the first equation that it replaces, all of them, and those above it; sorted.
        self._spans: list[tuple[int, int, int]] = []
        self.live: set[int] = set()
        self._pointwise: dict[int, bool] = {}
        self._in_one_pass: dict[int, bool] = {}
        self.inputs = list(map(variables, self.eqns))
        self._effects = {i for i, eqn in enumerate(self.eqns) if has_side_effects(eqn)}
        last = 0  # the last equation with side effects, and those it depends on
        for i, eqn in enumerate(self.eqns):
            found = 1 << i
            for x in self.inputs[i]:
                found |= self.above.get(x, 0)
            if i in self._effects:
                found = last = found | last
            for x in eqn.outvars:
                self.producer[x] = i
                self.above[x] = found
        needed = set(self.outvars)
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            if i in self._effects or not needed.isdisjoint(eqn.outvars):
                self.live.add(i)
                needed.update(self.inputs[i])
                for x in self.inputs[i]:
                    self.consumers[x].add(i)

    def product(self, i: int) -> Any:
        """Returns the equation of a product, of the arrays that a kernel reads."""
        return self.flips[i].eqn if i in self.flips else self.eqns[i]

    def used(self, x: Any) -> bool:
        """True if anything alive, or the result, needs a variable."""
        return x in self.outvars or bool(self.consumers.get(x))

    def depends_on(self, x: Any, members: int) -> bool:
        """True if a variable depends on results of some equations, given as bits."""
        return bool(self.above.get(x, 0) & members)

    def source(self, x: Any) -> tuple[Any, tuple[int, ...]]:
        """Returns the variable that is reshaped to make another, and its shape: what equal arrays share."""
        shape = x.aval.shape
        while x in self.producer and x not in self.definition:
            eqn = self.eqns[self.producer[x]]
            if eqn.primitive.name != "reshape" or reorders(eqn) or is_literal(eqn.invars[0]):
                break
            x = eqn.invars[0]
        return x, shape

    def is_pointwise(self, i: int) -> bool:
        """True if an equation is one that a kernel may compute on the elements of its result."""
        if i not in self._pointwise:
            self._pointwise[i] = pointwise(self.eqns[i])
        return self._pointwise[i]

    def in_memory(self, x: Any, before: bool = False) -> bool:
        """True if a variable must lie in memory, whatever XLA computes in one pass; or had to without regions."""
        if x in self.outvars:
            return True
        for node in self.consumers.get(x, ()):
            if node >= len(self.eqns):
                region = self.regions[node - len(self.eqns)]
                if not before or x in region.inputs[: 1 + len(region.products)]:
                    return True
                continue
            eqn = self.eqns[node]
            if eqn.primitive.name in MOVES:
                if any(self.in_memory(y, before) for y in eqn.outvars):
                    return True
            elif not self._is_in_one_pass(node):
                return True
        return False

    def _is_in_one_pass(self, i: int) -> bool:
        if i not in self._in_one_pass:
            self._in_one_pass[i] = self.is_pointwise(i) or in_one_pass(self.eqns[i])
        return self._in_one_pass[i]

    def reaches(self, inputs: Iterable[Any], results: Iterable[Any]) -> bool:
        """True if one of some variables is made, by now, of one of some others."""
        return bool(self._above(inputs) & self._makers(results))

    def is_after(self, node: int, others: Iterable[int]) -> bool:
        """True if a node's inputs depend on results of each of some others, which have then run before it."""
        above, n = self._above(self.reads(node)), len(self.eqns)
        makes = (1 << i if i < n else self._makers(self.regions[i - n].results) for i in others)
        return all(bits & above for bits in makes)

    def _above(self, variables: Iterable[Any]) -> int:
        """Returns the equations that make variables, as bits; what a region makes is made of all that it reads."""
        found = 0
        for x in variables:
            found |= self.above.get(x, 0)
        before = 0
        while before != found:  # what a region reads may be made by another
            before = found
            for first, made, above in self._spans:
                if first >= found.bit_length():
                    break
                if made & found:
                    found |= above
        return found

    def _makers(self, results: Iterable[Any]) -> int:
        found = 0
        for x in results:
            found |= 1 << self.producer[x]
        return found

    def reads(self, node: int) -> Sequence[Any]:
        """Returns the variables that a node reads."""
        return self.inputs[node] if node < len(self.eqns) else self.regions[node - len(self.eqns)].inputs

    def replace(self, region: Any) -> None:
        """Puts a region in the place of the equations that nothing else needs once it is there."""
        node = len(self.eqns) + len(self.regions)
        self.regions.append(region)
        made = self._makers(region.results)
        first = (made & -made).bit_length() - 1
        bisect.insort(self._spans, (first, made, self._above(region.inputs)))
        for x in region.inputs:
            self.consumers[x].add(node)
        for x in region.results:
            self.definition[x] = node
        for i in sorted(region.members, reverse=True):
            self._kill(i)

    def _kill(self, i: int) -> None:
        eqn = self.eqns[i]
        if i not in self.live or i in self._effects:
            return
        for x in eqn.outvars:
            if x not in self.definition and (x in self.outvars or self.consumers.get(x)):
                return
        self.live.remove(i)
        for x in self.inputs[i]:
            readers = self.consumers[x]
            readers.discard(i)
            if not readers and x in self.producer and x not in self.definition:
                self._kill(self.producer[x])

    def equations(self) -> list[Any]:
        """Returns the equations in use, each after those whose results it reads, near to their old order."""
        n, found = len(self.eqns), []
        place = {n + r: max(region.members) for r, region in enumerate(self.regions)}
        order = sorted((*self.live, *place), key=lambda node: place.get(node, node))
        missing: set[Any] = set(self.definition)  # what regions, and nodes that wait, have not made; and these nodes
        waits: dict[int, set[Any]] = {}  # of such nodes, for which of it
        followers: dict[Any, list[int]] = collections.defaultdict(list)
        last = -1  # with an effect
        for node in order:
            if node < n and missing.isdisjoint(self.inputs[node]) and node not in self._effects:
                found.append(self._equation(node))
                continue
            lacks = missing.intersection(self.reads(node))
            if node in self._effects:
                lacks |= missing & {last}
                last = node
            if lacks:
                waits[node] = lacks
                missing |= {node, *self._makes(node)}
                for x in lacks:
                    followers[x].append(node)
                continue
            ready = [(0, node)]
            while ready:
                _, node = heapq.heappop(ready)
                found.append(self._equation(node))
                if node < n and node not in waits:
                    continue
                for x in (node, *self._makes(node)):
                    missing.discard(x)
                    for other in followers.pop(x, ()):
                        waits[other].remove(x)
                        if not waits[other]:
                            heapq.heappush(ready, (place.get(other, other), other))
        assert len(found) == len(order), "regions depend on each other"
        return found

    def _makes(self, node: int) -> list[Any]:
        if node >= len(self.eqns):
            return self.regions[node - len(self.eqns)].results
        return [x for x in self.eqns[node].outvars if x not in self.definition]

    def _equation(self, node: int) -> Any:
        if node >= len(self.eqns):
            return self.regions[node - len(self.eqns)].equation()
        eqn = self.eqns[node]
        if not self.definition.keys().isdisjoint(eqn.outvars):  # a region makes some of its results
            eqn = eqn.replace(outvars=[new_var(x) if x in self.definition else x for x in eqn.outvars])
        return eqn
