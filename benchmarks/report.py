"""A run as JSON: its rows, and the machine and software they were measured on."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks import schemas
from benchmarks.record import Figures, Roofline, Row

RESULTS = pathlib.Path(__file__).parent / "results"
SCHEMA = 2


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


def commit_of(path: pathlib.Path | None = None) -> str:
    """The commit of this tree; of a file in it, the one that changed it last."""
    return _output("git", "log", "-1", "--format=%H", *(() if path is None else ("--", str(path))))


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
        "commit": commit or os.environ.get("CUTJAX_COMMIT") or commit_of(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def document(
    op: str,
    environment: Mapping[str, Any],
    method: str,
    roofline: Roofline | None,
    rows: Iterable[Row],
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON of one run; ``more`` is what is measured beside rows, by name."""
    return {
        "schema": SCHEMA,
        "op": op,
        **environment,
        "method": method,
        "roofline": None if roofline is None else dataclasses.asdict(roofline),
        "rows": [dataclasses.asdict(row) for row in rows],
        **(more or {}),
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


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return math.nan if value is None else value


def read(path: pathlib.Path) -> tuple[dict[str, Any], list[Row]]:
    """Returns the JSON of a run with its operation, and its rows, whichever schema they were written in.

    Raises:
      ValueError: the schema is unknown.
    """
    content = json.loads(path.read_text())
    if content.get("schema") == 1:
        return {"op": "gemm", **content}, [schemas.row_1(content, _numbers(row)) for row in content["rows"]]
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected schema 1 or {SCHEMA}, it has {content.get('schema')!r}")
    rows = map(_numbers, content["rows"])
    return content, [Row(**row | {"peers": {key: Figures(**p) for key, p in row["peers"].items()}}) for row in rows]
