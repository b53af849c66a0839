"""Halo kernels: the walk of their arguments is exact, over random geometries; what is refused; that they compile."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import windows

from cutjax.epilogue.trace import trace
from cutjax.kernels import convolution
from cutjax.kernels.families import CONFIGS, config_of, fields_of
from cutjax.kernels.halo import family, kernel
from cutjax.kernels.halo.config import Config
from cutjax.kernels.operand import Taps
from cutjax.runtime import compiler
from cutjax.runtime.launch import TensorMap

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

GEOMETRIES = 12  # random ones; 200 are worth it after a change of the arguments
ALONG = {1: ("row",), 2: ("row", "images"), 3: ("grid",)}


def box(map_: TensorMap, array, at):
    """What TMA loads of an array: a box of a tensor map, zero outside of it."""
    strides = (map_.dtype.itemsize, *map_.strides)
    assert all(stride == step for stride, step in zip(strides, array.strides[::-1], strict=True))
    assert array.shape[::-1] == map_.dims
    found = array
    for axis, (size, first) in enumerate(zip(map_.box[::-1], at[::-1], strict=True)):
        places = first + np.arange(size)
        there = (places >= 0) & (places < array.shape[axis])
        found = np.take(found, np.where(there, places, 0), axis)
        found = found * there.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    return found


def walk(found, x, w):
    """The result by the walk of ffi/device/halo: boxes, their rows by bytes, steps that finish."""
    v = {argument.name: getattr(argument.value, "value", argument.value) for argument in found.arguments}
    p, c, g = found.problem, found.config, found.geometry
    axes, march, stacked = g.axes, g.axes - 1, g.stacked
    view = p.a.view
    x, along_k = x.reshape(view.images, *view.image, view.channels), p.bs[0].contiguous == "k"
    w = w.reshape(-1, *((p.n, view.channels) if along_k else (view.channels, p.n)))
    out = np.full((p.m, p.n), np.nan)
    per_axis = [range(v[f"a_taps{i}"]) for i in (2, 1, 0)]
    for column, index in itertools.product(range(0, v["columns"] * c.bn, c.bn), range(v["runs"])):
        at = []
        for i in range(axes):
            index, tile = divmod(index, v[f"a_tiles{i}"])
            at.append(tile * (v["a_steps"] * v["a_step"] if i == march else g.sizes[i]))
        image, apart = divmod(index, v["a_apart"])
        at[march] += apart
        image *= g.sizes[-1]
        steps = min(v["a_steps"], -(-(v[f"a_grid{march}"] - at[march]) // v["a_step"]))
        sums = np.zeros((stacked, 64, c.bn))
        for step in range(steps + stacked - 1 if steps > 0 else 0):
            low = [at[i] - v[f"a_low{i}"] + (step * v["a_step"] if i == march else 0) for i in range(axes)]
            for piece in range(v["a_pieces"]):
                halo = box(v["map_a"], x, (piece * g.chunk, *low, image)).reshape(-1, g.chunk)
                assert halo.size * 2 == v["a_box_bytes"] <= v["a_stage_bytes"]
                for t2, t1, t0 in itertools.product(*per_axis):
                    taps = t0, t1, t2
                    start = sum(t * v[f"a_tap_bytes{i}"] for i, t in enumerate(taps))
                    rows = np.arange(64) // 8 * v["a_group_bytes"] + np.arange(64) % 8 * g.span + start
                    assert not (rows % g.span).any()
                    for t in range(stacked):
                        place = v["b_first"] + sum(n * v[f"b_step{i}"] for i, n in enumerate(taps)) + t * v["b_stacked"]
                        of_tap = np.zeros((g.chunk, c.bn))
                        if along_k:
                            of_tap = box(v["map_b"], w, (piece * g.chunk, column, place))[0].T
                        else:
                            for i in range(0, c.bn, g.n_chunk):
                                part = box(v["map_b"], w, (column + i, piece * g.chunk, place))[0]
                                of_tap[:, i : i + g.n_chunk] = part
                        sums[stacked - 1 - t] += halo[rows // g.span].astype(np.float64) @ of_tap
            done, sums = sums[0], np.concatenate([sums[1:], np.zeros((1, 64, c.bn))])
            if step < stacked - 1:
                continue
            for row in range(64):
                first = [*at, image]
                first[march] += (step - stacked + 1) * v["a_step"]
                first[0] += row if g.group_axis == 0 else row % 8
                first[g.group_axis] += row // 8 if g.group_axis else 0
                if all(place < size for place, size in zip(first, (*view.grid[::-1], view.images), strict=True)):
                    m = np.ravel_multi_index(first[::-1], (view.images, *view.grid))
                    assert np.isnan(out[m, column : column + c.bn]).all()  # of one step alone
                    out[m, column : column + c.bn] = done[row, : p.n - column]
    return out


def random_case(seed):
    rng = np.random.default_rng([28, 8, seed])
    rank = 1 + seed % 3
    image = tuple(rng.integers(1, (300, 30, 11)[rank - 1], rank).tolist())
    window = tuple(rng.integers(1, 4, rank).tolist())
    dilation = tuple(rng.choice([1, 1, 2, 3], rank).tolist())
    low, high = (tuple(rng.integers(-1, 4, rank).tolist()) for _ in range(2))
    high = tuple(
        max(h, (k - 1) * d + 1 - n - lo) for h, k, d, n, lo in zip(high, window, dilation, image, low, strict=True)
    )
    channels = int(rng.choice([8, 16, 32, 72, 96]))
    of = windows.view(int(rng.integers(1, 11)), image, window, channels, None, dilation, low, high)
    n = int(rng.choice([8, 16, 24, 40]))
    problem = windows.asked(of, n, ("in order", "backwards", "flipped", "some taps")[rng.integers(4)])
    config = Config(
        int(rng.choice([16, 32])), 2, 2, str(rng.choice(ALONG[len(problem.a.view.window)])), int(rng.integers(1, 40))
    )
    return problem, config, rng


@pytest.mark.parametrize("seed", range(GEOMETRIES))
def test_the_walk_is_exact(seed):
    problem, config, rng = random_case(seed)
    found = kernel.resolve(problem, config)
    assert not isinstance(found, tuple), found
    x, w = (rng.integers(-2, 3, shape).astype(np.float16) for shape in windows.shapes(problem))
    np.testing.assert_array_equal(walk(found, x, w), windows.product(problem, x, w))


def of(images=2, image=(16, 16), window=(3, 3), channels=32, **more):
    return windows.view(
        images, image, window, channels, low=tuple(k // 2 for k in window), high=tuple(k // 2 for k in window), **more
    )


REFUSED = {
    "stride": convolution.forward(of(strides=(2, 2)), 32),
    "zeros between": convolution.forward(of(spread=(2, 2)), 32),
    "groups": convolution.forward(of(channels=16, groups=2), 32),
    "gradient of weights": convolution.weight_gradient(of(), 32),
    "16 bytes": convolution.forward(of(channels=12), 32),
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
    for fields in ({"bn": 12}, {"consumers": 5}, {"stages": 1}, {"along": "column"}, {"steps": 0}, {"bn": 16.0}):
        with pytest.raises(ValueError, match=f"HaloConfig: {next(iter(fields))}="):
            Config(**fields)
    wide = kernel.resolve(convolution.forward(of(), 128), Config(128))
    assert isinstance(wide, tuple)
    assert any("registers" in reason or "at most 256" in reason for reason in wide)


def fused(acc, bias, row, x):
    return jax.nn.silu(acc + bias * row + x.astype(np.float32)).astype(x.dtype)


def lean(found):
    cubin = compiler.compile_source(found.source, name=found.name, arch="sm_90a")
    assert cubin.resources.spill_store_bytes == 0, found.name
    assert "serialized" not in cubin.log, (found.name, cubin.log)


@needs_nvrtc
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["in order", "backwards"])
def test_kernels_have_no_spills(rank, kind):
    """Every number of warpgroups, of each width that it can have, of plain products and a long epilogue."""
    dtype = (jnp.bfloat16, jnp.float16)[rank % 2]
    for consumers, channels, n in ((2, 64, 64), (3, 32, 32), (4, 16, 16), (2, 32, 96)):
        view = of(8, (20,) * rank, (3,) * rank, channels)
        plain = windows.asked(view, n, kind, dtype=dtype, out_dtype=dtype)
        rows = view.rows
        beside = [jnp.zeros((1, n), np.float32), jnp.zeros((rows, 1), np.float32), jnp.zeros((rows, n), dtype)]
        epilogue = trace(fused, [jax.ShapeDtypeStruct((rows, n), np.float32)], beside).epilogue.primal
        for problem in (plain, dataclasses.replace(plain, epilogue=epilogue)):
            for how in ALONG[rank]:
                found = kernel.resolve(problem, Config(min(n, 64), consumers, 2, how, 20))
                if rank < 3 or channels < 64:
                    assert not isinstance(found, tuple), found
                if not isinstance(found, tuple):
                    lean(found)


def test_all_taps_are_read_backwards_too():
    view = of()
    taps = Taps(view.window, view.window, (2, 2), (-1, -1))
    found = kernel.resolve(convolution.forward(view, 32, taps, transposed=True), Config(32))
    assert not isinstance(found, tuple)
    of_b = {argument.name: argument.value for argument in found.arguments if argument.to == "b"}
    assert (of_b["b_first"].value, of_b["b_step0"].value, of_b["b_stacked"].value) == (8, -1, -3)
