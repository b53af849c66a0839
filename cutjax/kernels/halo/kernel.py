"""A kernel of ffi/device/halo/: one config resolved for one problem, or every reason why it cannot be."""

from __future__ import annotations

import functools
import math

from cutjax.dtypes import short
from cutjax.kernels import base
from cutjax.kernels import reasons as shared
from cutjax.kernels.arguments import Argument
from cutjax.kernels.device import Device
from cutjax.kernels.halo import cost, text
from cutjax.kernels.halo.arguments import arguments
from cutjax.kernels.halo.config import ALONG, MOST_COLUMNS, MOST_SUMS, Config
from cutjax.kernels.halo.geometry import BOX, Geometry
from cutjax.kernels.halo.operands import packing_of, prepared, view_of
from cutjax.kernels.halo.resolved import Resolved
from cutjax.kernels.halo.weights import turned
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import STORED, Staging, plan_staging

ARCH = "sm_90a"
DTYPES = ("bfloat16", "float16")


@functools.lru_cache(maxsize=1024)
def staging_of(problem: Problem) -> Staging:
    """Returns the staging of a problem's epilogue: threads store the pixels of a tile."""
    layout = math.gcd(problem.n, 16), problem.n % 2 == 0
    return plan_staging(problem.epilogue, False, False, *layout, tma=False, pixels=True)


@functools.lru_cache(maxsize=1024)
def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns the reasons against every kernel of this family; empty when one serves."""
    if problem.arch != ARCH:
        return (f"architecture {problem.arch}: the kernels are for {ARCH}",)
    if not isinstance(problem.a.view, Im2col):
        return ("no convolution: halos are of windows of images",)
    found, b, of_weights = shared.of_operands(problem, (Im2col,), (Taps,)), problem.bs[0], problem.a.contiguous != "k"
    read = (turned(problem) if of_weights else None) or problem
    view, packing = view_of(read), packing_of(read)
    if {*view.spread, *(() if packing else view.strides)} != {1}:
        found.append("strides or zeros between elements: halos are of windows of stride 1, or of few channels")
    if problem.a.dtype.name not in DTYPES or problem.a.dtype != b.dtype or problem.math:
        a, by = short(problem.a.dtype.name), f" as {problem.math}" * bool(problem.math)
        found.append(f"{a} x {short(b.dtype.name)}{by}: halos are of {', '.join(map(short, DTYPES))}")
    elif problem.accumulator.name != "float32":
        found.append(f"{short(problem.a.dtype.name)} added up in {short(problem.accumulator.name)}, not in float32")
    if view_of(problem).groups > 1 and view_of(problem).channels == 1:
        found.append("each channel by itself: halos are of wider groups")
    if problem.products > 1:
        found.append(f"{problem.products} products: halos are of one")
    if not packing and (pixel := view.groups * view.channels) % 8:
        found.append(f"{pixel} channels: TMA loads whole units of 16 bytes")
    if of_weights:
        if read.n % 8:
            found.append(f"{read.n} columns of a gradient: TMA loads whole units of 16 bytes")
        return (*found, *shared.of_sizes(problem))
    staging = staging_of(problem)
    if problem.plain and staging.reasons:
        names = ", ".join(map(short, STORED))
        found.append(f"result {short(problem.out_dtype.name)}: one of {names}")
    elif not problem.plain:
        found += staging.reasons
    return (*found, *staging.pixel_reasons, *shared.of_sizes(problem))


class Kernel(Resolved, base.Kernel):
    """One config resolved for one problem."""

    family = "halo"

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""
        return arguments(self)

    @property
    def source(self) -> str:
        """The device text; sizes are arguments of the kernel, so one text serves every shape."""
        return text.source(self, self.arguments)

    def launch_us(self, device: Device) -> float:
        """Returns the predicted time of one launch."""
        return cost.predict(self, device)

    @property
    def grid(self) -> base.Grid:
        """The blocks of its launch: as many as run at one time, or as there are tiles; of every column equally many.

        All of them are launched, on a device of fewer SMs too: a block keeps the weights of its columns.
        """
        rows = min(self.rows, self.problem.device.sms // self.columns)
        return base.Grid(rows * self.columns, 128 * (1 + self.config.consumers), 1, 0)


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    found = list(reasons(problem))
    if found:
        return tuple(found)
    of, staging = Geometry(problem, config), staging_of(problem)
    if of.of_columns and config.bn % 16:
        found.append(f"bn={config.bn} where rows in memory lie along it: the narrowest swizzle spans 16 elements")
    if of.view.groups > 1 and (columns := problem.n // of.view.groups) % config.bn:
        found.append(f"bn={config.bn} of groups of {columns} columns: blocks are of one group")
    if config.consumers not in MOST_SUMS:
        found.append(f"consumers={config.consumers}: a warpgroup that stores leaves the tensor cores to another")
        return tuple(found)
    if config.along not in ALONG[of.axes]:
        found.append(f"along={config.along!r} of images of {of.axes} axes, expected one of {ALONG[of.axes]}")
    if of.stacked * config.bn > 256:
        found.append(f"{of.stacked} taps of {config.bn} columns: wgmma multiplies at most 256 at once")
    if (sums := (of.stacked + 1) * config.bn // 2) > MOST_SUMS[config.consumers]:
        found.append(
            f"{of.stacked} taps of {config.bn} columns: {sums} registers of sums, at most "
            f"{MOST_SUMS[config.consumers]} of {config.consumers} warpgroups"
        )
    full = any(spec.row and spec.col for spec in problem.epilogue.operands)
    if full and config.bn > (most := MOST_COLUMNS[config.consumers]):
        found.append(
            f"bn={config.bn} with operands of the result's size: at most {most} of {config.consumers} warpgroups"
        )
    if max(of.box) > BOX:
        found.append(f"a box of {of.box} pixels: of TMA it has at most {BOX} along an axis")
    if of.columns > problem.device.sms:
        found.append(f"{of.columns} blocks beside each other: at most as many as SMs")
    chunk = staging.chunk(config.bn)
    buffer_bytes = -(-16 * chunk * staging.column_bytes // 128) * 128
    buffers = 4 * config.consumers * buffer_bytes
    need = config.consumers * config.stages * (of.stage_bytes + 16) + of.weight_bytes + buffers + 16
    if need > problem.device.shared_bytes:
        found.append(
            f"{config.consumers} x {config.stages} boxes of {of.stage_bytes} bytes beside {of.weight_bytes} of "
            f"weights: {need} bytes of shared memory, at most {problem.device.shared_bytes}"
        )
    past = math.prod(grid + 64 for grid in (*of.view.grid, of.view.images))
    found += shared.of_counters({"pixels": past, "runs": 2 * of.runs + 4096, "steps": 64 * config.steps * of.step})
    if found:
        return tuple(found)
    blocks = -(-of.runs // config.consumers)
    return Kernel(
        problem=problem,
        config=config,
        asked=problem,
        multiplied=problem,
        staging=staging,
        prepared=prepared(problem),
        chunk=chunk,
        stage_bytes=of.stage_bytes,
        buffer_bytes=buffer_bytes,
        shared_bytes=need,
        geometry=of,
        tiles=blocks * of.columns,
        rows=blocks,
        columns=of.columns,
    )
