"""``python -m cutjax bench --report``: a fixed sample of products on this GPU, in a file to send; and what it tells."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cutjax.binding import lowering, walk
from cutjax.kernels.choose import Choice, candidates, choose
from cutjax.kernels.device import Device, device_of, device_of_kind
from cutjax.kernels.keys import key
from cutjax.ops.gemm import gemm
from cutjax.ops.grouped import grouped_gemm
from cutjax.runtime import compiler
from cutjax.tuning import autotune, measure
from cutjax.tuning.progress import Progress
from cutjax.tuning.report import number, table

FORMAT = 1
CANDIDATES = 4  # kernels of a product: what the model prefers, and whether it is right to
COPIED = 1 << 26  # elements of float32
FILE = "cutjax-report.json"
_SMI = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of the sample.

    Attributes:
      rate: the name that a Device has for its rate.
      dtype: the operands'.
      sizes: m, n, k.
      batch: matrices in a batch; 0 for no batch axis.
      groups: of rows, with weights of their own; 0 for a plain product.
      out: the result's dtype, by default the operands'.
      precision: as in ``cutjax.gemm``.
    """

    rate: str
    dtype: str
    sizes: tuple[int, int, int]
    batch: int = 0
    groups: int = 0
    out: str = ""
    precision: Any = None

    @property
    def name(self) -> str:
        """The case in a row of the file."""
        batch, groups = f"{self.batch}x" if self.batch else "", f":{self.groups} groups" if self.groups else ""
        return f"{batch}{'x'.join(map(str, self.sizes))}:{self.rate}{groups}"

    def found(self) -> walk.Found:
        """Returns the product as a program has it."""
        m, n, k = self.sizes
        batch = (self.batch,) if self.batch else ()
        how = {"out_dtype": self.out or self.dtype, "precision": self.precision}
        shapes: list[tuple[tuple[int, ...], str]] = [((*batch, m, k), self.dtype), ((*batch, k, n), self.dtype)]
        function = functools.partial(gemm, **how)
        if self.groups:
            shapes[1:] = [((self.groups, k, n), self.dtype), ((self.groups,), "int32")]
            function = functools.partial(grouped_gemm, **how)
        avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
        ((product,), _) = walk.products(function, avals, {}, "cuda")
        return product


def _cubes(rate: str, *sides: int, dtype: str = "", **more: Any) -> list[Case]:
    return [Case(rate, dtype or rate, (side, side, side), **more) for side in sides]


_WIDE = ("float64", "complex128")
_TF32 = lax.DotAlgorithmPreset.TF32_TF32_F32
SAMPLE = (
    *_cubes("bfloat16", 512, 2048, 8192),
    *_cubes("float16", 512, 2048, 8192),
    *_cubes("tf32", 512, 2048, 8192, dtype="float32", precision=_TF32),
    *_cubes("float32", 512, 2048, 8192, precision="highest"),
    *_cubes("float64", 512, 2048, 4096),
    *_cubes("int8", 512, 2048, 8192, out="int32"),
    *_cubes("float8_e4m3fn", 2048, 8192, out="bfloat16"),
    Case("bfloat16", "bfloat16", (16, 8192, 8192)),
    Case("bfloat16", "bfloat16", (4096, 1024, 4096)),
    Case("bfloat16", "bfloat16", (1000, 1001, 1003)),
    Case("bfloat16", "bfloat16", (512, 512, 128), batch=64),
    Case("float32", "float32", (32, 32, 32), batch=4096, precision="highest"),
    Case("bfloat16", "bfloat16", (4096, 2048, 1024), groups=8),
    Case("float32", "float32", (4096, 2048, 1024), groups=8, precision="highest"),
)
# Every way to multiply, once: those of the sample, and those that it leaves out.
_PRESETS = lax.DotAlgorithmPreset
KINDS = (
    *_cubes("bfloat16", 4096),
    *_cubes("float16", 4096),
    *_cubes("float16_f16", 4096, dtype="float16", precision=_PRESETS.F16_F16_F16),
    *_cubes("tf32", 4096, dtype="float32", precision=_TF32),
    *_cubes("tf32x3", 4096, dtype="float32", precision=_PRESETS.TF32_TF32_F32_X3),
    *_cubes("bf16x3", 4096, dtype="float32", precision=_PRESETS.BF16_BF16_F32_X3),
    *_cubes("bf16x6", 4096, dtype="float32", precision=_PRESETS.BF16_BF16_F32_X6),
    *_cubes("bf16x9", 4096, dtype="float32", precision=_PRESETS.BF16_BF16_F32_X9),
    *_cubes("float32", 4096, precision="highest"),
    *_cubes("float64", 4096),
    *_cubes("complex64", 4096, precision="highest"),
    *_cubes("complex128", 4096),
    *_cubes("int8", 4096, out="int32"),
    *_cubes("uint8", 4096, out="uint32"),
    *_cubes("float8_e4m3fn", 4096, out="bfloat16"),
    *_cubes("float8_e5m2", 4096, out="bfloat16", precision=_PRESETS.ANY_F8_ANY_F8_F32),
)


def run(path: pathlib.Path, progress: bool = True) -> dict[str, Any]:
    """Measures the sample on this GPU, for some minutes; writes the report, anew after each product, and returns it.

    Raises:
      RuntimeError: if there is no NVIDIA GPU or no compiler.
      OSError: if the file cannot be written.
    """
    autotune.require_device()
    content = {**provenance(), "rows": []}
    _write(path, content)  # now, not after minutes of measuring
    with Progress(len(SAMPLE) + 1, progress) as shown:
        shown.step("timing a copy")
        content["rows"].append(_copy_row())
        for case in SAMPLE:
            _write(path, content)
            shown.step(f"timing {case.name}")
            content["rows"].append(_row(case))
    _write(path, content)
    return content


def _write(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def provenance() -> dict[str, Any]:
    """Returns the conditions of the measurement: the device, the versions, the commit, clocks and power."""
    import cutjax

    target = lowering.target()
    device = device_of(target)
    root = pathlib.Path(cutjax.__file__).parents[1]
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD") if (root / ".git").exists() else []
    versions = {"cutjax": cutjax.__version__, "jax": jax.__version__, "python": platform.python_version()}
    return {
        "format": FORMAT,
        "device": target.kind,
        "arch": target.arch,
        "sms": device.sms,
        "versions": {**versions, "compiler": compiler.description().partition(",")[0]},
        "commit": commit[0] if commit else None,
        "gpus": [dict(zip(_SMI, line.split(", "), strict=False)) for line in _smi()],
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


def _copy_row() -> dict[str, Any]:
    inputs = measure.Inputs(lambda key, integers: [jnp.ones(COPIED, jnp.float32)], l2_bytes=0)
    times = measure.times({autotune.XLA: lambda x: [x + 1]}, inputs, lambda x: [x + 1], True)
    return {"case": "copy", "bytes": 8 * COPIED, "xla_us": times.us.get(autotune.XLA), "us": {}, "dropped": {}}


def _row(case: Case) -> dict[str, Any]:
    with jax.enable_x64(case.dtype in _WIDE):
        try:
            return _measured(case)
        except Exception as error:  # this case's: out of memory, or a dtype that XLA does not multiply here
            return {"case": case.name, "error": measure.reason(error)}


def _measured(case: Case) -> dict[str, Any]:
    product = case.found()
    eqn, params = product.eqn, product.eqn.params
    before = lowering.choosers[eqn.primitive](*product.avals, target=lowering.target(), **params)
    assert isinstance(before, Choice)
    problem = before.problem
    strict = choose(problem, backend="cuda")
    configs = list(candidates(problem)[:CANDIDATES]) if strict.served and lowering.on_cuda() else []
    task = autotune.Task(problem, product, before, configs, 1, True)
    times = autotune.timed(task) if task.functions else measure.Times({}, {})
    names = {config: choose(problem, config).kernel for config in configs} | {autotune.XLA: autotune.XLA}
    return {
        "case": case.name,
        "rate": case.rate,
        "problem": json.loads(key(problem)),
        "flops": problem.flops,
        "bytes": problem.bytes,
        "runs": before.kernel,
        "why": "; ".join(before.reasons),
        "predicted_us": {names[config]: choose(problem, config).time_us for config in configs},
        "predicted_xla_us": before.xla_us,
        "us": {names[config]: us for config, us in times.us.items() if config != autotune.XLA},
        "xla_us": times.us.get(autotune.XLA),
        "dropped": {names[config]: why for config, why in times.dropped.items()},
    }


def summary(content: Mapping[str, Any], path: pathlib.Path) -> str:
    """Returns a report as a table, and where to send its file."""
    lines = [["case", "us", "XLA us", "XLA/ours", "predicted us", "runs"]]
    notes = []
    for row in content["rows"]:
        if "error" in row:
            notes.append(f"not measured: {row['case']}: {row['error']}")
            continue
        notes += [f"dropped for {row['case']}: {name}: {why}" for name, why in row["dropped"].items()]
        us, xla_us = min(row["us"].values(), default=None), row["xla_us"]
        predicted = min(row.get("predicted_us", {}).values(), default=None)
        ratio = f"{xla_us / us:.3f}" if us and xla_us else "-"
        lines.append([row["case"], number(us), number(xla_us), ratio, number(predicted), row.get("runs", "XLA")])
    device = f"{content['device'] or 'no device'}, {content['arch']}, {content['sms']} SMs"
    return "\n".join([*table(lines, ("case", "runs")), *notes, device, f"written to {path}: {where_to_send()}"])


def where_to_send() -> str:
    """Returns a sentence that says where to send a report: to the tracker that the package's metadata names."""
    try:
        urls = metadata.metadata("cutjax").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # a copy that was not installed
        urls = []
    found = dict(url.split(", ", 1) for url in urls)
    tracker = found.get("Issues") or found.get("Repository")
    return f"please attach it to an issue at {tracker}" if tracker else "please attach it to an issue of the project"


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a report.

    Raises:
      ValueError: if the file is none, or of another format.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no report of a device: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("rows"), list):
        raise ValueError(f"{path} is no report of a device in format {FORMAT}")
    return content


def fitted(content: Mapping[str, Any]) -> Device:
    """Returns the device of a report: each rate the best that any product reached, by XLA or by a kernel.

    What was not measured stays as the list of devices has it.
    """
    device = device_of_kind(content["device"], content["arch"], content["sms"])
    rates: dict[str, float] = {}
    for row in content["rows"]:
        times = [us for us in (row.get("xla_us"), *row.get("us", {}).values()) if us]
        if not times:
            continue
        name, work = ("bytes", row["bytes"]) if row["case"] == "copy" else (row["rate"], row["flops"])
        rates[name] = max(rates.get(name, 0.0), 1e6 * work / min(times))
    rates = {name: float(f"{rate:.2e}") for name, rate in rates.items() if math.isfinite(rate)}
    measured = tuple(sorted(rates))
    bytes_per_second = rates.pop("bytes", device.bytes_per_second)
    flops = tuple(sorted({**dict(device.flops), **rates}.items()))
    return dataclasses.replace(
        device, name=content["device"], flops=flops, bytes_per_second=bytes_per_second, measured=measured
    )


def entry(device: Device) -> str:
    """Returns the measured rates of a device as its entry in ``kernels/device.py`` takes them."""
    rates = {**dict(device.flops), "bytes": device.bytes_per_second}
    lines = [f'    "{name}": {rates[name]:.3g},' for name in device.measured]
    return "\n".join([f"# {device.name}, {device.arch}, {device.sms} SMs", "measured = {", *lines, "}"])


def described(device: Device) -> list[str]:
    """Returns a device's rates in lines, and whether each is measured."""
    rates = [*device.flops, ("bytes", device.bytes_per_second)]
    return [f"{name:14} {rate / 1e12:8.4g} T/s  {_known(device, name)}" for name, rate in rates]


def _known(device: Device, name: str) -> str:
    return "measured" if name in device.measured else "published, times a share"


def served(device: Device) -> list[str]:
    """Returns, for each way to multiply, the family of kernels that the library has for it on a device, in lines."""
    return [f"{case.rate:14} {family_of(case, device) or 'XLA'}" for case in KINDS]


def family_of(case: Case, device: Device) -> str:
    """Returns the family of the kernel that a device has for a case, whether or not XLA is faster; "" for none."""
    with jax.enable_x64(case.dtype in _WIDE), lowering.on_target(lowering.Target(device.arch, device.name)):
        product = case.found()
        params = {**product.eqn.params, "backend": "cuda"}
        choice = lowering.choosers[product.eqn.primitive](*product.avals, target=lowering.target(), **params)
    return choice.kernel.partition("_")[0] if choice.served else ""
