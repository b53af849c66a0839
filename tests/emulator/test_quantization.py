"""The kernels that quantize, run on the CPU: bit for bit as XLA has cutjax.quantize on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax.kernels import quantization
from cutjax.kernels.device import reference
from cutjax.kernels.prepared import along
from cutjax.primitives.quantization import quantize_p
from emulator import device

ORDERS = {"own": (True, False), "turned": (False, True), "both": (True, True)}
LINES, SQUARES, ROWS, ALL = (1, 128), (128, 128), (1, -1), (-1, -1)
# rows, columns, dtype, of float8, block, arch, and the dtype to which it is rounded first
CASES = {
    "lines": ((256, 384), "bfloat16", "float8_e4m3fn", LINES, "sm_90a"),
    "squares": ((384, 256), "bfloat16", "float8_e4m3fn", SQUARES, "sm_90a"),
    "gradients": ((128, 256), "float16", "float8_e5m2", LINES, "sm_90a"),
    "float32": ((256, 128), "float32", "float8_e4m3fn", LINES, "sm_90a"),
    "squares of float32": ((128, 256), "float32", "float8_e5m2", SQUARES, "sm_90a"),
    "a batch": ((2, 128, 256), "bfloat16", "float8_e4m3fn", LINES, "sm_90a"),
    "a batch of squares": ((3, 256, 128), "bfloat16", "float8_e4m3fn", SQUARES, "sm_90a"),
    "rows": ((256, 384), "bfloat16", "float8_e4m3fn", ROWS, "sm_90a"),
    "a batch of rows": ((2, 256, 128), "float32", "float8_e5m2", ROWS, "sm_90a"),
    "a matrix": ((256, 384), "bfloat16", "float8_e5m2", ALL, "sm_90a"),
    "a batch of matrices": ((3, 128, 256), "float16", "float8_e4m3fn", ALL, "sm_90a"),
    "rounded": ((256, 128), "float32", "float8_e4m3fn", SQUARES, "sm_90a", "bfloat16"),
    "rounded rows": ((128, 256), "float32", "float8_e4m3fn", ROWS, "sm_90a", "float16"),
    "a rounded matrix": ((128, 256), "float32", "float8_e4m3fn", ALL, "sm_90a", "bfloat16"),
    "Ada": ((128, 256), "bfloat16", "float8_e4m3fn", LINES, "sm_89"),
}


def numbers(shape, dtype, block):
    """Of many magnitudes, with blocks of zeros, numbers that are not finite, the greatest and the least.

    Where one scale is for all of a matrix, only the last of several has such numbers.
    """
    rng = np.random.default_rng(0)
    most = float(jnp.finfo(dtype).max)
    x = np.clip(rng.standard_normal(shape) * np.exp(4 * rng.standard_normal((*shape[:-1], 1))), -most, most)
    x[..., :8, :128] = 0
    some = x if block != ALL else x.reshape(-1, *shape[-2:])[1:][-1:]
    some[..., 11, 5], some[..., 12, 77], some[..., 13, 120] = np.nan, np.inf, -np.inf
    some[..., 21, 0], x[..., 22, :] = most, float(jnp.finfo(dtype).tiny)
    x[..., 23, 1::2] = -0.0
    return np.asarray(x, np.dtype(dtype))


def expected(x, to, block, own, turned):
    """By numpy, as XLA has it on a GPU: quotients are products with a reciprocal."""
    found, most = [], np.float32(1) / np.float32(jnp.finfo(to).max)
    for there, of in ((own, x), (turned, np.swapaxes(x, -1, -2))):
        if not there:
            continue
        *batch, r, c = of.shape
        mn, k = (size if step < 0 else step for size, step in zip((r, c), block, strict=True))
        blocks = of.astype(np.float32).reshape(*batch, r // mn, mn, c // k, k)
        greatest = np.abs(blocks).max((-3, -1), keepdims=True)
        with np.errstate(invalid="ignore"):
            scale = np.where(np.isfinite(greatest), greatest * most, np.nan)
            scale = np.where(scale == 0, np.float32(1), np.maximum(scale, np.float32(2.0**-126))).astype(np.float32)
            values = blocks * (np.float32(1) / scale)
        limit = float(jnp.finfo(to).max)
        found += [np.clip(values, -limit, limit).astype(to).reshape(of.shape), scale.squeeze((-3, -1))]
    return found


def same(got, wanted):
    """To the bit, but that NaNs are alike."""
    for x, y in zip(got, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        lost = np.isnan(np.asarray(y, np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(x, np.float32)), lost)
        bits = np.dtype(f"u{x.dtype.itemsize}")
        np.testing.assert_array_equal(x.view(bits)[~lost], y.view(bits)[~lost])


@pytest.mark.versions
@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_scales(name, orders):
    shape, dtype, to, block, arch, *rounded = CASES[name]
    own, turned = ORDERS[orders]
    x = numbers(shape, jnp.dtype((*rounded, dtype)[0]), block).astype(dtype)
    x = x * np.asarray(1 + 2**-12 if rounded else 1, x.dtype)
    params = {"dtype": jnp.dtype(to), "block": block, "own": own, "turned": turned, "rounded": (*rounded, None)[0]}
    kernel = quantization.Kernel(quantization.Problem.of(x, **params, device=reference(arch)))
    assert not quantization.why_not(kernel.problem)
    xla = [np.asarray(y) for y in jax.jit(lambda x: quantize_p.bind(x, **params, backend="xla"))(x)]
    with device.emulated():
        call = kernel.call()
    machine = device.Machine(seed=1, eagerness=3)
    given = [np.asarray(y) for y in call.prepare([x])] if call.prepare else [x]
    memory = [device.poison(y.shape, y.dtype) for y in call.results or xla]
    for argument, result in call.aliases:
        memory[result] = given[argument]
    got = machine.execute(call, given, memory)[: len(xla)]
    same(got, expected(x.astype(*rounded) if rounded else x, to, block, own, turned))
    # XLA flushes subnormal numbers on a CPU, and rounds quotients as its version has it: to a neighbour at most.
    for i in range(0, len(got), 2):
        (values, scales), (others, of_others) = got[i : i + 2], xla[i : i + 2]
        flushed = scales == np.float32(2.0**-126)
        np.testing.assert_array_equal(scales[~flushed], of_others[~flushed])
        kept = np.asarray(along(jnp.where(flushed, np.nan, scales), values.shape) > 0)
        apart = np.abs(values.view(np.uint8).astype(int) - others.view(np.uint8).astype(int))[kept]
        assert apart.max() <= 1
        assert apart.mean() < 0.02  # 0.004 in jax 0.10.0, nearly none since
