"""Kernels of every family, run on the CPU: small integers, equal to numpy bit for bit, or wrong.

After a change of kernels, ``python -m emulator.sweep`` draws as many as one likes.
"""

from __future__ import annotations

import dataclasses
import itertools

import launches
import numpy as np
import pytest
from products import Item

from cutjax import Config, MmaConfig, Problem
from cutjax.kernels import families
from cutjax.kernels.operand import Gathered
from cutjax.kernels.sm90 import resolved
from emulator import device

CASES = {
    "pingpong": (
        Item("bf16", "dense", "nn", 136, 128, 136, out="bfloat16"),
        Config(64, 64, 64, 3, schedule="pingpong"),
    ),
    "multicast": (Item("f16", "dense", "tn", 200, 72, 72, "operands"), Config(64, 64, 64, 4, cluster_m=2)),
    "256x192 in a pair, evicted": (
        Item("bf16", "dense", "nt", 264, 392, 136),
        Config(256, 192, 64, 3, cluster_n=2, evict_first="bd"),
    ),
    "swapped, evicted": (
        Item("f16", "dense", "nn", 72, 136, 72),
        Config(64, 64, 64, 4, swap=True, evict_first="abd", schedule="pingpong"),
    ),
    "cluster k": (Item("bf16", "dense", "nt", 64, 64, 200, out="float32"), Config(64, 64, 64, 4, cluster_k=2)),
    "stream k": (Item("f16", "dense", "nn", 200, 128, 264), Config(64, 64, 64, 4, stream_k=True)),
    "groups of rows": (Item("bf16", "rows", "nn", 136, 64, 72, "residual"), Config(64, 64, 64, 4, schedule="pingpong")),
    "sums of rows in groups": (
        Item("bf16", "rows", "nt", 200, 264, 72, "of rows"),
        Config(128, 128, 64, 3, cluster_n=2, schedule="pingpong"),
    ),
    "groups of rows that half a tile has": (
        Item("bf16", "rows", "nt", 264, 136, 72, "largest of rows", seed=1),
        Config(256, 64, 64, 3),
    ),
    "groups of rows that few of a pair have": (
        Item("bf16", "rows", "nt", 264, 136, 72, "of rows", seed=1),
        Config(128, 64, 64, 3, cluster_m=2),
    ),
    "groups of rows, of wide tiles": (
        Item("bf16", "rows", "nt", 264, 200, 136, seed=2),
        Config(128, 192, 64, 3, schedule="pingpong"),
    ),
    "groups of k": (Item("bf16", "k", "tn", 64, 72, 136), Config(64, 64, 64, 4)),
    "registers": (Item("bf16xs8", "dense", "nt", 16, 128, 136), Config(128, 16, 64, 3, swap=True)),
    "float8": (Item("f8_e4m3fn", "dense", "nt", 72, 64, 144, "sums"), Config(64, 64, 64, 3)),
    "b stays": (Item("bf16", "dense", "nn", 1400, 16, 72), Config(64, 16, 64, 4, cluster_m=2)),
    "b of several products stays": (
        Item("bf16", "dense", "nt", 1400, 40, 136, "products"),
        Config(64, 48, 64, 3, cluster_n=2, schedule="pingpong"),
    ),
    "a stays, swapped": (
        Item("f16", "dense", "nt", 1400, 40, 24, "sums"),
        Config(64, 64, 64, 3, schedule="pingpong", swap=True),
    ),
    "one of two tiles of a stays, swapped": (
        Item("bf16", "dense", "nn", 1400, 128, 72, "sums"),
        Config(64, 64, 64, 4, schedule="pingpong", swap=True),
    ),
    "three tiles of b, which blocks take in turn": (
        Item("bf16", "dense", "nn", 1400, 176, 24),
        Config(64, 64, 64, 4, raster=-3),
    ),
    "two of b": (Item("bf16", "dense", "nt", 1400, 104, 136), Config(64, 64, 64, 3, raster=-2)),
    "sums of whole tiles": (Item("bf16", "dense", "nn", 128, 192, 72, "sums"), Config(64, 64, 64, 3)),
    "sums of whole columns": (
        Item("bf16", "dense", "nn", 72, 192, 16, "sums"),
        Config(64, 64, 64, 3, schedule="pingpong", cluster_n=2),
    ),
    "sums of whole rows, swapped": (
        Item("f16", "dense", "nt", 256, 72, 24, "sums", batches=((2,), (1,))),
        Config(64, 128, 64, 3, schedule="pingpong", swap=True),
    ),
    "int8": (Item("s8", "dense", "nt", 72, 64, 80), Config(64, 64, 64, 3)),
    "tf32": (Item("f32tf32", "dense", "tn", 64, 72, 72), Config(64, 32, 64, 3)),
    "sum": (
        Item("bf16", "dense", "nt", 136, 72, 72, "operands", batches=((2,), (1,)), more=(33, 64)),
        Config(64, 64, 64, 3, schedule="pingpong"),
    ),
    "sum, multicast": (Item("f16", "dense", "tn", 200, 72, 72, more=(8,)), Config(64, 64, 64, 4, cluster_m=2)),
    "sum, stream k": (Item("f16", "dense", "nn", 200, 128, 136, more=(200,)), Config(64, 64, 64, 4, stream_k=True)),
    "sum, splits": (Item("bf16", "dense", "nt", 72, 136, 264, more=(200,)), Config(64, 64, 64, 4, splits=2)),
    "sum, swapped": (Item("bf16", "dense", "nn", 72, 136, 72, more=(136,)), Config(64, 72, 64, 4, swap=True)),
    "sum of rows": (
        Item("bf16", "rows", "nt", 136, 64, 72, "residual", more=(72,)),
        Config(64, 64, 64, 4, schedule="pingpong"),
    ),
    "sum of float8": (Item("f8_e4m3fn", "dense", "nt", 72, 64, 144, more=(128,)), Config(64, 64, 64, 3)),
    "sum, several swapped": (
        Item("bf16", "dense", "nt", 72, 136, 72, "several", more=(136,)),
        Config(64, 32, 64, 3, swap=True, schedule="pingpong"),
    ),
    "several swapped": (
        Item("f16", "dense", "tn", 200, 136, 72, "products"),
        Config(64, 64, 64, 3, swap=True, cluster_m=2),
    ),
    "several in groups of k": (Item("bf16", "k", "tn", 136, 72, 136, "several"), Config(128, 64, 64, 3)),
}
PLAIN = {
    "bf16": Item("bf16", "dense", "nt", 72, 72, 72, "extremes", arch="sm_80"),
    "f64": Item("f64", "dense", "nn", 33, 24, 20, arch="sm_80"),
    "s8": Item("s8", "rows", "nt", 72, 64, 64, arch="sm_80"),
    "sums of rows in groups": Item("f16", "rows", "nn", 72, 72, 64, "of rows", arch="sm_80"),
    "f16": Item("f16", "dense", "tn", 64, 64, 72, arch="sm_75"),
    "tf32x3": Item("f32tf32x3", "symmetric", "nt", 40, 40, 40, "sum", arch="sm_80"),
    "sum": Item("bf16", "dense", "nn", 72, 64, 33, "sum", arch="sm_80", more=(64, 8)),
    "sum of rows": Item("f16", "rows", "nt", 72, 64, 72, arch="sm_75", more=(33,)),
    "sum by fma": Item("f64", "dense", "tn", 33, 24, 20, arch="sm_80", more=(12,)),
    "several in groups of k": Item("bf16", "k", "tn", 72, 64, 72, "several", arch="sm_80"),
}


# By FMA; DMMA of as much of k as there are registers for; loaded by threads, as words that begin anywhere.
TILES = {
    "f32": (Item("f32", "dense", "nt", 72, 72, 19, "operands", arch="sm_90a"), MmaConfig(64, 64, 8, 64, 64, stages=3)),
    "f32 in units along k": (
        Item("f32", "dense", "nt", 136, 72, 20, "operands", arch="sm_90a"),
        MmaConfig(128, 128, 16, 64, 64, stages=3),
    ),
    "f32 in units across k": (
        Item("f32", "dense", "tn", 72, 132, 40, "sums", arch="sm_80"),
        MmaConfig(64, 128, 8, 64, 64, stages=3),
    ),
    "s32 in units, sliced": (
        Item("s32", "rows", "nn", 136, 64, 40, arch="sm_90a"),
        MmaConfig(64, 64, 16, 64, 64, 2, stages=4),
    ),
    "f32 sliced": (Item("f32", "dense", "tn", 33, 40, 40, arch="sm_80"), MmaConfig(32, 32, 16, 16, 32, 2, stages=2)),
    "c64": (Item("c64", "dense", "nn", 40, 24, 20, arch="sm_90a"), MmaConfig(32, 32, 8, 32, 32, stages=3)),
    "c64 sums": (Item("c64", "dense", "nt", 40, 24, 20, "sums"), MmaConfig(32, 32, 8, 32, 32, stages=3)),
    "c128 sums of rows in groups": (
        Item("c128", "rows", "nn", 40, 24, 20, "of rows"),
        MmaConfig(32, 32, 8, 32, 32, stages=2),
    ),
    "bf16 in rows of odd lengths": (
        Item("bf16", "dense", "tn", 37, 33, 25, arch="sm_80"),
        MmaConfig(32, 32, 32, 16, 16, stages=2),
    ),
    "u8 in rows of odd lengths": (
        Item("u8", "dense", "nn", 37, 33, 25, arch="sm_80"),
        MmaConfig(32, 32, 64, 16, 16, stages=2),
    ),
    "s64": (Item("s64", "rows", "nt", 40, 24, 20, arch="sm_75"), MmaConfig(32, 32, 8, 16, 32, stages=2)),
    "f64 64x32": (Item("f64", "dense", "nn", 72, 40, 40, "sum"), MmaConfig(64, 64, 16, 64, 32, stages=3)),
    "f64 32x64": (Item("f64", "dense", "tt", 40, 72, 37), MmaConfig(32, 64, 32, 32, 64, stages=2)),
}


def check(problem, kernel, data, seeds):
    """That a kernel's results are exact, whatever order its threads have."""
    assert not isinstance(kernel, tuple), kernel
    with device.emulated():
        call = kernel.call()
    arrays, expected = data
    for seed, eagerness in seeds:
        machine = device.Machine(seed=seed, eagerness=eagerness)
        wrong = launches.wrong(launches.run(problem, call, arrays, machine.execute), expected)
        assert not wrong, (machine, kernel.name, wrong)


@pytest.mark.parametrize("name", CASES)
def test_sm90(name):
    item, config = CASES[name]
    kernel = families.resolve(item.problem, config)
    check(item.problem, kernel, item.data(), [(0, 0), (1, 3)])


@pytest.mark.parametrize(
    "config",
    [
        Config(64, 64, 64, 3),
        Config(128, 64, 64, 4, cluster_m=2),
        Config(64, 64, 64, 4, cluster_n=2, schedule="pingpong"),
        Config(64, 64, 64, 4, swap=True, schedule="pingpong"),
    ],
    ids=str,
)
def test_tiles_as_blocks_come_to_them(config, monkeypatch):
    """Of a device's part of a program over several: whatever number of blocks run, in whatever order."""
    monkeypatch.setattr(resolved, "DEEP", 0)
    item = Item("bf16", "dense", "nn", 456, 392, 136, "operands")
    of = item.problem.device
    problem = item.problem.on(dataclasses.replace(of.with_sms(2), several=True))
    kernel = families.resolve(problem, config)
    assert kernel.has_counter
    check(problem, kernel, item.data(), [(0, 0), (1, 3), (2, 1)])


def test_rows_by_index():
    """As a mixture of experts reads its tokens: some more than once, some that are not there."""
    asked = Item("bf16", "dense", "nn", 136, 64, 72).problem
    problem = dataclasses.replace(asked, a=dataclasses.replace(asked.a, view=Gathered(37)))
    rng = np.random.default_rng(0)
    x, b = (rng.integers(-2, 3, shape).astype(asked.a.dtype) for shape in ((37, 72), (72, 64)))
    index = rng.integers(0, 37, 136).astype(np.int32)
    index[[0, 5, 135]] = -1, 37, np.iinfo(np.int32).min
    rows = np.where(((index >= 0) & (index < 37))[:, None], x.astype(np.float64)[np.clip(index, 0, 36)], 0)
    kernel = families.resolve(problem, Config(64, 64, 64, 3, schedule="pingpong"))
    check(problem, kernel, ([x, b, index], [rows @ b.astype(np.float64)]), [(0, 0), (1, 3)])


@pytest.mark.parametrize(
    "config", [Config(64, 64, 64, 3), Config(128, 64, 64, 4, schedule="pingpong"), Config(256, 64, 64, 3)], ids=str
)
@pytest.mark.parametrize("m", [72, 200])
def test_rows_by_index_across_the_contraction(config, m):
    """The weight gradient of a mixture of experts: of pairs, whose inverse no kernel reads. NaN is of no group."""
    rng, tokens, rows, n = np.random.default_rng(0), 37, 150, 40
    problem = Problem.of(m, n, rows, "tn", out_dtype="float32", groups=4, ragged="k", leading=True)
    problem = dataclasses.replace(problem, a=dataclasses.replace(problem.a, view=Gathered(tokens, pairs=4)))
    x, g = (rng.integers(-2, 3, shape).astype(problem.a.dtype) for shape in ((tokens, m), (rows, n)))
    sizes, pairs = np.array([3, 70, 0, 5, 64], np.int32), rng.integers(0, 4 * tokens, rows).astype(np.int32)
    starts = np.cumsum(sizes)
    pairs[[10, 60, 149]] = -1, 4 * tokens, np.iinfo(np.int32).min
    g[:3] = g[142:] = np.nan
    x[36] = np.nan
    pairs[3:142][pairs[3:142] // 4 == 36] = 0
    pairs[[0, 143]] = 144
    there = (pairs >= 0) & (pairs // 4 < tokens)
    wide = np.where(there[:, None], x.astype(np.float64)[np.where(there, pairs // 4, 0)], 0)
    expected = np.stack([wide[a:b].T @ g.astype(np.float64)[a:b] for a, b in itertools.pairwise(starts)])
    arrays = x, g, sizes, pairs, np.full((tokens, 4), -7, np.int32)
    check(problem, families.resolve(problem, config), (arrays, [expected]), [(0, 0), (1, 3)])


@pytest.mark.parametrize("name", TILES)
def test_tiles_of_mma(name):
    item, config = TILES[name]
    check(item.problem, families.resolve(item.problem, config), item.data(), [(0, 0), (1, 3)])


@pytest.mark.parametrize("name", PLAIN)
def test_mma(name):
    item = PLAIN[name]
    family = next(family for family in families.FAMILIES if family.name == "mma")
    found = (family.resolve(item.problem, config) for config in family.configs(item.problem))
    kernel = next(kernel for kernel in found if not isinstance(kernel, tuple) and not kernel.unlaunchable())
    check(item.problem, kernel, item.data(), [(0, 0), (1, 3)])
