"""Convolutions on the device: forward, input gradients and weight gradients, of every geometry and kind of kernel.

Small integers unless said otherwise: equal to numpy, bit for bit, or wrong. Results land in NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from cutjax.epilogue.trace import trace
from cutjax.kernels import families
from cutjax.kernels.halo import family as halo

pytestmark = pytest.mark.gpu

Config = cutjax.Config
H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
SECONDS = 60  # a test takes one: longer is a CTA that waits for another for ever

GEOMETRIES = {
    "1d": view(3, (500,), (3,), 64, low=(1,), high=(1,)),
    "1d causal, far apart": view(2, (3000,), (2,), 128, dilation=(512,), low=(512,)),
    "1d k11 d5": view(2, (1025,), (11,), 32, dilation=(5,), low=(25,), high=(25,)),
    "1d /8": view(3, (1601,), (16,), 16, (8,), low=(4,), high=(4,)),
    "1d /3 of 40 channels": view(2, (611,), (5,), 40, (3,), low=(2,), high=(1,)),
    "2d 3x3": view(4, (28, 28), (3, 3), 128, low=(1, 1), high=(1, 1)),
    "2d 3x3 /2": view(3, (33, 31), (3, 3), 64, (2, 2), low=(1, 1), high=(1, 1)),
    "2d in pieces": view(2, (17, 19), (3, 2), 96, low=(1, 0), high=(1, 2)),
    "2d strided, cut": view(3, (45, 42), (3, 3), 32, (2, 3), (2, 1), low=(-1, 2), high=(3, -2)),
    "2d 24 channels": view(2, (26, 27), (2, 3), 24, low=(1, 1), high=(0, 1)),
    "2d of 3 channels": view(2, (37, 35), (7, 7), 3, (2, 2), low=(3, 3), high=(3, 3)),
    "2d dilated": view(2, (33, 33), (3, 3), 256, dilation=(12, 12), low=(12, 12), high=(12, 12)),
    "2d smaller than tiles": view(40, (3, 3), (3, 3), 64, low=(1, 1), high=(1, 1)),
    "2d smaller than windows": view(70, (2, 1), (3, 3), 64, low=(2, 1), high=(1, 1)),
    "2d of a place": view(100, (5, 5), (5, 5), 16),
    "3d 3x3x3": view(2, (9, 8, 7), (3, 3, 3), 32, low=(1, 1, 1), high=(1, 1, 1)),
    "3d causal /2": view(1, (6, 13, 12), (3, 3, 3), 64, (2, 1, 2), low=(2, 1, 1), high=(0, 1, 1)),
    "3d 16 channels": view(2, (6, 7, 8), (2, 3, 2), 16, (1, 2, 1), (1, 1, 2), low=(1, 1, 0), high=(0, 1, 1)),
}
SPREAD = {
    "1d up 8": view(2, (201,), (16,), 64, low=(11,), high=(11,), spread=(8,)),
    "1d up 4, windows of 2": view(3, (100,), (2,), 32, low=(1,), high=(3,), spread=(4,)),
    "1d up 3 of strides 2": view(2, (100,), (5,), 32, (2,), (2,), low=(4,), high=(5,), spread=(3,)),
    "2d up 2": view(3, (17, 15), (3, 3), 64, low=(2, 2), high=(1, 1), spread=(2, 2)),
    "2d up 2 to odd sizes": view(3, (17, 15), (3, 3), 64, low=(2, 1), high=(2, 1), spread=(2, 2)),
    "2d up 2, windows of 1": view(3, (17, 15), (1, 1), 64, low=(0, 0), high=(1, 0), spread=(2, 2)),
    "2d up 2, k4": view(2, (8, 8), (4, 4), 128, low=(2, 2), high=(2, 2), spread=(2, 2)),
    "2d up 1 and 3 of 24 channels": view(2, (8, 9), (3, 2), 24, low=(2, -1), high=(2, 2), spread=(1, 3)),
    "2d up 3 of strides 2": view(2, (11, 12), (3, 4), 96, (2, 1), low=(3, 1), high=(2, 4), spread=(3, 2)),
    "3d up 2": view(2, (5, 6, 4), (3, 3, 3), 32, low=(2, 1, 2), high=(1, 2, 1), spread=(2, 2, 2)),
    "3d up 2 to odd sizes": view(2, (5, 6, 4), (3, 3, 3), 32, low=(2, 2, 2), high=(2, 2, 2), spread=(2, 2, 2)),
}
HALOS_OF = {
    "2d stem": view(2, (74, 141), (7, 7), 3, (2, 2), low=(3, 3), high=(3, 3)),
    "2d of 4 channels": view(9, (10, 9), (3, 3), 4, low=(1, 1), high=(1, 1)),
    "1d of a channel": view(3, (5000,), (7,), 1, low=(3,), high=(3,)),
    "3d /2 of 3 channels": view(1, (9, 10, 19), (3, 3, 3), 3, (2, 2, 2), low=(1, 1, 1), high=(1, 1, 1)),
    "32 groups of 4": view(3, (28, 70), (3, 3), 4, low=(1, 1), high=(1, 1), groups=32),
    "4 groups of 64": view(9, (14, 14), (3, 3), 64, low=(1, 1), high=(1, 1), groups=4),
    "1d to few columns": view(3, (5000,), (7,), 64, low=(3,), high=(3,)),
    "2d to few columns": view(3, (40, 70), (3, 3), 72, low=(1, 1), high=(1, 1)),
}
CONFIGS = [
    Config(64, 64, 64, 6),
    Config(128, 128, 64, 4),
    Config(128, 192, 64, 4, schedule="pingpong"),
    Config(64, 256, 64, 4, schedule="pingpong"),
    Config(256, 64, 64, 4),
    Config(128, 64, 128, 3),
    Config(128, 96, 64, 4, cluster_m=2),
    Config(128, 256, 64, 4, cluster_m=2),
    Config(256, 128, 64, 4, cluster_n=2),
    Config(64, 64, 64, 4, schedule="pingpong", cluster_n=2),
    Config(64, 32, 64, 8, cluster_k=4),
    Config(128, 128, 64, 4, cluster_k=8),
    Config(128, 128, 64, 4, splits=3),
    Config(64, 128, 64, 4, schedule="pingpong", splits=16),
    Config(128, 64, 64, 5, cluster_k=2, splits=2),
    Config(128, 128, 64, 4, stream_k=True),
    Config(128, 128, 64, 4, stream_k=True, schedule="pingpong", cluster_n=2),
]
FEW = [Config(128, 64, 64, 4), Config(64, 64, 64, 4, cluster_n=2), Config(128, 128, 64, 4, schedule="pingpong")]


@dataclasses.dataclass(frozen=True)
class Item:
    """One kernel of one convolution, made beforehand by threads."""

    problem: cutjax.Problem
    config: Any
    label: str
    walks: int = 1
    gaussian: bool = False

    def __str__(self) -> str:
        return self.label

    def arrays(self) -> list[np.ndarray]:
        """The arrays that are convolved."""
        rng = np.random.default_rng([problems.SEED, 28, self.gaussian])
        if self.gaussian:
            return [rng.standard_normal(shape, F32).astype(self.problem.a.dtype) for shape in shapes(self.problem)]
        return [rng.integers(-2, 3, shape).astype(self.problem.a.dtype) for shape in shapes(self.problem)]

    def prepare(self) -> tuple[Any, ...]:
        """What takes the time of a CPU core alone."""
        kernel = families.resolve(self.problem, self.config)
        assert not isinstance(kernel, tuple), kernel
        call = kernel.call()
        if self.walks > 1:  # fewer blocks than tiles: each begins with the next one before it has stored the last
            cut = []
            for launch in call.launches:
                # Halos have equally many blocks for all columns; others any number of clusters.
                whole = kernel.columns if launch.kernel.startswith("halo") else launch.cluster[0]
                cut.append(dataclasses.replace(launch, grid=(-(-launch.grid[0] // whole // self.walks) * whole, 1, 1)))
            call = dataclasses.replace(call, launches=tuple(cut))
        arrays = self.arrays()
        wide = np.float64 if self.gaussian else F32  # which holds sums of small integers exactly
        return call, arrays, product(self.problem, *arrays).astype(wide)


def _config(problem: cutjax.Problem, i: int) -> Config:
    return next(c for c in FEW[i % 3 :] + FEW if not isinstance(families.resolve(problem, c), tuple))


def _geometries() -> list[Item]:
    found = []
    for i, (name, of) in enumerate(GEOMETRIES.items()):
        for j, kind in enumerate(KINDS):
            problem = asked(of, (136, 72, 200, 20)[(i + j) % 4], kind, out_dtype=(H, F32)[j % 2])
            found.append(Item(problem, _config(problem, i + j), f"{kind}: {name}", 1 + i % 3))
    return found


def _few_channels() -> list[Item]:
    found, few = [], {"1d of 1 channel": view(3, (5000,), (7,), 1, (4,), low=(3,), high=(3,))}
    few |= {"2d stem": view(2, (37, 35), (7, 7), 3, (2, 2), low=(3, 3), high=(3, 3))}
    few |= {"2d of 4": view(2, (33, 34), (3, 3), 4, low=(1, 1), high=(1, 1))}
    few |= {"3d of 2": view(2, (9, 8, 11), (3, 2, 3), 2, (1, 2, 1), low=(1, 1, 1), high=(1, -1, 1))}
    for i, (name, of) in enumerate(few.items()):
        for j, kind in enumerate(("in order", "backwards", "weights")):
            problem = asked(of, (136, 72, 20)[(i + j) % 3], kind, out_dtype=(H, F32)[j % 2])
            found.append(Item(problem, _config(problem, i + j), f"{kind}: {name}", 1 + i % 3))
    return found


def _configs() -> list[Item]:
    names = ("2d 3x3 /2", "2d in pieces", "3d 3x3x3")
    found = []
    for i, config in enumerate(CONFIGS):
        for j, kind in enumerate(KINDS):
            problem = asked(GEOMETRIES[names[(i + j) % 3]], 264, kind)
            walks = 1 if config.stream_k or config.cluster_k > 1 else 3
            found.append(Item(problem, config, f"{kind}: {config.name(problem)}", walks))
    return found


def _spread() -> list[Item]:
    found = []
    for i, (name, of) in enumerate(SPREAD.items()):
        for j, kind in enumerate(KINDS[:3]):
            problem = asked(of, (136, 72, 200)[(i + j) % 3], kind, out_dtype=(H, F32)[j % 2])
            found.append(Item(problem, _config(problem, i + j), f"{kind}: {name}", 1 + i % 3))
        # Pixels shorter than a line of memory, or of an odd number of channels.
        for j, (n, out) in enumerate(((16, H), ((32, 64, 33)[i % 3], (H, F32)[i % 2]))):
            problem = asked(of, n, KINDS[(i + j) % 3], out_dtype=out)
            found.append(Item(problem, _config(problem, i + j), f"pixels of {n} channels: {name}", 1 + i % 3))
    for i, config in enumerate(config for config in CONFIGS if config.splits == 1 and not config.stream_k):
        problem = asked(SPREAD["2d up 2 to odd sizes"], 264, KINDS[i % 3])
        found.append(Item(problem, config, f"phases: {config.name(problem)}", 3 if config.cluster_k == 1 else 1))
    return found


def _dtypes() -> list[Item]:
    of, found = GEOMETRIES["2d strided, cut"], []
    for dtype, out, math in (
        ("float16", "float16", ""),
        ("float32", "float32", "tf32"),
        ("float32", "float32", "bf16x3"),
        ("int8", "int32", ""),
        ("float8_e4m3fn", "bfloat16", ""),
    ):
        for kind in KINDS[: 4 if dtype == "float16" or math == "bf16x3" else 3]:
            problem = asked(of, 144, kind, dtype=jnp.dtype(dtype), out_dtype=jnp.dtype(out))
            problem = dataclasses.replace(problem, math=math)
            found.append(Item(problem, FEW[0], f"{kind}: {dtype} {math}"))
        of_groups = view(2, (13, 14), (3, 3), 64, low=(1, 1), high=(1, 1), groups=4)
        problem = asked(of_groups, 256, "in order", dtype=jnp.dtype(dtype), out_dtype=jnp.dtype(out))
        problem = dataclasses.replace(problem, math=math)
        found += [Item(problem, config, f"groups: {dtype} {math}") for config in cutjax.candidates(problem)[:1]]
    return found


def _groups() -> list[Item]:
    found = []
    for channels, groups, n in ((64, 2, 256), (32, 4, 256), (16, 3, 192)):
        of = view(2, (13, 14), (3, 3), channels, low=(1, 1), high=(1, 1), groups=groups)
        for kind in KINDS:
            problem = asked(of, n, kind)
            found.append(Item(problem, Config(64, n // groups, 64, 4), f"{kind}: {groups} of {channels}", 2))
    for channels, groups, n in ((4, 32, 128), (8, 16, 256), (16, 6, 96), (5, 3, 120), (32, 8, 256)):
        of = view(2, (13, 14), (3, 3), channels, low=(1, 1), high=(1, 1), groups=groups)
        for kind in KINDS:
            problem = asked(of, n, kind)
            label = f"{kind}: {groups} of {channels}"
            found += [Item(problem, config, label, 2) for config in cutjax.candidates(problem)[:1]]
    return found


def _halos() -> list[Item]:
    """The halo kernels of every number of warpgroups, of whole runs and short ones."""
    found = []
    for i, (name, of) in enumerate((GEOMETRIES | HALOS_OF).items()):
        for j, kind in enumerate((*KINDS[:3], "backwards", "weights")):
            dtype, n = (H, np.dtype(np.float16))[(i + j) % 2], (32, 72, 136, 24)[(i + j) % 4]
            n = 2 * of.channels * of.groups if of.groups > 1 else 3 if "to few" in name else n
            problem = asked(of, n, kind, dtype=dtype, out_dtype=(dtype, F32)[i % 2])
            served = reversed([*halo.configs(problem)])
            shapes = {(config.bn, config.consumers, config.along, config.taps): config for config in served}
            for place, config in enumerate([*shapes.values()][(i + j) % 4 :: 4]):
                if (place + j) % 2:
                    config = dataclasses.replace(config, steps=2, stages=2, splits=1)
                found.append(Item(problem, config, f"{kind}: {name} {config}", 1 + (i + j) % 3))
    return found


EXACT = _geometries() + _few_channels() + _configs() + _spread() + _dtypes() + _groups() + _halos()
prefetch = problems.prefetching(EXACT, Item.prepare)


@pytest.mark.parametrize("item", EXACT, ids=str)
def test_exact(item, prefetch):
    call, arrays, expected = prefetch.get(item)
    wrong = launches.wrong(launches.run(item.problem, call, arrays), [expected])
    assert wrong is None, f"{item.config}: {wrong}"


def _gaussian() -> list[Item]:
    """The kernels that would be picked, and two more."""
    found = []
    for name in ("1d k11 d5", "2d 3x3", "2d 3x3 /2", "3d 3x3x3"):
        for kind in KINDS:
            problem = asked(GEOMETRIES[name], 256, kind)
            served = cutjax.candidates(problem)
            picked = dict.fromkeys((served[0], served[len(served) // 3]))
            found += [Item(problem, config, f"{kind}: {name} {i}", 1, True) for i, config in enumerate(picked)]
    return found


GAUSSIAN = _gaussian()
prefetch_gaussian = problems.prefetching(GAUSSIAN, Item.prepare)


@pytest.mark.parametrize("item", GAUSSIAN, ids=str)
def test_gaussian(item, prefetch_gaussian):
    call, arrays, expected = prefetch_gaussian.get(item)
    first, second = (launches.run(item.problem, call, arrays)[0] for _ in range(2))
    error = oracle.compare(first, expected, item.problem.k)
    assert error.ok, f"{item.config}: {error}"
    assert np.array_equal(first.view(np.uint8), second.view(np.uint8))


HALOS = [("1d k11 d5", cutjax.HaloConfig(32, 3, 4)), ("3d 3x3x3", cutjax.HaloConfig(32, 2, 4, "grid"))]
PLAIN = [CONFIGS[1], CONFIGS[3], CONFIGS[12], CONFIGS[15]]


@pytest.mark.parametrize(
    ("name", "config"), [*itertools.product(["2d 3x3 /2", "2d up 2 to odd sizes"], PLAIN), *HALOS], ids=str
)
def test_epilogue(config, name, gpus):
    """Bias, activation and a residual image."""
    of, n = (GEOMETRIES | SPREAD)[name], 264
    if name in SPREAD:  # more accumulators spill beside the residual's addresses
        config = dataclasses.replace(config, splits=1, stream_k=False, bn=min(config.bn, 128))

    def fused(acc, bias, x):
        return jax.nn.relu(acc + bias + x.astype(F32)).astype(H)

    epilogue = trace(
        fused, [jax.ShapeDtypeStruct((of.rows, n), F32)], [jnp.zeros((1, n), F32), jnp.zeros((of.rows, n), H)]
    ).epilogue.primal
    problem = asked(of, n, "in order", epilogue=epilogue)
    kernel = families.resolve(problem, config)
    assert not isinstance(kernel, tuple), kernel
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-2, 3, shape).astype(H) for shape in shapes(problem))
    bias, x = rng.integers(-9, 10, (1, n)).astype(F32), rng.integers(-9, 10, (of.rows, n)).astype(H)
    expected = np.maximum(product(problem, a, b).astype(F32) + bias + x.astype(F32), 0)
    wrong = launches.wrong(launches.run(problem, kernel.call(), [a, b, bias, x]), [expected])
    assert wrong is None, wrong


def test_what_is_not_a_number_stays_where_it_is(gpus):
    """Neither the padding, nor what is past the images or the weights, multiplies a pixel or a weight."""
    of, n = GEOMETRIES["2d 24 channels"], 72
    for kind in KINDS:
        problem = asked(of, n, kind, out_dtype=F32)
        rng = np.random.default_rng(4)
        a, b = (rng.integers(-2, 3, shape).astype(F32) for shape in shapes(problem))
        a[-1, -1, -1] = a[0, 0, 0] = np.nan
        b[(-1,) * (b.ndim - 1)] = np.inf
        with np.errstate(invalid="ignore"):
            expected = product(problem, a, b).astype(F32)
        for config in (*FEW[:2], *([cutjax.HaloConfig(16, 2, 4)] if kind != "weights" else [])):
            call = families.resolve(problem, config).call()
            (out,) = launches.run(problem, call, [a.astype(H), b.astype(H)])
            assert np.array_equal(out, expected, equal_nan=True), (kind, problems.mismatch(out, expected))
