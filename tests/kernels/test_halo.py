"""Halo kernels: exact on the host, over random geometries; what is refused; that they compile without spills."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest
import windows

from cutjax.epilogue.trace import trace
from cutjax.kernels import convolution, prepared
from cutjax.kernels.families import CONFIGS, config_of, fields_of
from cutjax.kernels.halo import family, kernel
from cutjax.kernels.halo.config import Config
from cutjax.kernels.halo.operands import packing_of, taken, view_of
from cutjax.kernels.operand import Taps
from cutjax.runtime import compiler
from cutjax.runtime.launch import Int32

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")
needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

GEOMETRIES = 8  # random ones; 120 are worth it after a change of the device text
DTYPES = np.dtype(jnp.bfloat16), np.dtype(np.float16)
ALONG = {1: ("row",), 2: ("row", "images"), 3: ("grid",)}
WAYS = ("", "few channels", "groups", "odd columns")


def run(found, arrays, folder):
    """What a kernel makes of arrays, on the host, in two blocks for each column of them."""
    p = found.problem
    result = np.full((p.m, p.n), 7).astype(p.out_dtype)
    given = [kernel_host.aligned(x) for x in (*arrays, result)]
    kernel_host.run(found, given, folder, blocks=2 * found.columns)
    return given[-1]


def random_case(seed):
    rng = np.random.default_rng([28, 8, seed])
    rank = 1 + seed % 3
    image = tuple(rng.integers(1, (300, 24, 9)[rank - 1], rank).tolist())
    window = tuple(rng.integers(1, 4, rank).tolist())
    dilation = tuple(rng.choice([1, 1, 2, 3], rank).tolist())
    low, high = (tuple(rng.integers(-1, 4, rank).tolist()) for _ in range(2))
    way, kind = WAYS[seed % 4], ("in order", "backwards", "flipped", "some taps")[rng.integers(4)]
    channels, n, groups, strides = int(rng.choice([8, 16, 32, 72, 96])), int(rng.choice([8, 16, 24, 40])), 1, None
    if way == "few channels":
        of_all, of_last = tuple(rng.integers(1, 4, rank - 1).tolist()), int(rng.choice([1, 2]))
        channels, strides, dilation = int(rng.integers(1, 8 // of_last + 1)), (*of_all, of_last), (*dilation[:-1], 1)
        window, kind = (*window[:-1], int(rng.integers(3, 8))), ("in order", "backwards")[rng.integers(2)]
    elif way == "groups":
        channels, groups = int(rng.choice([4, 8, 16, 32])), int(rng.choice([2, 4]))
        n = groups * int(rng.choice([1, 2])) * channels
    elif way == "odd columns":
        n = int(rng.integers(1, 8))
    along = zip(high, window, dilation, image, low, strict=True)
    high = tuple(max(h, (k - 1) * d + 1 - size - lo) for h, k, d, size, lo in along)
    of = windows.view(int(rng.integers(1, 10)), image, window, channels, strides, dilation, low, high, groups)
    problem = windows.asked(of, n, kind)
    if way == "few channels" and not packing_of(problem):
        return random_case(seed + 1000)
    columns = n // taken(problem).groups
    bn = int(rng.choice([x for x in (16, 32) if taken(problem).groups == 1 or columns % x == 0]))
    how = str(rng.choice(ALONG[len(view_of(problem).window)]))
    return problem, Config(bn, 2, 2, how, int(rng.integers(1, 40))), rng


@needs_gxx
@pytest.mark.parametrize("seed", range(GEOMETRIES))
def test_small_integers_are_exact(seed, tmp_path):
    problem, config, rng = random_case(seed)
    found = kernel.resolve(problem, config)
    assert not isinstance(found, tuple), found
    x, w = (rng.integers(-2, 3, shape).astype(problem.a.dtype) for shape in windows.shapes(problem))
    expected = windows.product(problem, x, w)
    given, _ = prepared.make(found.prepared, [jnp.asarray(x), jnp.asarray(w)])
    given = [np.asarray(x) for x in given]
    np.testing.assert_array_equal(run(found, given, tmp_path), expected.astype(problem.out_dtype))


def of(images=2, image=(16, 16), window=(3, 3), channels=32, **more):
    return windows.view(
        images, image, window, channels, low=tuple(k // 2 for k in window), high=tuple(k // 2 for k in window), **more
    )


REFUSED = {
    "stride": convolution.forward(of(strides=(2, 2)), 32),
    "zeros between": convolution.forward(of(spread=(2, 2)), 32),
    "16 bytes": convolution.forward(of(channels=12), 32),
    "each channel by itself": convolution.forward(of(channels=1, groups=32), 32),
    "halos are of bf16": convolution.forward(of(), 32, dtype=np.float32),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_why(what):
    assert any(what in reason for reason in family.reasons(REFUSED[what])), family.reasons(REFUSED[what])
    assert not list(family.configs(REFUSED[what]))


def test_configs():
    assert Config in CONFIGS
    config = Config(16, 3, 4, "grid", 7)
    assert config_of(fields_of(config)) == config
    wrong: dict[str, Any] = {"bn": 12, "consumers": 5, "stages": 1, "along": "column", "steps": 0}
    for name, value in (*wrong.items(), ("bn", 16.0)):
        with pytest.raises(ValueError, match=f"HaloConfig: {name}="):
            Config(**dict[str, Any]({name: value}))
    wide = kernel.resolve(convolution.forward(of(), 128), Config(128))
    assert isinstance(wide, tuple)
    assert any("registers" in reason or "at most 256" in reason for reason in wide)


def fused(acc, bias, row, x):
    return jax.nn.silu(acc + bias * row + x.astype(np.float32)).astype(x.dtype)


def lean(found):
    cubin = compiler.compile_source(found.source, name=found.name, arch="sm_90a")
    assert cubin.resources.spill_store_bytes == 0, found.name
    assert "serialized" not in cubin.log, (found.name, cubin.log)


@pytest.mark.versions  # of NVRTC
@needs_nvrtc
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["in order", "backwards"])
def test_kernels_have_no_spills(rank, kind):
    """Every number of warpgroups, of each width that it can have, of plain products and a long epilogue.

    Half of the widths in one kind, and the others in the other.
    """
    dtype, turn = (jnp.bfloat16, jnp.float16)[rank % 2], (rank + (kind == "backwards")) % 2
    for consumers, channels, n in ((2, 64, 64), (3, 32, 32), (4, 16, 16), (2, 32, 96))[turn::2]:
        view = of(8, (20,) * rank, (3,) * rank, channels)
        plain = windows.asked(view, n, kind, dtype=dtype, out_dtype=dtype)
        rows = view.rows
        beside = [jnp.zeros((1, n), np.float32), jnp.zeros((rows, 1), np.float32), jnp.zeros((rows, n), dtype)]
        epilogue = trace(fused, [jax.ShapeDtypeStruct((rows, n), np.float32)], beside).epilogue.primal
        for problem in [dataclasses.replace(plain, epilogue=epilogue), *[plain] * (consumers == 2)]:
            for how in ALONG[rank]:
                found = kernel.resolve(problem, Config(min(n, 64), consumers, 2, how, 20))
                if rank < 3 or channels < 64:
                    assert not isinstance(found, tuple), found
                if not isinstance(found, tuple):
                    lean(found)


OTHERS = {
    "stem": (windows.view(8, (20, 20), (7, 7), 3, (2, 2), None, (3, 3), (2, 2)), 64, 3, "row"),
    "few channels": (of(channels=4), 64, 2, "images"),
    "signals": (of(image=(400,), window=(7,), channels=1), 32, 4, "row"),
    "groups": (of(channels=4, groups=16), 64, 3, "row"),
    "groups of volumes": (of(image=(20, 20, 20), window=(3, 3, 3), channels=64, groups=2), 128, 2, "grid"),
    "odd columns": (of(), 3, 4, "row"),
}


@needs_nvrtc
@pytest.mark.parametrize("name", OTHERS)
def test_other_windows_have_no_spills(name):
    view, n, consumers, how = OTHERS[name]
    for kind in ("in order", "backwards"):
        problem = windows.asked(view, n, kind, dtype=jnp.bfloat16, out_dtype=jnp.bfloat16)
        found = kernel.resolve(problem, Config(min(32 if view.groups > 1 else 64, -(-n // 16) * 16), consumers, 2, how))
        assert not isinstance(found, tuple), found
        lean(found)


def test_every_column_has_as_many_blocks_as_the_others():
    """All of them are launched, also on a device with fewer SMs than columns."""
    for n, how in ((136, "images"), (40, "row")):
        found = kernel.resolve(convolution.forward(of(40, (3, 3), channels=64), n), Config(16, 4, 2, how, 3))
        assert not isinstance(found, tuple), found
        assert found.grid.per_sm == 0
        assert found.grid.blocks % found.columns == 0
        assert found.columns <= found.grid.blocks <= 132


def test_all_taps_are_read_backwards_too():
    view = of()
    taps = Taps(view.window, view.window, (2, 2), (-1, -1))
    found = kernel.resolve(convolution.forward(view, 32, taps, transposed=True), Config(32))
    assert not isinstance(found, tuple)
    of_b = {x.name: x.value.value for x in found.arguments if x.to == "b" and isinstance(x.value, Int32)}
    assert (of_b["b_first"], of_b["b_step0"], of_b["b_stacked"]) == (8, -1, -3)
