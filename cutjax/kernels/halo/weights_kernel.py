"""A kernel of ffi/device/halo/weights.cuh, the gradient of a convolution's weights: its text, arguments and time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np

from cutjax.dtypes import short
from cutjax.kernels import base
from cutjax.kernels import reasons as shared
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.device import Device
from cutjax.kernels.halo import cost
from cutjax.kernels.halo.arguments import images_map
from cutjax.kernels.halo.config import ALONG, Config
from cutjax.kernels.halo.geometry import BOX
from cutjax.kernels.halo.operands import packing_of, prepared
from cutjax.kernels.halo.weights import ROWS, Tiles, restored, turned
from cutjax.kernels.prepared import copies_us
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90.packed import padded_to
from cutjax.kernels.staging import plan_staging
from cutjax.kernels.wgmma import wgmma
from cutjax.runtime import sources
from cutjax.runtime.launch import Pointer, TensorMap

# Of a thread that multiplies, by the warpgroups that do, and of sums among them. Calibrated on the compiler's report:
# no spill below (tests/kernels/test_halo_weights.py).
REGISTERS = {1: 240, 2: 224, 3: 152, 4: 104}
MOST_SUMS = {1: 192, 2: 192, 3: 112, 4: 72}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Kernel(base.Kernel):
    """One config resolved for one problem.

    Attributes:
      geometry: of its tiles.
    """

    family = "halo"

    config: Config
    geometry: Tiles

    @property
    def in_parts(self) -> bool:
        """True: XLA adds up its splits."""
        return True

    @property
    def stored(self) -> Problem:
        """The problem as results are stored: of whole pieces of channels, and turned where it is."""
        return dataclasses.replace(self.multiplied, m=self.geometry.rows)

    def _summed(self, x: jax.Array) -> jax.Array:
        return restored(self.problem, x)

    @property
    def name(self) -> str:
        """The entry symbol, which says what is compiled into it."""
        p, c, g = self.multiplied, self.config, self.geometry
        name = f"halo_{short(p.a.dtype.name)}f32_tn_{g.axes}d_c{g.chunk}x{c.taps}_{c.consumers}x{c.bn}_u{self.sums}"
        name += f"_s{c.stages}_{c.along}" + f"_copies{g.copies}" * (g.copies > 1)
        return name + "_packed" * (g.packing is not None)

    @property
    def sums(self) -> int:
        """Units of a warpgroup."""
        return -(-self.geometry.units // self.config.consumers)

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        return tuple(_arguments(self))

    @property
    def source(self) -> str:
        """The device text; sizes are arguments of the kernel, so one text serves every shape."""
        p, c, g, dtype = self.multiplied, self.config, self.geometry, self.multiplied.a.dtype
        constants = {
            "AXES": g.axes,
            "BN": c.bn,
            "CONSUMERS": c.consumers,
            "STAGES": c.stages,
            "TAPS": c.taps,
            "COPIES": g.copies,
            "UNITS": self.sums,
            "CHUNK": g.chunk,
            "GROUP_AXIS": g.group_axis,
            "PACKED": g.packing is not None,
            "F16": dtype == np.float16,
            "PRODUCER_REGISTERS": 56,
            "CONSUMER_REGISTERS": REGISTERS[c.consumers],
        }
        signature = f"#define PARAMETERS {', '.join(argument.declaration for argument in self.arguments)}\n"
        for to in ("windows", "gradient"):
            passed = ", ".join(argument.passed for argument in self.arguments if argument.to == to)
            signature += f"#define {to.upper()} {{{passed}}}\n"
        files = "common/atoms.cuh", "common/tma.cuh", "sm90/atoms.cuh", *sources.MATH
        multiply = wgmma(g.columns_of_wgmma, dtype, p.bs[0].dtype, False, False)
        last = "halo/atoms.cuh", "halo/pipeline.cuh", "halo/weights.cuh"
        return sources.source(self.name, constants, ["using Acc = float;\n", *files, multiply, signature, *last])

    def launch_us(self, device: Device) -> float:
        """Returns the predicted time of one launch, of preparing its operands and of adding up what it writes."""
        c, g = self.config, self.geometry
        # Of a tile, 64 pixels are four times 16; warpgroups share the tensor cores.
        multiplied = 4 * self.sums * c.consumers * cost.wgmma_cycles(g.columns_of_wgmma)
        loaded = (g.box_bytes + g.gradient_bytes) / cost.L2
        items = g.sets * c.splits
        rounds = -(-items // min(items, device.sms))
        tile = max(multiplied, loaded) + BETWEEN / c.consumers
        us = rounds * -(-g.count // c.splits) * tile * cost.cycle(device)
        p, size = self.multiplied, self.multiplied.a.bytes(1)
        pixels = next((x.written for x in self.prepared), g.view.elements * size)
        moved_us = (pixels + p.k * p.n * size) / (cost.MEMORY * device.bytes_per_second) * 1e6
        parts = 2 * 4 * c.splits * g.rows * p.n
        after_us = 1e6 * parts / (ADDED * device.bytes_per_second)
        first_us = cost.LAUNCH_US + copies_us(self.prepared, device)
        return first_us + cost.together(cost.slowed(us), moved_us) + after_us

    @property
    def grid(self) -> base.Grid:
        """The blocks of its launch: as many as run at one time."""
        return base.Grid(self.tiles, 128 * (1 + self.config.consumers), 1, 1)


# Cycles from a tile's wgmmas to the next one's, of one warpgroup, and the share of the rate of memory at which what is
# stored is added up, in L2. Fitted to 12 gradients on an H200 (benchmarks/results/experiments/halos-h200.json), all of
# 3 or 4 warpgroups: they are predicted within 10%.
BETWEEN, ADDED = 130, 1.7
PARTS = 1, 2, 3, 4  # of the taps along the innermost axis, each a unit
WASTED = 1.35  # units that warpgroups have over those that there are, at most
EVERY = 1, 2, 4, 8  # of how many SMs one has a split


def _arguments(kernel: Kernel) -> Iterator[Argument]:
    p, g = kernel.multiplied, kernel.geometry
    other = 1 if turned(kernel.problem) else 0  # of the images, where they have changed places
    images = dataclasses.replace(images_map(g), buffer=other)
    yield Argument("const __grid_constant__ TensorMap map_a", images, "windows")
    for name, value in _of_windows(g):
        yield integer(f"a_{name}", value, "windows")
    yield Argument("const __grid_constant__ TensorMap map_b", _gradient_map(g, 1 - other), "gradient")
    copied = p.a.bytes(g.copy * g.config.bn) if g.copies > 1 else 0
    of_gradient = {"offset": g.offset, "box_bytes": g.gradient_bytes, "copy_bytes": copied, "lead": g.lead}
    for name, value in of_gradient.items():
        yield integer(f"b_{name}", value, "gradient")
    yield Argument("float* d", Pointer(2))
    counts = {"rows": g.rows, "n": p.n, "columns": g.columns, "splits": kernel.config.splits, "tiles": g.count}
    for name, value in counts.items():
        yield integer(name, value)


def _of_windows(g: Tiles) -> Iterator[tuple[str, int]]:
    view = g.view
    steps = [pitch * step for pitch, step in zip(g.pitches, view.dilation[::-1], strict=False)]
    yield from {"box_bytes": g.box_bytes, "stage_bytes": g.stage_bytes, "group_bytes": g.group_bytes}.items()
    yield from {"tap_bytes": steps[0], "window": view.window[-1], "parts": g.parts}.items()
    yield "part_bytes", g.config.taps * g.copies * steps[0]
    rows, row_bytes = (view.window[-2], steps[1]) if g.axes > 1 else (1, 0)
    yield from {"rows": rows, "row_bytes": row_bytes, "planes": g.planes}.items()
    yield "plane_step", view.dilation[0] if g.axes > 2 else 0
    for name, values in {"tiles": g.tiles, "low": view.low[::-1], "strides": view.strides[::-1]}.items():
        for i, value in enumerate(values):
            yield f"{name}{i}", value
    yield from {"pieces": g.pieces, "channels": view.channels, "columns": g.problem.n // view.groups}.items()


def _gradient_map(g: Tiles, buffer: int) -> TensorMap:
    """Returns the tensor map of the result's gradient, of which a load takes the pixels of a tile."""
    p, view = g.problem, g.view
    strides = [p.a.bytes(p.n)]
    for size in view.grid[::-1]:
        strides.append(strides[-1] * size)
    return TensorMap(
        buffer=buffer,
        dtype=p.a.dtype,
        dims=(p.n, *view.grid[::-1], view.images),
        strides=tuple(strides),
        box=(g.config.bn, *g.gradient_box),
        swizzle=p.a.bytes(g.config.bn),
        l2_bytes=256 if strides[0] % 128 == 0 else 128,
    )


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel of a problem that the family serves, or every reason why the config cannot."""
    asked, problem = problem, problem.bare
    p = (turned(problem) or problem).bare
    if not config.taps > 0:
        return (f"taps={config.taps} of a gradient of weights, expected some",)
    g, found = Tiles(p, config), []
    if config.bn not in (16, 32, ROWS):
        found.append(f"bn={config.bn} columns of a gradient, expected 16, 32 or {ROWS}")
        return tuple(found)
    if g.columns_of_wgmma > 256:
        found.append(f"{config.taps} taps of {g.chunk} channels: wgmma multiplies at most 256 columns at once")
    if config.taps > g.view.window[-1]:
        found.append(f"taps={config.taps} of {g.view.window[-1]} along the innermost axis")
    if (sums := -(-g.units // config.consumers) * g.columns_of_wgmma // 2) > MOST_SUMS[config.consumers]:
        found.append(
            f"{g.units} units of {g.columns_of_wgmma} columns: {sums} registers of sums, at most "
            f"{MOST_SUMS[config.consumers]} of {config.consumers} warpgroups"
        )
    if g.view.groups > 1 and (columns := p.n // g.view.groups) % config.bn:
        found.append(f"bn={config.bn} of groups of {columns} columns: blocks are of one group")
    if config.along not in ALONG[g.axes]:
        found.append(f"along={config.along!r} of images of {g.axes} axes, expected one of {ALONG[g.axes]}")
    elif g.copies > 1 and config.along != "row":
        found.append(f"along={config.along!r} of {g.copies} copies of columns, which are pixels of one row apart")
    if max(*g.box, *g.gradient_box) > BOX:
        found.append(f"boxes of {g.box} and {g.gradient_box} pixels: of TMA they have at most {BOX} along an axis")
    need = config.stages * (g.stage_bytes + 16)
    if need > problem.device.shared_bytes:
        found.append(f"{config.stages} stages of {g.stage_bytes} bytes: at most {problem.device.shared_bytes} in all")
    found += shared.of_counters({"tiles": g.count + 1, "sums": config.splits * g.rows, "pixels": p.k + 64 * g.count})
    if found:
        return tuple(found)
    return Kernel(
        problem=problem,
        config=config,
        asked=asked,
        multiplied=p,
        staging=plan_staging(problem.epilogue, False, False, 8, True, tma=False),
        prepared=_prepared(problem, p),
        chunk=g.chunk,
        stage_bytes=g.stage_bytes,
        buffer_bytes=0,
        shared_bytes=need,
        geometry=g,
        tiles=g.sets * config.splits,
        rows=1,
        columns=g.columns,
    )


def _prepared(problem: Problem, p: Problem) -> tuple:
    """Returns the images that are padded for windows of few channels, which may be b."""
    if packing_of(p) is None:
        return ()
    images = prepared(p)[0]
    return (dataclasses.replace(images, name="b", buffer=1) if turned(problem) else images,)


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the shipped tiles, each with as many stages as fit, and as many splits as are predicted to be fastest."""
    p = turned(problem) or problem
    for bn in (ROWS, 32, 16):
        first = Tiles(p, Config(bn, 1, 2, taps=1))
        window, copies = first.view.window[-1], ROWS // bn
        if bn > 16 and padded_to(p.n // first.view.groups, 16) <= bn // 2:
            continue
        counts = {window, *(-(-window // (copies * parts)) for parts in PARTS)}
        for taps in sorted((count for count in counts if count * first.chunk <= 256), reverse=True):
            units = Tiles(p, Config(bn, 1, 2, taps=taps)).units
            for consumers in (1, 2, 3, 4):
                if consumers > 1 and -(-units // consumers) * consumers > WASTED * units:
                    continue
                for how in ALONG[first.axes]:
                    found = resolve(problem, Config(bn, consumers, 2, how, taps=taps))
                    if not isinstance(found, tuple):
                        yield _fitting(found)


def _fitting(kernel: Kernel) -> Config:
    device, g = kernel.problem.device, kernel.geometry
    stages = min(8, device.shared_bytes // (kernel.stage_bytes + 16))
    counts = {max(1, min(device.sms // (g.sets * every), g.count)) for every in EVERY}
    found = [dataclasses.replace(kernel.config, stages=stages, splits=count) for count in sorted(counts)]
    return min(found, key=lambda config: dataclasses.replace(kernel, config=config).launch_us(device))
