"""Runs a notebook's cells in this process, without a server, and makes a page of them and of what they print.

docs/hooks.py makes the page of examples/tutorial.ipynb, and tests/project/test_tutorial.py runs it.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """A cell's kind, "markdown" or "code", its text, and what it printed."""

    kind: str
    text: str
    printed: str = ""


def run(path: pathlib.Path) -> Iterator[Cell]:
    """Yields the cells of a notebook, those of code once they have run, in one namespace and in its own folder."""
    namespace: dict[str, Any] = {"__name__": path.stem}
    for i, cell in enumerate(json.loads(path.read_text())["cells"]):
        text, printed = "".join(cell["source"]), io.StringIO()
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(printed), contextlib.chdir(path.parent):
                exec(compile(text, f"{path}, cell {i}", "exec"), namespace)
        yield Cell(cell["cell_type"], text, printed.getvalue().rstrip())


def page(path: pathlib.Path) -> str:
    """Returns a notebook as a page of the site; its links to other pages are as in the repository."""
    parts = []
    for cell in run(path):
        if cell.kind == "markdown":
            parts.append(re.sub(r"\]\(\.\./docs/", "](", cell.text))
        else:
            parts.append(f"```python\n{cell.text}\n```")
        if cell.printed:
            parts.append(f"```text\n{cell.printed}\n```")
    return "\n\n".join(parts) + "\n"
