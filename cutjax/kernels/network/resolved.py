"""A way to compute a network, resolved for a problem: where everything lies, and what a block needs of the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.network.problem import Problem
from cutjax.kernels.network.program import Map, reusing
from cutjax.kernels.network.schedule import OuterPhase, Schedule, Stage, padded
from cutjax.kernels.staging import instructions
from cutjax.runtime.launch import Pointer

PARTS = {"bf16x3": 2, "bf16x6": 3, "bf16x9": 3}
PRODUCTS = {"bf16x3": 3, "bf16x6": 6, "bf16x9": 9}
OUTER_INSTRUCTIONS, OUTER_ISSUED = 300, 700  # of a pair of outer products: of text, and in its loops
# Registers of a thread beside fragments and accumulators, and more of them.
BESIDE, BESIDE_MEMORY, BESIDE_PARTS, BESIDE_PLANES, BESIDE_WGMMA = 60, 72, 32, 22, 30
MOST_AHEAD = 128  # registers of fragments that are loaded before the columns of a stage, not for each 16 of them again
SMS = 132  # where the device does not say


@dataclasses.dataclass(frozen=True)
class Config:
    """The way in which a network is computed.

    Attributes:
      warps: of a block.
      tiles: of 16 rows, of a warp.
      chained: whether rows go from a layer to the next in registers; else each thread stashes them.
      memory: whether the stash is in global memory, not in shared.
      memory_sums: whether sums of outer products are in global memory between tiles, not in registers.
      blocks: on an SM.
      planes: whether factors of outer products are in shared memory from when they are made to when they are read last;
        else they are stashed, and staged there for each sum.
      wgmma: whether warpgroups multiply all columns of a stage at once, where a matrix has a multiple of 64 columns;
        with planes, outer products too.
      apart: with planes, whether a second kernel sums the outer products of two wide factors, whose planes are in
        global memory; those of narrow ones each warp adds up of its own rows.
    """

    warps: int
    tiles: int
    chained: bool = True
    memory: bool = False
    memory_sums: bool = False
    blocks: int = 1
    planes: bool = False
    wgmma: bool = False
    apart: bool = False

    @property
    def outer_wgmma(self) -> bool:
        """True if a warpgroup multiplies outer products of its rows."""
        return self.wgmma and self.planes and not self.apart


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """One config for one problem."""

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
        phases = [phase for phase in self.schedule.outer_phases if self.config.planes and phase not in self.apart]
        return frozenset(x for phase in phases for x in (phase.a, phase.b))

    @functools.cached_property
    def sums_apart(self) -> dict[int, int]:
        """The place of each sum in a second kernel's part of them, by number."""
        return self._placed([x for p in self.apart for x in (p.result, self.summed.get(p)) if x is not None])

    # Shared memory: matrices, vectors, sums of columns, what is staged, the stash.

    @functools.cached_property
    def _shared(self) -> tuple[dict[int, int], int, int]:
        """The places in shared memory of matrices, vectors and sums, by number; of what is staged; of the stash."""
        at, found = 0, {}
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
        if self.config.planes:
            return found, at, at + self._planes[1]
        return found, at, at + max((sum(self._staged_bytes(x)) for x in self.schedule.outer_phases), default=0)

    @functools.cached_property
    def warp_sums(self) -> tuple[int, ...]:
        """The sums of which each warp has its own in shared memory: of columns, and narrow ones of outer products."""
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
        return self.stash_place + (0 if self.config.memory else self.stash_bytes)

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

    # Registers.

    @functools.cached_property
    def ahead(self) -> tuple[bool, ...]:
        """For each stage, whether what it multiplies and has not been handed on is loaded before its columns."""
        return tuple(self._fragments(self.schedule.multiplied(stage)) <= MOST_AHEAD for stage in self.schedule.stages)

    def _fragments(self, values: tuple[int, ...]) -> int:
        slices = sum(padded(self.schedule.width(x)) // 16 for x in values)
        return slices * self.words * self.config.tiles

    def registers_of(self, place: int, stage: Stage) -> int:
        """Returns an estimate of the registers that a thread needs in a stage."""
        schedule, tiles = self.schedule, self.config.tiles
        multiplied = schedule.multiplied(stage)
        held = tuple(x for x in multiplied if self.ahead[place] or (place, x) in schedule.handed)
        handed = tuple(x for i, x in schedule.handed if i == place + 1 and x in stage.makes)
        more = len(set(multiplied) - set(held)) * self.words * tiles
        read = {x for step, _ in stage.maps for x in step.values if x not in stage.makes}
        chunks = 8 * tiles * min(len(stage.makes) + len(read), 2 * len(stage.affine) + 4)
        if self.at_once(place):
            early = self._fragments(tuple(read.intersection(self.in_memory)))
            return self._fragments(held) + early + len(stage.affine) * tiles * padded(stage.width) // 2 + chunks
        return self._fragments(held) + self._fragments(handed) + more + chunks + self.words

    @property
    def prefetched(self) -> tuple[int, ...]:
        """The numbers of inputs that are loaded a tile before they are read: of up to 16 columns."""
        inputs = enumerate(self.problem.program.inputs)
        return tuple(i for i, kind in inputs if kind.name == "rows" and kind.sizes[0] <= 16)

    @property
    def registers(self) -> int:
        """About how many registers a thread needs."""
        most = max((self.registers_of(i, stage) for i, stage in enumerate(self.schedule.stages)), default=0)
        c = self.config
        # Addresses of global memory are the longer ones, and parts are made of parts.
        of_memory = BESIDE_WGMMA if c.wgmma else BESIDE_MEMORY
        more = of_memory * (c.memory and c.chained and bool(self.stash_bytes)) + BESIDE_PARTS * (self.parts - 1)
        return (
            most
            + (BESIDE_PLANES if c.planes or c.wgmma else BESIDE)
            + more
            + (0 if c.memory_sums or c.apart else self.sum_registers)
        )

    @property
    def sum_registers(self) -> int:
        """Registers of a thread that have sums of outer products."""
        kinds, found = self.problem.program.kinds, 0
        for a, b in (kinds[x].sizes for x in self.schedule.outers):
            if self.config.outer_wgmma:
                found += padded(a) * padded(b) // 128 + 4
                continue
            found += 8 * -(-padded(a) // 16 * padded(b) // 16 // self.config.warps)
        return found

    @property
    def instructions(self) -> int:
        """Instructions of a thread's text, about: of what is written out."""
        return self._instructions(self.config.chained, OUTER_INSTRUCTIONS)

    @property
    def issued(self) -> int:
        """Instructions that a thread issues for a tile, about."""
        return self._instructions(True, OUTER_ISSUED)

    def _instructions(self, whole: bool, of_outer: int) -> int:
        """Returns those of all columns of each stage, or of 16, and of pairs of outer products."""
        schedule, tiles, found = self.schedule, self.config.tiles, 0
        for stage in schedule.stages:
            columns = padded(stage.width) // 16 if whole else 1
            k = sum(
                (2 + 2 * len(pairs) * tiles * PRODUCTS.get(self.math, 2 if self.math == "tf32" else 1) * 1.5)
                * (padded(self.problem.program.kinds[matrix].sizes[int(transposed)]) // 16)
                for (matrix, transposed), pairs in schedule.terms(stage).items()
            )
            function = schedule.function(stage)
            of_map = 0 if function is None else instructions(self.function(*function))
            found += columns * (int(k) + 8 * tiles * of_map + 60)
        return found + of_outer * (len(schedule.phases) - len(schedule.stages))

    # Arguments and results.

    @property
    def written(self) -> tuple[tuple[int, int], ...]:
        """The results that are rows: their place among results, and number."""
        program = self.problem.program
        return tuple((i, x) for i, x in enumerate(program.outputs) if program.kinds[x].name == "rows")

    @functools.cached_property
    def sums(self) -> dict[int, int]:
        """The place of each sum in a block's part of them, by number."""
        found = (*self.schedule.outers, *(x for _, x in self.schedule.sums))
        return self._placed([x for x in found if x not in self.sums_apart])

    def _placed(self, sums: Sequence[int]) -> dict[int, int]:
        found, at = {}, 0
        for x in dict.fromkeys(sums):
            found[x] = at
            at += self._elements(x)
        return found

    def _elements(self, x: int) -> int:
        return int(np.prod(self.problem.program.kinds[x].sizes))

    @property
    def partials(self) -> int:
        """Elements of a block's part of all sums."""
        return sum(map(self._elements, self.sums))

    @property
    def partials_apart(self) -> int:
        """Elements of a block's part of the sums that a second kernel makes."""
        return sum(map(self._elements, self.sums_apart))

    @property
    def parts_apart(self) -> int:
        """The parts of the rows that blocks of the second kernel sum: together they are as many as SMs."""
        results = len({phase.result for phase in self.apart})
        parts = (self.problem.device.sms or SMS) // max(1, results * self.problem.networks)
        return max(1, min(parts, self.tiles))

    @functools.cached_property
    def memory(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays that are written, by an argument's declaration: rows, parts of sums, planes and the stash."""
        p = self.problem
        found = {
            f"char* out{i}": jax.ShapeDtypeStruct((p.networks, p.rows, self.schedule.width(x)), np.dtype(p.dtypes[i]))
            for i, x in self.written
        }
        if self.partials:
            found["float* partials"] = jax.ShapeDtypeStruct((p.networks, self.blocks, self.partials), np.dtype("f4"))
        if self.apart:
            shape = (p.networks, self.parts_apart, self.partials_apart)
            found["float* sums"] = jax.ShapeDtypeStruct(shape, np.dtype("f4"))
            shape = (p.networks, self.tiles * self.rows, self.chunks, 128)
            found["char* planes"] = jax.ShapeDtypeStruct(shape, np.dtype("u1"))
        if self.config.memory and self.stash_bytes:
            shape = (self.blocks * p.networks, self.stash_bytes)
            found["char* stashes"] = jax.ShapeDtypeStruct(shape, np.dtype("u1"))
        return found

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that the launches write."""
        return tuple(self.memory.values())

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of the kernel, in order."""
        count = len(self.problem.program.inputs)
        found = [Argument(f"const char* in{i}", Pointer(i)) for i in range(count)]
        found += [Argument(name, Pointer(count + i)) for i, name in enumerate(self.memory) if name != "float* sums"]
        sizes = {"rows": self.problem.rows, "tiles": self.tiles, "blocks": self.blocks}
        return (*found, *(integer(name, value) for name, value in sizes.items()))
