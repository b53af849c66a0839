"""Gradients of weights by halos: what is refused, what is shipped, and that kernels compile without spills."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import windows

from cutjax.kernels import convolution
from cutjax.kernels.halo import family
from cutjax.kernels.halo.config import Config
from cutjax.kernels.halo.weights import turned
from cutjax.kernels.halo.weights_kernel import Kernel, resolve
from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
H = np.dtype(jnp.bfloat16)


def asked(images=8, image=(20, 20), window=(3, 3), channels=32, n=64, **more):
    low, high = (tuple(step(k) for k in window) for step in (lambda k: k // 2, lambda k: (k - 1) // 2))
    of = windows.view(images, image, window, channels, low=low, high=high, **more)
    return windows.asked(of, n, "weights", dtype=H, out_dtype=H)


# Each with as many sums as its warpgroups may have, or about: one alone, two, three and four.
SUMS = {
    "one": (asked(image=(400,), window=(12,), n=64), Config(64, 1, 2, taps=6)),
    "two": (asked(channels=32, window=(6, 4)), Config(64, 2, 2, taps=4)),
    "two of several units": (asked(channels=16, window=(6, 8)), Config(64, 2, 2, taps=8)),
    "three": (asked(channels=64), Config(64, 3, 2, "images", taps=3)),
    "three of several units": (asked(channels=16, window=(6, 7)), Config(64, 3, 2, taps=7)),
    "four": (asked(channels=32, window=(4, 4)), Config(64, 4, 2, taps=4)),
    "four of several units": (asked(channels=16, window=(16, 2)), Config(64, 4, 2, taps=2)),
    "stem": (asked(channels=3, window=(7, 7), strides=(2, 2)), Config(64, 4, 2, taps=1)),
    "volumes": (asked(image=(9, 9, 9), window=(3, 3, 3), n=32), Config(32, 3, 2, "grid", taps=3)),
    "copies": (asked(image=(400,), window=(11,), n=16), Config(16, 3, 2, taps=1)),
    "turned": (asked(channels=64, n=4), Config(64, 3, 2, taps=1)),
}


@pytest.mark.versions  # of NVRTC
@needs_nvrtc
@pytest.mark.parametrize("name", SUMS)
def test_kernels_have_no_spills(name):
    found = resolve(*SUMS[name])
    assert isinstance(found, Kernel), found
    cubin = compiler.compile_source(found.source, name=found.name, arch="sm_90a")
    assert cubin.resources.spill_store_bytes == 0
    assert "serialized" not in cubin.log, cubin.log


REFUSED = {
    "columns of a gradient": asked(n=12),
    "each channel by itself": asked(channels=1, groups=32),
    "strides or zeros": asked(strides=(2, 2)),
    "channels: TMA": asked(channels=20),
    "halos are of bf16": convolution.weight_gradient(windows.view(2, (9, 9), (3, 3), 32), 32, dtype=np.float32),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_why(what):
    assert any(what in reason for reason in family.reasons(REFUSED[what])), family.reasons(REFUSED[what])
    assert not list(family.configs(REFUSED[what]))


def test_configs_that_are_refused_say_why():
    problem = asked(channels=64)
    wrong = {
        "taps=0": Config(),
        "expected 16, 32": Config(48, taps=3),
        "registers of sums": Config(64, 1, 2, taps=1),
        "along='grid'": Config(64, 3, 2, "grid", taps=3),
        "copies of columns": Config(32, 3, 2, "images", taps=2),
        "along the innermost axis": Config(64, 3, 2, taps=4),
        "bytes: at most": Config(64, 3, 16, "images", taps=3),
    }
    for what, config in wrong.items():
        found = family.resolve(problem, config)
        assert isinstance(found, tuple)
        assert any(what in reason for reason in found), (what, found)


def test_shipped_tiles():
    """All are served, and have splits for the SMs that there are."""
    for problem in (asked(), asked(channels=4, groups=16), asked(channels=3, strides=(2, 2)), asked(n=3)):
        configs = list(family.configs(problem))
        assert configs
        assert len(set(configs)) == len(configs)
        for config in configs:
            found = family.resolve(problem, config)
            assert isinstance(found, Kernel)
            assert 1 <= found.geometry.sets * config.splits <= problem.device.sms


def test_images_and_a_gradient_of_few_channels_change_places():
    assert turned(asked(channels=64, n=4)) is not None
    for other in (asked(channels=64, n=64), asked(channels=4, n=4), asked(channels=64, n=4, groups=2)):
        assert turned(other) is None
