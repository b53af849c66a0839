"""A telling part of the shipped kernels compiles on a machine without a GPU: no warning, no spill, little code."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from checks import changed
from cubin import check_lean, in_turns, telling

import cutjax
from cutjax.kernels.problem import LAYOUTS
from cutjax.kernels.sm90 import config as sm90_config
from cutjax.kernels.sm90 import family
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90 import text as sm90_text
from cutjax.runtime import compiler
from cutjax.runtime.launch import Int32, Pointer

pytestmark = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

# (input, result): with one layout, and with all of them, since a layout changes the mainloop and a result the epilogue.
WAYS = [*(("bfloat16", "bfloat16", layout) for layout in LAYOUTS), ("bfloat16", "float32", "nn")]
WAYS += [("float16", "float16", "nt")]


def problem(layout="nn", a="bfloat16", out="bfloat16"):
    return cutjax.Problem.of(4096, 4096, 4096, layout, jnp.dtype(a), jnp.dtype(a), jnp.dtype(out))


@pytest.mark.parametrize(("a", "out", "layout"), WAYS)
def test_every_config_compiles_lean(a, out, layout):
    asked = problem(layout, a, out)
    configs = cutjax.candidates(asked)
    space = len(family.CLUSTERS) * sum(map(len, family.TILES.values())) + sum(map(len, family.DEEP_TILES.values()))
    assert len([config for config in configs if not (config.swap or config.stream_k or config.parts > 1)]) == space

    # Every third tile in one of the cases; a cluster changes the producer alone: few of them.
    alone = telling([config for config in configs if config.cluster == 1], 48)
    clusters = [config for config in configs if config.cluster > 1 and not (config.swap or config.stream_k)]
    turn = WAYS.index((a, out, layout))
    configs = in_turns(alone, 3 * turn, 3 * len(WAYS)) + clusters[turn::96]
    check_lean(asked, [config for config in configs if not config.stream_k], 20 << 10)  # 15.4 KB unswapped
    check_lean(asked, [config for config in configs if config.stream_k], 34 << 10)  # they add up parts


def grouped(ragged, layout, out="bfloat16"):
    sizes = (16384, 1408, 2048) if ragged == "m" else (2048, 1408, 16384)
    half = jnp.dtype(jnp.bfloat16)
    return cutjax.Problem.of(*sizes, layout, half, half, jnp.dtype(out), groups=64, ragged=ragged)


@pytest.mark.parametrize(
    ("ragged", "layout", "out"),
    [("m", "nn", "bfloat16"), ("m", "nt", "bfloat16"), ("k", "tn", "float32"), ("k", "tn", "bfloat16")],
)
def test_configs_of_groups_compile_lean(ragged, layout, out):
    """A few of the tiles alone, and one in a cluster."""
    asked = grouped(ragged, layout, out)
    configs = cutjax.candidates(asked)
    assert {config.cluster for config in configs} == {1, 2}
    alone = telling([config for config in configs if config.cluster == 1], 32)
    clusters = [config for config in configs if config.cluster > 1]
    turn = LAYOUTS.index(layout) + (out == "float32")
    check_lean(asked, [*in_turns(alone, turn, 32), clusters[turn]], 48 << 10)


def test_what_kernels_of_groups_refuse():
    def reasons(problem, config=None):
        return "; ".join(cutjax.reasons(config or cutjax.Config(), problem))

    assert reasons(grouped("m", "nn")) == ""
    assert "layout tn with groups of m" in reasons(grouped("m", "tn"))
    assert "layout nn with groups of k" in reasons(grouped("k", "nn"))
    wide = cutjax.Config(128, 192, stages=4, schedule="pingpong")
    assert reasons(grouped("m", "nn"), wide) == reasons(grouped("k", "tn"), wide) == ""
    assert "192 accumulator registers" in reasons(grouped("k", "tn"), dataclasses.replace(wide, cluster_m=2))
    assert "a size is 0" in reasons(changed(grouped("m", "nn"), groups=0))


def test_the_plan_of_groups():
    config = cutjax.Config(128, 128, stages=4, cluster_n=2)
    rows = sm90.resolved(grouped("m", "nn"), config).call().launches[0]
    a, b, d, *_ = rows.params
    assert (a.dims, b.dims, d.dims) == ((2048, 16384, 1), (1408, 2048, 64), (1408, 16384, 1))
    # The sizes, whether they start with rows of no group, their steps; and the result, for rows that TMA cannot clip.
    assert rows.params[-5:] == (Pointer(2), Int32(0), Int32(0), Int32(0), Pointer(3))
    assert rows.grid == ((128 + 64 + 1) * 6 * 2, 1, 1)
    contraction = sm90.resolved(grouped("k", "tn"), config).call().launches[0]
    a, b, d, *_ = contraction.params
    assert (a.dims, b.dims, d.dims) == ((2048, 16384, 1), (1408, 16384, 1), (1408, 2048, 64))
    assert contraction.params[-4:] == (Pointer(2), Int32(0), Int32(0), Int32(0))
    assert contraction.grid == (16 * 6 * 64 * 2, 1, 1)


def test_the_widest_accumulators_are_in_the_space():
    widest = max(c.accumulator_registers for c in cutjax.candidates(problem()))
    assert widest == sm90_config.MAX_ACCUMULATORS


def test_source_is_the_same_for_every_size():
    config = cutjax.Config()
    small = cutjax.Problem.of(128, 256, 64)
    assert sm90.resolved(small, config).source == sm90.resolved(problem(), config).source


def test_source_keeps_the_place_of_every_file():
    text = sm90.resolved(problem(), cutjax.Config()).source
    for name in ("sm90/atoms.cuh", "common/scheduler.cuh", "sm90/mainloop.cuh", "sm90/epilogue.cuh", "sm90/gemm.cuh"):
        assert f'#line 1 "{name}"' in text
    assert "#include" not in text


@pytest.mark.parametrize("n", [16, 64, 256])
def test_wgmma_atom_names_its_shape(n):
    text = sm90_text.wgmma(n, *[np.dtype(np.float16)] * 2, a_k_major=False, b_k_major=True)
    assert f"m64n{n}k16.f32.f16.f16" in text
    assert "p, 1, 1, 1, 0;" in text
    assert text.count("+f") == n // 2
