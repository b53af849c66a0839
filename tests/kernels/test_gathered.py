"""Rows of a in an order that is data: on the host, what refuses them, what a launch is told, and the machine code."""

import dataclasses

import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest
from cubin import instructions, nvdisasm

import cutjax
from cutjax.kernels import choose
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.operand import Gathered
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler
from cutjax.runtime.launch import Int32, Pointer

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")


def gathered(asked, rows=37):
    return dataclasses.replace(asked, a=dataclasses.replace(asked.a, view=Gathered(rows)))


# (dtype, math, layout, architecture, m, n, k, (bm, bn, bk, wm, wn, sliced_k, stages))
CASES = [
    ("bfloat16", "", "nn", "sm_80", 70, 51, 45, (64, 64, 32, 32, 32, 1, 3)),  # rows begin anywhere
    ("float16", "", "nt", "sm_75", 40, 40, 72, (32, 32, 32, 16, 16, 1, 2)),  # through registers
    ("float64", "", "nn", "sm_90a", 33, 52, 46, (32, 32, 16, 16, 16, 1, 3)),
    ("float32", "", "nt", "sm_80", 70, 33, 20, (64, 64, 8, 32, 32, 1, 3)),
    ("int8", "", "nt", "sm_80", 40, 48, 130, (32, 64, 64, 32, 32, 1, 3)),
]


def multiplied(asked, config, arrays, shape, tmp_path):
    """What a kernel makes of arrays, and the rows that it reads: some more than once, some not, some zero."""
    index = np.random.default_rng(1).integers(0, asked.a.view.rows, asked.m).astype(np.int32)
    index[[0, 5, asked.m - 1]] = -1, asked.a.view.rows, np.iinfo(np.int32).min
    result = np.full(shape, 7).astype(asked.out_dtype)
    given = [kernel_host.aligned(x) for x in (*arrays, index, result)]
    kernel_host.run(mma.resolved(asked, config), given, tmp_path)
    there = (index >= 0) & (index < asked.a.view.rows)
    a = np.asarray(arrays[0], np.float64)[np.where(there, index, 0)] * there[:, None]
    return given[-1].astype(np.float64), a


@needs_gxx
@pytest.mark.parametrize(("dtype", "math", "layout", "arch", "m", "n", "k", "config"), CASES)
def test_products_of_small_integers_are_exact(dtype, math, layout, arch, m, n, k, config, tmp_path):
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    asked = gathered(kernel_host.problem(dtype.name, math, layout, arch, m, n, k))
    x, b = (rng.integers(-8, 9, shape).astype(dtype) for shape in ((37, k), (k, n)))
    given = b.T if layout[1] == "t" else b
    found, a = multiplied(asked, Config(*config), (x, np.ascontiguousarray(given)), (m, n), tmp_path)
    np.testing.assert_array_equal(found, a @ b.astype(np.float64))


@needs_gxx
def test_rows_of_groups(tmp_path):
    """The indices are in the groups' order: those of a mixture of experts."""
    rng, sizes = np.random.default_rng(2), np.array([5, 0, 37, 3], np.int32)
    x, b = (rng.integers(-8, 9, shape).astype(np.float64) for shape in ((20, 72), (4, 72, 56)))
    asked = gathered(kernel_host.problem("float64", "", "nn", "sm_80", 50, 56, 72, groups=4, ragged="m"), 20)
    found, a = multiplied(asked, Config(32, 32, 16, 16, 16, stages=3), (x, b, sizes), (50, 56), tmp_path)
    np.testing.assert_array_equal(found[:45], np.einsum("mk,mkn->mn", a[:45], b[np.repeat(np.arange(4), sizes)]))
    assert not found[45:].any()


BF16 = cutjax.Problem.of(512, 512, 512, "nt")
LONG = cutjax.Problem.of(64, 64, 2**30, "nt")
TILE = Config(64, 64, 32, 32, 32, stages=3)
F32 = cutjax.Problem.of(512, 512, 512, "nt", "float32", "float32", "float32", math="tf32")


@pytest.mark.parametrize(
    ("asked", "config", "why"),
    [
        (BF16, dataclasses.replace(TILE, tma=True), "tma of gathered rows"),
        (BF16, Config(4, 32, 128, 4, 32, stages=1), "slim kernels read rows of a that follow each other"),
        (BF16, cutjax.Config(128, 128, cluster_m=2), "a cluster with gathered rows"),
        (BF16, cutjax.Config(128, 128, swap=True), "swap with gathered rows"),
        (BF16, cutjax.Config(128, 192, schedule="pingpong"), "192 accumulator registers a thread, at most 128"),
        (F32, cutjax.Config(128, 128), "gathered rows of f32 x f32"),
        (cutjax.Problem.of(512, 512, 512, "tn"), TILE, "in layout tn: they lie along k"),
        (cutjax.Problem.of(64, 64, 64, batch=(2,), a_batch=(2,), b_batch=(2,)), TILE, "gathered rows of a in a batch"),
    ],
)
def test_what_is_refused(asked, config, why):
    assert why in "; ".join(choose.reasons(config, gathered(asked)))


def test_sizes():
    assert "a size is 0" in choose.choose(gathered(BF16, 0)).reasons[0]
    assert "bytes of rows of up to" in "; ".join(choose.reasons(cutjax.Config(), gathered(LONG)))


def test_b_is_not_gathered():
    asked = dataclasses.replace(BF16, bs=(dataclasses.replace(BF16.bs[0], view=Gathered(37)),))
    assert any(reason.startswith("b as gathered") for reason in choose.choose(asked).reasons)


def test_loads_take_longer_than_of_copied_rows():
    """As measured: so the copy is made first where that is predicted to be faster, but under the backend "cuda"."""
    asked = gathered(BF16, 900)
    loads, copied = choose.choose(asked), choose.choose(BF16)
    assert loads.served
    assert loads.time_us > copied.time_us
    assert choose.choose(asked, backend="cuda").kernel.endswith("_gathered")
    assert choose.choose(asked, cutjax.Config(128, 128)).kernel == "sm90_bf16_nt_128x128x64_s4_c1x1_coop_gathered"


@pytest.mark.parametrize(("config", "source"), [(TILE, mma), (cutjax.Config(128, 128), sm90)], ids=["mma", "sm90"])
def test_what_a_launch_is_told(config, source):
    kernel = source.resolved(gathered(BF16, 900), config)
    values = {argument.name: argument.value for argument in kernel.arguments}
    assert (values["base_a"], values["index_a"], values["rows_a"]) == (Pointer(0), Pointer(2), Int32(900))
    assert kernel.arguments[-1].value == Pointer(3) or values["map_d0"].buffer == 3
    assert "map_a" not in values


@pytest.mark.skipif(
    compiler.compiler_missing() is not None or nvdisasm() is None, reason="needs NVRTC and nvidia-cuda-nvdisasm"
)
def test_machine_code_of_sm90():
    """The producer copies the rows, 16 bytes a thread, and TMA still brings b; the widest tile does not spill."""
    kernel = sm90.resolved(gathered(BF16, 900), cutjax.Config(256, 128))
    cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch="sm_90a")
    assert "warning" not in cubin.log
    assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0)
    found = instructions(cubin.image)
    assert sum(count for code, count in found.items() if code.startswith("LDGSTS")) == 16
    assert any(code.startswith("ARRIVES.LDGSTSBAR") for code in found)
    assert any(code.startswith("UTMALDG.3D") for code in found)
    assert any(code.startswith("FENCE.VIEW.ASYNC") for code in found)
