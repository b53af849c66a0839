"""Times cutjax beside XLA: ``python -m benchmarks.run --op gemm --tag suite``."""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import cases, compile_cost, launch, report

TIMED_US = 300e3  # per case, both sides together
LEAST_REPS, MOST_REPS = 12, 200


def inputs(case: cases.Case, seed: int):
    """Random normal operands (zeros run up to 13% faster and prove nothing)."""
    return _normal(case.a_shape, case.b_shape, case.dtype)(seed)


@functools.cache
def _normal(a_shape, b_shape, dtype):
    import jax

    @jax.jit
    def make(seed):
        a_key, b_key = jax.random.split(jax.random.key(seed, impl="rbg"))  # threefry takes longer than the products
        return jax.random.normal(a_key, a_shape, dtype), jax.random.normal(b_key, b_shape, dtype)

    return make


def check(case: cases.Case, function: Callable, args: tuple):
    """The error of ``function`` against the f32 reference on the same device."""
    import jax
    import jax.numpy as jnp

    from benchmarks import oracle

    # Without autotuning: it would take longer than the product.
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}

    @functools.partial(jax.jit, compiler_options=options)
    def reference(a, b):
        return oracle.reference(a.astype(jnp.float32), b.astype(jnp.float32), case.layout)

    return oracle.compare(function(*args), reference(*args), case.k)


def measure_roofline(method: str) -> report.Roofline:
    """A 2 GiB copy and the best 8192 x 8192 x 8192 bf16 product, XLA's or ours."""
    import jax
    import jax.numpy as jnp

    import cutjax
    from benchmarks import oracle, timing

    # A kernel that reads and writes each word once; a plain copy would run on the copy engines.
    size = 1 << 29
    words = jax.random.bits(jax.random.key(0, impl="rbg"), (size,), jnp.uint32)
    copy = timing.measure({"copy": jax.jit(lambda x: x ^ 1)}, [(words,)], 12, method)["copy"]
    del words
    case = cases.find("8192x8192x8192 nn")
    functions = {
        "xla": jax.jit(oracle.xla(case.layout, case.dtype)),
        "cutjax": jax.jit(lambda a, b: cutjax.gemm(a, b)),
    }
    times = timing.measure(functions, timing.input_sets(lambda seed: inputs(case, seed)), 12, method)
    best = min(time.us for time in times.values())
    return report.Roofline(case.problem.flops / best / 1e6, 2 * 4 * size / copy.us / 1e3)


def measure_case(
    case: cases.Case, configs: Sequence[dict | None], roofline: report.Roofline, method: str
) -> list[report.Row]:
    """Checks, then times, the cost model's choice (None) and pinned configs against XLA.

    Returns:
      One row for each of ``configs``; a wrong or impossible one has ``failure`` set and no time.
    """
    import jax

    import cutjax
    from benchmarks import oracle, timing

    sets = timing.input_sets(lambda seed: inputs(case, seed))
    functions: dict[str, Callable] = {"xla": jax.jit(oracle.xla(case.layout, case.dtype))}
    errors, failures, labels = {}, {}, []
    for config in configs:
        label = "auto" if config is None else json.dumps(config)
        labels.append(label)
        try:
            pinned = None if config is None else cutjax.Config(**config)
            function = jax.jit(
                lambda a, b, pinned=pinned: cutjax.gemm(a, b, layout=case.layout, backend="cuda", config=pinned)
            )
            errors[label] = check(case, function, sets[-1])
            if errors[label].ok:
                functions[label] = function
            else:
                failures[label] = f"wrong: {errors[label]}"
        except (NotImplementedError, ValueError) as error:
            failures[label] = f"no kernel: {error}"
    times = {}
    if len(functions) > 1:
        rough = timing.measure(functions, sets, 3, method)
        reps = int(TIMED_US / sum(time.us for time in rough.values()))
        times = timing.measure(functions, sets, max(LEAST_REPS, min(MOST_REPS, reps)), method)
    rows = []
    for label in labels:
        if label not in times:
            rows.append(report.Row(case.name, label, target=case.target, failure=failures[label]))
            continue
        ours, xla = times[label], times["xla"]
        rows.append(
            report.Row(
                case=case.name,
                choice=label,
                kernel=" + ".join(ours.kernels) or label,
                us=ours.us,
                iqr_us=ours.iqr_us,
                xla_kernel=" + ".join(xla.kernels),
                xla_us=xla.us,
                xla_iqr_us=xla.iqr_us,
                tflops=case.problem.flops / ours.us / 1e6,
                roofline=roofline.us(case.problem.flops, case.problem.bytes) / ours.us,
                ratio=xla.us / ours.us,
                target=case.target if label == "auto" else None,
                error=errors[label].relative,
            )
        )
    return rows


def _begin(args: argparse.Namespace) -> tuple[str, dict[str, Any], pathlib.Path]:
    """How a run is timed, on what (which it prints), and where it is written."""
    from benchmarks import timing

    method = args.method or ("cupti" if timing.cupti_works() else "host")
    environment = report.environment(args.commit)
    print(f"{environment['device']}, driver {environment['driver']}, {environment['versions']}, times by {method}")
    return method, environment, args.out or report.RESULTS / f"{args.op}-{args.tag.replace(',', '-')}.json"


def _end(args: argparse.Namespace, out: pathlib.Path, rows: Sequence[Any]) -> int:
    """Says what was written, draws it if asked, and whether anything failed."""
    print(f"wrote {out}")
    if args.plot and rows:
        from benchmarks import plot

        for path in plot.draw(out):
            print(f"wrote {path}")
    return int(any(row.failure for row in rows))


def _fused(args: argparse.Namespace) -> int:
    """The run of ``--op fused``."""
    import jax

    from benchmarks import fused

    chosen = cases.select_fused(args.tag)
    method, environment, out = _begin(args)
    fused.compile_ours(chosen)
    roofline = measure_roofline(method)
    rows: list[report.Row] = []
    for case in chosen:
        new = fused.measure_case(case, roofline, method)
        rows += new
        for row in new:
            print(f"{row.case}: {row.failure or f'{row.us:.1f} us, ratio {row.ratio:.3f}'}", flush=True)
        report.write(out, report.document(environment, method, roofline, rows))
        jax.clear_caches()
    fused.print_rows(rows, f"fused {args.tag}, bf16")
    return _end(args, out, rows)


def _grouped(args: argparse.Namespace) -> int:
    """The run of ``--op grouped``."""
    chosen, products = cases.select_grouped(args.tag)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

    import jax

    from benchmarks import grouped

    method, environment, out = _begin(args)
    wanted = [peer for peer in grouped.PEERS if peer in args.peers.split(",")]
    environment["versions"] |= {name: report.version(name) for name in ("tokamax", "torch") if name in wanted}
    grouped.compile_ours(chosen, products)
    roofline = measure_roofline(method)
    rows: list[grouped.Row] = []
    for case in chosen:
        try:
            new = grouped.measure_case(case, products, roofline, method, wanted)
        except Exception as error:  # the cases after it are measured all the same
            new = [grouped.Row(case.name, product, failure=f"{type(error).__name__}: {error}") for product in products]
        rows += new
        for row in new:
            print(f"{row.name}: {row.failure or row.summary}", flush=True)
        report.write(out, grouped.document(environment, method, roofline, rows))
        jax.clear_caches()
    grouped.print_rows(rows, f"grouped {args.tag}, bf16")
    print(f"measured roofline: {roofline.tflops:.0f} TFLOP/s bf16, {roofline.gb_per_s:.0f} GB/s")
    return _end(args, out, rows)


def _moe(args: argparse.Namespace) -> int:
    """The run of ``--op moe``."""
    chosen = cases.select_moe(args.tag)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # weights and gradients of a layer are 48 GB

    import jax

    from benchmarks import moe

    method, environment, out = _begin(args)
    rows: list[moe.Row] = []
    for case in sorted(chosen, key=lambda case: case.experts * case.d * case.h):  # as the device's peak only rises
        rows += moe.measure_case(case, method)
        report.write(out, moe.document(environment, method, rows))
        jax.clear_caches()
    moe.print_rows(rows)
    print(f"wrote {out}")
    return int(any(row.failure for row in rows))


def _compile(args: argparse.Namespace) -> int:
    """The run of ``--op compile``."""
    import jax

    args.tag, args.method = jax.default_backend(), "CPU clock"
    method, environment, out = _begin(args)
    environment["device"] = compile_cost.processor()
    rows: list[compile_cost.Row] = []
    for name in compile_cost.epilogues():
        for dtype in ("float32", "bfloat16"):
            new = compile_cost.measure_epilogue(name, dtype)
            rows += new
            compile_cost.print_rows(new)
    report.write(out, compile_cost.document(environment, method, rows))
    late = [row.case for row in rows if not row.cpu_s <= row.target]
    print(f"over their target: {', '.join(late) or 'none'}")
    return _end(args, out, rows)


def _calls(args: argparse.Namespace) -> int:
    """The run of ``--op calls``."""
    import jax

    from benchmarks import calls

    method, environment, out = _begin(args)
    if method != "cupti":
        print("the two forms differ by less than the host's clock can tell")
        return 1
    rows: list[calls.Row] = []
    for sizes in calls.SIZES:
        new = calls.measure(sizes, method)
        rows += new
        calls.print_rows(new)
        report.write(out, calls.document(environment, method, rows))
        jax.clear_caches()
    return _end(args, out, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 when a result was wrong or a case had no kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--op", choices=["gemm", "fused", "grouped", "moe", "compile", "calls"], default="gemm")
    parser.add_argument(
        "--tag",
        default="suite",
        help=f"some of {', '.join(cases.TAGS)}, launch, compile, joined by commas; or all. "
        f"Of --op fused: {', '.join(cases.FUSED_TAGS)}. "
        f"Of --op grouped: {', '.join((*cases.GROUPED_TAGS, *cases.PRODUCTS))}. "
        f"Of --op moe: {', '.join(case.name for case in cases.MOE)}",
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write (default: benchmarks/results/<op>-<tag>.json)")
    parser.add_argument("--plot", action="store_true", help="also draw PNGs beside the JSON")
    parser.add_argument(
        "--configs", type=pathlib.Path, help="JSON list of configs to time beside the cost model's choice"
    )
    parser.add_argument("--method", choices=["cupti", "host"], help="default: kernel times where they can be read")
    parser.add_argument("--peers", default="xla,pallas,tokamax,torch", help='of --op grouped; none: ""')
    parser.add_argument("--commit", help="commit measured, where git cannot tell")
    args = parser.parse_args(argv)
    if args.op == "fused":
        return _fused(args)
    if args.op == "grouped":
        return _grouped(args)
    if args.op == "moe":
        return _moe(args)
    if args.op == "compile":
        return _compile(args)
    if args.op == "calls":
        return _calls(args)
    tags = set(args.tag.split(","))
    everything = "all" in tags
    chosen = cases.select(",".join(tags - {"launch", "compile"})) if tags - {"launch", "compile"} else ()

    # In processes of their own, and before this one takes the device's memory.
    launch_cost = launch.in_processes() if everything or "launch" in tags else None
    compile_times = compile_cost.in_processes() if everything or "compile" in tags else None

    import jax

    configs: list[dict | None] = [None]
    if args.configs:
        configs += json.loads(args.configs.read_text())
    method, environment, out = _begin(args)
    rows: list[report.Row] = []
    roofline = measure_roofline(method) if chosen else None
    for case in chosen:
        assert roofline is not None
        rows += measure_case(case, configs, roofline, method)
        print(f"{rows[-1].case}: {rows[-1].failure or f'{rows[-1].us:.1f} us, ratio {rows[-1].ratio:.3f}'}", flush=True)
        report.write(out, report.document(environment, method, roofline, rows, launch_cost, compile_times))
        jax.clear_caches()
    report.write(out, report.document(environment, method, roofline, rows, launch_cost, compile_times))
    if roofline:
        print(f"measured roofline: {roofline.tflops:.0f} TFLOP/s bf16, {roofline.gb_per_s:.0f} GB/s")
    for tag in cases.TAGS:
        tagged = {case.name for case in chosen if tag in case.tags}
        if part := [row for row in rows if row.case in tagged]:
            report.print_rows(part, f"{args.op} {tag}")
    if launch_cost:
        launch.show(launch_cost)
    if compile_times:
        compile_cost.show(compile_times)
    return _end(args, out, rows)


if __name__ == "__main__":
    sys.exit(main())
