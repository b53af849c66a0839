"""Times cutjax beside its peers: ``python -m benchmarks run --op gemm --tag suite``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence

import jax

from benchmarks import measure, plot, report, tables, timing
from benchmarks.ops import (
    calls,
    collective,
    compile_cost,
    contractions,
    conv,
    cross_entropy,
    dtypes,
    expert_products,
    fused,
    gather,
    gemm,
    grouped,
    low_precision,
    mma_parts,
    models,
    moe,
    networks,
    programs,
    prologues,
    sharded,
    syrk,
    wide,
)
from benchmarks.record import Roofline, Row
from benchmarks.suite import Run, Suite

_MODULES = (
    gemm,
    wide,
    dtypes,
    low_precision,
    fused,
    grouped,
    expert_products,
    moe,
    gather,
    syrk,
    models,
    conv,
    cross_entropy,
    networks,
    prologues,
    contractions,
    programs,
    sharded,
    collective,
    compile_cost,
    calls,
    mma_parts,
)
SUITES = {module.SUITE.name: module.SUITE for module in _MODULES}


def run_suite(suite: Suite, args: argparse.Namespace) -> int:
    """Measures the cases asked for, and writes after each what is known; returns 1 when anything failed."""
    tags, more = set(args.tag.split(",")), {}
    if suite.draw:
        suite = dataclasses.replace(suite, cases=suite.draw(args.count, args.salt))
        more = {"count": args.count, "salt": args.salt}
    chosen, products = suite.select(args.tag)
    for name, value in suite.environment.items():
        os.environ.setdefault(name, value)
    if suite.x64:
        jax.config.update("jax_enable_x64", True)
    # In processes of their own, and before this one takes the device's memory.
    more |= {tag: extra.measure() for tag, extra in suite.extras.items() if tags & {tag, "all"}}

    method = _method(suite, args.method)
    if not method:
        print(f"{suite.name} needs kernel times: its differences are less than the host's clock can tell")
        return 1
    environment = report.environment(args.commit)
    peers = None if args.peers is None else tuple(args.peers.split(","))
    environment["versions"] |= {name: report.version(name) for name in suite.versions if peers is None or name in peers}
    if suite.device:
        environment["device"] = suite.device()
    print(f"{environment['device']}, driver {environment['driver']}, {environment['versions']}, times by {method}")
    out = args.out or report.RESULTS / f"{args.op}-{args.tag.replace(',', '-')}.json"

    roofline = None
    configs = tuple(json.loads(args.configs.read_text())) if args.configs else ()
    run = Run(method, Roofline(math.nan, math.nan), products, peers, configs)
    if chosen and not suite.measure:
        measure.compile_ours(suite, chosen, run)
        roofline = measure.roofline(method)
        run = dataclasses.replace(run, roofline=roofline)
    rows: list[Row] = []

    def write() -> None:
        report.write(out, report.document(suite.name, environment, method, roofline, rows, more))

    write()
    for case in chosen:
        try:
            new = suite.measure(case, run) if suite.measure else measure.measure_case(suite, case, run)
        except Exception as error:  # the cases after it are measured all the same
            new = [Row(case.name, failure=measure.reason(error))]
        rows += new
        for row in new:
            print(row.summary, flush=True)
        write()
        jax.clear_caches()
    if rows:
        tables.print_rows(suite.name, rows, f"{suite.name} {args.tag}")
    for tag in suite.tags:
        tagged = {case.name for case in chosen if tag in case.tags}
        for line in tables.means([row for row in rows if row.case in tagged], tag) if len(tagged) < len(chosen) else ():
            print(line)
    if roofline:
        print(f"measured roofline: {roofline.tflops:.0f} TFLOP/s bf16, {roofline.gb_per_s:.0f} GB/s")
    for tag, extra in suite.extras.items():
        if tag in more:
            extra.show(more[tag])
    print(f"wrote {out}")
    if args.plot and any(row.fastest for row in rows):
        for path in plot.draw(out):
            print(f"wrote {path}")
    return int(any(row.failure for row in rows))


def _method(suite: Suite, asked: str | None) -> str:
    """The clock to use, or "" where none makes sense."""
    if asked in suite.clocks:
        return asked
    if suite.clocks[0] != "cupti" or timing.cupti_works():
        return suite.clocks[0]
    return next((clock for clock in suite.clocks if clock != "cupti"), "")


def main(argv: Sequence[str]) -> int:
    """The command line; returns 1 when a result was wrong or a case had no kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks run", description=__doc__)
    parser.add_argument("--op", choices=list(SUITES), default="gemm")
    told = [suite for suite in SUITES.values() if suite.tags and not suite.draw]
    tags = " ".join(f"Of --op {suite.name}: {', '.join(suite.tags)}." for suite in told)
    parser.add_argument("--tag", default="suite", help=f"some cases, joined by commas; or all. {tags}")
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write (default: benchmarks/results/<op>-<tag>.json)")
    parser.add_argument("--plot", action="store_true", help="also draw PNGs beside the JSON")
    parser.add_argument(
        "--configs", type=pathlib.Path, help="JSON list of configs to time beside the cost model's choice"
    )
    parser.add_argument("--method", choices=["cupti", "host"], help="default: kernel times where they can be read")
    parser.add_argument("--peers", help='only these, joined by commas: xla, pallas, tokamax, torch; none: ""')
    parser.add_argument("--commit", help="commit measured, where git cannot tell")
    parser.add_argument(
        "--salt", default=models.SALT, help="of --op models, experts and conv: draws the sample of shapes"
    )
    parser.add_argument(
        "--count", type=int, default=models.COUNT, help="of --op models, experts and conv: how many shapes"
    )
    args = parser.parse_args(argv)
    return run_suite(SUITES[args.op], args)
