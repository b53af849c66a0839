"""The pictures of docs/pictures.py."""

from __future__ import annotations

import pathlib
import re
import sys
import xml.etree.ElementTree

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import pictures  # noqa: E402

SHOWN = [
    found
    for page in sorted(DOCS.glob("*.md"))
    for found in re.findall(r"!\[([^]]+)\]\(pictures/(\w+)\.svg\)", page.read_text())
]


def test_each_picture_is_shown_once():
    assert sorted(name for _, name in SHOWN) == sorted(pictures.PICTURES)


@pytest.mark.parametrize(("words", "name"), SHOWN, ids=[name for _, name in SHOWN])
def test_a_picture_has_words_and_holds_its_shapes(words, name):
    svg = pictures.PICTURES[name]().svg(words)
    assert "\n" not in svg  # Markdown would end its HTML
    picture = xml.etree.ElementTree.fromstring(svg)
    assert picture.get("aria-label") == words
    left, top, width, height = map(float, picture.get("viewBox", "").split())
    for shape in picture:
        at = {side: float(shape.get(side, 0)) for side in ("x", "y", "cx", "cy", "width", "height")}
        assert left <= at["x"] + at["cx"] <= left + width - at["width"]
        assert top <= at["y"] + at["cy"] <= top + height - at["height"]
