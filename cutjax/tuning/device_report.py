"""The file of ``python -m cutjax bench``, of another machine: the rates of its GPU, and what has a kernel on it."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from cutjax.binding import lowering
from cutjax.kernels.device import Device, device_of_kind
from cutjax.tuning.cases import WAYS, Case

FORMAT = 1


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
        if not times or ("rate" not in row and row["case"] != "copy"):
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
    return [f"{case.rate:14} {family_of(case, device) or 'XLA'}" for case in WAYS]


def family_of(case: Case, device: Device) -> str:
    """Returns the family of the kernel that a device has for a product, whether or not XLA is faster; "" for none."""
    with jax.enable_x64(case.x64), lowering.on_target(lowering.Target(device.arch, device.name)):
        (product,) = case.found("cuda")
        choice = lowering.choosers[product.eqn.primitive](
            *product.avals, target=lowering.target(), **product.eqn.params
        )
    return choice.kernel.partition("_")[0] if choice.served else ""
