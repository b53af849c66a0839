"""Times of mma kernels, and of the same without one of their parts: ``python -m benchmarks run --op mma_parts``.

Each kernel as it ships, and without one of its parts, which a change of its text takes away; in turns, on equal inputs.
The results must be the same, bit for bit. Then kernels whose tiles TMA loads, beside the one that ships and XLA's
product.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import cutjax
from benchmarks import timing
from benchmarks.cases import operands
from benchmarks.measure import OPTIONS
from benchmarks.record import Figures, Row
from benchmarks.suite import Run, Suite
from cutjax.kernels import families
from cutjax.kernels.mma import family
from cutjax.kernels.mma.kernel import Kernel
from cutjax.kernels.problem import Problem
from cutjax.primitives.accumulators import accumulator
from cutjax.runtime import sources

REPS = 12
BY_TMA = 6  # kernels of a product
# Largest differences, in parts of the largest result: sums of float64 by TMA are in another order, and TMA may round
# halves of TF32 to the other side.
DIFFERENCE = {"float64": 1e-13, "float32": 1e-3}
# By part: what is written in a file of ffi/device, and what is there without it.
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "permuted units": (
        ("return swizzle<SPAN>(offset);", "return offset;"),
        ("return offset ^ (line & 2) << 4 ^ (SPAN == 128 ? (line & 1) << 6 : 0);", "return offset;"),
    ),
    "serpentine order": (("int i = j % 2 ? M_FRAGMENTS - 1 - step : step;", "int i = step;"),),
    "two sets of fragments": (
        (
            "    beside<S, LOADED_IN>(loads);\n",
            "    multiplier.load(x[S % 2], read, read + TileA::BYTES, warp.slice * SLICES + S);\n"
            "    beside<S, LOADED_IN>(loads);\n",
        ),
        ("    if (S < SLICES - 1 || !last)\n", "    if (false)\n"),
        (
            "multiplier.load(x[(t + 1) % 2], tile_a, tiles_b, warp.slice * SLICES + t + 1);",
            "multiplier.load(x[t % 2], tile_a, tiles_b, warp.slice * SLICES + t);",
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Cube:
    """A product of three equal sizes.

    Attributes:
      size: m, n and k.
      layout: as gemm's.
      dtype: of the operands.
      math: how float32 is multiplied by default, as of the problem.
    """

    size: int
    layout: str
    dtype: str
    math: str = ""
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """E.g. ``4096 nn bfloat16``."""
        return f"{self.size} {self.layout} {self.dtype}" + (f" by {self.math}" if self.math else "")

    def kernels(self, tma: bool) -> list[Kernel]:
        """Returns the kernels that have tiles loaded by TMA, or not, those first that the model expects to be fast."""
        dtype, sizes = jnp.dtype(self.dtype), (self.size, self.size, self.size, self.layout)
        problem = Problem.of(*sizes, dtype, dtype, accumulator(dtype), math=self.math)
        kernels = [family.resolve(problem, config) for config in family.configs(problem) if config.tma == tma]
        found = [kernel for kernel in kernels if isinstance(kernel, Kernel)]
        return sorted(found, key=lambda kernel: kernel.time_us(problem.device))

    def kernel(self) -> Kernel:
        """Returns the kernel that the family's model expects to be the fastest, without TMA."""
        return self.kernels(tma=False)[0]

    def inputs(self, seed: int) -> tuple[jax.Array, jax.Array]:
        """Random normal operands, integers 32 times as large."""
        return operands(((self.size, self.size),) * 2, (self.dtype,) * 2)(seed)


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    """Takes a part out of the text of kernels; "" is none."""
    read = sources._file

    def changed(name: str) -> str:
        text = read(name)
        for shipped, other in PARTS.get(part, ()):
            text = text.replace(shipped, other)
        return text

    with mock.patch.object(sources, "_file", changed):
        yield


def compile_forms(cube: Cube) -> dict[str, Callable[..., Any]]:
    """Returns the compiled functions: as it ships "", by the part that is left out, by kernel with TMA, and "xla"."""
    args, config = jax.eval_shape(cube.inputs, 0), cube.kernel().config
    gemm, found = functools.partial(cutjax.gemm, layout=cube.layout), {}
    for part in ("", *PARTS):
        with without(part):
            found[part] = _compiled(functools.partial(gemm, config=config, backend="cuda"), args)
    for kernel in cube.kernels(tma=True)[:BY_TMA]:
        found[kernel.name] = _compiled(functools.partial(gemm, config=kernel.config, backend="cuda"), args)
    return found | {"xla": _compiled(functools.partial(gemm, backend="xla"), args)}


def _compiled(function: Callable[..., Any], args: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=OPTIONS).lower(*args).compile()


def measure(cube: Cube, run: Run) -> list[Row]:
    """Compares the results, then times all forms in turns."""
    functions = compile_forms(cube)
    sets = timing.input_sets(cube.inputs)
    times = timing.measure(functions, sets, REPS, run.method)
    shipped, rows = functions[""](*sets[0]), []
    for part in PARTS:
        same = bool(jnp.array_equal(functions[part](*sets[0]), shipped))
        whole, without = times[""], times[part]
        rows.append(
            Row(
                f"{cube.name} {part}",
                kernel=" + ".join(whole.kernels),
                us=whole.us,
                iqr_us=whole.iqr_us,
                ratios={"without": without.us / whole.us},
                peers={"without": Figures(without.us, without.iqr_us)},
                failure="" if same else "the results differ",
            )
        )
    others = {"without": times[""], "xla": times["xla"]}
    for kernel in cube.kernels(tma=True)[:BY_TMA]:
        us, off = times[kernel.name], difference(functions[kernel.name](*sets[0]), shipped)
        rows.append(
            Row(
                f"{cube.name} TMA",
                variant=json.dumps(families.fields_of(kernel.config)),
                kernel=" + ".join(us.kernels),
                us=us.us,
                iqr_us=us.iqr_us,
                ratios={name: other.us / us.us for name, other in others.items()},
                peers={name: Figures(other.us, other.iqr_us) for name, other in others.items()},
                failure="" if off <= DIFFERENCE.get(cube.dtype, 0) else f"the results differ by {off:.1e}",
            )
        )
    return rows


def difference(x: jax.Array, y: jax.Array) -> float:
    """Returns the largest difference, in parts of the largest of both."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x, y = x.astype(wide), y.astype(wide)
    return float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)))


CASES = (
    Cube(4096, "nn", "bfloat16"),
    Cube(4096, "nt", "bfloat16"),
    Cube(4096, "nn", "int8"),
    Cube(4096, "nt", "float32", math="tf32"),
    Cube(4096, "nn", "float64"),
    Cube(4096, "nt", "float64"),
    Cube(4096, "tn", "float64"),
    Cube(8192, "nn", "float64"),
)
SUITE = Suite("mma_parts", CASES, measure=measure, clocks=("cupti",), x64=True)
