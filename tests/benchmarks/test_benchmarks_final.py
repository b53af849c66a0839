"""Final measurements: their results file, its summary, pictures, and the page that shows them."""

from __future__ import annotations

import json

import pytest
from fake_benchmarks import final_lines

from benchmarks import answers, final, performance, report, tables
from benchmarks.ops import attention


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in final_lines()))
    final.write(tmp_path / "lines", tmp_path / "products-h200.json", {"suite": "models", "salts": ["made up"]})
    return tmp_path


def test_a_summary_says_what_was_asked_for(folder, capsys):
    assert final.main([str(folder / "products-h200.json")]) == 0
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    table = {name: rest for name, *rest in cells}
    # Untuned 0.8, 1 and 1.25 in turns; tuned 1.25, 1 and 1.25.
    assert table["geometric mean"] == ["12", "1.000", "1.03", "1.160", "1.06"]
    assert table["worst"] == ["12", "0.800", "0.92", "1.000", "0.98"]
    assert table["run by XLA"][:4] == ["12", "4", "", "4"]
    assert table["sustained, over 100 us"][1:] == ["1.100", "1.00", "1.100", "1.02"]
    _, rows = report.read(folder / "products-h200.json")
    few = [row for row in rows if row.figures["tokens"] <= 64]
    assert table["tokens up to 64"][0] == str(len(few))
    assert len({row.figures["kind"] for row in rows}) == 3


def test_what_is_worst_has_its_reasons(folder):
    _, rows = report.read(folder / "products-h200.json")
    lines = list(performance.worst(rows))
    assert lines[0].startswith("4 of 12 (33%) are slower")
    assert len(lines) == 4 + 4
    assert all("| 0.800 | 1.250 | the choice: another config takes" in line for line in lines[4:])
    assert all("40% of" in line and "XLA 50%" in line for line in lines[4:])
    fast = [row for row in rows if row.ratios["xla"] > 1]
    assert list(performance.worst(fast)) == ["No product is slower than XLA by more than half a percent."]


def test_rows_of_failures_are_told(folder):
    lines = [*final_lines(3), {"case": "1x2x3 nn", "error": "E: no"}]
    (folder / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = final.write(folder / "lines", folder / "other.json", {})
    assert list(final.summary(rows))[-1] == "- failed: 1x2x3 nn: E: no"
    assert list(tables.markdown("products", rows))[-1].startswith("| 1x2x3 nn |  | - | - |")
    (folder / "lines").write_text("")
    with pytest.raises(ValueError, match="nothing was measured"):
        final.write(folder / "lines", folder / "other.json", {})


def test_pictures_and_the_pages(folder, capsys):
    pytest.importorskip("matplotlib")
    page, readme = folder / "page.md", folder / "readme.md"
    for path in (page, readme):
        marked = f"{performance.BEGIN}\nold\n{performance.END}\n" * (2 if path == page else 1)
        path.write_text(f"before\n{marked}after\n")
    assert performance.main(["--results", str(folder), "--page", str(page), "--readme", str(readme)]) == 0
    pictures = [folder / line.rsplit("/", 1)[1] for line in capsys.readouterr().out.splitlines()[:-2]]
    names = ["products-h200-roofline.png", "products-h200-ratio.png", "speed.png"]
    assert [path.name for path in pictures] == names
    assert all(path.stat().st_size > 5000 for path in pictures)
    for path in (page, readme):
        text = path.read_text()
        assert text.startswith("before\n")
        assert text.endswith(f"{performance.END}\nafter\n")
        assert "old" not in text
    text = page.read_text()
    assert all(name in text for name in names[:2])
    assert "asked" not in text
    headings = ["## How fast is my case?", "## Where does it lose?", "## Products of models, H200"]
    assert [line for line in text.splitlines() if line.startswith("## ")] == headings
    assert performance.fill(text, *performance.page(folder)) == text
    with pytest.raises(ValueError, match="has not"):
        performance.fill("nothing", "")


def test_the_pages_are_what_the_recorded_runs_say():
    for path, contents in ((performance.PAGE, performance.page()), (performance.README, [performance.in_readme()])):
        text = path.read_text()
        assert performance.fill(text, *contents) == text, "write it anew: python -m benchmarks performance"


def test_an_answer_says_what_xla_runs(folder):
    """Untuned a third each is a slow kernel, XLA, and a fast kernel: 0.8, 1 and 1.25."""
    (first, *_) = answers.told(answers.ANSWERS, folder)
    assert (first.mean(folder), first.made_of(folder)) == (
        "1.00",
        "12, of which 4 are left to XLA; 1.00 over the 8 its kernels run",
    )
    assert [x.stem for x in answers.told(answers.ANSWERS, folder) if x.stem != "products-h200"] == []
    assert [line for line in answers.losses(folder) if "| 0.80 | 4 of 12 |" in line]
    assert "0.80: a product of models" in list(answers.brief(folder))[-1]


def test_every_answer_is_recorded():
    """No line of the tables has lost its run, or the rows that it chooses."""
    lines = (*answers.ANSWERS, *answers.LOSES)
    assert answers.told(lines, report.RESULTS) == list(lines)
    assert sum(bool(answer.label) for answer in answers.ANSWERS) == 8
    of_models = answers.ANSWERS[0].rows(report.RESULTS)
    assert (len(of_models), sum(map(answers.ANSWERS[0].own, of_models))) == (110, 15)


def test_samples_of_attention_have_every_head_size_and_decoding():
    cases = attention.sample(60, "x")
    assert cases == attention.sample(60, "x") != attention.sample(60, "y")
    assert len({case.name for case in cases}) == 60
    decode = [case for case in cases if case.tags[0] == "decode"]
    assert len(decode) == 30
    assert all(case.batch and case.m <= 16 for case in decode)
    sizes = {min(case.n, case.k) for case in attention.products()}
    assert {64, 72, 80, 96, 112, 128, 192, 256} <= sizes
