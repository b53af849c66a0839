"""One way to compute a network: its tiles, and where matrices, sums, planes and the stash lie."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.network.config import Config
from cutjax.kernels.network.problem import Problem
from cutjax.kernels.network.program import Affine, Map, reusing
from cutjax.kernels.network.schedule import OuterPhase, Schedule, padded

PARTS = {"bf16x3": 2, "bf16x6": 3, "bf16x9": 3}
MOST_AHEAD = 128  # registers of fragments that are loaded before the columns of a stage, not for each 16 of them again
SMS = 132  # where the device does not say


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """One config for one problem: what is multiplied, and where everything lies in memory and shared memory."""

    problem: Problem
    config: Config

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The phases."""
        program, half = self.problem.program, self.element_bytes == 2
        return Schedule(reusing(program) if half else program, self.config.chained, self.config.planes, half)

    @property
    def math(self) -> str:
        """The name of how operands are multiplied, in device text."""
        found = self.problem.math
        assert isinstance(found, str)
        return {"": {"bfloat16": "bf16", "float16": "f16"}.get(self.problem.dtype.name, ""), "bf16": "bf16"}.get(
            found, found
        )

    def function(self, step: Map, values: tuple[int, ...]) -> Epilogue:
        """Returns the function of a step as it is computed: as exactly as what reads its results asks for.

        Products round them, and sums add up what plain JAX rounds.
        """
        if self.parts > 1 or self.element_bytes > 2 or self.schedule.read_exactly.intersection(values):
            return step.function
        outputs = tuple(dataclasses.replace(out, dtype=self.problem.dtype.name) for out in step.function.outputs)
        return dataclasses.replace(step.function, outputs=outputs)

    @property
    def parts(self) -> int:
        """The parts of a number that is multiplied."""
        return PARTS.get(self.math, 1)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of an operand in shared memory, of a part."""
        return 4 if self.math == "tf32" else 2

    @property
    def words(self) -> int:
        """Registers of a fragment of 16 rows and 16 columns."""
        return 8 if self.math == "tf32" else 4 * self.parts

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.config.warps

    @property
    def rows(self) -> int:
        """Rows of a block's tile."""
        return 16 * self.config.warps * self.config.tiles

    @property
    def tiles(self) -> int:
        """Tiles of the rows of a network."""
        return -(-self.problem.rows // self.rows)

    @property
    def blocks(self) -> int:
        """Blocks of a network: as many as are resident, all of them together."""
        p = self.problem
        resident = (p.device.sms or SMS) * self.config.blocks
        return max(1, min(self.tiles, -(-resident // p.networks)))

    # Outer products that a second kernel sums.

    @functools.cached_property
    def apart(self) -> tuple[OuterPhase, ...]:
        """The outer products that are summed apart: of two factors that are wider than 16."""
        if not self.config.apart:
            return ()
        width = self.schedule.width
        return tuple(phase for phase in self.schedule.outer_phases if min(width(phase.a), width(phase.b)) > 16)

    @functools.cached_property
    def _in_memory(self) -> tuple[dict[int, int], int]:
        found, at = {}, 0
        for x in dict.fromkeys(x for phase in self.apart for x in (phase.a, phase.b)):
            found[x] = at
            at += -(-self.schedule.width(x) // 64)
        return found, at

    @property
    def in_memory(self) -> dict[int, int]:
        """The factors whose planes are in memory, and of each the first of its chunks of 64 columns."""
        return self._in_memory[0]

    @property
    def chunks(self) -> int:
        """The chunks of 64 columns of all planes in memory."""
        return self._in_memory[1]

    @property
    def plane_bytes(self) -> int:
        """Bytes of all planes in memory."""
        return 128 * self.chunks * self.tiles * self.rows * self.problem.networks

    @functools.cached_property
    def in_shared(self) -> frozenset[int]:
        """The factors whose planes are in shared memory."""
        others = (*self.apart, *self.narrow)
        phases = [phase for phase in self.schedule.outer_phases if self.config.planes and phase not in others]
        return frozenset(x for phase in phases for x in (phase.a, phase.b))

    @functools.cached_property
    def narrow(self) -> dict[OuterPhase, tuple[int, int]]:
        """Outer products with a narrow input that warpgroups multiply: the wide factor and the narrow one of each."""
        if not self.config.copied:
            return {}
        found = {p: (p.a, p.b) if self.schedule.width(p.b) < 8 else (p.b, p.a) for p in self.schedule.outer_phases}
        return {phase: pair for phase, pair in found.items() if phase not in self.apart}

    @functools.cached_property
    def lasting(self) -> frozenset[int]:
        """Values that are in registers when a stage ends: of planes in memory, and wide ones beside narrow."""
        return frozenset((*self.in_memory, *(x for x, _ in self.narrow.values())))

    @property
    def kept(self) -> frozenset[int]:
        """Values that stay there until they are read last."""
        return self.lasting - self.staying if self.config.copied else frozenset()

    @property
    def groups(self) -> int:
        """The warpgroups of a block, where each has a part of sums of its own."""
        return self.config.warps // 4 if self.narrow else 1

    @functools.cached_property
    def staying(self) -> frozenset[int]:
        """The value whose plane stays in a buffer of its own, where functions read it: others stay in registers."""
        own = [x for x in self.schedule.makers if x in self.in_memory] if self.config.copied else []
        return frozenset(own[:1])

    @property
    def group_bytes(self) -> int:
        """Bytes of a warpgroup's buffers and narrow factors."""
        return (2 + len(self.staying)) * self.staging_bytes + 1024 * len(self.narrow)

    @property
    def staging_bytes(self) -> int:
        """Bytes of a warpgroup's buffer of 64 rows of a plane; each has two."""
        wide = [x for x, _ in self.narrow.values()]
        return 128 * max((padded(self.schedule.width(x)) for x in (*self.in_memory, *wide)), default=0)

    @property
    def staging(self) -> int:
        """The place in shared memory of those buffers, behind which are the narrow factors of each warpgroup."""
        return self._shared[2] - self.config.warps // 4 * self.group_bytes

    @functools.cached_property
    def sums_apart(self) -> dict[int, int]:
        """The place of each sum in a second kernel's part of them, by number."""
        return self._placed([x for p in self.apart for x in (p.result, self.summed.get(p)) if x is not None])

    # Shared memory: matrices, vectors, sums of columns, what is staged, the stash.

    @functools.cached_property
    def _shared(self) -> tuple[dict[int, int], int, int]:
        return self._shared_from(self.biases[1])

    def _shared_from(self, at: int) -> tuple[dict[int, int], int, int]:
        """Returns the places in shared memory of matrices, vectors and sums; of what is staged; of the stash."""
        found: dict[int, int] = {}
        for i, kind in sorted(enumerate(self.problem.program.inputs), key=lambda x: not self.swizzled(x[0])):
            if kind.name == "rows":
                continue
            found[i] = at
            if self.swizzled(i):
                at += 2 * padded(kind.sizes[0]) * padded(kind.sizes[1])
                continue
            if kind.name == "matrix":
                k, n = map(padded, kind.sizes)
                at += self.parts * k * (n * self.element_bytes + 16)
            else:
                at += 4 * padded(kind.sizes[0])
        for x in self.warp_sums:
            found[x] = at
            at += 4 * self.config.warps * self.warp_elements(x)
        if self.config.outer_wgmma:
            at = -(-at // 1024) * 1024
            return found, at, at + self._planes[1] + 128 * self.rows
        if self.config.copied:
            at = -(-at // 1024) * 1024
            return found, at, at + self.config.warps // 4 * self.group_bytes
        if self.config.planes:
            return found, at, at + self._planes[1]
        return found, at, at + max((sum(self._staged_bytes(x)) for x in self.schedule.outer_phases), default=0)

    @functools.cached_property
    def biases(self) -> tuple[dict[int, int], int]:
        """The places in shared memory of vectors as matrices of one row and zeros, and where those end.

        The last are 8 rows of zeros alone, which are the second half of each. There are none where they have no room.
        """
        found, at, widest, given = {}, 0, 0, self.problem.given
        for place, stage in enumerate(self.schedule.stages):
            for x in stage.affine if self.at_once(place) and stage.width <= self.threads else ():
                step, _ = self.schedule.makers[x]
                for vector in step.vectors if isinstance(step, Affine) else ():
                    if given[vector][0] == self.problem.dtype.name and vector not in found:
                        found[vector] = at
                        at += 16 * padded(stage.width)
                        widest = max(widest, padded(stage.width))
        end = at + 16 * widest
        fits = self._shared_from(end)[2] + self._stash_in_shared <= self.most_shared_bytes
        return (found, end) if fits else ({}, 0)

    @property
    def zeros(self) -> int:
        """The place of those zeros."""
        sizes = [self.problem.program.kinds[i].sizes[0] for i in self.biases[0]]
        return self.biases[1] - 16 * max(map(padded, sizes), default=0)

    @functools.cached_property
    def warp_sums(self) -> tuple[int, ...]:
        """The sums of which each warp has its own in shared memory: of columns, and narrow ones of outer products."""
        if self.narrow:
            return ()
        elsewhere = {x for phase, x in self.summed.items() if self.config.outer_wgmma or phase in self.apart}
        found = [x for _, x in self.schedule.sums if x not in elsewhere]
        return (*found, *(x for x in self.schedule.outers if self.config.apart and x not in self.sums_apart))

    def warp_elements(self, x: int) -> int:
        """Returns the elements of a warp's own sums, of which vectors are in whole slices."""
        kind = self.problem.program.kinds[x]
        return padded(kind.sizes[0]) if kind.name == "vector" else -(-kind.sizes[0] * kind.sizes[1] // 4) * 4

    def _staged_bytes(self, phase: OuterPhase) -> tuple[int, int]:
        a, b = (self._plane_bytes(self.schedule.width(x)) for x in (phase.a, phase.b))
        return a, b

    def _plane_bytes(self, width: int) -> int:
        more = 32 if self.math == "tf32" else 16 * (not self.config.outer_wgmma)
        return self.parts * self.rows * (padded(width) * self.element_bytes + more)

    @functools.cached_property
    def _planes(self) -> tuple[dict[int, int], int]:
        in_shared, width = self.in_shared, self.schedule.width
        size = lambda x: self._plane_bytes(width(x)) if x in in_shared else 0  # noqa: E731
        return self.schedule.plane_places(size, own=self.config.apart)

    def plane(self, x: int) -> range:
        """Returns the places in shared memory of a value that is in a plane."""
        first = self._shared[1] + self._planes[0][x]
        return range(first, first + self._plane_bytes(self.schedule.width(x)))

    @property
    def places(self) -> dict[int, int]:
        """The places of matrices, vectors and sums of columns in shared memory, by number."""
        return self._shared[0]

    def staged(self, phase: OuterPhase) -> tuple[int, int]:
        """Returns the places in shared memory of the factors of outer products."""
        if self.config.planes:
            return self.plane(phase.a).start, self.plane(phase.b).start
        at = self._shared[1]
        return at, at + self._staged_bytes(phase)[0]

    @property
    def stash_place(self) -> int:
        """The place in shared memory at which the stash begins."""
        return self._shared[2]

    @functools.cached_property
    def _slots(self) -> tuple[dict[int, int], int]:
        return self.schedule.slots()

    @property
    def slots(self) -> dict[int, int]:
        """The slices at which stashed values begin."""
        return self._slots[0]

    @property
    def stash_bytes(self) -> int:
        """Bytes of the stash of a block."""
        vectors = self.config.tiles * (1 if self.problem.dtype.itemsize == 2 else 2)
        return self._slots[1] * vectors * 16 * self.threads

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.stash_place + self._stash_in_shared

    @property
    def _stash_in_shared(self) -> int:
        return 0 if self.config.memory else self.stash_bytes

    @property
    def most_shared_bytes(self) -> int:
        """Shared memory that a block may have."""
        device = self.problem.device
        return min(device.shared_bytes, device.shared_bytes_per_sm // self.config.blocks - 1024)

    @property
    def ones(self) -> int:
        """The place in shared memory of ones, as many rows of 64 as a tile has."""
        return self._shared[2] - 128 * self.rows

    @functools.cached_property
    def summed(self) -> dict[OuterPhase, int]:
        """The sums of columns that come with outer products."""
        found = self.schedule.summed
        if self.config.outer_wgmma:
            refused = {x for phase, x in found.items() if padded(self.schedule.width(phase.b)) % 64}
        else:  # a kernel's sums of columns are of one sum of outer products
            results = {x: {phase.result for phase, y in found.items() if y == x} for x in found.values()}
            refused = {x for x, of in results.items() if self.config.apart and len(of) > 1}
        return {phase: x for phase, x in found.items() if x not in refused}

    def swizzled(self, x: int) -> bool:
        """True if an input is a matrix that wgmma may multiply by."""
        kind = self.problem.program.inputs[x]
        return self.config.wgmma and kind.name == "matrix" and padded(kind.sizes[1]) % 64 == 0

    def at_once(self, place: int) -> bool:
        """True if wgmma multiplies all columns of the stage of some place."""
        stage, schedule = self.schedule.stages[place], self.schedule
        terms = schedule.terms(stage)
        loaded = all(self.ahead[place] or (place, x) in schedule.handed for x in schedule.multiplied(stage))
        return bool(terms) and loaded and all(self.swizzled(matrix) for matrix, _ in terms)

    @property
    def multiplies_at_once(self) -> bool:
        """True if wgmma multiplies by every matrix of more columns than one slice."""
        inputs = enumerate(self.problem.program.inputs)
        return all(self.swizzled(i) for i, kind in inputs if kind.name == "matrix" and kind.sizes[1] > 16)

    @functools.cached_property
    def ahead(self) -> tuple[bool, ...]:
        """For each stage, whether what it multiplies and has not been handed on is loaded before its columns."""
        return tuple(self._fragments(self.schedule.multiplied(stage)) <= MOST_AHEAD for stage in self.schedule.stages)

    def _fragments(self, values: tuple[int, ...]) -> int:
        slices = sum(padded(self.schedule.width(x)) // 16 for x in values)
        return slices * self.words * self.config.tiles

    @property
    def prefetched(self) -> tuple[int, ...]:
        """The numbers of inputs that are loaded a tile before they are read: of up to 16 columns."""
        inputs = enumerate(self.problem.program.inputs)
        return tuple(i for i, kind in inputs if kind.name == "rows" and kind.sizes[0] <= 16)

    def _placed(self, sums: Sequence[int]) -> dict[int, int]:
        found, at = {}, 0
        for x in dict.fromkeys(sums):
            found[x] = at
            at += self._elements(x)
        return found

    def _elements(self, x: int) -> int:
        return int(np.prod(self.problem.program.kinds[x].sizes))
