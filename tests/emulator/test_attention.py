"""Kernels of attention of few query rows, run on the CPU, against float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cutjax.epilogue.trace import trace
from cutjax.kernels import attention
from cutjax.kernels.attention import Config
from cutjax.kernels.device import reference
from cutjax.primitives.attention import attend
from emulator import device


def scaled(x):
    return x / math.sqrt(32)


def up_to(x, position, fill=-jnp.inf):
    """Masked by the positions of keys and of queries in time."""
    key, time = (lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (4, 3))
    return jnp.where(key <= position + time, x / 8, fill)


def finite(x, position):
    return up_to(x, position, float(jnp.finfo(np.float32).min))


def of_arrays(x, mask, bias, slope):
    """With operands of all scores but heads, of group and key, and of group alone; and positions of the batch."""
    batch = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(mask, jnp.tanh(x / 5) * slope.astype(x.dtype) + bias.astype(x.dtype), -1e30) + batch.astype(
        x.dtype
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes are batch, heads, group, time, keys, key_size and value_size."""

    sizes: tuple[int, ...]
    config: Config
    expression: Callable[..., Any] = scaled
    operands: tuple[np.ndarray, ...] = ()
    dtype: str = "bfloat16"
    out_dtype: str = ""
    keys_first: tuple[bool, bool] = (True, True)


def _position(*positions: int) -> np.ndarray:
    return np.asarray(positions, np.int32).reshape(-1, 1, 1, 1, 1)


_RANDOM = np.random.default_rng(1)
_ARRAYS = (
    _RANDOM.random((2, 1, 3, 2, 70)) < 0.7,
    _RANDOM.standard_normal((1, 1, 3, 1, 70), np.float32),
    _RANDOM.random((1, 1, 3, 1, 1)).astype(jnp.bfloat16),
)
CASES = {
    "one block": Case((1, 2, 4, 1, 80, 32, 32), Config(2, 2, 16, 1)),
    "keys that fill no tile": Case((2, 1, 1, 1, 61, 64, 64), Config(4, 3, 16, 1)),
    "fewer keys than warps have": Case((1, 1, 2, 1, 5, 16, 16), Config(4, 2, 16, 1)),
    "parts": Case((1, 2, 4, 1, 150, 32, 32), Config(2, 3, 16, 3)),
    "parts in float32": Case((1, 1, 3, 1, 130, 48, 80), Config(2, 2, 32, 2), out_dtype="float32"),
    "float16": Case((1, 2, 8, 1, 70, 80, 96), Config(2, 2, 16, 1), dtype="float16"),
    "many rows": Case((1, 1, 5, 5, 70, 32, 48), Config(2, 3, 32, 1), up_to, (_position(40),)),
    "queries in shared memory": Case((1, 1, 32, 1, 70, 112, 32), Config(2, 2, 32, 1)),
    "heads first": Case((2, 3, 2, 1, 50, 32, 32), Config(2, 2, 16, 2), keys_first=(False, False)),
    "both orders": Case((2, 3, 1, 2, 50, 32, 32), Config(2, 2, 16, 1), keys_first=(False, True)),
    "wide": Case((1, 1, 2, 1, 40, 256, 128), Config(2, 2, 16, 1)),
    "lengths": Case((2, 2, 2, 1, 64, 32, 32), Config(2, 2, 16, 2), up_to, (_position(3, 50),)),
    "a row of no key": Case((2, 1, 2, 1, 64, 32, 32), Config(2, 2, 16, 2), up_to, (_position(-1, 20),)),
    "no key, finite": Case((2, 1, 2, 1, 50, 32, 32), Config(2, 2, 16, 1), finite, (_position(-1, 20),)),
    "arrays": Case((2, 2, 3, 2, 70, 32, 32), Config(2, 2, 16, 2), of_arrays, _ARRAYS),
}


def problem_of(case: Case, arch: str = "sm_90a") -> tuple[attention.Problem, list[np.ndarray]]:
    """The problem, and what a kernel of it reads."""
    batch, heads, group, time, keys, key_size, value_size = case.sizes
    shape = (batch, heads, group, time, keys)
    traced = trace(case.expression, [jax.ShapeDtypeStruct(shape, np.float32)], list(map(jnp.asarray, case.operands)))
    dtype = jnp.dtype(case.dtype)
    params = {"expression": traced.epilogue.primal, "keys_first": case.keys_first, "device": reference(arch)}
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((batch, heads, group, time, key_size)).astype(dtype)]
    for size, first in zip((key_size, value_size), case.keys_first, strict=True):
        middle = (keys, heads) if first else (heads, keys)
        arrays.append(rng.standard_normal((batch, *middle, size)).astype(dtype))
    problem = attention.Problem.of(*arrays, out_dtype=jnp.dtype(case.out_dtype or dtype), **params)
    return problem, [*arrays, *map(np.asarray, traced.operands)]


def run(problem: attention.Problem, config: Config, arrays: list[np.ndarray]) -> np.ndarray:
    kernel = attention.Kernel(problem, config)
    assert not attention.why_not(problem)
    assert not kernel.reasons()
    with device.emulated():
        call = kernel.call()
    results = call.results or (jax.ShapeDtypeStruct((*arrays[0].shape[:-1], problem.value_size), problem.out_dtype),)
    machine = device.Machine(seed=1, eagerness=3)
    return machine.execute(call, arrays, [device.poison(y.shape, y.dtype) for y in results])[-1]


def exact(problem: attention.Problem, arrays: list[np.ndarray]) -> np.ndarray:
    with jax.enable_x64(True):
        q, k, v = (x.astype(np.float64) for x in arrays[:3])
        k, v = (x.swapaxes(1, 2) if first else x for x, first in zip((k, v), problem.keys_first, strict=True))
        scores = np.einsum("bhgtd,bhsd->bhgts", q, k)
        (scores,) = problem.expression.apply([jnp.asarray(scores)], list(map(jnp.asarray, arrays[3:])))
        weights = jax.nn.softmax(scores.astype(np.float64))
        return np.einsum("bhgts,bhsd->bhgtd", weights, v)


@pytest.mark.versions
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    """Powers are rounded to the dtype of values before they are multiplied, as in plain JAX; so are results."""
    case = CASES[name]
    problem, arrays = problem_of(case)
    got, want = run(problem, case.config, arrays).astype(np.float64), exact(problem, arrays)
    assert (np.isnan(want).any(), got.shape) == (name == "a row of no key", want.shape)
    np.testing.assert_allclose(got, want, rtol=2**-7 if case.dtype == "bfloat16" else 2**-9, atol=2**-7)


def test_what_l2_cannot_hold():
    problem, arrays = problem_of(CASES["keys that fill no tile"])
    streamed = dataclasses.replace(problem, device=dataclasses.replace(problem.device, l2_bytes=0))
    config = CASES["keys that fill no tile"].config
    assert "evict_first" in attention.Kernel(streamed, config).entries[0].source
    np.testing.assert_array_equal(run(streamed, config, arrays), run(problem, config, arrays))


def test_nan_of_a_masked_value():
    """0 times NaN is NaN, as in plain JAX; what is NaN in a masked key is not seen."""
    case = CASES["lengths"]
    problem, (q, k, v, position) = problem_of(case)
    k[:, 60] = np.nan
    want = exact(problem, [q, k, v, position])
    assert not np.isnan(want).any()
    np.testing.assert_allclose(run(problem, case.config, [q, k, v, position]).astype(np.float64), want, atol=2**-6)
    v[0, 60, 1, 7] = np.nan
    got = run(problem, case.config, [q, k, v, position])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact(problem, [q, k, v, position])))
    assert np.isnan(got[0, 1, :, :, 7]).all()


@pytest.mark.parametrize("keys", [48, 2048])
def test_in_a_program(keys):
    """By one launch, and in parts where the SMs are more than the heads; under vmap the batch is larger."""
    problem, (q, k, v) = problem_of(Case((1, 1, 2, 1, keys, 32, 32), Config(8, 3, 32, 1)))
    params = {"expression": problem.expression, "keys_first": problem.keys_first, "out_dtype": problem.out_dtype}

    def run(q, k, v):
        return attend(q, k, v, backend="cuda", **params)

    with device.emulated(device.Machine(eagerness=3)):
        lowered = jax.jit(run).lower(q, k, v)
        assert ("combine" in lowered.as_text()) == (keys == 2048)
        got = np.asarray(lowered.compile()(q, k, v), np.float64)
        both = np.asarray(jax.jit(jax.vmap(run))(*(np.stack([x, x]) for x in (q, k, v))), np.float64)
    want = exact(problem, [q, k, v])
    for each in (got, *both):
        np.testing.assert_allclose(each, want, rtol=2**-7, atol=2**-7)
