"""The tutorial notebook runs, and is kept without what it printed."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TUTORIAL = ROOT / "examples" / "tutorial.ipynb"
sys.path.append(str(ROOT / "docs"))

import tutorial  # noqa: E402


def test_the_tutorial_runs():
    """Its own assertions hold each step to plain JAX; the speeds that it prints are those of the recorded run."""
    pytest.importorskip("flax")
    with jax.numpy_dtype_promotion("standard"):
        page = tutorial.page(TUTORIAL)
    assert page.count("gradients are those of plain JAX\n") >= 5
    run = json.loads((ROOT / "benchmarks" / "results" / "programs-h200.json").read_text())
    ratios = {row["product"]: row["ratios"].get("jax") for row in run["rows"] if row["case"] == "llama block"}
    printed = re.findall(r"^llama block +(\w+) +([\d.]+)$", page, re.MULTILINE)
    assert dict(printed) == {name: f"{ratio:.2f}" for name, ratio in ratios.items() if ratio}


def test_the_tutorial_is_kept_without_results():
    cells = json.loads(TUTORIAL.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_a_cell_that_fails_fails_the_page(tmp_path):
    path = tmp_path / "wrong.ipynb"
    cells = [{"cell_type": "markdown", "source": ["# See [fuse](../docs/fuse.md)"]}]
    cells += [{"cell_type": "code", "source": ["x = 1\n", "print(x)"]}, {"cell_type": "code", "source": ["x / 0"]}]
    path.write_text(json.dumps({"cells": cells[:2]}))
    assert tutorial.page(path) == "# See [fuse](fuse.md)\n\n```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n"
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(ZeroDivisionError):
        tutorial.page(path)
