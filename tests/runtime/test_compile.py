"""NVRTC behind its two caches: what compiles, what is kept, what a failure says. Needs NVRTC, not a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings

import hypothesis
import pytest
from hypothesis import strategies as st

from cutjax.runtime import compiler, disk_cache, settings
from cutjax.runtime.compiler import CompileError, CompilerMissing, Resources, compile_kernel, compiler_missing

SOURCE = """#line 7 "family.cuh"
extern "C" __global__ void kernel(float* out) {
  __shared__ float tile[32];
  tile[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[31 - threadIdx.x];
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """A cache of its own for every test, on disk and in memory."""
    compiler.clear_memory()
    with settings.override(cache_dir=tmp_path / "cache", cache_bytes=2**30, dump_dir=None):
        yield tmp_path / "cache"
    compiler.clear_memory()


@pytest.fixture
def runs(monkeypatch):
    """The names of the kernels that NVRTC compiled."""
    names = []
    run = compiler._run_nvrtc

    def counting(nvrtc, source, name, arch, **kwargs):
        names.append(name)
        return run(nvrtc, source, name, arch, **kwargs)

    monkeypatch.setattr(compiler, "_run_nvrtc", counting)
    return names


def build(source=SOURCE, name="kernel_a", arch="sm_90a"):
    return compile_kernel(source, name=name, arch=arch)


def build_two():
    assert not build().cached
    assert not build(name="kernel_b").cached


def test_compiles():
    cubin = build()
    assert cubin.image.startswith(b"\x7fELF")
    assert b"kernel" in cubin.image
    registers = cubin.resources.registers
    assert registers is not None
    assert 0 < registers <= 32
    assert cubin.resources == Resources(registers, 0, 0, 0, 128)
    assert "sm_90a" in cubin.log
    assert "\0" not in cubin.log
    assert cubin.seconds > 0
    assert not cubin.cached


def test_memory_then_disk(runs, folder):
    first = build()
    second = build()
    assert second == dataclasses.replace(first, cached=True)
    compiler.clear_memory()
    assert build() == second  # log, resources and all
    assert runs == ["kernel_a"]
    assert len(list(folder.iterdir())) == 1


def test_compile_source_uses_no_cache(runs, folder):
    first = compiler.compile_source(SOURCE, name="kernel_a", arch="sm_90a")
    second = compiler.compile_source(SOURCE, name="kernel_a", arch="sm_90a")
    assert first.image == second.image
    assert not second.cached
    assert runs == ["kernel_a"] * 2
    assert not folder.exists()


def test_whatever_changes_the_kernel_is_in_the_key(runs, monkeypatch):
    build()
    build(name="kernel_b")
    build(arch="sm_80")
    build(SOURCE + "\n")
    monkeypatch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "--use_fast_math"))
    build()
    nvrtc = compiler._compiler()
    assert isinstance(nvrtc, compiler._Compiler)
    monkeypatch.setattr(compiler, "_compiler", lambda: dataclasses.replace(nvrtc, version="99.1"))
    assert not build().cached
    assert len(runs) == 6


def test_parts_of_the_key_do_not_run_together():
    assert compiler._key("ab", "c") != compiler._key("a", "bc")


@pytest.mark.parametrize("damage", ["truncated", "altered", "empty", "swapped"])
def test_damaged_entry_is_rebuilt(runs, folder, damage):
    good = build()
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[:-100])
    elif damage == "altered":
        data[-100] ^= 0xFF
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        build(SOURCE.replace("31 -", "30 -"), name="other")
        (other,) = set(folder.iterdir()) - {path}
        path.write_bytes(other.read_bytes())
    runs.clear()
    with compiler._lock:
        compiler._memory.clear()
    assert build().image == good.image
    assert runs == ["kernel_a"]
    compiler.clear_memory()
    assert build().cached  # the entry is whole again
    assert runs == ["kernel_a"]


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats()
JSON = st.recursive(NUMBERS | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8)
COUNTS = [field.name for field in dataclasses.fields(Resources)]
GOOD = {"resources": dict.fromkeys(COUNTS, 3), "log": "ptxas info", "seconds": 0.25}


@st.composite
def metadata(draw):
    """Any JSON, and what was right until a field of it was replaced, renamed, added or lost."""
    if draw(st.booleans()):
        return draw(JSON)
    value = {**GOOD, "resources": dict(GOOD["resources"])}
    for _ in range(draw(st.integers(0, 2))):
        place = (
            draw(st.sampled_from([value, value["resources"]])) if isinstance(value.get("resources"), dict) else value
        )
        name = draw(st.sampled_from([*GOOD, *COUNTS]))
        if draw(st.booleans()):
            place.pop(name, None)
        if draw(st.booleans()):
            place[name] = draw(JSON | st.just("\ud800") | st.just(10**400) | st.just(-1))
    return value


@hypothesis.given(metadata(), st.sampled_from([b"\x7fELF", b"cubin", b""]))
@hypothesis.example(GOOD, b"\x7fELF")
@hypothesis.example({**GOOD, "log": "\ud800"}, b"\x7fELF")
@hypothesis.example({**GOOD, "seconds": float("nan")}, b"\x7fELF")
@hypothesis.settings(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_an_entry_of_any_json_is_a_kernel_or_damage(tmp_path_factory, found, image):
    """With a digest that is right: another version wrote it, or it is not ours at all."""
    folder = tmp_path_factory.mktemp("cache")
    key = compiler._key("13.0", "sm_90a", "kernel_a", SOURCE)
    folder.joinpath(f"{key}.kernel").write_bytes(disk_cache._encode(key, json.dumps(found).encode(), image))
    compiled = compiler.Cubin(b"\x7fELF new", Resources(1, 0, 0, 0, 0), "log", 0.5, cached=False)
    with (
        pytest.MonkeyPatch.context() as patch,
        settings.override(cache_dir=folder, cache_bytes=2**30, dump_dir=folder / "dump"),
    ):
        patch.setattr(compiler, "_compiler", lambda: compiler._Compiler(None, "13.0"))
        patch.setattr(compiler, "_run_nvrtc", lambda *_: compiled)
        with compiler._lock:
            compiler._memory.clear()
        cubin = build()
        with compiler._lock:
            compiler._memory.clear()
        again = build()  # the entry is whole
    assert again == dataclasses.replace(cubin, cached=True)
    if cubin.cached:
        assert {"resources": dataclasses.asdict(cubin.resources), "log": cubin.log, "seconds": cubin.seconds} == found
        assert cubin.image == image
    else:
        assert cubin == compiled
    assert len(list(folder.glob("*.kernel"))) == 1


def test_unwritable_cache_compiles_with_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with settings.override(cache_dir=tmp_path / "file" / "cache"):
        with pytest.warns(RuntimeWarning, match="cannot be used") as record:
            build_two()
        assert len(record) == 1


def test_world_writable_cache_is_refused_with_one_warning(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="is refused: others can write to it") as record:
        build_two()
    assert len(record) == 1
    assert list(folder.iterdir()) == []


def test_size_zero_turns_the_disk_cache_off(folder):
    with settings.override(cache_bytes=0):
        build()
    assert not folder.exists()


def test_default_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    disk_cache._at.cache_clear()
    with settings.override(cache_dir=None):
        build()
    assert len(list((tmp_path / "xdg" / "cutjax").iterdir())) == 1
    disk_cache._at.cache_clear()


def test_memory_is_bounded(runs, monkeypatch):
    monkeypatch.setattr(compiler, "_MEMORY_ENTRIES", 2)
    with settings.override(cache_bytes=0):
        for name in ("a", "b", "a", "c", "a", "b"):
            build(name=name)
    assert runs == ["a", "b", "c", "b"]


def test_threads_that_want_one_kernel_compile_it_once(runs):
    names = [f"kernel_{index % 3}" for index in range(12)]
    barrier = threading.Barrier(len(names))
    images: dict[int, bytes] = {}

    def work(index):
        barrier.wait()
        images[index] = build(SOURCE.replace("31", str(31 - index % 3)), name=names[index]).image

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(names))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(runs) == ["kernel_0", "kernel_1", "kernel_2"]
    assert len(images) == 12
    assert all(images[index] == images[index % 3] for index in images)
    assert len(set(images.values())) == 3
    assert not compiler._pending


def test_threads_share_one_failure(runs):
    barrier = threading.Barrier(4)
    errors = []

    def work():
        barrier.wait()
        with pytest.raises(CompileError) as caught:
            build("wrong")
        errors.append(caught.value)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert not compiler._pending
    assert not build().cached  # a failure leaves nothing behind


def test_many_processes(folder):
    program = (
        "import hashlib, sys, warnings; warnings.simplefilter('error')\n"
        "from cutjax.runtime import compiler\n"
        "cubins = [compiler.compile_kernel(sys.argv[1], name=f'k{i}', arch='sm_90a') for i in range(3)]\n"
        "print([hashlib.sha256(cubin.image).hexdigest() for cubin in cubins])"
    )
    environ = {**os.environ, "CUTJAX_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", program, SOURCE]
    processes = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=1800) for process in processes]
    assert [process.returncode for process in processes] == [0] * 2, outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(list(folder.iterdir())) == 3
    assert all(build(name=f"k{index}").cached for index in range(3))


def test_error_shows_the_place():
    source = SOURCE.replace("tile[31 -", "tiles[31 -")
    with pytest.raises(CompileError, match=r"kernel_a: NVRTC cannot compile it for sm_90a") as caught:
        build(source)
    assert 'family.cuh(11): error: identifier "tiles" is undefined' in str(caught.value)
    assert 'family.cuh(11): error: identifier "tiles" is undefined' in caught.value.log
    assert caught.value.source == source


def test_error_without_line_directive_shows_the_kernels_name():
    with pytest.raises(CompileError, match=r"kernel_a\.cu\(2\): error"):
        build("\nint f() { return x; }")


def test_error_in_inline_ptx_shows_the_place():
    with pytest.raises(CompileError, match=r"family.cuh\(10\): `foo\.bar %r\d+;`: ptxas .*Not a name of any known"):
        build(SOURCE.replace("__syncthreads();", 'asm volatile("foo.bar %0;" :: "r"(threadIdx.x));'))


def test_unknown_architecture():
    with pytest.raises(CompileError, match=r"for sm_1x: NVRTC_ERROR_INVALID_OPTION\n.*invalid value for --gpu-arch"):
        build(arch="sm_1x")


def test_error_pickles():
    with pytest.raises(CompileError) as caught:
        build("wrong")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.log, copy.source) == (str(caught.value), caught.value.log, "wrong")


def test_warning_is_in_the_log():
    log = build(SOURCE.replace("__shared__", "int unused; __shared__")).log
    assert 'family.cuh(8): warning #177-D: variable "unused" was declared but never referenced' in log
    assert "warning" not in build().log


def test_spills_are_reported():
    source = """extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* out, int n) {
      float values[64];
      #pragma unroll
      for (int i = 0; i < 64; ++i) values[i] = out[i * n];
      for (int j = 0; j < n; ++j) {
        #pragma unroll
        for (int i = 0; i < 64; ++i) values[i] = values[i] * values[(i + 1) % 64] + j;
      }
      #pragma unroll
      for (int i = 0; i < 64; ++i) out[i * n] = values[i];
    }"""
    resources = dataclasses.asdict(build(source).resources)
    assert resources["registers"] == 32
    assert resources["spill_store_bytes"] > 0
    assert resources["spill_load_bytes"] > 0
    assert resources["stack_bytes"] > 0
    assert resources["shared_bytes"] == 0


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", Resources(None, None, None, None, None)),
        ("ptxas info    : Used 40 registers, 360 bytes cmem[0]", Resources(40, None, None, None, 0)),
        (
            "ptxas info    : Function properties for k\n"
            "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
            "ptxas info    : Used 168 registers, used 9 barriers, 8 bytes cumulative stack size, 1024+16 bytes smem\n"
            "ptxas info    : Function properties for helper\n"
            "    0 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads\n"
            "ptxas info    : Used 12 registers, used 1 barriers, 128 bytes smem, 4 bytes cmem[2]",
            Resources(168, 5, 14, 8, 1024),
        ),
    ],
)
def test_resources_parse(log, expected):
    assert Resources.parse(log) == expected


def test_dump(tmp_path):
    with settings.override(dump_dir=tmp_path / "dump" / "here"):
        cubin = build()
        with pytest.raises(CompileError):
            build("wrong", name="bad/../kernel")
    folder = tmp_path / "dump" / "here"
    names = ["bad_.._kernel.cu", "bad_.._kernel.txt", "kernel_a.cu", "kernel_a.cubin", "kernel_a.txt"]
    assert sorted(os.listdir(folder)) == names
    assert (folder / "kernel_a.cu").read_text() == SOURCE
    assert (folder / "kernel_a.cubin").read_bytes() == cubin.image
    report = (folder / "kernel_a.txt").read_text()
    assert "kernel_a for sm_90a" in report
    assert f"registers: {cubin.resources.registers}" in report
    assert cubin.log in report
    assert "error" in (folder / "bad_.._kernel.txt").read_text()


def test_dump_from_a_warm_disk_cache(tmp_path):
    build()
    compiler.clear_memory()
    with settings.override(dump_dir=tmp_path / "dump"):
        assert build().cached
    assert len(os.listdir(tmp_path / "dump")) == 3


def test_unwritable_dump_folder_warns_once(tmp_path):
    (tmp_path / "file").write_text("")
    with settings.override(dump_dir=tmp_path / "file"):
        with pytest.warns(RuntimeWarning, match="CUTJAX_DUMP_DIR=.* cannot be written") as record:
            build_two()
        assert len(record) == 1


def test_not_missing_here():
    assert compiler_missing() is None


@pytest.mark.parametrize("module", ["cuda.pathfinder", "cuda.bindings.nvrtc"])
def test_missing_python_package(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    reason = compiler_missing()
    assert reason is not None
    assert 'pip install "cutjax[cuda13]"' in reason
    assert module in reason
    with pytest.raises(CompilerMissing):
        compiler.compile_source(SOURCE, name="kernel_a", arch="sm_90a")
    with pytest.raises(ImportError) as caught:
        build()
    assert isinstance(caught.value, CompilerMissing)
    assert str(caught.value) == reason


def test_missing_library(monkeypatch):
    import cuda.pathfinder

    def load(name):
        raise cuda.pathfinder.DynamicLibNotFoundError(f'Failure finding "lib{name}.so":\n  no such file')

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", load)
    with pytest.raises(CompilerMissing, match=r'cannot be loaded: pip install "cutjax\[cuda13\]" \(Failure finding'):
        build()
    assert "\n" not in str(compiler_missing())


def test_library_too_old(monkeypatch):
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (0, 11, 8))
    assert "needs NVRTC 12 or newer and found 11.8 at /" in str(compiler_missing())


def test_import_loads_no_cuda_module():
    program = (
        "import json, sys\nimport cutjax.runtime.compiler\n"
        "print(json.dumps([name for name in sys.modules if name.startswith(('cuda.', 'platformdirs'))]))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == []
