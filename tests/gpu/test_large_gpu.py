"""Sizes near 2^31 on the device: what kernels may not count is right by XLA, and what they may, to its last element."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cutjax

pytestmark = pytest.mark.gpu


@dataclasses.dataclass(frozen=True)
class Case:
    """A program without arguments, whose results are few: differences from what is right.

    Attributes:
      program: makes operands on the device, multiplies them and compares.
      gib: device memory that it takes, at most.
      kernel: whether a kernel runs.
    """

    program: Callable[[], Any]
    gib: int
    kernel: bool


def deep() -> Any:
    """The first 2^24 of 2^29 + 2^24 terms are all there is."""
    k = 2**29 + 2**24
    a = (lax.iota(np.int32, k) < 2**24).astype(np.int32)[None]
    return cutjax.gemm(a, jnp.ones((k, 8), np.int32)) - 2**24


def tall() -> Any:
    """Rows to within a tile of 2^31, with an epilogue."""
    m = 2**31 - 8
    x = jnp.ones((m, 8), jnp.bfloat16) * (1 + lax.iota(np.uint32, m) % 8).astype(jnp.bfloat16)[:, None]
    y = cutjax.gemm(x, jnp.ones((8, 1), jnp.bfloat16), epilogue=lambda acc: acc * 2)
    return jnp.abs(y - x[:, :1] * 16).max(), y[-8:] - x[-8:, :1] * 16


def wide() -> Any:
    """Lines of almost 2 GiB, each element of which a kernel stores."""
    n = 2**29 - 2**12
    b = lax.iota(np.int32, n)[None]
    y = cutjax.gemm(jnp.array([[1], [-3]], np.int32), b, backend="cuda")
    return jnp.abs(y[0] - b[0]).max(), jnp.abs(y[1] + 3 * b[0]).max()


CASES = {"deep": Case(deep, 40, False), "tall": Case(tall, 90, False), "wide": Case(wide, 20, True)}


@pytest.mark.parametrize("name", CASES)
def test_large(name, gpus):
    case, stats = CASES[name], gpus[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    if free < case.gib * 2**30:
        pytest.skip(f"{free / 2**30:.0f} GiB of device memory are free, {case.gib} are needed")
    compiled = jax.jit(case.program).lower().compile()
    assert ("cutjax_launch" in compiled.as_text()) == case.kernel
    for x in jax.tree.leaves(compiled()):
        np.testing.assert_array_equal(np.asarray(x, np.float32), 0)
