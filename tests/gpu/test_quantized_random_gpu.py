"""500 random products of quantized operands on the GPU: see tests/quantized_cases.py."""

from __future__ import annotations

import jax
import pytest
import quantized_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("first", range(0, 500, 20))
def test_random_products(first):
    with jax.numpy_dtype_promotion("standard"):
        for seed in range(first, first + 20):
            quantized_cases.check(seed)
