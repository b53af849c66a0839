"""Convolutions of single pixels: by XLA they are products of matrices."""

from __future__ import annotations

import dataclasses

import jax
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
