"""Kernels of swapped operands, and of rows that TMA cannot store: what they are, what is refused, how they compile."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cubin import check_lean
from test_fusion import CASES, F32, LONG, parameters
from test_fusion import problem as fused

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels import choose
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler
from cutjax.runtime.launch import TensorMap

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
BF16 = jnp.bfloat16
SWAPPED = cutjax.Config(128, 160, stages=2, schedule="pingpong", swap=True)


def reasons(problem, **fields):
    return "; ".join(cutjax.reasons(dataclasses.replace(SWAPPED, **fields), problem))


def places(x, shape):
    """What every kind of place gives, each its own digit, beside an operand of every kind."""
    index = [jax.lax.broadcasted_iota(jnp.int32, shape, axis).astype(F32) for axis in range(len(shape))]
    return x + index[-2] + 10 * index[-1] + 100 * index[0] + 1000 * (index[0] * shape[-2] + index[-2])  # sums are exact


def traced(fn, shape, *operands):
    return trace(fn, [jax.ShapeDtypeStruct(shape, F32)], operands)


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 5, 7)], ids=str)
def test_the_transposed_epilogue_is_the_epilogue_of_what_is_transposed(shape):
    rng = np.random.default_rng(0)

    def array(*of):
        return jax.device_put(rng.integers(-9, 10, of).astype(F32))

    def fn(acc, s, r, c, x):
        y = places(acc * s + x, acc.shape) * r - c
        return y, y.sum(-1), jnp.abs(y).max(-2), y.sum((-2, -1)), y.astype(jnp.int32)

    acc, operands = array(*shape), (array(), array(shape[-2], 1), array(shape[-1]), array(*shape))
    found = traced(fn, shape, *operands)
    epilogue = found.epilogue.primal
    assert epilogue.transposed != epilogue
    assert epilogue.transposed.transposed == epilogue
    assert {spec.row for spec in epilogue.operands} == {False, True}

    @jax.jit
    def both(acc, xs):
        return epilogue.transposed.apply([acc.mT], [x.mT for x in xs]), epilogue.apply([acc], xs)

    for out, there, here in zip(epilogue.outputs, *both(acc, found.operands), strict=True):
        np.testing.assert_array_equal(there if out.reduce else there.mT, here)


def test_the_transposed_problem():
    bias = traced(lambda acc, c: (acc + c, acc.sum(0)), (256, 512), np.ones(512, np.float32)).epilogue
    batches = {"batch": (3, 5), "a_batch": (3, 1), "b_batch": (1, 5)}
    for layout in cutjax.kernels.problem.LAYOUTS:
        asked = cutjax.Problem.of(256, 512, 64, layout, epilogue=bias, **batches)
        turned = asked.transposed
        assert turned.transposed == asked
        assert (turned.m, turned.n, turned.k) == (512, 256, 64)
        assert (turned.a, turned.bs) == (asked.bs[0], (asked.a,))
        assert (turned.flops, turned.bytes) == (asked.flops, asked.bytes)
        assert turned.epilogue.operands[0].row
        assert [(size, b, a, *moves) for size, a, b, *moves in asked.batch_groups] == list(turned.batch_groups)
    with pytest.raises(ValueError, match="is its own transpose"):
        _ = cutjax.Problem.of(256, 256, 64, "nt", symmetric=True).transposed


def test_the_transposed_problem_of_groups_and_of_several_products():
    """Rows in groups are columns then, and each group has an a; several products have an a each."""
    gated = fused(*CASES["gated"])
    for asked in (cutjax.Problem.of(256, 512, 64, groups=4, ragged="m"), gated):
        turned = asked.transposed
        assert turned.transposed == asked
        assert (turned.flops, turned.bytes, turned.arrays) == (asked.flops, asked.bytes, asked.arrays)
        assert turned.factors == asked.factors[::-1]
        assert turned.matrices[:2] == asked.matrices[1::-1]
        assert turned.most_tiles(64, 32) == asked.most_tiles(32, 64)
    assert turned.beside == (2, 1)


def of_float8(asked):
    a, *bs = (x.along_k.of(np.dtype(jnp.float8_e4m3fn)) for x in (asked.a, *asked.bs))
    return dataclasses.replace(asked, a=a, bs=tuple(bs))


@pytest.mark.parametrize(
    ("problem", "config", "match"),
    [
        (fused(*CASES["gated"]), {"bn": 64}, ""),
        (of_float8(fused(*CASES["gated"])), {"bn": 64}, "swap with 2 products"),
        (cutjax.Problem.of(256, 256, 256, "tn", groups=4, ragged="k"), {}, "swap with groups of k"),
        (cutjax.Problem.of(256, 256, 256, "nt", symmetric=True), {}, "swap of a symmetric product"),
        (cutjax.Problem.of(256, 256, 256, "tn"), {"bn": 24}, "bn=24 where rows in memory lie along it"),
        (
            cutjax.Problem.of(256, 256, 256, "nt"),
            {"bn": 24, "swap": False},
            "staging rows of less than 32 bytes in bf16",
        ),
        (cutjax.Problem.of(256, 256, 256, "nn"), {"bn": 24}, ""),
        (cutjax.Problem.of(256, 256, 256, "nt", out_dtype=F32), {"bn": 24, "swap": False}, ""),
        (cutjax.Problem.of(255, 257, 256, "nt"), {"bn": 8}, ""),
        (cutjax.Problem.of(255, 257, 256, "nt"), {"swap": False}, ""),
        (cutjax.Problem.of(256, 257, 256, "nt", groups=4, ragged="m"), {"swap": False}, ""),
    ],
)
def test_reasons(problem, config, match):
    found = reasons(problem, **config)
    assert match in found
    assert bool(match) == bool(found)


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"swap": 1}, "swap=1, expected a bool"), ({"bn": 24, "cluster_m": 2}, "bn=24 with cluster_m=2")],
)
def test_bad_configs(fields, match):
    with pytest.raises(ValueError, match=match):
        cutjax.Config(**{"bn": 64, **fields})


def test_names():
    aligned, odd = cutjax.Problem.of(256, 256, 256, "nt"), cutjax.Problem.of(255, 255, 256, "nt")
    assert SWAPPED.name(aligned) == "sm90_bf16_nt_128x160x64_s2_c1x1_pingpong_swap"
    assert SWAPPED.name(odd) == SWAPPED.name(aligned) + "_pitch1"
    relu = dataclasses.replace(odd, epilogue=fused(lambda acc: jax.nn.relu(acc).astype(BF16)).epilogue)
    assert SWAPPED.name(relu).endswith("_pitch1_odd")


def test_the_plan():
    """Buffers are as ever; a's map is of b, and the result's boxes are 64 of n by a chunk of m."""
    asked = cutjax.Problem.of(256, 512, 64, "nn", batch=(4,), a_batch=(4,), b_batch=(1,))
    plan = sm90.resolved(asked, SWAPPED).call().launches[0]
    a, b, d, *rest = plan.params
    assert (a.buffer, a.dims, a.box) == (1, (512, 64, 1), (64, 64, 1))
    assert (b.buffer, b.dims, b.box) == (0, (64, 256, 4), (64, 160, 1))
    assert (d.buffer, d.dims, d.box, d.swizzle) == (2, (512, 256, 4), (64, 80, 1), 128)
    m, n, k, _, batch, _, _, *steps = (x.value for x in rest)
    assert (m, n, k, batch) == (512, 256, 64, 4)
    assert steps == [0, 0, 0, 0, 0, 1]
    assert plan.grid == (4 * 2 * 4, 1, 1)
    byte = dataclasses.replace(asked, epilogue=fused(lambda acc: acc.astype(jnp.int8)).epilogue)
    d = sm90.resolved(byte, SWAPPED).call().launches[0].params[2]
    assert (d.box, d.swizzle) == ((64, 80, 1), 64)


def test_what_is_written_of_reductions():
    asked = fused(*CASES["all reductions"], sizes=(200, 408, 64))
    call = sm90.resolved(asked, dataclasses.replace(SWAPPED, bn=64)).call()
    # acc, and of the transposed result: each row's sum, each column's maximum, one of all, each row's minimum.
    assert [x.shape for x in call.results] == [(200, 408), (4, 408), (26, 200), (26, 4), (4, 408)]
    values = [jnp.ones(x.shape, x.dtype) for x in call.results]
    assert [x.shape for x in call.finish(values, [])] == [(200, 408), (408,), (200,), (), (408,)]


def test_a_program_with_swapped_operands_lowers():
    if compiler.compiler_missing():
        pytest.skip(str(compiler.compiler_missing()))
    config = cutjax.Config(64, 24, stages=4, schedule="pingpong", swap=True)

    def fn_of(acc, c, r):
        return acc + c.astype(F32) + r.astype(F32)

    def fn(a, b, bias, x):
        return cutjax.gemm(a, b, layout="nt", epilogue=fn_of, operands=(bias, x), config=config, backend="cuda")

    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((21, 64), (136, 64), (136,), (21, 136))]
    text = jax.jit(fn).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert "64x24x64_s4_c1x1_pingpong_swap_e" in text


def test_nine_operands_of_columns_are_too_many_for_a_launch():
    asked = fused(lambda acc, *xs: (acc + sum(xs[1:], xs[0])).astype(BF16), 1, [((384,), F32)] * 9)
    assert cutjax.candidates(asked) == ()
    for swap in (False, True):
        assert "too many or too large for one launch" in reasons(asked, bn=64, swap=swap)


def test_a_kernel_that_one_launch_cannot_be_told_is_not_chosen(monkeypatch):
    """Parts of tiles take two parameters more: with eight operands of columns, too many."""
    columns, sizes = [((384,), F32)] * 8, (1600, 1600, 12608)
    asked = fused(lambda acc, *xs: (acc + sum(xs[1:], xs[0])).astype(BF16), 1, columns, "nn", sizes)
    stream = next(config for config in cutjax.candidates(asked) if config.stream_k)
    assert any("more than 48" in reason for reason in cutjax.reasons(stream, asked))
    monkeypatch.setattr(sm90.Kernel, "time_us", lambda self, device: 2.0 - self.config.stream_k)
    choice = choose.choose(asked)
    assert choice.served
    assert not choice.config.stream_k


def test_maps_are_of_aligned_rows_alone():
    """Whatever an epilogue reads and writes: TMA has no map of rows that are not whole units of 16 bytes."""
    for (name, case), n, swap in itertools.product(CASES.items(), (4095, 4100, 4104), (False, True)):
        asked = fused(*case, "nt", (4095, n, 4096))
        kernel = sm90.resolve(asked, dataclasses.replace(SWAPPED, bn=32, swap=swap))
        if asked.products > 1 and swap:
            continue
        assert isinstance(kernel, sm90.Kernel), (name, kernel)
        plan = [argument.value for argument in kernel.arguments]
        maps = [x for x in plan if isinstance(x, TensorMap)]  # whose strides are checked
        assert len(maps) >= 1 + asked.products
        assert [type(x).__name__ for x in plan] == parameters(kernel.source)


PLAIN = {"plain": (lambda acc: acc.astype(BF16), 1, ()), "f32": (lambda acc: acc, 1, ())}
F8 = jnp.float8_e4m3fn
MIXED = {
    "gelu (erf form)": (
        lambda acc, c: jax.nn.gelu(acc + c.astype(F32), approximate=False).astype(BF16),
        1,
        (((384,), BF16),),
    ),
    "f32 residual": (lambda acc, r: acc + r, 1, (((256, 384), F32),)),
    "f8 residual": (lambda acc, r: ((acc + r.astype(F32)).astype(F8), acc.astype(BF16)), 1, (((256, 384), F8),)),
    "three widths": (lambda acc: (acc.astype(jnp.int8), acc, acc.astype(BF16)), 1, ()),
}
EPILOGUES = PLAIN | CASES | {name: LONG[name] for name in ("dropout", "dropout, residual", "log_ndtr")} | MIXED
EPILOGUES = {name: case for name, case in EPILOGUES.items() if case[1] == 1}
SIZES = [(4096, 4096, 4096), (4095, 4096, 4096), (4096, 4095, 4096), (4095, 4100, 4096)]
TILES = [
    ("pingpong", 64, 8, 4),
    ("coop", 64, 24, 4),
    ("coop", 128, 16, 4),
    ("pingpong", 128, 72, 3),
    ("pingpong", 128, 64, 3),
    ("pingpong", 128, 96, 3),
    ("pingpong", 128, 128, 2),
    ("pingpong", 128, 160, 2),
    ("pingpong", 128, 192, 2),
    ("coop", 128, 248, 2),
    ("coop", 256, 96, 2),
    ("coop", 256, 192, 2),
]


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("plain", SIZES[2]), *zip(EPILOGUES, itertools.cycle(SIZES), strict=False)],
)
def test_swapped_kernels_compile_lean(name, sizes):
    """A tile with as many accumulators as the epilogue may have, and in every fifth case one with fewer."""
    asked = fused(*EPILOGUES[name], "nt", sizes)
    configs = [cutjax.Config(bm, bn, 64, stages, 1, 1, schedule, swap=True) for schedule, bm, bn, stages in TILES]
    serving = sorted((c for c in configs if not cutjax.reasons(c, asked)), key=lambda c: -c.accumulator_registers)
    assert len(serving) >= 4
    turn = list(EPILOGUES).index(name)
    check_lean(asked, [serving[0], *([] if turn % 5 else [serving[1 + turn % (len(serving) - 1)]])], 96 << 10)


@needs_nvrtc
@pytest.mark.parametrize(("turn", "layout"), [*enumerate(("nn", "tn", "tt"))])
def test_layouts_and_clusters_compile_lean(turn, layout):
    for i, (dtype, out) in enumerate((("bfloat16", "bfloat16"), ("float16", "float32"))):
        asked = cutjax.Problem.of(4096, 4096, 4096, layout, jnp.dtype(dtype), jnp.dtype(dtype), jnp.dtype(out))
        configs = [
            cutjax.Config(128, 192, stages=3, schedule="pingpong", swap=True),
            cutjax.Config(256, 160, stages=2, cluster_m=2, swap=True),
            cutjax.Config(64, 16 if layout[0] == "t" else 8, stages=8, cluster_n=2, schedule="pingpong", swap=True),
        ]
        check_lean(asked, configs[(i + turn) % 3 :: 3], 20 << 10)


@needs_nvrtc
@pytest.mark.parametrize("name", ["plain", "f32", "residual", "dropout", "all reductions"])
def test_rows_that_tma_cannot_store_compile_lean(name):
    asked = fused(*EPILOGUES[name], "nt", (4096, 4095 if name in ("plain", "residual") else 4100, 4096))
    most = max(cutjax.candidates(asked), key=lambda config: (config.accumulator_registers, config.bm, config.stages))
    check_lean(asked, [most, cutjax.candidates(asked)[0]][: 1 + (name == "plain")], 96 << 10)


@needs_nvrtc
def test_rows_of_groups_that_tma_cannot_store_compile_lean():
    groups = cutjax.Problem.of(4096, 4095, 4096, "nt", groups=8, ragged="m")
    check_lean(groups, cutjax.candidates(groups)[:2], 48 << 10)


def test_sums_in_float16_of_several_products_are_refused():
    """Not an error on the way to the reasons."""
    two = trace(lambda x, y: x * y, [jax.ShapeDtypeStruct((8, 8), np.float16)] * 2).epilogue
    problem = cutjax.Problem.of(8, 8, 64, "nn", np.float16, np.float16, epilogue=two, math="f16")
    assert "float16" in reasons(problem) or "f16" in reasons(problem)
