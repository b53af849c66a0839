"""The words: docstrings open with their subject, public ones say all, documents name files that exist."""

import ast
import inspect
import pathlib
import re

import pytest

import benchmarks
import cutjax

PACKAGES = [pathlib.Path(package.__file__).parent for package in (cutjax, benchmarks)]
TESTS = pathlib.Path(__file__).parent
REPOSITORY = pathlib.Path(__file__).parent.parent
DOCUMENTS = [*sorted((REPOSITORY / "docs").glob("*.md")), *sorted(REPOSITORY.glob("*.md"))]
# Riddles: who reads must find out what is spoken of. Better: Returns, Computes, True if, an imperative, a noun phrase.
RIDDLE = re.compile(r"(What|Whether|How|Which|Who|Whose|Why|Where|When)\b|((The|An?|Each|Another) )?(?!user)\w+'s\b")
# Public names that are no functions or classes, or whose class is a description of fields.
PLAIN = {"checkpoint_policies"}
FIELDS = {"Config", "MmaConfig", "CudaLaunch", "Problem", "Quantized", "Routing"}
# In documents: a file in code quotes, or a file and what it defines.
NAMED = re.compile(r"`([\w./]*\w\.(?:py|cuh|cc|h))(?:: ([\w.]+))?`")
SOURCES = ("cutjax", "ffi", "benchmarks", "tests", "examples", "docs")
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable")
# Functions of one line, or deprecated: their first sentence says it all.
SHORT = {"candidates", "reasons"}


def docstrings(path):
    """Yields name, line and docstring of everything in a file that has one."""
    for node in ast.walk(ast.parse(path.read_text())):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "name", path.stem), getattr(node, "lineno", 1), text


def test_docstrings_open_with_their_subject():
    """Those of the packages, and of what tests share; a test's may say what holds."""
    sources = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    helpers = [path for path in sorted(TESTS.rglob("*.py")) if not path.stem.startswith("test_")]
    found = [
        f"{path}:{line} {name}: {text.splitlines()[0]}"
        for path in [*sources, *helpers]
        for name, line, text in docstrings(path)
        if RIDDLE.match(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_modules_say_what_they_own(package):
    """A package's empty __init__ owns nothing."""
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
    assert not [str(path) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]


@pytest.mark.parametrize("name", sorted(set(cutjax.__all__) - PLAIN))
def test_public_names_are_documented(name):
    """Functions have all of Args, Returns and Example; classes of fields have Attributes."""
    public = getattr(cutjax, name)
    text = inspect.getdoc(public)
    assert text
    if name in FIELDS:
        assert "Attributes:" in text
    elif name not in SHORT:
        missing = [section for section in ("Args:", "Returns:", "Example:") if f"\n{section}" not in text]
        assert not missing
    if name not in FIELDS:
        assert not [x for x in inspect.signature(public).parameters if not re.search(rf"\b{x}\b", text)]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_documented(name):
    assert inspect.getdoc(getattr(cutjax.checkpoint_policies, name))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_what_exists(document):
    """Files, and in ``file: name`` what is defined there."""
    files = [path for folder in SOURCES for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    wrong = []
    for name, defined in NAMED.findall(document.read_text()):
        found = [path for path in files if f"/{path.relative_to(REPOSITORY).as_posix()}".endswith(f"/{name}")]
        if not found:
            wrong.append(name)
        elif defined and not any(defines(path, defined.split(".")) for path in found):
            wrong.append(f"{name}: {defined}")
    assert not wrong


def defines(path, names):
    """True if a Python file defines a name, or a dotted name in classes."""
    body = ast.parse(path.read_text()).body
    for name in names:
        nodes = [node for node in body if getattr(node, "name", None) == name]
        if not nodes:
            return False
        body = getattr(nodes[0], "body", [])
    return True
