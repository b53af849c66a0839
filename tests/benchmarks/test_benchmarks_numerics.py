"""The program that measures the error of each precision: what it calls an error, on the CPU."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from benchmarks import numerics


@pytest.fixture(autouse=True)
def wide():
    """The program counts in 64 bits."""
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("dtype", numerics.DTYPES)
@pytest.mark.parametrize("kind", numerics.INPUTS)
def test_inputs_are_finite_and_the_exact_product_has_no_error(kind, dtype, monkeypatch):
    monkeypatch.setattr(numerics, "K", 64)
    a, b = numerics.inputs(kind, np.dtype(dtype))
    assert (a.dtype, b.dtype) == (dtype, dtype)
    assert all(np.isfinite(x.astype(np.complex128)).all() for x in (a, b))
    exact, size = numerics.reference(a, b)
    whole = np.zeros((numerics.M, numerics.N), exact.dtype)
    whole[numerics.ROWS] = exact
    assert numerics.errors(whole, exact, size) == {"relative": 0.0, "componentwise": 0.0}
    assert numerics.errors(whole * (1 + 2.0**-20), exact, size)["relative"] == pytest.approx(2.0**-20)


def test_worse():
    row = {"dtype": "float32", "inputs": "gaussian", "ours": {"relative": 3e-4}, "xla": {"relative": 2e-4}}
    assert numerics.worse(row)
    assert numerics.worse({**row, "ours": {"relative": float("nan")}})
    assert not numerics.worse({**row, "ours": {"relative": 2.1e-4}})
    assert not numerics.worse({**row, "ours": {"error": "refused"}})
    assert not numerics.worse({**row, "ours": {"relative": 3e-8}, "xla": {"relative": 1e-9}})


def test_the_command(tmp_path, monkeypatch, capsys):
    for name, value in {"M": 64, "N": 32, "K": 128, "NAMES": ("highest", "F32_F32_F32", "ANY_F8_ANY_F8_F32")}.items():
        monkeypatch.setattr(numerics, name, value)
    out = tmp_path / "numerics.json"
    assert numerics.main(["--out", str(out), "--dtypes", "float32"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["precision"], row["inputs"]) for row in rows] == [
        (name, kind) for name in ("highest", "F32_F32_F32") for kind in numerics.INPUTS
    ]
    assert all("needs an NVIDIA GPU" in row["ours"]["error"] for row in rows)
    assert all(0 < row["xla"]["componentwise"] < 1e-6 for row in rows)
    assert "| float32 | `highest` |  | - |" in capsys.readouterr().out
