"""Random cases that tests on a device pin, without one: each has a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import syrk_problems
import test_cuda_kernel_gpu as own_kernels
import test_large_gpu as large
import test_mma_gpu as products
import test_mma_library_gpu as library

import cutjax
from cutjax.kernels.mma import family
from cutjax.runtime import compiler

GAUSSIAN = [library.Slim(index, swap) for index in range(1000, 1020, 4) for swap in (False, True)]


@pytest.mark.parametrize("items", [library.EXACT[::15], GAUSSIAN], ids=["exact", "gaussian"])
def test_slim_products(items):
    for item in items:
        assert (item.config.slim, item.config.swap) == (True, item.swap)


@pytest.mark.parametrize("index", range(0, 60, 4))
def test_symmetric_results(index):
    problem = syrk_problems.generate(index).problem
    assert any(not cutjax.reasons(config, problem) for config in family.configs(problem))


@pytest.mark.parametrize("way", products.WAYS)
def test_every_way_to_multiply(way):
    dtype, precision, _ = products.WAYS[way]
    with products.scope(dtype):
        for layout in products.LAYOUTS:
            for sizes in products.SIZES:
                problem = products.asked(dtype, precision, layout, *sizes)
                assert products.pinned(np.random.default_rng(0), problem, 3)
        assert not cutjax.reasons(products.small(way), products.asked(dtype, precision, "nn", 70, 51, 45))


@pytest.mark.skipif(compiler.compiler_missing() is not None, reason="needs NVRTC")
def test_kernels_of_users_compile():
    """By what the headers that they name have now."""
    x, c = jnp.ones((64, 128), jnp.float32), jnp.float32(0.5)
    f = jax.jit(lambda x, c: own_kernels.tiles(x, c, scale=1.0, shift=0.0))
    assert "cutjax_launch" in f.trace(x, c).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(compiler.compiler_missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("name", large.CASES)
def test_large_sizes_lower(name):
    case = large.CASES[name]
    text = jax.jit(case.program).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert ("cutjax_launch" in text) == case.kernel
