"""The record of what was measured: a row for each product, its peers' figures, and the rates of the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

YARDSTICKS = ("dense", "plain")  # our own products, that a time is compared with: nobody's peers


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The rates that this device reached in this run.

    Attributes:
      tflops: the best bf16 product, 8192 x 8192 x 8192, of XLA's and ours.
      gb_per_s: a large copy on the device, bytes read plus bytes written.
    """

    tflops: float
    gb_per_s: float

    def us(self, flops: int, moved_bytes: int) -> float:
        """The least time: arithmetic or memory, whichever is longer."""
        return max(flops / self.tflops / 1e6, moved_bytes / self.gb_per_s / 1e3)


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of a peer for the same product; a failure says why there is no time."""

    us: float = math.nan
    iqr_us: float = math.nan
    kernel: str = ""
    peak_mib: float = math.nan
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One product of one case, beside its peers in the same run.

    Attributes:
      case, product: which, e.g. ``8g 16384x14336x4096`` and "dx"; the product is "" where a case has one.
      variant: "auto" for the cost model's choice, else the pinned config as JSON.
      kernel: kernels that ran for cutjax.
      us, iqr_us: median and spread.
      tflops, gb_per_s: rates; the second of the bytes that must move.
      roofline: share of the measured roofline.
      peak_mib: memory of the executable, temporaries and results.
      error: relative error against the reference.
      ratios: by peer, its time over ours (above 1 we are faster); "peers": of the fastest; "copy": the share of the
        measured copy bandwidth.
      targets: the least ratios asked for, of some of them.
      peers: their own figures, by name.
      figures: what a suite tells besides.
      failure: why there is no time, else "".
    """

    case: str
    product: str = ""
    variant: str = "auto"
    kernel: str = ""
    us: float = math.nan
    iqr_us: float = math.nan
    tflops: float = math.nan
    gb_per_s: float = math.nan
    roofline: float = math.nan
    peak_mib: float = math.nan
    error: float = math.nan
    ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peers: Mapping[str, Figures] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failure: str = ""

    @property
    def name(self) -> str:
        """Case and product."""
        return f"{self.case} {self.product}".strip()

    @property
    def missed(self) -> tuple[str, ...]:
        """The targets that were measured and not reached."""
        return tuple(key for key, target in self.targets.items() if self.ratios.get(key, math.nan) < target)

    @property
    def fastest(self) -> str:
        """The name of the fastest peer, or ""."""
        timed = {name: p.us for name, p in self.peers.items() if name not in YARDSTICKS and not math.isnan(p.us)}
        return min(timed, key=timed.__getitem__) if timed else ""

    @property
    def summary(self) -> str:
        """One line: the time and the ratios, or why there is none."""
        ratios = "".join(f", {key} {ratio:.3f}" for key, ratio in self.ratios.items())
        missed = f", MISSED {', '.join(self.missed)}" if self.missed else ""
        return f"{self.name}: {self.failure or f'{self.us:.1f} us{ratios}{missed}'}"
