"""The public names: each in one group of docs/api.md, typed, its signature as it was, its example run."""

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


def signature(name: str) -> str:
    """A line: the name, its arguments with their types and simple defaults, and the result's type."""
    called = inspect.signature(public(name))
    result = "" if called.return_annotation is called.empty else f" -> {_type(called.return_annotation)}"
    return f"{name}({', '.join(map(_parameter, called.parameters.values()))}){result}"


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
    """Of all but layers of Flax, whose arguments are Flax's."""
    assert SIGNATURES.read_text().splitlines() == list(map(signature, PUBLIC)), (
        "a public signature has changed: news for CHANGELOG.md, and what goes away is deprecated first; "
        "then: python tests/project/test_api.py"
    )


@pytest.mark.parametrize("name", ALL)
def test_a_name_is_in_one_group(name):
    """In one of five; `cutjax.flax` among the layers."""
    of_group = dict(zip(GROUPS, re.split("|".join(f"(?m:^## {group}$)" for group in GROUPS), API)[1:], strict=True))
    assert [group for group, text in of_group.items() if re.search(rf"heading: {name}$", text, re.MULTILINE)] in (
        [["Layers"]] if name.startswith("cutjax.flax") else [[group] for group in GROUPS]
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_is_typed(name):
    """No argument is without a type, and the file that pyright checks strictly as a user's has the name."""
    called = inspect.signature(public(name))
    assert not [x.name for x in called.parameters.values() if x.annotation is x.empty]
    assert re.search(rf"\b{name.rsplit('.', 1)[1]}\b", USER)


@pytest.mark.parametrize("name", [name for name in ALL if "Examples:" in (inspect.getdoc(public(name)) or "")])
def test_example(name):
    (example,) = doctest.DocTestFinder(recurse=False).find(public(name), name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(example).failed == 0
    assert runner.tries


if __name__ == "__main__":
    SIGNATURES.write_text("".join(f"{signature(name)}\n" for name in PUBLIC))
