"""Kernels that compute tiles in parts (stream-K): the walk over them, compiled for the host; plans; refusals."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import changed
from cubin import check_lean, in_turns
from epilogue_host import SHIM
from gxx import build
from test_fusion import CASES, problem

import cutjax
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler, sources

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

Config = cutjax.Config
SQUARE = cutjax.Problem.of(4096, 4096, 4096)
STREAM = functools.partial(Config, stream_k=True)
PING_PONG = STREAM(128, 192, 64, 4, schedule="pingpong")
COOP = STREAM(128, 256, 64, 4, cluster_m=2)
TALL = STREAM(256, 128, 64, 4, cluster_n=2)
SWAPPED = STREAM(128, 64, 64, 6, swap=True, schedule="pingpong")
CONFIGS = (PING_PONG, COOP, TALL, SWAPPED, STREAM(64, 64, 64, 6), STREAM(128, 24, 64, 6, swap=True))


@needs_nvrtc
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_plain_kernels_compile_lean(layout):
    """Some where each operand is K-major and others where neither is; these have other addresses in the mainloop."""
    configs = [config for config in CONFIGS if not cutjax.reasons(config, changed(SQUARE, layout=layout))]
    assert len(configs) >= 5
    check_lean(changed(SQUARE, layout=layout), configs[layout == "tn" :: 2], 32 << 10)


@needs_nvrtc
@pytest.mark.parametrize("name", ["gelu", "residual", "gated", "all reductions"])
def test_fused_kernels_compile_lean(name):
    asked = problem(*CASES[name])
    narrow = (STREAM(128, 128, 64, 4), STREAM(64, 64, 64, 4, schedule="pingpong"), STREAM(128, 64, 64, 4, cluster_m=2))
    configs = [config for config in (*CONFIGS, *narrow) if not cutjax.reasons(config, asked)]
    assert len(configs) >= 3
    check_lean(asked, in_turns(configs, list(CASES).index(name), 8), 52 << 10)


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("row and column", STREAM(256, 160, 64, 3, swap=True)),
        ("three products", STREAM(128, 48, 64, 4, cluster_m=2, schedule="pingpong")),
        ("gelu and its argument", STREAM(128, 64, 64, 4, cluster_m=2, swap=True)),
        ("odd", STREAM(128, 112, 64, 4, cluster_m=2, swap=True, schedule="pingpong")),
    ],
    ids=str,
)
def test_the_producer_has_room(name, config):
    """The scheduler is made where the roles have parted: before that, its fields must fit the producer's registers."""
    odd = cutjax.Problem.of(4097, 4097, 4097, out_dtype=np.dtype(np.float32))
    check_lean(odd if name == "odd" else problem(*CASES[name]), [config], 52 << 10)


# What of the walk is recorded of each work item of each CTA.
FIELDS = ("cluster", "rank", "m", "n", "k", "k_blocks", "batch", "tile", "parts", "first", "slot")
BM, BN, BK = 64, 32, 64


class Walks:
    """The scheduler's text, compiled for the host: ``walk(cluster, ...)`` is what all CTAs of a launch compute."""

    def __init__(self, folder):
        text = f'#include "{SHIM}"\n#include <algorithm>\nusing std::max;\nusing std::min;\n'
        text += "static struct { u32 x; } blockIdx, gridDim;\n"
        for cluster in ((1, 1), (2, 1), (1, 2)):
            text += self._walk(*cluster)
        self._library = build(folder, text)

    @staticmethod
    def _walk(cluster_m: int, cluster_n: int) -> str:
        name = f"of_{cluster_m}x{cluster_n}"
        sizes = {"BM": BM, "BN": BN, "BK": BK, "CLUSTER_M": cluster_m, "CLUSTER_N": cluster_n}
        constants = "".join(sources.constant(*item) for item in sizes.items())
        files = "".join(sources._file(f"common/{file}.cuh") for file in ("scheduler", "stream_scheduler"))
        values = ["s.cluster()", "rank", *(f"w.{field}" for field in FIELDS[2:-1]), "s.slot(s.cluster(), w.tile)"]
        # The loop is that of gemm.cuh.
        return f"""namespace n{name} {{
using Acc = float;
{constants}{files}}}
extern "C" int {name}(int m, int n, int k, int raster, int batch, int blocks, int most, int* out) {{
  gridDim.x = blocks;
  int count = 0, ctas = {cluster_m * cluster_n}, step = blocks / ctas;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {{
    int rank = blockIdx.x % ctas;
    n{name}::Scheduler s(m, n, k, raster, batch, 1, 1, batch, nullptr, nullptr);
    for (int index = blockIdx.x / ctas; s.has(index); index += step) {{
      if (count++ == most) return -1;
      n{name}::Work w = s.work(index, {"rank" if cluster_m > 1 else 0}, {"rank" if cluster_n > 1 else 0});
      for (int x : {{{", ".join(values)}}}) *out++ = x;
    }}
  }}
  return count;
}}
"""

    def __call__(self, cluster: tuple[int, int], sizes: Sequence[int], raster: int, batch: int, blocks: int):
        most = 4 * blocks + 4 * batch * -(-sizes[0] // BM) * -(-sizes[1] // BN)
        out = np.zeros((most, len(FIELDS)), np.int32)
        walk = getattr(self._library, "of_{}x{}".format(*cluster))
        count = walk(*sizes, raster, batch, blocks, most, ctypes.c_void_p(out.ctypes.data))
        assert 0 <= count <= most
        return out[:count]


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return Walks(tmp_path_factory.mktemp("stream"))


def check_walk(walks, cluster: tuple[int, int], sizes: Sequence[int], raster: int, batch: int, clusters: int) -> int:
    """That every k block is multiplied once and every part is found by who adds it up; returns how many parts."""
    ctas = cluster[0] * cluster[1]
    rows = walks(cluster, sizes, raster, batch, clusters * ctas)
    m, n, k = sizes
    along_m, along_n = (-(-size // (tile * c)) * c for size, tile, c in zip((m, n), (BM, BN), cluster, strict=True))
    k_blocks = -(-k // BK)
    of = {field: rows[:, i] for i, field in enumerate(FIELDS)}
    assert (of["k_blocks"] > 0).all()
    for field, unit in (("m", BM), ("n", BN), ("k", BK)):
        assert not (of[field] % unit).any()
    assert np.array_equal(of["rank"], of["m"] // BM % cluster[0] + of["n"] // BN % cluster[1])

    place = (of["batch"] * along_m + of["m"] // BM) * along_n + of["n"] // BN
    begin, deep = of["k"] // BK, of["k_blocks"]
    done = np.zeros((batch * along_m * along_n, k_blocks + 1), int)
    np.add.at(done, (place, begin), 1)
    np.add.at(done, (place, begin + deep), -1)
    np.testing.assert_array_equal(done.cumsum(1)[:, :-1], 1)

    # CTAs multiply equally long.
    each = np.bincount(of["cluster"] * ctas + of["rank"], deep, clusters * ctas)
    assert each.max() - each.min() <= 1

    # Parts of one tile are those of clusters that follow each other, in the order of k, and all of them know it.
    parts = rows[of["parts"] > 1]
    whole = (of["parts"] == 1) & (deep != k_blocks)
    assert not whole.any()
    places: dict[tuple[int, int], list[np.ndarray]] = {}
    for row, at in zip(parts, place[of["parts"] > 1], strict=True):
        places.setdefault((int(row[FIELDS.index("rank")]), int(at)), []).append(row)
    tiles = {}
    for (rank, at), found in places.items():
        found.sort(key=lambda row: row[FIELDS.index("k")])
        first = dict(zip(FIELDS, found[0].tolist(), strict=True))
        assert len(found) == first["parts"], (at, found)
        for i, row in enumerate(found):
            own = dict(zip(FIELDS, row.tolist(), strict=True))
            assert own["cluster"] == first["first"] + i
            assert [own[x] for x in ("tile", "parts", "first")] == [first[x] for x in ("tile", "parts", "first")]
        assert 0 <= first["tile"] < 2 * clusters  # as many tickets as there are
        assert tiles.setdefault((rank, first["tile"]), at) == at
    assert len(tiles) == len(places)
    if batch * along_m * along_n >= clusters * ctas:  # ranges are at least as long as a tile
        assert of["parts"].max() <= 2
    slots = of["slot"][of["parts"] > 1] * ctas + of["rank"][of["parts"] > 1]
    assert len(set(slots.tolist())) == len(slots)  # nobody's scratch is another's, or of another tile
    assert not len(slots) or (slots.min() >= 0 and slots.max() < 2 * clusters * ctas)
    return len(parts)


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_every_k_block_is_multiplied_once(walks, cluster):
    """Fewer tiles than clusters, than k blocks, a wave, a few; one k block to a hundred."""
    rng = np.random.default_rng(1)
    total = 0
    for clusters, k_blocks in itertools.product((1, 2, 3, 5, 7, 8, 13), (1, 2, 3, 4, 7, 16, 31, 100)):
        for _ in range(2):  # 6 are worth it after a change
            m, n = (int(rng.integers(1, 8 * tile)) for tile in (BM, BN))
            k = k_blocks * BK - int(rng.integers(BK))
            raster = int(rng.choice([-3, -1, 1, 2, 8]))
            total += check_walk(walks, cluster, (m, n, k), raster, int(rng.integers(1, 4)), clusters)
    assert total > 300


@pytest.mark.parametrize("clusters", [66, 132])
def test_on_a_whole_device(walks, clusters):
    cluster = (2, 1) if clusters == 66 else (1, 1)
    for tiles_m, tiles_n, k in ((1, 1, 64), (1, 1, 65536), (3, 1, 640), (11, 12, 4096), (12, 12, 1000), (40, 33, 2048)):
        parts = check_walk(walks, cluster, (tiles_m * BM * cluster[0], tiles_n * BN, k), 8, 1, clusters)
        assert bool(parts) == (k > 64 and tiles_m * tiles_n % clusters > 0)


def test_names():
    assert PING_PONG.name(SQUARE) == "sm90_bf16_nn_128x192x64_s4_c1x1_pingpong_stream"
    assert SWAPPED.name(SQUARE) == "sm90_bf16_nn_128x64x64_s6_c1x1_pingpong_swap_stream"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"cluster_k": 2}, "stream_k with cluster_k=2, splits=1: k is divided in one way"),
        ({"splits": 3}, "stream_k with cluster_k=1, splits=3"),
        ({"stream_k": 1}, "stream_k=1, expected a bool"),
    ],
)
def test_bad_config(fields, match):
    with pytest.raises(ValueError, match=match):
        Config(**{"bm": 128, "bn": 128, "stream_k": True} | fields)


def test_what_is_refused():
    config = STREAM(128, 128)
    symmetric = cutjax.Problem.of(4096, 4096, 4096, "nt", symmetric=True)
    for groups in ("m", "k"):
        grouped = cutjax.Problem.of(4096, 512, 4096, "tn" if groups == "k" else "nn", groups=4, ragged=groups)
        assert "only the tiles of a dense product are all as deep" in "; ".join(cutjax.reasons(config, grouped))
    assert "only the tiles of a dense product are all as deep" in "; ".join(cutjax.reasons(config, symmetric))
    assert cutjax.reasons(config, SQUARE) == ()


@pytest.mark.parametrize("sizes", [(64, 128, 4096), (4096, 4096, 4096), (16384, 16384, 64)], ids=str)
@pytest.mark.parametrize("config", [PING_PONG, COOP, TALL, SWAPPED, STREAM(64, 64, 64, 4)], ids=str)
def test_the_plan(config, sizes):
    """Every SM has a part, in whole clusters, however few tiles there are; scratch and tickets for two tiles each."""
    kernel = sm90.resolved(cutjax.Problem.of(*sizes), config)
    plan = kernel.call()
    (launch,) = plan.launches
    blocks = 132 * kernel.blocks_per_sm
    assert blocks == (264 if config.bm == 64 else 132)
    assert (launch.grid, launch.cluster) == ((blocks, 1, 1), (config.cluster, 1, 1))
    warpgroups = 2 if config.schedule == "coop" and config.bm > 64 else 1  # that share a tile
    d, scratch, tickets = plan.results
    assert (d.shape, d.dtype) == ((sizes[0], sizes[1]), jnp.bfloat16)
    assert (scratch.shape, scratch.dtype) == ((2 * blocks, config.bm * config.bn), np.float32)
    assert (tickets.shape, tickets.dtype) == ((2 * blocks * warpgroups,), np.int32)
    # Arguments 0 and 1 are a and b, 2 the tickets, and 3 on the results, of which 5 are the tickets again.
    assert plan.aliases == ((2, 2),)
    pointers = [a.value.buffer for a in kernel.arguments if a.to == "scheduler"]
    assert pointers == [4, 5]
    assert plan.prepare is not None
    a, b, zeros = plan.prepare([1, 2])  # pyright: ignore
    assert (a, b) == (1, 2)
    assert (zeros.shape, zeros.dtype) == (tickets.shape, tickets.dtype)
    assert not np.asarray(zeros).any()
    assert plan.finish is not None
    (out,) = plan.finish([7, 8, 9], [1, 2])  # pyright: ignore
    assert out == 7


def test_an_odd_number_of_sms():
    """Clusters of two are whole, and one SM is left."""
    device = dataclasses.replace(SQUARE.device, sms=131)
    (launch,) = sm90.resolved(dataclasses.replace(SQUARE, device=device), COOP).call().launches
    assert launch.grid == (130, 1, 1)


def test_the_plan_of_an_epilogue():
    """Operands before the tickets; several results, and reductions, before the scratch; operands that are padded."""
    asked = problem(*CASES["all reductions"], sizes=(1000, 1160, 256))
    plan = sm90.resolved(asked, STREAM(128, 128, stages=4)).call()
    assert [x.shape for x in plan.results[:5]] == [(1000, 1160), (63, 1160), (10, 1000), (63, 10), (63, 1160)]
    assert [x.shape for x in plan.results[5:]] == [(264, 128 * 128), (528,)]
    assert plan.aliases == ((2, 6),)
    residual = sm90.resolved(problem(*CASES["residual"]), STREAM(128, 128, stages=4))
    assert residual.call().aliases == ((5, 2),)
    assert [a.value.buffer for a in residual.arguments if a.to in ("d", "scheduler")] == [6, 7, 8]
    padded = sm90.resolved(cutjax.Problem.of(137, 201, 1999), STREAM(128, 128, stages=4)).call()
    arrays = jnp.ones((137, 1999), jnp.bfloat16), jnp.ones((1999, 201), jnp.bfloat16)
    assert padded.prepare is not None
    a, b, tickets = padded.prepare(arrays)
    assert (a.shape[1] % 8, b.shape[1] % 8, tickets.shape) == (0, 0, (528,))


def test_lowering():
    """XLA writes the zeros that the tickets begin with, and the scratch is nobody's result."""
    a, b = jax.ShapeDtypeStruct((1000, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 1160), jnp.bfloat16)

    def fn(a, b):
        return cutjax.gemm(a, b, config=STREAM(128, 128, 64, 4))

    text = jax.jit(fn).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"@cutjax_launch\(%\w+, %\w+, %\w+\).*_coop_stream", text)
    assert re.search(r"output_tuple_indices = \[2\], operand_index = 2", text)
    assert "return %1#0 : tensor<1000x1160xbf16>" in text
    assert re.search(r"dense<0> : tensor<(528x)?i32>", text)
