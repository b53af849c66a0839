"""A clock for tests of benchmarks/, as much of other libraries as they ask for, and a machine made up."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from benchmarks import measure, suite, timing
from benchmarks.ops import models
from benchmarks.record import Roofline, Row

ENVIRONMENT = {
    "device": "made up",
    "driver": "1",
    "versions": {"jax": "0", "jaxlib": "0", "plugin": "0", "cutjax": "0", "nvrtc": "0", "cublas": "0"},
    "commit": "0123456789",
    "date": "2000-01-01T00:00:00+00:00",
}
ROOFLINE = Roofline(800, 4000)


def fake_clock(monkeypatch):
    """Two sets of inputs; every function runs once and takes as long as its name."""

    def fake(functions, sets, reps, method):
        for function in functions.values():
            jax.block_until_ready(function(*sets[0]))
        return {name: timing.Timing((float(len(name)),) * reps, (name,), method) for name in functions}

    monkeypatch.setattr(timing, "input_sets", lambda make: [make(0), make(1)])
    monkeypatch.setattr(timing, "measure", fake)
    monkeypatch.setattr(measure, "roofline", lambda method: ROOFLINE)


def measured(s: suite.Suite, case: Any, **fields: Any) -> list[Row]:
    """The rows of a case."""
    return measure.measure_case(s, case, suite.Run(**{"method": "cupti", "roofline": ROOFLINE, **fields}))


def final_lines(count: int = 12) -> list[dict[str, Any]]:
    """Lines of a final measurement of benchmarks/direct.py: products of models whose choices take turns to be the same.

    XLA takes twice the roofline. The cost model's choices are a kernel at 1.25 of that, XLA, and a kernel at 0.8; the
    tuned ones a kernel at 0.8 of it, XLA, and that kernel.
    """
    lines: list[dict[str, Any]] = [{"head": {**ENVIRONMENT, "device": "NVIDIA H200", "sms": 132, "argv": []}}]
    for i, case in enumerate(models.sample(count, "made up")):
        problem = case.problem
        floor_us = 1e6 * max(
            problem.flops / problem.device.peak(problem.a.dtype), problem.bytes / problem.device.bytes_per_second
        )
        xla = {"config": "XLA", "kernel": "nvjet", "us": 2 * floor_us, "iqr_us": 0.1}
        slow = {"config": {}, "kernel": "slow", "us": 2.5 * floor_us, "iqr_us": 0.1}
        fast = {"config": {"bn": 128}, "kernel": "fast", "us": 1.6 * floor_us, "iqr_us": 0.1}
        untuned, tuned, kernel = ((slow, fast, fast), (xla, xla, slow), (fast, fast, fast))[i % 3]
        untuned = {**untuned, "predicted_us": floor_us, "predicted_xla_us": floor_us}
        fields = {field: getattr(case, field) for field in ("m", "n", "k", "layout", "dtype", "of")}
        fields |= {"case": case.name, "batch": list(case.batch), "tags": list(case.tags), "failed": []}
        lines.append({**fields, "final": {"xla": xla, "untuned": untuned, "tuned": tuned, "kernel": kernel}})
        if xla["us"] > 100:
            windows = {"xla_us": 2.2 * floor_us, "untuned_us": 2 * floor_us, "tuned_us": 2 * floor_us}
            lines.append({"sustained": case.name, "window_s": 0.5, **windows})
    return lines


class FakeTorch:
    """As much of torch as benchmarks.peers asks for, by jax."""

    int32 = np.int32

    def __init__(self):
        self.cuda = types.SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
        self.nn = types.SimpleNamespace(functional=types.SimpleNamespace())

    def tensor(self, values, **_):
        return np.asarray(values, np.int32)

    def from_dlpack(self, x):
        return np.asarray(x)

    def _grouped_mm(self, a, b, offs):
        sizes = jnp.asarray(np.diff(offs, prepend=0))
        assert offs.dtype == np.int32
        if b.ndim == 3:
            out = cutjax.grouped_gemm(jnp.asarray(a), jnp.asarray(b), sizes, backend="xla")
        else:
            out = cutjax.grouped_outer(jnp.asarray(a.T), jnp.asarray(b), sizes, backend="xla")
        return types.SimpleNamespace(contiguous=lambda: out)


@dataclasses.dataclass(frozen=True)
class FakeRaggedDot:
    """As much of tokamax's implementations as benchmarks.peers asks for, by XLA; "mosaic_gpu" refuses."""

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config_cls = dict

    def replace(self, config):
        assert all(isinstance(size, int) for size in config.values())
        return FakeRaggedDot(self.name, config)

    def __call__(self, a, b, *, group_sizes, ragged_dot_dimension_numbers):
        if self.name == "mosaic_gpu":
            raise NotImplementedError("Not supported on cpu.")
        assert self.config["block_m"] in (64, 128, 256)
        return jax.lax.ragged_dot_general(a, b, group_sizes, ragged_dot_dimension_numbers)
