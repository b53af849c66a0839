"""The description of an operation to measure: a `Suite` of cases, and for each its products, ours and the peers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.record import Roofline, Row

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another way to a product's result, on the same inputs.

    Attributes:
      make: makes the function of the inputs, of a config's fields as keywords where there are configs; None where the
        suite's ``foreign`` does.
      configs: those to try roughly first; the fastest is timed in turns with the rest.
      check: False where the result is the standard.
      runs: how often it is run apart from the others, where it would take too long in turns with them; 0 for in turns.
      refuse: says why it cannot be run on a device of that roofline, else "".
    """

    make: Callable[..., Function] | None
    configs: Sequence[Mapping[str, Any]] | None = None
    check: bool = True
    runs: int = 0
    refuse: Callable[[Roofline], str] = lambda roofline: ""


@dataclasses.dataclass(frozen=True)
class Product:
    """One result of a case's inputs: a row of the report for each config.

    Attributes:
      name: which of the case's products, "" where it is the only one.
      flops, bytes: arithmetic, and the least that device memory moves.
      ours: our function of the inputs, with the cost model's choice (None) or a pinned config.
      peers: by name.
      look: ``look(inputs, out, theirs)`` computes what tells right from wrong, on the device; ``theirs`` is the result
        of the peer ``beside``, or None.
      judge: the relative error, and what is wrong or "", from what ``look`` returned.
      beside: the peer whose result ``look`` takes too, or "".
      targets: the least ratios asked for, by peer; "peers" is the fastest of them, "copy" the copy bandwidth.
      yardsticks: the names in the suite's ``yardsticks`` that the time is compared with.
      figures: what is known before, for the row.
    """

    name: str
    flops: int
    bytes: int
    ours: Callable[[Any], Function]
    peers: Mapping[str, Peer]
    look: Function
    judge: Callable[[Any], tuple[float, str]]
    beside: str = ""
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    yardsticks: tuple[str, ...] = ()
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings of a run: clock ("cupti" or "host"), roofline, products and peers asked for, pinned configs."""

    method: str
    roofline: Roofline
    products: tuple[str, ...] | None = None
    peers: tuple[str, ...] | None = None
    configs: tuple[Mapping[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Extra:
    """A measurement beside the cases, in processes of its own, and how it is printed."""

    measure: Callable[[], Any]
    show: Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Suite:
    """The cases of an operation, and their measurement.

    Attributes:
      name: of ``--op``.
      cases: each has a ``name`` and ``tags``.
      inputs: the arguments of a case for a seed, random normal (zeros run up to 13% faster and prove nothing).
      products: what is computed on them.
      yardsticks: of a case, our own functions that several products are compared with, by name.
      product_names: those that ``--tag`` may choose, where all cases have the same.
      foreign: of a case and its sets of inputs, functions of another library by peer and product; for kernel times.
      release: gives the memory of the foreign library back.
      rough, reps, timed_us: calls to estimate with, the least and the most samples, and the time of a case's samples.
      threads: whether functions are compiled at once: not where XLA tunes them on the device.
      measure: a way of its own to measure a case, instead of all that is above.
      clocks: those that make sense, the best first.
      device: names what was measured, where that is not the accelerator.
      draw: cases for a count and a salt instead of ``cases``.
      extras: measured beside the cases, by tag.
      versions: packages that the report tells the versions of.
      environment: of the process, where the user has not set it.
      x64: whether it measures dtypes of 64 bits.
    """

    name: str
    cases: Sequence[Any] = ()
    inputs: Callable[[Any, int], tuple] | None = None
    products: Callable[[Any], Sequence[Product]] | None = None
    yardsticks: Callable[[Any], Mapping[str, Function]] = lambda case: {}
    product_names: tuple[str, ...] = ()
    foreign: Mapping[str, Callable[[Any, Sequence[tuple]], Mapping[str, Function]]] = dataclasses.field(
        default_factory=dict
    )
    release: Callable[[], None] = lambda: None
    rough: int = 2
    reps: tuple[int, int] = (12, 200)
    timed_us: float = 300e3
    threads: bool = False
    measure: Callable[[Any, Run], list[Row]] | None = None
    clocks: tuple[str, ...] = ("cupti", "host")
    device: Callable[[], str] | None = None
    draw: Callable[[int, str], Sequence[Any]] | None = None
    extras: Mapping[str, Extra] = dataclasses.field(default_factory=dict)
    versions: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    x64: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """Everything that ``select`` takes, but "suite" and "all"."""
        tags = (tag for case in self.cases for tag in case.tags)
        return tuple(dict.fromkeys((*tags, *self.product_names, *self.extras)))

    def select(self, tags: str) -> tuple[tuple[Any, ...], tuple[str, ...] | None]:
        """The cases of some tags joined by commas, and the products among those tags or None for all.

        "all", and "suite" where no case has that tag, is every case; a product's name alone too; an extra's is none.

        Raises:
          ValueError: an unknown tag.
        """
        wanted = set(tags.split(","))
        if unknown := wanted - {*self.tags, "suite", "all"}:
            raise ValueError(f"unknown tag {sorted(unknown)} of {self.name}, expected some of {(*self.tags, 'all')}")
        products = tuple(name for name in self.product_names if name in wanted) or None
        only_extras = wanted <= set(self.extras)
        wanted -= {*self.product_names, *self.extras, *({"suite"} - set(self.tags))}
        if only_extras or not wanted or "all" in wanted:
            return () if only_extras else tuple(self.cases), products
        return tuple(case for case in self.cases if wanted & set(case.tags)), products
