"""Kernels without one of their parts: the text that is taken away is there, and what is left compiles."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.ops import mma_parts
from cutjax.runtime import compiler, sources

DEVICE = sources.DEVICE.parents[1] / "ffi" / "device"


@pytest.mark.parametrize("part", mma_parts.PARTS)
def test_parts_are_in_the_text(part):
    texts = [path.read_text() for path in DEVICE.glob("*/*.cuh")]
    for shipped, _ in mma_parts.PARTS[part]:
        assert any(shipped in text for text in texts), shipped


@pytest.mark.parametrize("cube", mma_parts.CASES[:1], ids=lambda cube: cube.name)
def test_kernels_are_others_without_a_part(cube):
    with jax.enable_x64(True):
        kernel = cube.kernel()
        assert not kernel.config.tma
        codes = set()
        for part in ("", *mma_parts.PARTS):
            with mma_parts.without(part):
                codes.add(compiler.compile_kernel(kernel.source, name=kernel.name, arch="sm_90").image)
    assert len(codes) == 1 + len(mma_parts.PARTS)


@pytest.mark.parametrize("cube", mma_parts.CASES, ids=lambda cube: cube.name)
def test_every_product_has_kernels_by_tma(cube):
    with jax.enable_x64(True):
        found = cube.kernels(tma=True)[: mma_parts.BY_TMA]
    assert len({kernel.name for kernel in found}) == mma_parts.BY_TMA
    assert all(kernel.config.tma for kernel in found)
    if cube.dtype == "float64":  # those that have room for wider warp tiles are among them
        assert any(kernel.config.wm * kernel.config.wn > 32 * 32 for kernel in found)


def test_difference():
    assert mma_parts.difference(jnp.array([1.0, 4.0]), jnp.array([1.5, -4.0])) == 2
    assert mma_parts.difference(jnp.array([7], jnp.int32), jnp.array([7], jnp.int32)) == 0
