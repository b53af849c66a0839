"""Adds the fastest kernels of final measurements to those that ship: ``python -m benchmarks ship RESULTS.json...``.

The files are what ``benchmarks direct --final`` wrote. A problem measured again replaces what was there. Report a
sample before you ship it: a product that ships is one that was tuned to. What was there and is newer stays.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from benchmarks import report
from benchmarks.cases import Dense
from cutjax.kernels import tuned
from cutjax.kernels.device import device_of_kind
from cutjax.kernels.keys import key
from cutjax.runtime import tuning_file


def entries(path: pathlib.Path) -> tuple[str, dict[str, dict]]:
    """Returns the device of a run, and its entries by the problems' keys; products without a kernel are left out."""
    content, rows = report.read(path)
    device, found = device_of_kind(content["device"], "sm_90a", content["sms"]), {}
    for row in rows:
        kernel = row.figures.get("kernel", {})
        if row.failure or not kernel.get("us") or not isinstance(kernel["config"], dict):
            continue
        config = tuple(sorted({**kernel["config"], "family": "sm90"}.items()))
        entry = tuned.Entry(config, kernel["us"], row.peers["xla"].us)
        named = key(Dense.of_fields(row.figures).problem.on(device))
        found[named] = entry.encoded(date=content["date"][:10])
    return content["device"], found


def file_of(device: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the file that has a device's entries; a new one, named after it, where none has."""
    for path in sorted(folder.glob("*.json")):
        if device in tuning_file.read(path):
            return path
    return folder / f"{device.lower().replace(' ', '-')}.json"


def main(argv: Sequence[str], folder: pathlib.Path = tuned.SHIPPED) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ship", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="+")
    for path in parser.parse_args(argv).results:
        device, found = entries(path)
        to = file_of(device, folder)
        there = tuning_file.read(to).get(device, {})
        found = {name: entry for name, entry in found.items() if entry["date"] >= there.get(name, entry)["date"]}
        tuning_file.merge(to, {device: found})
        print(f"{path.name}: {len(found)} products of {device}; {to.name} has {len(tuning_file.read(to)[device])}")
    return 0
