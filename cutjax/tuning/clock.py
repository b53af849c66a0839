"""Times of kernels by the device's own clock, as JAX's profiler reads it."""

from __future__ import annotations

import pathlib
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax

_one_at_a_time = threading.Lock()  # the profiler's


def spans(run: Callable[[], None]) -> dict[str, list[float]]:
    """Calls a function under a trace of the device alone, which costs some 25 ms.

    Args:
      run: returns when what it started on the device is done.

    Returns:
      The microseconds of each kernel by the name of its HLO module, in the order in which they began. Empty where the
      device was not traced: another trace of the process is under way (``run`` is not called then), or there is no
      CUPTI.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False
    with _one_at_a_time, tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except Exception:  # the user's own is under way
            return {}
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        found: dict[str, list[float]] = {}
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            found |= read(jax.profiler.ProfileData.from_file(str(path)))
        return found


def read(trace: Any) -> dict[str, list[float]]:
    """Returns the microseconds of each kernel in a trace, a ``ProfileData``, by HLO module, in their order."""
    kernels: list[tuple[float, float, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of how the profiler's own types are made
        for plane in trace.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):  # others may hold sums of what is on streams
                    of_line = [(x.start_ns, x.duration_ns, dict(x.stats).get("hlo_module")) for x in line.events]
                    kernels += [(start, ns, str(module)) for start, ns, module in of_line if module]
    found: dict[str, list[float]] = {}
    for _, ns, module in sorted(kernels):
        found.setdefault(module, []).append(ns / 1e3)
    return found
