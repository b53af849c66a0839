"""Convolutions by kernels of the mma family: whole kernels on the host, what refuses them, and what compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import kernel_host
import numpy as np
import pytest
import windows
from windows import KINDS, random_view, view

from cutjax.epilogue.expression import identity
from cutjax.epilogue.trace import trace
from cutjax.kernels import convolution, prepared
from cutjax.kernels.device import reference
from cutjax.kernels.mma import family
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.mma.config import Config
from cutjax.kernels.mma.math import MATHS
from cutjax.kernels.operand import Im2col
from cutjax.kernels.problem import Problem
from cutjax.runtime import compiler
from cutjax.runtime.architectures import number
from cutjax.runtime.launch import Pointer

needs_gxx = pytest.mark.skipif(not kernel_host.installed(), reason="needs g++")


def problem(of: Im2col, n: int, kind: str, dtype: str = "bfloat16", math: str = "", arch: str = "sm_80") -> Problem:
    """A convolution whose result is in the dtype that its products are added up in."""
    way = next(x for x in MATHS[dtype, math] if number(arch) in x.archs)
    acc = np.dtype(way.accumulator)
    more: Any = {"dtype": jnp.dtype(dtype), "epilogue": identity(acc, acc), "device": reference(arch)}
    return dataclasses.replace(windows.asked(of, n, kind, **more), math=math)


def integers(asked: Problem, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays of small integers, whose sums are exact."""
    rng, dtype = np.random.default_rng(len(shapes)), asked.a.dtype
    found = [rng.integers(0 if dtype.kind == "u" else -2, 3, shape).astype(np.float64) for shape in shapes]
    if dtype.kind == "c":
        found = [x + 1j * rng.integers(-2, 3, x.shape) for x in found]
    return [x.astype(dtype) for x in found]


def launched(asked: Problem, config: Config, arrays: list[np.ndarray], tmp_path) -> np.ndarray:
    """What the kernels of a call make of arrays, in a result full of another number."""
    kernel = mma.resolved(asked, config)
    given, _ = prepared.make(kernel.prepared, convolution.as_read(asked, list(map(jnp.asarray, arrays))))
    shape = (config.splits, asked.m, asked.n) if config.splits > 1 else (asked.m, asked.n)
    result = kernel_host.aligned(np.full(shape, 7).astype(asked.accumulator if config.splits > 1 else asked.out_dtype))
    given = [kernel_host.aligned(np.asarray(x)) for x in given]
    for phase in kernel.phases or (kernel,):
        kernel_host.run(phase, [*given, result], tmp_path)
    return result.sum(0) if config.splits > 1 else result


def check(asked: Problem, config: Config, of: Im2col, tmp_path) -> None:
    """Asserts that a convolution of small integers is exact: ``asked`` is that of the view, maybe with fewer axes."""
    whole = dataclasses.replace(asked, a=dataclasses.replace(asked.a, view=of))
    shapes = windows.shapes(whole)
    with jax.enable_x64(asked.a.bits > 32):
        x, w = integers(asked, *shapes)
        found = launched(asked, config, [x, w], tmp_path)
    wide = np.complex128 if asked.a.dtype.kind == "c" else np.float64
    np.testing.assert_array_equal(found.astype(wide), windows.product(whole, x, w))


VIEWS = {
    "strided": view(3, (9, 11), (3, 5), 16, (2, 3), low=(1, 2), high=(0, 2)),
    "cut": view(2, (12, 9), (2, 3), 8, low=(-2, 1), high=(1, -2)),
    "causal": view(2, (33,), (4,), 2, low=(3,)),
    "3-D": view(2, (5, 4, 6), (3, 2, 3), 4, (1, 2, 1), (1, 1, 2), low=(1, 0, 2), high=(1, 1, 2)),
    "stem": view(1, (15, 14), (7, 7), 3, (2, 2), low=(3, 3), high=(3, 3)),
    "one channel": view(2, (17,), (9,), 1, low=(4,), high=(4,)),
    "groups": view(2, (6, 5), (3, 3), 8, low=(1, 1), high=(1, 1), groups=3),
}
# (dtype, math, architecture), (bm, bn, bk, wm, wn, sliced_k, stages)
BF16 = ("bfloat16", "", "sm_80"), (64, 64, 32, 32, 32, 1, 3)
F32 = ("float32", "", "sm_80"), (64, 64, 8, 32, 32, 1, 3)


def columns(of: Im2col) -> int:
    return 24 if of.groups > 1 else 20


def each(views: dict[str, Im2col], kinds: Sequence[str]):
    """Every view with one kind of product, in one of two dtypes: each kind is in both."""
    cases = [(name, kinds[i % len(kinds)], *(BF16, F32)[(i + i // len(kinds)) % 2]) for i, name in enumerate(views)]
    return pytest.mark.parametrize(
        ("name", "kind", "way", "config"), cases, ids=lambda x: x if isinstance(x, str) else ""
    )


@needs_gxx
@each(VIEWS, KINDS)
def test_geometries(name, kind, way, config, tmp_path):
    of = VIEWS[name]
    check(problem(of, columns(of), kind, *way), Config(*config), of, tmp_path)


SPREAD = {
    "fewer taps than phases": view(2, (7,), (2,), 8, spread=(3,), low=(1,), high=(2,)),
    "2-D": view(2, (4, 5), (3, 2), 8, (1, 3), spread=(2, 2), low=(1, 1), high=(2, 1)),
    "dilated": view(1, (5, 4), (3, 3), 6, dilation=(1, 2), spread=(2, 3), low=(2, 2), high=(1, 3)),
    "3-D": view(1, (3, 3, 2), (3, 2, 2), 4, spread=(2, 1, 2), low=(1, 1, 0), high=(1, 0, 1)),
    "groups": view(2, (4, 3), (3, 3), 8, spread=(2, 2), low=(1, 1), high=(2, 2), groups=3),
}
# More phases than a call has launches. Those of weights are never any.
MANY = view(1, (3, 2), (6, 5), 8, spread=(5, 4), low=(2, 3), high=(2, 1))


@needs_gxx
@each(SPREAD | {"many": MANY}, KINDS)
def test_spread(name, kind, way, config, tmp_path):
    of = (SPREAD | {"many": MANY})[name]
    check(problem(of, columns(of), kind, *way), Config(*config), of, tmp_path)


@needs_gxx
@pytest.mark.parametrize(("axes", "kind"), [(1, "weights"), (2, "some taps"), (3, "flipped")])
def test_any_geometry(axes, kind, tmp_path):
    rng = np.random.default_rng([axes, KINDS.index(kind)])
    of = random_view(rng, 4, int(rng.integers(1, 4)), axes, grid=150)
    way, config = (BF16, F32)[axes % 2]
    check(problem(of, 12 * of.groups, kind, *way), Config(*config), of, tmp_path)


WAYS = [
    (("float16", "", "sm_75"), (32, 32, 32, 16, 16, 1, 2)),
    (("float32", "tf32x3", "sm_80"), (32, 32, 16, 32, 32, 1, 3)),
    (("float64", "", "sm_80"), (32, 32, 32, 16, 16, 1, 3)),
    (("complex64", "tf32", "sm_80"), (32, 32, 16, 32, 16, 1, 2)),
    (("int32", "", "sm_80"), (32, 64, 8, 32, 32, 1, 2)),
    (("int8", "", "sm_80"), (32, 64, 64, 32, 32, 1, 3)),
    (("int8", "", "sm_75"), (32, 64, 128, 32, 32, 2, 2)),
    (("float8_e4m3fn", "", "sm_89"), (32, 64, 64, 32, 32, 1, 3)),
]


@needs_gxx
@pytest.mark.parametrize(("way", "config"), WAYS, ids=lambda x: "-".join(map(str, x)))
def test_dtypes(way, config, tmp_path):
    """Each of one view: those whose elements are copied one by one of odd channels too."""
    i = WAYS.index((way, config))
    small = jnp.dtype(way[0]).itemsize < 4
    of = (VIEWS["strided"], VIEWS["groups"], VIEWS["stem"] if small else SPREAD["2-D"])[i % 3]
    kind = KINDS[i // 2 % (3 if way[0] in ("int8", "float8_e4m3fn") or of is SPREAD["2-D"] else 4)]
    check(problem(of, columns(of), kind, *way), Config(*config), of, tmp_path)


@needs_gxx
@pytest.mark.parametrize("kind", ["in order", "weights"])
def test_splits(kind, tmp_path):
    of = VIEWS["groups"]
    config = Config(*BF16[1], splits=3)
    check(problem(of, columns(of), kind, *BF16[0]), config, of, tmp_path)


@needs_gxx
@pytest.mark.parametrize(("name", "n"), [("groups", 27), ("2-D", 24), ("strided", 21)])
def test_epilogues(name, n, tmp_path):
    """A row's operand, a column's and an image beside the result, whose rows may be pixels apart."""
    of = (VIEWS if name == "strided" else SPREAD)[name]

    def function(acc, row, column, image):
        return acc * row + column - image

    asked = problem(of, n, "flipped", *F32[0])
    x, w, *rest = integers(asked, *windows.shapes(asked), (of.rows, 1), (1, n), (of.rows, n))
    traced = trace(function, [jax.ShapeDtypeStruct((of.rows, n), jnp.float32)], rest)
    asked = dataclasses.replace(asked, epilogue=traced.epilogue)
    found = launched(asked, Config(*F32[1]), [x, w, *rest], tmp_path)
    expected = function(windows.product(asked, x, w), *rest)
    np.testing.assert_array_equal(found, expected)


@needs_gxx
def test_weights_of_bytes(tmp_path):
    """They are decoded where they are multiplied."""
    of = VIEWS["strided"]
    asked = problem(of, 32, "flipped", *BF16[0])
    asked = dataclasses.replace(asked, bs=tuple(b.of(np.dtype(np.int8)) for b in asked.bs))
    x, w = integers(asked, *windows.shapes(asked))
    found = launched(asked, Config(64, 64, 32, 32, 32, stages=3), [x, w.astype(np.int8)], tmp_path)
    np.testing.assert_array_equal(found, windows.product(asked, x, w))


@needs_gxx
def test_sums_by_channel(tmp_path):
    """Those of a norm: over each 16 rows of the result."""
    of, n = VIEWS["groups"], 96
    traced = trace(lambda acc: (acc, acc.sum(-2)), [jax.ShapeDtypeStruct((of.rows, n), jnp.float32)], [])
    asked = dataclasses.replace(problem(of, n, "in order", *BF16[0]), epilogue=traced.epilogue)
    assert "columns are of whole tiles" in "; ".join(mma.resolve(asked, TILE))  # pyright: ignore
    kernel = mma.resolved(asked, Config(64, 32, 32, 32, 32, stages=3))
    x, w = integers(asked, *windows.shapes(asked))
    arrays = [x, w, np.full((of.rows, n), 7, np.float32), np.full((-(-of.rows // 16), n), 7, np.float32)]
    arrays = [kernel_host.aligned(y) for y in arrays]
    kernel_host.run(kernel, arrays, tmp_path)
    expected = windows.product(asked, x, w)
    np.testing.assert_array_equal(arrays[2], expected)
    np.testing.assert_array_equal(arrays[3].sum(0), expected.sum(0))


BIG, HUGE = view(8, (56, 56), (3, 3), 64, low=(1, 1), high=(1, 1)), view(1, (2**16, 2**16), (2, 2), 64, (64, 64))
TILE = Config(64, 64, 32, 32, 32, stages=3)
REFUSED = [
    (BIG, "in order", "bfloat16", dataclasses.replace(TILE, tma=True), "tma of windows of images"),
    (BIG, "in order", "bfloat16", Config(4, 32, 128, 4, 32, stages=1), "slim kernels read rows of a that follow"),
    (BIG, "weights", "int8", Config(64, 64, 64, 32, 32, stages=3), "operands of 8 bits lie along k"),
    (HUGE, "in order", "bfloat16", TILE, "pixels of up to 4,294,967,296"),
    (SPREAD["2-D"], "in order", "bfloat16", dataclasses.replace(TILE, splits=2), "splits=2: parts of phases"),
]


@pytest.mark.parametrize(("of", "kind", "dtype", "config", "why"), REFUSED, ids=[why for *_, why in REFUSED])
def test_what_is_refused(of, kind, dtype, config, why):
    found = mma.resolve(problem(of, 64, kind, dtype), config)
    assert isinstance(found, tuple)
    assert why in "; ".join(found)


def test_what_a_launch_is_told():
    kernel = mma.resolved(problem(BIG, 128, "flipped"), TILE)
    assert kernel.name == "mma_bf16f32_nt_64x64x32_w32x32_s3_im2col2d_taps"
    pointers = [x.value for x in kernel.arguments if isinstance(x.value, Pointer)]
    assert pointers == [Pointer(0), Pointer(1, 2 * 128 * 64 * 5 * 6), Pointer(2)]  # the last row of 6 taps by 6
    up = mma.resolved(problem(SPREAD["2-D"], 128, "in order"), TILE)
    assert [(kernel.multiplied.m, kernel.multiplied.k) for kernel in up.phases] == [
        (16, 8),
        (16, 8),
        (16, 16),
        (16, 16),
    ]
    assert len({kernel.source for kernel in up.phases}) == 1
    assert convolution.forward(BIG, 128).bytes == 2 * (BIG.elements + 9 * 64 * 128 + BIG.rows * 128)


@pytest.mark.skipif(compiler.compiler_missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_machine_code(arch):
    """The largest tiles that a problem is offered do not spill."""
    three, up = view(2, (9, 8, 7), (3, 3, 3), 32, low=(1, 1, 1), high=(1, 1, 1)), SPREAD["2-D"]
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    stem = VIEWS["stem"]
    for of, kind in (three, "flipped"), (stem, "weights"), (up, "in order"):
        asked = problem(of, 128, kind, dtype, arch=arch)
        kernels = (mma.resolve(asked, config) for config in family.configs(asked))
        kernel = next(kernel for kernel in kernels if not isinstance(kernel, tuple))
        cubin = compiler.compile_source(kernel.source, name=kernel.name, arch=arch)
        assert "warning" not in cubin.log
        assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0), kernel.name
