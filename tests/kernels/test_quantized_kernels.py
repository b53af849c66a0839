"""Kernels that decode elements of 8 bits: their values on the host, instructions, spills, and what is chosen."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest
from cubin import instructions, nvdisasm

import cutjax
from cutjax.dtypes import EIGHT_BITS
from cutjax.epilogue.expression import identity
from cutjax.kernels import choose, prepared
from cutjax.kernels.device import reference
from cutjax.kernels.mma import family
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.runtime import compiler

needs_host = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")
needs_nvrtc = pytest.mark.skipif(
    compiler.compiler_missing() is not None or nvdisasm() is None, reason="needs NVRTC and nvidia-cuda-nvdisasm"
)
F32 = np.dtype(np.float32)


def problem(wide, narrow, layout, arch, m, n, k, out=F32, **fields):
    return cutjax.Problem.of(m, n, k, layout, wide, narrow, out, arch=arch, epilogue=identity(out, F32), **fields)


def every_value(dtype):
    """All finite values of a dtype whose products by small integers a float32 adds up exactly."""
    found = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    size = np.abs(found.astype(np.float64))
    return found if dtype.endswith("int8") else found[(size == 0) | ((size >= 2**-9) & (size <= 448))]


# (a's dtype, b's, layout, architecture, m, n, k, config): aligned rows, rows that begin anywhere, sliced k.
TILE = (64, 64, 32, 32, 32, 1, 3)
VALUES = [
    ("bfloat16", "int8", "nn", "sm_80", 70, 52, 45, TILE),
    ("bfloat16", "uint8", "nt", "sm_80", 40, 52, 45, TILE),
    ("float16", "float8_e4m3fn", "tn", "sm_75", 40, 64, 64, (64, 64, 64, 32, 32, 2, 2)),
    ("float16", "float8_e5m2", "tt", "sm_75", 40, 48, 64, TILE),
    ("float16", "uint8", "nn", "sm_80", 33, 160, 32, (32, 128, 32, 16, 64, 1, 3)),
    ("bfloat16", "float8_e4m3fn", "nn", "sm_90a", 70, 64, 80, (64, 64, 64, 32, 32, 2, 3)),
    ("bfloat16", "int8", "nn", "sm_80", 2, 70, 133, (2, 64, 128, 2, 32, 4, 1)),
    ("bfloat16", "uint8", "nt", "sm_80", 3, 33, 160, (4, 16, 128, 4, 16, 8, 1)),
    ("bfloat16", "float8_e5m2", "nt", "sm_90a", 1, 33, 133, (1, 32, 128, 1, 32, 8, 1)),
]


@needs_host
@pytest.mark.parametrize(("wide", "narrow", "layout", "arch", "m", "n", "k", "config"), VALUES)
def test_every_value_is_decoded_exactly(wide, narrow, layout, arch, m, n, k, config, tmp_path):
    rng = np.random.default_rng(0)
    a = rng.integers(-1, 2, (m, k)).astype(jnp.dtype(wide))
    values = every_value(narrow)
    b = np.resize(rng.permutation(values), (k, n))
    asked = problem(wide, narrow, layout, arch, m, n, k)
    found = kernel_host.multiply(a, b, asked, Config(*config), tmp_path)
    np.testing.assert_array_equal(found, a.astype(np.float64) @ b.astype(np.float64))


@needs_host
@pytest.mark.parametrize(
    ("wide", "narrow", "layout", "config"),
    [
        ("bfloat16", "float8_e4m3fn", "nn", TILE),
        ("float16", "float8_e5m2", "nt", TILE),
        ("bfloat16", "float8_e5m2", "nn", (2, 64, 128, 2, 32, 4, 1)),
    ],
)
def test_every_pattern_of_bits(wide, narrow, layout, config, tmp_path):
    """Subnormal numbers, infinities and NaN too: each the only one of its column that is not zero."""
    patterns = np.arange(256, dtype=np.uint8).view(jnp.dtype(narrow))
    b = np.zeros((48, 256), patterns.dtype)
    b[np.arange(256) % 48, np.arange(256)] = patterns
    asked = problem(wide, narrow, layout, "sm_80", 2, 256, 48)
    found = kernel_host.multiply(np.ones((2, 48)).astype(jnp.dtype(wide)), b, asked, Config(*config), tmp_path)
    np.testing.assert_array_equal(found, np.broadcast_to(patterns.astype(np.float32), found.shape))


def served(asked):
    found = (family.resolve(asked, config) for config in family.configs(asked))
    return {kernel.name: kernel for kernel in found if not isinstance(kernel, tuple)}


# Each architecture with a dtype and a layout, and all dtypes.
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
COMPILED = [
    (arch, "float16" if arch == "sm_75" else "bfloat16", narrow, layout)
    for arch, narrow, layout in zip(
        ARCHS, itertools.cycle(EIGHT_BITS), itertools.cycle(("nn", "nt", "nt", "nn")), strict=False
    )
]


@needs_nvrtc
@pytest.mark.parametrize(("arch", "wide", "narrow", "layout"), COMPILED)
def test_kernels_do_not_spill(arch, wide, narrow, layout):
    """The largest tile, or, on every other architecture, few rows."""
    m = 2 if ARCHS.index(arch) % 2 else 4096
    kernels = list(served(problem(wide, narrow, layout, arch, m, 4096, 4096, np.dtype(wide))).values())
    kernel = kernels[-1] if m == 2 else kernels[0]
    cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch=arch)
    assert "warning" not in cubin.log
    assert cubin.resources.spill_store_bytes == 0, f"{kernel.name}: {cubin.resources}"
    assert kernel.config.slim or [code for code in instructions(cubin.image) if code.startswith("HMMA")]
    assert kernel.config.slim == (m == 2)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_dtype_and_layout_has_kernels(arch):
    """But beside bfloat16 on sm_75, which has no such products."""
    for wide, narrow, layout in itertools.product(("bfloat16", "float16"), EIGHT_BITS, ("nn", "nt", "tn", "tt")):
        asked = problem(wide, narrow, layout, arch, 256, 256, 256)
        if (arch, wide) == ("sm_75", "bfloat16"):
            assert "on sm_75" in "; ".join(family.reasons(asked))
        else:
            assert served(asked)


def test_refusals_say_why():
    """Narrow rows, groups of k, swapped operands, and the narrowest warp tiles of b[k, n]."""
    assert family.reasons(problem("int8", "bfloat16", "nn", "sm_80", 64, 64, 64)) != ()
    groups = problem("bfloat16", "int8", "tn", "sm_80", 64, 64, 64, groups=2, ragged="k")
    assert "s8 as bf16 in groups of k" in "; ".join(family.reasons(groups))
    few = problem("bfloat16", "int8", "nt", "sm_80", 4096, 4, 4096)
    swapped = mma.resolve(few, Config(4, 16, 128, 4, 16, 8, stages=1, swap=True))
    assert "swap with b in int8" in "; ".join(map(str, swapped))
    across = mma.resolve(problem("bfloat16", "int8", "nn", "sm_80", 64, 64, 64), Config(64, 16, 64, 16, 16, stages=3))
    assert "a warp reads 32 columns of b[k, n] at once" in "; ".join(map(str, across))


def test_the_choice_is_between_reading_narrow_and_converting():
    """On Hopper weights are decoded in front of wgmma; those of 4 bits along k are converted before."""
    asked = cutjax.Problem.of(1, 8192, 8192, "nn", "bfloat16", "int8", "bfloat16", device=reference("sm_90a"))
    few = choose.choose(asked)
    assert few.kernel.startswith("sm90_bf16xs8")
    assert few.config.swap
    assert few.time_us < choose.choose(prepared.wide(asked), backend="cuda").time_us
    assert few.xla_us > few.time_us
    many = choose.choose(
        cutjax.Problem.of(8192, 8192, 8192, "nt", "bfloat16", "int4", "bfloat16", device=reference("sm_90a")),
        backend="cuda",
    )
    assert many.kernel.startswith("sm90_bf16_nt")
    assert "b converted to bf16" in many.reasons
    assert len(many.resolved.converted) == 1
    wide = choose.choose(prepared.wide(many.problem), backend="cuda")
    assert (many.config, many.kernel) == (wide.config, wide.kernel)
    assert many.time_us > wide.time_us


def test_configs_of_either_way_are_pinned():
    asked = cutjax.Problem.of(512, 512, 512, "nn", "bfloat16", "int8", "bfloat16", arch="sm_90a")
    for config, kernel in ((cutjax.MmaConfig(), "mma_bf16xs8"), (cutjax.Config(), "sm90_bf16_nn")):
        assert choose.choose(asked, config).kernel.startswith(kernel)
    assert len(set(cutjax.candidates(asked))) == len(cutjax.candidates(asked))
