"""What ``python -m cutjax bench`` compares with is what the runs in benchmarks/results say, of the same problems."""

from __future__ import annotations

import json

import pytest

from benchmarks import networks, recorded
from benchmarks.cases import Grouped
from benchmarks.ops import dtypes, fused
from cutjax.tuning import bench_table
from cutjax.tuning.cases import CASES

BY_NAME = {case.name: case for case in CASES}


def test_the_shipped_file_is_what_is_recorded():
    assert recorded.PATH.read_text() == recorded.encoded(), "write it anew: python -m benchmarks recorded"


@pytest.mark.parametrize("name", bench_table.recorded())
def test_a_record_is_of_its_run(name):
    record = bench_table.recorded()[name]
    content = json.loads((recorded.RESULTS.parents[1] / record["file"]).read_text())
    assert content["device"] == "NVIDIA H200"
    assert (content["commit"], content["date"][:10]) == (record["commit"], record["date"])
    (row,) = (x for x in content["rows"] if record["row"] in (x["case"], f"{x['case']} {x.get('product', '')}"))
    assert not row.get("failure")
    assert record["us"] > 0
    assert name in BY_NAME


def test_a_record_is_of_the_same_problem():
    """The arrays of a case are those of the benchmark that was recorded, and the rows of groups."""
    convolutions = {case.name: case for case in networks.convolutions()}
    typed = {case.name: case for case in dtypes.CASES}
    of_fused = {(case.name, pair.name): case for case in fused.FUSED for pair in fused.pairs(case)}
    for name, run in recorded.RUNS.items():
        case = BY_NAME[name]
        shapes = [array.shape for array in case.arrays]
        if run.file.startswith("conv"):
            conv = convolutions[run.case]
            assert shapes == [conv.shapes["x"], conv.shapes["w"]]
            assert dict(case.plain.keywords)["window_strides"] == conv.strides
            assert dict(case.plain.keywords)["rhs_dilation"] == conv.dilation
            assert dict(case.plain.keywords)["feature_group_count"] == conv.groups
        elif run.file == recorded.GROUPED:
            sizes = Grouped(*(int(x) for x in run.case.replace("g ", "x").split("x")))
            assert case.rows == tuple(sizes.sizes)
            assert shapes == [(sizes.m, sizes.k), (sizes.groups, sizes.k, sizes.n)]
        elif run.case in typed:
            asked = typed[run.case]
            assert shapes[0] == (*asked.batch, asked.m, asked.k)
            assert shapes[1][-2:] == (asked.k, asked.n)
            assert [array.dtype for array in case.arrays] == [asked.dtype, asked.weights or asked.dtype]
            assert (case.precision, len(case.rows)) == (asked.precision, asked.groups)
        else:
            sizes, _, kind = run.case.partition(" ")
            found = fused.shapes(of_fused[sizes, run.product or kind])
            assert set(shapes) <= set(found.values())
