"""The fast sweep: its driver against a libcuda that only records, its worker from plan to rows, its watchdog."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from fake_driver import Fake, build, fake_cubin
from tensor_maps import ENCODED

import cutjax
from benchmarks import direct, direct_bench, direct_worker, driver, final, report, sustained, timing
from benchmarks.cases import Dense
from cutjax.kernels.device import device_of_kind
from cutjax.kernels.sm90 import kernel as sm90_kernel
from cutjax.runtime.compiler import Cubin, Resources, compile_source
from cutjax.runtime.launch import Call, Float32, Float64, Int32, Int64, Launch, Pointer, TensorMap

H200 = device_of_kind("NVIDIA H200", "sm_90a")


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory):
    return str(build(tmp_path_factory.mktemp("direct")))


@pytest.fixture
def fake(fake_path, monkeypatch):
    monkeypatch.setattr(driver, "PATH", fake_path)
    library = ctypes.CDLL(fake_path)
    library.fake_reset()
    return Fake(library)


def entered() -> driver.Driver:
    cuda = driver.Driver()
    assert cuda.describe() == ("NVIDIA H200", 132)
    cuda.enter()
    return cuda


MAPS = (
    TensorMap(0, jnp.dtype(jnp.bfloat16), (2**32, 4096, 3), (2**33, 2**39), (64, 256, 1), 128, 32, 256),
    TensorMap(1, jnp.dtype(jnp.float32), (64,), (), (16,), 64, 0, 0),
)


def test_every_kind_of_tensor_map_is_encoded_as_the_launcher_does(fake):
    params = tuple(tensor_map for tensor_map, _ in ENCODED.values())
    launch = Launch(f"kernel_{'m' * len(params)}", fake_cubin(b"maps"), (1, 1, 1), (32, 1, 1), params=params)
    driver.Prepared(entered(), launch, 132)([1 << 20])
    (launched,) = fake.calls("cuLaunchKernelEx")
    expected = [{"address": (1 << 20) + tensor_map.byte_offset} | seen for tensor_map, seen in ENCODED.values()]
    assert launched["params"] == expected


def test_a_launch_arrives_as_its_words_say(fake):
    params = (*MAPS, Pointer(2, 48), Int32(-7), Int32(2**32 - 1), Int64(-(2**40)), Float32(-0.5), Float64(1e300))
    launch = Launch("kernel_mmpiilfd", fake_cubin(b"words"), (1000, 3, 2), (384, 1, 1), (2, 1, 1), 200000, 2, params)
    prepared = driver.Prepared(entered(), launch, 131)
    for base in (1 << 20, 1 << 44):  # addresses are those of the launch, not of the first
        fake.library.fake_reset()
        prepared([base, base + 4096, base + 8192])
        (launched,) = fake.calls("cuLaunchKernelEx")
        found = []
        for seen, param in zip(launched["params"], params, strict=True):
            match param:
                case TensorMap():
                    address = seen["address"] - base - 4096 * param.buffer
                    head = (seen["dtype"], len(seen["dims"]), seen["swizzle"], seen["l2"], 0, seen["interleave"])
                    sizes = (x for name in ("dims", "strides", "element_strides", "box") for x in seen[name])
                    found.append((0, param.buffer, address, *head, seen["fill"], *sizes))
                case Pointer():
                    found.append((1, param.buffer, seen - base - 4096 * param.buffer))
                case _:
                    found.append((param.words[0], seen))
        unsigned = [(w[0], w[1] - 2**32) if w[0] == 2 and w[1] >= 2**31 else w for w in (p.words for p in params)]
        assert found == [(w[0], w[1] % 2**32) if w[0] == 4 else w for w in unsigned]
        assert launched["grid"] == [262, 3, 2]
        assert (launched["block"], launched["cluster"]) == ([384, 1, 1], [2, 1, 1])
        assert launched["shared_bytes"] == 200000


def test_a_kernel_is_loaded_once_with_the_most_memory_asked_for(fake):
    cuda = entered()
    for shared_bytes in (1000, 3000, 2000):
        launch = Launch(
            "kernel_p", fake_cubin(b"once"), (7, 1, 1), (32, 1, 1), (1, 1, 1), shared_bytes, 0, (Pointer(0),)
        )
        driver.Prepared(cuda, launch, 132)([4096])
    assert len(fake.calls("cuLibraryLoadData")) == 1
    assert [line["value"] for line in fake.calls("cuKernelSetAttribute")] == [1000, 3000, 3000]
    launched = fake.calls("cuLaunchKernelEx")
    assert [(line["cluster"], line["shared_bytes"], line["grid"][0]) for line in launched] == [
        ([0, 0, 0], 1000, 7),
        ([0, 0, 0], 3000, 7),
        ([0, 0, 0], 2000, 7),
    ]
    fake.fail("cuLaunchKernelEx", 719)
    with pytest.raises(driver.CudaError, match=r"cuLaunchKernelEx: CUDA_ERROR_FAKE \(719\)"):
        driver.Prepared(cuda, launch, 132)([4096])


@pytest.mark.parametrize(
    ("grid", "cluster", "blocks_per_sm", "sms", "expected"),
    [(1000, 1, 1, 132, 132), (1000, 2, 1, 131, 130), (6, 2, 1, 132, 6), (1000, 8, 1, 4, 8), (1000, 8, 0, 132, 1000)],
)
def test_persistent_grids_are_whole_clusters(grid, cluster, blocks_per_sm, sms, expected):
    launch = Launch("k", b"-", (grid, 1, 1), (32, 1, 1), (cluster, 1, 1), 0, blocks_per_sm)
    assert driver.grid_x(launch, sms) == expected


def kinds(job):
    return collections.Counter(direct.kind(cutjax.Config(**config)) for config in job.configs)


def test_plans_are_the_same_in_every_run_and_survive_json():
    cases = direct.products(["x", "y"], 5, ["16,128,64,nt", "64,64,64,tn,2,3"], "float16")
    assert len(cases) == 12
    assert cases[1] == Dense(64, 64, 64, "tn", (2, 3), "float16")
    job = direct.plan(cases[0], H200, 3, 2)
    assert job == direct.plan(cases[0], H200, 3, 2)
    assert len({json.dumps(config) for config in job.configs}) == len(job.predicted)
    assert job.predicted[:3] == sorted(job.predicted)[:3]
    assert kinds(job) == {"swapped whole": 3 + 2, "whole": 1 + 2}  # the fastest 3 are swapped
    job.skip[-1] = "hang"
    assert direct.Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_some_of_every_kind_are_planned():
    job = direct.plan(Dense(128, 192, 8192), H200, 6, 1)
    counts = kinds(job)
    assert counts.keys() == {"whole", "parts", "swapped whole", "swapped parts"}
    assert min(counts.values()) == 2 + 1  # a fifth of 6, rounded up, and one by chance


def test_the_comparison_compiles():
    assert compile_source(direct_bench._COMPARE, name="compare", arch="sm_90a").resources.spill_store_bytes == 0


@pytest.fixture
def worker(fake, monkeypatch, tmp_path):
    """Runs a worker on CPU: kernels only recorded, each of them 5 us; XLA's product 7 us; what JAX adds 2 us."""

    def compiled(source, *, name, arch):
        return Cubin(fake_cubin(name.encode()), Resources(*[None] * 5), "", 0.0, False)

    def records(calls, warm_up=None):
        found = []
        for function, args in (*(warm_up or ()), *calls):
            fake.library.fake_reset()
            out = function(*args)
            ours = [(line["kernel"], 5.0) for line in fake.calls("cuLaunchKernelEx")]
            found.append(ours or [("finish" if isinstance(out, jax.Array) else "xla", 2.0 if out is not None else 7.0)])
        return [record for part in found[len(warm_up or ()) :] for record in part]

    monkeypatch.setattr("cutjax.kernels.base.compile_kernel", compiled)
    monkeypatch.setattr(direct_bench, "compile_kernel", compiled)
    monkeypatch.setattr(timing, "records", records)
    monkeypatch.setattr(timing, "cupti_works", lambda: True)
    monkeypatch.setattr(timing, "L2_BYTES", 1 << 18)
    monkeypatch.setattr(direct_bench, "RING_BYTES", 1 << 18)

    def run(jobs, windows=0):
        board = direct.Board(tmp_path / "board")
        board["ready"] = len(jobs)
        more = {"device": "NVIDIA H200", "sms": 132, "deadline": time.time() + 600, "argv": [], "commit": "c"}
        more |= {"reps": 4, "again": 6, "sustained": windows, "chunk": 2, "threads": 2}
        more |= {"jobs": [job.to_json() for job in jobs]}
        (tmp_path / "todo").write_text(json.dumps(more))
        assert direct_worker.work(tmp_path / "todo", board, tmp_path / "rows") == 0
        lines = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
        assert lines[0]["head"]["commit"] == "c"
        return {line.get("case", "sustained"): line for line in lines if {"case", "sustained"} & line.keys()}

    return run


CASES = (Dense(128, 192, 64), Dense(64, 128, 256, "tn", (2,)), Dense(64, 100, 64))


def test_a_worker_writes_a_row_a_product(worker):
    jobs = [direct.plan(case, H200, 3, 1) for case in CASES]
    jobs[1].skip[2] = "hang: nothing for 15 s"
    rows = worker(jobs)
    assert list(rows) == [case.name for case in CASES]
    first, second, third = rows.values()
    assert (first["xla_us"], first["xla_kernels"], first["failed"]) == (7.0, ["xla"], [])
    assert {row["us"] for row in first["configs"]} == {5.0}
    assert sorted(row["predicted_us"] for row in first["configs"]) == [round(x, 3) for x in sorted(jobs[0].predicted)]
    for row, job in ((first, jobs[0]), (second, jobs[1])):
        for config in row["configs"]:
            fields = {name: value for name, value in config.items() if not name.endswith("us")}
            assert dataclasses.asdict(cutjax.Config(**fields)) in job.configs
    (failed,) = second["failed"]
    assert failed["why"] == "hang: nothing for 15 s"
    assert cutjax.Config(**failed["config"]) == cutjax.Config(**jobs[1].configs[2])
    assert second["batch"] == [2]
    measured = [len(row["configs"]) + len(row["failed"]) for row in rows.values()]
    assert measured == [len(job.configs) for job in jobs]
    assert {row["us"] for row in third["configs"]} == {7.0}  # rows of 200 bytes: copied first, by JAX
    assert rows == worker(jobs)  # nothing is measured twice


def test_final_measurements_time_what_was_chosen_again(worker, monkeypatch, tmp_path, kernels_run):
    """Kernels take 5 us, XLA 7: the model's choice is a kernel, XLA, and one that is wrong."""
    monkeypatch.setattr(sustained, "LEAST_US", 6.0)
    monkeypatch.setattr(sustained, "WINDOW_S", 0.01)
    monkeypatch.setattr(sustained, "HEAT_S", 0.01)
    monkeypatch.setattr(direct_worker, "LONG_US", 6.0)
    monkeypatch.setattr(direct_worker, "WINDOW_SECONDS", 0.001)
    held: list[dict] = []
    of_windows = direct_worker._held
    monkeypatch.setattr(direct_worker, "_held", lambda *args: (held.append(args[-1]), of_windows(*args), args[-1])[2])
    configs = []

    def ours(layout, config):
        configs.append(cutjax.Config(**config))
        return lambda a, b: cutjax.gemm(a, b, layout=layout, backend="xla")

    monkeypatch.setattr(sustained, "ours", ours)
    jobs = [direct.plan_final(case, H200, 2) for case in (Dense(256, 192, 64), CASES[1], Dense(256, 128, 64))]
    assert [len(job.configs) for job in jobs] == [2, 2, 2]
    assert direct.Job.from_json(json.loads(json.dumps(jobs[0].to_json()))) == jobs[0]
    jobs[1].untuned |= {"place": -1, "predicted_us": None, "predicted_xla_us": 4.0}
    jobs[2].skip[jobs[2].untuned["place"]] = "hang: nothing for 15 s"
    lines = worker(jobs, windows=1)
    picked = [[lines[job.case.name]["final"][name]["us"] for name in ("xla", "untuned", "tuned")] for job in jobs]
    assert picked == [[7.0, 5.0, 5.0], [7.0, 7.0, 5.0], [7.0, None, 5.0]]
    assert lines["sustained"]["sustained"] == jobs[0].case.name
    assert min(lines["sustained"][f"{name}_us"] for name in sustained.NAMES) > 0
    assert configs[0] == cutjax.Config(**jobs[0].configs[0])
    rows = final.write(tmp_path / "rows", tmp_path / "final.json", {"suite": "models", "salts": ["x"]})
    assert [row.ratios["xla, tuned"] for row in rows] == [1.4] * 3
    assert [row.ratios.get("xla") for row in rows] == [1.4, 1.0, None]
    assert [row.failure for row in rows] == ["", "", "hang: nothing for 15 s"]
    assert (rows[1].kernel, rows[1].figures["untuned"]["predicted_xla_us"]) == ("XLA", 4.0)
    assert set(rows[0].figures["sustained"]) == set(sustained.NAMES)
    assert any(line.startswith("| our kernels alone | 2 | 1.400 |") for line in final.summary(rows))
    content, read = report.read(tmp_path / "final.json")
    assert (content["op"], content["commit"], content["salts"], read[0].ratios) == (
        "products",
        "c",
        ["x"],
        rows[0].ratios,
    )
    worker(jobs, windows=1)
    assert (tmp_path / "rows").read_text().count('"sustained"') == 1  # nothing is measured twice


def test_sustained_products_are_spread_over_the_list():
    assert sustained.spread(range(10), 3) == [0, 3, 6]
    assert sustained.spread(range(2), 3) == [0, 1]


def test_calls_of_several_kernels_with_an_end_in_jax(worker, monkeypatch):
    case = Dense(128, 192, 1024)
    parts = jax.ShapeDtypeStruct((3, case.m, case.n), jnp.float32)

    def split(self):
        launch = self._launch(fake_cubin(b"split"))
        return Call((launch, launch), (parts,), lambda xs, _: [xs[0].sum(0).astype(jnp.bfloat16)])

    monkeypatch.setattr(sm90_kernel.Kernel, "call", split)
    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0)])
    divided = [dataclasses.asdict(cutjax.Config(128, bn, splits=3)) for bn in (64, 128)]
    (row,) = worker([direct.Job(case, divided, [6.0, 6.0])]).values()
    assert [(config["us"], config["finish_us"]) for config in row["configs"]] == [(12.0, 2.0)] * 2


def test_a_failure_of_the_device_is_of_one_config(worker, fake, monkeypatch):
    job = direct.plan(CASES[0], H200, 3, 0)
    check = direct_bench.Bench.check
    second = cutjax.Config(**job.configs[1])

    def failing(self, entry, *args):
        if entry.place == 1:
            fake.fail("cuLaunchKernelEx", 1)
        return "wrong: very" if entry.place == 2 else check(self, entry, *args)

    monkeypatch.setattr(direct_bench.Bench, "check", failing)
    (row,) = worker([job]).values()
    assert len(row["configs"]) == len(job.configs) - 2
    assert [failed["why"] for failed in row["failed"]] == [
        "CudaError: cuLaunchKernelEx: CUDA_ERROR_FAKE (1)",
        "wrong: very",
    ]
    assert cutjax.Config(**row["failed"][0]["config"]) == second


WORKER = """
import json, os, pathlib, sys, time
sys.path.insert(0, "{root}")
from benchmarks.direct import CHECK, TIME, Board
todo, board = sys.argv[1:]
board = Board(pathlib.Path(board))
for i, skip in enumerate(json.loads(pathlib.Path(todo).read_text())):
    for config in range(3):
        if str(config) not in skip:
            board.mark(i, config, CHECK)
            if (i, config) == (0, 1):
                time.sleep(3600)
            if (i, config) == (1, 2):
                os._exit(3)
"""


def test_the_watch_survives_a_hang_and_a_crash(tmp_path, monkeypatch):
    jobs = [direct.Job(case, [{}] * 3, [1.0] * 3) for case in CASES]
    board, todo = direct.Board(tmp_path / "board"), tmp_path / "todo"
    monkeypatch.setitem(direct.SILENCE_S, direct.CHECK, 3)
    script = WORKER.format(root=direct.pathlib.Path(direct.__file__).parent.parent)
    direct.watch(
        jobs,
        board,
        lambda: todo.write_text(json.dumps([job.skip for job in jobs])),
        [sys.executable, "-c", script, str(todo), str(tmp_path / "board")],
        time.time() + 600,
    )
    assert jobs[0].skip == {1: "hang: nothing for 3 s"}
    assert jobs[1].skip == {2: "the process ended with status 3"}
    assert jobs[2].skip == {}
