"""Makes the table "What runs where" of the reasons that the families of kernels give.

mkdocs puts it where a page has ``<!-- what runs where -->`` (docs/hooks.py). README has a copy, which
``python docs/what_runs_where.py`` writes anew.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax import lax

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the package of this checkout

from cutjax import dot_precision  # noqa: E402
from cutjax.dtypes import EIGHT_BITS  # noqa: E402
from cutjax.kernels.choose import Choice, in_precision  # noqa: E402
from cutjax.kernels.families import FAMILIES  # noqa: E402
from cutjax.kernels.mma.math import math_of  # noqa: E402
from cutjax.kernels.prepared import wide as wide_of  # noqa: E402
from cutjax.kernels.problem import Problem  # noqa: E402
from cutjax.runtime.architectures import ARCHITECTURES, number  # noqa: E402

BEGIN, END = "<!-- what runs where -->", "<!-- end of what runs where -->"
SIDE = 4096  # of the matrices that are asked about
XLA = "XLA"
LEGEND = """\
`wgmma`, `mma.sync` (both on tensor cores) and FMA are cutjax's kernels: any sizes and batch, every layout, epilogues,
rows in groups. XLA's own product runs elsewhere (CPU, TPU), and under `backend="auto"`, the default, where it is
predicted or was measured to be faster; `cutjax.explain` says what runs, and why. Only Hopper is measured; kernels for
other GPUs are compiled and checked, but were never run."""


class Kind(NamedTuple):
    """Two operands, their row of the table, the result's dtype if it is another, and a precision."""

    row: str
    a: str
    b: str
    out: str = ""
    precision: Any = None


_PARTS = ("TF32_TF32_F32_X3", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9")
_PRESETS = lax.DotAlgorithmPreset
_ROWS = {  # kinds of one row are multiplied alike everywhere, or the cell says where they are not
    "exact": "bfloat16; float32 in parts, by `BF16_BF16_F32_X3` and the like",
    "half": "float16, int8, uint8",
    "tf32": "float32, complex64 by default (as TF32, like XLA)",
    "float8": "float8_e4m3fn; float8_e5m2 by `ANY_F8_...`",
    "narrow": "bfloat16 or float16 by 8-bit weights",
    "one by one": 'float32, complex64 by `precision="highest"`; integers of 32 and 64 bits',
    "wide": "float64, complex128",
    "none": "integers of 16 bits, other pairs of dtypes",
}
KINDS = (
    Kind("exact", "bfloat16", "bfloat16"),
    *(Kind("exact", "float32", "float32", precision=_PRESETS[name]) for name in _PARTS),
    Kind("half", "float16", "float16"),
    Kind("half", "int8", "int8", "int32"),
    Kind("half", "uint8", "uint8", "uint32"),
    *(Kind("tf32", x, x) for x in ("float32", "complex64")),
    Kind("float8", "float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    Kind("float8", "float8_e5m2", "float8_e5m2", "bfloat16", _PRESETS.ANY_F8_ANY_F8_F32),
    *(Kind("narrow", x, y) for x in ("bfloat16", "float16") for y in EIGHT_BITS),
    *(Kind("one by one", x, x, precision="highest") for x in ("float32", "complex64")),
    *(Kind("one by one", x, x) for x in ("int32", "uint32", "int64", "uint64")),
    *(Kind("wide", x, x) for x in ("float64", "complex128")),
    *(Kind("none", x, x) for x in ("int16", "uint16")),
    *(Kind("none", "bfloat16", x, "float32") for x in ("float32", "float16")),
)


def instruction(problem: Problem) -> str:
    """Names the instruction of the kernels that serve a problem, or XLA."""
    for family in FAMILIES:
        if not family.reasons(problem):
            if family.name == "sm90":
                return "wgmma"
            way = math_of(problem)
            return "FMA" if way and way.fragments == "fma" else "mma.sync"
    return XLA


def runs(kind: Kind, arch: str) -> list[str]:
    """Names the instructions that multiply operands of a kind on an architecture: mostly one, of narrow weights two."""
    a, b, out = kind.a, kind.b, kind.out or kind.a
    problem = Problem.of(SIDE, SIDE, SIDE, a_dtype=a, b_dtype=b, out_dtype=out, arch=arch)  # pyright: ignore
    problem = in_precision(problem, dot_precision.canonical(kind.precision, "what runs where"))
    if isinstance(problem, Choice):
        return [XLA]
    found = [instruction(problem)]
    if problem.bs[0].narrow_beside(problem.a) and (wide := instruction(wide_of(problem))) not in found:
        found.append(f"{wide} after conversion")
    return found


def cell(row: str, archs: list[str]) -> str:
    """Names the instructions for a row on the GPUs of a generation; apart where GPUs or dtypes differ."""
    kinds = [kind for kind in KINDS if kind.row == row]
    found = {(arch, kind.a): " or ".join(runs(kind, arch)) for arch in archs for kind in kinds}
    several = dict.fromkeys(found.values())
    if len(several) == 1:
        return next(iter(several))
    by_arch = len({found[arch, kinds[0].a] for arch in archs}) > 1
    parts = []
    for way in several:
        of_way = [key for key, value in found.items() if value == way]
        names = (
            _names(dict.fromkeys(arch for arch, _ in of_way)) if by_arch else ", ".join(dtype for _, dtype in of_way)
        )
        parts.append(f"{way} ({names})")
    return ", ".join(parts)


def _names(archs: Iterable[str]) -> str:
    return f"sm_{', '.join(str(number(arch)) for arch in archs)}"


def table() -> str:
    """Returns the table in Markdown: a row for the operands, a column for a generation of GPUs, oldest first."""
    by_generation = itertools.groupby(ARCHITECTURES, lambda arch: ARCHITECTURES[arch].generation)
    generations = {name: list(archs) for name, archs in by_generation}
    heads = [f"{name} ({_names(archs)})" for name, archs in generations.items()]
    lines = [f"| operands | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for row, words in _ROWS.items():
        lines.append(f"| {words} | {' | '.join(cell(row, archs) for archs in generations.values())} |")
    return "\n".join(lines)


def text() -> str:
    """Returns the table and what its words mean."""
    return f"{table()}\n\n{LEGEND}"


def filled(page: str) -> str:
    """Returns a page with what is between its marks replaced.

    Raises:
      ValueError: the marks are not there.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{text()}\n\n{END}{tail}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
