"""Measures a module in a process of its own: flags are read at start, and each process takes device memory."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

MARK = "RESULT "


def child(module: str, env: dict[str, str] | None = None, timeout_s: float = 240) -> Any:
    """Calls ``measure`` of a module in a new process: returns its result, or ``{"failure": ...}``."""
    full = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1", **(env or {})}
    try:
        command = [sys.executable, "-m", "benchmarks", "children", module]
        done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"failure": f"{module}: no answer in {timeout_s:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    return {"failure": f"{module}: exit status {done.returncode}: {done.stderr[-2000:]}"}


def main(argv: Sequence[str]) -> int:
    """Measures the module named, for `child` to read."""
    (module,) = argv
    print(MARK + json.dumps(importlib.import_module(module).measure()), flush=True)
    return 0
