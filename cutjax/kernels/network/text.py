"""The device text of a network's kernel: its phases written out, on top of ffi/device/network/."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.network.program import Affine, Map
from cutjax.kernels.network.resolved import Resolved
from cutjax.kernels.network.schedule import OuterPhase, Stage, padded
from cutjax.kernels.wgmma import wgmma

_UNROLL = {True: "#pragma unroll", False: "#pragma unroll 1"}


def functions(of: Resolved) -> str:
    """Returns the text of the elementwise functions, each a function of its values and its results."""
    found = [emit.emit(function).replace("epilogue_element", f"function{i}") for function, i in numbers(of).items()]
    return "".join(found)


def numbers(of: Resolved) -> dict[Epilogue, int]:
    """Returns the number of each elementwise function."""
    found = [of.schedule.function(stage) for stage in of.schedule.stages]
    again = [of.schedule.makers[x] for x in of.schedule.made_again]
    used = [of.function(x[0], x[1]) for x in (*found, *again) if x and isinstance(x[0], Map)]
    return {function: i for i, function in enumerate(dict.fromkeys(used))}


class Body:
    """The text of a kernel's body, phase by phase."""

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
        self.early = set[int]()  # what a stage reads of memory, which is loaded before it waits for products

    def text(self) -> str:
        """Returns the text."""
        lines = [
            *self._prologue(),
            *self._fetched("first"),
            "for (int tile = first; tile < tiles; tile += blocks) {",
            *self._tile(),
            "}",
        ]
        return "".join(f"  {line}\n" for line in [*lines, *self._finish()])

    def _prologue(self) -> Iterator[str]:
        of = self.of
        yield "const int network = blockIdx.x / blocks, first = blockIdx.x % blocks;"
        yield "extern __shared__ __align__(1024) unsigned char shared_memory[];"
        yield "const u32 shared = shared_address(shared_memory);"
        stored: list[str] = []  # what waits for loads of vectors, all of which are on their way
        for i, (kind, (dtype, own)) in enumerate(zip(self.program.inputs, of.problem.given, strict=True)):
            size, elements = f"SIZE<Dtype::{DTYPES[dtype].stored}>", " * ".join(map(str, kind.sizes))
            whole = f"static_cast<i64>(rows) * {elements}" if kind.name == "rows" else elements
            if own:
                yield f"in{i} += static_cast<i64>(network) * {whole} * {size};"
            if kind.name == "vector" and padded(kind.sizes[0]) <= of.threads:
                (n,) = kind.sizes
                yield f"const float element{i} = load_element<Dtype::{DTYPES[dtype].stored}>(in{i}, {n});"
                yield f"float* const vector{i} = reinterpret_cast<float*>(shared_memory + {of.places[i]});"
                stored.append(f"if (threadIdx.x < {padded(n)}) vector{i}[threadIdx.x] = element{i};")
            elif kind.name == "matrix":
                k, n = kind.sizes
                yield f"{self._matrix(i)}::load(shared + {of.places[i]}, in{i}, {k}, {n});"
            elif kind.name == "vector":
                (n,) = kind.sizes
                yield f"float* const vector{i} = reinterpret_cast<float*>(shared_memory + {of.places[i]});"
                yield f"load_vector<Dtype::{DTYPES[dtype].stored}>(vector{i}, in{i}, {n}, {padded(n)});"
        yield from stored
        for i, x in of.written:
            yield f"out{i} += static_cast<i64>(network) * rows * {self.schedule.width(x)} * {self._size(i)};"
        if of.partials:
            yield f"partials += static_cast<i64>(blockIdx.x) * {of.partials};"
        for x in of.warp_sums:
            yield f"float* const sums{x} = reinterpret_cast<float*>(shared_memory + {of.places[x]});"
            size = f"WARPS * {of.warp_elements(x)}"
            yield f"for (int at = threadIdx.x; at < {size}; at += THREADS) sums{x}[at] = 0.0f;"
        if of.apart:
            yield f"planes += static_cast<i64>(network) * tiles * (ROWS * 128 * {of.chunks});"
        if of.stash_bytes:
            memory = f"stashes + static_cast<i64>(blockIdx.x) * {of.stash_bytes}"
            begin = memory if of.config.memory else f"reinterpret_cast<char*>(shared_memory) + {of.stash_place}"
            yield f"char* const own_stash = {begin} + threadIdx.x * 16;"
        if not of.config.memory_sums and not of.config.apart:
            for x in self.schedule.outers:
                yield f"{self._products(x)} products{x};"
                yield f"products{x}.clear();"
        if of.config.outer_wgmma:
            one = "0x3c003c00" if of.math == "f16" else "0x3f803f80"
            yield f"for (int at = threadIdx.x; at < {32 * of.rows}; at += THREADS)"
            yield f"  st_shared_u32(shared + {of.ones} + at * 4, {one});"
        yield "cp_async_commit_group();"
        yield "cp_async_wait_group<0>();"
        if of.config.wgmma:
            yield "fence_proxy_async();"
        yield "__syncthreads();"

    def _matrix(self, x: int) -> str:
        k, n = self.program.kinds[x].sizes
        return f"{'Swizzled' if self.of.swizzled(x) else 'Matrix'}<{padded(n)}, {padded(k)}>"

    def _size(self, i: int) -> str:
        return f"SIZE<Dtype::{DTYPES[self.of.problem.dtypes[i]].stored}>"

    def _products(self, x: int) -> str:
        a, b = self.program.kinds[x].sizes
        if self.of.config.outer_wgmma:
            summed = any(phase.result == x for phase in self.of.summed)
            return f"WarpgroupProducts<{a}, {b}, {str(summed).lower()}>"
        return f"HeldProducts<{a}, {b}>"

    def _tile(self) -> Iterator[str]:
        yield "  const int row = tile * ROWS + threadIdx.x / 32 * (16 * M_TILES) + lane() / 4;"
        if self.of.apart:
            yield f"  char* const own_planes = own_rows<{self.of.chunks}>(planes, row);"
        for x in self.of.prefetched:
            yield f"  const Chunk now{x} = next{x}.chunk();"
        yield from (f"  {line}" for line in self._fetched("tile + blocks"))
        for x in sorted(filter(self.schedule.is_input, self.schedule.planes)):
            slices, loaded = padded(self.schedule.width(x)) // 16, self._loaded(x, "j")
            if x in self.of.in_shared:
                yield from (f"  {line}" for line in self._writes([x]))
                yield "  #pragma unroll"
                yield f"  for (int j = 0; j < {slices}; ++j)"
                yield f"    {self._staged(x)}::store(shared + {self.of.plane(x).start}, packed({loaded}), j);"
            if x in self.of.in_memory:
                yield "  {"
                yield f"    Fragment f[{slices}];"
                yield "    #pragma unroll"
                yield f"    for (int j = 0; j < {slices}; ++j) f[j] = packed({loaded});"
                yield f"    store_plane<{self.of.in_memory[x]}>(own_planes, f, row, rows);"
                yield "  }"
        for step, x in self.schedule.sums:
            if x in self.of.summed.values():
                continue
            for value in filter(self.schedule.is_input, step.values):
                yield from self._columns(value, [f"add_columns({self._sums(x)}, c{value}, row, rows, j);"])
        for phase in self.schedule.phases:
            if isinstance(phase, Stage):
                yield from self._stage(phase)
                self.place += 1
            else:
                yield from self._outer(phase)
        if self.pending:
            yield "  wgmma_wait_group<0>();"

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
        yield f"  {_UNROLL[unroll]}"
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

    def _stage(self, stage: Stage) -> Iterator[str]:
        schedule, chained = self.schedule, self.schedule.chained
        multiplied = schedule.multiplied(stage)
        slices = padded(stage.width) // 16
        handed = [x for i, x in schedule.handed if i == self.place + 1 and x in stage.makes]
        lasting = [x for x in stage.makes if x in self.of.in_memory]
        for x in dict.fromkeys([*handed, *lasting]):
            yield f"  Fragment f{x}[{slices}];"
        made = self.of.in_shared.intersection(stage.makes)
        # What is handed on, and may not be written before other warps have read, waits for the last column.
        self.waiting = made if made <= {*handed} and self._meet(made, self.read) else set()
        if not self.waiting:
            yield from (f"  {line}" for line in self._writes(made))
        if self.schedule.planes:
            yield "  __syncwarp();"
        yield "  {"
        ahead = [x for x in multiplied if (self.place, x) not in schedule.handed and self.of.ahead[self.place]]
        for x in ahead:
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
        yield f"    {_UNROLL[chained]}"
        yield f"    for (int j = 0; j < {slices}; ++j) {{"
        yield from (f"      {line}" for line in self._columns_of(stage, ahead, [*dict.fromkeys([*handed, *lasting])]))
        yield "    }"
        yield "  }"
        self.early.clear()
        after = self.place + 1
        if self.of.config.outer_wgmma and after < len(schedule.stages) and self.of.at_once(after):
            following = schedule.stages[after]
            if all((after, x) in schedule.handed for x in schedule.multiplied(following)):
                yield from (f"  {line}" for line in self._begun(following, after))
        yield from (f"  store_plane<{self.of.in_memory[x]}>(own_planes, f{x}, row, rows);" for x in lasting)
        if self.waiting:
            yield from (f"  {line}" for line in self._writes(made))
        for x in self.waiting:
            yield f"  {_UNROLL[True]}"
            stored = f"{self._staged(x)}::store(shared + {self.of.plane(x).start}, f{x}[j], j);"
            yield f"  for (int j = 0; j < {slices}; ++j) {stored}"
        for x in sorted(made):
            cleared = f"{self._staged(x)}::clear(shared + {self.of.plane(x).start}, row, rows);"
            yield f"  if ((tile + 1) * ROWS > rows) {cleared}"

    def _read_early(self, stage: Stage) -> set[int]:
        """Returns the values in memory that the functions of a stage read."""
        function = self.schedule.function(stage)
        return set(function[0].values if function else ()).intersection(self.of.in_memory).difference(stage.makes)

    def _begun(self, stage: Stage, place: int) -> Iterator[str]:
        """Yields the lines that begin the products of all columns of a stage, sums ``s<value>``."""
        self.begun.add(place)
        self.since = 0
        slices = padded(stage.width) // 16
        for x in stage.affine:
            yield f"Sums<{8 * slices}> s{x};"
        yield _UNROLL[True]
        yield f"for (int j = 0; j < {slices}; ++j) {{"
        for x in stage.affine:
            yield from (f"  {line}" for line in self._first(x))
            yield f"  s{x}.set(c{x}, j);"
        yield "}"
        yield "wgmma_fence();"
        yield _UNROLL[True]
        yield "for (int i = 0; i < M_TILES; ++i) {"
        for (matrix, transposed), pairs in self.schedule.terms(stage).items():
            k, n = self.program.kinds[matrix].sizes
            t = str(transposed).lower()
            yield f"  {_UNROLL[True]}"
            yield f"  for (int k = 0; k < {padded(n if transposed else k) // 16}; ++k) {{"
            yield f"    const u64 b = {self._matrix(matrix)}::descriptor<{t}>(shared + {self.of.places[matrix]}, k);"
            for result, x in pairs:
                yield f"    {wgmma_name(stage, transposed)}(s{result}.x[i], f{x}[k].w[i], b, 1);"
            yield "  }"
        yield "}"
        yield "wgmma_commit_group();"

    def _multiplied(self, stage: Stage) -> Iterator[str]:
        """Yields the wait for products, but not for outer products that were begun since."""
        yield f"wgmma_wait_group<{self.since}>();"
        self.pending = self.since > 0
        for x in stage.affine:
            yield _UNROLL[True]
            yield f"for (int i = 0; i < M_TILES; ++i) wgmma_done(s{x}.x[i]);"

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
            yield _UNROLL[not late]
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

    def _outer(self, phase: OuterPhase) -> Iterator[str]:
        if self.of.config.planes:
            yield from self._outer_of_planes(phase)
            return
        yield "  __syncthreads();"
        places = self.of.staged(phase)
        for x, place in zip((phase.a, phase.b), places, strict=True):
            width = padded(self.schedule.width(x))
            stored = f"Staged<{width}>::store_cleared(shared + {place}, c{x}, row, rows, j);"
            yield from self._columns(x, [stored])
        yield "  __syncthreads();"
        at = f"partials + {self.of.sums[phase.result]}"
        if not self.of.config.memory_sums:
            yield f"  products{phase.result}.add(shared + {places[0]}, shared + {places[1]});"
            return
        earlier = next(x for x in self.schedule.phases if isinstance(x, OuterPhase) and x.result == phase.result)
        before = "true" if earlier is not phase else "tile != first"
        sizes = ", ".join(map(str, self.program.kinds[phase.result].sizes))
        yield f"  Products<{sizes}>::add_in_memory({at}, {before}, shared + {places[0]}, shared + {places[1]});"

    def _outer_of_planes(self, phase: OuterPhase) -> Iterator[str]:
        if phase in self.of.apart:
            return
        places = self.of.staged(phase)
        factors = (phase.a, phase.b)
        more = f", {self._sums(self.of.summed[phase])}" if phase in self.of.summed else ""
        if self.of.config.apart:
            sizes = ", ".join(map(str, self.program.kinds[phase.result].sizes))
            of_both = f"shared + {places[0]}, shared + {places[1]}"
            yield "  __syncwarp();"
            yield f"  OwnProducts<{sizes}>::add({self._sums(phase.result)}, {of_both}{more});"
            return
        if self._meet(factors, self.made):
            yield from (f"  {line}" for line in self._barrier())
        self.read.update(factors)
        if self.of.config.outer_wgmma:
            self.pending = True
            self.since += 1
            yield f"  products{phase.result}.add(shared + {places[0]}, shared + {places[1]}, shared + {self.of.ones});"
            return
        yield f"  products{phase.result}.add(shared + {places[0]}, shared + {places[1]}{more});"

    def _finish(self) -> Iterator[str]:
        if not self.of.config.memory_sums and not self.of.config.apart:
            for x in self.schedule.outers:
                sums = ""
                if self.of.config.outer_wgmma:
                    found = [at for phase, at in self.of.summed.items() if phase.result == x]
                    sums = f", partials + {self.of.sums[found[0]]}" if found else ", nullptr"
                yield f"products{x}.store(partials + {self.of.sums[x]}{sums});"
        if self.of.warp_sums:
            yield "__syncthreads();"
        for x in self.of.warp_sums:
            yield f"for (int at = threadIdx.x; at < {math.prod(self.program.kinds[x].sizes)}; at += THREADS) {{"
            yield "  float sum = 0.0f;"
            yield f"  for (int warp = 0; warp < WARPS; ++warp) sum += sums{x}[warp * {self.of.warp_elements(x)} + at];"
            yield f"  partials[{self.of.sums[x]} + at] = sum;"
            yield "}"


def wgmma_name(stage: Stage, transposed: bool) -> str:
    """Returns the name of the instruction that multiplies all columns of a stage."""
    return f"wgmma{padded(stage.width)}{'t' * transposed}"


def instructions(of: Resolved) -> str:
    """Returns the text of the instructions of wgmma."""
    found = {}
    for place, stage in enumerate(of.schedule.stages):
        for _, transposed in of.schedule.terms(stage) if of.at_once(place) else ():
            name, dtype = wgmma_name(stage, transposed), of.problem.dtype
            found[name] = wgmma(padded(stage.width), dtype, dtype, True, transposed, True).replace("wgmma(", f"{name}(")
    for x in of.schedule.outers if of.config.outer_wgmma else ():
        a, b = map(padded, of.problem.program.kinds[x].sizes)
        n = a if b % 64 == 0 else b
        dtype = of.problem.dtype
        found["ones"] = wgmma(8, dtype, dtype, False, True).replace("wgmma(", "wgmma_ones(")
        if any(phase.result == x for phase in of.summed) and n in (16, 32, 64):
            n += 8
        found[n] = wgmma(n, dtype, dtype, False, False).replace("wgmma(", "wgmma_outer(")
    return "".join(found.values()).replace("Acc (", "float (")


def kernel_text(of: Resolved) -> str:
    """Returns the text of the kernel itself."""
    parameters = ", ".join(argument.declaration for argument in of.arguments)
    return f"""#line 1 "network (generated)"
{functions(of)}#line 1 "body (generated)"
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL({parameters}) {{
{Body(of).text()}}}
"""
