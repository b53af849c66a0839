"""Kernels that compute the tiles of a last wave in parts, on the device: of few tiles and many, shallow and deep.

Small integers unless said otherwise: equal to numpy, bit for bit, or wrong. Results land in donated NaN, so a tile that
nobody adds up shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from test_split_gpu import FUSED, LAYOUTS, check, check_epilogue, check_exact, check_long, gaussian, integers

import cutjax
from benchmarks import oracle
from cutjax.kernels.sm90 import kernel as sm90

pytestmark = pytest.mark.gpu

Config = cutjax.Config
H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
SECONDS = 120  # a test takes a few: longer is a CTA that waits for another for ever

TILES = (
    Config(128, 192, 64, 4, schedule="pingpong"),
    Config(128, 128, 64, 4, schedule="pingpong", cluster_m=2),
    Config(64, 96, 64, 4, schedule="pingpong", cluster_n=2),
    Config(64, 256, 64, 4, schedule="pingpong"),
    Config(128, 256, 64, 4, cluster_m=2),
    Config(256, 128, 64, 4, cluster_n=2, raster=-3),
    Config(128, 256, 64, 4, cluster_n=2, raster=1),
    Config(128, 160, 64, 4),
    Config(128, 128, 128, 3),
    Config(64, 64, 64, 4),  # two blocks an SM, of one warpgroup each
    Config(128, 24, 64, 6, swap=True),
    Config(128, 64, 64, 6, swap=True, schedule="pingpong"),
    Config(64, 48, 64, 4, swap=True, schedule="pingpong", cluster_m=2),
    Config(256, 128, 64, 4, swap=True, cluster_n=2),
)
CONFIGS = [dataclasses.replace(config, stream_k=True) for config in TILES]
FEW = (CONFIGS[0], CONFIGS[4], CONFIGS[5], CONFIGS[9], CONFIGS[11])


def name(config: cutjax.Config) -> str:
    tile = f"{config.bm}x{config.bn}x{config.bk}_{config.schedule}_c{config.cluster_m}{config.cluster_n}"
    return tile + "_swap" * config.swap


def sizes(config: cutjax.Config, waves: float) -> tuple[int, int]:
    """m and n of just more tiles than so many waves; the last along each axis is not whole."""
    probe = cutjax.Problem.of(4096, 4096, 4096)
    clusters = probe.device.sms * sm90.resolved(probe, config).blocks_per_sm // config.cluster
    tiles = math.floor(clusters * waves) + 1
    rows = max(1, round(math.sqrt(tiles)) // 2)
    along = rows * config.bm * config.cluster_m - 24, -(-tiles // rows) * config.bn * config.cluster_n - 8
    return along[::-1] if config.swap else along


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_every_config(config):
    """One tile and a few, of one k block and of many; just over a wave, three and a half of them."""
    layouts = itertools.cycle(LAYOUTS[:2] if config.bn % 16 else LAYOUTS)  # of a swapped product, a is K-major in these
    few = ((8, 16, 8), (8, 16, 4104), (264, 328, 16392), (520, 264, 72))
    several = [(*sizes(config, waves), k) for waves, k in ((0.5, 1032), (1, 1000), (1, 56), (1.4, 648), (3.5, 200))]
    for i, shape in enumerate((*few, *several)):
        check_exact(cutjax.Problem.of(*shape, next(layouts), out_dtype=(H, F32)[i % 2]), config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [H, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("config", FEW, ids=name)
def test_layouts(config, layout, dtype):
    for out in (dtype, F32):
        check_exact(cutjax.Problem.of(1208, 1544, 1992, layout, dtype, dtype, out), config)


@pytest.mark.parametrize("config", [dataclasses.replace(FEW[0], bn=160), *FEW[1:]], ids=name)
def test_rows_that_are_not_aligned(config):
    for i, layout in enumerate(LAYOUTS):
        m, n = sizes(config, 1.2)
        check_exact(cutjax.Problem.of(m - 1, n + i, 457, layout, out_dtype=(H, F32)[i % 2]), config)


@pytest.mark.parametrize("config", FEW, ids=name)
def test_batches(config):
    """A range of k blocks crosses from one matrix to the next."""
    for batch, a_batch, b_batch in (((30,), (30,), (30,)), ((2, 3), (2, 1), (1, 3)), ((9, 2, 5), (9, 1, 5), (1, 2, 5))):
        shape = {"batch": batch, "a_batch": a_batch, "b_batch": b_batch}
        check_exact(cutjax.Problem.of(328, 520, 456, "nt", **shape), config)


LONG = ((256, 256, 65536, "nn"), (64, 64, 262144, "nt"), (768, 768, 50432, "tn"), (5120, 1280, 12608, "tn"))


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("config", FEW, ids=name)
def test_long_and_thin(shape, config):
    check_long(shape, config)


@pytest.mark.parametrize("out", [H, F32], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_gaussian(config, out):
    """Within the tolerance of any kernel; and the same bits every time, whoever comes last."""
    m, n = sizes(config, 1.3)
    problem = cutjax.Problem.of(m, n, 1544, "nn", out_dtype=out)
    a, b = gaussian(1, *problems.shapes(problem)[:2])
    executable = problems.compiled(problem, config, "cuda")
    a, b = jax.device_put((a, b))
    first, *others = (np.asarray(executable(a, b, jax.device_put(problems.poison(problem)))) for _ in range(10))
    expected = problems.reference(np.asarray(a), np.asarray(b), problem.layout, np.float64)
    error = oracle.compare(first, expected, problem.k)
    problems.note_worst(f"stream norm, {out}", error.relative / error.tolerance)
    assert error.ok, f"{config}: {error}"
    for other in others:
        assert np.array_equal(other.view(np.uint8), first.view(np.uint8))


FUSED_CONFIGS = [
    Config(128, 64, 64, 4, stream_k=True),
    Config(64, 64, 64, 4, stream_k=True, schedule="pingpong"),
    Config(128, 64, 64, 4, stream_k=True, schedule="pingpong", cluster_m=2),
    Config(256, 64, 64, 3, stream_k=True, cluster_n=2),
    Config(64, 96, 64, 4, stream_k=True),
    Config(128, 64, 64, 4, stream_k=True, swap=True),
    Config(64, 32, 64, 4, stream_k=True, swap=True, schedule="pingpong", cluster_n=2),
]


@pytest.mark.parametrize("batch", [(), (3,), (40,)], ids=str)
@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("config", FUSED_CONFIGS, ids=name)
def test_epilogues(config, case, batch):
    """Of few tiles, all in parts; and of whole tiles after parts."""
    if config.swap and FUSED[case][1] > 1:
        pytest.skip("several products cannot be swapped")
    check_epilogue(config, case, batch)


@pytest.mark.parametrize("config", FEW, ids=name)
def test_launches_that_follow_each_other(config):
    """Each begins with tickets of its own: in a loop on the device, and of two kernels beside each other."""
    m, n = sizes(config, 1.2)
    xs, ws, vs = integers(7, (5, m, 328), (5, 328, n), (5, 328, 264))

    @jax.jit
    def fn(xs, ws, vs):
        def body(carry, each):
            x, w, v = each
            y = cutjax.gemm(x, w, out_dtype=F32, config=config)
            z = cutjax.gemm(x, v, out_dtype=F32, config=config)
            return carry + y, z

        return jax.lax.scan(body, jnp.zeros((m, n), F32), (xs, ws, vs))

    y, z = fn(*jax.device_put((xs, ws, vs)))
    wide = [x.astype(F32) for x in (xs, ws, vs)]
    check(y, np.matmul(wide[0], wide[1]).sum(0), config)
    check(z, np.matmul(wide[0], wide[2]), config)
