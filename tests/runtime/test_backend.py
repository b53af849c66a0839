"""The choice of backend: its scope, its place in jit's cache key, and what "cuda" means without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import cutjax
from cutjax.binding import lowering
from cutjax.runtime import compiler

X = jnp.ones((128, 128), jnp.bfloat16)
LAUNCH = "stablehlo.custom_call @cutjax_launch"
pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("kernels_run")]


def lowered(fn, *args) -> str:
    """The program for CUDA, lowered without a GPU."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def square(x, **options):
    return cutjax.gemm(x, x, **options)


@pytest.fixture
def no_nvrtc(monkeypatch):
    monkeypatch.setattr(compiler, "_compiler", lambda: 'NVRTC is not installed: pip install "cutjax[cuda13]"')
    lowering._warn_once.cache_clear()


def test_auto_and_cuda_launch_a_kernel_and_xla_does_not():
    assert LAUNCH in lowered(square, X)
    assert LAUNCH in lowered(lambda x: square(x, backend="cuda"), X)
    assert LAUNCH not in lowered(lambda x: square(x, backend="xla"), X)


@pytest.mark.compiles
@pytest.mark.skipif(compiler.compiler_missing() is not None, reason="needs NVRTC")
def test_lowering_compiles_the_kernels():
    """Of products, routes and their gathers, and direct convolutions: their code is in the program."""
    logits, images, taps = jnp.ones((128, 4)), jnp.ones((2, 16, 64), jnp.bfloat16), jnp.ones((3, 1, 64), jnp.bfloat16)

    def fn(x, logits, images, taps):
        conv = cutjax.conv_general_dilated(images, taps, (1,), "SAME", (1,), (1,), ("NWC", "WIO", "NWC"), 64)
        return square(x), cutjax.route(logits, 2).dispatch(jnp.tile(x, 4)), conv

    with cutjax.use_backend("cuda"):
        text = lowered(fn, X, logits, images, taps)
    kernels = re.findall(r'kernel = "([a-z0-9]+_[a-z0-9]+)', text)
    assert sorted(kernels) == ["direct_bf16", "route_f32", "sm90_bf16", "sm90_gather"]
    assert text.count(r"\7FELF") == 4


def test_scope_nests_and_the_argument_wins():
    with cutjax.use_backend("xla"):
        assert LAUNCH not in lowered(lambda x: square(x), X)
        assert LAUNCH in lowered(lambda x: square(x, backend="auto"), X)
        with cutjax.use_backend("cuda"):
            assert LAUNCH in lowered(lambda x: square(x), X)
        assert LAUNCH not in lowered(lambda x: square(x), X)
    assert LAUNCH in lowered(lambda x: square(x), X)


def test_scope_is_part_of_the_jit_cache_key():
    traced = []

    @jax.jit
    def f(x):
        traced.append(cutjax.explain(square)(x).rows[0].backend)
        return square(x)

    f(X)
    with cutjax.use_backend("xla"):
        f(X)
        f(X)
    f(X)
    assert traced == ["auto", "xla"]
    with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError):
        f(X)


def test_scope_ends_with_an_error():
    with pytest.raises(RuntimeError, match="inside"), cutjax.use_backend("xla"):
        raise RuntimeError("inside")
    assert LAUNCH in lowered(lambda x: square(x), X)


def test_scope_is_thread_local():
    seen = {}
    inside, done = threading.Event(), threading.Event()

    def other():
        inside.wait()
        seen["other"] = LAUNCH in lowered(lambda x: square(x), X)
        with cutjax.use_backend("cuda"):
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with cutjax.use_backend("xla"):
        inside.set()
        done.wait()
        seen["this"] = LAUNCH in lowered(lambda x: square(x), X)
    thread.join()
    assert seen == {"other": True, "this": False}


def test_unknown_name():
    with pytest.raises(
        ValueError, match=r"use_backend: unknown backend 'gpu', expected one of \('auto', 'cuda', 'xla'\)"
    ):
        cutjax.use_backend("gpu")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_cuda_without_a_gpu(wrap):
    with pytest.raises(
        NotImplementedError, match="backend 'cuda' needs an NVIDIA GPU, but the program is compiled for cpu"
    ):
        wrap(lambda x: square(x, backend="cuda").sum().astype(jnp.float32))(X)


def test_cuda_lists_every_reason():
    a, b = jnp.ones((4, 100)), jnp.ones((100, 3))
    with cutjax.use_backend("xla"):
        assert "dot_general" in lowered(cutjax.gemm, a, b)
    with pytest.raises(NotImplementedError) as error:
        lowered(lambda a, b: cutjax.gemm(a, b, out_dtype=jnp.float8_e4m3b11fnuz, backend="cuda"), a, b)
    text = str(error.value)
    assert "no kernel for 4x3x100 nn f32 x f32 by tf32 -> float8_e4m3b11fnuz" in text
    assert "result float8_e4m3b11fnuz: one of bf16" in text


def test_a_pinned_config_that_cannot_serve():
    """Whoever pins a kernel gets it or every reason, under "auto" too."""
    config = cutjax.Config(bm=128, bn=256, bk=128, stages=8)
    with pytest.raises(NotImplementedError, match=r"with Config.*bytes of shared memory"):
        lowered(lambda x: square(x, config=config), X)
    wide = jnp.ones((16, 16), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"f32 x f32.*bytes of shared memory"):
        lowered(lambda x: cutjax.gemm(x, x, layout="nt", config=config), wide)


def test_a_pinned_config_runs_and_its_gradient_chooses():
    config = cutjax.Config(bm=64, bn=32, stages=3)
    text = lowered(jax.value_and_grad(lambda x: square(x, config=config).astype(jnp.float32).sum()), X)
    assert text.count('kernel = "sm90_bf16_nn_64x32x64_s3_c1x1_coop"') == 1
    assert text.count(LAUNCH) == 3


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)], ids=str)
def test_cuda_serves_zero_sizes_by_xla(sizes):
    m, n, k = sizes
    a, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)
    assert LAUNCH not in lowered(jax.grad(lambda a, b: cutjax.gemm(a, b, backend="cuda").sum(), (0, 1)), a, b)


def test_missing_compiler_under_auto_warns_once(no_nvrtc):
    with pytest.warns(RuntimeWarning, match=r'XLA runs, not a kernel: .*pip install "cutjax\[cuda13\]"'):
        assert LAUNCH not in lowered(lambda x: square(x), X)
    assert LAUNCH not in lowered(lambda x: square(x) + square(x[:8, :8]).sum(), X)  # a second warning were an error


def test_missing_compiler_under_cuda(no_nvrtc):
    with pytest.raises(NotImplementedError, match=r'cannot compile a kernel: .*pip install "cutjax\[cuda13\]"'):
        lowered(lambda x: square(x, backend="cuda"), X)


def test_import_is_light():
    """Nothing that costs time and only some calls need is imported with the package."""
    code = "import jax, sys; before = set(sys.modules); import cutjax; cutjax.gemm; print(*set(sys.modules) - before)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = (
        "cuda",
        "rich",
        "platformdirs",
        "matplotlib",
        "optax",
        "jax.experimental.pallas",
        "multiprocessing",
        "asyncio",
    )
    assert [name for name in loaded if name.startswith(heavy)] == []
    assert "cutjax.ops.gemm" in loaded
