"""Rows of ``python -m cutjax bench`` whose kernels run here: each is found right, and timed."""

from __future__ import annotations

import jax
import pytest

from cutjax.tuning import bench, cases, measure
from emulator import device

SMALL = (
    cases.cube("bfloat16", 64),
    cases.epilogue("gelu(x@w+b)", 64, 64, 64, lambda y, b: jax.nn.gelu(y + b), cases.Array((64,))),
    cases.product("bfloat16", 64, 64, 64, rows=(40, 24)),
    cases.convolved("convolution", (1, 4, 4, 32), (3, 3, 32, 32)),
    cases.product("bfloat16", 16, 64, 64, weights="int8"),
)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(bench.lowering, "on_cuda", lambda: True)
    monkeypatch.setattr(bench, "CANDIDATES", 1)
    for name in ("FIRST_ROUNDS", "LAST_ROUNDS"):
        monkeypatch.setattr(measure, name, 1)
    monkeypatch.setattr(measure, "HOST_US", 0)  # the only clock here
    with device.emulated():
        yield


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_row(emulated, case):
    row = bench._row(case)
    assert row["dropped"] == {}
    assert min(row["us"].values()) > 0
    assert set(row["us"]) <= set(row["predicted_us"])
