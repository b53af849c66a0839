"""Every block of Python in README.md and docs/*.md runs, on a CPU: README's and the home page's each as it is pasted.

Those of another page run in order, in one namespace. ``<!-- before: ... -->`` holds code that it runs and does not
show, such as the arrays that its blocks name. ``<!-- not run: reason -->`` before a block leaves it out.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import pytest
from pages import Block, blocks

ROOT = pathlib.Path(__file__).parents[2]
README, HOME, QUICKSTART = ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "quickstart.md"
BY_OTHERS = {ROOT / "docs" / name for name in ("flax.md", "other-libraries.md")}  # test_other_libraries.py runs them
PAGES = sorted({*(ROOT / "docs").glob("*.md")} - {HOME, *BY_OTHERS})


def run(page: pathlib.Path, text: str) -> dict[str, Any]:
    """Runs the blocks of a page; an error's traceback names the page and its line."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(text):
        if block.reason is None:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
    return namespace


@pytest.fixture
def as_a_user(monkeypatch, tmp_path):
    """Promotion as JAX has it by default, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=lambda page: page.name)
def test_page(as_a_user, page):
    text = page.read_text()
    shown = len(blocks(text)) - text.count("<!-- before:")
    assert shown == len(re.findall("^ *```python", text, re.MULTILINE)), "a block of another form would not be run"
    run(page, text)


@pytest.mark.parametrize("page", [README, HOME], ids=lambda page: page.name)
def test_a_block_runs_as_it_is_pasted(as_a_user, page):
    """Each alone, with nothing hidden and none left out; in lines that need no scrolling."""
    text = page.read_text()
    found = blocks(text)
    assert len(found) == text.count("```python") >= 4
    assert not re.search("<!-- (before|not run)", text)
    assert not [line for block in found for line in block.code.splitlines() if len(line) > 80]
    of_readme = {block.code for block in blocks(README.read_text())} if page == HOME else set()  # which have run
    for block in found:
        if block.code not in of_readme:
            run(page, f"```python\n{block.code}```\n")


@pytest.mark.parametrize("page", [README, HOME, QUICKSTART], ids=lambda page: page.name)
def test_how_to_install_comes_first(page):
    (first, *_) = re.findall(r"^```\w*\n(.*)", page.read_text(), re.MULTILINE)
    assert first.startswith('pip install "cutjax[cuda13')


def test_the_readme_is_short():
    """Its links read well where they lead nowhere, as in a package index: their words are the paths."""
    text = README.read_text()
    assert len(text.split()) <= 900
    links = re.findall(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)", text)
    assert [name for name, target in links if name != target] == []
    assert len(re.findall(r"!\[", text)) == 1
    speed = text.partition("python -m benchmarks performance -->")[2].partition("<!-- end -->")[0]
    rows = speed.strip().splitlines()[2:]
    assert len(rows) <= 8
    assert "where it loses" in rows[-1]


def test_links_lead_to_files_and_headings():
    """Those of README, CONTRIBUTING and the changelog; those of the pages are checked when they are built."""
    for page in ROOT.glob("*.md"):
        targets = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
        assert [target for target in targets if not (ROOT / target).exists()] == []


def test_blocks():
    text = "a\n\n<!-- before:\nx = 1\n-->\n\n```python\ny = x + 1\n```\n\n"
    text += "<!-- not run: no GPU -->\n```python\n1 / 0\n```\n"
    assert blocks(text) == [Block(4, "x = 1\n"), Block(8, "y = x + 1\n"), Block(13, "1 / 0\n", "no GPU")]
    assert run(ROOT / "page.md", text)["y"] == 2
    with pytest.raises(ZeroDivisionError) as error:
        run(ROOT / "page.md", text.replace("<!-- not run: no GPU -->\n", ""))
    assert (pathlib.Path(str(error.traceback[-1].path)).name, error.traceback[-1].lineno + 1) == ("page.md", 12)
