"""Convolutions of single pixels: by XLA they are products of matrices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from checks import integers, same

import cutjax
from cutjax.primitives.convolution import Convolution


@pytest.mark.parametrize("spatial", [(7,), (3, 5)])
def test_pixels_by_xla_are_a_product_of_matrices(spatial):
    """On CUDA, the convolution and both gradients; its values are those of the convolution."""
    window = (1,) * len(spatial)
    x, w, g = integers(0, (2, *spatial, 4)), integers(1, (*window, 4, 6)), integers(2, (2, *spatial, 6))

    def program(x, w, g):
        with cutjax.use_backend("xla"):
            y, pull = jax.vjp(lambda x, w: cutjax.conv(x, w), x, w)
        return y, *pull(g)

    text = jax.jit(program).trace(x, w, g).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.dot_general") == 3
    assert "stablehlo.convolution" not in text
    product = Convolution("forward", spatial, window, window, window, window, ((0, 0),) * len(spatial))
    for form, arrays in (("forward", (x, w)), ("weights", (x, g)), ("transposed", (g, w))):
        of_form = dataclasses.replace(product, form=form)
        by = [of_form.reference(*arrays, out_dtype=x.dtype, precision=None, on_cuda=on) for on in (False, True)]
        same(*by)


@pytest.mark.parametrize(("images", "dtype", "dots"), [(2, "bfloat16", 0), (2, "float32", 1), (4096, "bfloat16", 1)])
def test_short_gradients_of_images_in_16_bits_stay_convolutions(images, dtype, dots):
    """Measured: there cuDNN is faster than the kernels that XLA chooses for the product of matrices."""
    g = jax.ShapeDtypeStruct((images, 16, 16, 64), dtype)
    w = jax.ShapeDtypeStruct((1, 1, 64, 64), dtype)

    def program(g, w):
        with cutjax.use_backend("xla"):
            return jax.linear_transpose(lambda x: cutjax.conv(x, w), g)(g)

    text = jax.jit(program).trace(g, w).lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("stablehlo.dot_general"), text.count("stablehlo.convolution")) == (dots, 1 - dots)


@pytest.mark.parametrize(("images", "dots"), [(8, 0), (16, 1)], ids=str)
def test_gradients_of_weights_by_few_pixels_stay_convolutions(images, dots):
    """Measured: there XLA divides the contraction of the product of matrices."""
    x = jax.ShapeDtypeStruct((images, 16, 16, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.bfloat16)

    def program(g, w):
        with cutjax.use_backend("xla"):
            return jax.linear_transpose(lambda w: cutjax.conv(g, w), w)(g)

    text = jax.jit(program).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("stablehlo.dot_general"), text.count("stablehlo.convolution")) == (dots, 1 - dots)
