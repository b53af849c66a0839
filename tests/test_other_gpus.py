"""The tables of docs/other-gpus.md are what the code says. ``python tests/test_other_gpus.py`` writes them anew."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import pytest

from cutjax.kernels import device
from cutjax.kernels.device import Device
from cutjax.tuning.device_report import KINDS, family_of

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "other-gpus.md"
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


def kinds() -> str:
    """One row for each way to multiply, one column for each architecture."""
    references = list(device.REFERENCES.values())
    lines = [f"| | {' | '.join(found.arch for found in references)} |", f"|---|{'---|' * len(references)}"]
    for case in KINDS:
        lines.append(f"| {case.rate} | {' | '.join(family_of(case, found) or '-' for found in references)} |")
    return "\n".join(lines)


TABLES = {"devices": devices, "kinds": kinds}


def written(text: str) -> str:
    """The page with its tables as they should be."""
    for name, table in TABLES.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n\n{table()}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


@pytest.mark.usefixtures("compile_nothing")
def test_the_tables_are_what_the_code_says():
    text = PAGE.read_text()
    assert all(f"<!-- {name} -->" in text for name in TABLES)
    assert written(text) == text, "write the tables anew: python tests/test_other_gpus.py"


def test_rows():
    assert row(device.named("NVIDIA H200")).startswith("| **NVIDIA H200** | sm_90a | 132 | 830 | 415 | ")
    assert row(device.named("Tesla T4")).split(" | ")[3:5] == ["-", "-"]
    assert len(devices().splitlines()) == 2 + len(device.DEVICES)
    bf16 = next(case for case in KINDS if case.rate == "bfloat16")
    assert family_of(bf16, device.reference("sm_90a")) == "sm90"
    assert {case.dtype for case in KINDS} >= {jnp.dtype(x).name for x in ("bfloat16", "float64", "complex64", "uint8")}


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
