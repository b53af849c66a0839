"""Convolutions by kernels of every family, run on the CPU: small integers, equal to numpy bit for bit, or wrong."""

from __future__ import annotations

import jax.numpy as jnp
import launches
import numpy as np
import pytest
import windows
from windows import view

from cutjax import Config, HaloConfig
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
