"""Convolutions by kernels of every family, run on the CPU: small integers, equal to numpy bit for bit, or wrong."""

from __future__ import annotations

import jax.numpy as jnp
import launches
import numpy as np
import pytest
import windows
from windows import view

from cutjax import Config, DirectConfig, HaloConfig
from cutjax.kernels import families
from cutjax.kernels.direct import family as direct
from cutjax.kernels.mma import family as mma
from emulator import device

H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
PLAIN = view(2, (7, 9), (3, 2), 32, strides=(1, 2), low=(1, 1), high=(1, 0))
LINES = view(2, (9,), (8,), 64, low=(5,), high=(5,), spread=(4,))  # of 32 columns in float32: four lines of memory
SPREAD = view(2, (5, 4), (3, 3), 16, low=(2, 2), high=(1, 1), spread=(2, 2))
EACH = view(2, (9, 8), (3, 3), 1, low=(1, 1), high=(1, 1), groups=32)
CASES = {
    "sm90": (PLAIN, 72, "in order", Config(64, 64, 64, 3)),
    "sm90, weights": (PLAIN, 72, "weights", Config(64, 64, 64, 3, schedule="pingpong")),
    "sm90, phases": (SPREAD, 64, "flipped", Config(64, 64, 64, 3, cluster_n=2)),
    "sm90, phases beside each other": (LINES, 32, "flipped", Config(64, 128, 64, 3)),
    "halo": (view(1, (8, 8), (3, 3), 16, low=(1, 1), high=(1, 1)), 16, "in order", HaloConfig(16, 2, 3)),
    "halo, more columns than SMs": (
        view(1, (3, 3), (3, 3), 16, low=(1, 1), high=(1, 1)),
        40,
        "in order",
        HaloConfig(16, 2, 3),
    ),
    "mma": (PLAIN, 24, "backwards", mma),
    "direct": (EACH, 32, "in order", direct),
    "direct, weights": (EACH, 32, "weights", direct),
}


@pytest.mark.parametrize("name", CASES)
def test_exact(name):
    of, n, kind, config = CASES[name]
    problem = windows.asked(of, n, kind, dtype=H, out_dtype=F32)
    if isinstance(config, Config | HaloConfig):
        kernel = families.resolve(problem, config)
    else:
        found = (config.resolve(problem, one) for one in config.configs(problem))
        kernel = next(one for one in found if not isinstance(one, tuple))
    assert not isinstance(kernel, tuple), kernel
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-2, 3, shape).astype(H) for shape in windows.shapes(problem)]
    with device.emulated():
        call = kernel.call()
    got = launches.run(problem, call, arrays, device.Machine(eagerness=3).execute)
    assert not launches.wrong(got, [windows.product(problem, *arrays)])


def each(images, image, window, groups, **fields):
    reach = [size // 2 for size in window]
    return windows.view(images, image, window, 1, groups=groups, low=reach, high=reach, **fields)


# Windows, columns, the kind of product and a config: several images in strips of a fragment, chunks of rows and parts
# of a row; channels that are few, odd and of no whole units; places cut off; steps, and the gradient of those.
SUMS = {
    "3x3": (each(5, (13, 20), (3, 3), 20), 20, "in order", DirectConfig(2, 8, 5, 8, 256, 3, 1, 6, True)),
    "5x5": (each(9, (7, 9), (5, 5), 48), 48, "backwards", DirectConfig(2, 8, 7, 16, 512, 2, 1, 2, True)),
    "3x3, wide": (each(2, (3, 140), (3, 3), 16), 16, "in order", DirectConfig(2, 8, 3, 8, 256, 2, 1, 2, True)),
    "3x3 /2": (each(3, (13, 12), (3, 3), 24, strides=(2, 2)), 24, "in order", DirectConfig(4, 2, 3, 4, 32)),
    "5x5 spread": (each(2, (5, 6), (5, 5), 12, spread=(2, 2)), 12, "backwards", DirectConfig(2, 4, 4, 4, 16)),
    "odd": (each(2, (6, 5), (3, 3), 9), 9, "in order", DirectConfig(1, 4, 4, 8, 32)),
    "two of each": (each(2, (6, 5), (3, 3), 6), 12, "in order", DirectConfig(4, 1, 3, 4, 8)),
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_sums_beside_depthwise_results_are_exact(name, large):
    """Of each channel and of all; beside what an operand as large as the result takes part in, too."""
    of, n, kind, config = SUMS[name]
    rng, problem = np.random.default_rng(0), windows.asked(of, n, kind, dtype=H, out_dtype=F32)
    arrays = [rng.integers(-2, 3, shape).astype(H) for shape in windows.shapes(problem)]
    problem, given, function = windows.with_sums(problem, large)
    kernel = direct.resolve(problem, config)
    assert not isinstance(kernel, tuple), kernel
    with device.emulated():
        call = kernel.call()
    got = launches.run(problem, call, [*arrays, *given], device.Machine(eagerness=3).execute)
    expected = function(windows.product(problem, *arrays), *(x.astype(F32) for x in given))
    assert not launches.wrong([x.reshape(-1) for x in got], [np.ravel(x) for x in expected])
