"""Draws cutjax's folders and who imports whom, from the syntax trees: floors.svg of how-a-call-travels.md.

``python docs/floors.py`` prints it; mkdocs makes it anew with every build.
"""

from __future__ import annotations

import ast
import collections
import html
import pathlib

ROOT = pathlib.Path(__file__).parent.parent / "cutjax"
# Floors from the roof to the ground, with what each owns.
FLOORS = {
    "ops": "operations: arguments in, primitives out",
    "primitives": "Product: what is multiplied, and its derivatives",
    "kernels": "Family on a Device, Kernel, Argument: what runs",
    "epilogue": "functions of accumulators as expressions",
    "binding": "a JAX primitive and its lowering: decide",
    "runtime": "NVRTC, cache, launch plan, settings",
}
WIDTH, LEFT, BOX, GAP, LINE = 980, 20, 620, 34, 17


def modules() -> dict[str, pathlib.Path]:
    """Returns every module by its dotted name."""
    return {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}


def floor(name: str) -> str:
    """Returns the folder of a module, "" of one beside the folders."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else ""


def imports() -> collections.Counter[tuple[str, str]]:
    """Returns how many imports lead from one floor to another."""
    known, found = modules(), collections.Counter()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cutjax"):
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    target = target if target in known else node.module
                    if floor(name) and floor(target) and floor(name) != floor(target):
                        found[floor(name), floor(target)] += 1
    return found


def lines_of(folder: str) -> list[str]:
    """Returns the names of a floor's modules, wrapped."""
    names = []
    for name in modules():
        if floor(name) == folder and not name.endswith("__init__"):
            names.append("/".join(name.split(".")[2:]))
    lines, current = [], ""
    for name in names:
        if len(current) + len(name) > 84:
            lines.append(current)
            current = ""
        current += ("  " if current else "") + name
    return [*lines, current]


def svg() -> str:
    """Returns the picture."""
    parts, y, middle = [], 16, {}
    for folder, owns in FLOORS.items():
        lines = lines_of(folder)
        height = 34 + LINE * len(lines)
        middle[folder] = y + height / 2
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{BOX}" height="{height}" rx="6" class="floor"/>')
        title = f'<tspan class="name">{folder}/</tspan>  {html.escape(owns)}'
        parts.append(f'<text x="{LEFT + 12}" y="{y + 20}">{title}</text>')
        for i, line in enumerate(lines):
            at = y + 20 + LINE * (i + 1)
            parts.append(f'<text x="{LEFT + 12}" y="{at}" class="modules" xml:space="preserve">{line}</text>')
        y += height + GAP
    order, right = list(FLOORS), LEFT + BOX
    for (source, target), count in sorted(imports().items()):
        steps = order.index(target) - order.index(source)
        start, end = middle[source] + 5, middle[target] - 5
        reach = right + 26 + 52 * abs(steps)
        kind = "import" if steps > 0 else "wrong"
        path = f"M {right} {start} C {reach} {start}, {reach} {end}, {right + 7} {end}"
        parts.append(f'<path d="{path}" class="{kind}" stroke-width="{min(4, 0.8 + count / 6):.1f}"/>')
        head = f"M {right + 9} {end - 4} L {right} {end} L {right + 9} {end + 4} z"
        parts.append(f'<path d="{head}" class="{kind} head"/>')
    style = (
        "text{font:13px sans-serif;fill:#222}.name{font-weight:bold}.modules{font:11.5px monospace;fill:#555}"
        ".floor{fill:#f4f6fb;stroke:#5b6abf}.import{fill:none;stroke:#5b6abf;stroke-opacity:.75}"
        ".wrong{fill:none;stroke:#c62828}.head{fill:#5b6abf;stroke:none}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img"'
    label = ' aria-label="The folders of cutjax as floors; every import goes down">'
    ground = f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>'
    return f"{head}{label}<style>{style}</style>{ground}{''.join(parts)}</svg>\n"


def on_files(files, config):
    from mkdocs.structure.files import File

    files.append(File.generated(config, "floors.svg", content=svg()))
    return files


if __name__ == "__main__":
    print(svg())
