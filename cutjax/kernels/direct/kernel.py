"""A kernel of ffi/device/direct/: one config resolved for one problem, or every reason why it cannot be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from cutjax.dtypes import short
from cutjax.epilogue import emit
from cutjax.kernels import prepared as copies
from cutjax.kernels import reasons as shared
from cutjax.kernels import results
from cutjax.kernels.device import Device
from cutjax.kernels.direct import cost, slide, toeplitz
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.entries import entries
from cutjax.kernels.direct.geometry import geometry_of
from cutjax.kernels.direct.resolved import Resolved, accumulator_of
from cutjax.kernels.direct.text import as_large, reduced
from cutjax.kernels.entry import Entry
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import plan_staging
from cutjax.runtime.architectures import too_old
from cutjax.runtime.launch import Call

DTYPES = ("bfloat16", "float16", "float32", "float64")
MOST_REDUCED = 5  # rows of windows of which kernels by Toeplitz matrices have registers for sums of 8 channels too


@functools.lru_cache(maxsize=1024)
def reasons(problem: Problem) -> tuple[str, ...]:
    """Returns the reasons against every kernel of this family; empty when one serves."""
    if old := too_old(problem.arch, 75):
        return tuple(old)
    if not isinstance(problem.a.view, Im2col):
        return ("no convolution: direct kernels are of each channel by itself",)
    geometry = geometry_of(problem)
    if problem.a.view.groups == 1 or geometry is None:
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
    for _, out in staging.reductions:
        if "row" not in out.axes:
            found.append("a reduction over channels: blocks of direct kernels have some of them")
        elif out.dtype != problem.epilogue.accumulator.name:
            found.append(f"a reduction in {out.dtype}: direct kernels reduce in {problem.epilogue.accumulator}")
        elif geometry.gradient or geometry.slides:
            found.append("a reduction of a weight gradient, or of a convolution along one axis")
    if staging.reductions and as_large(problem.epilogue) and geometry.rows.window > MOST_REDUCED:
        found.append(
            f"a reduction beside an operand as large as the result, of windows of {geometry.rows.window} rows, at most "
            f"{MOST_REDUCED}: registers are short"
        )
    if emit.places(problem.epilogue):
        found.append("an epilogue that depends on where in a batch its elements lie")
    return (*found, *shared.of_sizes(problem))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Kernel(Resolved):
    """One config resolved for one problem: a launch, or, of a weight gradient, two."""

    family = "direct"
    unmeasured = ""

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
        return entries(self)

    def time_us(self, device: Device) -> float:
        """Returns the predicted time of one call."""
        c = self.config
        if c.toeplitz:
            us = toeplitz.predict(self.tensor, device)
        else:
            us = (slide if self.shape.slides else cost).predict(self.shape, device)
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
        if self.geometry.gradient or reduced(p.epilogue):
            written = (*results.written(p, 1, shares=self.parts), *[self.scratch] * self.geometry.gradient)
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


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    found, geometry = list(reasons(problem)), geometry_of(problem)
    if found or geometry is None:
        return tuple(found)
    of = toeplitz.Shape if config.toeplitz else cost.Shape
    found += of(problem, config, geometry).reasons()
    return tuple(found) if found else Kernel(problem=problem, config=config, geometry=geometry)
