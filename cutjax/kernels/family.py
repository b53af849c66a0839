"""A family of kernels: the interface through which one is chosen. An implementation is a folder beside this file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from cutjax.kernels.device import Device
from cutjax.kernels.prepared import Prepared
from cutjax.kernels.prices import Prices
from cutjax.kernels.problem import Problem
from cutjax.runtime.launch import Call


class Kernel(Protocol):
    """One config of a family, resolved for one problem."""

    @property
    def family(self) -> str:
        """Name of the family."""
        ...

    @property
    def config(self) -> Any:
        """The config: tile, pipeline, schedule, as the family has them."""
        ...

    @property
    def name(self) -> str:
        """Name of the kernel wherever it is seen: HLO, profiler, explain, benchmark rows."""
        ...

    @property
    def source(self) -> str:
        """The device text, which NVRTC compiles for the problem's architecture."""
        ...

    @property
    def prepared(self) -> tuple[Prepared, ...]:
        """The operands of which it reads copies, made before the launch."""
        ...

    @property
    def converted(self) -> tuple[Prepared, ...]:
        """The operands that are converted before all that."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons to add to those of a choice: copies of operands that the kernel needs."""
        ...

    @property
    def unmeasured(self) -> str:
        """The part of it that has not run on a device, so that it is for backend="cuda" alone; "" where all has."""
        ...

    def time_us(self, device: Device) -> float:
        """Returns the predicted time of one launch."""
        ...

    def unlaunchable(self) -> tuple[str, ...]:
        """Returns the reasons against a launch, such as too many parameters; a problem's first config has fewest."""
        ...

    def after(self, converted: tuple[Prepared, ...]) -> Kernel:
        """Returns the kernel with conversions of its operands before it."""
        ...

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch."""
        ...


class Family(Protocol):
    """Kernels that have a kind of config in common."""

    @property
    def name(self) -> str:
        """The first part of its kernels' names."""
        ...

    @property
    def Config(self) -> type[Any]:
        """The frozen dataclass of its configs."""
        ...

    def competes(self, problem: Problem) -> bool:
        """True if its kernels compete with those of a family before it that serves the problem."""
        ...

    def stores_in_order(self, problem: Problem) -> bool:
        """True if its kernels store results in the problem's order of axes, or are of another architecture."""
        ...

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        """Returns the reasons against every kernel of the family for a problem; empty when one can serve it."""
        ...

    def configs(self, problem: Problem) -> Iterable[Any]:
        """Returns the shipped configs for a problem that the family serves, whether or not each of them can."""
        ...

    def prices(self, problem: Problem) -> Prices:
        """Returns the predicted times of those of them that do."""
        ...

    def resolve(self, problem: Problem, config: Any) -> Kernel | tuple[str, ...]:
        """Returns the kernel of a config, or every reason why it cannot serve the problem."""
        ...
