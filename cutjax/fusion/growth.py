"""The regions of a program: each grows from a product by the elementwise equations that read from it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from cutjax.binding.rules import varying_axes
from cutjax.epilogue.flatten import REDUCTIONS
from cutjax.fusion.contraction import Contraction, is_sharded, transposes
from cutjax.fusion.form import Form, axes_of
from cutjax.fusion.jaxprs import MOVES, Graph, byte_count, full_size, is_literal
from cutjax.fusion.region import Region, Stop
from cutjax.fusion.tail import reduced_axes
from cutjax.fusion.zeros import zeros

MOST_PRODUCTS = 3  # that share their left operand
MOST_RESULTS = 4
NOTHING = "nothing is computed from it element by element"
_MOST_COPIED = 64  # equations that make an operand, computed again in the kernel


class Finder:
    """Finds the region of one product, or of several that share their left operand."""

    def __init__(self, graph: Graph, products: dict[int, Form]):
        self.graph = graph
        self.products = products  # those that no region has taken
        self.settled: set[int] = set()  # those of them that stay as they are
        self.siblings: dict[Any, list[int]] = {}
        for i, found in products.items():
            left, right, *sizes = graph.product(i).invars
            if not any(map(is_literal, (left, right, *sizes))) and not found.swapped:
                b, out = right.aval, graph.eqns[i].outvars[0].aval
                key = graph.source(left), found, b.shape, b.dtype, out.dtype, varying_axes(out), *sizes
                self.siblings.setdefault(key, []).append(i)
        self.sibling_of = {i: group for group in self.siblings.values() for i in group if len(group) > 1}

    def region(self, i: int, sums: bool = True) -> Region | list[str | Stop]:
        """Returns the region of a product, with sums or without; where there is nothing to fuse, what stopped it."""
        growth = _Growth(self, (i,))
        while len(growth.products) < MOST_PRODUCTS and (other := growth.joins()) is not None:
            wider = _Growth(self, (*growth.products, other))
            if not wider.whole:
                break
            growth = wider
        if not sums:
            growth.inside.difference_update(growth.reductions)
            growth.reductions = []
        return growth.region()

    def together(self, products: tuple[int, ...]) -> Region | None:
        """Returns the region of products alone that share their left operand; None where one depends on another."""
        eqns = [self.graph.product(i) for i in products]
        results = [eqn.outvars[0] for eqn in eqns]
        inputs = list(dict.fromkeys([eqns[0].invars[0], *(x for eqn in eqns for x in eqn.invars[1:])]))
        if self.graph.reaches(inputs, results):
            return None
        found = self.products[products[0]]
        return Region(products, set(), found, tuple(results), list(products), inputs, results, [])


class _Growth:
    """A region that grows from a product by the equations that read from it."""

    def __init__(self, finder: Finder, products: tuple[int, ...]):
        self.finder, self.graph = finder, finder.graph
        self.products = products
        graph = self.graph
        self.found = finder.products[products[0]]
        self.inside: set[int] = set(products)  # equations
        self.mask = sum(1 << i for i in products)
        self.accumulators: list[Any] = []
        self.tiles: dict[Any, int] = {}  # variables, and the equation that makes each
        self.moves: set[int] = set()  # the transpositions of a product, and what flips its weights
        self.reductions: list[int] = []
        self.stops: list[str | Stop] = []
        self.joint: list[int] = []  # equations that read several products
        self._candidates: list[int] = []
        roots: dict[Any, int] = {}
        for k, i in enumerate(products):
            out, equation = graph.eqns[i].outvars[0], i
            for move in self._transpositions(i) if len(products) == 1 else ():
                out, equation = graph.eqns[move].outvars[0], move
                self.mask |= 1 << move
                self.moves.add(move)
                self.found = self.found.transposed  # pyright: ignore[reportAttributeAccessIssue]
            self.moves.update(graph.flips[i].members if i in graph.flips else ())
            self.accumulators.append(out)
            if self.found.tailless:
                self.tiles[out] = equation
            else:
                self._add(out, equation)
            roots[out] = 1 << k
        self.inside |= self.moves
        self.stops += filter(None, [self.found.tailless])
        self.size = full_size(self.accumulators[0].aval)
        self._roots = roots
        while self._candidates:
            self._consider(heapq.heappop(self._candidates))

    @property
    def has_tail(self) -> bool:
        """True if anything but the products, transposed as they may be, is inside."""
        return len(self.inside) > len(self.products) + len(self.moves)

    @property
    def whole(self) -> bool:
        """True if several products meet in one tail, and none of them depends on another's."""
        before = sum(1 << i for i in self.products)
        operands = [x for i in self.products for x in self.graph.inputs[i]]
        return bool(self.joint) and not any(self.graph.depends_on(x, before) for x in operands)

    def _transpositions(self, i: int) -> list[int]:
        """Returns the equations that transpose a product, one after the other, where nothing else reads it."""
        graph, eqn, found = self.graph, self.graph.eqns[i], []
        plain = isinstance(self.found, Contraction) and self.found.plan is None
        if eqn.primitive.name != "dot_general" or not plain or len(self.found.shape) != 2:
            return []
        (lc, _), _ = eqn.params["dimension_numbers"]
        out, rows = eqn.outvars[0], eqn.invars[0].aval.ndim - len(lc)
        while True:
            readers = list(graph.consumers.get(out, ()))
            if out in graph.outvars or len(readers) != 1 or readers[0] >= len(graph.eqns):
                return found
            eqn = graph.eqns[readers[0]]
            if not transposes(eqn, out.aval.ndim, rows) or eqn.outvars[0] in graph.definition:
                return found
            found += readers
            out, rows = eqn.outvars[0], out.aval.ndim - rows

    def _add(self, x: Any, i: int) -> None:
        self.tiles[x] = i
        for j in self.graph.consumers.get(x, ()):
            if j < len(self.graph.eqns) and j not in self.inside:
                heapq.heappush(self._candidates, j)

    def _consider(self, i: int) -> None:
        """Takes in an equation that reads a tile, or notes why not."""
        if i in self.inside:
            return
        eqn = self.graph.eqns[i]
        why = self._refuses(i, eqn)
        if why is not None:
            if why:
                self.stops.append(Stop(eqn, why))
            return
        self.inside.add(i)
        self.mask |= 1 << i
        if eqn.primitive.name in REDUCTIONS:
            self.reductions.append(i)
            return
        root = 0
        for x in self.graph.inputs[i]:
            root |= self._roots.get(x, 0)
        if root.bit_count() > 1:
            self.joint.append(i)
        for x in eqn.outvars:
            self._roots[x] = root
            self._add(x, i)

    def _refuses(self, i: int, eqn: Any) -> str | None:
        """Returns the reason against an equation in the region: None if there is none, "" if it needs no words."""
        graph, name = self.graph, eqn.primitive.name
        if not graph.definition.keys().isdisjoint(eqn.outvars):
            return ": another product has it"
        form = self.found.shape
        if name in REDUCTIONS:
            x = eqn.invars[0]
            if is_sharded(eqn.params.get("out_sharding")) or x not in self.tiles or self.found.grouped:
                return ""
            axes = set(eqn.params["axes"])
            return None if reduced_axes(x.aval.shape, form, axes, self.found.rows) else ": not all rows, or columns"
        if not graph.is_pointwise(i):
            return ""
        for out in eqn.outvars:
            if full_size(out.aval) != self.size:
                return f" turns {tuple(eqn.invars[0].aval.shape)} into {tuple(out.aval.shape)}"
            if varying_axes(out.aval) != varying_axes(self.accumulators[0].aval):
                return " varies over other axes of the mesh than the product"
        moves = name in MOVES
        for x in graph.inputs[i]:
            if x in self.tiles:
                continue
            if graph.depends_on(x, self.mask):
                return ": an operand of it is made of the product by what no kernel computes"
            if not moves and x.aval.ndim and not self._is_along(eqn, x):
                return f": an operand of shape {tuple(x.aval.shape)} is not along rows or columns"
        return None

    def _is_along(self, eqn: Any, x: Any) -> bool:
        """True if an operand is of full size, or along rows or columns; if along an axis of the rows, along all."""
        graph, found = self.graph, self.found
        while full_size(x.aval) == self.size:
            i = graph.producer.get(x, -1)
            if found.rows == 1 or i < 0 or not graph.is_pointwise(i) or len(graph.inputs[i]) != 1:
                return True
            eqn, (x,) = graph.eqns[i], graph.inputs[i]  # XLA would write what it broadcasts
        groups = axes_of(eqn.outvars[0].aval.shape, found.shape)
        if groups is None or found.rows == 1 or x.aval.ndim == 0:
            return groups is not None
        sizes = dict(zip(eqn.params.get("broadcast_dimensions", range(x.aval.ndim)), x.aval.shape, strict=True))
        rows = zip(groups[-1 - found.rows : -1], found.shape[-1 - found.rows : -1], strict=True)
        return len({any(sizes.get(axis, 1) != 1 for axis in axes) for axes, size in rows if size != 1}) < 2

    def joins(self) -> int | None:
        """Returns another product of the same left operand whose tail meets this one's."""
        graph = self.graph
        others = [
            j
            for j in self.finder.sibling_of.get(self.products[0], ())
            if j not in self.products and j in self.finder.products
        ]
        if not others:
            return None
        for i in sorted(self.inside):
            for x in graph.inputs[i] if i not in self.products else ():
                for j in others if x not in self.tiles else ():
                    if graph.depends_on(x, 1 << j):
                        return j
        return None

    # What of it becomes the region.

    def region(self) -> Region | list[str | Stop]:
        """Returns the region; where there is nothing to fuse, what stopped it."""
        if not self.has_tail:
            return self.stops or [NOTHING]
        split = self._results()
        if isinstance(split, str):
            return [split, *self.stops]
        written, reduced = split
        needed = self._slice([*written, *reduced])
        if needed.issubset((*self.products, *self.moves)):
            return self.stops or [NOTHING]
        if not needed.issuperset(self.products):
            return self.stops
        members = sorted(needed)
        inputs = self._inputs(members)
        if copied := self._copied(inputs, members):
            members = sorted(needed | copied)
            inputs = self._inputs(members)
        results, accumulators = [*written, *reduced], tuple(self.accumulators)
        region = Region(self.products, self.moves, self.found, accumulators, members, inputs, results, self.stops)
        if self.graph.reaches(inputs, region.results):
            return ["an operand of its tail depends on another fused product that depends on it", *self.stops]
        return region

    def _used_outside(self, inside: set[int]) -> list[Any]:
        graph = self.graph
        return [x for x in self.tiles if x in graph.outvars or not inside.issuperset(graph.consumers.get(x, ()))]

    def _results(self) -> tuple[list[Any], list[Any]] | str:
        """Returns the kernel's results, of full size and reduced, from which the rest can be made without it."""
        graph = self.graph
        for reductions in (self.reductions, []):
            inside = self.inside - (set(self.reductions) - set(reductions))
            outside = self._used_outside(inside)
            written = list(dict.fromkeys(self._narrow(x) for x in outside if graph.in_memory(x)))
            several = bool(reductions) and self.found.rows > 1
            if several:  # as of a norm over the batch: beside what they are of, in the same pass
                written = self._cut(written, outside)
            reduced = [graph.eqns[i].outvars[0] for i in reductions]
            if written and (several or all(self._narrow(x) in written for x in outside)):
                break
            if not reductions:
                written = self._cut(written, outside)
                break
        reduced = [x for x in reduced if graph.used(x)]
        if not written:
            return "kernels store a result of full size, and only sums of it are used"
        if self.found.grouped and (bad := [x for x in written if x not in self._zeros()]):
            name = graph.eqns[graph.producer[bad[0]]].primitive.name
            return f"{name} makes rows of no group other than zero"
        if len(written) > MOST_RESULTS:
            return f"{len(written)} values of its tail are used elsewhere"
        return written, reduced

    def _narrow(self, x: Any) -> Any:
        """Returns the variable of which a value is a conversion to a wider dtype: that is what the kernel writes.

        Whatever reads the wider one converts it in a pass of its own.
        """
        while (i := self.tiles[x]) not in self.products:
            eqn = self.graph.eqns[i]
            (source, *_) = eqn.invars
            wider = eqn.primitive.name == "convert_element_type" and source in self.tiles
            if not wider or source.aval.dtype.itemsize >= x.aval.dtype.itemsize:
                break
            x = source
        return x

    def _zeros(self) -> set[Any]:
        """Returns the variables that are zero where the products are."""
        return zeros([self.graph.eqns[i] for i in sorted(self.inside)], set(self.accumulators))

    def _cut(self, written: list[Any], outside: list[Any]) -> list[Any]:
        """Returns the results to write so that all that is used outside can be made: the fewest bytes, the latest."""
        given, known = set(written), {}
        if all(self._made_of(x, given, known) for x in outside):
            return written
        order = sorted(self.tiles, key=lambda x: (x.aval.dtype.itemsize, -self.tiles[x]))
        for x in order:
            given, known = {*written, x}, {}
            if x not in written and all(self._made_of(y, given, known) for y in outside):
                return [*written, x]
        return [*written, *(x for x in self.accumulators if x not in written)]

    def _made_of(self, x: Any, given: set[Any], known: dict[Any, bool]) -> bool:
        """True if a variable is made of some others and of what is outside of the region."""
        if x in given or x not in self.tiles:
            return True
        if x in self.accumulators:
            return False
        if x not in known:
            known[x] = all(self._made_of(y, given, known) for y in self.graph.inputs[self.tiles[x]])
        return known[x]

    def _slice(self, results: Iterable[Any]) -> set[int]:
        """Returns the equations inside that some results need."""
        graph = self.graph
        needed: set[int] = set()
        stack = [graph.producer[x] for x in results]
        while stack:
            i = stack.pop()
            if i in needed:
                continue
            needed.add(i)
            if i in self.products:
                needed.update(graph.flips[i].members if i in graph.flips else ())
            else:
                stack += [self.tiles[x] for x in graph.inputs[i] if x in self.tiles]
                if i in self.moves:
                    stack += (*self.moves, *self.products)
        return needed

    def _inputs(self, members: list[int]) -> list[Any]:
        """Returns the inputs of some equations, taken together; the operands of the products first."""
        graph = self.graph
        eqns = [graph.product(i) for i in self.products]
        first = [eqns[0].invars[0], *(eqn.invars[1] for eqn in eqns)]
        made = {x for i in members for x in graph.eqns[i].outvars}
        found = [x for x in first if not is_literal(x)]
        for i in members:
            found += [x for x in graph.inputs[i] if x not in made]
        return list(dict.fromkeys(found))

    # What makes its operands.

    def _copied(self, inputs: list[Any], members: list[int]) -> set[int]:
        """Returns equations that make operands and are better computed in the kernel: then it reads fewer bytes."""
        full = [x for x in inputs if full_size(x.aval) == self.size]
        read = {x for i in members if i not in self.products for x in self.graph.inputs[i]} if full else ()
        operands = [x for x in full if x in read]
        if not operands:
            return set()
        copied = self._cone(operands)
        if copied is not None:
            return copied
        return {i for x in operands for i in self._cone([x]) or ()}

    def _cone(self, operands: Sequence[Any]) -> set[int] | None:
        """Returns the elementwise equations that operands are made by; None if those read more bytes, or are many."""
        graph = self.graph
        # A mask would be written for the kernel alone: what it is of is read as cheaply.
        left = sum(byte_count(x) << (x.aval.dtype == bool and not graph.in_memory(x)) for x in operands)
        found: set[int] = set()
        seen: set[Any] = set()
        stack = list(operands)
        while stack:
            x = stack.pop()
            i = graph.producer.get(x, -1)
            if x in seen or i in found:
                continue
            seen.add(x)
            if i < 0 or full_size(x.aval) != self.size or not self._copies(i):
                left -= byte_count(x)
            else:
                found.add(i)
                stack += graph.inputs[i]
            if left < 0 or len(found) > _MOST_COPIED:
                return None
        return found

    def _copies(self, i: int) -> bool:
        """True if an equation that makes operands can be computed in the kernel."""
        graph, eqn = self.graph, self.graph.eqns[i]
        if not graph.is_pointwise(i) or any(full_size(x.aval) != self.size for x in eqn.outvars):
            return False
        if eqn.primitive.name == "name" or any(x in graph.definition for x in eqn.outvars):
            return False
        out = eqn.outvars[0].aval.shape
        small = [x for x in graph.inputs[i] if x.aval.ndim and full_size(x.aval) != self.size]
        if eqn.primitive.name == "iota" and (self.found.rows > 1 or axes_of(out, self.found.shape) is None):
            return False
        if not all(self._is_along(eqn, x) for x in small):
            return False
        return not any(graph.in_memory(x) for x in eqn.outvars)
