"""Tiles of the mma family that TMA loads: on the host, what refuses it, what a launch is told, and the machine code."""

import dataclasses

import kernel_host
import numpy as np
import pytest
from checks import changed
from cubin import instructions, nvdisasm

from cutjax import _ffi
from cutjax.kernels.mma import family
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import MATHS, math_of
from cutjax.runtime import compiler
from cutjax.runtime.launch import Call, TensorMap

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")
DOUBLE = Config(32, 32, 16, 16, 16, stages=3, tma=True)
COMPLEX = Config(32, 32, 16, 32, 16, stages=2, tma=True)
CASE_TF32 = Config(32, 32, 16, 32, 32, stages=2, tma=True)

# (dtype, math, layout, architecture, m, n, k, (bm, bn, bk, wm, wn, sliced_k, stages))
CASES = [
    ("float64", "", "nn", "sm_90a", 70, 52, 46, (64, 64, 16, 32, 32, 1, 3)),
    ("float64", "", "tn", "sm_90a", 40, 40, 80, (32, 32, 32, 32, 32, 2, 2)),
    ("float64", "", "nt", "sm_90a", 150, 40, 40, (64, 16, 16, 16, 16, 1, 4)),
    ("complex64", "tf32", "nt", "sm_90a", 40, 34, 20, (32, 32, 16, 32, 32, 1, 2)),
    ("complex64", "tf32", "tn", "sm_120a", 34, 40, 20, (32, 32, 32, 16, 16, 1, 2)),
    ("complex128", "", "nn", "sm_90a", 33, 51, 23, (32, 32, 8, 32, 16, 1, 3)),
    ("float32", "tf32", "nt", "sm_90a", 70, 52, 44, (64, 64, 32, 32, 32, 1, 3)),
    ("float32", "tf32", "tn", "sm_120a", 36, 52, 20, (16, 64, 16, 16, 16, 1, 3)),
    ("float32", "tf32x3", "nt", "sm_90a", 40, 40, 20, (32, 32, 16, 32, 32, 1, 3)),
    ("float32", "bf16x9", "tn", "sm_90a", 40, 40, 40, (32, 32, 32, 32, 32, 1, 3)),
    ("float16", "", "nn", "sm_90a", 40, 40, 40, (32, 32, 32, 32, 32, 1, 3)),
    ("bfloat16", "", "tt", "sm_120a", 40, 72, 200, (64, 64, 64, 32, 32, 2, 3)),
    ("int8", "", "nt", "sm_90a", 40, 48, 144, (32, 64, 64, 32, 32, 1, 3)),
    ("float8_e4m3fn", "", "nt", "sm_120a", 40, 48, 112, (32, 64, 64, 32, 32, 1, 3)),
]


@needs_gxx
@pytest.mark.parametrize(("dtype", "math", "layout", "arch", "m", "n", "k", "config"), CASES)
def test_products_of_small_integers_are_exact(dtype, math, layout, arch, m, n, k, config, tmp_path):
    asked = kernel_host.problem(dtype, math, layout, arch, m, n, k)
    kernel_host.check_small_integers(asked, Config(*config, tma=True), tmp_path)


def launched(asked, config, arrays, shape, tmp_path):
    """What a kernel makes of arrays, in results full of NaN."""
    result = np.full(shape, np.nan, asked.out_dtype)
    arrays = [kernel_host.aligned(x) for x in (*arrays, result)]
    kernel_host.run(mma.resolved(asked, config), arrays, tmp_path)
    return arrays[-1]


@needs_gxx
@pytest.mark.parametrize("order", [(), (0, 1, 3, 2, 4)])
def test_matrices_of_a_batch(order, tmp_path):
    """One that broadcasts, in whatever order it lies; a block's tiles follow each other through the stages."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, shape).astype(np.float64) for shape in ((2, 3, 2, 40, 72), (1, 3, 2, 72, 56)))
    fields = {"batch": (2, 3, 2), "a_batch": (2, 3, 2), "b_batch": (1, 3, 2), "orders": (order, order, ())}
    asked = kernel_host.problem("float64", "", "nn", "sm_90a", 40, 56, 72, **fields)
    given = [np.ascontiguousarray(x.transpose(order)) if order else x for x in (a, b)]
    found = launched(asked, DOUBLE, given, (2, 3, 2, 40, 56), tmp_path)
    np.testing.assert_array_equal(found, a @ b)


@needs_gxx
def test_rows_of_groups(tmp_path):
    """Groups begin in any row, and what TMA loads of the next one is not stored."""
    rng = np.random.default_rng(2)
    sizes = np.array([5, 0, 37, 3], np.int32)
    a, b = (rng.integers(-8, 9, shape).astype(np.float64) for shape in ((50, 72), (4, 72, 56)))
    asked = kernel_host.problem("float64", "", "nn", "sm_90a", 50, 56, 72, groups=4, ragged="m")
    found = launched(asked, DOUBLE, (a, b, sizes), (50, 56), tmp_path)
    np.testing.assert_array_equal(found[:45], np.einsum("mk,mkn->mn", a[:45], b[np.repeat(np.arange(4), sizes)]))
    assert not found[45:].any()


@needs_gxx
def test_parts_of_k(tmp_path):
    """Past the contraction's end TMA brings zeros: the last part has none but these."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, shape).astype(np.float64) for shape in ((40, 40), (40, 56)))
    asked = kernel_host.problem("float64", "", "nn", "sm_90a", 40, 56, 40)
    found = launched(asked, dataclasses.replace(DOUBLE, splits=4), (a, b), (4, 40, 56), tmp_path)
    np.testing.assert_array_equal(found.sum(0), a @ b)
    assert not found[3].any()


@needs_gxx
def test_symmetric_results(tmp_path):
    a = np.random.default_rng(4).integers(-8, 9, (40, 72)).astype(np.float64)
    asked = kernel_host.problem("float64", "", "tn", "sm_90a", 72, 72, 40, symmetric=True)
    found = launched(asked, Config(64, 64, 16, 32, 32, stages=3, tma=True), (a,), (72, 72), tmp_path)
    np.testing.assert_array_equal(found, a.T @ a)


@needs_gxx
def test_tf32_is_rounded_on_its_way(tmp_path):
    a, b = np.full((32, 32), 2048 + 0.75, np.float32), np.eye(32, dtype=np.float32)
    asked = kernel_host.problem("float32", "tf32", "nt", "sm_90a", 32, 32, 32)
    config = Config(32, 32, 16, 16, 16, stages=3, tma=True)
    assert "cvt_rna_tf32(__" in mma.resolved(asked, config).source  # which is for what threads load
    np.testing.assert_array_equal(launched(asked, config, (a, b), (32, 32), tmp_path), 2050 - 2 * (a < 2049))


NARROW = kernel_host.problem("bfloat16", "", "nt", "sm_90a", 64, 64, 64)
REFUSED = [
    (kernel_host.problem("float64", "", "nn", "sm_80", 64, 64, 64), "tma on sm_80: sm_90 and later have it"),
    (kernel_host.problem("float32", "", "nn", "sm_90a", 64, 64, 64), "elements are permuted one by one"),
    (changed(NARROW, b_dtype="int8"), "tiles that are decoded are loaded by all threads"),
    (kernel_host.problem("float64", "", "tn", "sm_90a", 64, 64, 64, groups=2, ragged="k"), "not what is past a group"),
    (kernel_host.problem("float32", "tf32", "nn", "sm_90a", 64, 64, 64), "layout nn: a and b lie along k, or both"),
    (kernel_host.problem("float64", "", "nn", "sm_90a", 64, 63, 64), "rows of b that begin at multiples of 8 bytes"),
    (kernel_host.problem("bfloat16", "", "nn", "sm_90a", 64, 64, 68), "rows of a that begin at multiples of 8 bytes"),
]


@pytest.mark.parametrize(("asked", "why"), REFUSED)
def test_what_is_refused(asked, why):
    config = Config(64, 64, max(math_of(asked).depths), 32, 32, stages=2, tma=True)
    assert why in "; ".join(mma.resolve(asked, config))
    assert isinstance(mma.resolve(asked, dataclasses.replace(config, tma=False)), mma.Kernel)
    offered = [mma.resolve(asked, config) for config in family.configs(asked) if config.tma]
    assert not [kernel for kernel in offered if isinstance(kernel, mma.Kernel)]


def test_slim_kernels_have_none():
    with pytest.raises(ValueError, match="tma with bm=4: slim kernels load b to registers"):
        Config(4, 32, 128, 4, 32, stages=1, tma=True)
    with pytest.raises(ValueError, match="tma=1, expected a bool"):
        Config(tma=1)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize(("dtype", "math"), MATHS)
def test_they_are_chosen_where_they_were_faster(dtype, math, arch):
    """Where fragments are of ldmatrix, and rows of tiles of 128 bytes, or of TF32, which has larger tiles by it."""
    for m, layout in ((4096, "nt"), (256, "tn"), (16, "nt")):
        asked = kernel_host.problem(dtype, math, layout, arch, m, 1024, 1024)
        configs = [config for config in family.configs(asked) if not isinstance(family.resolve(asked, config), tuple)]
        kernels = sorted((mma.resolved(asked, config) for config in configs), key=lambda k: k.time_us(asked.device))
        first, fits = kernels[0].config, math_of(asked).fragments == "tensor"
        assert not first.tma or (fits and (first.bk * asked.a.dtype.itemsize == 128 or math == "tf32"))
        if dtype in ("bfloat16", "int8") and arch != "sm_120a" and m == 4096:  # that one's tiles are smaller
            assert first.tma
        assert any(kernel.config.tma for kernel in kernels) == (math_of(asked).fragments != "fma")


def test_what_a_launch_is_told():
    kernel = mma.resolved(kernel_host.problem("complex128", "", "tn", "sm_90a", 40, 48, 24), COMPLEX)
    launch = kernel._launch(b"-")
    f64 = np.dtype(np.float64)  # elements are two numbers each, and 8 of them 128 bytes
    assert launch.params[:2] == (
        TensorMap(0, f64, (80, 24, 1), (640, 640 * 24), (16, 16, 1), 128, l2_bytes=256),
        TensorMap(1, f64, (96, 24, 1), (768, 768 * 24), (16, 16, 1), 128, l2_bytes=256),
    )
    assert launch.shared_bytes == 2 * (kernel.stage_bytes + 16) + 2 * kernel.buffer_bytes
    assert kernel.name == "mma_c128_tn_32x32x16_w32x16_s2_tma"
    names = [argument.name for argument in kernel.arguments]
    assert not {"base_a", "a_pitch", "a_apart", "b_pitch"} & set(names)
    lines = _ffi.check_plan(**Call((launch,)).attributes()).splitlines()
    assert sum(line.startswith("tensor_map") for line in lines) == 2
    tf32 = mma.resolved(kernel_host.problem("complex64", "tf32", "nt", "sm_90a", 40, 48, 24), CASE_TF32)
    first = tf32._launch(b"-").params[0]
    assert (first.element, first.dims, first.box) == ("tfloat32", (48, 40, 1), (32, 32, 1))


@pytest.mark.skipif(
    compiler.compiler_missing() is not None or nvdisasm() is None, reason="needs NVRTC and nvidia-cuda-nvdisasm"
)
@pytest.mark.parametrize(
    ("dtype", "math", "layout", "arch", "opcode", "config"),
    [
        ("float64", "", "nn", "sm_90a", "DMMA.16x8x8", Config(128, 128, 16, 64, 32, stages=6, tma=True)),
        ("float64", "", "tt", "sm_100a", "DMMA", Config(64, 128, 16, 32, 64, stages=3, blocks=2, tma=True)),
        ("bfloat16", "", "nt", "sm_90a", "HMMA.16816.F32.BF16", Config(128, 256, 64, 64, 64, stages=4, tma=True)),
        ("float16", "", "nn", "sm_120a", "HMMA.16816.F32", Config(128, 128, 32, 64, 64, stages=3, tma=True)),
        ("float32", "tf32", "tn", "sm_120a", "HMMA.1688.F32.TF32", Config(128, 128, 16, 64, 64, stages=3, tma=True)),
        ("int8", "", "nt", "sm_100a", "IMMA.16832.S8.S8", Config(128, 128, 64, 64, 32, stages=4, tma=True)),
    ],
)
def test_machine_code(dtype, math, layout, arch, opcode, config):
    """One instruction brings a box; no thread computes an address, or waits for all others, for each block of k."""
    kernel = mma.resolved(kernel_host.problem(dtype, math, layout, arch, 512, 512, 512), config)
    cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch=arch)
    assert "warning" not in cubin.log
    assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0)
    found = instructions(cubin.image)
    assert any(code.startswith("UTMALDG.3D") for code in found)
    assert not [code for code in found if code.startswith(("LDG", "F2F", "CCTL"))]
    assert sum(count for code, count in found.items() if code.startswith("BAR")) == 1  # after the mbarriers' begin
    assert [code for code in found if code.startswith(opcode)]
