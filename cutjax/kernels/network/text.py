"""The device text of a network's kernel: its phases written out, on top of ffi/device/network/."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.kernels.network.resolved import Resolved
from cutjax.kernels.network.schedule import OuterPhase, Stage, padded
from cutjax.kernels.network.stages import Stages, wgmma_name
from cutjax.kernels.network.values import numbers
from cutjax.kernels.wgmma import wgmma


def functions(of: Resolved) -> str:
    """Returns the text of the elementwise functions, each a function of its values and its results."""
    found = [emit.emit(function).replace("epilogue_element", f"function{i}") for function, i in numbers(of).items()]
    return "".join(found)


class Body(Stages):
    """The text of a kernel's body, phase by phase."""

    def text(self) -> str:
        """Returns the text."""
        lines = [
            *self._prologue(),
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
        matrices: list[str] = []  # which wait for loads of odd columns, when vectors' are on their way
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
                if i in of.biases[0]:
                    at = of.biases[0][i]
                    stored.append(f"if (threadIdx.x < {padded(n)}) store_bias(shared_memory + {at}, element{i});")
            elif kind.name == "matrix":
                k, n = kind.sizes
                matrices.append(f"{self._matrix(i)}::load(shared + {of.places[i]}, in{i}, {k}, {n});")
            elif kind.name == "vector":
                (n,) = kind.sizes
                yield f"float* const vector{i} = reinterpret_cast<float*>(shared_memory + {of.places[i]});"
                yield f"load_vector<Dtype::{DTYPES[dtype].stored}>(vector{i}, in{i}, {n}, {padded(n)});"
        yield from matrices
        yield from stored
        if of.biases[0]:
            yield "const Fragment ones = ones_of_biases();"
            yield f"clear_biases<{of.zeros}, {of.biases[1]}>(shared);"
        for i, x in of.written:
            yield f"out{i} += static_cast<i64>(network) * rows * {self.schedule.width(x)} * {self._size(i)};"
        if of.partials:
            part = f"(blockIdx.x * {of.groups} + threadIdx.x / 128)" if of.groups > 1 else "blockIdx.x"
            yield f"partials += static_cast<i64>({part}) * {of.partials};"
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
        if of.config.copied:
            group = f"threadIdx.x / 128 * {of.group_bytes}"
            yield f"const u32 staging = shared + {of.staging} + uniform({group});"
        for i, (wide, narrow) in enumerate(of.narrow.values()):
            sizes = f"{self.schedule.width(wide)}, {self.schedule.width(narrow)}"
            yield f"NarrowProducts<{sizes}> narrow{i};"
            yield f"narrow{i}.clear();"
        if not of.config.memory_sums and not of.config.apart:
            for x in self.schedule.outers:
                yield f"{self._products(x)} products{x};"
                yield f"products{x}.clear();"
        if of.config.outer_wgmma:
            one = "0x3c003c00" if of.math == "f16" else "0x3f803f80"
            yield f"for (int at = threadIdx.x; at < {32 * of.rows}; at += THREADS)"
            yield f"  st_shared_u32(shared + {of.ones} + at * 4, {one});"
        yield "cp_async_commit_group();"
        yield from self._fetched("first")
        yield "cp_async_wait_group<0>();"
        if of.config.wgmma:
            yield "fence_proxy_async();"
        yield "__syncthreads();"

    def _products(self, x: int) -> str:
        a, b = self.program.kinds[x].sizes
        if self.of.config.outer_wgmma:
            summed = any(phase.result == x for phase in self.of.summed)
            return f"WarpgroupProducts<{a}, {b}, {str(summed).lower()}>"
        return f"HeldProducts<{a}, {b}>"

    def _tile(self) -> Iterator[str]:
        yield "  const int row = tile * ROWS + threadIdx.x / 32 * (16 * M_TILES) + lane() / 4;"
        if self.of.apart:
            if self.of.config.copied:
                group = "(tile * (THREADS / 128) + threadIdx.x / 128)"
                yield f"  char* const own_planes = planes + {group} * i64({self.of.chunks} * 8192);"
            else:
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
        if self.staged and self.staged[0] == self.staged[-1]:
            yield "  if (threadIdx.x % 128 == 0) cp_async_bulk_wait_group_read<0>();"

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
        if phase in self.of.narrow:
            yield from (f"  {line}" for line in self._narrow(phase))
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

    def _narrow(self, phase: OuterPhase) -> Iterator[str]:
        """Yields outer products of a narrow factor."""
        buffer = yield from self._buffer()
        i = [*self.of.narrow].index(phase)
        wide, narrow = self.of.narrow[phase]
        at, to = buffer * self.of.staging_bytes, (2 + len(self.of.staying)) * self.of.staging_bytes + 1024 * i
        yield f"stage_plane(staging + {at}, f{wide});"
        yield f"narrow{i}.add(staging, {at}, {to}, now{narrow});"
        self.outstanding = True

    def _finish(self) -> Iterator[str]:
        if self.of.config.copied:
            yield "cp_async_bulk_wait_group();"
            yield "wgmma_wait_group<0>();"
            yield "bar_sync(1 + threadIdx.x / 128, 128);"
        for i, (phase, (wide, narrow)) in enumerate(self.of.narrow.items()):
            to = f"partials + {self.of.sums[phase.result]}"
            x = self.of.summed.get(phase)
            sums = "nullptr" if x is None else f"partials + {self.of.sums[x]}"
            flags = f"{str(phase.a == narrow).lower()}, {str(phase.b == wide).lower()}"
            offset = f"shared_memory + (staging - shared) + {1024 * i}"
            yield f"narrow{i}.store<{flags}>({to}, {sums}, reinterpret_cast<float*>({offset}));"
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


def instructions(of: Resolved) -> str:
    """Returns the text of the instructions of wgmma."""
    found = {}
    for place, stage in enumerate(of.schedule.stages):
        for _, transposed in of.schedule.terms(stage) if of.at_once(place) else ():
            name, dtype = wgmma_name(stage, transposed), of.problem.dtype
            if of.biases[0]:
                ahead = f"wgmma{padded(stage.width)}"
                found[ahead] = wgmma(padded(stage.width), dtype, dtype, True, False, True).replace(
                    "wgmma(", f"{ahead}("
                )
            found[name] = wgmma(padded(stage.width), dtype, dtype, True, transposed, True).replace("wgmma(", f"{name}(")
    for x in of.schedule.outers if of.config.outer_wgmma else ():
        a, b = map(padded, of.problem.program.kinds[x].sizes)
        n = a if b % 64 == 0 else b
        dtype = of.problem.dtype
        found["ones"] = wgmma(8, dtype, dtype, False, True).replace("wgmma(", "wgmma_ones(")
        if any(phase.result == x for phase in of.summed) and n in (16, 32, 64):
            n += 8
        found[n] = wgmma(n, dtype, dtype, False, False).replace("wgmma(", "wgmma_outer(")
    if of.narrow:
        dtype = of.problem.dtype
        found["ones"] = wgmma(8, dtype, dtype, False, True).replace("wgmma(", "wgmma_ones(")
    return "".join(found.values()).replace("Acc (", "float (")


def kernel_text(of: Resolved) -> str:
    """Returns the text of the kernel itself."""
    parameters = ", ".join(argument.declaration for argument in of.arguments)
    return f"""#line 1 "network (generated)"
{functions(of)}#line 1 "body (generated)"
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL({parameters}) {{
{Body(of).text()}}}
"""
