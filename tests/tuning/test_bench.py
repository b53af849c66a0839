"""``python -m cutjax bench``: the cases, the file that is gone on with, and the screen. Times are made up."""

from __future__ import annotations

import getpass
import json
import pathlib
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax.binding import lowering
from cutjax.kernels import device
from cutjax.tuning import autotune, bench, bench_table, cases, command, device_report, measure
from cutjax.tuning.cases import CASES, KINDS, Array, Case, cube, product

SMALL = (
    cube("bfloat16", 256),
    cases.epilogue("gelu(x@w+b)", 256, 256, 128, lambda y, b: jax.nn.gelu(y + b), Array((256,))),
    product("bfloat16", 256, 256, 256, rows=(100, 156)),
    cases.convolved("convolution", (2, 8, 8, 64), (3, 3, 64, 64)),
    product("bfloat16", 16, 256, 256, weights="int8"),
    cases.swiglu(64, 128, 64),
    cube("float64", 64),
    cube("int8", 64, brief=False),
)
NAMES = [case.name for case in SMALL]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A device on which kernels take 2, 3, .. us and XLA 4, with few cases; rows in groups fail. Returns a file."""

    def times(functions, inputs, reference, right, keep=(), trusted=(), seconds=0.0):
        if any(x.dtype == jnp.int32 for x in jax.eval_shape(lambda: inputs.make(np.uint32(0), True))):
            raise MemoryError("full; see /home/somebody/core.17")
        others = [name for name in functions if name != autotune.XLA]
        us = {name: 2.0 + i for i, name in enumerate(others) if i != 1}
        return measure.Times(us | {autotune.XLA: 4.0}, dict.fromkeys(others[1:2], "ValueError: in ~/a/b.py"))

    monkeypatch.setattr(autotune, "require_device", lambda: None)
    monkeypatch.setattr(bench.lowering, "on_cuda", lambda: True)
    monkeypatch.setattr(bench.measure, "times", times)
    for module in (bench, bench_table):
        monkeypatch.setattr(module, "CASES", SMALL)
    return tmp_path / "report.json"


# The cases.


def test_the_first_minute_has_one_of_each_kind():
    assert sorted(case.kind for case in CASES[: len(KINDS)]) == sorted(KINDS)
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.brief for case in CASES[: sum(case.brief for case in CASES)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_computes_what_plain_jax_does(case):
    """As far as shapes tell; by one kernel on an H200, but for models, which have some."""
    asked = jax.enable_x64(case.x64), jax.numpy_dtype_promotion("standard")  # dot_product_attention promotes
    with asked[0], asked[1], lowering.on_target(lowering.Target("sm_90a", "NVIDIA H200")):
        arrays = case.avals()
        plain = jax.eval_shape(case.plain, *arrays)
        assert jax.tree.leaves(jax.eval_shape(case.ours, *arrays)) == jax.tree.leaves(plain)
        assert case.wide is None or jax.eval_shape(case.wide, *arrays) == plain
        assert jax.eval_shape(lambda: case.inputs(np.uint32(0), True)) == arrays
        choices = bench.choices(case, "cuda")
    assert all(choice.served for choice in choices)
    assert (len(choices) > 1) == (case.kind == "model")
    assert case.rate == "" or case.rate in dict(device.named("NVIDIA L4").flops)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_case_is_right(case):
    """Ours, by XLA here, as it is checked on a device; and not where it is off."""
    with jax.enable_x64(case.x64):
        right = bench.right(case)
        arrays = case.inputs(np.uint32(0), True)
        ours, reference = (jax.tree.leaves(jax.jit(f)(*arrays)) for f in (case.ours, case.wide or case.plain))
        assert right(ours, reference)
        assert not right([*ours[:-1], ours[-1] + reference[-1].astype(ours[-1].dtype)], reference)


def test_a_row_is_measured(monkeypatch):
    """By XLA, for real: programs are compiled in threads, in which double precision is to be what it is here."""
    monkeypatch.setattr(measure, "HOST_US", 0.0)
    for case in (cube("float64", 64), cube("int8", 64), product("bfloat16", 64, 32, 16, rows=(40, 24))):
        row = bench._row(case)
        assert row["dropped"] == {}
        assert row["xla_us"] > 0


def test_a_wrong_result_has_no_time(monkeypatch):
    monkeypatch.setattr(measure, "HOST_US", 0.0)
    case = Case("model", "wrong", lambda x: 1.1 * x, lambda x: x, (Array((64, 64)),), close=False)
    row = bench._row(case)
    assert (row["us"], row["dropped"]) == ({}, {"auto": "ArithmeticError: its result is wrong"})
    assert row["xla_us"] > 0
    assert " WRONG " in bench_table._line("wrong", row)


# The file.


def test_report(small, capsys):
    assert command.main(["bench", "--report", str(small), "--quiet"]) == 0
    content = device_report.read(small)
    assert (content["arch"], content["sms"]) == ("sm_90a", 132)
    assert {"cutjax", "jax", "python", "compiler"} == set(content["versions"])
    copy, dense, fused, grouped, convolution, narrow, model, double, integers = content["rows"]
    assert copy["xla_us"] == 4.0
    assert dense["flops"] == 2 * 256**3
    assert dense["problem"]["m"] == 256
    assert sorted(dense["us"].values()) == [2.0, 4.0, 5.0]
    assert set(dense["us"]) < set(dense["predicted_us"])
    assert dense["rate"] == "bfloat16"
    assert not {"rate"} & {*fused, *convolution, *narrow, *model}
    assert model["us"] == {"auto": 2.0}
    assert double["problem"]["a_dtype"] == "float64"
    assert integers["xla_us"] == 4.0
    assert grouped == {"case": NAMES[2], "error": "MemoryError: full; see (a file)"}
    out = capsys.readouterr().out
    assert next(line for line in out.splitlines() if NAMES[0] in line).split()[1:4] == ["2.0", "4.0", "2.00"]
    assert f"failed: {NAMES[2]}: MemoryError: full" in out
    assert f"written to {small}: please attach it to an issue" in out


def test_a_report_tells_of_nobody(small):
    content = bench.run(small, progress=False)
    text = json.dumps({**content, "commit": ""})
    assert "(a file)" in text
    for private in ("/", getpass.getuser(), platform.node()):
        assert f'"{private}' not in text.replace(" ", '"'), private


def test_a_report_is_gone_on_with(small, monkeypatch, capsys):
    measured, row = [], bench._row

    def interrupted(case):
        measured.append(case.name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return row(case)

    monkeypatch.setattr(bench, "_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.run(small, progress=False)
    assert [row["case"] for row in device_report.read(small)["rows"]] == ["copy", *NAMES[:2]]
    content = bench.run(small, progress=False)
    assert measured == [*NAMES[:3], *NAMES[2:]]
    assert [row["case"] for row in content["rows"]] == ["copy", *NAMES]
    assert device_report.read(small) == content
    assert bench.left(content) == 0
    assert capsys.readouterr().err == ""


def test_no_case_begins_after_the_minutes(small, monkeypatch, capsys):
    measured, row = [], bench._row
    monkeypatch.setattr(bench, "_row", lambda case: measured.append(case) or row(case))
    monkeypatch.setattr(bench.time, "monotonic", lambda: 60.0 * len(measured))  # a minute each
    assert command.main(["bench", "--report", str(small), "--quiet", "--minutes", "1.5"]) == 0
    assert [row["case"] for row in device_report.read(small)["rows"]] == ["copy", *NAMES[:2]]
    assert "6 cases are left: the same command goes on with them" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value"), [("device", "NVIDIA L4"), ("driver", "1.2"), ("versions", {"jax": "0.1"})])
def test_a_report_of_other_conditions_is_set_aside(small, capsys, name, value):
    old = {**bench.run(small, progress=False), name: value}
    small.write_text(json.dumps(old))
    bench.run(small, 1e-9, progress=False)
    assert device_report.read(small)["rows"] == []
    assert device_report.read(small.with_name("report.json.old")) == old
    told = capsys.readouterr().err
    assert f"{small} is begun anew, and what was there is report.json.old: {name} was {value}, is " in told


def test_a_file_of_another_kind_is_left_alone(small, capsys):
    small.write_text("mine")
    assert command.main(["bench", "--report", str(small)]) == 1
    assert "is no report of a device" in capsys.readouterr().err
    assert small.read_text() == "mine"


def test_what_ended_a_process_is_not_tried_again(small, monkeypatch):
    def ended(case):
        raise SystemExit  # as far as the file tells

    with monkeypatch.context() as patch:
        patch.setattr(bench, "_row", ended)
        with pytest.raises(SystemExit):
            bench.run(small, progress=False)
    rows = bench.run(small, progress=False)["rows"]
    assert rows[1] == {"case": NAMES[0], "error": bench.UNENDED}
    assert [row["case"] for row in rows] == ["copy", *NAMES]
    assert "begun" not in device_report.read(small)


def test_a_device_that_is_lost_ends_the_run(small, monkeypatch, capsys):
    def lost(x):
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(bench.jax, "block_until_ready", lost)
    assert command.main(["bench", "--report", str(small), "--quiet"]) == 1
    assert "computes nothing more in this process (RuntimeError: an illegal address); " in capsys.readouterr().err
    assert [row["case"] for row in device_report.read(small)["rows"]] == ["copy", *NAMES[:3]]


def test_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["bench"]) == 1
    assert "kernels are timed on an NVIDIA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["64x64x64", "--minutes", "3"], "--minutes and --report are of the report"),
        (["64x64x64", "--report", "x.json"], "--minutes and --report are of the report"),
        (["--minutes", "0"], "'0' is no number of minutes above 0"),
        (["--minutes", "soon"], "'soon' is no number of minutes above 0"),
        (["--minutes", "nan"], "'nan' is no number of minutes above 0"),
    ],
)
def test_what_cannot_be_parsed(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(["bench", *arguments])
    assert message in capsys.readouterr().err


def test_where_to_send(monkeypatch):
    class Metadata:
        def get_all(self, name):
            return ["Documentation, https://a.example", "Issues, https://b.example/issues"]

    monkeypatch.setattr(bench.metadata, "metadata", lambda name: Metadata())
    assert bench.where_to_send() == "please attach it to an issue at https://b.example/issues"


# The screen.


def _row(name, us, xla_us, runs="k1", **more):
    times = {f"k{i}": x for i, x in enumerate(us, 1)}
    return {"case": name, "us": times, "xla_us": xla_us, "runs": runs, "dropped": {}, **more}


ROWS = [
    {"case": "copy", "bytes": 8 << 26, "xla_us": 300.0, "us": {}, "dropped": {}},
    _row("8192x8192x8192:bfloat16", [2000.0, 2100.0], 2000.0, "XLA"),
    _row("16x8192x8192:bfloat16", [90.0], 60.0, "XLA"),
    _row("1000x1001x1003:bfloat16", [], 30.0, "XLA", missing="float64: no kernel multiplies it here"),
    _row("4096x4096x4096:float64", [], 31.0, "XLA", missing="float64: no kernel multiplies it here"),
    _row("4096x4096x4096 gelu(x@w+b)", [100.0], 141.0),
    _row("8192x14336x4096:bfloat16:8 groups", [1000.0], 5000.0),
    _row("resnet50 3x3 /2, 32 images", [10.0], 20.0, dropped={"k2": "ArithmeticError: its result is wrong"}),
    {"case": "2048x2048x2048:int8", "error": "XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory"},
    _row("SwiGLU 2048x8192x2048, gradient", [900.0], 1000.0),
    _row("512x512x512:bfloat16", [5.0], 10.0),
    _row("2048x2048x2048:bfloat16", [50.0], 25.0),
]
CONTENT = {
    "device": "NVIDIA Example",
    "arch": "sm_80",
    "sms": 108,
    "driver": "1.2.3",
    "versions": {"cutjax": "0.1.0", "jax": "0.11.2", "python": "3.12.3", "compiler": "NVRTC 13.0"},
    "commit": "0123456789abcdef-dirty",
    "date": "2000-01-01",
    "rows": ROWS,
}
SCREEN = """\
NVIDIA Example, sm_80, 108 SMs, driver 1.2.3, copies 1.79 TB/s
cutjax 0.1.0 at 012345678-dirty, jax 0.11.2, NVRTC 13.0, 2000-01-01
                                        us   XLA us  ratio 0.5     1       2       4  H200  default
product
 8192x8192x8192:bfloat16            2000.0   2000.0   1.00         |                     -  XLA
 16x8192x8192:bfloat16                90.0     60.0   0.67 o  #####|                  0.40  XLA
 1000x1001x1003:bfloat16                 -     30.0   none         |                     -  XLA
 4096x4096x4096:float64                  -     31.0   none         |                     -  XLA
fused
 4096x4096x4096 gelu(x@w+b)          100.0    141.0   1.41         |####   o          2.00  kernel
grouped
 8192x14336x4096:bfloat16:8 groups  1000.0   5000.0   5.00         |###############>     -  kernel
convolution
 resnet50 3x3 /2, 32 images              -     20.0  WRONG         |                     -  kernel
low precision
 2048x2048x2048:int8                     -        - failed         |                     -
model
 SwiGLU 2048x8192x2048, gradient     900.0   1000.0   1.11         |#                    -  kernel
and 2 smaller products, 1.00 in the geometric mean
# XLA's time over the fastest kernel's. o, H200: the same as recorded there, - where it was not.
WRONG: resnet50 3x3 /2, 32 images: k2: ArithmeticError: its result is wrong
failed: 2048x2048x2048:int8: XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory
none: 1000x1001x1003:bfloat16 and 1 more: float64: no kernel multiplies it here
3 cases are left: the same command goes on with them
"""


def test_screen(monkeypatch):
    runs = {
        "16x8192x8192:bfloat16": {"us": 10.0, "xla_us": 4.0},
        "4096x4096x4096 gelu(x@w+b)": {"us": 5.0, "xla_us": 10.0},
    }
    monkeypatch.setattr(bench_table, "recorded", lambda: runs)
    assert bench_table.text(CONTENT, 3) + "\n" == SCREEN
    assert SCREEN in (pathlib.Path(__file__).parents[2] / "docs" / "other-gpus.md").read_text()
    assert "cases are left" not in bench_table.text(CONTENT, 0)


def test_a_whole_report_is_one_screen():
    rows = [_row(case.name, [12345.6], 23456.7) for case in CASES]
    lines = bench_table.text({**CONTENT, "rows": rows}, 0).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
