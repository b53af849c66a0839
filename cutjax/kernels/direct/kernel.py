"""A kernel of ffi/device/direct/: one config resolved for one problem, or every reason why it cannot be."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from cutjax.dtypes import short
from cutjax.epilogue import emit
from cutjax.kernels import prepared as copies
from cutjax.kernels import reasons as shared
from cutjax.kernels import results
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.device import Device
from cutjax.kernels.direct import cost, toeplitz
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.geometry import Geometry, geometry_of, places_of
from cutjax.kernels.direct.text import epilogue_text, source
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import instructions, plan_staging
from cutjax.runtime.architectures import number
from cutjax.runtime.compiler import Cubin, compile_kernel
from cutjax.runtime.launch import Call, Launch, Pointer

DTYPES = ("bfloat16", "float16", "float32", "float64")
ACCUMULATORS = {"float64": "float64"}  # of others float32
SUM_THREADS, SUM_SLICES = 512, 16
MOST_INLINED = 40  # instructions of an epilogue, of which a kernel has a copy for each place of a strip


@functools.lru_cache(maxsize=1024)
def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns the reasons against every kernel of this family; empty when one serves."""
    if number(problem.arch) < 75:
        return (f"architecture {problem.arch}: the kernels are for sm_75 and later",)
    if not isinstance(problem.a.view, Im2col):
        return ("no convolution: direct kernels are of each channel by itself",)
    if problem.a.view.groups == 1 or geometry_of(problem) is None:
        view = problem.a.view
        of_group = f"{view.channels} channels to {problem.n // max(1, view.groups)} in each of {view.groups} groups"
        return (f"{of_group}: direct kernels are of groups of one channel, or to one",)
    found = shared.of_operands(problem, (Im2col,), (Taps,))
    a, b = problem.a.dtype.name, problem.bs[0].dtype.name
    if a != b or a not in DTYPES:
        found.append(f"{short(a)} x {short(b)}: direct kernels multiply {', '.join(map(short, DTYPES))}")
    elif problem.epilogue.accumulator.name != accumulator_of(problem):
        found.append(f"{short(a)} added up in {problem.epilogue.accumulator}, not in {accumulator_of(problem)}")
    if problem.math == "f16":
        found.append("sums in float16")
    if problem.products > 1:
        found.append(f"{problem.products} products: direct kernels have one")
    staging = plan_staging(problem.epilogue, tma=False)
    found += staging.reasons
    if staging.reductions:
        found.append("a reduction in the epilogue of a convolution of each channel by itself")
    if emit.places(problem.epilogue):
        found.append("an epilogue that depends on where in a batch its elements lie")
    return (*found, *shared.of_sizes(problem))


def accumulator_of(problem: Problem) -> str:
    """Returns the dtype in which products are added up."""
    return ACCUMULATORS.get(problem.a.dtype.name, "float32")


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One launch: a device function, and what it is given.

    Attributes:
      problem: whose.
      name: the entry symbol.
      source: the device text.
      arguments: that it takes, in order.
      blocks, threads: of the launch.
      shared_bytes: of a block.
    """

    problem: Problem
    name: str
    source: str
    arguments: tuple[Argument, ...]
    blocks: int
    threads: int
    shared_bytes: int

    def compile(self) -> Cubin:
        """Compiles it, or takes it from the cache."""
        return compile_kernel(self.source, name=self.name, arch=self.problem.arch)

    def launch(self, cubin: bytes) -> Launch:
        """Returns the launch of a cubin."""
        return Launch(
            kernel=self.name,
            cubin=cubin,
            grid=(self.blocks, 1, 1),
            block=(self.threads, 1, 1),
            shared_bytes=self.shared_bytes,
            params=tuple(argument.value for argument in self.arguments),
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """One config resolved for one problem: a launch, or, of a weight gradient, two."""

    family = "direct"

    problem: Problem
    config: Config
    geometry: Geometry
    converted: tuple[Prepared, ...] = ()

    @functools.cached_property
    def shape(self) -> cost.Shape:
        """The sizes of a thread's work and of the launch."""
        return cost.Shape(self.problem, self.config, self.geometry)

    @functools.cached_property
    def tensor(self) -> toeplitz.Shape:
        """The same of one by Toeplitz matrices."""
        return toeplitz.Shape(self.problem, self.config, self.geometry)

    @property
    def name(self) -> str:
        """The entry symbol of the first launch, which says what is compiled into it."""
        p, c, g = self.problem, self.config, self.geometry
        axes = g.view
        by = {"s": axes.strides, "d": axes.dilation, "u": axes.spread}
        steps = "".join(f"_{x}{'x'.join(map(str, sizes))}" for x, sizes in by.items() if set(sizes) != {1})
        window = "x".join(map(str, axes.window))
        dtypes = short(p.a.dtype.name) + ("" if p.out_dtype == p.a.dtype else short(p.out_dtype.name))
        of = f"_c{g.channels}" * (g.channels > 1) + f"_m{g.multiplier}" * (g.multiplier > 1)
        kind = "weights" if g.gradient else "conv" + "_k" * self._k_major
        if c.toeplitz:
            kind = "toeplitz"
            thread = f"{self.tensor.strips}x{self.tensor.subs}_w{c.lanes}_s{c.ahead}_b{c.blocks}"
        else:
            thread = f"{c.pairs}x{c.strip}_a{c.ahead}_l{self.shape.lanes}x{self.shape.across}_b{c.blocks}"
        low = f"_r{g.rows.low}x{g.columns.low}" * bool(g.rows.low or g.columns.low)
        digest = "" if p.plain else f"_e{hashlib.sha256(repr(p.epilogue).encode()).hexdigest()[:8]}"
        return f"direct_{dtypes}_{kind}_{window}{steps}{low}{of}_{thread}{digest}"

    @property
    def _k_major(self) -> bool:
        """True if the weights' channels of the result lie before those of the image, of which there are several."""
        several = self.geometry.channels * self.geometry.multiplier > 1
        return several and self.problem.bs[0].contiguous == "k"

    @property
    def prepared(self) -> tuple[Prepared, ...]:
        """No operand is copied."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons to add to those of a choice."""
        return copies.notes(self.converted)

    @property
    def source(self) -> str:
        """The device text of the first launch."""
        return self.entries[0].source

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The launches, in order."""
        if self.geometry.gradient:
            return self._parts(), self._sum()
        return (self._toeplitz() if self.config.toeplitz else self._forward(),)

    def time_us(self, device: Device) -> float:
        """Returns the predicted time of one call."""
        c = self.config
        us = toeplitz.predict(self.tensor, device) if c.toeplitz else cost.predict(self.shape, device)
        return us + copies.converted_us(self.converted, device) if self.converted else us

    def after(self, converted: tuple[Prepared, ...]) -> Kernel:
        """Returns the kernel with conversions of its operands before it."""
        return dataclasses.replace(self, converted=converted)

    def unlaunchable(self) -> tuple[str, ...]:
        """Returns the reasons against a launch: its parameters have a limit."""
        try:
            for entry in self.entries:
                entry.launch(b"-")
        except ValueError as error:
            return (f"operands and results are too many or too large for one launch ({error})",)
        return ()

    def call(self) -> Call:
        """Returns the compiled kernels and the plan of their launches."""
        p = self.problem
        written, finish = (), None
        if self.geometry.gradient:
            written = (*results.written(p, 1), self._scratch)
            finish = functools.partial(results.finish, p.epilogue.outputs)
        return Call(
            tuple(entry.launch(entry.compile().image) for entry in self.entries),
            results=written,
            finish=finish,
            prepare=self._prepare if self.converted else None,
            aliases=tuple((p.arrays + operand, result) for operand, result in p.in_place),
        )

    def _prepare(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        given, more = copies.make(self.converted, arrays)
        return [*given, *more]

    @property
    def _scratch(self) -> jax.ShapeDtypeStruct:
        g = self.geometry
        return jax.ShapeDtypeStruct((self.shape.parts, g.taps, g.pairs), np.dtype(accumulator_of(self.problem)))

    def _entry(
        self, name: str, constants: dict[str, int], arguments: Iterator[Argument], files: Sequence[str], *sizes: int
    ) -> Entry:
        p, taken = self.problem, tuple(arguments)
        files = [epilogue_text(p.epilogue, taken, *self._epilogue) if file == "epilogue" else file for file in files]
        text = source(name, p.a.dtype.name, accumulator_of(p), constants, taken, files)
        return Entry(p, name, text, taken, *sizes)

    @property
    def _epilogue(self) -> tuple[str, bool, bool]:
        """The neighbours that the epilogue computes at once, as device text; whether it is called, and by stages."""
        if self.geometry.gradient:
            return "1", False, False
        toeplitz = self.config.toeplitz
        return "2" if toeplitz else "COLUMNS", instructions(self.problem.epilogue) > MOST_INLINED, toeplitz

    def _constants(self) -> dict[str, int]:
        c, g = self.config, self.geometry
        d, h, w = g.planes, g.rows, g.columns
        return {
            "PAIRS": c.pairs,
            "STRIP": c.strip,
            "LANES": self.shape.lanes,
            "THREADS": self.shape.threads,
            "BLOCKS_PER_SM": c.blocks,
            "MULTIPLIER": g.multiplier,
            "CHANNELS": g.channels,
            "WINDOW_D": d.window,
            "WINDOW_H": h.window,
            "WINDOW_W": w.window,
            "STRIDE_D": d.stride,
            "STRIDE_H": h.stride,
            "STRIDE_W": w.stride,
            "DILATION_D": d.dilation * d.every,
            "DILATION_H": h.dilation,
            "DILATION_W": w.dilation,
            "SPREAD_D": d.spread,
            "SPREAD_H": h.spread,
            "SPREAD_W": w.spread,
            "LOW_H": h.low,
            "LOW_W": w.low,
            "EVERY_H": h.every,
            "EVERY_W": w.every,
            "ALONG": g.along,
        }

    def _sizes(self) -> Iterator[Argument]:
        c, g, p = self.config, self.geometry, self.problem
        d, h, w = g.planes, g.rows, g.columns
        sizes = {
            "items": g.items(c.strip, c.rows),
            "strips": g.strips(c.strip),
            "chunks": g.chunks(c.strip, c.rows),
            "rows": c.rows,
            **{f"grid_{name}": axis.grid for name, axis in zip("dhw", (d, h, w), strict=True)},
            **{f"image_{name}": axis.image for name, axis in zip("dhw", (d, h, w), strict=True)},
            "low_d": d.low - d.first * d.spread,
            "first_h": h.first,
            "first_w": w.first,
            "channels": g.view.groups * g.channels,
        }
        for name, value in sizes.items():
            yield integer(name, value, "sizes")
        yield integer("tiles", self.shape.tiles)
        yield integer("pairs", g.pairs)
        yield integer("columns", p.n)

    def _extras(self) -> Iterator[Argument]:
        p = self.problem
        for i in range(len(p.epilogue.operands)):
            yield Argument(f"const char* base{i}", Pointer(p.arrays + i), "extras")
        for i in range(len(p.epilogue.outputs)):
            yield Argument(f"char* d{i}", Pointer(p.arrays + len(p.epilogue.operands) + i), "extras")

    def _forward(self) -> Entry:
        p, c, g, shape = self.problem, self.config, self.geometry, self.shape

        def arguments() -> Iterator[Argument]:
            yield Argument("const char* x", Pointer(0))
            yield Argument("const char* w", Pointer(1))
            yield from self._sizes()
            for name, value in zip(("first", "step_d", "step_h", "step_w"), places_of(p), strict=True):
                yield integer(f"tap_{name}", value, "places")
            yield integer("n", p.n, "places")
            yield integer("inputs", g.view.groups * g.channels, "places")
            yield from self._extras()

        read, done = g.rows.steps
        first, count = g.rows.open
        constants = self._constants() | {
            "B_K_MAJOR": self._k_major,
            "IN_REGISTERS": shape.in_registers,
            "UNROLL": c.ahead,
            "IMAGE_ROWS": read,
            "RESULT_ROWS": done,
            "FIRST_OPEN": first,
            "ROWS_OPEN": count,
        }
        files = ("direct/window.cuh", "epilogue", "direct/forward.cuh")
        return self._entry(self.name, constants, arguments(), files, shape.blocks, shape.threads, shape.shared_bytes)

    def _toeplitz(self) -> Entry:
        p, c, g, shape = self.problem, self.config, self.geometry, self.tensor

        def arguments() -> Iterator[Argument]:
            yield Argument("const char* x", Pointer(0))
            yield Argument("const char* w", Pointer(1))
            sizes = {"rows": c.rows, "chunks": shape.chunks, "subs": shape.items, "pieces": shape.pieces}
            sizes |= {"grid_h": g.rows.grid, "grid_w": g.columns.grid}
            sizes |= {"image_h": g.rows.image, "image_w": g.columns.image}
            sizes |= {"low_h": -g.rows.first, "low_w": -g.columns.first, "channels": g.pairs}
            for name, value in sizes.items():
                yield integer(name, value, "sizes")
            yield integer("tiles", shape.tiles)
            first, _, *steps = places_of(p)
            for name, value in zip(("first", "step_h", "step_w"), (first, *steps), strict=True):
                yield integer(f"tap_{name}", value)
            yield from self._extras()

        constants = {
            "WINDOW_H": g.rows.window,
            "WINDOW_W": g.columns.window,
            "STRIPS": shape.strips,
            "SUBS": shape.subs,
            "WARPS": shape.lanes,
            "THREADS": shape.threads,
            "BLOCKS_PER_SM": c.blocks,
            "STAGES": c.ahead,
            "UNIT": shape.unit,
        }
        files = ["mma/atoms.cuh", "mma/math.cuh", "mma/instruction.cuh", "direct/staged.cuh", "epilogue"]
        files.append("direct/toeplitz.cuh")
        return self._entry(self.name, constants, arguments(), files, shape.blocks, shape.threads, shape.shared_bytes)

    def _parts(self) -> Entry:
        shape = self.shape

        def arguments() -> Iterator[Argument]:
            yield Argument("const char* x", Pointer(0))
            yield Argument("const char* g", Pointer(1))
            yield self._sums("")
            yield from self._sizes()
            yield integer("parts", shape.parts)

        constants = self._constants() | {
            "WINDOW_ROWS": shape.window_rows,
            "ROW_SLICES": shape.row_slices,
            "SLICES": shape.slices,
            "TAPS_AT_ONCE": shape.taps_at_once,
        }
        files = ("direct/window.cuh", "direct/gradient.cuh")
        return self._entry(self.name, constants, arguments(), files, shape.blocks, shape.threads, shape.shared_bytes)

    def _sum(self) -> Entry:
        p, g = self.problem, self.geometry

        def arguments() -> Iterator[Argument]:
            yield self._sums("const ")
            for name, value in {"parts": self.shape.parts, "taps": g.taps, "pairs": g.pairs, "columns": p.n}.items():
                yield integer(name, value)
            yield from self._extras()

        constants = {"THREADS": SUM_THREADS, "SLICES": SUM_SLICES, "CHANNELS": g.channels}
        blocks = -(-g.taps * g.pairs // (SUM_THREADS // SUM_SLICES))
        shared_bytes = SUM_THREADS * self._scratch.dtype.itemsize
        files = ("epilogue", "direct/sum.cuh")
        name = f"{self.name}_sum"
        return self._entry(name, constants, arguments(), files, blocks, SUM_THREADS, shared_bytes)

    def _sums(self, const: str) -> Argument:
        p = self.problem
        carrier = "double" if accumulator_of(p) == "float64" else "float"
        buffer = p.arrays + len(p.epilogue.operands) + len(p.epilogue.outputs)
        return Argument(f"{const}{carrier}* sum_of_parts", Pointer(buffer))


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    found, geometry = list(reasons(problem)), geometry_of(problem)
    if found or geometry is None:
        return tuple(found)
    of = toeplitz.Shape if config.toeplitz else cost.Shape
    found += of(problem, config, geometry).reasons()
    return tuple(found) if found else Kernel(problem=problem, config=config, geometry=geometry)
