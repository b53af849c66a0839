"""The device text of values: where a stage finds them, functions of them, and where warps wait for each other."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator

from cutjax.dtypes import DTYPES
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.network.program import Map
from cutjax.kernels.network.resolved import Resolved
from cutjax.kernels.network.schedule import padded

UNROLL = {True: "#pragma unroll", False: "#pragma unroll 1"}


def numbers(of: Resolved) -> dict[Epilogue, int]:
    """Returns the number of each elementwise function."""
    found = [of.schedule.function(stage) for stage in of.schedule.stages]
    again = [of.schedule.makers[x] for x in of.schedule.made_again]
    used = [of.function(x[0], x[1]) for x in (*found, *again) if x and isinstance(x[0], Map)]
    return {function: i for i, function in enumerate(dict.fromkeys(used))}


class Values:
    """The text of values, and what is known of them where the text has come to."""

    def __init__(self, of: Resolved):
        self.of, self.schedule, self.program = of, of.schedule, of.schedule.program
        # Values whose planes other warps may read, or which were made, since all warps met; at first, the last tile's.
        self.read, self.made = set(self.schedule.planes), set[int]()
        self.waiting: Collection[int] = ()  # of a stage, what it writes to planes at its end
        self.functions = numbers(of)
        self.begun = set[int]()  # the places of stages whose products were begun
        self.since = 0  # outer products that were begun since
        self.pending = False  # whether wgmmas of outer products are waited for
        self.place = 0  # of a stage
        self.staged: list[int] = []  # the buffers in order
        self.buffer = 1  # the buffer of a plane that was staged last
        self.outstanding = False  # whether wgmmas of a narrow factor are
        self.early = set[int]()  # what a stage reads of memory, which is loaded before it waits for products

    def _matrix(self, x: int) -> str:
        k, n = self.program.kinds[x].sizes
        return f"{'Swizzled' if self.of.swizzled(x) else 'Matrix'}<{padded(n)}, {padded(k)}>"

    def _size(self, i: int) -> str:
        return f"SIZE<Dtype::{DTYPES[self.of.problem.dtypes[i]].stored}>"

    def _fetched(self, tile: str) -> Iterator[str]:
        """Yields the loads of what is prefetched for a tile."""
        at = f"({tile}) * ROWS + threadIdx.x / 32 * (16 * M_TILES) + lane() / 4"
        for x in self.of.prefetched:
            if tile == "first":
                yield f"{self._rows(x)} next{x};"
            yield f"next{x}.load(in{x}, {at}, rows, 0);"

    def _rows(self, x: int) -> str:
        return f"Rows<Dtype::{DTYPES[self.of.problem.given[x][0]].stored}, {self.schedule.width(x)}>"

    def _loaded(self, x: int, j: str) -> str:
        """Returns the chunk of an input."""
        rows = self._rows(x).removeprefix("Rows")
        return f"now{x}" if x in self.of.prefetched else f"load_rows{rows}(in{x}, row, rows, {j})"

    def _writes(self, values: Collection[int]) -> Iterator[str]:
        """Yields a barrier where other warps may still read what planes of some values had before."""
        if self._meet(values, self.read):
            yield from self._barrier()
        self.made.update(values)

    def _barrier(self) -> Iterator[str]:
        if self.of.config.outer_wgmma:
            if self.pending:
                yield "wgmma_wait_group<0>();"
                self.pending, self.since = False, 0
            if self.made:
                yield "fence_proxy_async();"
        yield "__syncthreads();"
        self.read.clear()
        self.made.clear()

    def _meet(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """True if planes of some values and of others overlap, of which warps read each other's rows."""
        return not self.of.config.apart and any(
            x.start < y.stop and y.start < x.stop for x in map(self.of.plane, some) for y in map(self.of.plane, others)
        )

    def _staged(self, x: int) -> str:
        return f"{'Plane' if self.of.config.outer_wgmma else 'Staged'}<{padded(self.schedule.width(x))}>"

    def _sums(self, x: int) -> str:
        return f"sums{x} + threadIdx.x / 32 * {self.of.warp_elements(x)}"

    def _columns(self, value: int, then: list[str], unroll: bool = False) -> Iterator[str]:
        """Yields a loop over the columns of a value that is read again, in chunks ``c<value>``."""
        yield f"  {UNROLL[unroll]}"
        yield f"  for (int j = 0; j < {padded(self.schedule.width(value)) // 16}; ++j) {{"
        yield from (f"    {line}" for line in [*self._chunk(value, "j", set()), *then])
        yield "  }"

    def _chunk(self, x: int, j: str, known: set[int]) -> Iterator[str]:
        """Yields the lines that make the chunk of a value that is read again, unless it is known already."""
        if x in known:
            return
        known.add(x)
        if x in self.early:
            yield f"const Chunk c{x} = unpacked(h{x}[{j}]);"
        elif x in self.of.in_shared:
            yield f"const Chunk c{x} = {self._staged(x)}::load(shared + {self.of.plane(x).start}, {j});"
        elif self.schedule.is_input(x):
            yield f"const Chunk c{x} = {self._loaded(x, j)};"
        elif x in self.of.staying:
            yield f"const Chunk c{x} = staged_chunk(staging + {2 * self.of.staging_bytes}, {j});"
        elif x in self.of.kept:
            yield f"const Chunk c{x} = unpacked(f{x}[{j}]);"
        elif x in self.of.in_memory:
            yield f"const Chunk c{x} = plane_chunk<{self.of.in_memory[x]}>(own_planes, {j});"
        elif x in self.schedule.stashed:
            yield f"const Chunk c{x} = unstash({self._stash(x, j)});"
        else:
            step, values = self.schedule.makers[x]
            assert isinstance(step, Map)
            for y in step.values:
                yield from self._chunk(y, j, known)
            known.update(values)
            yield from self._map(step, values)
            yield from self._cleared(x, j)

    def _cleared(self, x: int, j: str) -> Iterator[str]:
        width = self.schedule.width(x)
        if width % 16:
            yield f"clear_columns<{width}>(c{x}, {j});"

    def _stash(self, x: int, j: str) -> str:
        return f"own_stash + ({self.of.slots[x]} + {j}) * (STASH_VECTORS * 16 * THREADS)"

    def _map(self, step: Map, values: tuple[int, ...]) -> Iterator[str]:
        yield f"Chunk {', '.join(f'c{x}' for x in values)};"
        given = ", ".join(f"c{x}.x[i][h][e]" for x in step.values)
        made = ", ".join(f"c{x}.x[i][h][e]" for x in values)
        yield "EACH_ELEMENT {"
        yield f"  const float value[{len(step.values)}] = {{{given}}};"
        yield f"  function{self.functions[self.of.function(step, values)]}(value, 0, 0, {made});"
        yield "}"

    def _buffer(self, x: int | None = None) -> Generator[str, None, int]:
        """Yields the wait for a warpgroup's buffer, of two in turns or of a value's own; returns its number."""
        if x not in self.of.staying:
            self.buffer ^= 1
        buffer = 2 if x in self.of.staying else self.buffer
        self.staged.append(buffer)
        if self.outstanding:
            yield "wgmma_wait_group<0>();"
            self.outstanding = False
        yield "begin_staging();"
        return buffer
