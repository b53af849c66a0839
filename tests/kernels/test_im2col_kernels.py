"""Kernels of convolutions: they compile without a spill, what a launch is told, what is refused, and what is read."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cubin import check_lean
from windows import KINDS, asked, view
from windows import windows as matrix_of

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels import families, keys
from cutjax.kernels.prepared import Transpose
from cutjax.kernels.sm90 import family, operands, packed, windows
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler
from cutjax.runtime.tensor_map import Im2col

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
Config = cutjax.Config

SAME = view(4, (20, 21), (3, 3), 64, low=(1, 1), high=(1, 1))
UP = view(2, (9, 9, 9), (4, 4, 4), 24, low=(2, 2, 2), high=(2, 2, 2), spread=(2, 2, 2))
LEAN = [
    ("in order", SAME, Config(128, 256, 64, 4, cluster_m=2)),
    ("flipped", UP, Config(128, 192, 64, 4, schedule="pingpong")),
    ("some taps", UP, Config(64, 64, 64, 4, schedule="pingpong", cluster_n=2)),
    ("flipped", UP, Config(128, 256, 64, 4)),
    ("weights", SAME, Config(256, 128, 64, 4, cluster_n=2)),
    ("weights", dataclasses.replace(SAME, channels=16, groups=6), Config(64, 128, 64, 4, cluster_k=4)),
    ("in order", dataclasses.replace(SAME, channels=96), Config(128, 128, 64, 4, stream_k=True, schedule="pingpong")),
]


@pytest.mark.versions  # of NVRTC
@needs_nvrtc
@pytest.mark.parametrize(("kind", "of", "config"), LEAN, ids=lambda x: x if isinstance(x, str) else "")
def test_kernels_compile_lean(kind, of, config):
    check_lean(asked(of, 768, kind), [config], 40 << 10)


def arguments(problem, config):
    return {argument.name: argument.value for argument in sm90.resolved(problem, config).arguments}


def test_windows_of_a_launch():
    of = view(3, (45, 42), (3, 2), 96, (2, 3), (2, 1), low=(-1, 2), high=(3, -2))
    assert of.grid == (22, 14)
    given = arguments(asked(of, 256, "in order"), Config(128, 128, 64, 4, cluster_n=2))
    images = given["map_a"]
    assert images.dims == (96, 42, 45, 3)
    assert images.strides == (192, 192 * 42, 192 * 42 * 45)
    assert images.box == Im2col((-2, 1), (3 * 13 - 2 - 41, 2 * 21 + 1 - 44), 32, 64)
    assert (images.element_strides, images.swizzle) == ((1, 3, 2, 1), 64)
    told = ("pieces", "channels", "window0", "window1", "low0", "dilation1")
    assert [given[f"a_{name}"].value for name in told] == [3, 96, 2, 3, 2, 2]
    assert (given["map_b0"].dims, given["map_b0"].box) == ((256, 6 * 96, 1), (64, 64, 1))


def test_windows_of_a_weight_gradient():
    """The box is of windows, which the next k block has so many of after those of this one."""
    given = arguments(asked(SAME, 256, "weights"), Config(128, 128, 64, 4))
    assert given["map_a"].box == Im2col((-1, -1), (-1, -1), 64, 64)
    assert [given[f"a_block{i}"].value for i in range(3)] == [64 % 21, 64 // 21, 0]


def test_taps_of_a_launch():
    given = arguments(asked(SAME, 256, "flipped"), Config(128, 128, 64, 4, cluster_m=2))
    assert (given["map_b0"].dims, given["map_b0"].box) == ((64, 256, 36), (64, 64, 1))
    assert [given[name].value for name in ("b_first", "b_tap_step0", "b_tap_step1")] == [5 * 6, 2, -12]


def test_phases_of_a_launch():
    """3 x 3 of stride 2 backwards: windows of 4, 2, 2 and 1 taps, whose rows are every other pixel of 16 x 15."""
    of = view(2, (8, 8), (3, 3), 64, low=(2, 1), high=(1, 1), spread=(2, 2))
    kernel = sm90.resolved(asked(of, 128, "in order"), Config(64, 64, 64, 4))
    assert kernel.phases.taps == (4, 2, 2, 1)
    assert kernel.multiplied.m == 2 * 8 * 8
    given = {argument.name: argument.value for argument in kernel.arguments}
    assert [given[f"pixels_grid{i}"].value for i in range(2)] == [8, 8]
    assert [given[f"pixels_image{i}"].value for i in range(2)] == [15 | 2 << 32, 16 | 2 << 32]
    assert [given[f"pixels_first{i}"].value for i in range(2)] == [1, 1 << 4]  # the deepest one first
    assert [given[f"a_phase0_{i}"].value for i in range(2)] == [2, 1 | 1 << 32]
    assert [given[f"a_phase1_{i}"].value for i in range(2)] == [2, 1 | 1 << 16 | 3 << 32]
    assert kernel.name.endswith("_taps_phases2x2")
    assert len(kernel.call().launches) == 1


def test_channels_are_in_pieces_with_few_zeros():
    found = {
        channels: (windows.chunk(problem), windows.as_multiplied(problem).k // 9)
        for channels in (16, 24, 40, 64, 72, 96, 144, 320)
        for problem in [asked(dataclasses.replace(SAME, channels=channels), 64, "in order")]
    }
    assert found[16] == (16, 16)
    assert (found[24], found[96]) == ((32, 32), (32, 96))
    assert (found[64], found[320]) == ((64, 64), (64, 320))
    assert (found[40], found[72], found[144]) == ((64, 64), (32, 96), (32, 160))


def test_rows_of_few_channels_are_channels():
    """A stem: 7 pixels of 3 channels and a zero each, in 32; every second one begins a row, at 16 bytes."""
    of = view(2, (37, 35), (7, 7), 3, (2, 2), low=(3, 3), high=(3, 3))
    kernel = sm90.resolved(asked(of, 64, "in order"), Config(64, 64, 64, 4))
    assert (kernel.multiplied.k, kernel.multiplied.a.view.window) == (7 * 32, (7, 1))
    images = {argument.name: argument.value for argument in kernel.arguments}["map_a"]
    assert (images.dims, images.strides) == ((28, 18, 37, 2), (16, 42 * 8, 37 * 42 * 8))
    assert (images.box, images.element_strides) == (Im2col((0, -3), (0, -3), 32, 64), (1, 1, 2, 1))
    a, b = kernel.prepared
    assert a.made(jnp.ones((2, 37, 35, 3)))[0].shape == (2 * 37, 42, 4)
    assert b.made(jnp.ones((7, 7, 3, 64)))[0].shape == (7, 28, 64)
    assert (a.read, a.written) == (2 * 37 * 35 * 3 * 2, 2 * 37 * 42 * 4 * 2)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_weights_of_groups_are_transposed_group_by_group(dtype):
    """Kernels that read along k find a group's columns beside those of the others: ``[taps, n / groups, channels]``."""
    of = view(1, (9, 9), (3, 2), 128, groups=2)
    (b,) = (x for x in operands.prepared(asked(of, 64, "in order", dtype=dtype)) if x.name == "b")
    w = np.arange(6 * 128 * 64, dtype=np.int32).reshape(6 * 128, 64)
    (got,) = dataclasses.replace(b, steps=tuple(x for x in b.steps if isinstance(x, Transpose))).made(w)
    expected = w.reshape(6, 128, 2, 32).transpose(0, 3, 2, 1)
    np.testing.assert_array_equal(np.asarray(got).reshape(expected.shape), expected)


def test_kernels_load_the_pieces_that_they_are_told():
    """What is read of a problem is read of the problem as it is multiplied, groups joined or rows packed."""
    served = 0
    for seed in range(400):
        draw = random.Random(seed)
        axes, groups = draw.randint(1, 3), draw.choice([1, 2, 3, 8])
        bounds = (4, 12), (1, 4), (1, 3), (0, 2), (0, 2)
        sizes = [[draw.randint(least, most) for _ in range(axes)] for least, most in bounds]
        spread = [draw.choice([1, 1, 2]) for _ in range(axes)]
        image, window, strides, low, high, spread = map(tuple, (*sizes, spread))
        of = view(2, image, window, draw.choice([1, 2, 4, 8, 24, 32]), strides, None, low, high, groups, spread)
        dtype = draw.choice(["bfloat16", "float32", "int8"])
        problem = asked(of, groups * draw.choice([1, 8, 32, 128]), draw.choice(KINDS), dtype=jnp.dtype(dtype))
        problem = dataclasses.replace(problem, math="tf32" if dtype == "float32" else "")
        if min(of.grid) < 1 or family.reasons(problem):
            continue
        kernel = family.resolve(problem, next(family.configs(problem)))
        if isinstance(kernel, tuple) or windows.view_of(kernel.multiplied) is None:
            continue
        read = kernel.multiplied
        assert packed.packed(read) is None
        assert packed.taken(read) == read.a.view
        given = {argument.declaration.split()[-1]: argument.value for argument in kernel.arguments}
        assert f"WINDOW_CHUNK = {given['map_a'].box.channels};" in kernel.source
        served += 1
    assert served > 100


def test_every_kind_is_served_and_named():
    names = [sm90.resolved(asked(SAME, 128, kind), Config(64, 64, 64, 4)).name for kind in KINDS]
    assert len(set(names)) == 4
    assert all("_im2col2d_c64" in name for name in names)
    for kind in KINDS:
        problem = asked(SAME, 128, kind)
        kernel, *_ = families.fastest(problem)
        assert kernel.config.name(problem) == kernel.name
        assert "Im2col" in keys.key(problem)


@pytest.mark.parametrize(
    ("of", "kind", "why"),
    [
        (view(1, (400, 400), (2, 2), 64, dilation=(256, 1)), "in order", "windows that reach 256 pixels"),
        (view(1, (64,) * 3, (3,) * 3, 64, dilation=(16, 1, 1)), "in order", "windows that reach 32 pixels"),
        (view(1, (64,) * 3, (20,) * 3, 64), "in order", "TMA's corners have 16"),
        (view(1, (400,), (3,), 64, (9,)), "weights", "strides of 9"),
        (view(0, (400,), (3,), 64), "in order", "a size is 0"),
        (view(2, (8, 8), (3, 3), 64, spread=(2, 2)), "weights", "phases of their result"),
    ],
)
def test_what_is_refused(of, kind, why):
    problem = asked(of, 64, kind)
    assert any(why in reason for reason in family.reasons(problem)), family.reasons(problem)
    assert isinstance(sm90.resolve(problem, Config(64, 64, 64, 4)), tuple)


def test_configs_that_are_refused():
    up = view(2, (8, 8), (3, 3), 64, low=(2, 2), high=(1, 1), spread=(2, 2))
    for problem, config, why in (
        (asked(up, 64, "in order"), Config(64, 64, 64, 4, splits=2), "parts of phases"),
        (asked(view(1, (40,), (40,), 64, spread=(17,)), 64, "in order"), Config(64, 64, 64, 4), "17 phases"),
        (asked(SAME, 64, "in order"), Config(64, 64, 64, 4, swap=True), "swap with windows"),
        (asked(dataclasses.replace(SAME, groups=2), 192, "in order"), Config(64, 64, 64, 4), "channels of one group"),
    ):
        assert any(why in reason for reason in sm90.resolve(problem, config))
    sums = trace(lambda acc: (acc, acc.sum(0)), [jax.ShapeDtypeStruct((up.rows, 64), np.float32)], []).epilogue.primal
    found = family.reasons(asked(up, 64, "in order", epilogue=sums))
    assert "a reduction of a result whose rows are pixels apart" in found


def test_patches_are_windows_of_images_of_their_own():
    """16 x 16 of 3 channels side by side: columns become channels, rows of patches images, and TMA meets no stride."""
    of = view(8, (224, 224), (16, 16), 3, (16, 16))
    problem = asked(of, 768, "in order")
    taken = problem.a.view
    assert (taken.images, taken.image, taken.grid, taken.channels) == (8 * 14, (16, 14), (1, 14), 48)
    assert (taken.window, taken.strides, taken.rows) == ((16, 1), (1, 1), of.rows)
    assert not family.reasons(problem)


def test_groups_that_would_be_such_patches_have_no_kernel_here():
    """33 groups as one: kernels took the matrix of them for windows, and did not compile."""
    problem = asked(view(1, (2,), (2,), 1, groups=33), 33, "weights")
    assert "33 groups of 1 channels: as one they are patches in rows of odd bytes" in family.reasons(problem)
    assert not family.reasons(asked(view(1, (2,), (2,), 1, groups=32), 32, "weights"))


@pytest.mark.parametrize("kind", ["in order", "weights"])
@pytest.mark.parametrize("window", [(4, 4), (2, 3, 7)])
def test_patches_whose_rows_are_not_of_16_bytes_are_a_matrix(kind, window):
    """Of 3 channels, with padding where the matrix has such rows too; the product is a plain one."""
    of = view(2, tuple(5 * size for size in window), window, 3, window)
    problem = asked(of, 64, kind)
    images = np.random.default_rng(0).integers(-9, 9, (2, *problem.a.array(problem.m, problem.k)))
    (made,) = operands.prepared(problem)
    (found,) = made.made(jnp.asarray(images))
    assert found.dtype.itemsize * found.shape[-1] % 16 == 0
    for x, matrix in zip(images, found[..., : of.columns], strict=True):
        view_of = problem.a.view
        expected = matrix_of(x.reshape(view_of.images, *view_of.image, view_of.channels), view_of)
        np.testing.assert_array_equal(matrix, expected.reshape(view_of.rows, view_of.columns))
    multiplied = operands.as_multiplied(problem)
    assert multiplied.a.view is None
    assert (multiplied.m, multiplied.n, multiplied.k) == (problem.m, problem.n, problem.k)
