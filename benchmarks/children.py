"""Runs a benchmark module in a process of its own: flags are read at start, and each process takes device memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

MARK = "RESULT "


def child(module: str, *args: str, env: dict[str, str] | None = None, timeout_s: float = 240) -> Any:
    """The JSON that ``python -m module args`` prints after MARK, or ``{"failure": ...}``."""
    full = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1", **(env or {})}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *args], env=full, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"{module}: no answer in {timeout_s:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    return {"failure": f"{module}: exit status {done.returncode}: {done.stderr[-2000:]}"}


def answer(result: Any) -> None:
    """Prints a child's result for `child` to read."""
    print(MARK + json.dumps(result), flush=True)
