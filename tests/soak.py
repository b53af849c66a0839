"""Processes that share a kernel cache and a file of tuned kernels, killed at random: nothing is lost, no bit is wrong.

    python -m tests.soak --minutes 60 --processes 8

Each process compiles small kernels, in a cache that evicts, and adds entries to the file, writing down each that it was
told is there. Every few seconds one is killed by SIGKILL, wherever it is, and another takes its place. A kernel's cubin
must be the first that any process made of it; in the end the file must have every entry that was written down, and the
cache none that cannot be read. It needs NVRTC, not a GPU.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from stress_compile import first_digest  # noqa: E402

from cutjax.runtime import compiler, disk_cache, settings, tuning_file  # noqa: E402

CACHE_BYTES = 96 << 10  # some of the kernels below, so that they come and go
KERNELS = 40
TEXT = 'extern "C" __global__ void k{n}(float* x) {{ for (int i = 0; i < {n}; ++i) x[i] = x[i] * {n}.f + x[i + 1]; }}'


def work(seed: int, folder: pathlib.Path) -> None:
    """One process: compiles, merges and writes down what it did, until it is killed."""
    warnings.simplefilter("error")  # as of a cache that cannot be used, or of a file that is set aside
    compiler._MEMORY_ENTRIES = 4
    draw = random.Random(seed)
    with (
        settings.override(cache_dir=folder / "cache", cache_bytes=CACHE_BYTES, dump_dir=None),
        open(folder / "written" / f"{seed}.jsonl", "a", buffering=1) as done,
    ):
        for count in range(10**9):
            number = draw.randrange(KERNELS)
            cubin = compiler.compile_kernel(TEXT.format(n=number), name=f"k{number}", arch="sm_90a")
            digest = hashlib.sha256(cubin.image).hexdigest()
            if digest != first_digest(folder / "digests", number, digest):
                done.write(json.dumps({"different": number}) + "\n")
            entry = {"config": None, "time_us": None, "xla_us": draw.random() + 1}
            key = f"{seed}-{count % 200}"
            done.write(json.dumps({"merging": key, "entry": entry}) + "\n")
            tuning_file.merge(folder / "tuned.json", {f"device {seed % 3}": {key: entry}})
            done.write(json.dumps({"merged": key, "device": f"device {seed % 3}", "cached": cubin.cached}) + "\n")


def examined(folder: pathlib.Path) -> tuple[collections.Counter[str], list[str]]:
    """Counts of what the processes did, and what is wrong."""
    done, wrong = collections.Counter[str](), []
    content = tuning_file.examine(folder / "tuned.json")
    if content.problem:
        wrong.append(f"the file of tuned kernels: {content.problem}")
    if len(parts := list(folder.glob("*.tmp"))) > 1:
        wrong.append(f"{len(parts)} parts of files were left")
    for path in sorted((folder / "written").glob("*.jsonl")):
        possible: dict[str, list[object]] = {}  # entries that may stand there: the last one merged, and one begun since
        devices: dict[str, str] = {}
        for line in path.read_text().splitlines():
            try:
                said = json.loads(line)
            except ValueError:  # the last line of one that was killed
                continue
            if "different" in said:
                wrong.append(f"kernel {said['different']} has another cubin, in {path.name}")
            elif "merging" in said:
                possible.setdefault(said["merging"], []).append(said["entry"])
            else:
                possible[said["merged"]] = possible[said["merged"]][-1:]
                devices[said["merged"]] = said["device"]
                done["merged"] += 1
                done["kernels from the cache" if said["cached"] else "kernels compiled"] += 1
        for key, device in devices.items():
            if content.devices.get(device, {}).get(key) not in possible[key]:
                wrong.append(f"the entry {key} is not what was merged")
        done["entries"] += len(devices)
    cache = disk_cache.DiskCache(folder / "cache", CACHE_BYTES)
    for entry in (folder / "cache").glob("*.kernel"):
        done["entries of the cache"] += 1
        if cache.read(entry.name.removesuffix(".kernel")) is None:
            wrong.append(f"the entry {entry.name} of the cache cannot be read")
    return done, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        work(args.child, args.folder)
    with tempfile.TemporaryDirectory() as name:
        folder, draw = pathlib.Path(name), random.Random(args.seed)
        for part in ("digests", "written"):
            (folder / part).mkdir()
        started, killed, ended = 0, 0, []

        def start() -> subprocess.Popen[bytes]:
            nonlocal started
            started += 1
            command = [sys.executable, "-m", "tests.soak", "--folder", name, "--child", str(started)]
            return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})

        processes = [start() for _ in range(args.processes)]
        until = time.monotonic() + 60 * args.minutes
        while time.monotonic() < until:
            time.sleep(draw.uniform(0.5, 5))
            i = draw.randrange(args.processes)
            ended += [p.args for p in processes if p.poll() is not None]
            # Not before it works: of one that is starting there is nothing to lose.
            if (folder / "written" / f"{processes[i].args[-1]}.jsonl").exists():  # pyright: ignore
                processes[i].send_signal(signal.SIGKILL)
                processes[i].wait()
                processes[i], killed = start(), killed + 1
        for process in processes:
            process.kill()
            process.wait()
        done, wrong = examined(folder)
    wrong += [f"a process ended by itself: {command}" for command in ended]
    print(f"{args.processes} processes, {args.minutes} minutes, seed {args.seed}: {killed} killed")
    print(", ".join(f"{count} {what}" for what, count in sorted(done.items())))
    print("\n".join(["FAILED", *wrong[:20]]) if wrong else "ok: nothing was lost, and no bit is wrong")
    return int(bool(wrong) or not done["merged"])


if __name__ == "__main__":
    sys.exit(main())
