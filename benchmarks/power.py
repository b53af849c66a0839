"""Times kernels in windows in which power limits the clock: ``python -m benchmarks power --salts A --out X.json``.

Of each long product some kernels run alone, back to back: those ranked first, the first in clusters of two, tiles that
load little, each with lines that leave L2 first and without, and some with other orders of tiles. Products whose
results are most of their bytes are timed in orders of tiles alone. ``--read X.json`` prints what that says of choices.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from benchmarks import report, timing
from benchmarks.cases import Dense
from benchmarks.direct import SAMPLES, Board, problem_of, products, say
from benchmarks.direct_bench import Bench, Entry, Programs, compile_programs, padded
from benchmarks.driver import Driver
from benchmarks.sustained import window_us
from cutjax.kernels import xla
from cutjax.kernels.device import Device, device_of_kind
from cutjax.kernels.problem import Problem
from cutjax.kernels.sm90 import cost
from cutjax.kernels.sm90.constants import CONSTANTS
from cutjax.kernels.sm90.kernel import Kernel, resolve

LEAST_US, MOST_US = 100.0, 4000.0  # by XLA, as predicted
STORES = 0.7  # of a product's bytes, from where it is its stores that take time
BURST_S, PAUSE_S, FIRST_S = 0.004, 0.03, 0.02
TILES = ((256, 192, 1, 2), (256, 128, 1, 2), (128, 256, 2, 1))  # bm, bn and cluster of those that load little
Fields = dict[str, Any]


def variants(problem: Problem, most: int) -> list[cutjax.Config]:
    """Returns the configs to time: so many kernels in all, beside their variants."""
    found = list(cutjax.candidates(problem))
    if not found:
        return []
    pairs = [x for x in found if x.cluster_m * x.cluster_n == 2]
    picks = [*found[:2], *(x for x in pairs if x.cluster_m == 2), *(x for x in pairs if x.cluster_n == 2)]
    first = dict.fromkeys([*found[:2], *_first(pairs, "cluster_m"), *_first(pairs, "cluster_n")])
    for bm, bn, cluster_m, cluster_n in TILES:
        sizes = (bm, bn, cluster_m, cluster_n)
        first |= dict.fromkeys([x for x in picks if (x.bm, x.bn, x.cluster_m, x.cluster_n) == sizes][:1])
    chosen = list(dict.fromkeys([*first, *found]))[:most]
    stores = _stores(problem)
    letters = ("", "d") if stores else ("", "bd")
    every = [dataclasses.replace(x, evict_first=which) for x in chosen[: 2 if stores else most] for which in letters]
    every += [
        dataclasses.replace(x, evict_first=which) for x in chosen[:2] for which in (() if stores else ("d", "ad"))
    ]
    for x in chosen[:2]:
        rasters = (1, 2, -1, -4) if stores else (max(1, x.raster // 2), 2 * x.raster, -x.raster)
        every += [dataclasses.replace(x, raster=raster) for raster in rasters]
    served = [x for x in dict.fromkeys(every) if isinstance(resolve(problem, x), Kernel)]
    return served


def _first(configs: Iterable[cutjax.Config], side: str) -> list[cutjax.Config]:
    return [x for x in configs if getattr(x, side) == 2][:1]


def _stores(problem: Problem) -> bool:
    return problem.result_bytes > STORES * problem.bytes


def chosen(cases: Iterable[Dense], device: Device, count: int) -> list[Dense]:
    """Returns so many of the long products, of each layout as many as there are."""
    by_layout: dict[str, list[Dense]] = collections.defaultdict(list)
    for case in cases:
        us = xla.time_us(problem_of(case, device))
        if us and LEAST_US < us < MOST_US and all(x * 2 % 16 == 0 for x in (case.m, case.n, case.k)):
            by_layout[case.layout].append(case)
    turns = itertools.zip_longest(*(by_layout[layout] for layout in sorted(by_layout)))
    return [case for turn in turns for case in turn if case][:count]


def held_us(start: Callable[[], None], wait: Callable[[], None], us: float, seconds: float) -> float:
    """Returns the time of a call, of about so many microseconds, when calls follow each other for so long."""
    calls = max(3, math.ceil(1e6 * seconds / us))
    begin = time.perf_counter()
    for _ in range(calls):
        start()
    wait()
    return 1e6 * (time.perf_counter() - begin) / calls


def _clock() -> Callable[[], int]:
    """Returns the function that reads the SMs' clock in MHz; 0 where NVML is not there."""
    import ctypes

    try:
        nvml, handle, mhz, driver = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_uint(), Driver()
        driver.describe()
        bus = ctypes.create_string_buffer(32)
        driver.call("cuDeviceGetPCIBusId", bus, ctypes.c_int(32), driver.device)
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)):
            return lambda: 0
    except (OSError, RuntimeError, AttributeError):
        return lambda: 0
    return lambda: 0 if nvml.nvmlDeviceGetClockInfo(handle, ctypes.c_int(1), ctypes.byref(mhz)) else mhz.value


def measure(
    bench: Bench, case: Dense, programs: Programs, configs: Sequence[cutjax.Config], args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the row of a product."""
    problem, driver = problem_of(case, bench.device), bench.driver
    sets = timing.input_sets(lambda seed: programs.make(jnp.uint32(seed)))
    expected = jax.block_until_ready(programs.xla(*sets[0]))
    entries: list[tuple[Entry, cutjax.Config]] = []
    failed = []
    for place, config in enumerate(configs):
        try:
            kernel = resolve(problem, config)
            assert isinstance(kernel, Kernel)
            entry = bench.prepare(case, place, kernel.call())
            bench.reserve(sum(map(padded, entry.results)))
            if why := bench.check(entry, case, sets[0], expected):
                raise ArithmeticError(why)
            entries.append((entry, config))
        except Exception as error:
            traceback.print_exc()
            driver.synchronize()
            failed.append({"config": brief(config), "why": f"{type(error).__name__}: {error}"[:300]})
    del expected
    rotation, clock = itertools.cycle(sets), _clock()

    def start(entry: Entry) -> Callable[[], None]:
        return lambda: bench.start(entry, next(rotation), bench.place(entry.results))

    us = {entry.place: held_us(start(entry), driver.synchronize, 1e9, FIRST_S) for entry, _ in entries}
    xla_us = window_us(programs.xla, sets, FIRST_S, lambda: None)
    bursts, held, mhz, xla_held = collections.defaultdict(list), collections.defaultdict(list), {}, []
    for turn in range(args.turns):
        xla_held.append(window_us(programs.xla, sets, args.window, lambda: None))
        for entry, _ in entries[:: -1 if turn % 2 else 1]:
            time.sleep(PAUSE_S)
            bursts[entry.place].append(held_us(start(entry), driver.synchronize, us[entry.place], BURST_S))
            if turn == 0:  # the clock sinks within some tens of milliseconds
                held_us(start(entry), driver.synchronize, us[entry.place], FIRST_S)

            def wait() -> None:
                driver.synchronize()

            seen = held_us(start(entry), wait, us[entry.place], args.window)
            held[entry.place].append(seen)
            for _ in range(max(3, math.ceil(FIRST_S * 1e6 / seen))):
                start(entry)()
            mhz[entry.place] = clock()
            driver.synchronize()
    rows = [
        {
            **brief(config),
            "us": round(float(np.mean(held[entry.place])), 3),
            "burst_us": round(float(np.mean(bursts[entry.place])), 3),
            "mhz": mhz[entry.place],
        }
        for entry, config in entries
    ]
    fields = {field: getattr(case, field) for field in ("m", "n", "k", "layout", "batch", "dtype", "of")}
    return {
        "case": case.name,
        **fields,
        "xla_us": round(float(np.mean(xla_held)), 3),
        "xla_first_us": round(xla_us, 3),
        "stores": _stores(problem),
        "configs": rows,
        "failed": failed,
    }


def brief(config: cutjax.Config) -> Fields:
    """Returns the fields of a config that are not their defaults."""
    default = cutjax.Config()
    return {k: v for k, v in dataclasses.asdict(config).items() if getattr(default, k) != v}


def config_of(row: Fields) -> cutjax.Config:
    """Returns the config of a row."""
    names = {field.name for field in dataclasses.fields(cutjax.Config)}
    return cutjax.Config(**{name: value for name, value in row.items() if name in names})


def read(rows: Sequence[dict[str, Any]], device: Device) -> Iterator[str]:
    """Yields the effect of lines that leave L2 first, of orders of tiles, and of ranking by bytes through L2."""
    geomean = lambda xs: math.exp(sum(map(math.log, xs)) / len(xs)) if xs else math.nan  # noqa: E731
    for stores in (False, True):
        some = [row for row in rows if row["stores"] == stores and row["configs"]]
        if not some:
            continue
        yield f"{len(some)} products" + ", of stores" * stores
        best = [row["xla_us"] / min(x["us"] for x in row["configs"]) for row in some]
        alone = [row["xla_us"] / row["configs"][0]["us"] for row in some]
        yield f"  XLA over the best {geomean(best):.4f}, least {min(best):.3f}; over the first {geomean(alone):.4f}"
        changes = collections.defaultdict(list)
        for row in some:
            of = {
                json.dumps({k: v for k, v in x.items() if k in cutjax.Config.__dataclass_fields__}): x
                for x in row["configs"]
            }
            by = {config_of(x): x["us"] for x in of.values()}
            for config, us in by.items():
                plain = dataclasses.replace(config, evict_first="")
                if config.evict_first and plain in by:
                    changes[f'evict_first="{config.evict_first}"'].append(by[plain] / us)
                usual = next((x for x in by if dataclasses.replace(x, raster=config.raster) == config), config)
                if usual.raster != config.raster:
                    name = f"raster {config.raster}" if stores else f"raster times {config.raster / usual.raster:.1f}"
                    changes[name].append(by[usual] / us)
        for name, ratios in sorted(changes.items()):
            yield f"  {name:20s} {geomean(ratios):.4f} of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f}"
        for share in (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1):
            lost = [_lost(row, device, share) for row in some]
            yield f"  within {share:5.3f} by L2: a pick takes {geomean(lost):.4f} of the best, most {max(lost):.3f}"
    slopes = [x for row in rows if not row["stores"] for x in _slope(row, device)]
    if slopes:
        x, y = np.array(slopes).T
        yield f"log(held / burst) by bytes through L2 a flop, within a product: {float(x @ y / (x @ x)):.1f}"


def _lost(row: dict[str, Any], device: Device, share: float) -> float:
    """Returns the time of the pick over the best, of plain configs, where those near to the first go by L2."""
    kernels = []
    for x in row["configs"]:
        config = config_of(x)
        if not config.evict_first:
            kernels.append((_kernel(row, config, device), x["us"]))
    times = np.array([cost.times(kernel, device) for kernel, _ in kernels])
    us, ranked, l2_us = np.array([us for _, us in kernels]), times[:, 1], times[:, 2]
    near = ranked <= ranked.min() * (1 + share)
    return float(us[np.where(near, l2_us, np.inf).argmin()] / us.min())


def _slope(row: dict[str, Any], device: Device) -> Iterator[tuple[float, float]]:
    problem = Dense.of_fields(row).problem.on(device)
    found = [
        (
            cost.times(_kernel(row, config, device), device)[2] * CONSTANTS.l2 * 1e3 / problem.flops,
            math.log(x["us"] / x["burst_us"]),
        )
        for x in row["configs"]
        if not (config := config_of(x)).evict_first
    ]
    x, y = np.array(found).T
    yield from zip(x - x.mean(), y - y.mean(), strict=True)


def _kernel(row: dict[str, Any], config: cutjax.Config, device: Device) -> Kernel:
    kernel = resolve(Dense.of_fields(row).problem.on(device), config)
    assert isinstance(kernel, Kernel)
    return kernel


def _compiled(case: Dense) -> Programs | Exception:
    try:
        return compile_programs(case)
    except Exception as error:
        return error


def _compiled_kernel(kernel: Kernel) -> None:
    with contextlib.suppress(Exception):  # who asks for it again gets its error again
        kernel.call()


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks power", description=__doc__.splitlines()[0])
    parser.add_argument("--salts", default="", help="of the samples of products of models, joined by commas")
    parser.add_argument("--attention", default="", help="salts of the samples of attention's products")
    parser.add_argument("--count", type=int, default=24, help="products of models")
    parser.add_argument("--stores", type=int, default=8, help="products of attention that store most of their bytes")
    parser.add_argument("--most", type=int, default=8, help="kernels of a product, beside their variants")
    parser.add_argument("--window", type=float, default=0.12, help="seconds of each")
    parser.add_argument("--turns", type=int, default=1, help="windows of each")
    parser.add_argument("--seconds", type=float, default=150, help="after which no other product is begun")
    parser.add_argument("--threads", type=int, default=16, help="that compile")
    parser.add_argument("--commit", help="the commit measured, where the tree is a copy without its history")
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write")
    parser.add_argument("--read", type=pathlib.Path, nargs="+", help="files to print")
    args = parser.parse_args(argv)
    if args.read:
        for path in args.read:
            content = json.loads(path.read_text())
            print("\n".join(read(content["rows"], device_of_kind(content["device"], "sm_90a", content["sms"]))))
        return 0
    end = time.monotonic() + args.seconds
    driver = Driver()
    name, sms = driver.describe()
    device = device_of_kind(name, "sm_90a", sms)
    cases = chosen(products([x for x in args.salts.split(",") if x], 400, (), "bfloat16"), device, args.count)
    stored = [
        case
        for salt in filter(None, args.attention.split(","))
        for case in SAMPLES["attention"](400, salt)
        if _stores(problem_of(case, device))
    ]
    cases += chosen(stored, device, args.stores)
    driver.enter()
    content = {**report.environment(args.commit), "sms": sms, "argv": list(argv), "rows": []}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        bench = Bench(driver, device, Board(pathlib.Path(folder) / "board"))
        configs = [variants(problem_of(case, device), args.most) for case in cases]
        kernels = [resolve(problem_of(case, device), x) for case, xs in zip(cases, configs, strict=True) for x in xs]
        sources = {x.source: x for x in kernels if isinstance(x, Kernel)}
        say(f"{len(cases)} products, {len(kernels)} configs, {len(sources)} kernels")
        programs = list(pool.map(_compiled, cases))  # before the rest: XLA tunes on the device
        list(pool.map(_compiled_kernel, sources.values()))
        say("compiled")
        for case, of_xla, xs in zip(cases, programs, configs, strict=True):
            if time.monotonic() > end:
                say("time is up")
                break
            try:
                if isinstance(of_xla, Exception):
                    raise of_xla
                row = measure(bench, case, of_xla, xs, args)
            except Exception as error:
                if "CUDA_ERROR" in str(error):
                    raise
                traceback.print_exc()
                say(f"{case.name}: {type(error).__name__}: {error}"[:300])
                continue
            content["rows"].append(row)
            args.out.write_text(json.dumps(content))
            first, best = row["configs"][0], min(row["configs"], key=lambda x: x["us"])
            say(
                f"{row['case']:30s} XLA {row['xla_us']:8.1f}, first {first['us']:8.1f}, best {best['us']:8.1f} us "
                f"{ {k: v for k, v in best.items() if k not in ('us', 'burst_us', 'mhz', 'stages')} }"
            )
        pool.shutdown(cancel_futures=True)
    print("\n".join(read(content["rows"], device)))
    return 0
