"""Convolutions by kernels of the mma family on the device, every geometry, kind of product and way to multiply.

Small integers: equal to numpy, bit for bit, or wrong. Normal numbers: errors against float64. Results land in NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import launches
import numpy as np
import problems
import pytest
from windows import KINDS, asked, product, shapes, view

import cutjax
from benchmarks import oracle
from cutjax.epilogue.expression import identity
from cutjax.epilogue.trace import trace
from cutjax.kernels.mma import family
from cutjax.kernels.mma.math import math_of
from cutjax.kernels.operand import Im2col

pytestmark = pytest.mark.gpu

F32 = np.dtype(np.float32)
GEOMETRIES = {
    "1d k11 d5": view(2, (1025,), (11,), 32, dilation=(5,), low=(25,), high=(25,)),
    "1d causal": view(3, (501,), (4,), 6, low=(3,)),
    "2d 3x3": view(4, (28, 28), (3, 3), 128, low=(1, 1), high=(1, 1)),
    "2d strided, cut": view(3, (45, 42), (3, 3), 20, (2, 3), (2, 1), low=(-1, 2), high=(3, -2)),
    "2d of 3 channels": view(2, (37, 35), (7, 7), 3, (2, 2), low=(3, 3), high=(3, 3)),
    "2d smaller than windows": view(70, (2, 1), (3, 3), 8, low=(2, 1), high=(1, 1)),
    "2d groups": view(2, (26, 17), (3, 3), 16, low=(1, 1), high=(1, 1), groups=4),
    "2d groups of 3": view(2, (26, 17), (3, 3), 3, low=(1, 1), high=(1, 1), groups=12),
    "3d 3x3x3": view(2, (9, 8, 7), (3, 3, 3), 32, (1, 2, 1), low=(1, 1, 1), high=(1, 1, 1)),
    "3d of one channel": view(2, (9, 8, 7), (3, 3, 3), 1, low=(1, 1, 1), high=(1, 1, 1)),
}
SPREAD = {
    "1d up 8": view(2, (130,), (16,), 32, spread=(8,), low=(11,), high=(11,)),
    "2d up 2": view(3, (17, 15), (4, 3), 24, spread=(2, 2), low=(2, 1), high=(2, 2)),
    "2d fewer taps than phases": view(3, (17, 15), (2, 1), 5, spread=(3, 2), low=(1, 0), high=(2, 0)),
    "3d up 2": view(2, (5, 6, 4), (3, 4, 4), 16, spread=(1, 2, 2), low=(1, 2, 2), high=(1, 2, 2)),
    "2d groups up 2": view(2, (17, 15), (3, 3), 8, spread=(2, 2), low=(1, 1), high=(2, 2), groups=4),
}
# dtype, math, how far the error of a sum is from that of an exact one: parts of the sum of what is added up
WAYS = {
    "bf16": ("bfloat16", ""),
    "f16": ("float16", ""),
    "f32": ("float32", ""),
    "tf32": ("float32", "tf32"),
    "bf16x9": ("float32", "bf16x9"),
    "f64": ("float64", ""),
    "c64": ("complex64", ""),
    "s8": ("int8", ""),
    "e4m3": ("float8_e4m3fn", ""),
}


def problem(of: Im2col, n: int, kind: str, way: str) -> cutjax.Problem:
    """A convolution whose result is in the dtype that its products are added up in."""
    dtype, math = WAYS[way]
    found = dataclasses.replace(asked(of, n, kind, dtype=jnp.dtype(dtype), out_dtype=jnp.dtype(dtype)), math=math)
    found_way = math_of(found)
    assert found_way is not None
    acc = np.dtype(found_way.accumulator)
    return dataclasses.replace(found, epilogue=identity(acc, acc))


@dataclasses.dataclass(frozen=True)
class Item:
    """One kernel of one convolution, made beforehand by threads."""

    problem: cutjax.Problem
    config: Any
    of: Im2col
    label: str
    gaussian: bool = False

    def __str__(self) -> str:
        return self.label

    def arrays(self) -> list[np.ndarray]:
        """The arrays that are convolved."""
        rng, dtype = np.random.default_rng([problems.SEED, 29, self.gaussian]), self.problem.a.dtype
        whole = dataclasses.replace(self.problem, a=dataclasses.replace(self.problem.a, view=self.of))
        found = []
        for shape in shapes(whole):
            x = rng.standard_normal(shape) if self.gaussian else rng.integers(-2, 3, shape).astype(np.float64)
            found.append((x + 1j * np.flip(x) if dtype.kind == "c" else x).astype(dtype))
        return found

    def prepare(self) -> tuple[Any, ...]:
        """What takes the time of a CPU core alone."""
        kernel = family.resolve(self.problem, self.config)
        assert not isinstance(kernel, tuple), kernel
        arrays = self.arrays()
        wide = np.complex128 if self.problem.a.dtype.kind == "c" else np.float64
        whole = dataclasses.replace(self.problem, a=dataclasses.replace(self.problem.a, view=self.of))
        return kernel.call(), arrays, product(whole, arrays[0], arrays[1]).astype(wide)


def configs(asked: cutjax.Problem) -> list[Any]:
    """The configs that serve a problem: of tiles of the result, no parts of k."""
    return [c for c in family.configs(asked) if c.splits == 1 and not isinstance(family.resolve(asked, c), tuple)]


def _exact() -> list[Item]:
    found, ways = [], list(WAYS)
    for i, (name, of) in enumerate((GEOMETRIES | SPREAD).items()):
        for j, kind in enumerate(KINDS[: 3 if name in SPREAD else 4]):
            for way in dict.fromkeys(("bf16", ways[1 + (4 * i + j) % (len(ways) - 1)])):
                if way in ("s8", "e4m3") and (kind == "weights" or of.channels == 1):
                    continue  # no kernel: along pixels, and of bytes that are all loaded one by one
                asked = problem(of, (136, 72, 200, 24)[(i + j) % 4] // 12 * 12, kind, way)
                served = configs(asked)
                config = served[(5 * i + j) % len(served)]
                found.append(Item(asked, config, of, f"{kind}: {name} {way}"))
    for kind in ("in order", "weights"):
        of = GEOMETRIES["2d groups"]
        asked = problem(of, 144, kind, "bf16")
        config = dataclasses.replace(configs(asked)[0], splits=3)
        found.append(Item(asked, config, of, f"{kind}: splits"))
    return found


EXACT = _exact()
prefetch = problems.prefetching(EXACT, Item.prepare)


@pytest.mark.parametrize("item", EXACT, ids=str)
def test_exact(item, prefetch):
    call, arrays, expected = prefetch.get(item)
    wrong = launches.wrong(launches.run(item.problem, call, arrays), [expected])
    assert wrong is None, f"{item.config}: {wrong}"


def _gaussian() -> list[Item]:
    """The kernels that would be picked of the family."""
    found = []
    for name, way in (("1d k11 d5", "bf16"), ("2d 3x3", "f32"), ("2d of 3 channels", "f16"), ("3d 3x3x3", "tf32")):
        of = GEOMETRIES[name]
        for kind in KINDS:
            asked = problem(of, 256, kind, way)
            kernels = [k for c in family.configs(asked) if not isinstance(k := family.resolve(asked, c), tuple)]
            best = min(kernels, key=lambda kernel: kernel.time_us(asked.device))
            found.append(Item(asked, best.config, of, f"{kind}: {name} {way}", True))
    return found


GAUSSIAN = _gaussian()
prefetch_gaussian = problems.prefetching(GAUSSIAN, Item.prepare)


@pytest.mark.parametrize("item", GAUSSIAN, ids=str)
def test_gaussian(item, prefetch_gaussian):
    call, arrays, expected = prefetch_gaussian.get(item)
    first, second = (launches.run(item.problem, call, arrays)[0] for _ in range(2))
    if item.problem.math == "tf32":  # products of rounded operands
        bound = 2.0**-10 * np.sqrt(item.problem.k) * 4
        assert (np.abs(first - expected) <= bound).all(), f"{item.config}: {np.abs(first - expected).max()}"
    else:
        error = oracle.compare(first, expected, item.problem.k)
        assert error.ok, f"{item.config}: {error}"
    assert np.array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.parametrize("name", ["2d strided, cut", "2d up 2", "2d groups of 3"])
def test_epilogue(name, gpus):
    """Bias, activation, a row's factor and a residual image."""
    of, n, h = (GEOMETRIES | SPREAD)[name], 36, np.dtype(jnp.bfloat16)

    def fused(acc, bias, row, x):
        return jax.nn.relu((acc + bias) * row + x.astype(F32)).astype(h)

    rng = np.random.default_rng(3)
    bias, row = rng.integers(-9, 10, (1, n)).astype(F32), rng.integers(1, 3, (of.rows, 1)).astype(F32)
    x = rng.integers(-9, 10, (of.rows, n)).astype(h)
    epilogue = trace(fused, [jax.ShapeDtypeStruct((of.rows, n), F32)], [bias, row, x]).epilogue.primal
    found = asked(of, n, "in order", epilogue=epilogue)
    kernel = family.resolve(found, configs(found)[-1])
    assert not isinstance(kernel, tuple), kernel
    a, b = (rng.integers(-1, 2, shape).astype(h) for shape in shapes(found))
    expected = np.maximum((product(found, a, b).astype(F32) + bias) * row + x.astype(F32), 0).astype(h)
    wrong = launches.wrong(launches.run(found, kernel.call(), [a, b, bias, row, x]), [expected])
    assert wrong is None, wrong
