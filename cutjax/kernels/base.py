"""The kernels of all families: the fields of a config resolved for a problem, and how one is compiled and called.

A family's record of fields (`Resolved`) lies below its text, arguments and cost, which are functions of it; its
`Kernel` lies above them.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
from jax import lax

from cutjax.kernels import prepared, results
from cutjax.kernels.arguments import Argument
from cutjax.kernels.device import Device
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import Staging
from cutjax.runtime.compiler import Cubin, compile_kernel
from cutjax.runtime.launch import Call, Launch


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Resolved:
    """One config resolved for one problem.

    Attributes:
      problem, config: which.
      asked: the problem with its epilogue; where k has splits, `problem` is without.
      multiplied: `problem` as it is multiplied: of prepared operands, and, where they are swapped, of the transposed
        result.
      staging: of its epilogue.
      prepared: the operands of which it reads copies.
      converted: operands that are converted before all that, where it is the kernel of a narrow problem's wide one, or
        of what a prologue makes.
      chunk: columns of a staging buffer.
      stage_bytes, buffer_bytes: shared memory of one stage, and of one staging buffer.
      shared_bytes: of one block, all together.
      tiles: their number, of clusters where there are such; where there are groups, the most there may be.
      rows, columns: tiles along m and n; where rows have groups, those along m of a group of average size.
    """

    problem: Problem
    config: Any
    asked: Problem
    multiplied: Problem
    staging: Staging
    prepared: tuple[Prepared, ...]
    converted: tuple[Prepared, ...] = ()
    chunk: int
    stage_bytes: int
    buffer_bytes: int
    shared_bytes: int
    tiles: int
    rows: int
    columns: int

    @property
    def stored(self) -> Problem:
        """The problem as results are stored."""
        return self.problem

    @property
    def in_parts(self) -> bool:
        """True if its results are sums that XLA takes further: those of splits."""
        return self.config.splits > 1


@dataclasses.dataclass(frozen=True)
class Grid:
    """The blocks of a launch.

    Attributes:
      blocks: their number.
      threads: of a block.
      cluster: blocks of a cluster.
      per_sm: blocks that share an SM, of which no more are launched than run at one time; 0 where all are launched.
    """

    blocks: int
    threads: int
    cluster: int
    per_sm: int


class Kernel(Resolved, abc.ABC):
    """A resolved config that is compiled and called. A family's says its name, text, arguments, time and grid."""

    family: ClassVar[str]

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The entry symbol, which is the same wherever the kernel is seen: HLO, profiler, explain, benchmark rows."""

    @property
    @abc.abstractmethod
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the kernel takes, in order."""

    @property
    @abc.abstractmethod
    def source(self) -> str:
        """The device text; sizes are arguments of the kernel, so one text serves every shape."""

    @property
    @abc.abstractmethod
    def grid(self) -> Grid:
        """The blocks of its launch."""

    @abc.abstractmethod
    def launch_us(self, device: Device) -> float:
        """Returns the predicted time of one launch, and of preparing its operands."""

    def scratch(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the memory that a launch works in, as results after the problem's; the last has zeros before it."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons to add to those of a choice: operands of which copies are made before it."""
        return (*prepared.notes(self.converted), *prepared.notes(self.prepared))

    @property
    def unmeasured(self) -> str:
        """The part of it that has not run on a device, so that it is for backend="cuda" alone; "" where all has."""
        return ""

    def time_us(self, device: Device) -> float:
        """Returns the predicted time of one call."""
        us = self.launch_us(device)
        return us + prepared.converted_us(self.converted, device) if self.converted else us

    def after(self, converted: tuple[Prepared, ...]) -> Self:
        """Returns the kernel with conversions of its operands before it."""
        return dataclasses.replace(self, converted=converted)

    def unlaunchable(self) -> tuple[str, ...]:
        """Returns the reasons against a launch: its parameters have a limit."""
        p = self.problem
        if p.plain and not p.groups and max(p.m, p.n, p.k, p.batch_size) < 1 << 20 and p.bytes < 1 << 36:
            return ()  # far from any: a choice of XLA, and of another kernel, needs no parameters
        try:
            self._launches(lambda _: b"-")
        except ValueError as error:
            return (f"operands and results are too many or too large for one launch ({error})",)
        return ()

    def compile(self) -> Cubin:
        """Compiles the kernel, or takes it from the cache."""
        return compile_kernel(self.source, name=self.name, arch=self.problem.arch)

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch."""
        problem, config, outputs = self.problem, self.config, self.multiplied.epilogue.outputs
        aliases = tuple((problem.arrays + operand, result) for operand, result in problem.in_place)
        taken, written, finish, scratch = problem.arrays + len(problem.epilogue.operands), (), None, self.scratch()
        more = sum(operand.copies - 1 for operand in self.prepared)
        if self.in_parts:
            written = results.parts(self.stored, config.splits)
            finish = functools.partial(results.finish_parts, self.asked, self._summed)
        elif self.staging.reductions or scratch:
            written = (*results.written(self.multiplied, config.epilogue_columns, config.swap), *scratch)
            finish = functools.partial(results.finish, outputs)
        if self.converted and finish is not None:
            finish = functools.partial(self._finish, finish)
        if scratch:
            aliases += ((taken + more, len(written) - 1),)
        changed = self.in_parts or self.prepared or self.converted or scratch
        return Call(
            self._launches(lambda kernel: kernel.compile().image),
            results=written,
            finish=finish,
            prepare=functools.partial(self._prepare, taken, scratch[-1:]) if changed else None,
            aliases=aliases,
            operand_orders=self._operand_orders(taken),
            result_orders=tuple(() if out.reduce else problem.order for out in outputs),
        )

    def _summed(self, x: jax.Array) -> jax.Array:
        """Returns the product, of the sum of what a kernel makes for it in parts."""
        return x

    def _launches(self, compiled: Callable[[Kernel], bytes]) -> tuple[Launch, ...]:
        """Returns the launches of a call, told what makes the code of a kernel."""
        return (self._launch(compiled(self)),)

    def _launch(self, cubin: bytes) -> Launch:
        """Returns the launch of the kernel, whose code is given."""
        grid = self.grid
        return Launch(
            kernel=self.name,
            cubin=cubin,
            grid=(grid.blocks, 1, 1),
            block=(grid.threads, 1, 1),
            cluster=(grid.cluster, 1, 1),
            shared_bytes=self.shared_bytes,
            blocks_per_sm=grid.per_sm,
            params=tuple(argument.value for argument in self.arguments),
        )

    def _finish(self, finish: Callable[..., Any], written: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> Any:
        return finish(written, self._given(arrays))

    def _prepare(
        self, taken: int, zeros: tuple[jax.ShapeDtypeStruct, ...], arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the kernel's arguments: the first ones, some of them copies, more copies of those, and zeros."""
        found, more = prepared.make(self.prepared, self._given(arrays)[:taken])
        return [*found, *more, *(lax.full(x.shape, 0, x.dtype) for x in zeros)]

    def _given(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arguments of ``problem``, of those of the one whose operands are converted to its."""
        return prepared.make(self.converted, arrays)[0]

    def _operand_orders(self, taken: int) -> tuple[tuple[int, ...], ...]:
        """Returns the order in memory of each argument's axes; a copy lies as the first of its array."""
        given = self.multiplied.transposed if self.config.swap else self.multiplied
        orders = [given.a.order, *(b.order for b in (() if given.symmetric else given.bs))]
        if not given.strided:
            return ()
        more = [orders[operand.buffer] for operand in self.prepared for _ in range(operand.copies - 1)]
        return (*orders, *[()] * (taken - len(orders)), *more)
