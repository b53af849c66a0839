"""What a run writes down: rows, the machine and software they were measured on, the printed table."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
from collections.abc import Iterable
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What this device reached in this run.

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
class Row:
    """One case measured against XLA in the same run.

    Attributes:
      case: the case's name.
      choice: "auto" for the cost model's choice, else the pinned config as JSON.
      kernel: kernels that ran for cutjax.
      us, iqr_us: median and spread.
      xla_kernel, xla_us, xla_iqr_us: the same for XLA.
      tflops: rate of cutjax.
      roofline: share of the measured roofline.
      ratio: XLA's time over ours; above 1 is faster than XLA.
      target: the ratio asked for, or None.
      error: relative error against the f32 reference.
      failure: why there is no time, else "".
      plain_us, plain_ratio, plain_target: our plain product's time, ours over it, and the most that may be; or None.
      peak_mib, xla_peak_mib: memory of the executables, temporaries and results; or None.
    """

    case: str
    choice: str = "auto"
    kernel: str = ""
    us: float = math.nan
    iqr_us: float = math.nan
    xla_kernel: str = ""
    xla_us: float = math.nan
    xla_iqr_us: float = math.nan
    tflops: float = math.nan
    roofline: float = math.nan
    ratio: float = math.nan
    target: float | None = None
    error: float = math.nan
    failure: str = ""
    plain_us: float | None = None
    plain_ratio: float | None = None
    plain_target: float | None = None
    peak_mib: float | None = None
    xla_peak_mib: float | None = None


def geometric_mean(ratios: Iterable[float]) -> float:
    """NaN if there are none or one is NaN."""
    values = list(ratios)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def version(*names: str) -> str:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=RESULTS.parent)
        return done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def environment(commit: str | None = None) -> dict[str, Any]:
    """Device, driver, versions, commit and date; starts JAX's backend.

    Args:
      commit: the commit measured, where the tree is a copy without its history; else CUTJAX_COMMIT, else git's answer.
    """
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "plugin": version("jax-cuda13-plugin", "jax-cuda12-plugin"),
            "cutjax": version("cutjax"),
            "nvrtc": version("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
            "cublas": version("nvidia-cublas", "nvidia-cublas-cu12"),
        },
        "commit": commit or os.environ.get("CUTJAX_COMMIT") or _output("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def document(
    environment: dict[str, Any],
    method: str,
    roofline: Roofline | None,
    rows: Iterable[Any],
    launch: Any = None,
    compile: Any = None,
) -> dict[str, Any]:
    """The JSON of one run."""
    return {
        "schema": 1,
        **environment,
        "method": method,
        "roofline": None if roofline is None else dataclasses.asdict(roofline),
        "rows": [dataclasses.asdict(row) for row in rows],
        "launch": launch,
        "compile": compile,
    }


def finite(value: Any) -> Any:
    """NaN is not JSON: null instead."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a run's JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(finite(content), indent=1, allow_nan=False) + "\n")
    temporary.replace(path)


def read(path: pathlib.Path) -> tuple[dict[str, Any], list[Row]]:
    """A run's JSON and its rows."""
    content = json.loads(path.read_text())
    if content.get("schema") != 1:
        raise ValueError(f"{path}: expected schema 1, it has {content.get('schema')!r}")
    nan = {field.name: math.nan for field in dataclasses.fields(Row) if field.type == "float"}
    filled: list[dict[str, Any]] = [
        {key: nan.get(key) if value is None else value for key, value in row.items()} for row in content["rows"]
    ]
    return content, [Row(**row) for row in filled]


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def print_rows(rows: Iterable[Row], title: str) -> None:
    """The table a person reads."""
    import rich.console
    import rich.table

    rows = list(rows)
    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for column in ("us", "spread", "TFLOP/s", "roofline", "XLA us", "ratio", "target"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        missed = row.target is not None and not row.ratio >= row.target
        table.add_row(
            row.case,
            row.failure or row.kernel,
            _number(row.us, 1),
            _number(row.iqr_us, 1),
            _number(row.tflops, 0),
            _number(100 * row.roofline, 0) + ("" if math.isnan(row.roofline) else "%"),
            _number(row.xla_us, 1),
            _number(row.ratio, 3),
            "-" if row.target is None else f"{row.target:.2f}",
            style="red" if missed or row.failure else None,
        )
    console = rich.console.Console(width=None if os.isatty(1) else 160)
    console.print(table)
    wanted = [row.ratio for row in rows if row.target is not None]
    if wanted:
        console.print(
            f"geometric mean of the ratio over the {len(wanted)} rows with a target: {geometric_mean(wanted):.3f}"
        )
