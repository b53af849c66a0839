"""The tables of GPUs are what the code says; ``python tests/project/test_other_gpus.py`` writes that of devices."""

from __future__ import annotations

import pathlib
import sys

import jax.numpy as jnp
import pytest

from cutjax.kernels import device
from cutjax.kernels.device import Device
from cutjax.tuning.cases import WAYS
from cutjax.tuning.device_report import family_of

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = DOCS / "other-gpus.md"
COLUMNS = ("bfloat16", "tf32", "float32", "float64", "int8")


def row(found: Device) -> str:
    rates = dict(found.flops)
    tera = {name: rate / 1e12 for name, rate in rates.items()}
    numbers = [f"{tera[x]:{'.0f' if tera[x] >= 100 else '.3g'}}" if x in tera else "-" for x in COLUMNS]
    numbers.append(f"{found.bytes_per_second / 1e9:.0f}")
    known = f"measured: {', '.join(found.measured)}" if found.measured else "modelled"
    name = f"**{found.name}**" if found.measured else found.name
    return f"| {name} | {found.arch} | {found.sms} | {' | '.join(numbers)} | {known} |"


def devices() -> str:
    head = ["| GPU | architecture | SMs | bf16 TFLOP/s | tf32 | f32 | f64 | int8 | GB/s | |", f"|{'---|' * 10}"]
    return "\n".join([*head, *map(row, device.DEVICES.values())])


def written(text: str) -> str:
    """The page with its table as it should be."""
    before, begin, rest = text.partition("<!-- devices -->\n")
    return f"{before}{begin}\n{devices()}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def test_the_table_of_devices_is_what_the_code_says():
    text = PAGE.read_text()
    assert "<!-- devices -->" in text
    assert written(text) == text, "write the table anew: python tests/project/test_other_gpus.py"


@pytest.fixture
def what_runs_where(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import what_runs_where

    return what_runs_where


def test_the_readme_has_the_table_of_what_runs_where(what_runs_where):
    text = (DOCS.parent / "README.md").read_text()
    assert what_runs_where.filled(text) == text, "write it anew: python docs/what_runs_where.py"
    with pytest.raises(ValueError, match="no <!-- what runs where"):
        what_runs_where.filled("")


@pytest.mark.parametrize("arch", device.REFERENCES)
def test_what_runs_where_is_what_is_chosen(what_runs_where, arch):
    """Of a product of each kind, told by the families' reasons, and by the choice of a kernel when it is lowered."""
    kinds = what_runs_where.KINDS
    told = {(kind.a, kind.b, str(kind.precision or "")): what_runs_where.runs(kind, arch) for kind in kinds}
    gpu, compared = device.reference(arch), 0
    for case in WAYS:
        # TF32, which XLA has by default where there is such a thing, is named in one of them.
        precision = "" if case.rate == "tf32" and gpu.tf32 else str(case.precision or "")
        if names := told.get((case.dtype, case.dtype, precision)):
            by_mma = names if names[0] in ("mma.sync", "FMA") else None
            assert names == {"": ["XLA"], "sm90": ["wgmma"], "mma": by_mma}[family_of(case, gpu)], case.name
            compared += 1
    assert compared >= 14


def test_what_runs_where_has_a_row_and_a_column_for_each(what_runs_where):
    head, _, *rows = [line.strip("| ").split(" | ") for line in what_runs_where.table().splitlines()]
    assert {len(row) for row in rows} == {len(head)}
    assert all(str(what_runs_where.number(arch)) in " ".join(head) for arch in what_runs_where.ARCHITECTURES)
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert cells["float16, int8, uint8"]["Hopper (sm_90)"] == "wgmma"
    assert cells["float64, complex128"]["Ampere (sm_80, 86)"] == "mma.sync (sm_80), FMA (sm_86)"
    assert set(list(rows[-1])[1:]) == {"XLA"}


def test_rows():
    assert row(device.named("NVIDIA H200")).startswith("| **NVIDIA H200** | sm_90a | 132 | 830 | 415 | ")
    assert row(device.named("Tesla T4")).split(" | ")[3:5] == ["-", "-"]
    assert len(devices().splitlines()) == 2 + len(device.DEVICES)
    assert {case.dtype for case in WAYS} >= {jnp.dtype(x).name for x in ("bfloat16", "float64", "complex64", "uint8")}


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
