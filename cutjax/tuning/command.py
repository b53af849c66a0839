"""The commands of ``python -m cutjax``: info, run, tune and bench."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import runpy
import sys
from collections.abc import Sequence

import jax
import numpy as np

from cutjax.binding import lowering, walk
from cutjax.dtypes import DTYPES
from cutjax.kernels import tuned
from cutjax.kernels.choose import floor_us
from cutjax.kernels.device import Device, device_of, named, reference
from cutjax.kernels.problem import LAYOUTS
from cutjax.ops.gemm import gemm
from cutjax.runtime import architectures, compiler, tuning_file
from cutjax.tuning import autotune, bench, bench_table, device_report
from cutjax.tuning.report import Report, number, table

PRODUCT = "[BATCHx]MxNxK[:LAYOUT[:DTYPE]]"
_DTYPES = {row.short: row.name for row in DTYPES.values() if row.short in ("bf16", "f16")}


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of the command line: d[m, n] = a @ b, a batch of them where ``batch`` is not 0."""

    batch: int
    m: int
    n: int
    k: int
    layout: str
    dtype: str

    def found(self) -> list[walk.Found]:
        """Returns the product as a program has it."""
        a = (self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)
        b = (self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)
        batch = (self.batch,) if self.batch else ()
        avals = [jax.ShapeDtypeStruct((*batch, *shape), np.dtype(self.dtype)) for shape in (a, b)]
        found, _ = walk.products(lambda a, b: gemm(a, b, layout=self.layout), avals, {}, "cuda")
        return found


def product(text: str) -> Product:
    """Parses a product such as ``4096x4096x4096:nt:f16``; layout nn and bf16 are the defaults."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\d+)x(\d+)(?::(\w+))?(?::(\w+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no product; expected {PRODUCT}, e.g. 4096x14336x4096:nt:bf16")
    *sizes, layout, dtype = match.groups()
    layout, dtype = layout or "nn", dtype or "bf16"
    if layout not in LAYOUTS:
        raise argparse.ArgumentTypeError(f"{text!r}: unknown layout {layout!r}, expected one of {LAYOUTS}")
    if dtype not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}: unknown dtype {dtype!r}, expected one of {tuple(_DTYPES)}")
    if "0" in sizes[1:]:
        raise argparse.ArgumentTypeError(f"{text!r}: a size is 0")
    batch, m, n, k = (int(size or 0) for size in sizes)
    return Product(batch, m, n, k, layout, np.dtype(_DTYPES[dtype]).name)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return minutes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 1 where it cannot run here (argparse exits with 2 on what it cannot parse)."""
    parser = argparse.ArgumentParser(prog="python -m cutjax", description="GEMM kernels for JAX")
    commands = parser.add_subparsers(dest="command", required=True)
    about = commands.add_parser("info", help="versions, device, caches and files of tuned kernels")
    other = about.add_mutually_exclusive_group()
    other.add_argument("--arch", help="a GPU of this architecture instead, e.g. sm_80: its rates, and what runs on it")
    other.add_argument("--device", help="the same for one GPU, e.g. 'NVIDIA A100-SXM4-80GB'")
    other.add_argument("--report", type=pathlib.Path, help="the same for the GPU of a report, with the rates in it")
    program = commands.add_parser("run", help="run a program under cutjax.patch: what it jits is fused")
    program.add_argument("-m", dest="module", action="store_true", help="the program is a module, as of python -m")
    program.add_argument("program", help="a file of Python, or a module")
    program.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    tune = commands.add_parser("tune", help="measure kernels for products, and keep the fastest")
    timed = commands.add_parser("bench", help="time what runs for products, and XLA; by default a report of the GPU")
    for command, count in ((tune, "+"), (timed, "*")):
        command.add_argument("products", nargs=count, type=product, metavar=PRODUCT)
        command.add_argument("--quiet", action="store_true", help="no progress on stderr")
    tune.add_argument("--candidates", type=_positive, default=16, help="kernels measured for a product (16)")
    tune.add_argument("--path", type=pathlib.Path, help="file of tuned kernels (the user's)")
    timed.add_argument("--minutes", type=_minutes, help=f"after which no case of the report begins ({bench.MINUTES:g})")
    timed.add_argument(
        "--report", type=pathlib.Path, help=f"the report's file, to go on with and to send ({bench.FILE})"
    )
    given = parser.parse_args(arguments)
    if given.command == "bench" and given.products and (given.minutes or given.report):
        timed.error("--minutes and --report are of the report, which names its products itself")
    if given.command == "run":
        if not given.module and not pathlib.Path(given.program).exists():
            program.error(f"no such file: {given.program}")
        run(given.program, given.arguments, given.module)
        return 0
    try:
        print(_about(given) if given.command == "info" else _measured(given))
    except (RuntimeError, ValueError, OSError) as error:
        print(f"python -m cutjax {given.command}: {error}", file=sys.stderr)
        return 1
    return 0


def run(program: str, arguments: Sequence[str], module: bool = False) -> None:
    """Runs a file or a module as Python would, under ``cutjax.patch``; says at its end, on stderr, what was fused."""
    import cutjax

    argv, path = sys.argv, sys.path
    with cutjax.patch() as patched:
        try:
            if module:
                sys.argv = [program, *arguments]
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:  # the file's folder first, in place of this one's, as `python file` has it
                sys.argv, sys.path = [program, *arguments], [str(pathlib.Path(program).resolve().parent), *path[1:]]
                runpy.run_path(program, run_name="__main__")
        finally:
            sys.argv, sys.path = argv, path
            print(patched, file=sys.stderr)


def _about(given: argparse.Namespace) -> str:
    """Returns the text of ``info``: about this machine, or about a GPU elsewhere."""
    if given.report:
        device = device_report.fitted(device_report.read(given.report))
        return f"{device_report.entry(device)}\n{_elsewhere(device)}"
    if given.arch:
        return _elsewhere(reference(architectures.canonical(given.arch)))
    return _elsewhere(named(given.device)) if given.device else info()


def _elsewhere(device: Device) -> str:
    lines = [f"device    {device.name}, {device.arch}, {device.sms} SMs", "rates", *device_report.described(device)]
    return "\n".join([*lines, "kernels", *device_report.served(device)])


def _measured(given: argparse.Namespace) -> object:
    autotune.require_device()
    if given.command == "bench" and not given.products:
        path = given.report or pathlib.Path(bench.FILE)
        content = bench.run(path, given.minutes or bench.MINUTES, not given.quiet)
        return f"{bench_table.text(content, bench.left(content))}\nwritten to {path}: {bench.where_to_send()}"
    path = None
    if given.command == "tune":
        path = (given.path or tuning_file.user_path()).expanduser().absolute()
        tuning_file.check_writable(path)
    found = [found for each in given.products for found in each.found()]
    report = autotune.run(found, given.candidates if path else 0, path, not given.quiet)
    return report if path else _comparison(report)


def _comparison(report: Report) -> str:
    """Returns the times of what runs today and of XLA, as a table."""
    lines = [["problem", "us", "XLA us", "XLA/ours", "roofline", "runs"]]
    for row in report.rows:
        us, xla_us = row.before_us, row.xla_us
        ratio = f"{xla_us / us:.3f}" if us and xla_us else "-"
        share = f"{floor_us(row.problem) / us:.0%}" if us else "-"
        lines.append([str(row.problem), number(us), number(xla_us), ratio, share, row.before])
    return "\n".join([*table(lines), *report.notes(), report.device or "no device"])


def info() -> str:
    """Returns versions, device, caches and files of tuned kernels."""
    import cutjax

    target = lowering.target()
    device = device_of(target)
    here = f"{device.name}, {device.arch}, {device.sms} SMs" if target.kind else f"none; compiling for {target.arch}"
    lines = [f"cutjax    {cutjax.__version__}", f"jax       {jax.__version__}", f"device    {here}"]
    lines.append(f"compiler  {compiler.description()}")
    for file in tuned.tables():
        of_device = len(file.entries.get(device.name, ()))
        lines.append(f"tuned     {file.path}: {file.count} entries, {of_device} for {device.name}")
    return "\n".join(lines)
