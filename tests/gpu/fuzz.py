"""Random products of both families: equal to numpy's, bit for bit, or wrong.

    python -m tests.gpu.fuzz --count 1000 --seed 0

Every dtype and way to multiply that has kernels, every layout, sizes of 1 to 300, batches, groups, symmetric products,
epilogues, and any of a family's configs. Results land in memory full of NaN. Problem i of a seed is the same on every
machine, and what fails prints the command that runs it alone. Eight neighbours share a kernel, mostly.

``--family`` and ``--only REGEX`` run some; ``--list`` names them. ``--host sm_80`` needs no GPU: g++ compiles kernels
of the mma family for the CPU (tests/kernel_host.py), whose problems are smaller.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import functools
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import launches  # noqa: E402
import numpy as np  # noqa: E402
import problems  # noqa: E402
import products  # noqa: E402

from cutjax.kernels.mma import family as mma  # noqa: E402
from cutjax.kernels.sm90 import family as sm90  # noqa: E402

FAMILIES = {"mma": mma, "sm90": sm90}
SHARED = 8  # problems of one kernel
EDGES = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
MOST_FAILURES = 20  # after an illegal address all others fail too
SECONDS = 120  # that one problem may take: longer is a kernel that waits for ever
LAYOUTS = {"rows": ("nn", "nt"), "k": ("tn",), "symmetric": ("nt", "tn"), "dense": ("nn", "nt", "tn", "tt")}
RESULTS = {"float32": ("bfloat16", "float16"), "float64": ("float32",), "int32": ("float32",)}


@dataclasses.dataclass(frozen=True)
class Space:
    """The problems of a seed.

    Attributes:
      seed: of all.
      family: whose kernels run; "" is either's.
      arch: the architecture; "" is sm_90a.
      most: the largest size.
    """

    seed: int = 0
    family: str = ""
    arch: str = ""
    most: int = 300

    def case(self, index: int) -> launches.Case:
        """Problem number ``index``."""
        family, item, config, unit = _template(self, index // SHARED)
        for attempt in range(100):
            rng = np.random.default_rng([self.seed, index, attempt, 1])
            sizes = {axis: self._size(rng, unit) for axis in "mnk"}
            # Of a slim kernel's few rows, or columns, there are no more.
            sizes |= {axis: int(rng.integers(1, most + 1)) for axis in "mn" if (most := getattr(item, axis)) <= 4}
            if item.kind == "symmetric":
                sizes["n"] = sizes["m"]
            found = dataclasses.replace(item, **sizes, seed=index, hostile=str(rng.choice(products.grouped.KINDS)))
            if _serves(family, found.problem, config):
                return launches.Case(found.problem, config, found.data, f"{found.problem}, {found.epilogue}")
        raise AssertionError(f"{self}, problem {index}: no sizes of {item} suit {config}")

    def _size(self, rng: np.random.Generator, unit: int) -> int:
        drawn = int(rng.choice(EDGES)) if rng.random() < 0.4 else int(rng.integers(1, self.most + 1))
        return -(-min(drawn, self.most) // unit) * unit


@functools.lru_cache(maxsize=4096)
def _template(space: Space, number: int) -> tuple[Any, products.Item, Any, int]:
    """The family, product but for its sizes, config, and divisor of sizes that neighbours share."""
    for attempt in range(1000):
        rng = np.random.default_rng([space.seed, number, attempt, 0])
        family = FAMILIES[space.family or str(rng.choice(list(FAMILIES)))]
        way, kind = str(rng.choice(list(products.WAYS))), str(rng.choice(products.KINDS, p=(0.6, 0.15, 0.13, 0.12)))
        if kind == "symmetric" and len(set(products.WAYS[way][:2])) > 1:
            continue
        m = n = k = space.most // 16 * 16  # which TMA may load
        if kind == "dense" and rng.random() < 0.15:
            few = int(rng.integers(1, 5))
            m, n = (few, n) if rng.random() < 0.5 else (m, few)
        unit, out, epilogue = int(rng.choice((1, 1, 2, 4, 8, 16))), "", "plain"
        if rng.random() < 0.5:
            epilogue = str(rng.choice(products.epilogues(way, kind)))
        elif rng.random() < 0.4:
            out = str(rng.choice(RESULTS.get(products.accumulator_of(way).name, ("",))))
        batches = _batches(rng) if rng.random() < 0.3 else ((), ())
        if kind == "symmetric":
            batches = (batches[0],) * 2
        layout = str(rng.choice(LAYOUTS[kind]))
        item = products.Item(way, kind, layout, m, n, k, epilogue, out, batches, space.arch)
        problem = item.problem
        served = [
            config for config in family.configs(problem) if not isinstance(family.resolve(problem, config), tuple)
        ]
        if not served:
            continue
        served.sort(key=repr)  # a change of the cost model, or of the order of configs, does not change which is drawn
        config = served[rng.integers(len(served))]
        if rng.random() < 0.15:
            divided = dataclasses.replace(config, splits=int(rng.integers(2, 5)))
            config = divided if _serves(family, problem, divided) else config
        return family, item, config, 16 if getattr(config, "tma", False) else unit
    raise AssertionError(f"{space}, template {number}: no kernel serves what was drawn")


def _serves(family: Any, problem: Any, config: Any) -> bool:
    return not isinstance(family.resolve(problem, config), tuple)


def _batches(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batch shapes of a and b: equal, or broadcast along some axes."""
    _, a, b = problems._batches(rng)
    return tuple(min(size, 3) for size in a), tuple(min(size, 3) for size in b)


def check(case: launches.Case, prepared: tuple, host: pathlib.Path | None) -> str | None:
    """Runs a problem; what is wrong with the results, or None."""
    call, arrays, expected = prepared
    execute = launches.on_host(case.kernel, host) if host else launches.on_device
    return launches.wrong(launches.run(case.problem, call, arrays, execute), expected)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fuzz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first problem's number")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--family", choices=list(FAMILIES), default="", help="whose kernels")
    parser.add_argument("--only", type=re.compile, default="", help="a regular expression: which kernels or problems")
    parser.add_argument("--list", action="store_true", help="only name the problems and their kernels")
    parser.add_argument("--host", metavar="ARCH", default="", help="run on the CPU what the mma family has for it")
    args = parser.parse_args(argv)
    start = time.monotonic()
    space = Space(args.seed, "mma", args.host, 80) if args.host else Space(args.seed, args.family)
    cases = {index: space.case(index) for index in range(args.first, args.first + args.count)}
    cases = (
        {index: case for index, case in cases.items() if args.only.search(f"{index} {case}")} if args.only else cases
    )
    kernels = {case.kernel.name for case in cases.values()}
    of = collections.Counter(name.split("_")[0] for name in kernels)
    print(
        f"{len(cases)} problems, {len(kernels)} kernels ({dict(of)}), drawn in {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if args.list:
        print("\n".join(f"{index} {case}" for index, case in cases.items()))
        return 0
    failed, done = [], 0
    prefetch = problems.Prefetch(list(cases.values()), launches.Case.prepare, ahead=64)
    with tempfile.TemporaryDirectory() as folder:
        host = pathlib.Path(folder) if args.host else None
        for index, case in cases.items():
            done += 1
            print(index, end="\r", flush=True)  # of one that hangs, which it is
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
            try:
                found = check(case, prefetch.get(case), host)
            except Exception as error:  # goes on: one run shows all
                found = f"{error!r:.1500}"
            if found:
                failed.append(index)
                where = f"--host {args.host}" if args.host else f"--family {args.family}" if args.family else ""
                again = f"python -m tests.gpu.fuzz --seed {args.seed} {where} --first {index} --count 1"
                print(f"{index} {case}\n    {found}\n    again: {again}", flush=True)
            if len(failed) == MOST_FAILURES:
                break
    faulthandler.cancel_dump_traceback_later()
    prefetch.close()
    word, took = "FAILED" if failed else "ok", time.monotonic() - start
    print(f"{word}: {done} of {len(cases)} problems ran, {len(failed)} wrong, {took:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
