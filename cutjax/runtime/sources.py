"""The device text of a kernel: its constants, then the files and the generated parts of its family, concatenated.

NVRTC sees no include: a kernel is one self-contained string, so its hash identifies it. ``#line`` keeps the place of
every line, so a compiler message names the file a person would open.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence

DEVICE = pathlib.Path(__file__).parent.parent / "device"
MATH = "common/integers.cuh", "common/math.cuh"  # what generated epilogues call


@functools.cache
def _file(name: str) -> str:
    path = DEVICE / name
    if not path.exists():  # a source checkout that was not installed
        path = DEVICE.parent.parent / "ffi" / "device" / name
    return f'#line 1 "{name}"\n{path.read_text()}'


def constant(name: str, value: int | bool) -> str:
    """Returns one C++ constant."""
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    return f"constexpr int {name} = {value};\n"


def source(kernel: str, constants: Mapping[str, int | bool], parts: Sequence[str]) -> str:
    """Returns the text of one kernel: its constants, then its parts in order, each a file's name or generated text."""
    head = f'#line 1 "constants of {kernel} (generated)"\n#define KERNEL {kernel}\n'
    values = [constant(*item) for item in constants.items()]
    return "".join([head, *values, *(_file(part) if part.endswith(".cuh") else part for part in parts)])
