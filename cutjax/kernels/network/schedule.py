"""The order in which a kernel computes a program: stages of one width, sums of outer products, and what is kept.

A stage goes through the columns of its width, 16 at a time: products of rows that are whole, then elementwise functions
of the sums as they are. What a later stage multiplies is handed on in registers where it is the next one; everything
else that is read again is stashed, each thread its own. Factors of outer products may lie in shared memory instead, in
planes that all warps read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

from cutjax.kernels.network.program import Affine, Map, Outer, Program, Sum, merged


def padded(width: int) -> int:
    """Returns a width in whole slices of 16."""
    return -(-width // 16) * 16


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps of one width.

    Attributes:
      width: of all its values.
      affine: the numbers of what products and vectors add up to.
      maps: the steps that are functions, in order.
    """

    width: int
    affine: tuple[int, ...]
    maps: tuple[tuple[Map, tuple[int, ...]], ...]

    @property
    def makes(self) -> tuple[int, ...]:
        """The numbers of its values."""
        return (*self.affine, *(x for _, values in self.maps for x in values))


@dataclasses.dataclass(frozen=True)
class OuterPhase:
    """A pair of rows whose outer products are added to the sum of some number."""

    result: int
    a: int
    b: int


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The phases of a program, and where its values are.

    Attributes:
      program: whose.
      chained: whether rows are handed on in registers.
      in_planes: whether factors of outer products are in planes from when they are made.
      reuses: whether functions read, as the dtype of operands has them, results of others that are kept.
    """

    program: Program
    chained: bool
    in_planes: bool = False
    reuses: bool = False

    @functools.cached_property
    def makers(self) -> dict[int, tuple[Affine | Map, tuple[int, ...]]]:
        """By number of rows that are no input, the step that makes them, and its values."""
        steps = [(x, values) for x, values in self.program.numbered if isinstance(x, Affine | Map)]
        return {i: (step, values) for step, values in steps for i in values}

    def width(self, x: int) -> int:
        """Returns the width of rows."""
        return self.program.kinds[x].sizes[0]

    def is_input(self, x: int) -> bool:
        """True if a value is an input."""
        return x < len(self.program.inputs)

    @functools.cached_property
    def phases(self) -> tuple[Stage | OuterPhase, ...]:
        """Stages in order, and outer products as soon as both factors are there."""
        level = dict.fromkeys(range(len(self.program.inputs)), 0)
        late: set[int] = set()  # products of inputs alone, which wait for the first that reads them
        stages: dict[tuple[int, int], tuple[list[int], list[tuple[Map, tuple[int, ...]]]]] = {}
        for step, values in self.program.numbered:
            if not isinstance(step, Affine | Map):
                continue
            if isinstance(step, Affine):
                at = 1 + max((level[t.rows] for t in step.terms), default=-1)
                late |= {*values} if self.in_planes and at == 1 else set()
            else:
                at = max(level[x] for x in step.values)
                if at > 1 and (waiting := late.intersection(step.values)):
                    at += 1
                    for x in waiting:
                        self._move(stages, x, level[x], at)
                    level |= dict.fromkeys(waiting, at)
                late -= {*step.values}
            late -= {t.rows for t in step.terms} if isinstance(step, Affine) else set()
            level |= dict.fromkeys(values, at)
            affine, maps = stages.setdefault((at, self.width(values[0])), ([], []))
            if isinstance(step, Affine):
                affine += values
            else:
                maps.append((step, values))
        order = sorted(stages, key=lambda key: key[0])
        found = {key: Stage(key[1], tuple(affine), tuple(maps)) for key, (affine, maps) in stages.items()}
        made = {x: i for i, key in enumerate(order) for x in found[key].makes}
        after: dict[int, list[OuterPhase]] = {}
        for step, (value, *_) in self.program.numbered:
            for a, b in step.pairs if isinstance(step, Outer) else ():
                after.setdefault(max(made.get(a, -1), made.get(b, -1)), []).append(OuterPhase(value, a, b))
        phases: list[Stage | OuterPhase] = list(after.get(-1, ()))
        for i, key in enumerate(order):
            phases += [found[key], *after.get(i, ())]
        return tuple(phases)

    def _move(self, stages: dict[tuple[int, int], tuple[list[int], Any]], x: int, last: int, at: int) -> None:
        """Moves what a product adds up to from the stage of one level to that of another."""
        width = self.width(x)
        stages[last, width][0].remove(x)
        if not any(stages[last, width]):
            del stages[last, width]
        stages.setdefault((at, width), ([], []))[0].append(x)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in order."""
        return tuple(x for x in self.phases if isinstance(x, Stage))

    def terms(self, stage: Stage) -> dict[tuple[int, bool], list[tuple[int, int]]]:
        """Returns the products of a stage by matrix, and whether it is transposed: pairs of a result and its rows."""
        found: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for x in stage.affine:
            step, _ = self.makers[x]
            for t in step.terms if isinstance(step, Affine) else ():
                found.setdefault((t.matrix, t.transposed), []).append((x, t.rows))
        return found

    def multiplied(self, stage: Stage) -> tuple[int, ...]:
        """Returns the numbers of the rows that a stage multiplies."""
        return tuple(dict.fromkeys(x for pairs in self.terms(stage).values() for _, x in pairs))

    def function(self, stage: Stage) -> tuple[Map, tuple[int, ...]] | None:
        """Returns all functions of a stage as one, with the numbers of its results; None where there is none."""
        own = {values for _, values in stage.maps}
        read = {x for step, values in self.program.numbered if values not in own for x in step.reads}
        return merged(stage.maps, [*read, *self.program.outputs]) if stage.maps else None

    @functools.cached_property
    def read_exactly(self) -> frozenset[int]:
        """The numbers of values that functions read, or that are results: no product rounds those, nor a plane."""
        read = {x for step, _ in self.program.numbered if isinstance(step, Map) for x in step.reads} - self.planes
        if self.reuses:
            read -= self.stashed
        return frozenset((*read, *self.program.outputs))

    @functools.cached_property
    def handed(self) -> frozenset[tuple[int, int]]:
        """Values that go in registers to the next stage: pairs of that stage's place and a number."""
        if not self.chained:
            return frozenset()
        pairs = enumerate(zip(self.stages, self.stages[1:], strict=False), 1)
        return frozenset((i, x) for i, (last, stage) in pairs for x in self.multiplied(stage) if x in last.makes)

    @functools.cached_property
    def stashed(self) -> frozenset[int]:
        """The numbers of values that are stashed."""
        found: set[int] = set()
        later: set[int] = set()  # what is multiplied later
        for i, stage in enumerate(self.stages):
            for step, _ in stage.maps:
                found.update(x for x in step.values if not self.is_input(x) and x not in stage.makes)
            later.update(x for x in self.multiplied(stage) if not self.is_input(x) and (i, x) not in self.handed)
        for phase in self.phases:
            if isinstance(phase, OuterPhase):
                later.update(x for x in (phase.a, phase.b) if not self.is_input(x))
        # A function of one value that is stashed anyhow is computed again.
        return frozenset(found | {x for x in later if not self._made_again(x, found)}) - self.planes

    @functools.cached_property
    def planes(self) -> frozenset[int]:
        """The numbers of values that are in planes, inputs among them."""
        outers = (step for step in self.program.steps if isinstance(step, Outer)) if self.in_planes else ()
        return frozenset(x for step in outers for pair in step.pairs for x in pair)

    @functools.cached_property
    def made_again(self) -> tuple[int, ...]:
        """The numbers of values that are computed again where they are read."""
        read = [x for phase in self.phases if isinstance(phase, OuterPhase) for x in (phase.a, phase.b)]
        read += [x for i, stage in enumerate(self.stages) for x in self.multiplied(stage) if (i, x) not in self.handed]
        kept = self.stashed | self.planes
        return tuple(dict.fromkeys(x for x in read if not self.is_input(x) and x not in kept))

    def _made_again(self, x: int, stashed: set[int]) -> bool:
        step, _ = self.makers[x]
        alone = isinstance(step, Map) and len(step.values) == 1
        return x in stashed or (alone and all(self.is_input(y) or y in stashed for y in step.reads))

    def sources(self, x: int) -> tuple[int, ...]:
        """Returns the stashed values of which a value is made where it is read again."""
        if self.is_input(x):
            return ()
        kept = x in self.stashed or x in self.planes
        return (x,) if kept else tuple(y for y in self.makers[x][0].reads if not self.is_input(y))

    @functools.cached_property
    def lifetimes(self) -> dict[int, tuple[int, int]]:
        """The places of the phases in which a value that is stashed or in a plane is made, and read last."""
        place, found = 0, {}
        for at, phase in enumerate(self.phases):
            if isinstance(phase, OuterPhase):
                read = [phase.a, phase.b]
            else:
                read = [x for x in self.multiplied(phase) if (place, x) not in self.handed]
                read += [x for step, _ in phase.maps for x in step.values if x not in phase.makes]
                found |= {x: (at, at) for x in phase.makes if x in self.stashed or x in self.planes}
                place += 1
            found |= {y: (found[y][0], at) for x in read for y in self.sources(x)}
        return found

    def slots(self) -> tuple[dict[int, int], int]:
        """Returns the slice of 16 columns at which each stashed value begins, and the number of all slices."""
        return self._placed(self.stashed, lambda x: padded(self.width(x)) // 16)

    def plane_places(self, size: Callable[[int], int], own: bool = False) -> tuple[dict[int, int], int]:
        """Returns the places at which planes begin, those of inputs last, and the size of all, told each one's.

        Where warps read their own rows alone and never meet, planes of two sizes, and so of other rows, are apart.
        """
        found, whole = self._placed(self.planes, size, own)
        for x in sorted(filter(self.is_input, self.planes)):
            found[x] = whole
            whole += size(x)
        return found, whole

    def _placed(
        self, values: Collection[int], size_of: Callable[[int], int], own: bool = False
    ) -> tuple[dict[int, int], int]:
        taken: list[tuple[int, int, int, int]] = []  # where it begins and ends, and its lifetime
        found = {}
        for x, (first, last) in sorted(self.lifetimes.items(), key=lambda item: item[1]):
            if x not in values:
                continue
            size, at = size_of(x), 0
            for begin, end, made, read in sorted(taken):
                # A function's result may take the place of its argument.
                over = read == first and (begin, end) == (at, at + size) and self._elementwise(read)
                meet = (made <= last and first <= read) or (own and end - begin != size)
                if meet and begin < at + size and at < end and not over:
                    at = end
            taken.append((at, at + size, first, last))
            found[x] = at
        return found, max((end for _, end, _, _ in taken), default=0)

    def _elementwise(self, at: int) -> bool:
        """True if a phase reads what is kept in planes by functions alone, each element before it is written."""
        phase = self.phases[at]
        place = sum(isinstance(x, Stage) for x in self.phases[:at])
        return (
            self.in_planes
            and isinstance(phase, Stage)
            and all(self.is_input(x) or (place, x) in self.handed for x in self.multiplied(phase))
        )

    @functools.cached_property
    def summed(self) -> dict[OuterPhase, int]:
        """The sums of columns that come with outer products, of their second factor."""
        found: dict[OuterPhase, int] = {}
        for step, x in self.sums:
            phases = [next((p for p in self.outer_phases if p.b == y), None) for y in step.values]
            if self.in_planes and all(phases) and not found.keys() & {*phases}:
                found |= {phase: x for phase in phases if phase}
        return found

    @functools.cached_property
    def outer_phases(self) -> tuple[OuterPhase, ...]:
        """The phases that are outer products."""
        return tuple(x for x in self.phases if isinstance(x, OuterPhase))

    @functools.cached_property
    def sums(self) -> tuple[tuple[Sum, int], ...]:
        """The sums over rows, with their numbers."""
        return tuple((step, values[0]) for step, values in self.program.numbered if isinstance(step, Sum))

    @functools.cached_property
    def outers(self) -> tuple[int, ...]:
        """The numbers of sums of outer products."""
        return tuple(values[0] for step, values in self.program.numbered if isinstance(step, Outer))
