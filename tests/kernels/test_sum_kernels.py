"""Sums of products, on the host: how a problem says one, what refuses it, its launch, its time and its machine code."""

from __future__ import annotations

import dataclasses
import random

import jax.numpy as jnp
import numpy as np
import pytest

from cutjax import Config, MmaConfig, Problem
from cutjax.epilogue.expression import identity
from cutjax.kernels import choose, families, keys, sums, xla
from cutjax.kernels.joined import Joined
from cutjax.kernels.mma import family as mma
from cutjax.kernels.mma import kernel as mma_kernel
from cutjax.kernels.sm90 import family as sm90
from cutjax.runtime.launch import Int32, Pointer, TensorMap

H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


def joined(problem: Problem, *ks: int) -> Problem:
    """The sum of products like one, of these contractions."""
    view = Joined(ks)
    a, *bs = (dataclasses.replace(x, view=view) for x in (problem.a, *problem.bs))
    return dataclasses.replace(problem, k=sum(ks), a=a, bs=tuple(bs))


def several(problem: Problem, count: int = 2) -> Problem:
    """The products of one a by several b, as they are."""
    return problem.fused(identity(problem.out_dtype, problem.accumulator, count))


SUM = joined(Problem.of(4096, 1024, 256, "nt"), 256, 320)
GROUPS = joined(Problem.of(4096, 1024, 256, "nt", groups=8, ragged="m"), 256, 256)
GRADIENTS = several(Problem.of(1024, 256, 4096, "tn", groups=8, ragged="k"))


# A problem.


def test_a_sum_is_one_product_of_all_contractions():
    whole = Problem.of(4096, 1024, 576, "nt")
    assert (SUM.flops, SUM.bytes, SUM.arrays) == (whole.flops, whole.bytes, 4)
    assert [of.k for of in sums.summands(SUM)] == [256, 320]
    assert all(of.a.plain and of.bs[0].plain for of in sums.summands(SUM))
    assert sums.summands(whole) == (whole,)
    assert str(SUM).endswith("a of 2 arrays, k = 256 + 320, b of 2 arrays, k = 256 + 320")


def test_blocks_of_each_contraction():
    ragged = joined(SUM, 100, 30)
    assert (sums.blocks(ragged, 64), sums.extent(ragged, 64)) == (3, 192)
    assert (sums.blocks(Problem.of(64, 64, 130), 64), sums.extent(Problem.of(64, 64, 130), 64)) == (3, 130)


def test_keys_of_others_do_not_change():
    assert keys.key(Problem.of(4096, 1024, 576, "nt")) == '{"m":4096,"n":1024,"k":576,"layout":"nt"}'
    assert '"version":2' in keys.key(SUM)
    assert len({keys.key(joined(SUM, *ks)) for ks in ((256, 320), (320, 256), (576,), (192, 192, 192))}) == 4


def test_contractions_must_add_up():
    with pytest.raises(ValueError, match="whose parts of k=300 differ"):
        dataclasses.replace(SUM, k=300)
    with pytest.raises(ValueError, match="whose parts of k=576 differ"):
        dataclasses.replace(SUM, bs=(dataclasses.replace(SUM.bs[0], view=None),))


REFUSED = {
    "symmetric products": joined(Problem.of(64, 64, 64, "nt", symmetric=True), 32, 32),
    "groups of k": joined(Problem.of(64, 64, 64, "tn", groups=2, ragged="k"), 32, 32),
    "an order of their own": joined(
        Problem.of(64, 64, 64, batch=(2, 2), a_batch=(2, 2), b_batch=(2, 2), orders=((1, 0, 2, 3), (), ())), 32, 32
    ),
    "operands of different sizes": joined(Problem.of(64, 64, 64, "nn", H, "int8"), 32, 32),
}


@pytest.mark.parametrize("why", REFUSED)
def test_reasons(why):
    for family in (sm90, mma):
        assert why in " ".join(family.reasons(REFUSED[why]))


def test_reasons_of_a_family():
    parts = joined(Problem.of(64, 64, 64, "nt", F32, F32, F32, math="tf32x3"), 32, 32)
    assert "pairs of terms, or of arrays" in " ".join(sm90.reasons(parts))
    assert not mma.reasons(parts)
    assert "sums of products by several b" in " ".join(mma.reasons(several(SUM)))
    assert not sm90.reasons(several(SUM))
    tma = next(config for config in mma.configs(Problem.of(4096, 1024, 576, "nt")) if config.tma)
    assert "tma with a sum of products" in " ".join(mma.resolve(SUM, tma))
    assert not any(config.tma for config in mma.configs(SUM))


def test_narrow_operands_are_not_converted_before_a_sum():
    """Conversions are of one array of an operand."""
    narrow = joined(Problem.of(4096, 1024, 576, "nn", H, "int8"), 256, 320)
    assert not choose.choose(narrow, backend="cuda").served


# The kernels.


def test_a_launch_reads_each_array():
    kernel = families.resolve(SUM, Config(128, 128, stages=4))
    maps = [x for x in kernel.arguments if isinstance(x.value, TensorMap)]
    assert [(x.name, x.value.buffer, x.value.dims[:2]) for x in maps] == [
        ("map_a", 0, (256, 4096)),
        ("map_a1", 2, (320, 4096)),
        ("map_b0", 1, (256, 1024)),
        ("map_b1", 3, (320, 1024)),
        ("map_d0", 4, (1024, 4096)),
    ]
    known = {x.name: x.value.value for x in kernel.arguments if isinstance(x.value, Int32)}
    assert (known["depth0"], known["k"]) == (256, 576)
    swapped = families.resolve(SUM, Config(128, 128, stages=4, swap=True))
    assert [x.value.buffer for x in swapped.arguments if x.to in ("a", "b") and isinstance(x.value, TensorMap)] == [
        1,
        3,
        0,
        2,
    ]


def test_a_launch_of_several_swapped_reads_each_array_of_each_b_in_order():
    asked = several(joined(Problem.of(4096, 1024, 256, "nn"), 256, 320, 64))
    kernel = families.resolve(asked, Config(64, 64, stages=4, swap=True))
    maps = {x.name: x.value.buffer for x in kernel.arguments if isinstance(x.value, TensorMap) and x.to in ("a", "b")}
    # a, two b; then the others' a, those of the first b, those of the second.
    assert list(maps.values()) == [1, 2, 5, 7, 6, 8, 0, 3, 4]


def test_sizes_of_groups_come_before_further_arrays():
    kernel = families.resolve(GROUPS, MmaConfig(64, 64, 32, 32, 32))
    pointers = {x.name: x.value.buffer for x in kernel.arguments if isinstance(x.value, Pointer)}
    assert pointers == {"base_a0": 0, "base_a1": 3, "base_b0": 1, "base_b1": 4, "sizes": 2, "d0": 5}


def test_names_say_how_many():
    for config in (Config(128, 128, stages=4), MmaConfig(64, 64, 32, 32, 32)):
        names = {families.resolve(joined(SUM, *ks), config).name for ks in ((256, 320), (512, 64), (192,) * 3)}
        assert sorted(name[-5:] for name in names) == ["_sum2", "_sum3"] or all("_sum" in name for name in names)
        assert len(names) == 2


def test_ways_to_divide_k_are_those_of_one_product():
    """Stream-K, clusters that share a tile, and splits, for a sum as for a product of all its k."""
    few = Problem.of(256, 256, 16384, "nt")
    ways = lambda p: {(c.stream_k, c.cluster_k > 1, c.splits > 1) for c in sm90.configs(p)}  # noqa: E731
    assert ways(joined(few, 8192, 8192)) == ways(few)
    assert len(ways(few)) > 3


@pytest.mark.compiles
@pytest.mark.parametrize("family", ["sm90", "mma"])
def test_kernels_do_not_spill(family):
    draw, problems = random.Random(0), []
    for dtype, out in ((H, H), ("float16", F32), ("float8_e4m3fn", H), ("int8", "int32")):
        for layout in ("nt", "tn") if np.dtype(dtype).itemsize == 2 else ("nt",):
            problems.append(joined(Problem.of(4096, 4096, 512, layout, dtype, dtype, out), 512, 512))
    problems += [GROUPS, joined(GROUPS, 256, 256, 128), GRADIENTS]
    problems += [joined(Problem.of(500, 501, 99, "nn", arch="sm_80"), 33, 66)] * (family == "mma")
    for problem in problems:
        of = sm90 if family == "sm90" else mma
        configs = list(of.configs(problem))
        kernels = (of.resolve(problem, config) for config in draw.sample(configs, len(configs)))
        kernel = next(kernel for kernel in kernels if not isinstance(kernel, tuple))
        found = kernel.compile().resources
        assert (found.spill_store_bytes, found.spill_load_bytes) == (0, 0), kernel.name


# The choice.


def test_time_is_that_of_one_product():
    whole, halves = Problem.of(4096, 4096, 1024, "nt"), joined(Problem.of(4096, 4096, 512, "nt"), 512, 512)
    for config in (Config(128, 256, stages=4), Config(128, 128, stages=4, schedule="pingpong"), MmaConfig()):
        one, two = (families.resolve(p, config).time_us(p.device) for p in (whole, halves))
        assert two == pytest.approx(one, rel=1e-6)


def test_the_other_way_is_each_product_alone():
    """XLA's or a kernel's, of which the last reads what the others wrote."""
    (first, second), device = sums.alone(SUM), SUM.device
    both = [min(families.fastest(p)[1], xla.time_us(p)) for p in (first, second)]
    assert xla.time_us(SUM) == pytest.approx(sum(both) + 3e6 * SUM.result_bytes / device.bytes_per_second)
    (first, _), *_ = sums.alone(GRADIENTS), ()
    assert first.plain
    assert xla.time_us(GRADIENTS) == pytest.approx(2 * families.fastest(first)[1])  # XLA has none of groups


def test_auto_takes_sums_where_they_are_predicted_faster():
    """Tiles of the gradients of layers of experts, each within 2.5% of the fastest measured on an H200."""
    dx = {(128, 256, 262144): (128, 160), (64, 1280, 65536): (64, 256), (128, 1024, 196608): (64, 256)}
    for (groups, k, rows), tile in dx.items():
        choice = choose.choose(joined(Problem.of(rows, 2048, k, "nt", groups=groups, ragged="m"), k, k))
        assert (choice.config.bm, choice.config.bn) == tile
    assert choose.choose(joined(Problem.of(16384, 2560, 1280, "nt"), 1280, 1280)).served
    assert choose.choose(several(Problem.of(2048, 1024, 196608, "tn", groups=128, ragged="k"))).served
    assert not choose.choose(several(Problem.of(2560, 1280, 16384, "tn"))).served  # slower than each alone


def test_registers_of_sums_are_counted():
    whole = Problem.of(4096, 1024, 576, "nt", arch="sm_80")
    way = mma_kernel.math_of(whole)
    of_one, of_sum = (mma_kernel.registers(p, MmaConfig(), way, (16, 16)) for p in (whole, joined(whole, 256, 320)))
    assert of_sum == of_one + 24
