"""Operands of 8 bits in the mma family: of two dtypes, and divided along k by groups that begin anywhere."""

import jax
import jax.numpy as jnp
import kernel_host
import launches
import products
import pytest
from cubin import instructions, nvdisasm

import cutjax
from cutjax.kernels import base
from cutjax.kernels.mma import family
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.runtime import compiler, settings

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
needs_host = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")
INSTRUCTIONS = [
    ("s8xu8", "sm_75", "IMMA.8816.S8.U8"),
    ("u8xs8", "sm_86", "IMMA.16832.U8.S8"),
    ("f8_e4m3fnxf8_e5m2", "sm_89", "QMMA.16832.F32.E4M3.E5M2"),
    ("f8_e5m2xf8_e4m3fn", "sm_120a", "QMMA.16832.F32.E5M2.E4M3"),
]


@needs_host
@pytest.mark.parametrize(
    ("way", "kind", "layout", "arch", "sizes"),
    [
        ("s8xu8", "dense", "nn", "sm_75", (40, 51, 133)),
        ("u8xs8", "dense", "tt", "sm_80", (33, 64, 80)),
        ("f8_e4m3fnxf8_e5m2", "dense", "nt", "sm_89", (33, 40, 100)),
        ("f8_e5m2xf8_e4m3fn", "rows", "nn", "sm_90a", (50, 33, 70)),
        ("s8", "symmetric", "tn", "sm_80", (70, 70, 50)),
        ("s8", "k", "tn", "sm_80", (33, 40, 301)),
        ("u8", "k", "tn", "sm_75", (40, 33, 130)),
        ("f8_e4m3fn", "k", "tn", "sm_89", (34, 40, 150)),
        ("f8_e5m2xf8_e4m3fn", "k", "tn", "sm_90a", (33, 20, 203)),
    ],
)
def test_products_are_exact(way, kind, layout, arch, sizes, tmp_path):
    item = products.Item(way, kind, layout, *sizes, arch=arch)
    bm = 64 if kind == "symmetric" else 32
    case = launches.Case(item.problem, Config(bm, 64, 64, 32, 32, stages=3), item.data, "")
    call, arrays, expected = case.prepare()
    got = launches.run(case.problem, call, arrays, launches.on_host(case.kernel, tmp_path))
    assert launches.wrong(got, expected) is None


@needs_nvrtc
@pytest.mark.skipif(nvdisasm() is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(("way", "arch", "opcode"), INSTRUCTIONS)
def test_instructions_of_two_dtypes(way, arch, opcode):
    kernel = mma.resolved(products.Item(way, "dense", "nt", 64, 64, 64, arch=arch).problem, Config(32, 32, 64, 32, 32))
    cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch=arch)
    assert cubin.resources.spill_store_bytes == 0
    assert [code for code in instructions(cubin.image) if code.startswith(opcode)]


@needs_nvrtc
@pytest.mark.parametrize(("way", "arch"), [("s8", "sm_75"), ("s8", "sm_80"), ("f8_e4m3fn", "sm_89"), ("u8", "sm_90a")])
def test_groups_of_k_do_not_spill(way, arch):
    """Of rows that begin anywhere both operands go through registers: the largest tile that serves."""
    asked = products.Item(way, "k", "tn", 1024, 1024, 4096, arch=arch).problem
    served = [config for config in family.configs(asked) if not isinstance(family.resolve(asked, config), tuple)]
    whole = [config for config in served if not config.slim and config.splits == 1]
    kernel = mma.resolved(asked, max(whole, key=lambda config: config.wm * config.wn * config.bk))
    assert kernel.units == (1, 1)
    cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch=arch)
    assert cubin.resources.spill_store_bytes == 0, f"{kernel.name}: {cubin.resources}"


def test_a_weights_gradient_of_int8_has_a_kernel(monkeypatch):
    names = []
    cubin = compiler.Cubin(b"cubin", compiler.Resources(None, None, None, None, None), "", 0.0, False)
    monkeypatch.setattr(base, "compile_kernel", lambda source, *, name, arch: names.append(name) or cubin)
    x, dy = jax.ShapeDtypeStruct((500, 136), jnp.int8), jax.ShapeDtypeStruct((500, 264), jnp.int8)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    outer = jax.jit(lambda *args: cutjax.grouped_outer(*args, out_dtype=jnp.int32, backend="cuda"))
    with settings.override(target_arch="sm_80"):
        outer.trace(x, dy, sizes).lower(lowering_platforms=("cuda",))
    (name,) = names
    assert name.startswith("mma_s8s32_nt_")
    assert "_groups_k_u1_1" in name


def test_slim_kernels_multiply_one_dtype():
    asked = products.Item("s8xu8", "dense", "nn", 2, 64, 64, arch="sm_80").problem
    assert "operands of one dtype" in "; ".join(cutjax.reasons(Config(2, 64, 128, 2, 32, 2, stages=1), asked))
    assert not any(config.slim for config in cutjax.candidates(asked))
