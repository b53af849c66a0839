"""Altered launch plans under AddressSanitizer and UndefinedBehaviorSanitizer: tests/native/fuzz_plan.cc, built and run.

    python -m tests.fuzz_plan --seconds 60

A plan is what an exported program carries of a call. The launcher's own sources are compiled with g++, beside a driver
that checks every address it is given. It needs neither a GPU nor CUDA's libraries.
"""

from __future__ import annotations

import argparse
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax.ffi  # noqa: E402
from tensor_maps import ENCODED  # noqa: E402

from cutjax.runtime.launch import Call, Float32, Float64, Int32, Int64, Launch, Pointer  # noqa: E402

SOURCES = ("driver", "encode", "plan", "launcher")
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def build(folder: pathlib.Path) -> pathlib.Path:
    """The program, compiled; warnings are errors."""
    found = subprocess.run(
        [sys.executable, ROOT / "ffi/launcher/find_cuda_h.py"], capture_output=True, text=True, check=True
    )
    includes = [jax.ffi.include_dir(), *filter(None, found.stdout.strip().split(";"))]
    program = folder / "fuzz_plan"
    sources = [ROOT / f"ffi/launcher/{name}.cc" for name in SOURCES] + [ROOT / "tests/native/fuzz_plan.cc"]
    command = ["g++", "-std=c++20", "-O0", "-g1", "-rdynamic", "-Wall", "-Wextra", "-Werror", *SANITIZERS]
    command += [f"-I{ROOT / 'ffi/launcher'}", *(f"-isystem{x}" for x in includes), *map(str, sources), "-ldl"]
    subprocess.run([*command, "-o", program], check=True)
    return program


def corpus() -> bytes:
    """Sound plans: every kind of tensor map and parameter, several launches, a persistent grid, and format 1."""

    def launch(name: str, *params: object, **more: object) -> Launch:
        given = {"grid": (1000, 3, 2), "block": (384, 1, 1), "shared_bytes": 1000, "cubin": b"first"}
        return Launch(kernel=name, params=params, **(given | more))  # pyright: ignore[reportArgumentType]

    scalars = Int32(-7), Int64(-(2**40)), Float32(0.1), Float64(0.1)
    maps = [pair[0] for pair in ENCODED.values()]
    calls = [Call((launch("one", x, Pointer(1, 16), *scalars),)) for x in maps]
    calls += [
        Call((launch("all", *maps[:20], Pointer(0), Pointer(1)),)),
        Call((launch("one", maps[0]), launch("two", Pointer(1), cubin=b"second", grid=(8, 1, 1), cluster=(4, 1, 1)))),
        Call((launch("one", *scalars, grid=(1000, 1, 1), blocks_per_sm=1),)),
    ]
    found = b""
    for call in calls:
        given = call.attributes()
        found += record(int(given["format"]), str(given["kernel"]), bytes(given["cubin"]), given["plan"].tolist())
    words = [1, 0, 5, 1000, 3, 2, 384, 1, 1, 1, 1, 1, 1000, 0, 2, 0, 0, 0, 7, 2, 3, 2, 64, 32, 256, 32, 16, 1, 1, 16]
    return found + record(1, "old", b"first", words)


def record(number: int, kernel: str, cubin: bytes, words: Sequence[int]) -> bytes:
    """A program of a given format, as the corpus has it."""
    sizes = struct.pack("<4q", number, len(kernel), len(cubin), len(words))
    return sizes + kernel.encode() + cubin + struct.pack(f"<{len(words)}q", *words)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_plan")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "corpus").write_bytes(corpus())
        print(f"seed {args.seed}", flush=True)
        return subprocess.run([build(folder), folder / "corpus", str(args.seconds), str(args.seed)]).returncode


if __name__ == "__main__":
    sys.exit(main())
