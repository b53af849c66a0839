"""The kernel of a network: its text, its launch, its predicted time, and the reasons against it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from cutjax.dtypes import short
from cutjax.kernels import reasons
from cutjax.kernels.network import text
from cutjax.kernels.network.outer import OuterSums
from cutjax.kernels.network.places import SMS
from cutjax.kernels.network.program import Affine, Outer
from cutjax.kernels.network.resolved import PRODUCTS, Resolved
from cutjax.kernels.network.schedule import padded
from cutjax.runtime import sources
from cutjax.runtime.compiler import Cubin, compile_kernel
from cutjax.runtime.launch import Call, Launch

FILES = (
    "common/atoms.cuh",
    *sources.MATH,
    "common/elements.cuh",
    "mma/atoms.cuh",
    "mma/math.cuh",
    "mma/instruction.cuh",
)
WGMMA = ("common/tma.cuh", "sm90/atoms.cuh")
OWN = ("network/fragments.cuh", "network/sums.cuh")
APART = ("network/apart.cuh",)
LAUNCH_US = 3.0
MHZ = 1755.0
# Of a kernel, which then compiles for some seconds; and of one whose rows are chained, which is the longer.
MOST_INSTRUCTIONS, MOST_CHAINED = 9_000, 12_000
MOST_IN_MEMORY = 1 << 34  # bytes of planes: of 10 million rows of four layers of 128
IN_MEMORY = 1.5  # where sums of outer products are in memory: 1202 us, and 1002 in registers
STAGED = 1.5  # where their factors are staged for each
IN_PLANES = {2: 0.84, 1: 0.64}  # where those are in planes, by tiles of a warp: 400 and 424 us, and 921 staged
ISSUE = 1.33  # of the time in which an SM issues the instructions of a kernel, as measured
SHARE = 0.5  # of the rate of tensor cores that a warp's products reach where operands come from shared memory
AT_ONCE = 0.6  # of the time by mma.sync that wgmma takes: 0.53 to 0.82 of five kernels on an H200
L2_SPEED = 1.5  # of a copy's rate, at which the stash moves where it is in memory


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel(Resolved):
    """One config for one problem: its text, arguments and launch."""

    @property
    def name(self) -> str:
        """The entry symbol: what is multiplied, the config, and a digest of the program."""
        p, c = self.problem, self.config
        digest = hashlib.sha256(repr((p.program, p.given, p.dtypes, p.networks > 1)).encode()).hexdigest()[:8]
        widest = max((x for kind in p.program.kinds for x in kind.sizes), default=0)
        flags = "c" * c.chained + "m" * c.memory + "s" * c.memory_sums + "p" * c.planes + "g" * c.wgmma
        flags += "a" * c.apart + "b" * c.copied
        dtype = short(p.dtype.name)
        math = self.math if self.math != dtype else ""
        return f"network_{dtype}{'_' * bool(math)}{math}_{widest}_w{c.warps}x{c.tiles}{flags}_b{c.blocks}_e{digest}"

    @functools.cached_property
    def source(self) -> str:
        """The device text; the number of rows is an argument, all widths are compiled in."""
        c = self.config
        constants = {
            "THREADS": self.threads,
            "M_TILES": c.tiles,
            "BLOCKS_PER_SM": c.blocks,
        }
        files = (*FILES, *WGMMA) if c.wgmma else FILES
        own = (*OWN, text.instructions(self), "network/warpgroups.cuh", *(APART * c.apart)) if c.wgmma else OWN
        head = f"constexpr Dtype OPERAND = Dtype::{'f32' if self.problem.dtype.itemsize == 4 else self.math};\n"
        head += f"constexpr Math MATH = Math::{self.math};\n"
        return sources.source(
            self.name, constants, ["#define ACCUMULATOR float\n", *files, head, *own, text.kernel_text(self)]
        )

    def reasons(self) -> list[str]:
        """Returns the reasons against the config."""
        p, c, device = self.problem, self.config, self.problem.device
        found = []
        if c.planes and (self.parts > 1 or self.element_bytes > 2 or not c.chained or c.memory_sums):
            found.append("planes are of 16-bit operands, chained rows and sums in registers")
        if c.wgmma and (self.parts > 1 or self.element_bytes > 2 or not c.chained or c.warps % 4 or p.arch != "sm_90a"):
            found.append("wgmma is of warpgroups, 16-bit operands, chained rows, and sm_90a")
        if c.outer_wgmma:
            sizes = [tuple(map(padded, p.program.kinds[x].sizes)) for x in self.schedule.outers]
            if c.warps != 4 or any(a % 64 and b % 64 for a, b in sizes):
                found.append("wgmma of outer products is of one warpgroup, one plane of a multiple of 64 columns")
        if c.apart and not self.apart:
            found.append("no outer products of two factors wider than 16, which a second kernel would sum")
        if c.apart and (not c.planes or not c.wgmma or any(max(sizes) > 128 for sizes in self._sizes_apart)):
            found.append("sums apart are of planes, wgmma, and factors of up to 128 columns")
        if self.plane_bytes > MOST_IN_MEMORY:
            found.append(f"{self.plane_bytes} bytes of planes in memory, at most {MOST_IN_MEMORY}")
        if c.copied:
            found += self._reasons_of_copies()
        if c.planes and not self.schedule.planes:
            found.append("no outer products, whose factors planes have")
        if self.shared_bytes > self.most_shared_bytes:
            most = f"at most {self.most_shared_bytes} with {c.blocks} blocks an SM"
            found.append(f"{self.shared_bytes} bytes of shared memory, {most}")
        limit = min(255, device.registers_per_sm // (self.threads * c.blocks) // 8 * 8)
        if self.registers > limit:
            found.append(f"about {self.registers} registers a thread, at most {limit}")
        longest = MOST_CHAINED if c.chained else MOST_INSTRUCTIONS
        if self.instructions > longest:
            found.append(f"about {self.instructions} instructions, at most {longest}: they would compile for long")
        widest = max(kind.sizes[0] for kind in p.program.kinds if kind.name == "rows")
        sizes = {
            "rows": p.rows + (2 + self.blocks) * self.rows,
            "blocks": self.blocks * p.networks,
            "elements of a row": widest * 16,
        }
        found += reasons.of_counters(sizes)
        if not found:
            try:
                self._launches(b"-", b"-")
            except ValueError as error:
                found.append(f"inputs and results are too many for one launch ({error})")
        return found

    def _reasons_of_copies(self) -> list[str]:
        """Returns the reasons against planes that bulk copies move."""
        c, width, found = self.config, self.schedule.width, []
        if not c.apart or c.tiles > 1 or any(self.schedule.is_input(x) or padded(width(x)) % 64 for x in self.lasting):
            found.append("bulk copies are of planes apart that stages make, one tile a warp, multiples of 64 columns")
        if any(x not in self.prefetched or width(x) > 7 for _, x in self.narrow.values()):
            found.append("beside bulk copies narrow factors are inputs of up to 7 columns")
        if self.warp_sums or (self.narrow and {x for _, x in self.schedule.sums} - {*self.summed.values()}):
            found.append("beside bulk copies all sums of columns come with outer products")
        return found

    def compile(self) -> Cubin:
        """Compiles the kernel, or takes it from the cache."""
        return compile_kernel(self.source, name=self.name, arch=self.problem.arch)

    def call(self) -> Call:
        """Returns the compiled kernel, and that of sums apart, and the plan of their launches."""
        launches = self._launches(self.compile().image, self.compile_outer().image if self.apart else b"")
        return Call(launches, results=self.results, finish=self._finish)

    @property
    def outer(self) -> OuterSums:
        """The kernel that sums what this one leaves apart."""
        return OuterSums(self, self.name)

    def compile_outer(self) -> Cubin:
        """Compiles that kernel, or takes it from the cache."""
        return compile_kernel(self.outer.source, name=self.outer.name, arch=self.problem.arch)

    @property
    def _sizes_apart(self) -> list[tuple[int, ...]]:
        return [self.problem.program.kinds[phase.result].sizes for phase in self.apart]

    def _launches(self, cubin: bytes, outer: bytes) -> tuple[Launch, ...]:
        own = Launch(
            kernel=self.name,
            cubin=cubin,
            grid=(self.blocks * self.problem.networks, 1, 1),
            block=(self.threads, 1, 1),
            shared_bytes=self.shared_bytes,
            params=tuple(argument.value for argument in self.arguments),
        )
        return (own, self.outer.launch(outer)) if self.apart else (own,)

    def _finish(self, written: Sequence[jax.Array], _: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results: rows as they are, and the sums of what each block has added up."""
        p = self.problem
        found = {place[0]: x for place, x in zip(self.written, written, strict=False)}
        of = dict(zip(self.memory, written, strict=True))
        for name, places in (("float* partials", self.sums), ("float* sums", self.sums_apart)):
            whole = of[name].sum(1) if places else None
            for i, x in enumerate(p.program.outputs):
                if whole is not None and x in places:
                    sizes = p.program.kinds[x].sizes
                    at, size = places[x], int(np.prod(sizes))
                    found[i] = whole[:, at : at + size].reshape(-1, *sizes).astype(p.dtypes[i])
        return [found[i] for i in range(len(p.program.outputs))]

    @property
    def time_us(self) -> float:
        """Predicted microseconds, of an unmeasured model: products, memory, and what the stash moves."""
        p, c, device = self.problem, self.config, self.problem.device
        kinds, rows = p.program.kinds, self.tiles * self.rows * p.networks
        elements = 0
        for step in p.program.steps:
            pairs = [kinds[t.matrix].sizes for t in step.terms] if isinstance(step, Affine) else []
            if isinstance(step, Outer) and not c.apart:
                pairs += [(*kinds[a].sizes, *kinds[b].sizes) for a, b in step.pairs]
            elements += sum(padded(a) * padded(b) for a, b in pairs)
        rate = dict(device.flops).get({"tf32": "tf32", "f16": "float16"}.get(self.math, "bfloat16"), 0.0)
        if not rate:
            return float("inf")
        resident = min(1.0, c.warps * c.blocks / 12)  # warps of an SM that hide each other's waits
        reuse = 1.0 if c.tiles > 1 else 0.7  # of what is read of matrices in shared memory
        us = 1e6 * 2.0 * rows * elements * PRODUCTS.get(self.math, 1) / (rate * SHARE * resident**0.5 * reuse)
        tiles = self.tiles * c.warps * p.networks
        us = max(us, ISSUE * self.issued * tiles / (4 * (device.sms or SMS) * MHZ * resident**0.5))
        if c.wgmma:
            us *= AT_ONCE
        moved = float(p.bytes)
        if c.memory:
            moved += 2.0 * self.stash_bytes * self.tiles * p.networks / L2_SPEED
        if c.memory_sums:
            moved += 8.0 * self.partials * self.tiles * p.networks / L2_SPEED
        planes = float(self.plane_bytes)  # written, and read by the second kernel
        moved += planes
        if not c.chained:
            us *= 1.2
        if self.schedule.outers and not c.apart:
            us *= IN_PLANES[c.tiles] if c.planes else STAGED
        if c.memory_sums:
            us *= IN_MEMORY
        moving = 1e6 * moved / device.bytes_per_second
        apart = bool(self.apart) * LAUNCH_US + 1e6 * planes / device.bytes_per_second
        return LAUNCH_US + max(us, moving) + 0.25 * min(us, moving) + apart
