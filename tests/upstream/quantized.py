"""A pytest plugin, ``-p quantized``: tests of scaled products in JAX, and Qwix's own, run on our products. See run.sh.

Of JAX those of ``scaled_dot``, ``scaled_matmul`` and ``scaled_dot_general``, which need a kernel that cuDNN has on some
GPUs: what looks for one is told that there is, and the product is ours. Of Qwix those of its arrays, which our products
take as they are.
"""

from __future__ import annotations

import collections
import functools
import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from substitute import Like

import cutjax

CALLS: collections.Counter[str] = collections.Counter()


def _operand(x: Any, scale: Any) -> Any:
    return x if scale is None else cutjax.Quantized(x, scale)


def scaled_dot(lhs: Any, rhs: Any, **given: Any) -> Any:
    """Computes jax.lax.scaled_dot by ours; that function says what is wrong with the arguments."""
    out = jax.eval_shape(functools.partial(lax.scaled_dot, **given), lhs, rhs)
    CALLS["scaled_dot"] += 1
    numbers = given.get("dimension_numbers")
    if numbers is None:
        numbers = (((2,), (1,)), ((0,), (0,))) if np.ndim(lhs) == 3 else (((1,), (0,)), ((), ()))
    operands = _operand(lhs, given.get("lhs_scale")), _operand(rhs, given.get("rhs_scale"))
    return cutjax.dot_general(*operands, numbers, preferred_element_type=out.dtype)


def scaled_matmul(
    lhs: Any, rhs: Any, lhs_scales: Any, rhs_scales: Any, preferred_element_type: Any = np.float32
) -> jax.Array:
    """Computes jax.nn.scaled_matmul by ours."""
    CALLS["scaled_matmul"] += 1
    a, b = cutjax.Quantized(lhs, lhs_scales), cutjax.Quantized(rhs, rhs_scales)
    return cutjax.gemm(a, b, layout="nt", out_dtype=preferred_element_type)


def _of_jax(module: Any) -> None:
    """Puts our products into a test module of JAX, and tells it that there is what its tests ask for."""
    module.jax = Like(jax, {"lax": Like(lax, {"scaled_dot": scaled_dot})})
    module.sys = Like(sys, {"modules": {}})  # scaled_dot_test runs without pytest alone
    if hasattr(module, "nn"):
        module.nn = Like(nn, {"scaled_matmul": scaled_matmul})
    if not hasattr(module, "quantize"):
        return
    sys.modules[module.quantize.__module__].scaled_matmul_wrapper = scaled_matmul
    module.scaled_matmul_wrapper = scaled_matmul
    module.check_cudnn_version = lambda: None
    module.jtu.test_device_matches = lambda kinds: bool({"gpu", "cuda"} & {*kinds})
    module.jtu.is_cuda_compute_capability_at_least = lambda _: True
    if hasattr(module, "ScaledMatmulTest"):
        module.ScaledMatmulTest.assertRegex = lambda *_: None  # of the name of cuDNN's kernel


def _of_qwix() -> None:
    """Puts our products into Qwix, in the place of those that multiply values; it compares them with its others."""
    core = "qwix._src.core."
    names = ("dot_general", "einsum", "dot", "ragged_dot", "conv_general", "qarray")
    dot_general, einsum, dot, ragged_dot, conv_general, qarray = (importlib.import_module(core + x) for x in names)

    def dtype_of(lhs: Any, rhs: Any, asked: Any) -> Any:
        return qarray.get_accumulator_and_result_type(lhs, rhs, preferred_element_type=asked)[1]

    def multiply(
        lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None, **_: Any
    ) -> jax.Array:
        CALLS["dot_general"] += 1
        dtype = dtype_of(lhs, rhs, preferred_element_type)
        arrays = [x if isinstance(x, qarray.QArray) or x.dtype != bool else x.astype(jnp.int8) for x in (lhs, rhs)]
        return cutjax.dot_general(*arrays, dimension_numbers, precision, dtype)

    def multiply_ragged(
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        dimension_numbers: Any = None,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: Any = None,
    ) -> jax.Array:
        CALLS["ragged_dot_general"] += 1
        numbers = ragged_dot._BASIC_RAGGED_DOT_DIMENSION_NUMBERS if dimension_numbers is None else dimension_numbers
        dtype = dtype_of(lhs, rhs, preferred_element_type)
        return cutjax.ragged_dot_general(lhs, rhs, group_sizes, numbers, precision, dtype, group_offset)

    def convolve(
        lhs: Any,
        rhs: Any,
        window_strides: Any,
        padding: Any,
        lhs_dilation: Any = None,
        rhs_dilation: Any = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        preferred_element_type: Any = None,
        **_: Any,
    ) -> jax.Array:
        CALLS["conv"] += 1
        numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
        return cutjax.conv(
            lhs,
            rhs,
            window_strides=window_strides,
            padding=padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            dimension_numbers=numbers,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
            out_dtype=dtype_of(lhs, rhs, preferred_element_type),
        )

    of_qwix = qarray.dequantize

    def dequantize(x: Any) -> jax.Array:
        if x.qtype == "nf4" or not isinstance(x.qvalue, jax.Array):
            return of_qwix(x)
        qarray.validate_qarray(x)
        CALLS["dequantize"] += 1
        return cutjax.Quantized(x.qvalue, x.scale, x.zero_point).dequantize(x.scale.dtype)

    qarray.dequantize = dequantize
    dot_general.dot_general = dot_general._fast_dot_general = dot_general.loop_dot_general = multiply
    einsum.einsum.__kwdefaults__["_qwix_dot_general"] = multiply
    dot.dot.__kwdefaults__["_qwix_dot_general"] = multiply
    ragged_dot.ragged_dot = ragged_dot.ragged_dot_general = ragged_dot._fast_ragged_dot_general = multiply_ragged
    conv_general.conv_general_dilated = conv_general._fast_conv_general_dilated = convolve


def pytest_sessionstart() -> None:
    try:
        importlib.import_module("qwix")
    except ModuleNotFoundError:  # JAX's tests run without it
        return
    _of_qwix()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items}:
        if hasattr(module, "jtu"):
            _of_jax(module)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    shown = ", ".join(f"{name} {count}" for name, count in sorted(CALLS.items()))
    terminalreporter.write_line(f"calls of cutjax: {shown or 'none'}")


def pytest_sessionfinish(session: Any) -> None:
    if not CALLS and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # nothing was substituted
