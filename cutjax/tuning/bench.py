"""``python -m cutjax bench``: the cases on this GPU, beside XLA, in a file to send that a later call goes on with."""

from __future__ import annotations

import datetime
import functools
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from cutjax.binding import lowering
from cutjax.kernels.choose import Choice, candidates, choose
from cutjax.kernels.device import device_of
from cutjax.kernels.keys import key
from cutjax.runtime import compiler
from cutjax.runtime.backends import use_backend
from cutjax.tuning import autotune, device_report, measure
from cutjax.tuning.cases import CASES, Case
from cutjax.tuning.progress import Progress

MINUTES = 5.0
FILE = "cutjax-report.json"
CANDIDATES = 4  # kernels of a product: what the model prefers, and whether it is right to
SECONDS = 3.0  # of rounds of a case, at least one of each kernel
COPIED = 1 << 26  # elements of float32
UNENDED = "it ended the process, or was ended with it"
# What must be equal for a file to be gone on with.
_SAME = ("device", "arch", "sms", "driver", "versions", "commit")
_SMI = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")


def run(path: pathlib.Path, minutes: float = MINUTES, progress: bool = True) -> dict[str, Any]:
    """Measures the cases that a file does not have yet; writes it anew after each, and returns its content.

    No case begins after so many minutes. What fails is a row with the reason. A case that ended an earlier process, as
    a kernel that never ends does, is not tried again.

    Raises:
      RuntimeError: if there is no NVIDIA GPU or no compiler, and where the GPU computes nothing more.
      ValueError: if there is a file of that name that is no report.
      OSError: if the file cannot be written.
    """
    autotune.require_device()
    end = time.monotonic() + 60 * minutes
    content = _begun(path)
    _write(path, content)  # now, not after minutes of measuring
    done = {row["case"] for row in content["rows"]}
    todo = [(name, measured) for name, measured in _measurements().items() if name not in done]
    with Progress(len(todo), progress) as shown:
        for name, measured in todo:
            if time.monotonic() >= end:
                break
            shown.step(name)
            _write(path, {**content, "begun": name})
            try:
                content["rows"].append(measured())
            except KeyboardInterrupt:  # no fault of the case
                _write(path, content)
                raise
            _write(path, content)
            if "error" in content["rows"][-1]:
                _require_life(path)
    return content


def left(content: Mapping[str, Any]) -> int:
    """Returns the number of cases that a report has no row of."""
    return len(_measurements().keys() - {row["case"] for row in content["rows"]})


def _measurements() -> dict[str, Callable[[], dict[str, Any]]]:
    return {"copy": _copy_row} | {case.name: functools.partial(_row, case) for case in CASES}


def _begun(path: pathlib.Path) -> dict[str, Any]:
    """Returns the content to go on with: the file's, or none yet; one of other conditions is set aside."""
    fresh = {**provenance(), "rows": []}
    if not path.exists():
        return fresh
    content = device_report.read(path)
    changed = [name for name in _SAME if content.get(name) != fresh[name]]
    if changed:
        aside = path.with_name(path.name + ".old")
        path.replace(aside)
        told = "; ".join(f"{name} was {content.get(name)}, is {fresh[name]}" for name in changed)
        print(f"{path} is begun anew, and what was there is {aside.name}: {told}", file=sys.stderr)
        return fresh
    if name := content.pop("begun", ""):
        content["rows"].append({"case": name, "error": UNENDED})
    return content


def _require_life(path: pathlib.Path) -> None:
    """Raises a RuntimeError if the device computes nothing more in this process, as after an illegal address."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception as error:
        why = f"the GPU computes nothing more in this process ({measure.reason(error)[:80]})"
        raise RuntimeError(f"{why}; what was measured is in {path}, and the same command goes on after it") from error


def _write(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, path)


# The conditions.


def provenance() -> dict[str, Any]:
    """Returns the conditions of the measurement: the device, its driver, the versions, the commit, clocks and power."""
    import cutjax

    target = lowering.target()
    root = pathlib.Path(cutjax.__file__).parents[1]
    describe = ("git", "-C", str(root), "describe", "--match=", "--always", "--abbrev=40", "--dirty")
    commit = _output(*describe) if (root / ".git").exists() else []
    gpus = [dict(zip(_SMI, line.split(", "), strict=False)) for line in _smi()]
    versions = {"cutjax": cutjax.__version__, "jax": jax.__version__, "python": platform.python_version()}
    return {
        "format": device_report.FORMAT,
        "device": target.kind,
        "arch": target.arch,
        "sms": device_of(target).sms,
        "driver": gpus[0]["driver_version"] if gpus else None,
        "versions": {**versions, "compiler": compiler.description().partition(",")[0]},
        "commit": commit[0] if commit else None,
        "gpus": gpus,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _smi() -> list[str]:
    return _output("nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader")


def _output(*command: str) -> list[str]:
    """Returns the lines that a program prints; none where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def where_to_send() -> str:
    """Returns a sentence that says where to send a report: to the tracker that the package's metadata names."""
    try:
        urls = metadata.metadata("cutjax").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # a copy that was not installed
        urls = []
    found = dict(url.split(", ", 1) for url in urls)
    tracker = found.get("Issues") or found.get("Repository")
    return f"please attach it to an issue at {tracker}" if tracker else "please attach it to an issue of the project"


# The measurements.


def _copy_row() -> dict[str, Any]:
    inputs = measure.Inputs(lambda seed, integers: [jnp.ones(COPIED, jnp.float32)], l2_bytes=0)
    times = measure.times({autotune.XLA: lambda x: [x + 1]}, inputs, lambda x: [x + 1], measure.equal)
    return {"case": "copy", "bytes": 8 * COPIED, "xla_us": times.us.get(autotune.XLA), "us": {}, "dropped": {}}


def _row(case: Case) -> dict[str, Any]:
    with jax.enable_x64(case.x64):
        try:
            return {"case": case.name, **_measured(case)}
        except Exception as error:  # this case's: out of memory, or a dtype that XLA does not multiply here
            return {"case": case.name, "error": _public(measure.reason(error))}


def _public(text: str) -> str:
    """Returns a text without the names of files, which tell of a machine and of who uses it."""
    return re.sub(r"(?<![\w.])~?(/[\w.+@~-]+){2,}/?", "(a file)", text)


def _measured(case: Case) -> dict[str, Any]:
    before, strict = choices(case, "auto"), choices(case, "cuda")
    functions: dict[Any, measure.Function] = {autotune.XLA: _leaves(case.plain)}
    if len(strict) == 1:  # a kernel of each config; of several products, what "auto" makes of them
        found, told = _of_one(case, strict[0], before)
        functions |= found
    else:
        functions["auto"] = _leaves(case.ours)
        kernels = sum(choice.served for choice in before)
        told = {"runs": "auto" if kernels else autotune.XLA, "why": f"{kernels} of {len(before)} products by kernels"}
    inputs = measure.Inputs(case.inputs, device_of(lowering.target()).l2_bytes)
    reference, keep = _leaves(case.wide or case.plain), (autotune.XLA, told["runs"])
    times = measure.times(functions, inputs, reference, right(case), keep, (autotune.XLA,), SECONDS)
    return {
        **told,
        "us": {name: us for name, us in times.us.items() if name != autotune.XLA},
        "xla_us": times.us.get(autotune.XLA),
        "dropped": {name: _public(why) for name, why in times.dropped.items()},
    }


def right(case: Case) -> measure.Right:
    """Returns the check of a case's results."""
    return measure.equal if case.wide else measure.close if case.close else measure.near


def choices(case: Case, backend: str) -> list[Choice]:
    """Returns the choices for the products of a case, on the device that programs are lowered for."""
    target = lowering.target()
    found = [x.eqn for x in case.found(backend)]
    made = [lowering.choosers[x.primitive](*[y.aval for y in x.invars], target=target, **x.params) for x in found]
    return [choice for choice in made if isinstance(choice, Choice)]


def _of_one(case: Case, strict: Choice, before: list[Choice]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the kernels of a case that is one product, by name, and what a row tells of it beside times."""
    problem, runs = strict.problem, before[0] if len(before) == 1 else None
    configs = list(candidates(problem)[:CANDIDATES])
    configs += [x.config for x in (runs, strict) if x and x.config is not None and x.config not in configs]
    kernels = {config: choose(problem, config) for config in configs}
    functions = {choice.kernel: _pinned(case, config) for config, choice in kernels.items()}
    return functions if lowering.on_cuda() else {}, {
        **({"rate": case.rate} if case.rate else {}),
        **({} if strict.served else {"missing": "; ".join(strict.reasons)}),
        "problem": json.loads(key(problem)),
        "flops": problem.flops,
        "bytes": problem.bytes,
        "runs": runs.kernel if runs else autotune.XLA,
        "why": "; ".join(runs.reasons) if runs else "",
        "predicted_us": {choice.kernel: choice.time_us for choice in kernels.values()},
        "predicted_xla_us": runs.xla_us if runs else None,
    }


def _pinned(case: Case, config: Any) -> measure.Function:
    def function(*arrays: jax.Array) -> list[jax.Array]:
        with use_backend("cuda"):
            return jax.tree.leaves(case.ours(*arrays, config=config))

    return function


def _leaves(function: Callable[..., Any]) -> measure.Function:
    return lambda *arrays: jax.tree.leaves(function(*arrays))
