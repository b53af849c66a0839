"""The public names and their methods: in one group of docs/api.md, typed, signatures as they were, examples run."""

from __future__ import annotations

import doctest
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import cutjax

HERE = pathlib.Path(__file__)
SIGNATURES = HERE.with_name("signatures.txt")
API = (HERE.parents[2] / "docs" / "api.md").read_text()
USER = (HERE.parents[1] / "typing" / "user.py").read_text()
GROUPS = ("Operations", "Drop-ins", "Transforms", "Layers", "Control")
MODULES = {"cutjax.formats": ("gptq", "awq", "mxfp4", "deepseek_fp8")}
MODULES |= {"cutjax.checkpoint_policies": ("dots_saveable", "dots_with_no_batch_dims_saveable")}
# What raises nothing, whatever it is given.
SILENT = {f"cutjax.checkpoint_policies.{name}" for name in MODULES["cutjax.checkpoint_policies"]}
SILENT |= {"cutjax.flax.nnx.SelectionBias"}


def names() -> Iterator[str]:
    """The public names but for layers of Flax, each with its module's."""
    for name in cutjax.__all__:
        found = MODULES.get(f"cutjax.{name}", ())
        yield from (f"cutjax.{name}.{x}" for x in found) if found else (f"cutjax.{name}",)


def of_flax() -> list[str]:
    """The layers of Flax; none where Flax is not installed."""
    try:
        from cutjax.flax import linen, nnx
    except ImportError:
        return []
    return [f"{module.__name__}.{name}" for module in (nnx, linen) for name in module.__all__]


def public(name: str) -> Any:
    """The object of a public name."""
    found: Any = sys.modules["cutjax"]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


PUBLIC = list(names())
ALL = [*PUBLIC, *of_flax()]
# What the page documents: the path of each, its public name, and the members of a class that are public with it.
ENTRIES = {
    name: (path, members.split(", ") if members else [])
    for path, name, members in re.findall(
        r"^::: (\S+)\n    options:\n      heading: (\S+)\n(?:      heading_level: 4\n)?(?:      members: \[(.*)\]\n)?",
        API,
        re.MULTILINE,
    )
}
MEMBERS = [f"{name}.{member}" for name in ALL for member in ENTRIES.get(name, ("", []))[1]]
SIGNED = sorted([*ALL, *MEMBERS], key=lambda name: (name.startswith("cutjax.flax."), name))


def signature(name: str) -> str:
    """A line: the name, its arguments with their types and simple defaults, and the result's type.

    Of layers, Flax's own arguments are left out: they are those of the Flax that is installed.
    """
    found, theirs = public(name), []
    if isinstance(found, property):
        return f"{name} -> {_type(inspect.signature(found.fget).return_annotation)}"
    if isinstance(found, type) and name.startswith("cutjax.flax."):
        base = next(base for base in found.__mro__ if base.__module__.startswith("flax."))
        theirs = [] if base.__name__ == "Module" else list(inspect.signature(base.__init__).parameters)
        found = found.__init__
    called = inspect.signature(found)
    given = [_parameter(x) for x in called.parameters.values() if x.name not in ("self", "parent", "name", *theirs)]
    result = "" if called.return_annotation is called.empty else f" -> {_type(called.return_annotation)}"
    return f"{name}({', '.join([*(['...'] if theirs else []), *given])}){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    mark = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "KEYWORD_ONLY": "kw "}.get(parameter.kind.name, "")
    default, text = parameter.default, f"{mark}{parameter.name}: {_type(parameter.annotation)}"
    if default is parameter.empty:
        return text
    return (
        f"{text} = {default!r}" if default in ((), None) or isinstance(default, int | float | str) else f"{text} = ..."
    )


def _type(annotation: Any) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))


def test_signatures():
    """Those of layers of Flax where it is installed."""
    flax = ALL != PUBLIC
    recorded = [line for line in SIGNATURES.read_text().splitlines() if flax or not line.startswith("cutjax.flax.")]
    assert recorded == list(map(signature, SIGNED)), (
        "a public signature has changed: news for CHANGELOG.md, and what goes away is deprecated first; "
        "then: python tests/project/test_api.py"
    )


def test_the_page_documents_what_is_public():
    """And nothing else, each by the module that defines it, which is the source that the page names."""
    assert len(ENTRIES) == API.count("\n::: ")
    assert sorted(x for x in ENTRIES if x in ALL or not x.startswith("cutjax.flax.")) == sorted(ALL)
    for name in ALL:
        path, _ = ENTRIES[name]
        assert (public(name).__module__, public(name).__name__) == tuple(path.rsplit(".", 1)), name


@pytest.mark.parametrize("name", ALL)
def test_a_name_is_in_one_group(name):
    """In one of five; `cutjax.flax` among the layers."""
    of_group = dict(zip(GROUPS, re.split("|".join(f"(?m:^## {group}$)" for group in GROUPS), API)[1:], strict=True))
    assert [group for group, text in of_group.items() if re.search(rf"heading: {name}$", text, re.MULTILINE)] in (
        [["Layers"]] if name.startswith("cutjax.flax") else [[group] for group in GROUPS]
    )


def test_an_operation_is_in_the_battery():
    """But those of many devices, which no device alone transforms, and `quantize`, which multiplies nothing."""
    from operations import OPERATIONS  # where the tests run, not where this file writes signatures

    group = API.partition("\n## Operations\n")[2].partition("\n## ")[0]
    names = re.findall(r"heading: (cutjax\.\w+)$", group, re.MULTILINE)
    found = {name.removeprefix("cutjax.") for name in names if not inspect.isclass(public(name))}
    missing = found - {entry.partition(",")[0] for entry in OPERATIONS}
    assert missing == {"all_gather_gemm", "gemm_reduce_scatter", "quantize"}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_is_typed(name):
    """No argument is without a type, and the file that pyright checks strictly as a user's has the name."""
    called = inspect.signature(public(name))
    assert not [x.name for x in called.parameters.values() if x.annotation is x.empty]
    assert re.search(rf"\b{name.rsplit('.', 1)[1]}\b", USER)


def test_members_are_typed():
    assert not [name for name in MEMBERS if re.search(r"\w+: <class 'inspect._empty'>", signature(name))]


@pytest.mark.parametrize("name", sorted({*ALL} - SILENT))
def test_errors_are_documented(name):
    assert "\nRaises:\n" in inspect.getdoc(public(name))


@pytest.mark.parametrize("name", [*ALL, *(name for name in MEMBERS if "Examples:" in inspect.getdoc(public(name)))])
def test_example(name):
    """Each public name has an example, and it runs; its section is one that the page shows as code."""
    assert "\nExamples:\n" in inspect.getdoc(public(name))
    (example,) = doctest.DocTestFinder(recurse=False).find(public(name), name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(example).failed == 0
    assert runner.tries


if __name__ == "__main__":
    SIGNATURES.write_text("".join(f"{signature(name)}\n" for name in SIGNED))
