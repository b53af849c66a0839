"""Kernels that divide k: they compile without a spill, their plans, what XLA makes of their parts, and refusals."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cubin import check_lean, in_turns
from test_fusion import CASES, problem

import cutjax
from cutjax.kernels.problem import LAYOUTS
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

Config = cutjax.Config
LONG = cutjax.Problem.of(256, 256, 65536)
GROUPS = cutjax.Problem.of(256, 512, 65536, "tn", groups=4, ragged="k")
SYMMETRIC = cutjax.Problem.of(256, 256, 65536, "nt", symmetric=True)

IN_CLUSTERS = [Config(bm, bn, 64, 4, cluster_k=k) for bm, bn in ((64, 64), (128, 128), (256, 96)) for k in (2, 4, 8)]
IN_CLUSTERS += [Config(128, 256, 64, 4, cluster_k=k) for k in (2, 3, 8)]
SWAPPED = [Config(64, 32, 64, 8, swap=True, cluster_k=4), Config(128, 64, 64, 5, swap=True, cluster_k=2, splits=3)]
AS_BATCH = [Config(128, 128, 64, 4, splits=3), Config(128, 128, 64, 4, schedule="pingpong", splits=3)]
AS_BATCH += [Config(128, 256, 64, 4, cluster_m=2, splits=3), Config(128, 192, 64, 4, cluster_k=4, splits=3)]


@needs_nvrtc
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_kernels_compile_lean(layout):
    asked = cutjax.Problem.of(256, 256, 65536, layout)
    turn = LAYOUTS.index(layout)
    check_lean(
        asked, [*IN_CLUSTERS[3 - turn + 6 * (turn % 2) :: 12], AS_BATCH[turn], *SWAPPED[turn : turn + 1]], 24 << 10
    )


@needs_nvrtc
@pytest.mark.parametrize("asked", [GROUPS, SYMMETRIC], ids=["groups", "symmetric"])
def test_kernels_of_groups_and_of_symmetric_results_compile_lean(asked):
    configs = [config for config in IN_CLUSTERS[::2] + AS_BATCH if not cutjax.reasons(config, asked)]
    assert len(configs) >= 6
    check_lean(asked, configs[1::6], 36 << 10)


@needs_nvrtc
@pytest.mark.parametrize("name", ["residual", "gated", "all reductions", "three products"])
def test_fused_kernels_compile_lean(name):
    asked = problem(*CASES[name], sizes=(256, 256, 65536))
    narrow = [Config(128, 64, 64, 4, cluster_k=k, splits=3 - k) for k in (1, 2)]
    configs = [config for config in (*IN_CLUSTERS, *AS_BATCH, *SWAPPED, *narrow) if not cutjax.reasons(config, asked)]
    assert {config.cluster_k for config in configs} >= {1, 2}
    check_lean(asked, in_turns(configs, list(CASES).index(name), 32), 48 << 10)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"cluster_k": 0}, "cluster_k=0: a cluster has 1 to 8 CTAs"),
        ({"cluster_k": 9}, "cluster_k=9"),
        ({"cluster_k": 2, "cluster_m": 2}, "share one tile, in a cluster 1x1"),
        ({"cluster_k": 2, "bn": 128, "schedule": "pingpong"}, "and warpgroups too"),
        ({"splits": 0}, "splits=0"),
        ({"splits": 129}, "1 to 128 parts"),
        ({"splits": 2.0}, "expected an int"),
    ],
)
def test_bad_config(fields, match):
    with pytest.raises(ValueError, match=match):
        Config(**fields)


def test_what_is_refused():
    rows = cutjax.Problem.of(4096, 512, 4096, groups=4, ragged="m")
    for config in (Config(cluster_k=2), Config(splits=2)):
        assert "the contraction of groups of rows is whole" in "; ".join(cutjax.reasons(config, rows))
    little = cutjax.reasons(Config(128, 256, 64, 2, cluster_k=2), LONG)
    assert "131072 bytes of accumulators take the place of 2 stages of 49152" in "; ".join(little)
    narrow = cutjax.reasons(Config(128, 64, cluster_k=4), problem(*CASES["float8"]))
    assert "16 columns make staging rows of less than 32 bytes in f8_e4m3fn" in "; ".join(narrow)
    # XLA could compute it; but so few know.
    refused = cutjax.Problem.of(256, 256, 4096, out_dtype=np.dtype("float64"))
    assert "result f64" in "; ".join(cutjax.reasons(Config(splits=2), refused))


def test_names():
    shared, parts = Config(128, 128, 64, 4, cluster_k=4), Config(128, 128, 64, 4, splits=4)
    assert shared.name(LONG) == "sm90_bf16_nn_128x128x64_s4_c1x1_coop_k4"
    gelu = problem(*CASES["gelu"])
    assert parts.name(LONG) == parts.name(gelu) == "sm90_bf16f32_nn_128x128x64_s4_c1x1_coop_parts"
    for splits in (2, 3):  # a number of the launch
        texts = {sm90.resolved(LONG, Config(128, 128, 64, 4, splits=splits)).source for splits in (2, splits)}
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("bn", "cluster_k", "columns"),
    [(256, 8, 32), (128, 8, 16), (64, 8, 16), (96, 4, 48), (80, 8, 80), (16, 2, 16), (96, 3, 48), (96, 7, 48)],
)
def test_owners(bn, cluster_k, columns):
    assert Config(64, bn, 64, 8, cluster_k=cluster_k).epilogue_columns == columns


def test_the_plan_of_a_cluster():
    plan = sm90.resolved(LONG, Config(128, 128, 64, 4, cluster_k=8)).call()
    (launch,) = plan.launches
    assert (plan.results, plan.finish) == ((), None)
    assert (launch.grid, launch.cluster, launch.blocks_per_sm) == ((2 * 2 * 8, 1, 1), (8, 1, 1), 0)  # none is clipped
    d = launch.params[2]
    assert (d.dims, d.box, d.swizzle) == ((256, 256, 1), (16, 64, 1), 32)
    groups = sm90.resolved(GROUPS, Config(128, 128, 64, 4, cluster_k=2, splits=3)).call().launches[0]
    assert (groups.grid, groups.blocks_per_sm) == ((2 * 4 * 4 * 3 * 2, 1, 1), 0)
    swapped = sm90.resolved(cutjax.Problem.of(16, 4096, 65536), SWAPPED[1]).call()
    assert [x.shape for x in swapped.results] == [(3, 16, 4096)]
    assert swapped.launches[0].grid == (32 * 3 * 2, 1, 1)
    (symmetric,) = sm90.resolved(SYMMETRIC, Config(128, 128, 64, 4, cluster_k=2)).call().launches
    assert symmetric.grid == (3 * 2, 1, 1)


def test_the_plan_of_reductions_in_a_cluster():
    asked = problem(*CASES["all reductions"], sizes=(1000, 1160, 256))
    plan = sm90.resolved(asked, Config(128, 128, stages=4, cluster_k=4)).call()
    assert [x.shape for x in plan.results] == [(1000, 1160), (63, 1160), (37, 1000), (63, 37), (63, 1160)]


def test_the_plan_of_splits():
    batch = cutjax.Problem.of(256, 256, 4096, batch=(3,), a_batch=(3,), b_batch=(1,))
    plan = sm90.resolved(batch, Config(128, 128, 64, 4, splits=5)).call()
    (launch,) = plan.launches
    assert [(x.shape, x.dtype) for x in plan.results] == [((5, 3, 256, 256), np.float32)]
    assert (launch.grid, launch.blocks_per_sm, launch.params[2].dims) == ((5 * 3 * 4, 1, 1), 1, (256, 256, 15))
    residual = sm90.resolved(problem(*CASES["residual"]), Config(128, 128, 64, 4, splits=5)).call()
    assert residual.prepare is not None
    assert residual.prepare([1, 2, 3, 4, 5]) == [1, 2]  # XLA has the others  # pyright: ignore
    buffers = {x.buffer for x in residual.launches[0].params if hasattr(x, "buffer")}
    assert buffers == {0, 1, 2}
    gated = sm90.resolved(problem(*CASES["gated"]), Config(128, 64, 64, 4, splits=5)).call()
    assert [x.shape for x in gated.results] == [(5, 4096, 4096)] * 2
    groups = sm90.resolved(GROUPS, Config(128, 128, 64, 4, splits=5)).call()
    assert [x.shape for x in groups.results] == [(5, 4, 256, 512)]


@pytest.mark.parametrize("name", ["gelu", "residual", "gated", "all reductions", "three products"])
def test_what_xla_makes_of_parts(name):
    asked = problem(*CASES[name], sizes=(64, 128, 4096))
    plan = sm90.resolved(asked, Config(64, 32, 64, 4, splits=3)).call()
    rng = np.random.default_rng(1)
    parts = [jax.device_put(rng.integers(-2, 3, (3, 64, 128)).astype(np.float32)) for _ in range(asked.products)]
    shapes = [(64 if spec.row else 1, 128 if spec.col else 1) for spec in asked.epilogue.operands]
    operands = [
        jax.device_put(rng.integers(-2, 3, shape).astype(spec.dtype))
        for shape, spec in zip(shapes, asked.epilogue.operands, strict=True)
    ]
    assert plan.finish is not None
    got = plan.finish(parts, [None] * asked.arrays + operands)
    expected = asked.epilogue.apply([x.sum(0) for x in parts], operands)
    for out, ref in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(ref, np.float32))


def lowered(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_lowering():
    a, b = jax.ShapeDtypeStruct((256, 65536), jnp.bfloat16), jax.ShapeDtypeStruct((65536, 256), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((256,), jnp.bfloat16)

    def fn(a, b, bias, config):
        def epilogue(acc, bias):
            return jax.nn.gelu(acc + bias.astype(acc.dtype)).astype(jnp.bfloat16)

        return cutjax.gemm(a, b, epilogue=epilogue, operands=(bias,), config=config)

    alone = lowered(functools.partial(fn, config=Config(128, 128, 64, 4, cluster_k=8)), a, b, bias)
    assert re.search(r"@cutjax_launch\(%\w+, %\w+, %\w+\).*_coop_k8_e", alone)
    assert "stablehlo.add" not in alone
    parts = lowered(functools.partial(fn, config=Config(128, 128, 64, 4, splits=3)), a, b, bias)
    assert re.search(r"@cutjax_launch\(%\w+, %\w+\).*_coop_parts.*-> tensor<3x256x256xf32>", parts)
    assert "stablehlo.add" in parts
    assert parts.count("stablehlo.slice") == 3


def test_lowering_of_a_sum_into_its_operand():
    """A result may take an operand's memory where the kernel writes the result, not where XLA does."""
    x, g, to = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 256), (4096, 256), (4, 256, 256)))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def fn(x, g, sizes, to, config):
        return cutjax.grouped_outer(x, g, sizes, accumulate=to, config=config)

    shared = lowered(functools.partial(fn, config=Config(128, 128, 64, 4, cluster_k=2)), x, g, sizes, to)
    assert "output_operand_alias" in shared
    parts = lowered(functools.partial(fn, config=Config(128, 128, 64, 4, splits=2)), x, g, sizes, to)
    assert "output_operand_alias" not in parts
    assert re.search(r"@cutjax_launch\(%\w+, %\w+, %\w+\).*tensor<2x4x256x256xf32>", parts)


def test_the_cost_of_parts():
    """What is long and thin is predicted faster in parts; what fills the device is not."""

    def time(asked, **fields):
        return sm90.resolved(asked, Config(128, 128, 64, 6, **fields)).time_us(asked.device)

    assert time(LONG, cluster_k=8, splits=4) < time(LONG, cluster_k=8) < time(LONG) / 4
    assert time(LONG, splits=16) < time(LONG) / 4
    square = cutjax.Problem.of(8192, 8192, 8192)
    assert time(square) < min(time(square, cluster_k=2), time(square, splits=2))
