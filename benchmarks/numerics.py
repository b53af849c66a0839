"""Errors of each precision, of the kernels and of XLA, against longer arithmetic: ``python -m benchmarks numerics``.

Writes a JSON and the table of docs/numerics.md; fails where a kernel's error is above XLA's for the same name.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from benchmarks import report
from cutjax.dot_precision import accumulator
from cutjax.tuning.measure import parallel

# Several times as many tiles as an H200 has SMs: sums are not divided, by which fewer are added up one after another.
M, N, K = 4096, 4096, 2048
ROWS = slice(3, None, 131)  # those compared, on other lanes of each tile
PRESETS = tuple(preset.name for preset in lax.DotAlgorithmPreset if preset.name != "DEFAULT")
NAMES = ("default", "high", "highest", *PRESETS)
DTYPES = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")
# The error of two sums of the same products in another order differs by chance, more so the fewer are compared. Both
# of a name that are below one rounding of the result are as good: 2^-24 of float32.
MOST = 1.25


def gaussian(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, which: int) -> np.ndarray:
    """Random normal numbers."""
    return rng.standard_normal(shape)


def wide(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, which: int) -> np.ndarray:
    """Random normal numbers of widely differing exponents, as wide as the products of their dtype stay normal."""
    least = {2: 6, 1: 3}.get(dtype.itemsize, 20) if dtype != jnp.bfloat16 else 20
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-least, least + 1, shape)


def cancelling(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, which: int) -> np.ndarray:
    """Two halves of the contraction whose sums cancel, but for numbers 2^-4 as large; ``which`` is 0 of a, 1 of b."""
    half = [shape[0] // (1 if which == 0 else 2), shape[1] // (2 if which == 0 else 1)]
    first = rng.standard_normal(half)
    second = -first + 2.0**-4 * rng.standard_normal(half) if which == 0 else first
    return np.concatenate([first, second], axis=1 - which)


INPUTS: dict[str, Callable[..., np.ndarray]] = {"gaussian": gaussian, "wide": wide, "cancelling": cancelling}


def inputs(kind: str, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns a [M, K] and b [K, N] of a dtype; the same in every run."""
    rng = np.random.default_rng(13)
    found = []
    for which, shape in enumerate([(M, K), (K, N)]):
        x = INPUTS[kind](rng, shape, dtype, which)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            x = x + 1j * INPUTS[kind](rng, shape, dtype, which)
        found.append(x.astype(np.float32 if dtype.itemsize <= 2 else x.dtype).astype(dtype))
    return found[0], found[1]


def reference(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the compared rows of the product, in float64 or, of 64-bit parts, longer; and those of |a| |b|."""
    longer = {"float64": np.longdouble, "complex64": np.complex128, "complex128": np.clongdouble}
    wide = longer.get(a.dtype.name, np.float64)
    a = a[ROWS]
    size = np.abs(a.astype(wide)).astype(np.float64) @ np.abs(b.astype(wide)).astype(np.float64)
    return a.astype(wide) @ b.astype(wide), size


def errors(d: Any, exact: np.ndarray, size: np.ndarray) -> dict[str, float]:
    """Returns ||d - ab|| / ||ab||, and the largest |d - ab| over (|a| |b|), element by element."""
    off = np.abs(np.asarray(d[ROWS]).astype(exact.dtype) - exact).astype(np.float64)
    norm = np.linalg.norm(np.abs(exact).astype(np.float64))
    return {"relative": float(np.linalg.norm(off) / norm), "componentwise": float(np.max(off / size))}


def measure(dtype: str, name: str, arrays: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Returns the errors of a dtype in a precision, one row for each kind of inputs; none where lax has no such."""
    params: dict[str, Any] = {"precision": name, "out_dtype": accumulator(np.dtype(dtype))}
    a, b, *_ = next(iter(arrays.values()))
    try:
        (product,) = cutjax.explain(lambda a, b: cutjax.gemm(a, b, **params), platform="cuda")(a, b).rows
    except (TypeError, ValueError):
        return []
    math = product.choice.problem.math
    rows = [{"dtype": dtype, "precision": name, "math": math, "inputs": kind} for kind in arrays]
    for who, backend in (("ours", "cuda"), ("xla", "xla")):
        try:
            run = jax.jit(functools.partial(cutjax.gemm, backend=backend, **params)).lower(a, b).compile()
            found = [errors(run(a, b), exact, size) for a, b, exact, size in arrays.values()]
        except Exception as error:  # refused: by cutjax with its reasons, or by XLA
            found = [{"error": str(error).splitlines()[0][:300]}] * len(rows)
        for row, of in zip(rows, found, strict=True):
            row[who] = of
    return rows if any("relative" in rows[0][who] for who in ("ours", "xla")) else []


def worse(row: dict[str, Any]) -> bool:
    """True if both have a result, and the kernel's error is above XLA's and above the rounding of the result."""
    ours, xla = row["ours"].get("relative"), row["xla"].get("relative")
    if ours is None or xla is None:
        return False
    dtype = accumulator(np.dtype(row["dtype"]))
    least = float(np.finfo(dtype).eps) / 2 * (1 if row["inputs"] != "cancelling" else 16)
    return not ours <= max(MOST * xla, least)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the errors as a table in Markdown, relative, of Gaussian inputs: the kernel's, XLA's."""

    def cell(of: dict[str, Any]) -> str:
        return f"{of['relative']:.1e}" if "relative" in of else "-"

    lines = ["| dtype | precision | math | kernel | XLA |", "|---|---|---|--:|--:|"]
    for row in rows:
        if row["inputs"] == "gaussian":
            math = f"`{row['math']}`" if row["math"] else ""
            lines.append(
                f"| {row['dtype']} | `{row['precision']}` | {math} | {cell(row['ours'])} | {cell(row['xla'])} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Measures all, writes the JSON and prints the table; 1 where a kernel is worse than XLA."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks numerics", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "experiments" / "numerics.json")
    parser.add_argument("--commit", help="the commit measured, where the tree is a copy without its history")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    args = parser.parse_args(argv)
    with jax.enable_x64(True):
        rows = measure_all(args.dtypes.split(","))
    sizes = {"m": M, "n": N, "k": K}
    report.write(args.out, {"environment": report.environment(args.commit), "sizes": sizes, "rows": rows})
    print(table(rows))
    bad = [row for row in rows if worse(row)]
    for row in bad:
        print("worse than XLA:", *(f"{key}={value}" for key, value in row.items()))
    return int(bool(bad))


def measure_all(dtypes: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the rows of all precisions of some dtypes."""
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        arrays = {}
        for kind in INPUTS:
            a, b = inputs(kind, np.dtype(dtype))
            arrays[kind] = (jnp.asarray(a), jnp.asarray(b), *reference(a, b))
        of_dtype = functools.partial(measure, dtype, arrays=arrays)
        rows += [row for found in parallel(of_dtype, NAMES) for row in found]
    return rows
