"""Kernels of symmetric products: which tiles are multiplied, what is refused, and that they compile lean."""

import ctypes
import dataclasses
import itertools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import changed
from cubin import check_lean
from gxx import build

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels.mma import family as mma
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90.resolved import cluster_tile
from cutjax.runtime import compiler, sources

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
# (bm, bn, cluster_m, cluster_n): tiles that are square, wider, taller, and that meet the diagonal at odd places.
TILES = [(64, 64, 1, 1), (128, 256, 1, 1), (256, 96, 1, 1), (128, 160, 2, 1), (128, 144, 1, 2), (64, 32, 1, 2)]


def problem(m=4096, k=4096, layout="nt", a="bfloat16", out="bfloat16", batch=(), epilogue=None):
    half, result = jnp.dtype(a), jnp.dtype(out)
    return cutjax.Problem.of(
        m, m, k, layout, half, half, result, batch, batch, batch, epilogue=epilogue, symmetric=True
    )


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """The scheduler of each of TILES on the host: (m, raster, batch, first, step) -> every item's m, n, batch."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    text = "#include <algorithm>\n#define DEVICE inline\nusing std::min;\n"
    for i, (bm, bn, cluster_m, cluster_n) in enumerate(TILES):
        constants = {"BM": bm, "BN": bn, "BK": 64, "CLUSTER_M": cluster_m, "CLUSTER_N": cluster_n}
        text += f"namespace c{i} {{\n" + "".join(sources.constant(*item) for item in constants.items())
        text += sources._file("common/scheduler.cuh") + sources._file("common/triangle_scheduler.cuh")
        text += f"""}}
extern "C" int run{i}(int m, int raster, int batch, int first, int step, int* out) {{
  c{i}::Scheduler scheduler(m, m, 8, raster, batch, 1, 1, 1);
  int count = 0;
  for (int index = first; scheduler.has(index); index += step, ++count) {{
    c{i}::Work work = scheduler.work(index, 0, 0);
    out[3 * count] = work.m, out[3 * count + 1] = work.n, out[3 * count + 2] = work.batch;
  }}
  return count;
}}
"""
    library = build(tmp_path_factory.mktemp("scheduler"), text)

    def walk(i, m, raster, batch, first, step):
        out = np.zeros((1 << 14, 3), np.int32)
        pointer = out.ctypes.data_as(ctypes.c_void_p)
        return out[: getattr(library, f"run{i}")(m, raster, batch, first, step, pointer)]

    return walk


@pytest.mark.parametrize("tile", range(len(TILES)))
def test_every_tile_with_anything_below_the_diagonal_comes_once(walks, tile):
    bm, bn, cluster_m, cluster_n = TILES[tile]
    height, width = bm * cluster_m, bn * cluster_n
    config = cutjax.Config(bm, bn, cluster_m=cluster_m, cluster_n=cluster_n, stages=2)
    for m, raster, batch in itertools.product((1, 8, 64, 200, 1000, 2056), (1, 8, -5, 10**9), (1, 3)):
        wanted = {
            (row, column, z)
            for z in range(batch)
            for row in range(0, m, height)
            for column in range(0, min(m, row + height), width)
        }
        assert problem(m, batch=(batch,)).most_tiles(*cluster_tile(config)) == len(wanted)
        for step in (1, 5, 66):
            items = np.concatenate([walks(tile, m, raster, batch, first, step) for first in range(step)])
            assert len(items) == len(wanted)
            assert set(map(tuple, items.tolist())) == wanted


def test_items_in_flight_lie_in_one_band(walks):
    """132 items of bands of 8 rows, column by column, read little more than 8 rows and 132 / 8 columns of tiles."""
    items = walks(TILES.index((128, 256, 1, 1)), 8192, 8, 1, 0, 1)
    assert items[:3].tolist() == [[0, 0, 0], [128, 0, 0], [256, 0, 0]]
    assert len(items) == 8 * 132
    for first in range(0, len(items), 132):
        rows, columns, _ = (len(np.unique(axis)) for axis in items[first : first + 132].T)
        assert rows * 128 + columns * 256 <= (2 * 8 + 132 / 8) * 256


BF16, F32 = jnp.bfloat16, jnp.float32


def epilogue(function, *operands):
    return trace(function, [jax.ShapeDtypeStruct((64, 64), F32)], operands).epilogue


@pytest.mark.parametrize(
    ("function", "operands", "why"),
    [
        (lambda acc, x: acc * x, [np.ones((64, 1), np.float32)], "along rows or columns alone"),
        (lambda acc, x: acc * x, [np.ones((1, 64), np.float32)], "along rows or columns alone"),
        (lambda acc: jnp.where(jax.lax.iota(jnp.int32, 64) > 3, acc, 0), [], "where its elements lie"),
        (lambda acc: (acc, acc.sum(-1)), [], "a reduction"),
        (lambda acc: acc.astype(jnp.float8_e4m3fn), [], "8 bits"),
    ],
)
def test_what_is_refused(function, operands, why):
    (reason,) = sm90.facts_of(problem(epilogue=epilogue(function, *operands))).reasons
    assert why in reason
    asked = problem(epilogue=epilogue(function, *operands))
    # The mma family gathers transposes from the tile itself: of elements of any size.
    assert bool(mma.reasons(asked)) == bool(not cutjax.candidates(asked)) == ("8 bits" not in why)


def test_what_is_not_symmetric_is_no_symmetric_problem():
    for change in ({"n": 2048}, {"layout": "nn"}, {"b_dtype": jnp.dtype("float16")}, {"groups": 2, "ragged": "m"}):
        with pytest.raises(ValueError, match="is no product of a matrix and its transpose"):
            changed(problem(), **change)


@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
def test_configs_compile_lean(layout, out):
    asked = problem(layout=layout, out=out)
    configs = sorted(cutjax.candidates(asked), key=lambda config: -config.accumulator_registers)
    assert configs[0].accumulator_registers == (192 if out == "bfloat16" else 160)
    other = configs[20 if layout == "nt" else 60]
    check_lean(asked, [configs[0], other], 56 << 10)  # 33 KB at most, 50 where results are f32


@pytest.mark.parametrize(
    ("function", "operands", "registers"),
    [
        (lambda acc, s, x: (acc * s + x.astype(F32)).astype(BF16), [np.float32(2), np.ones((64, 64), BF16)], 160),
        (lambda acc, x: acc + x, [np.ones((64, 64), np.float32)], 160),
        (lambda acc, x: ((acc + x.astype(F32)).astype(BF16), acc), [np.ones((64, 64), BF16)], 160),
        (lambda acc: jnp.sinh(jnp.arctan(acc)).astype(BF16), [], 128),
    ],
    ids=["scaled sum", "f32", "two results", "called"],
)
@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
def test_epilogues_compile_lean(function, operands, registers):
    asked = problem(epilogue=epilogue(function, *operands))
    configs = sorted(cutjax.candidates(asked), key=lambda config: -config.accumulator_registers)
    assert configs[0].accumulator_registers == registers
    check_lean(asked, [configs[0], configs[20]], 64 << 10)  # 60 KB at most


def test_the_plan():
    config = cutjax.Config(128, 128, stages=4)

    def plan(**asked):
        kernel = sm90.resolved(problem(k=512, **asked), config)
        return {argument.name: argument.value for argument in kernel.arguments}, kernel

    maps, kernel = plan()
    assert maps["map_a"] == maps["map_b0"]
    assert (maps["map_a"].buffer, maps["map_d0"].buffer, maps["map_t0"].buffer) == (0, 1, 1)
    assert maps["map_d0"].dims == maps["map_t0"].dims == (4096, 4096, 1)
    assert (maps["map_d0"].box, maps["map_t0"].box) == ((kernel.chunk, 64, 1), (64, kernel.chunk, 1))
    assert kernel._launch(b"-").grid == (528, 1, 1)
    transposed, _ = plan(layout="tn")
    assert transposed["map_a"].dims == transposed["map_b0"].dims == (4096, 512, 1)
    two, _ = plan(epilogue=epilogue(lambda acc, x: ((acc + x.astype(F32)).astype(BF16), acc), np.ones((64, 64), BF16)))
    assert [two[name].buffer for name in ("map_x0", "map_d0", "map_d1", "map_t0", "map_t1")] == [1, 2, 3, 2, 3]


def test_work_and_bytes_are_those_of_a_triangle():
    asked = problem(1024, 512)
    assert asked.flops == 1024 * 1025 * 512
    assert asked.bytes == 2 * (1024 * 512 + 1024 * 1024)


@pytest.mark.parametrize(
    ("m", "k", "tile"),
    [  # the fastest of those timed on an H200, or within 1% of it
        (2048, 2048, (128, 144, "coop")),
        (4096, 4096, (128, 128, "pingpong")),
        (4096, 11008, (128, 128, "pingpong")),
        (5120, 5120, (128, 208, "coop")),
        (11008, 4096, (128, 160, "pingpong")),
    ],
)
def test_tiles_that_fill_waves_are_picked(m, k, tile):
    config = cutjax.candidates(problem(m, k))[0]
    assert (config.bm, config.bn, config.schedule) == tile


def recorded():
    """(problem, {config with a raster of 1: measured us}) of the recorded sweep."""
    sweep = json.loads((RESULTS / "sweeps" / "syrk-h200.json").read_text())
    for m, k, layout, out, batch, _, times in sweep["rows"]:
        found = {}
        for name, us in times.items():
            tile, stages, cluster, schedule = name.split("_")
            bm, bn, bk = map(int, tile.split("x"))
            shape = tuple(map(int, cluster[1:].split("x")))
            found[cutjax.Config(bm, bn, bk, int(stages[1:]), *shape, schedule, 1)] = us
        asked = problem(m, k, layout, out=out, batch=tuple(batch))
        # Tiles that load more columns than they have did not when they were timed.
        yield asked, {config: us for config, us in found.items() if config.loaded(asked.bs[0]) == config.bn}


def test_the_model_picks_well_among_recorded_times():
    regrets = []
    for asked, times in recorded():
        ranked = [dataclasses.replace(config, raster=1) for config in cutjax.candidates(asked)]
        known = [config for config in ranked if config in times]
        regrets.append(times[known[0]] / min(times.values()))
    assert len(regrets) > 40
    # 1.012 and 1.146 as shipped; two runs of one config differ by 1%.
    assert np.exp(np.mean(np.log(regrets))) < 1.02
    assert max(regrets) < 1.16
