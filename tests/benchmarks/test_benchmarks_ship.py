"""benchmarks/ship.py: final measurements become entries that are found for their problems."""

import shutil

from benchmarks import report, ship
from benchmarks.cases import Dense
from cutjax.kernels import tuned
from cutjax.kernels.device import named
from cutjax.kernels.keys import key
from cutjax.runtime import tuning_file

RECORDED = report.RESULTS / "products-4b08411-h200.json"


def test_what_ships_is_what_was_measured(tmp_path, capsys):
    for path in tuned.SHIPPED.glob("*.json"):
        shutil.copy(path, tmp_path)
    before = (tmp_path / "h200.json").read_text()
    assert ship.main([str(RECORDED)], tmp_path) == 0
    assert "products of NVIDIA H200; h200.json has " in capsys.readouterr().out
    assert (tmp_path / "h200.json").read_text() == before  # these were shipped so
    content, rows = report.read(RECORDED)
    stored = tuning_file.read(tuned.SHIPPED / "h200.json")["NVIDIA H200"]
    for row in rows[:40]:
        f = row.figures
        problem = Dense(f["m"], f["n"], f["k"], f["layout"], tuple(f["batch"]), f["dtype"]).problem.on(
            named("NVIDIA H200")
        )
        entry = tuned.find(problem)[-1]
        if stored[key(problem)]["date"] > content["date"][:10]:  # timed again since
            continue
        assert dict(entry.config) == {**f["kernel"]["config"], "family": "sm90"}
        assert (entry.time_us, entry.xla_us) == (f["kernel"]["us"], row.peers["xla"].us)
        assert entry.xla_wins == (row.peers["xla"].us < tuned.SURE * f["kernel"]["us"])


def test_a_new_device_has_a_file_of_its_own(tmp_path):
    assert ship.file_of("NVIDIA X 1", tmp_path).name == "nvidia-x-1.json"
    tuning_file.merge(tmp_path / "x.json", {"NVIDIA X 1": {}})
    assert ship.file_of("NVIDIA X 1", tmp_path).name == "x.json"
