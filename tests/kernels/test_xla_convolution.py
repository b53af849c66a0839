"""The predicted time of convolutions, by XLA and where L2 is too small: of what it is told, and where it counts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.kernels import convolution, families, xla, xla_convolution
from cutjax.kernels.device import reference
from cutjax.kernels.operand import Im2col, Taps
from cutjax.kernels.sm90 import windows_cost
from cutjax.kernels.xla_convolution import Geometry

VIEW = Im2col(8, (28, 28), (28, 28), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 128)
STRIDED = dataclasses.replace(VIEW, image=(56, 56), strides=(2, 2))
SPREAD = dataclasses.replace(VIEW, image=(14, 14), spread=(2, 2))
FLIPPED = Taps((3, 3), (3, 3), (2, 2), (-1, -1))
DEPTHWISE = dataclasses.replace(VIEW, channels=1, groups=128)


def geometry(problem):
    return Geometry.of(problem)


def test_forms():
    forms = [
        geometry(problem).form
        for problem in (
            convolution.forward(VIEW, 64),
            convolution.forward(VIEW, 64, FLIPPED, transposed=True),
            convolution.weight_gradient(VIEW, 64),
        )
    ]
    assert forms == ["forward", "gradient", "weights"]


@pytest.mark.parametrize("view", [VIEW, STRIDED, DEPTHWISE], ids=["plain", "strided", "depthwise"])
def test_a_gradient_of_weights_takes_the_flops_and_bytes_of_its_convolution(view):
    of, gradient = (geometry(make(view, 128)) for make in (convolution.forward, convolution.weight_gradient))
    rows = 8 * 28 * 28
    assert of.flops == gradient.flops == 2 * rows * 9 * 128 * view.channels
    arrays = view.elements + 9 * view.channels * 128 + rows * 128
    assert of.bytes == gradient.bytes == 2 * arrays


def test_zeros_between_pixels_are_not_counted():
    assert geometry(convolution.forward(SPREAD, 64)).flops == geometry(convolution.forward(VIEW, 64)).flops / 4


def test_steps_are_what_programs_of_xla_show():
    """Tiles of 64 columns and 32 channels; padded and spread images are written, those of three axes transposed."""

    def copied_us(view):
        p = convolution.forward(view, 128)
        of = geometry(p)
        return of.steps_us(p.device, p.a.dtype) - of.wasted * of.roofline_us(p.device, p.a.dtype)[0]

    assert geometry(convolution.forward(VIEW, 96)).wasted == pytest.approx(128 / 96)
    assert geometry(convolution.forward(dataclasses.replace(VIEW, channels=97), 64)).wasted == pytest.approx(128 / 97)
    uneven = dataclasses.replace(VIEW, image=(27, 27))  # as many windows, with two zeros at the end
    us = 1e6 / reference("sm_90a").bytes_per_second
    assert copied_us(uneven) - copied_us(VIEW) == pytest.approx(2 * us * 2 * 8 * 30 * 30 * 128)
    ones, along = (1, 1, 1), {"image": (28, 28, 1), "grid": (28, 28, 1), "window": (3, 3, 1), "low": (1, 1, 0)}
    volume = dataclasses.replace(VIEW, strides=ones, dilation=ones, spread=ones, **along)
    assert copied_us(volume) - copied_us(VIEW) == pytest.approx(4 * us * 2 * 8 * 28 * 28 * (128 + 128))


def test_what_a_stride_leaves_of_an_image_is_no_uneven_padding():
    def uneven(low, image, form=convolution.forward, **options):
        return geometry(form(dataclasses.replace(STRIDED, low=low, image=image), 64, **options)).uneven

    assert not uneven((1, 1), (56, 56))
    assert uneven((0, 0), (56, 56))  # "SAME"
    gradient = dataclasses.replace(VIEW, image=(28, 28), grid=(56, 56), window=(1, 1), spread=(2, 2), low=(0, 0))
    assert not geometry(convolution.forward(gradient, 64, transposed=True)).uneven
    gradient = dataclasses.replace(gradient, window=(3, 3), low=(2, 2))
    assert geometry(convolution.forward(gradient, 64, FLIPPED, transposed=True)).uneven


@pytest.mark.parametrize("make", [convolution.forward, convolution.weight_gradient])
@pytest.mark.parametrize("view", [VIEW, STRIDED, SPREAD, DEPTHWISE], ids=["plain", "strided", "spread", "depthwise"])
def test_xla_takes_the_roofline_at_least_and_just_that_where_nothing_was_measured(make, view):
    problem = make(view, 128)
    of = geometry(problem)
    least = xla_convolution.LAUNCH_US + max(of.roofline_us(problem.device, problem.a.dtype))
    assert xla_convolution.time_us(problem) >= least
    other = problem.on(reference("sm_80"))
    expected = xla_convolution.LAUNCH_US + max(of.roofline_us(other.device, other.a.dtype))
    assert xla_convolution.time_us(other) == pytest.approx(expected)
    wide = make(view, 128, dtype=np.float32, out_dtype=np.float32)
    assert xla_convolution.time_us(wide) == pytest.approx(
        xla_convolution.LAUNCH_US + max(geometry(wide).roofline_us(wide.device, wide.a.dtype))
    )


def test_depthwise_and_spread_convolutions_are_where_xla_is_slow():
    def over(view, n=128):
        problem = convolution.forward(view, n)
        of = geometry(problem)
        return xla_convolution.time_us(problem) / max(of.roofline_us(problem.device, problem.a.dtype))

    assert over(DEPTHWISE) > 1.5 * over(VIEW)
    assert over(SPREAD) > 1.5 * over(VIEW)


def test_an_epilogue_is_a_pass_over_the_result():
    """Over the product, a matrix that is added and the result; over that matrix alone where cuDNN has the epilogue."""
    shapes = (8, 28, 28, 128), (3, 3, 128, 64), (8, 28, 28, 64)
    x, w, r = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def of(activation):
        def fn(x, w, r):
            return cutjax.conv(x, w, epilogue=lambda acc, r: activation(acc + r.astype(acc.dtype)), operands=(r,))

        (row,) = cutjax.explain(fn, platform="cuda")(x, w, r).rows
        return xla_convolution.time_us(row.choice.problem) - xla_convolution.time_us(convolution.forward(VIEW, 64))

    us = 1e6 * 2 * r.size / convolution.forward(VIEW, 64).device.bytes_per_second
    assert of(jax.nn.silu) == pytest.approx(1 + 3 * us)
    assert of(lambda x: jnp.maximum(x, 0)) == pytest.approx(us)


def test_the_choice_of_a_convolution_asks_for_it(monkeypatch):
    problem = convolution.forward(VIEW, 64)

    class Kernel:
        family, prepared = "sm90", ()

    monkeypatch.setattr(xla, "fastest", lambda problem: (Kernel(), 1.0, 1))
    assert xla.time_us(problem) == xla_convolution.time_us(problem)
    monkeypatch.setattr(xla, "fastest", lambda problem: None)
    assert xla.time_us(problem) is None


def test_the_last_wave_of_tiles_counts():
    """Weight gradients of 144 tiles take two waves of 132 SMs; those of 36 are summed in three parts, in one."""

    def waits(channels, n):
        problem = convolution.weight_gradient(dataclasses.replace(VIEW, channels=channels), n)
        return geometry(problem).true(problem)["waves"]

    assert waits(512, 512) > 2 * waits(256, 256) > 0
    assert waits(64, 64) < waits(256, 256)


def test_patches_of_several_axes_are_of_their_pixels_channels():
    """Two frames of 14 x 14 pixels of 3 channels: a row of each is read as channels."""
    view = Im2col(4, (8, 14, 16), (4, 1, 16), (2, 14, 1), (2, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 42)
    of = geometry(convolution.forward(view, 128))
    assert (of.few_colours, of.colours) == (True, 3)


def test_taps_far_apart_are_read_from_memory():
    """Windows of 3 pixels of 768 channels: tiles of 256 rows push them out of L2 between two taps, of 64 do not."""

    def us(channels, bm):
        view = Im2col(64, (3000,), (3000,), (3,), (1,), (1,), (1,), (1,), channels)
        kernel = families.resolve(convolution.forward(view, 80), cutjax.Config(bm, 96, 64, 4))
        return windows_cost.reread_us(kernel, kernel.asked.device)

    assert us(768, 256) == pytest.approx(1e6 * 2 * 192000 * 2304 / convolution.forward(VIEW, 8).device.bytes_per_second)
    assert us(768, 64) == us(128, 256) == 0
