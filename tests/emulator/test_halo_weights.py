"""Gradients of weights by halos, on the CPU: random geometries and tiles; small integers, equal to numpy's."""

from __future__ import annotations

import jax.numpy as jnp
import launches
import numpy as np
import pytest
import windows

from cutjax import HaloConfig
from cutjax.kernels.halo import family
from cutjax.kernels.halo.weights import Tiles, turned
from emulator import device

COUNT = 6  # random ones; 100 are worth it after a change of the device text
WAYS = ("few channels", "groups", "few columns", "", "", "")


def random_problem(rng, way):
    rank = int(rng.integers(1, 4))
    image = tuple(rng.integers(1, (200, 16, 6)[rank - 1], rank).tolist())
    window = tuple(rng.integers(1, 6 if rank == 1 else 4, rank).tolist())
    dilation = tuple(rng.choice([1, 1, 2, 3], rank).tolist())
    low = tuple(rng.integers(-1, 3, rank).tolist())
    channels, n, groups, strides = int(rng.choice([8, 16, 32, 72, 96])), 8 * int(rng.integers(1, 10)), 1, (1,) * rank
    if way == "few channels":
        strides = (*rng.integers(1, 4, rank - 1).tolist(), int(rng.choice([1, 2])))
        channels, dilation = int(rng.integers(1, 8 // strides[-1] + 1)), (*dilation[:-1], 1)
        window = (*window[:-1], int(rng.integers(3, 8)))
    elif way == "groups":
        channels, groups = int(rng.choice([4, 8, 16, 32])), int(rng.choice([2, 4]))
        n = groups * int(rng.choice([1, 2])) * channels
    elif way == "few columns":
        n, window, dilation = int(rng.integers(1, 9)), (*window[:-1], int(rng.integers(3, 6))), (*dilation[:-1], 1)
    along = zip(window, dilation, image, low, strict=True)
    high = tuple(max(int(rng.integers(-1, 3)), (k - 1) * d + 1 - size - lo) for k, d, size, lo in along)
    of = windows.view(int(rng.integers(1, 10)), image, window, channels, strides, dilation, low, high, groups)
    return windows.asked(of, n, "weights", dtype=np.dtype(jnp.bfloat16), out_dtype=np.dtype(jnp.bfloat16))


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_tiles(seed):
    rng = np.random.default_rng([28, 9, seed])
    problem, kernels = random_problem(rng, WAYS[seed % len(WAYS)]), []
    while family.reasons(problem):
        problem = random_problem(rng, WAYS[seed % len(WAYS)])
    of = Tiles(turned(problem) or problem, HaloConfig(taps=1))
    while not kernels:
        config = HaloConfig(
            int(rng.choice([16, 32, 64])),
            int(rng.integers(1, 5)),
            int(rng.integers(2, 4)),
            str(rng.choice(["row", "images", "grid"])),
            taps=int(rng.integers(1, of.view.window[-1] + 1)),
            splits=int(rng.integers(1, 5)),
        )
        found = family.resolve(problem, config)
        kernels = [] if isinstance(found, tuple) else [found]
    arrays = [rng.integers(-2, 3, shape).astype(problem.a.dtype) for shape in windows.shapes(problem)]
    with device.emulated():
        call = kernels[0].call()
    machine = device.Machine(seed=seed, eagerness=int(rng.integers(4)))
    got = launches.run(problem, call, arrays, machine.execute)
    assert not launches.wrong(got, [windows.product(problem, *arrays).astype(problem.out_dtype)]), (problem, config)
