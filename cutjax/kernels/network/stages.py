"""The device text of stages: products, the functions of their sums, and the planes that they write."""

from __future__ import annotations

from collections.abc import Iterator

from cutjax.dtypes import DTYPES
from cutjax.kernels.network.program import Affine
from cutjax.kernels.network.schedule import Stage, padded
from cutjax.kernels.network.values import UNROLL, Values


def wgmma_name(stage: Stage, transposed: bool) -> str:
    """Returns the name of the instruction that multiplies all columns of a stage."""
    return f"wgmma{padded(stage.width)}{'t' * transposed}"


class Stages(Values):
    """The text of stages."""

    def _stage(self, stage: Stage) -> Iterator[str]:
        schedule, chained = self.schedule, self.schedule.chained
        multiplied = schedule.multiplied(stage)
        slices = padded(stage.width) // 16
        handed = [x for i, x in schedule.handed if i == self.place + 1 and x in stage.makes]
        lasting = [x for x in stage.makes if x in self.of.lasting]
        for x in dict.fromkeys([*handed, *lasting]):
            yield f"  Fragment f{x}[{slices}];"
        made = self.of.in_shared.intersection(stage.makes)
        # What is handed on, and may not be written before other warps have read, waits for the last column.
        self.waiting = made if made <= {*handed} and self._meet(made, self.read) else set()
        if not self.waiting:
            yield from (f"  {line}" for line in self._writes(made))
        if made or self._reads_shared(stage):
            yield "  __syncwarp();"
        yield "  {"
        ahead = [x for x in multiplied if (self.place, x) not in schedule.handed and self.of.ahead[self.place]]
        for x in ahead:
            if x in self.of.kept:
                continue
            yield f"    Fragment f{x}[{padded(schedule.width(x)) // 16}];"
            yield from (f"  {line}" for line in self._columns(x, [f"f{x}[j] = packed(c{x});"], True))
        at_once = self.of.at_once(self.place)
        if at_once and self.place not in self.begun:
            yield from (f"    {line}" for line in self._begun(stage, self.place))
        for x in sorted(self._read_early(stage)):
            yield f"    Fragment h{x}[{slices}];"
            yield f"    load_plane<{self.of.in_memory[x]}>(own_planes, h{x});"
            self.early.add(x)
        if at_once:
            yield from (f"    {line}" for line in self._multiplied(stage))
        yield f"    {UNROLL[chained]}"
        yield f"    for (int j = 0; j < {slices}; ++j) {{"
        yield from (f"      {line}" for line in self._columns_of(stage, ahead, [*dict.fromkeys([*handed, *lasting])]))
        yield "    }"
        yield "  }"
        self.early.clear()
        after = self.place + 1
        for x in lasting if self.of.config.copied else ():
            yield f"  if ((tile + 1) * ROWS > rows) clear_rows_of(f{x}, row, rows);"
        early = self.of.config.outer_wgmma or self.of.config.copied
        if early and after < len(schedule.stages) and self.of.at_once(after):
            following = schedule.stages[after]
            if all((after, x) in schedule.handed for x in schedule.multiplied(following)):
                if self.outstanding:
                    yield "  wgmma_wait_group<0>();"
                    self.outstanding = False
                yield from (f"  {line}" for line in self._begun(following, after))
        for x in lasting:
            if x not in self.of.in_memory:
                continue
            if self.of.config.copied:
                yield from (f"  {line}" for line in self._copied(x))
                continue
            yield f"  store_plane<{self.of.in_memory[x]}>(own_planes, f{x}, row, rows);"
        if self.waiting:
            yield from (f"  {line}" for line in self._writes(made))
        for x in self.waiting:
            yield f"  {UNROLL[True]}"
            stored = f"{self._staged(x)}::store(shared + {self.of.plane(x).start}, f{x}[j], j);"
            yield f"  for (int j = 0; j < {slices}; ++j) {stored}"
        for x in sorted(made):
            cleared = f"{self._staged(x)}::clear(shared + {self.of.plane(x).start}, row, rows);"
            yield f"  if ((tile + 1) * ROWS > rows) {cleared}"

    def _copied(self, x: int) -> Iterator[str]:
        """Yields the copy of a plane to memory."""
        buffer = yield from self._buffer(x)
        at, place = f"staging + {buffer * self.of.staging_bytes}", self.of.in_memory[x] * 8192
        yield f"stage_plane({at}, f{x});"
        yield f"copy_plane<{padded(self.schedule.width(x)) // 64}>(own_planes + {place}, {at});"

    def _reads_shared(self, stage: Stage) -> bool:
        """True if a stage reads planes in shared memory."""
        read = {x for step, _ in stage.maps for x in step.values}
        read.update(x for x in self.schedule.multiplied(stage) if (self.place, x) not in self.schedule.handed)
        return bool(self.of.in_shared.intersection(read))

    def _read_early(self, stage: Stage) -> set[int]:
        """Returns the values in memory that the functions of a stage read."""
        if self.of.config.copied:
            return set()
        function = self.schedule.function(stage)
        return set(function[0].values if function else ()).intersection(self.of.in_memory).difference(stage.makes)

    def _begun(self, stage: Stage, place: int) -> Iterator[str]:
        """Yields the lines that begin the products of all columns of a stage, sums ``s<value>``."""
        self.begun.add(place)
        self.since = 0
        slices = padded(stage.width) // 16
        for x in stage.affine:
            yield f"Sums<{8 * slices}> s{x};"
        by_wgmma = {x: self._by_wgmma(x) for x in stage.affine}
        # Products that begin anew: with those with ones, or without any to be added to.
        multiplied = {x for pairs in self.schedule.terms(stage).values() for x, _ in pairs}
        without = {x for x in multiplied if not self._vectors(x)} | {x for x in stage.affine if by_wgmma[x]}
        yield UNROLL[True]
        yield f"for (int j = 0; j < {slices}; ++j) {{"
        for x in stage.affine:
            if x not in without:
                yield from (f"  {line}" for line in self._first(x))
                yield f"  s{x}.set(c{x}, j);"
        yield "}"
        yield "wgmma_fence();"
        yield UNROLL[True]
        yield "for (int i = 0; i < M_TILES; ++i) {"
        for x in stage.affine:
            for n, vector in enumerate(self._vectors(x) if by_wgmma[x] else ()):
                at, zeros = self.of.biases[0][vector], self.of.zeros
                b = f"bias_descriptor(shared >> 4, {at}, {zeros})"
                yield f"  wgmma{padded(stage.width)}(s{x}.x[i], ones.w[i], {b}, {int(n > 0)});"
                without.discard(x)
        for (matrix, transposed), pairs in self.schedule.terms(stage).items():
            k, n = self.program.kinds[matrix].sizes
            t = str(transposed).lower()
            yield f"  {UNROLL[True]}"
            yield f"  for (int k = 0; k < {padded(n if transposed else k) // 16}; ++k) {{"
            yield f"    const u64 b = {self._matrix(matrix)}::descriptor<{t}>(shared, {self.of.places[matrix]}, k);"
            for result, x in pairs:
                more = "k > 0" if result in without else "1"
                without.discard(result)
                yield f"    {wgmma_name(stage, transposed)}(s{result}.x[i], f{x}[k].w[i], b, {more});"
            yield "  }"
        yield "}"
        yield "wgmma_commit_group();"

    def _multiplied(self, stage: Stage) -> Iterator[str]:
        """Yields the wait for products, but not for outer products that were begun since."""
        yield f"wgmma_wait_group<{self.since}>();"
        self.outstanding = False
        self.pending = self.since > 0
        for x in stage.affine:
            yield UNROLL[True]
            yield f"for (int i = 0; i < M_TILES; ++i) wgmma_done(s{x}.x[i]);"

    def _vectors(self, x: int) -> tuple[int, ...]:
        """Returns the vectors that products are added to."""
        step, _ = self.schedule.makers[x]
        assert isinstance(step, Affine)
        return step.vectors

    def _by_wgmma(self, x: int) -> bool:
        """True if products with ones are what products are added to."""
        vectors = self._vectors(x)
        return bool(vectors) and all(vector in self.of.biases[0] for vector in vectors)

    def _first(self, x: int) -> Iterator[str]:
        """Yields the chunk that products are added to: of vectors, or of zeros."""
        step, _ = self.schedule.makers[x]
        assert isinstance(step, Affine)
        first, *more = step.vectors or (None,)
        yield f"Chunk c{x}{{}};" if first is None else f"Chunk c{x} = vector_rows(vector{first}, j);"
        for vector in more:
            yield f"add_vector(c{x}, vector{vector}, j);"

    def _products_of(self, stage: Stage, ahead: list[int]) -> Iterator[str]:
        """Yields the products of 16 columns of a stage."""
        schedule = self.schedule
        for x in stage.affine:
            yield from self._first(x)
        for (matrix, transposed), pairs in schedule.terms(stage).items():
            k, n = self.program.kinds[matrix].sizes
            there = f"{self._matrix(matrix)}::columns<{str(transposed).lower()}>"
            slices = padded(n if transposed else k) // 16
            late = dict.fromkeys(x for _, x in pairs if x not in ahead and (self.place, x) not in schedule.handed)
            yield UNROLL[not late]
            yield f"for (int k = 0; k < {slices}; ++k) {{"
            yield f"  const Columns b = {there}(shared + {self.of.places[matrix]}, k, j);"
            for x in late:
                yield f"  Fragment f{x};"
                yield "  {"
                yield from (f"    {line}" for line in self._chunk(x, "k", set()))
                yield f"    f{x} = packed(c{x});"
                yield "  }"
            for result, x in pairs:
                yield f"  multiply_add(c{result}, f{x}{'' if x in late else '[k]'}, b);"
            yield "}"

    def _columns_of(self, stage: Stage, ahead: list[int], handed: list[int]) -> Iterator[str]:
        schedule = self.schedule
        if self.of.at_once(self.place):
            yield from (f"Chunk c{x} = s{x}.chunk(j);" for x in stage.affine)
        else:
            yield from self._products_of(stage, ahead)
        known = set(stage.makes)
        if function := schedule.function(stage):
            known -= {x for _, values in stage.maps for x in values}
            for x in function[0].values:
                yield from self._chunk(x, "j", known)
            yield from self._map(*function)
        for i, x in self.of.written:
            if x in stage.makes:
                dtype = DTYPES[self.of.problem.dtypes[i]].stored
                yield f"store_rows<Dtype::{dtype}, {stage.width}>(out{i}, c{x}, row, rows, j);"
        for step, x in schedule.sums:
            for value in step.values:
                if value in stage.makes and x not in self.of.summed.values():
                    yield f"add_columns({self._sums(x)}, c{value}, row, rows, j);"
        for x in stage.makes:
            if x in handed or x in schedule.stashed or x in schedule.planes:
                yield from self._cleared(x, "j")
            if x in schedule.planes:
                yield f"const Fragment p{x} = packed(c{x});"
            if x in self.of.in_shared and x not in self.waiting:
                yield f"{self._staged(x)}::store(shared + {self.of.plane(x).start}, p{x}, j);"
        yield from (f"f{x}[j] = {f'p{x}' if x in schedule.planes else f'packed(c{x})'};" for x in handed)
        for x in stage.makes:
            if x in schedule.stashed:
                yield f"stash({self._stash(x, 'j')}, c{x});"
