"""Makes the table "What runs where" of the reasons that the families of kernels give.

mkdocs puts it where a page has ``<!-- what runs where -->`` (docs/hooks.py). README has a copy, which
``python docs/what_runs_where.py`` writes anew.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from typing import Any, NamedTuple

from jax import lax

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the package of this checkout

from cutjax import dot_precision  # noqa: E402
from cutjax.dtypes import NARROW  # noqa: E402
from cutjax.kernels.choose import FAMILIES, Choice, in_precision  # noqa: E402
from cutjax.kernels.mma.math import math_of  # noqa: E402
from cutjax.kernels.problem import Problem  # noqa: E402
from cutjax.runtime.architectures import ARCHITECTURES, number  # noqa: E402

BEGIN, END = "<!-- what runs where -->", "<!-- end of what runs where -->"
SIDE = 4096  # of the matrices that are asked about
XLA = "XLA"
LEGEND = """\
`wgmma`, `mma.sync` (both on tensor cores) and FMA are cutjax's kernels: any m, n, k and batch, every layout, epilogues,
rows in groups. XLA is XLA's own product, equal to rounding. That is what there is: under `backend="auto"`, the default,
XLA also runs where it is predicted, or was measured, to be faster. `cutjax.explain` says what a program runs, and why.
Only Hopper is measured; for other GPUs kernels are compiled and checked, and nobody has run them."""


class Kind(NamedTuple):
    """Two operands, the row of the table that they belong to, the result's dtype if it is another, and a precision."""

    row: str
    a: str
    b: str
    out: str = ""
    precision: Any = None


_PARTS = ("TF32_TF32_F32_X3", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9")
_PRESETS = lax.DotAlgorithmPreset
_WIDE = ("int32", "uint32", "int64", "uint64")
KINDS = (
    Kind("bfloat16", "bfloat16", "bfloat16"),
    Kind("float16", "float16", "float16"),
    *(Kind("float32, complex64 by default (as TF32, like XLA)", x, x) for x in ("float32", "complex64")),
    *(
        Kind("float32 in parts, by `BF16_BF16_F32_X3` and the like", "float32", "float32", precision=_PRESETS[name])
        for name in _PARTS
    ),
    *(Kind('float32, complex64 by `precision="highest"`', x, x, precision="highest") for x in ("float32", "complex64")),
    *(Kind("float64, complex128", x, x) for x in ("float64", "complex128")),
    Kind("int8, uint8", "int8", "int8", "int32"),
    Kind("int8, uint8", "uint8", "uint8", "uint32"),
    Kind("float8_e4m3fn; float8_e5m2 by `ANY_F8_...`", "float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    Kind(
        "float8_e4m3fn; float8_e5m2 by `ANY_F8_...`",
        "float8_e5m2",
        "float8_e5m2",
        "bfloat16",
        _PRESETS.ANY_F8_ANY_F8_F32,
    ),
    *(Kind("bfloat16 by weights of 8 bits", "bfloat16", x) for x in NARROW),
    *(Kind("float16 by weights of 8 bits", "float16", x) for x in NARROW),
    *(Kind("integers of 32 and 64 bits", x, x) for x in _WIDE),
    *(Kind("integers of 16 bits, other pairs of dtypes", x, x) for x in ("int16", "uint16")),
    Kind("integers of 16 bits, other pairs of dtypes", "bfloat16", "float32", "float32"),
    Kind("integers of 16 bits, other pairs of dtypes", "bfloat16", "float16", "float32"),
)


def instruction(problem: Problem) -> str:
    """Names the instruction of the kernels that serve a problem, or XLA."""
    for family in sorted(FAMILIES, key=lambda family: family.fallback):
        if not family.reasons(problem):
            if family.name == "sm90":
                return "wgmma"
            way = math_of(problem)
            return "FMA" if way and way.fragments == "fma" else "mma.sync"
    return XLA


def runs(kind: Kind, arch: str) -> list[str]:
    """Returns what multiplies operands of a kind on an architecture: mostly one entry, of narrow weights two."""
    a, b, out = kind.a, kind.b, kind.out or kind.a
    problem = Problem(SIDE, SIDE, SIDE, a_dtype=a, b_dtype=b, out_dtype=out, arch=arch)  # pyright: ignore
    problem = in_precision(problem, dot_precision.canonical(kind.precision, "what runs where"))
    if isinstance(problem, Choice):
        return [XLA]
    found = [instruction(problem)]
    if problem.narrow and (wide := instruction(problem.wide)) not in found:
        found.append(f"{wide} after a conversion")
    return found


def cell(row: str, archs: list[str]) -> str:
    """Returns what multiplies the operands of a row on the GPUs of a generation; apart where they differ."""
    of_row = [kind for kind in KINDS if kind.row == row]
    found = {arch: " or ".join(dict.fromkeys(name for kind in of_row for name in runs(kind, arch))) for arch in archs}
    several = dict.fromkeys(found.values())
    if len(several) == 1:
        return found[archs[0]]
    return ", ".join(f"{way} ({_names([arch for arch in archs if found[arch] == way])})" for way in several)


def _names(archs: list[str]) -> str:
    return f"sm_{', '.join(str(number(arch)) for arch in archs)}"


def table() -> str:
    """Returns the table in Markdown: a row for the operands, a column for a generation of GPUs, oldest first."""
    by_generation = itertools.groupby(ARCHITECTURES, lambda arch: ARCHITECTURES[arch].generation)
    generations = {name: list(archs) for name, archs in by_generation}
    heads = [f"{name} ({_names(archs)})" for name, archs in generations.items()]
    lines = [f"| operands | {' | '.join(heads)} | CPU, TPU |", f"|---|{'---|' * (len(heads) + 1)}"]
    for row in dict.fromkeys(kind.row for kind in KINDS):
        lines.append(f"| {row} | {' | '.join(cell(row, archs) for archs in generations.values())} | {XLA} |")
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
