"""Draws cutjax's folders and who imports whom, from the syntax trees: floors.svg of how-a-call-travels.md.

``python docs/floors.py`` prints it; mkdocs makes it anew with every build.
"""

from __future__ import annotations

import ast
import collections
import html
import pathlib
import textwrap

REPOSITORY = pathlib.Path(__file__).parent.parent
ROOT = REPOSITORY / "cutjax"
# Floors from the roof to the ground, with what each owns. "" is the modules beside the folders, but for GROUND.
FLOORS = {
    "": "the public names, explain, policies for jax.checkpoint",
    "flax": "layers of Flax, NNX and Linen: the only ones to import it",
    "fusion": "a program rewritten: regions around products, and their prices",
    "tuning": "kernels timed on the device, the fastest kept; the command line",
    "ops": "operations: checked arguments in, a product and its operands out",
    "parallel": "algorithms over devices: rows that travel, products beside them",
    "primitives": "Product: what is multiplied; its rules and its derivatives",
    "kernels": "Problem, Choice; Family on a Device, Kernel, Argument: what runs",
    "epilogue": "a function of accumulators as an expression, and as device text",
    "binding": "a JAX primitive with every rule, and its lowering: Decision",
    "runtime": "NVRTC, caches, the launch plan (Call, Launch), settings",
}
GROUND = {"dtypes", "dot_precision"}
OUTSIDE = {
    "ffi/device": ("*.cuh", "the kernels' text: *.cuh"),
    "ffi/launcher": ("*.cc", "the custom call cutjax_launch"),
}
COLOURS = (
    "#6d4c41",
    "#7cb342",
    "#827717",
    "#00838f",
    "#3949ab",
    "#558b9c",
    "#00897b",
    "#c2185b",
    "#ef6c00",
    "#5e35b1",
    "#455a64",
)
LEFT, BOX, GAP, LINE, LANE = 16, 640, 22, 17, 34


def modules() -> dict[str, pathlib.Path]:
    """Returns every module by its dotted name."""
    paths = sorted(ROOT.rglob("*.py"))
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in paths
    }


def floor(name: str) -> str | None:
    """Returns the floor of a module; None of one that is on the ground or in no floor's folder."""
    parts = name.split(".")
    path = ROOT.joinpath(*parts[1:])
    folder = parts[1] if len(parts) > 2 or (len(parts) == 2 and path.is_dir()) else ""
    return None if parts[-1] in GROUND and not folder else folder if folder in FLOORS else None


def imports() -> collections.Counter[tuple[str, str]]:
    """Returns the number of imports from one floor to another."""
    known, found = modules(), collections.Counter()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cutjax":
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    source, target = floor(name), floor(target if target in known else node.module)
                    if source is not None and target is not None and source != target and alias.name != "_ffi":
                        found[source, target] += 1
    return found


def lines_of(folder: str) -> list[str]:
    """Returns the names of a floor's modules, wrapped; those of a folder in it after the folder's name."""
    names: dict[str, list[str]] = collections.defaultdict(list)
    for name, path in modules().items():
        if floor(name) == folder and (path.stem != "__init__" or not folder):
            *inside, last = path.relative_to(ROOT / folder).with_suffix("").parts
            names["".join(f"{part}/ " for part in inside)].append(last)
    return [line for head, found in names.items() for line in textwrap.wrap(head + "  ".join(found), 84)]


def svg() -> str:
    """Returns the picture."""
    parts, y, top, height = [], 14, {}, {}

    def box(title: str, owns: str, lines: list[str], x: int, width: int, kind: str, at_least: int = 0) -> int:
        """Draws a box at the present height, and returns how high it is."""
        high = max(30 + LINE * len(lines), at_least)
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{high}" rx="5" class="{kind}"/>')
        head = f'<tspan class="name">{title}</tspan>  {html.escape(owns)}'
        parts.append(f'<text x="{x + 12}" y="{y + 19}" xml:space="preserve">{head}</text>')
        for i, line in enumerate(lines):
            at = y + 19 + LINE * (i + 1)
            parts.append(f'<text x="{x + 12}" y="{at}" class="modules" xml:space="preserve">{line}</text>')
        return high

    found = imports()
    order = [folder for folder in FLOORS if lines_of(folder)]
    for folder in order:
        entering = sum(folder == target for _, target in found)
        title = f"{folder}/" if folder else "cutjax"
        top[folder], high = y, box(title, FLOORS[folder], lines_of(folder), LEFT, BOX, "floor", 32 + 11 * entering)
        height[folder] = high
        y += high + GAP
    on_ground = "  ".join(sorted(name.split(".")[-1] for name in modules() if name.removeprefix("cutjax.") in GROUND))
    y += box("ground", "tables that every floor may import", [on_ground], LEFT, BOX, "ground") + 2 * GAP
    half = (BOX - GAP) // 2
    outside = []
    for i, (folder, (pattern, owns)) in enumerate(OUTSIDE.items()):
        names = "  ".join(sorted({path.stem for path in (REPOSITORY / folder).rglob(pattern)}))
        outside.append(box(f"{folder}/", owns, textwrap.wrap(names, 40), LEFT + i * (half + GAP), half, "outside"))
    for i, reader in enumerate(("read by runtime/sources", "called by the plan of runtime/launch")):
        at = LEFT + i * (half + GAP) + 12
        parts.append(f'<text x="{at}" y="{y - 8}" class="note">{reader}</text>')
    y += max(outside) + 14

    # A lane for each floor that imports, the roof's outermost: from the floor down, and an arrow into each it imports.
    right = LEFT + BOX
    sources = [folder for folder in order if any(source == folder for source, _ in found)]
    for place, source in enumerate(sources):
        lane = right + 116 + LANE * (len(sources) - 1 - place)
        start, ends = top[source] + height[source] - 9, []
        for (importer, target), count in sorted(found.items()):
            if importer == source and target in top:
                above = [folder for folder in sources if (folder, target) in found]
                at = top[target] + 12 + 11 * above.index(source)
                ends.append(at)
                kind = "head" if order.index(target) > order.index(source) else "head wrong"
                parts.append(f'<path d="M {lane} {at} H {right + 8}" class="lane" stroke="{COLOURS[place]}"/>')
                head = f"M {right + 9} {at - 4} L {right + 1} {at} L {right + 9} {at + 4} z"
                parts.append(f'<path d="{head}" class="{kind}" fill="{COLOURS[place]}"/>')
                parts.append(f'<text x="{right + 12}" y="{at - 2}" class="count">{count}</text>')
        line = f"M {right} {start} H {lane} M {lane} {min(start, *ends)} V {max(start, *ends)}"
        parts.append(f'<path d="{line}" class="lane" stroke="{COLOURS[place]}"/>')
        parts.append(f'<circle cx="{right}" cy="{start}" r="3.5" fill="{COLOURS[place]}"/>')
        label = f"{source or 'cutjax'} imports"
        parts.append(f'<text x="{right + 12}" y="{start - 4}" class="lane-name">{label}</text>')
    width = right + 116 + LANE * len(sources)
    style = (
        "text{font:13px sans-serif;fill:#222}.name{font-weight:bold}.modules{font:11.5px monospace;fill:#555}"
        ".note{font:italic 11.5px sans-serif;fill:#555}.count{font:9px sans-serif}.lane-name{font:11.5px sans-serif}"
        ".floor{fill:#f4f6fb;stroke:#5b6abf}.ground{fill:#eee;stroke:#888}.outside{fill:#fbf7ef;stroke:#b08d57}"
        ".lane{fill:none;stroke-width:1.6}.wrong{fill:#d50000;stroke:#d50000;stroke-width:4}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img"'
    label = ' aria-label="The folders of cutjax as floors; every import goes down">'
    ground = f'<rect width="{width}" height="{y}" fill="#fff"/>'
    return f"{head}{label}<style>{style}</style>{ground}{''.join(parts)}</svg>\n"


def on_files(files, config):
    from mkdocs.structure.files import File

    files.append(File.generated(config, "floors.svg", content=svg()))
    return files


if __name__ == "__main__":
    print(svg())
