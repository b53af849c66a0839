"""Kernels that add up over rows: that they compile without spills, what is refused, and when fuse takes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax.epilogue.trace import trace
from cutjax.kernels import row_sums
from cutjax.kernels.device import reference
from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
F32 = np.dtype(np.float32)


def problem(expression, sizes, dtype="bfloat16", operands=(), arch="sm_90a"):
    def sums(*arrays):
        return [y.sum(1) for y in expression(*arrays)]

    given = [jnp.zeros(shape, kind) for shape, kind in operands]
    traced = trace(sums, [jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))], given)
    x = jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))
    return row_sums.Problem.of(x, expression=traced.epilogue.primal, device=reference(arch))


def moments(x):
    return [x.astype(F32), jnp.square(x.astype(F32))]


def norm_backward(g, y, gate, add, mean, scale, shift):
    """The two sums of a batch norm's backward pass behind SiLU and a gate of each image."""
    t = (y.astype(F32) - mean) * scale + shift
    s = jax.nn.sigmoid(t)
    d = (g.astype(F32) * gate.astype(F32) + add) * (s + t * s * (1 - s))
    return [d, d * (y.astype(F32) - mean)]


def of_norm(columns):
    image, channel = ((4, 1, columns), F32), ((1, 1, columns), F32)
    return [((4, 64, columns), jnp.bfloat16), ((4, 1, columns), jnp.bfloat16), image, channel, channel, channel]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_kernels_compile_without_spills(arch):
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    asked = [problem(moments, (4, 64, columns), dtype, arch=arch) for columns in (32, 144, 2048)]
    asked += [problem(moments, (4, 64, 24), "float32", arch=arch)]
    if arch != "sm_75":
        asked += [problem(norm_backward, (4, 64, columns), dtype, of_norm(columns), arch) for columns in (32, 144, 672)]
    for each in asked:
        assert not row_sums.why_not(each)
        kernel = row_sums.Kernel(each)
        cubin = compiler.compile_source(kernel.entry.source, name=kernel.name, arch=arch)
        assert "warning" not in cubin.log
        assert (cubin.resources.spill_store_bytes, cubin.resources.spill_load_bytes) == (0, 0), kernel.name


def test_what_a_thread_keeps_bounds_its_columns():
    """Sums and what rows share lie in registers: with many of them a thread has fewer columns."""
    few, many = problem(moments, (4, 64, 64)), problem(norm_backward, (4, 64, 64), "bfloat16", of_norm(64))
    assert row_sums.Kernel(few).count == row_sums.Kernel(many).count == 8
    most = problem(lambda x, *v: [x * sum(v)], (4, 64, 64), "float32", [((1, 1, 64), F32)] * 16)
    kernel = row_sums.Kernel(most)
    assert kernel.count * kernel.kept <= 64
    assert row_sums.Kernel(problem(moments, (4, 64, 63))).count == 1


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (problem(moments, (0, 8, 8)), "a size is 0"),
        (problem(moments, (2, 2**31 - 8, 8)), "rows of up to"),
        (problem(moments, (2**31 - 2, 1, 8)), "blocks of up to"),
        (problem(lambda x: [x.astype(F32).astype(jnp.int32)], (2, 8, 8)), "no sum over rows in float32"),
    ],
)
def test_refusals(asked, why):
    found = row_sums.choose(asked, "auto")
    assert found.resolved is None
    assert why in "; ".join(found.reasons)
