"""Random products of quantized operands on the CPU: some of those that tests/gpu/test_quantized_random_gpu.py runs."""

from __future__ import annotations

import jax
import pytest
import quantized_cases


@pytest.mark.parametrize("seed", range(24))
def test_a_random_product(seed):
    with jax.numpy_dtype_promotion("standard"):
        quantized_cases.check(seed)
