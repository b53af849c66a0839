"""The blocks of Python in a page of the documentation.

``<!-- before: ... -->`` holds code that is run and not shown; ``<!-- not run: reason -->`` leaves the next block out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

BLOCK = re.compile(
    r"^<!-- before:\n(?P<hidden>.*?)^-->$"
    r"|(?:^<!-- not run: (?P<reason>[^\n]+) -->\n+)?^```python\n(?P<shown>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """Code, the line of its page that it begins at, and why it is not run, or None."""

    line: int
    code: str
    reason: str | None = None


def blocks(text: str) -> list[Block]:
    """Returns the blocks of a page."""
    found = []
    for match in BLOCK.finditer(text):
        name = "hidden" if match["shown"] is None else "shown"
        found.append(Block(text.count("\n", 0, match.start(name)) + 1, match[name], match["reason"]))
    return found
