"""Who may import whom: the folders are floors, and every import goes down or stays. Read from the syntax trees."""

import ast
import pathlib
import subprocess
import sys

import pytest

import benchmarks
import cutjax
from cutjax.kernels import families

ROOT = pathlib.Path(cutjax.__file__).parent
# From the top to the ground. A module imports what is of its own folder, and of those named here.
MAY_IMPORT = {
    "": {
        "fusion",
        "tuning",
        "ops",
        "parallel",
        "primitives",
        "kernels",
        "epilogue",
        "binding",
        "runtime",
    },  # __init__, explanation, checkpoint_policies, formats, __main__
    "flax": {"tuning", "ops", "parallel", "primitives", "kernels", "epilogue", "binding", "runtime"},
    "fusion": {"ops", "parallel", "primitives", "kernels", "epilogue", "binding", "runtime"},
    "tuning": {"ops", "parallel", "primitives", "kernels", "epilogue", "binding", "runtime"},
    "ops": {"parallel", "primitives", "kernels", "epilogue", "binding", "runtime"},
    "parallel": {"primitives", "kernels", "epilogue", "binding", "runtime"},
    "primitives": {"kernels", "epilogue", "binding", "runtime"},
    "kernels": {"epilogue", "runtime"},
    "epilogue": {"binding"},
    "binding": {"runtime"},
    "runtime": set(),
}
GROUND = {"dtypes", "dot_precision"}  # modules beside the folders that any of them may import, and that import none
FAMILIES = {family.__name__.split(".")[-2] for family in families.FAMILIES}
# What a primitive of its own chooses, and is no product: in the folder of the family whose device text it has.
NO_PRODUCT = {"cutjax.kernels.direct.causal"}


def modules(root=ROOT):
    for path in sorted(root.rglob("*.py")):
        yield ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"), path


def imports(path):
    """The modules that a module imports, with those of a package that it names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(root):
    """The modules below a folder, and those of them that each imports."""
    found = dict(modules(root))
    return {name: {x for x in imports(path) if x in found} - {name} for name, path in found.items()}


OURS = graph(ROOT)


def folder(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


def test_folders():
    found = {path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    assert found == MAY_IMPORT.keys() - {""}


@pytest.mark.parametrize("name", sorted(OURS))
def test_imports_go_down(name):
    own = folder(name)
    for imported in OURS[name]:
        ground = imported.split(".")[-1] in GROUND and imported.count(".") == 1
        if imported == "cutjax" or ground:
            continue
        assert name.split(".")[-1] not in GROUND, f"{name} imports {imported}, and stands on the ground"
        assert folder(imported) in {own, *MAY_IMPORT[own]}, f"{name} imports {imported}"


@pytest.mark.parametrize("package", [cutjax, benchmarks], ids=lambda package: package.__name__)
def test_no_circle(package):
    """No module imports itself by way of others; packages (__init__) with nothing in them aside."""
    found, done, path = graph(pathlib.Path(package.__file__).parent), set(), []

    def visit(name):
        if name in done or name == package.__name__:
            return
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        path.append(name)
        for imported in sorted(found[name]):
            if not name.startswith(imported + "."):
                visit(imported)
        path.pop()
        done.add(name)

    for name in found:
        visit(name)


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("jax.interpreters", {f"cutjax.binding.{x}" for x in ("ahead", "define", "rules", "lowering", "partition")}),
        ("cutjax._ffi", {"cutjax.runtime.launch"}),
        ("jax._src", set()),
        (
            "flax",
            {
                f"cutjax.flax.{api}{x}"
                for api in ("linen", "nnx")
                for x in ("", ".linear", ".head", ".convolution", ".blocks")
            },
        ),
    ],
)
def test_who_imports_what_of_others(module, allowed):
    found = {name for name, path in modules() for x in imports(path) if x == module or x.startswith(module + ".")}
    assert found <= allowed


def test_cutjax_imports_no_optional_package():
    code = "import cutjax, sys; print(*{'flax', 'orbax', 'equinox', 'optax'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_only_a_family_knows_a_tile():
    """Nothing but the list of families and the public Config names a family's modules."""

    def inside(name):
        return any(name.startswith(f"cutjax.kernels.{family}.") for family in FAMILIES)

    assert {path.parent.name for path in (ROOT / "kernels").glob("*/family.py")} == FAMILIES
    named = {name for name, imported in OURS.items() if any(inside(x) for x in imported - NO_PRODUCT)}
    assert {name for name in named if not inside(name)} <= {"cutjax", "cutjax.kernels.families"}


def test_no_module_is_shadowed_by_a_public_name():
    """``import cutjax.x`` is a module, whatever functions are public."""
    files = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    public = {name for name in cutjax.__all__ if callable(getattr(cutjax, name))}
    assert not files & public


def test_the_package_brings_little_until_it_is_used():
    code = "import cutjax, sys; print(*(x for x in sys.modules if x.startswith('cutjax.')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) < 30
    assert "cutjax.runtime.launch" in found  # exported programs find the handler of their custom calls
    assert not [name for name in found if name.startswith(("cutjax.kernels", "cutjax.ops", "cutjax.fusion"))]


def test_public_names_come_from_where_type_checkers_find_them():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {alias.asname or alias.name: node.module for node in checked.body for alias in node.names}
    assert told == {name: f"cutjax.{home}".rstrip(".") for name, home in cutjax._HOME.items()}
    assert told.keys() == set(cutjax.__all__)
    assert all(getattr(cutjax, name) is not None for name in told)
