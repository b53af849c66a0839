"""Compilation under load: many threads of several processes, one cache folder that evicts and is being damaged.

    python -m tests.stress_compile --minutes 10 --threads 16 --processes 4

Each thread compiles kernels of random epilogues, layouts and tiles, each under several texts, so that the caches miss
as well as hit. A kernel's cubin must be, byte for byte, the first that any process made of it, and nothing may warn,
raise or crash; the last lines say what ran, and the bound on a failure. It needs NVRTC, not a GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import faulthandler
import functools
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import strategies  # noqa: E402

import cutjax  # noqa: E402
from cutjax.kernels.sm90 import kernel as sm90  # noqa: E402
from cutjax.runtime import compiler, disk_cache, settings  # noqa: E402

CACHE_BYTES = 4 << 20  # some 60 of the smaller kernels: entries come and go
SALTS = 12  # texts of a kernel; more of them are fewer hits
WRONG = 'extern "C" __global__ void wrong(float* x) { x[0] = nothing; }'


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel: what `compile_kernel` takes."""

    name: str
    text: str

    def salted(self, salt: int) -> str:
        """The kernel with a salted text, which no cache has."""
        return f"{self.text}\n// {salt}\n"


@functools.cache
def kernels(count: int) -> list[Kernel]:
    """Kernels of as many random epilogues, each with a layout and a tile of its own; the same in every process."""
    draw, found = random.Random(count), []
    cases = strategies.examples(2 * count, tuple(sorted(strategies.KINDS)))
    for i, case in enumerate(cases):
        layout = ("nn", "nt", "tn", "tt")[i % 4]
        a, b = (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16) for _ in range(2))
        operands = case.arrays((1024, 1024))

        def gemm(a, b, operands, case=case, layout=layout):
            bs = (b,) * case.products if case.products > 1 else b
            dtypes = (None,) * len(case.trees)
            return cutjax.gemm(a, bs, epilogue=case, operands=operands, layout=layout, out_dtype=dtypes)

        (row,) = cutjax.explain(gemm, platform="cuda")(a, b, operands).rows
        served = [c for c in cutjax.candidates(row.choice.problem) if c.accumulator_registers <= 64]  # soon compiled
        if served and len(found) < count:
            config = draw.choice(served)
            kernel = sm90.resolved(row.choice.problem, config)
            found.append(Kernel(kernel.name, kernel.source))
    return found


def first_digest(folder: pathlib.Path, number: int, digest: str) -> str:
    """The digest of the first cubin that any process made of a kernel."""
    path = folder / f"{number}.digest"
    mine = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    mine.write_text(digest)
    try:
        os.link(mine, path)  # whole or not at all, and only if nobody was first
    except FileExistsError:
        return path.read_text()
    finally:
        mine.unlink()
    return digest


def damage(folder: pathlib.Path, draw: random.Random) -> None:
    """Spoils some entry of a cache, in one of the ways that a disk, another version or a person might."""
    entries = list(folder.glob("*.kernel"))
    if not entries:
        return
    path = draw.choice(entries)
    key = path.name.removesuffix(".kernel")
    try:
        data = bytearray(path.read_bytes())
        kind = draw.randrange(5)
        if kind == 0:
            path.unlink()
        elif kind == 1:
            os.truncate(path, draw.randrange(len(data) + 1))
        elif kind == 2:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        elif kind == 3:
            metadata = draw.choice([{}, [], None, 1, {"resources": {}}, {"log": 1, "seconds": "x", "resources": None}])
            path.write_bytes(disk_cache._encode(key, json.dumps(metadata).encode(), b"\x7fELF?"))
        else:
            path.write_bytes(draw.choice(entries).read_bytes())
    except (OSError, ValueError, IndexError):  # evicted, or damaged, by another in between
        return


def work(seed: int, until: float, folder: pathlib.Path, count: int) -> collections.Counter[str]:
    """One thread: compiles until it is time, and compares."""
    draw, done, all_kernels = random.Random(seed), collections.Counter(), kernels(count)
    while time.monotonic() < until:
        number = draw.randrange(len(all_kernels))
        kernel = all_kernels[number]
        text = kernel.salted(draw.randrange(SALTS))
        cubin = compiler.compile_kernel(text, name=kernel.name, arch="sm_90a")
        done["cached" if cubin.cached else "compiled"] += 1
        digest = hashlib.sha256(cubin.image).hexdigest()
        expected = first_digest(folder / "digests", number, digest)
        if digest != expected:
            done["different"] += 1
            (folder / f"different-{number}-{digest[:8]}.cubin").write_bytes(cubin.image)
            (folder / f"different-{number}.cu").write_text(text)
        if draw.random() < 0.02:
            try:
                compiler.compile_kernel(f"{WRONG}// {seed} {sum(done.values())}", name="wrong", arch="sm_90a")
            except compiler.CompileError:
                done["refused, as they should be"] += 1
            else:
                done["compiled that is wrong"] += 1
        if draw.random() < 0.2:
            damage(folder / "cache", draw)
            done["entries damaged"] += 1
    return done


def child(seed: int, seconds: float, threads: int, folder: pathlib.Path, count: int) -> int:
    """One process: prints what its threads did, as JSON."""
    faulthandler.enable()
    warnings.simplefilter("error")  # as of a cache that cannot be used
    compiler._MEMORY_ENTRIES = 8
    (folder / "digests").mkdir(exist_ok=True)
    kernels(count)
    until = time.monotonic() + seconds
    with (
        settings.override(cache_dir=folder / "cache", cache_bytes=CACHE_BYTES, dump_dir=None),
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
    ):
        futures = [pool.submit(work, seed * threads + i, until, folder, count) for i in range(threads)]
        done = sum((future.result() for future in futures), collections.Counter())
    print(json.dumps(done))
    return 0


def run(args: argparse.Namespace, folder: pathlib.Path) -> int:
    """All processes; what they did, and whether nothing was wrong."""
    command = [sys.executable, "-m", "tests.stress_compile", "--folder", str(folder), "--threads", str(args.threads)]
    command += ["--minutes", str(args.minutes), "--kernels", str(args.kernels), "--stack-kb", str(args.stack_kb)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "CUTJAX_CACHE_DIR": str(folder / "cache")}
    processes = []
    for i in range(args.processes):
        log = folder / f"process-{i}.err"
        with log.open("w") as err:
            one = [*command, "--child", str(args.seed * args.processes + i)]
            processes.append(
                subprocess.Popen(one, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=err, text=True)
            )
    failed, total = 0, collections.Counter()
    for i, process in enumerate(processes):
        out, _ = process.communicate()
        if process.returncode:
            failed += 1
            how = signal.Signals(-process.returncode).name if process.returncode < 0 else process.returncode
            print(f"process {i} ended with {how}:\n{(folder / f'process-{i}.err').read_text()[-6000:]}")
        else:
            total.update(json.loads(out.splitlines()[-1]))
    wrong = total["different"] + total["compiled that is wrong"] + failed
    print(f"{args.processes} processes of {args.threads} threads, {args.minutes} minutes, seed {args.seed}:")
    print(", ".join(f"{count} {what}" for what, count in sorted(total.items())))
    if wrong:
        print(f"FAILED: {failed} processes, {total['different']} cubins differ; see {folder}")
    else:
        print(f"ok: in fewer than one in {total['compiled'] / 3:.0f} compilations, at 95%, is anything wrong")
    return int(wrong > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress_compile")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=16, help="of each process")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=48, help="how many different ones")
    parser.add_argument("--stack-kb", type=int, default=0, help="stack of each thread; 0 is the system's")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    parser.add_argument("--folder", type=pathlib.Path, help="for the cache and what differs; else a temporary one")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        if args.stack_kb:
            threading.stack_size(args.stack_kb << 10)
        return child(args.child, args.minutes * 60, args.threads, args.folder, args.kernels)
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        return run(args, args.folder)
    with tempfile.TemporaryDirectory() as folder:
        return run(args, pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
