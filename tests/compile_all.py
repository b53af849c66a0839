"""Every kernel for every architecture through NVRTC: registers, spills, seconds, and the instructions that multiply.

    python -m tests.compile_all                              # all of them: hours of one core; it takes all cores
    python -m tests.compile_all --arch sm_80 sm_90a --sample 100

The kernels are those that any family has for the products below, each text once. It fails where one does not compile,
spills, warns, or lacks the instruction that its dtypes and architecture promise. It needs NVRTC and nvdisasm, no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from cubin import code_bytes, instructions, multiplies  # noqa: E402
from instructions import expected  # noqa: E402

import cutjax  # noqa: E402
from cutjax.kernels import families  # noqa: E402
from cutjax.kernels.device import reference  # noqa: E402
from cutjax.kernels.problem import LAYOUTS, Problem  # noqa: E402
from cutjax.runtime import compiler  # noqa: E402
from cutjax.runtime.architectures import ARCHITECTURES, canonical  # noqa: E402

# Operands and result. "tf32" and the like are precisions of f32.
DTYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")]
DTYPES += [("float64", "float64"), ("int8", "int32"), ("uint8", "uint32"), ("complex64", "complex64")]
DTYPES += [("complex128", "complex128"), ("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32")]
NARROW = [("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn"), ("float16", "uint8"), ("float16", "float8_e5m2")]
_PARTS = ("TF32_TF32_F32", "TF32_TF32_F32_X3", *(f"BF16_BF16_F32{x}" for x in ("", "_X3", "_X6", "_X9")))
PRECISIONS = {"float32": ("highest", *_PARTS), "float16": (None, "F16_F16_F16")}
SIZES = {"large": (4096, 4096, 4096), "few": (16, 4096, 4096), "odd": (1000, 1001, 1003)}
EPILOGUES = {
    "bias": (lambda acc, b: jax.nn.gelu(acc + b.astype(acc.dtype)), ("n",)),
    "residual": (lambda acc, x: (acc + x.astype(acc.dtype), jnp.sum(acc, axis=-1)), ("mn",)),
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel that was compiled.

    Attributes:
      name: its name.
      arch: for which architecture.
      wrong: everything that is wrong with it.
      registers: of a thread.
      code: bytes of it.
      seconds: of a processor.
    """

    name: str
    arch: str
    wrong: tuple[str, ...]
    registers: int | None
    code: int
    seconds: float

    def __str__(self) -> str:
        facts = (
            f"{self.arch:8} {self.registers or 0:3} registers {self.code >> 10:4} KB {self.seconds:5.2f} s  {self.name}"
        )
        return facts if not self.wrong else f"{facts}\n  WRONG: {'; '.join(self.wrong)}"


def _layout(layout: str, m: int, n: int, k: int) -> list[tuple[int, int]]:
    return [(m, k) if layout[0] == "n" else (k, m), (k, n) if layout[1] == "n" else (n, k)]


def cases() -> Iterator[tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]]:
    """The products: each a function and its operands."""
    aval = jax.ShapeDtypeStruct
    for dtype, out in DTYPES:
        for precision in PRECISIONS.get(dtype, (None,)):
            how = {
                "out_dtype": out,
                "precision": precision and getattr(jax.lax.DotAlgorithmPreset, precision, precision),
            }
            for m, n, k in SIZES.values():
                for layout in LAYOUTS if (m, n, k) == SIZES["large"] else ("nn", "nt"):
                    gemm = functools.partial(cutjax.gemm, layout=layout, **how)
                    yield gemm, [aval(shape, dtype) for shape in _layout(layout, m, n, k)]
            m, n, k = SIZES["large"]
            a, b = aval((m, k), dtype), aval((k, n), dtype)
            if jnp.issubdtype(dtype, jnp.floating):
                for function, shape in EPILOGUES.values():
                    x = aval(tuple({"m": m, "n": n}[axis] for axis in shape[0]), out)
                    more = {**how, "out_dtype": out if shape == ("n",) else (out, None)}

                    def fused(a, b, x, function=function, more=more):
                        return cutjax.gemm(a, b, epilogue=function, operands=(x,), **more)

                    yield fused, [a, b, x]
            groups, sizes = aval((8, k, n), dtype), aval((8,), "int32")
            yield functools.partial(cutjax.grouped_gemm, **how), [a, groups, sizes]
            yield functools.partial(cutjax.grouped_outer, **how), [a, aval((m, n), dtype), sizes]
            yield functools.partial(cutjax.syrk, **how), [a]

            def added(a, b, how=how):
                return cutjax.gemm((a, a), (b, b), backend="cuda", **how)

            def added_in_groups(a, b, sizes, how=how):
                return cutjax.grouped_gemm((a, a), (b, b), sizes, backend="cuda", **how)

            def several(a, b, sizes, how=how):
                return cutjax.grouped_outer(a, (b, b), sizes, backend="cuda", **how)

            yield added, [a, b]
            yield added_in_groups, [a, groups, sizes]
            yield several, [a, aval((m, n), dtype), sizes]
    for dtype, of_b in NARROW:
        for m, n, k in SIZES.values():
            for layout in LAYOUTS[:3]:
                a, b = _layout(layout, m, n, k)
                yield functools.partial(cutjax.gemm, layout=layout), [aval(a, dtype), aval(b, of_b)]
        m, n, k = SIZES["large"]
        a, scale = aval((m, k), dtype), aval((1, n), "float32")

        def quantized(a, b, s):
            return cutjax.gemm(a, (cutjax.Quantized(b, s), b), epilogue=lambda x, y: x * jax.nn.silu(y))

        yield quantized, [a, aval((k, n), of_b), scale]
        yield cutjax.grouped_gemm, [a, aval((8, k, n), of_b), aval((8,), "int32")]


@functools.cache
def problems(every: int = 1) -> list[Problem]:
    """The problems of one in so many products, each once."""
    found = {}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for function, avals in itertools.islice(cases(), 0, None, every):
            for row in cutjax.explain(function, platform="cpu")(*avals).rows:  # no kernel is chosen, which takes long
                found[row.choice.problem] = None
    return list(found)


def kernels(arch: str, every: int = 1) -> list[list[tuple[Any, Problem, Any]]]:
    """For each problem of an architecture that a family serves, every kernel: the family, the problem, the config."""
    found = []
    for problem in (problem.on(reference(arch)) for problem in problems(every)):
        for family in families.FAMILIES:
            if not family.reasons(problem):
                found.append([(family, problem, config) for config in family.configs(problem)])
    return found


def sampled(found: list[list[Any]], most: int | None) -> Iterator[Any]:
    """All of the lists, one of each in turn; with ``most``, in an order that is random and always the same."""
    draw, lists = random.Random(0), [list(entries) for entries in found]
    if most is not None:
        draw.shuffle(lists)
        for entries in lists:
            draw.shuffle(entries)
    for turn in range(max(map(len, lists), default=0)):
        yield from (entries[turn] for entries in lists if turn < len(entries))


def compile_one(entry: tuple[Any, Problem, Any], source: str, name: str) -> Compiled:
    """Compiles a kernel, whatever the caches hold, and looks at it."""
    family, problem, _ = entry
    arch, start = problem.arch, time.thread_time()
    try:
        cubin = compiler.compile_source(source, name=name, arch=arch)
    except compiler.CompileError as error:
        return Compiled(name, arch, (f"does not compile: {error.log[-2000:]}",), None, 0, time.thread_time() - start)
    seconds, resources, wrong = time.thread_time() - start, cubin.resources, []
    spilled = resources.spill_store_bytes, resources.spill_load_bytes
    if spilled != (0, 0):
        wrong.append(f"spills: {spilled[0]} bytes stored, {spilled[1]} loaded")
    if said := re.findall(r"^.*(?:warning|Performance Loss|injected).*$", cubin.log, re.MULTILINE):
        wrong.append(said[0])
    names = expected(family.name, problem.a.dtype.name, getattr(problem, "math", ""), arch)
    opcodes = instructions(cubin.image)
    if not any(opcode.startswith(names) for opcode in opcodes):
        has = sorted(opcode for opcode in opcodes if multiplies(opcode))
        wrong.append(f"has none of {', '.join(names)}, but {', '.join(has) or 'no multiplication'}")
    return Compiled(name, arch, tuple(wrong), resources.registers, code_bytes(cubin.image), seconds)


def compiled(arch: str, most: int | None = None, every: int = 1) -> Iterator[Compiled]:
    """Compiles the kernels of an architecture, or a sample of so many, for one in so many products, on all cores."""
    seen, jobs = set(), []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for family, problem, config in sampled(kernels(arch, every), most):
            kernel = family.resolve(problem, config)
            if isinstance(kernel, tuple) or kernel.unlaunchable() or kernel.source in seen:
                continue
            seen.add(kernel.source)
            jobs.append(pool.submit(compile_one, (family, problem, config), kernel.source, kernel.name))
            if len(jobs) == most:
                break
        for job in jobs:
            yield job.result()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.compile_all")
    parser.add_argument("--arch", nargs="+", type=canonical, default=list(ARCHITECTURES))
    parser.add_argument("--sample", type=int, help="so many kernels of each architecture; else all")
    parser.add_argument("--quiet", action="store_true", help="shows only what is wrong")
    args = parser.parse_args(argv)
    failed = 0
    for arch in args.arch:
        found = []
        for one in compiled(arch, args.sample):
            found.append(one)
            if one.wrong or not args.quiet:
                print(one, flush=True)
        wrong = sum(bool(one.wrong) for one in found)
        failed += wrong
        slowest = max((one.seconds for one in found), default=0)
        slow = sum(one.seconds > 1 for one in found)
        print(f"{arch}: {len(found)} kernels, {wrong} wrong, slowest {slowest:.2f} s, {slow} over a second", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
