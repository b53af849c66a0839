"""The report of a tuning, the progress bar, and python -m cutjax."""

from __future__ import annotations

import builtins
import dataclasses
import io
import os
import pathlib
import subprocess
import sys

import pytest

import cutjax
from cutjax.kernels import choose
from cutjax.runtime import settings, tuning_file
from cutjax.tuning import autotune, command, measure
from cutjax.tuning.progress import Progress
from cutjax.tuning.report import Report, Row, Skipped

PROBLEM = cutjax.Problem.of(256, 512, 128)
ROW = Row(PROBLEM, 3, True, "old", 10.0, "new", 5.0, 7.25, 0.5, cutjax.Config(), 17, ())
SECOND = Row(cutjax.Problem.of(64, 64, 64), 1, False, "XLA", 8.0, "XLA", 8.0, 8.0, 0.01, None, 2, (("k", "wrong"),))
FAILED = dataclasses.replace(SECOND, before_us=None, after="nothing ran", after_us=None, xla_us=None, roofline=None)


def test_print():
    report = Report((ROW, SECOND, FAILED), (Skipped("1x2x3", "too small", 4),), "NVIDIA H200", pathlib.Path("/x.json"))
    lines = str(report).splitlines()
    assert [" ".join(line.split()) for line in (lines[0], *lines[2:5])] == [
        "count problem before us after us XLA us roofline runs",
        "3 256x512x128 nn bf16 x bf16 -> bf16 10.0 5.0 7.2 50% new (was old)",
        "1* 64x64x64 nn bf16 x bf16 -> bf16 8.0 8.0 8.0 1% XLA",
        "1* 64x64x64 nn bf16 x bf16 -> bf16 - - - - nothing ran (was XLA)",
    ]
    assert lines[5:] == [
        "all products of one call: 38.0 us before, 23.0 after (1.65x)",
        "* of one iteration, or of every branch: the number is known only at run time",
        "dropped for 64x64x64 nn bf16 x bf16 -> bf16: k: wrong",
        "dropped for 64x64x64 nn bf16 x bf16 -> bf16: k: wrong",
        "not measured: 1x2x3 (4 in a call): too small",
        "NVIDIA H200; choices are in /x.json",
    ]
    assert lines[0].index("problem") == lines[2].index("256x512x128") == lines[3].index("64x64x64")


def test_sums_are_weighted_by_count():
    report = Report((ROW, SECOND, FAILED), (), "", None)
    assert (report.before_us, report.after_us) == (3 * 10.0 + 8.0, 3 * 5.0 + 8.0)


def test_print_of_nothing():
    assert str(Report((), (), "NVIDIA H200", None)) == "nothing was measured\nNVIDIA H200"


@pytest.mark.filterwarnings("default")  # matplotlib's own
def test_plot():
    pytest.importorskip("matplotlib")
    figure = Report((ROW, SECOND, FAILED), (), "NVIDIA H200", None).plot()
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [10.0, 8.0, 5.0, 8.0, 7.25, 8.0]
    assert axes.get_yticklabels()[0].get_text() == "3 x 256x512x128 nn bf16 x bf16 -> bf16"
    figure.savefig(io.BytesIO())
    Report((), (), "", None).plot().savefig(io.BytesIO())


def test_plot_without_matplotlib(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"Report.plot draws with matplotlib, which is not installed"):
        Report((ROW,), (), "", None).plot()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress(4, shown=True) as shown:
        for i in range(4):
            shown.step(f"step {i}")
    *shows, last = stderr.getvalue().split("\r")[1:-1]
    assert shows[0].startswith("[######..................] 1/4 ")
    assert shows[-1].startswith("[########################] 4/4 ")
    assert last.strip() == ""


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), False), (io.StringIO(), True)])
def test_no_progress(monkeypatch, stream, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(4, shown) as progress:
        progress.step("step")
    assert stream.getvalue() == ""


# The command line.


@pytest.fixture
def fake_device(monkeypatch, tmp_path):
    """A device on which the second candidate, and where there is none XLA, is the fastest."""
    monkeypatch.setattr(autotune, "require_device", lambda: None)

    def timed(task, seconds=0):
        names = [*task.configs, autotune.XLA]
        return measure.Times({name: (5.0, 3.0, 4.0)[min(i, 2)] for i, name in enumerate(names)}, {})

    monkeypatch.setattr(autotune, "timed", timed)
    with settings.override(tuning_dir=tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64x128x256", command.Product(0, 64, 128, 256, "nn", "bfloat16")),
        ("64x128x256:tn", command.Product(0, 64, 128, 256, "tn", "bfloat16")),
        ("8x64x128x256:nt:f16", command.Product(8, 64, 128, 256, "nt", "float16")),
    ],
)
def test_products(text, expected):
    assert command.product(text) == expected
    (found,) = expected.found()
    problem = autotune.tasks([found], 1)[0][0].problem
    assert (problem.m, problem.n, problem.k, problem.layout) == (64, 128, 256, expected.layout)
    assert problem.a.dtype.name == problem.out_dtype.name == expected.dtype
    assert problem.batch_size == max(expected.batch, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["fly"], "invalid choice"),
        (["tune"], "required"),
        (["tune", "64x128"], "'64x128' is no product; expected [BATCHx]MxNxK"),
        (["bench", "64x128x256:xy"], "unknown layout 'xy'"),
        (["bench", "64x128x256:nn:f32"], "unknown dtype 'f32'"),
        (["bench", "64x0x256"], "a size is 0"),
        (["tune", "64x64x256", "--candidates", "0"], "'0' is not 1 or more"),
        (["bench", "64x64x256", "--path", "x"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_parsed(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tune", "bench"])
def test_without_a_gpu(name, capsys):
    assert command.main([name, "64x64x64"]) == 1
    assert f"python -m cutjax {name}: autotune: kernels are timed on an NVIDIA GPU" in capsys.readouterr().err


def test_tune(fake_device, capsys):
    assert command.main(["tune", "64x128x256", "8x64x128x256:nt:f16", "--candidates", "3"]) == 0
    out = capsys.readouterr().out
    assert "64x128x256 nn bf16 x bf16 -> bf16" in out
    assert "64x128x256 nt f16 x f16 -> f16 batch 8" in out
    assert f"choices are in {fake_device / 'tuned.json'}" in out
    (entries,) = tuning_file.read(fake_device / "tuned.json").values()
    assert {entry["time_us"] for entry in entries.values()} == {3.0}
    assert len(entries) == 2
    assert command.main(["info"]) == 0
    assert f"{fake_device / 'tuned.json'}: 2 entries, 2 for NVIDIA H200" in capsys.readouterr().out


def test_tune_into_a_file(fake_device, capsys):
    assert command.main(["tune", "64x128x256", "--path", str(fake_device / "mine.json")]) == 0
    assert [path.name for path in fake_device.glob("*.json")] == ["mine.json"]
    (fake_device / "mine.json").write_text('{"format": 7}')
    assert command.main(["tune", "64x128x256", "--path", str(fake_device / "mine.json")]) == 1
    assert "its format is 7" in capsys.readouterr().err


def test_bench(fake_device, capsys, kernels_run):
    """What runs, and XLA; nothing is kept."""
    assert command.main(["bench", "128x128x256"]) == 0
    head, _, line, device = capsys.readouterr().out.splitlines()
    assert head.split() == ["problem", "us", "XLA", "us", "XLA/ours", "roofline", "runs"]
    kernel = choose.choose(cutjax.Problem.of(128, 128, 256)).kernel
    assert line.split()[-5:] == ["5.0", "3.0", "0.600", "1%", kernel]
    assert device == "no device"
    assert not list(fake_device.iterdir())


def test_as_a_module():
    """The one test that starts Python: the others call the same function."""
    run = subprocess.run(
        [sys.executable, "-m", "cutjax", "info"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(cutjax.__file__).parent.parent,
    )
    assert run.returncode == 0, run.stderr
    assert f"cutjax    {cutjax.__version__}" in run.stdout
    assert "device    none; compiling for sm_90a" in run.stdout
