"""The errors on docs/low-precision.md are those of the code."""

import pathlib
import sys

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_page_has_the_errors_of_recipes(monkeypatch):
    """To a tenth what quantization loses; what a product rounds by magnitude: XLA's sums differ in order."""
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import low_precision

    lines = (
        (DOCS / "low-precision.md")
        .read_text()
        .split(low_precision.BEGIN)[1]
        .split(low_precision.END)[0]
        .strip()
        .splitlines()
    )
    assert lines[0] == low_precision.HEAD
    told = {
        line.split(" | ")[0].strip("| "): [float(x) for x in line.strip("| ").split(" | ")[3:]] for line in lines[2:]
    }
    found = {recipe.name: errors for recipe, errors in low_precision.rows()}
    assert found.keys() == told.keys()
    for name, errors in found.items():
        for i, (got, on_page) in enumerate(zip(errors, told[name], strict=True)):
            assert got == pytest.approx(on_page, rel=0.1 if i % 2 == 0 else 3, abs=2e-7 if i % 2 else 0), name
    # What the page says of products: weights in 16 bits are rounded once, all else is as exact as float32's sums.
    of_arithmetic = {name: max(errors[1::2]) for name, errors in found.items()}
    assert all(error < (2**-8 if "w4a16" in name else 1e-6) for name, error in of_arithmetic.items()), of_arithmetic


def test_the_page_has_the_errors_of_training(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import low_precision

    page = (DOCS / "low-precision.md").read_text()
    on_page = page.split(low_precision.BEGIN_TRAINING)[1].split(low_precision.END_TRAINING)[0].strip().splitlines()
    found = low_precision.training().splitlines()
    assert on_page[:2] == found[:2]
    for told, got in zip(on_page[2:], found[2:], strict=True):
        told, got = ([x.strip() for x in line.strip("| ").split("|")] for line in (told, got))
        assert told[:2] == got[:2]
        assert [float(x) for x in got[2:]] == pytest.approx([float(x) for x in told[2:]], rel=0.1), told[:2]
