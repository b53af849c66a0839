"""The kernel that sums outer products of rows that another has left in memory: its text and its launch."""

from __future__ import annotations

import dataclasses
import functools

from cutjax.kernels.network.resolved import Resolved
from cutjax.kernels.wgmma import wgmma
from cutjax.runtime import sources
from cutjax.runtime.launch import Int32, Launch, Pointer

FILES = ("common/atoms.cuh", "common/integers.cuh", "common/tma.cuh", "mma/atoms.cuh", "sm90/atoms.cuh")
STAGES = 6  # of 64 rows: 192 KB of two factors of 128 columns
CHUNK = 64 * 128  # bytes of 64 rows of 64 columns


@dataclasses.dataclass(frozen=True, eq=False)
class OuterSums:
    """The kernel of what a network's kernel leaves apart.

    Attributes:
      of: that kernel.
      own_name: its name.
    """

    of: Resolved
    own_name: str

    @property
    def name(self) -> str:
        """The entry symbol."""
        return f"{self.own_name}_outer"

    @functools.cached_property
    def results(self) -> dict[int, list[tuple[int, int, int | None]]]:
        """The sums of outer products: of each the factors of its pairs, and which sum of columns is of the second."""
        found: dict[int, list[tuple[int, int, int | None]]] = {}
        for phase in self.of.apart:
            found.setdefault(phase.result, []).append((phase.a, phase.b, self.of.summed.get(phase)))
        return found

    def _chunks(self, result: int) -> tuple[int, int]:
        """Returns the chunks of 64 columns of both factors."""
        a, b = self.of.problem.program.kinds[result].sizes
        return -(-a // 64), -(-b // 64)

    @property
    def threads(self) -> int:
        """Threads of a block: a warpgroup for each 64 columns of a second factor, and the warp that loads."""
        return 128 * max(self._chunks(x)[1] for x in self.results) + 32

    @property
    def _ones(self) -> int:
        """The place in shared memory of ones, after the stages."""
        return STAGES * CHUNK * max(sum(self._chunks(x)) for x in self.results)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages, ones and zeros, barriers."""
        return self._ones + 512 + 16 * STAGES

    @functools.cached_property
    def source(self) -> str:
        """The device text."""
        dtype = self.of.problem.dtype
        constants = {
            "THREADS": self.threads,
            "STAGES": STAGES,
            "ONES": self._ones,
            "ALL_CHUNKS": self.of.chunks,
            "F16": dtype.name == "float16",
            "IN_ORDER": self.of.config.copied,
        }
        widths = sorted({64 * self._chunks(x)[0] for x in self.results})
        products = [wgmma(n, dtype, dtype, False, False).replace("wgmma(", "wgmma_outer(") for n in widths]
        products.append(wgmma(8, dtype, dtype, False, True).replace("wgmma(", "wgmma_ones("))
        parts = ["#define ACCUMULATOR float\n", *FILES, "".join(products).replace("Acc (", "float (")]
        return sources.source(self.name, constants, [*parts, "network/outer.cuh", self._kernel()])

    def _kernel(self) -> str:
        of, lines = self.of, list[str]()
        for i, (result, pairs) in enumerate(self.results.items()):
            a, b = of.problem.program.kinds[result].sizes
            factors = ", ".join(
                f"{{{of.in_memory[x]}, {of.in_memory[y]}, {str(columns is not None).lower()}}}"
                for x, y, columns in pairs
            )
            summed = next((columns for *_, columns in pairs if columns is not None), None)
            sums = "nullptr" if summed is None else f"sums + {of.sums_apart[summed]}"
            to = f"sums + {of.sums_apart[result]}"
            lines += [
                f"  if (blockIdx.y == {i}) {{",
                f"    const Factors pairs[] = {{{factors}}};",
                f"    OuterSums<{a}, {b}, {len(pairs)}>::compute(pairs, planes, rows, {to}, {sums});",
                "  }",
            ]
        body = "\n".join(lines)
        return f"""#line 1 "body (generated)"
extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const char* planes, float* sums, int rows) {{
  planes += static_cast<i64>(blockIdx.z) * rows * {128 * of.chunks};
  sums += static_cast<i64>(blockIdx.z * gridDim.x + blockIdx.x) * {of.partials_apart};
{body}
}}
"""

    def launch(self, cubin: bytes) -> Launch:
        """Returns its launch, after the kernel of which it sums."""
        of = self.of
        memory = [*of.memory]
        buffers = [len(of.problem.program.inputs) + memory.index(name) for name in ("char* planes", "float* sums")]
        return Launch(
            kernel=self.name,
            cubin=cubin,
            grid=(of.parts_apart, len(self.results), of.problem.networks),
            block=(self.threads, 1, 1),
            shared_bytes=self.shared_bytes,
            params=(*map(Pointer, buffers), Int32(of.tiles * of.rows)),
        )
