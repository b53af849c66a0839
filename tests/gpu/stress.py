"""Every family's kernels thousands of times on one GPU: every result must have the bits of the first.

    python -m tests.gpu.stress --seconds 300 --out stress.json

Two processes, one after the other: with command buffers around every kernel, and without. Each program of
stress_programs.py is compiled once. Its arguments are then copied to other addresses for every run, what is free in
the allocator is filled with NaN, and another stream is kept busy for half of the rounds. Results are compared on the
device, and the host looks only once a round. The table gives, for each program, how often it ran, how often its bits
differed, and what share of runs that bounds (3 / runs, at 95%). It exits with 1 if any did, or if a process crashed or
hung.

``--only REGEX`` runs some programs; ``--lower`` only compiles the kernels of all, which needs no GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from stress_programs import Program, programs  # noqa: E402

MODES = {
    "command buffers": "--xla_gpu_graph_min_graph_size=1",  # else a kernel alone is not put into one
    "no command buffers": "--xla_gpu_enable_command_buffer=",
}
RUNS = 24  # of a program in a round
RING = 3  # sets of arguments that stay alive behind the one in use
START_SECONDS = 420  # that a process may take to compile everything, beside the time it is given


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@jax.jit
def _differing(got: Any, first: Any) -> jax.Array:
    """Counts the elements that differ in their bits."""

    def bits(x: jax.Array) -> jax.Array:
        return x if x.dtype == bool else jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(first), strict=True)
    return sum((jnp.sum(bits(a) != bits(b)) for a, b in pairs), jnp.zeros((), jnp.int32))


def _nan(size_bytes: int) -> jax.Array:
    return jnp.full((max(1, size_bytes // 4),), jnp.nan, jnp.float32)


def where(got: Any, first: Any) -> list[str]:
    """Each result that differs: how many elements, how many of them NaN, and the first of them."""
    found = []
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(first), strict=True)):
        a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
        unsigned = np.dtype(f"uint{8 * a.itemsize}")
        at = np.argwhere(a.view(unsigned) != b.view(unsigned))
        if len(at):
            box = ", ".join(f"{low}..{high}" for low, high in zip(at.min(0), at.max(0), strict=True))
            values = [f"{tuple(map(int, x))}: {a[tuple(x)]} for {b[tuple(x)]}" for x in at[:4]]
            nans = int(np.isnan(a[tuple(at.T)].astype(np.float32)).sum())
            found.append(f"result {i}: {len(at)} of {a.size} ({nans} NaN) in [{box}] of {a.shape}; {'; '.join(values)}")
    return found


@dataclasses.dataclass
class Subject:
    """A program, compiled, and what its first run gave.

    Attributes:
      program, executable, arguments: what runs.
      first: the results that every other run must repeat.
      scratch_bytes: sizes of what a run allocates: each result, and all temporary memory.
      runs, mismatches: how many.
    """

    program: Program
    executable: Callable[..., Any]
    arguments: Any
    first: Any
    scratch_bytes: list[int]
    runs: int = 0
    mismatches: int = 0

    @classmethod
    def of(cls, program: Program, executable: jax.stages.Compiled) -> Subject:
        """Runs it once; the first results are copied, so that their memory is that of no run."""
        arguments = jax.device_put(program.arrays())
        first = _copy(executable(*arguments))
        sizes = [x.nbytes for x in jax.tree.leaves(first)]
        memory = executable.memory_analysis()
        sizes.append(getattr(memory, "temp_size_in_bytes", 0) or 0)
        return cls(program, executable, arguments, first, sizes)

    def round(self, runs: int, rng: np.random.Generator) -> list[str]:
        """Runs it some times on changing memory; what was wrong."""
        ring: collections.deque[Any] = collections.deque(maxlen=RING)
        outs, flags = [], []
        for _ in range(runs):
            # Small blocks live on for a while, so that what is allocated between them moves.
            ring.append((_copy(self.arguments), _nan(256 << int(rng.integers(10)))))
            for size in self.scratch_bytes:
                _nan(size)  # freed at once, in the order of the stream: the results land there
            outs.append(self.executable(*ring[-1][0]))
            flags.append(_differing(outs[-1], self.first))
        counts = np.asarray(jnp.stack(flags))
        wrong = [i for i in range(runs) if counts[i]]
        start, self.runs, self.mismatches = self.runs, self.runs + runs, self.mismatches + len(wrong)
        return [f"run {start + i}: {x}" for i in wrong[:2] for x in where(outs[i], self.first)]


class Beside:
    """Work of another stream: products and copies, by torch or CuPy, else copies from the host by JAX."""

    def __init__(self) -> None:
        self._busy, self._end = threading.Event(), threading.Event()
        self.what, self._step = self._find()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    @staticmethod
    def _find() -> tuple[str, Callable[[], Any]]:
        if jax.default_backend() != "gpu":
            return "nothing", lambda: time.sleep(0.01)
        try:
            import torch  # pyright: ignore[reportMissingImports]

            stream = torch.cuda.Stream()
            x = torch.randn(3072, 3072, device="cuda", dtype=torch.bfloat16)

            def products() -> None:
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        (x @ x).add_(1).clone()
                stream.synchronize()

            products()
            return "torch", products
        except Exception as error:
            print(f"no torch ({error!r:.100})", flush=True)
        try:
            import cupy  # pyright: ignore[reportMissingImports]

            lane = cupy.cuda.Stream(non_blocking=True)
            with lane:
                y = cupy.ones((4096, 4096), cupy.float16)

            def more() -> None:
                with lane:
                    for _ in range(4):
                        (y @ y).copy()
                lane.synchronize()

            more()
            return "CuPy", more
        except Exception as error:
            print(f"no CuPy ({error!r:.100})", flush=True)
        z = np.ones(1 << 24, np.float32)
        return "copies from the host", lambda: jax.device_put(z).block_until_ready()

    def _loop(self) -> None:
        while not self._end.is_set():
            if self._busy.wait(0.1):
                self._step()

    def set(self, busy: bool) -> None:
        """Sets whether it works from now on."""
        (self._busy.set if busy else self._busy.clear)()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()


def compiled(found: Sequence[Program]) -> Iterator[tuple[Program, jax.stages.Compiled]]:
    """Their executables, compiled in threads, in order."""

    def one(program: Program) -> jax.stages.Compiled:
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.arrays())
        return jax.jit(program.fn).lower(*avals).compile()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from zip(found, pool.map(one, found), strict=True)


def repeat(found: Sequence[Program], seconds: float, seed: int, rounds: int | None = None) -> dict[str, Any]:
    """Rounds of all programs in changing order, until it is time or so many are done; the record of all."""
    rng = np.random.default_rng(seed)
    subjects = [Subject.of(*pair) for pair in compiled(found)]
    failures: list[str] = []
    end, done = time.monotonic() + seconds, 0
    with contextlib.closing(Beside()) as beside:
        while rounds is None or done < rounds:
            beside.set(done % 2 == 1)
            for i in rng.permutation(len(subjects)):
                if rounds is None and time.monotonic() > end and all(subject.runs for subject in subjects):
                    break
                subject = subjects[i]
                for wrong in subject.round(RUNS if rounds is None else 3, rng):
                    failures.append(f"{subject.program.name}: seed {seed}, round {done}, {wrong}")
                    print(failures[-1], flush=True)
            else:
                done += 1
                continue
            break
        beside.set(False)
    rows = [{"name": s.program.name, "runs": s.runs, "mismatches": s.mismatches} for s in subjects]
    return {"seed": seed, "beside": beside.what, "rounds": done, "programs": rows, "failures": failures}


def table(records: dict[str, dict[str, Any]]) -> str:
    """The runs, mismatches and bound of each program in every mode, and of all together."""
    lines, total, bad = [], 0, 0
    for mode, record in records.items():
        lines.append(f"\n{mode}: {record['rounds']} rounds, beside {record['beside']}, seed {record['seed']}")
        lines.append(f"{'runs':>9} {'differ':>7} {'at most':>9}  program")
        for row in record["programs"]:
            bound = f"1 in {row['runs'] / 3:.0f}" if not row["mismatches"] else "-"
            lines.append(f"{row['runs']:9} {row['mismatches']:7} {bound:>9}  {row['name']}")
            total, bad = total + row["runs"], bad + row["mismatches"]
    bound = f"fewer than 1 in {total / 3:.0f} at 95%" if not bad else "-"
    return "\n".join([*lines, f"\nall: {total} runs, {bad} differ, {bound}"])


def run(args: argparse.Namespace) -> int:
    """A process for each mode; what they found."""
    records, failed = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for mode, flags in MODES.items():
            out = pathlib.Path(folder) / "record.json"
            out.unlink(missing_ok=True)
            seconds = args.seconds / len(MODES)
            command = [sys.executable, __file__, "--child", str(out), "--seconds", str(seconds)]
            command += ["--seed", str(args.seed), "--only", args.only.pattern]
            # Memory is taken as it is needed: half of the addresses are then new, and torch finds some too.
            environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
            print(f"{mode}: {flags}", flush=True)
            process = subprocess.Popen(command, env=environ, cwd=ROOT)
            try:
                code = process.wait(seconds + START_SECONDS + 30)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if out.exists():
                records[mode] = json.loads(out.read_text())
                failed += len(records[mode]["failures"])
            if code:
                failed += 1
                print(f"{mode}: ended with {signal.Signals(-code).name if code < 0 else code}", flush=True)
    print(table(records))
    if args.out:
        args.out.write_text(json.dumps(records, indent=1) + "\n")
    print("FAILED" if failed else "ok")
    return int(failed > 0)


def lower(found: Sequence[Program]) -> int:
    """Compiles the kernels of all programs, for a GPU that need not be there; how many failed."""
    failed = 0
    for program in found:
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.arrays())
        try:
            text = jax.jit(program.fn).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
            calls = text.count("@cutjax_launch")
        except Exception as error:  # goes on: one command shows all
            calls = 0
            print(f"{error!r:.2000}")
        failed += calls == 0
        print(f"{calls} kernels  {program.name}", flush=True)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.stress")
    parser.add_argument("--seconds", type=float, default=300, help="of both processes, beside their compilation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="a regular expression: which programs")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file")
    parser.add_argument("--lower", action="store_true", help="only compile the kernels; needs no GPU")
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.lower:
        return int(lower(programs(args.only.search)) > 0)
    if args.child is None:
        return run(args)
    faulthandler.enable()
    faulthandler.dump_traceback_later(args.seconds + START_SECONDS, exit=True)  # a wrong pipeline hangs
    if jax.default_backend() != "gpu":
        print("needs a GPU; --lower does not")
        return 2
    record = repeat(programs(args.only.search), args.seconds, args.seed)
    args.child.write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
