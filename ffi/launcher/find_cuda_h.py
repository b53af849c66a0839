"""Prints the include directories of installed NVIDIA wheels that hold cuda.h, newest first, separated by semicolons."""

from __future__ import annotations

import importlib.util
from pathlib import Path

spec = importlib.util.find_spec("nvidia")
roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
found = [
    h.parent
    for root in roots
    for h in (*sorted(root.glob("cu[0-9]*/include/cuda.h"), reverse=True), *root.glob("cuda_runtime/include/cuda.h"))
]
print(";".join(map(str, found)))
