"""A way to compute a network, resolved for a problem: what a block needs of the device, and what a kernel is given."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.network.places import SMS, Places
from cutjax.kernels.network.schedule import Stage, padded
from cutjax.kernels.staging import instructions
from cutjax.runtime.launch import Pointer

PRODUCTS = {"bf16x3": 3, "bf16x6": 6, "bf16x9": 9}
OUTER_INSTRUCTIONS, OUTER_ISSUED = 300, 700  # of a pair of outer products: of text, and in its loops
# Registers of a thread beside fragments and accumulators, and more of them.
BESIDE, BESIDE_PLANES, BESIDE_WGMMA = 60, 22, 14
BESIDE_MEMORY, BESIDE_MEMORY_WGMMA, BESIDE_PARTS = 72, 30, 32


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved(Places):
    """One config for one problem: registers, instructions, arguments and results."""

    # Registers and instructions.

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
            kept = self._kept(place) - {*held} if self.config.copied else read.intersection(self.in_memory)
            sums = len(stage.affine) * tiles * padded(stage.width) // 2
            return self._fragments(held) + self._fragments(tuple(kept)) + sums + chunks
        return self._fragments(held) + self._fragments(handed) + more + chunks + self.words

    def _kept(self, place: int) -> set[int]:
        """Returns the values of earlier stages that are in registers for one, or for later ones."""
        stages = self.schedule.stages
        before = {x for stage in stages[:place] for x in stage.makes}
        read = {x for stage in stages[place:] for step, _ in stage.maps for x in step.values}
        read.update(x for stage in stages[place:] for x in self.schedule.multiplied(stage))
        return before & read & self.kept

    @property
    def registers(self) -> int:
        """About how many registers a thread needs."""
        most = max((self.registers_of(i, stage) for i, stage in enumerate(self.schedule.stages)), default=0)
        c = self.config
        # Addresses of global memory are the longer ones, and parts are made of parts.
        of_memory = BESIDE_MEMORY_WGMMA if c.wgmma else BESIDE_MEMORY
        more = of_memory * (c.memory and c.chained and bool(self.stash_bytes)) + BESIDE_PARTS * (self.parts - 1)
        rows = [self.schedule.width(x) for x in self.prefetched]
        rows += [self.schedule.width(x) for _, x in self.written]
        more_beside = 4 * (sum(n > 8 for n in rows) + self._long_functions)
        beside = BESIDE_PLANES if c.planes else BESIDE_WGMMA + more_beside if c.wgmma else BESIDE
        return most + beside + more + (0 if c.memory_sums else self.sum_registers)

    @property
    def _long_functions(self) -> bool:
        """True if a stage's function is of several operations, or computed to more than 8 bits."""
        if self.problem.dtype.name != "bfloat16":
            return True
        found = [self.schedule.function(stage) for stage in self.schedule.stages]
        nodes = [x[0].function.nodes for x in found if x]
        return any(sum(node.op not in ("acc", "const") for node in of) > 1 for of in nodes)

    @property
    def sum_registers(self) -> int:
        """Registers of a thread that have sums of outer products."""
        kinds, found = self.problem.program.kinds, 0
        if self.config.apart:
            return sum(padded(self.schedule.width(wide)) // 16 + 2 for wide, _ in self.narrow.values())
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
            shape = (p.networks, self.blocks * self.groups, self.partials)
            found["float* partials"] = jax.ShapeDtypeStruct(shape, np.dtype("f4"))
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
