"""Cases for compute-sanitizer of other operands than of 16 bits through wgmma, and of the mma family.

Of the mma family: each file that reads fragments, with each way to load (units of 16, 8 and 4 bytes, and rows that
begin anywhere, through registers), in each kind of product. A launch has a third of the blocks that it has tiles for,
so that every block walks several.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import products
from launches import Case
from products import Item

import cutjax
from cutjax.kernels.families import in_order
from cutjax.kernels.mma import family as mma
from cutjax.kernels.mma.math import math_of
from cutjax.kernels.prepared import along_k
from cutjax.kernels.sm90 import family as sm90

LAYOUTS = ("nn", "nt", "tn", "tt")
# Ways to multiply, by the file that reads their fragments (ffi/device/mma).
FILES = {
    "tensor": ("bf16", "f32tf32", "s8", "f16f16", "f8_e4m3fn", "f16", "u8", "s8xu8", "f8_e5m2xf8_e4m3fn"),
    "terms": ("f32bf16x3", "f32tf32x3", "f32bf16x9", "f32bf16"),
    "decode": ("bf16xs8", "f16xf8_e4m3fn", "bf16xu8", "bf16xf8_e5m2"),
    "double": ("f64", "c64tf32", "c128"),
    "fma": ("f32", "c64", "s32", "s64"),
    "slim": ("bf16", "f32", "s8", "f64", "bf16xs8"),
}
KINDS = ("dense", "operands", "rows", "sums", "sliced", "k", "products", "split", "symmetric", "strided")
UNITS = (16, 1, 8, 4)  # bytes that rows begin at multiples of
BATCH = 4  # arrays end at whole words, as memcheck sees each end, and kernels load words that hold a byte of an array


def mma_cases() -> Iterator[Case]:
    """Each file in each kind of product; the way to load, the dtype, the layout and the config vary along."""
    for turn in range(2):
        for i, kind in enumerate(KINDS):
            for j, file in enumerate(FILES):
                case = _mma(file, kind, UNITS[(2 * turn + i + j) % 4], turn * len(KINDS) + i)
                if case is not None:
                    yield case
    for number, kind in enumerate(("dense", "operands", "rows", "sliced", "symmetric", "strided"), start=1):
        for file in ("tensor", "terms", "double"):
            case = _mma(file, kind, 16, number, tma=True)
            if case is not None:
                yield case


def _mma(file: str, kind: str, unit: int, number: int, tma: bool = False) -> Case | None:
    """One kernel; None where there is none. With `tma` it is one whose tiles TMA loads."""
    ways = [way for way in FILES[file] if kind != "symmetric" or len(set(products.WAYS[way][:2])) == 1]
    if not ways:
        return None
    way = ways[number % len(ways)]
    layouts = {"rows": ("nn", "nt"), "k": ("tn",), "symmetric": ("nt", "tn")}.get(kind, LAYOUTS)
    epilogue = kind if kind in products.EPILOGUES else "sum" if kind in ("k", "symmetric") else "plain"
    few = file == "slim"
    narrowest = min(products.jnp.dtype(dtype).itemsize for dtype in products.WAYS[way][:2])
    step = max(1, unit // narrowest)  # of sizes, in elements
    odd = functools.partial(_odd, step)
    shape = {"m": 3 if few and kind != "rows" else odd(64), "n": odd(64), "k": odd(70)}
    batches = ((BATCH,), (1,)) if kind == "operands" and unit > 1 else ((BATCH,), (BATCH,))
    if kind in ("rows", "k"):
        batches, shape["m" if kind == "rows" else "k"] = ((), ()), 4 * odd(4 if few else 24)
    if kind == "symmetric":
        shape["n"] = shape["m"]
    if kind == "strided":
        batches = ((2, BATCH),) * 2
    item = Item(way, kind if kind in products.KINDS else "dense", layouts[number % len(layouts)], **shape)
    item = dataclasses.replace(item, epilogue=epilogue, batches=batches, seed=number)
    problem, data = (item.problem, item.data) if kind != "strided" else _strided(item)
    config = _config(problem, kind, few, number, tma)
    label = f"{kind}, {file} by {unit}, {problem}"
    return config and Case(problem, config, data, label, walks=3)


def _odd(step: int, size: int) -> int:
    """A multiple of a step, from a size on, that is none of twice the step."""
    return (size // step // 2 * 2 + 1) * step


def _config(problem: cutjax.Problem, kind: str, slim: bool, number: int, tma: bool) -> Any:
    """A config that serves, of small tiles where there is such, or a slim one."""
    found = {config for config in mma.configs(problem) if config.slim == slim and (config.tma or not tma)}
    if kind == "split":
        found = {dataclasses.replace(config, splits=3) for config in found}
    if kind == "sliced":
        found = {config for config in found if config.sliced_k > 1}
    served = [config for config in found if not isinstance(mma.resolve(problem, config), tuple)]
    served = [config for config in served if config.bm * config.bn <= 4096] or served
    return sorted(served, key=repr)[number * 7 % len(served)] if served else None


def _strided(item: Item) -> tuple[cutjax.Problem, Callable[[], tuple[list[np.ndarray], list[np.ndarray]]]]:
    """The product of arrays [batch, rows, heads, columns]; data are given, and compared, as they lie in memory.

    Operands that are transposed before the launch are given in the order of their axes: XLA has laid them out then.
    """
    order = (0, 2, 1, 3)
    problem = in_order(item.problem, (order,) * 3)
    math = math_of(problem)
    taken = (along_k(problem) if math and math.along_k else problem).orders[:2]

    def data():
        arrays = [
            np.ascontiguousarray(x.transpose(of or range(x.ndim))) for x, of in zip(item.data()[0], taken, strict=True)
        ]
        (result,) = item.data()[1]
        if problem.orders[2]:
            result = np.ascontiguousarray(result.transpose(order)).reshape(result.shape)
        return arrays, [result]

    return problem, data


# Ways of wgmma, and configs: small, with clusters, in parts of k, swapped.
WIDE = (
    "f32tf32",
    "s8",
    "f8_e4m3fn",
    "f32bf16x6",
    "u8",
    "f32tf32x3",
    "f8_e4m3fnxf8_e5m2",
    "f32bf16x3",
    "s8xu8",
    "f32bf16x9",
)
WIDE_CONFIGS = (
    cutjax.Config(64, 64, 64, 4),
    cutjax.Config(128, 64, 64, 4, cluster_m=2),
    cutjax.Config(64, 64, 64, 4, schedule="pingpong", cluster_n=2),
    cutjax.Config(64, 64, 64, 4, stream_k=True),
    cutjax.Config(64, 64, 64, 4, cluster_k=2),
    cutjax.Config(64, 64, 64, 4, splits=2),
    cutjax.Config(64, 32, 64, 4, swap=True),
)


def wide_cases(batch: int) -> Iterator[Case]:
    """Each of wgmma's other operands, in each kind of product; a batch of more tiles than SMs."""
    kinds = ("dense", "operands", "symmetric", "rows", "k", "sums")
    for i, kind in enumerate(kinds):
        for j, way in enumerate(WIDE):
            layouts = {"rows": ("nn", "nt"), "k": ("tn",), "symmetric": ("nt", "tn")}.get(kind, LAYOUTS)
            if kind not in ("dense", "operands") and (i + j) % 2:
                continue
            epilogue = kind if kind in products.EPILOGUES else "plain"
            batches = ((), ()) if kind in ("rows", "k") else ((batch,), (batch,))
            m, n = (140 * 32, 200) if kind == "rows" else (136, 136) if kind == "symmetric" else (136, 72)
            k = 900 if kind == "k" else 72 - j % 2
            if kind == "symmetric" and len(set(products.WAYS[way][:2])) > 1:
                continue
            item = Item(way, kind if kind in products.KINDS else "dense", layouts[j % len(layouts)], m, n, k)
            item = dataclasses.replace(item, epilogue=epilogue, batches=batches, seed=j)
            if sm90.reasons(item.problem):
                continue
            first = (j + i) % len(WIDE_CONFIGS)
            configs = (*WIDE_CONFIGS[first:], *WIDE_CONFIGS[:first])
            config = next((x for x in configs if not isinstance(sm90.resolve(item.problem, x), tuple)), None)
            if config is not None:
                yield Case(item.problem, config, item.data, f"{kind}, {item.problem}")
