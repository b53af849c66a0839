"""The one entry point: ``python -m benchmarks COMMAND ...``, each a module here with ``main(argv)``."""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys
from collections.abc import Sequence

COMMANDS = (
    "run",
    "show",
    "direct",
    "power",
    "final",
    "ship",
    "fit",
    "sweep",
    "fused_sweep",
    "convolutions",
    "fit_convolutions",
    "performance",
    "recorded",
    "numerics",
    "scale",
    "reference",
    "trace_overhead",
    "choosing",
    "residual",
)
STARTED = ("direct_worker", "conv_worker", "children")  # by others, in processes of their own


def usage() -> str:
    """Returns the list of commands, each with what its module's docstring opens with; none is imported."""
    lines = ["usage: python -m benchmarks COMMAND ...; COMMAND --help says more", ""]
    for name in COMMANDS:
        text = pathlib.Path(__file__).with_name(f"{name}.py").read_text()
        opening = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
        lines.append(f"  {name:<14}  {opening.partition(': ``')[0].removesuffix('.')}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs one command; without one, prints all."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = argv
    if name not in (*COMMANDS, *STARTED):
        print(f"no command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    return importlib.import_module(f"benchmarks.{name}").main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
