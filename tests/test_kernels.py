"""Every kernel of the shipped space compiles on a machine without a GPU: no warning, no spill, under a second each."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

import cutjax
from cutjax import _codegen, _compile, _config, _select, _sm90
from cutjax._problem import LAYOUTS

pytestmark = pytest.mark.skipif(_compile.compiler_missing() is not None, reason=str(_compile.compiler_missing()))

# (input, result): with one layout, and with all of them, since a layout changes the mainloop and a result the epilogue.
DTYPES = [("bfloat16", "bfloat16", LAYOUTS), ("bfloat16", "float32", ("nn",)), ("float16", "float16", ("nt",))]


def problem(layout="nn", a="bfloat16", out="bfloat16"):
    return cutjax.Problem(4096, 4096, 4096, layout, jnp.dtype(a), jnp.dtype(a), jnp.dtype(out))


@pytest.mark.parametrize(("a", "out", "layout"), [(a, out, layout) for a, out, layouts in DTYPES for layout in layouts])
def test_every_config_compiles_lean(a, out, layout):
    asked = problem(layout, a, out)
    configs = cutjax.candidates(asked)
    space = len(_select.CLUSTERS) * sum(map(len, _select.TILES.values())) + sum(map(len, _select.DEEP_TILES.values()))
    assert len(configs) == space

    def compile_one(config):
        start = time.thread_time()
        cubin = _compile.compile_source(_sm90.source(asked, config), name=config.name(asked), arch=asked.arch)
        return config.name(asked), cubin, time.thread_time() - start

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compile_one, configs))
    for name, cubin, seconds in results:
        assert "warning" not in cubin.log, f"{name}: {cubin.log}"
        resources = cubin.resources
        assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0), f"{name}: {resources}"
        # A requirement on device text (a slow compile is a defect), in CPU time of one thread, so load does not matter.
        assert seconds < 1, f"{name}: {seconds:.2f} s"


def test_the_widest_accumulators_are_in_the_space():
    widest = max(c.accumulator_registers for c in cutjax.candidates(problem()))
    assert widest == _config.MAX_ACCUMULATORS


def test_source_is_the_same_for_every_size():
    config = cutjax.Config()
    small = cutjax.Problem(128, 256, 64)
    assert _sm90.source(small, config) == _sm90.source(problem(), config)


def test_source_keeps_the_place_of_every_file():
    text = _sm90.source(problem(), cutjax.Config())
    for name in ("atoms.cuh", "scheduler.cuh", "mainloop.cuh", "epilogue.cuh", "sm90_gemm.cuh"):
        assert f'#line 1 "{name}"' in text
    assert "#include" not in text


@pytest.mark.parametrize("n", [16, 64, 256])
def test_wgmma_atom_names_its_shape(n):
    text = _codegen.wgmma(n, "f16", a_k_major=False, b_k_major=True)
    assert f"m64n{n}k16.f32.f16.f16" in text
    assert "p, 1, 1, 1, 0;" in text
    assert text.count("+f") == n // 2
