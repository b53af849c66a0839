"""Tests run on 8 virtual CPU devices unless ``-m gpu`` asks for the real one; promotion is strict; no deadlines.

``--by-file`` prints the processor seconds of each file, which are the same on a busy machine, nearly.
"""

from __future__ import annotations

import collections
import gc
import hashlib
import math
import os
import pathlib
import tempfile
from collections.abc import Generator, Iterator
from typing import Any

FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()

# One for all workers and runs of this user: a kernel is compiled once, and never into the user's own cache.
_cache = pathlib.Path(tempfile.gettempdir()) / f"cutjax-tests-{os.getuid()}"
os.environ.setdefault("CUTJAX_CACHE_DIR", str(_cache))
# Never what this user has tuned: tests that tune name a folder of their own.
os.environ["CUTJAX_TUNING_DIR"] = str(_cache / "tuning")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from cutjax.kernels import remembered  # noqa: E402

remembered.ON = False  # tests change what predicts

jax.config.update("jax_numpy_dtype_promotion", "strict")
_START = pytest.StashKey[float]()
_file: pathlib.Path | None = None

# By default an example of over 200 ms fails, and so do examples that are slow to draw: on a busy machine, any.
hypothesis.settings.register_profile("cutjax", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("cutjax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--by-file", action="store_true", help="print the processor seconds of each file")
    parser.addoption("--share", type=int, default=1, help="run one in so many of a test's parameter sets")
    parser.addoption("--site", default="build/site", help="the built documentation, for the tests marked browser")


def _processor_s() -> float:
    return sum(os.times()[:4])  # of this process and of those it started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    global _file
    item.stash[_START] = _processor_s()
    if item.path != _file:
        _file = item.path
        # A file's programs serve no other, and those of all files are gigabytes, which each search for leaks goes over.
        jax.clear_caches()
        gc.collect()
        gc.freeze()  # what remains, modules above all, is not searched again: that took a third of a second a file
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("processor_s", _processor_s() - item.stash[_START]))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--by-file"):
        return
    seconds: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.stats.get("", []):
        seconds[report.nodeid.split("::")[0]] += dict(report.user_properties).get("processor_s", 0)
    for file, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f} s  {file}")
    terminalreporter.write_line(f"{sum(seconds.values()):8.1f} s in all")


def pytest_configure(config: pytest.Config) -> None:
    if "not gpu" in (config.getoption("markexpr") or "not gpu"):
        jax.config.update("jax_platforms", "cpu")
        # Thousands of small programs, each run once: compiling is what takes the time. Read when the backend starts.
        os.environ["XLA_FLAGS"] += (
            " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
            " --xla_cpu_parallel_codegen_split_count=1"
        )
        if jax.__version_info__ < (0, 11):  # later ones have no such flag; MLIR doubles the time of compiling a loop
            os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
        # Traces are many small objects that stay: looking for cycles among them took a sixth of all time.
        gc.set_threshold(500_000, 20, 50)


def _tree() -> bytes:
    """A digest of the sources of the package and its tests, which tells one tree from another."""
    root, digest = pathlib.Path(__file__).parent.parent, hashlib.sha256()
    for folder in ("cutjax", "ffi", "tests"):
        for path in sorted((root / folder).rglob("*.*")):
            if path.suffix in (".py", ".cuh", ".cc", ".h"):
                digest.update(path.read_bytes())
    return digest.digest()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out most parameter sets of each test: another tree has others.

    What fails is repeated by its name; in one tree it is always the same that run.
    """
    share = config.getoption("--share")
    if share <= 1:
        return
    tree, of_test = _tree(), collections.defaultdict(list)
    for item in items:
        of_test[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for sets in of_test.values():
        drawn = sorted(sets, key=lambda item: hashlib.sha256(tree + item.nodeid.encode()).digest())
        chosen.update(drawn[: math.ceil(len(sets) / share)])
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Half of all tests need a GPU: without one each worker would import them, only to leave them out."""
    left_out = "not gpu" in (config.getoption("markexpr") or "not gpu")
    return True if left_out and collection_path == pathlib.Path(__file__).parent / "gpu" else None


@pytest.fixture(autouse=True)
def compile_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lowering for CUDA names kernels and compiles none, but where a test is marked ``compiles`` or ``gpu``.

    NVRTC takes half a second for each, and nothing looks at what it makes. Tests of kernels compile and check them by
    themselves.
    """
    if any(request.node.get_closest_marker(name) for name in ("compiles", "gpu")):
        yield
        return
    from cutjax.kernels import base, entry, gather
    from cutjax.kernels.network import kernel as network
    from cutjax.runtime import compiler

    # Without resources: a test that reads them has to be marked.
    cubin = compiler.Cubin(b"cubin", None, "", 0.0, False)  # pyright: ignore[reportArgumentType]
    with pytest.MonkeyPatch.context() as patch:  # not the fixture, which would then end after a test's own
        for module in (base, gather, entry, network):
            patch.setattr(module, "compile_kernel", lambda *args, **kwargs: cubin)
        yield


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under "auto" a kernel runs wherever one serves, however small the product: nobody knows XLA's time."""
    from cutjax.kernels import choose, xla

    monkeypatch.setattr(xla, "time_us", lambda problem: None)
    choose._choose.cache_clear()
    yield
    choose._choose.cache_clear()


@pytest.fixture
def kernels_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every product of a fused program that has a kernel becomes one."""
    from cutjax.fusion import price

    monkeypatch.setattr(price, "LEAD", 0.0)
    price._of_problem.cache_clear()
    yield
    price._of_problem.cache_clear()
