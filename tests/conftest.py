"""Tests run on 8 virtual CPU devices unless ``-m gpu`` asks for the real one; promotion is strict; no deadlines."""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile
from collections.abc import Iterator

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

jax.config.update("jax_numpy_dtype_promotion", "strict")

# By default an example of over 200 ms fails, and so do examples that are slow to draw: on a busy machine, any.
hypothesis.settings.register_profile("cutjax", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("cutjax")


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
        gc.set_threshold(100_000, 20, 50)


@pytest.fixture
def compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering for CUDA names kernels and compiles none."""
    from cutjax.kernels import base
    from cutjax.runtime import compiler

    cubin = compiler.Cubin(b"cubin", compiler.Resources(None, None, None, None, None), "", 0.0, False)
    monkeypatch.setattr(base, "compile_kernel", lambda *args, **kwargs: cubin)


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under "auto" a kernel runs wherever one serves, however small the product: nobody knows XLA's time."""
    from cutjax.kernels import choose, xla

    monkeypatch.setattr(xla, "time_us", lambda problem: None)
    choose._choose.cache_clear()
    yield
    choose._choose.cache_clear()
