"""Convolutions under cutjax.fuse: lax's, in any layout, with both gradients as JAX writes them; prices and reports."""

from __future__ import annotations

import functools

import convolutions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, integers, scaled
from jax import lax

import cutjax
from cutjax.fusion import price
from cutjax.fusion.build import NAME
from cutjax.fusion.jaxprs import bodies, opened

always = functools.partial(cutjax.fuse, policy="always")
LAST = "NHWC", "HWIO", "NHWC"
BF16 = jnp.bfloat16


def conv(x, w, strides=(1, 1), padding="SAME", numbers=LAST, **more):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **more)


def step(fn, x, w, g):
    """The result, the gradient of the images and the step of the weights, each with a tail."""
    y, pull = jax.vjp(fn, x, w)
    dx, dw = pull(g)
    return 2 * y + 1, 3 * dx - x, w - dw


def equations(fn, *args):
    """The names of the equations outside of our products' calls."""

    def found(jaxpr):
        for eqn in opened(jaxpr).eqns:
            if eqn.params.get("name") != NAME:
                yield eqn.primitive.name
                for body in bodies(eqn):
                    yield from found(body)

    return list(found(jax.make_jaxpr(fn)(*args)))


def fused_in(fn, *args):
    return sum(report.runs == "fused" for report in cutjax.explain(fn)(*args).fusion)


@pytest.mark.parametrize("seed", range(12))  # after a change of how convolutions are found: 1,000
def test_random_convolutions(seed):
    """In integers, exact in any order. A gradient is known by its product with a direction."""
    drawn = convolutions.drawn(seed)
    x, dx, w, dw = (integers(4 * seed + i, (drawn.lhs, drawn.rhs)[i > 1]) for i in range(4))
    y, along_x, along_w = (convolutions.convolved(a, b, drawn) for a, b in ((x, w), (dx, w), (x, dw)))
    g = integers(seed, y.shape)
    fn = functools.partial(step, lambda x, w: lax.conv_general_dilated(x, w, **drawn.arguments))
    got = always(fn)(x, w, g)
    np.testing.assert_array_equal(got[0], 2 * y + 1)
    assert np.vdot(got[1], dx) == 3 * np.vdot(g, along_x) - np.vdot(x, dx)
    assert np.vdot(got[2], dw) == np.vdot(w, dw) - np.vdot(g, along_w)


GEOMETRIES = {
    "plain": {},
    "strided": {"strides": (2, 3)},
    "dilated": {"rhs_dilation": (2, 1)},
    "groups": {"feature_group_count": 2},
    "pixels": {},
    "uneven": {"strides": (2, 2), "padding": ((3, 0), (0, 2))},
    "cut": {"padding": ((-1, 0), (0, -2))},
}


@pytest.mark.versions
@pytest.mark.parametrize("name", GEOMETRIES)
def test_arrays_with_channels_last_are_read_as_they_lie(name):
    """Weights are neither flipped nor transposed for a gradient, nor is the gradient of weights."""
    more = GEOMETRIES[name]
    window = (1, 1) if name == "pixels" else (3, 2)
    x, w = integers(0, (2, 7, 6, 4)), integers(1, (*window, 4 // more.get("feature_group_count", 1), 6))
    fn = functools.partial(step, lambda x, w: conv(x, w, **more))
    g = integers(2, jax.eval_shape(lambda x, w: conv(x, w, **more), x, w).shape)
    fused = always(fn)
    close(fused(x, w, g), jax.jit(fn)(x, w, g), 0)
    assert fused_in(fused, x, w, g) == 3
    assert not {"rev", "transpose", "conv_general_dilated"}.intersection(equations(fused, x, w, g))
    problems = [row.choice.problem for row in cutjax.explain(fused, platform="cuda")(x, w, g).rows]
    assert len({p.a.contiguous for p in problems}) == 2  # of the gradient of weights, pixels are summed over


@pytest.mark.versions
@pytest.mark.parametrize("flipped", [False, True])
def test_transposed_convolutions(flipped):
    x, w = integers(0, (2, 5, 4)), integers(1, (3, *((6, 4) if flipped else (4, 6))))

    def of(x, w):
        return lax.conv_transpose(x, w, (2,), "SAME", transpose_kernel=flipped)

    g = integers(2, jax.eval_shape(of, x, w).shape)
    fn = functools.partial(step, of)
    fused = always(fn)
    close(fused(x, w, g), jax.jit(fn)(x, w, g), 0)
    assert fused_in(fused, x, w, g) == 2  # weights of a gradient by windows without zeros are flipped afterwards
    fused = always(lambda x, w: jnp.tanh(of(x, w)))
    assert not {"rev", "transpose"}.intersection(equations(fused, x, w))


def test_second_derivatives():
    x, w = scaled(0, (2, 5, 4, 3)), scaled(1, (3, 3, 3, 2))

    def gradient(fn):
        return lambda x, w: sum(jnp.sin(y).sum() for y in jax.grad(lambda *a: jnp.sin(fn(*a)).sum(), (0, 1))(x, w))

    def fn(x, w):
        return jnp.tanh(conv(x, w, (2, 2)))

    expected = jax.jit(jax.grad(gradient(fn), (0, 1)))(x, w)
    close(jax.jit(jax.grad(gradient(always(fn)), (0, 1)))(x, w), expected, 1e-4)
    close(always(jax.grad(gradient(fn), (0, 1)))(x, w), expected, 1e-4)


def test_scans_and_policies():
    """A loop over layers, whose convolutions a policy saves."""

    def fn(x, ws):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def layer(x, w):
            return jax.nn.silu(conv(x, w)) + x

        return lax.scan(lambda x, w: (layer(x, w), x.sum()), x, ws)

    def loss(x, ws):
        y, sums = fn(x, ws)
        return (y**2).mean() + sums.sum()

    args = scaled(0, (2, 5, 4, 3)), scaled(1, (3, 3, 3, 3, 3)) / 3
    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(*args)
    close(always(jax.value_and_grad(loss, (0, 1)))(*args), expected, 1e-4)
    close(jax.jit(jax.value_and_grad(always(loss), (0, 1)))(*args), expected, 1e-4)


def avals(*shapes):
    return [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]


def test_layouts_are_part_of_the_price(kernels_win):
    """XLA's time is that of channels last, and what it would transpose for a kernel is the kernel's."""
    reasons = []
    for numbers, shapes in ((LAST, ((8, 32, 32, 64), (3, 3, 64, 64))), (None, ((8, 64, 32, 32), (64, 64, 3, 3)))):
        fused = cutjax.fuse(functools.partial(conv, numbers=numbers))
        (report,) = cutjax.explain(fused, platform="cuda")(*avals(*shapes)).fusion
        assert report.runs == "kernel"
        reasons.append(report.reason)
    last, first = reasons
    assert first.xla_us == last.xla_us
    assert first.plain_us > last.plain_us


@pytest.fixture
def xla_wins(monkeypatch):
    """No kernel is faster by enough."""
    for name in ("LEAD", "GAIN"):
        monkeypatch.setattr(price, name, 100.0)
    price._of_problem.cache_clear()
    yield
    price._of_problem.cache_clear()


def test_what_xla_runs_is_what_it_was(xla_wins):
    args = avals((64, 56, 56, 64), (3, 3, 64, 64), (64,))

    def fn(x, w, b):
        return jax.nn.relu(conv(x, w) + b)  # which cuDNN computes in one kernel

    report = cutjax.explain(cutjax.fuse(fn), platform="cuda")(*args)
    assert [(found.runs, found.product.split(" at ")[0]) for found in report.fusion] == [
        ("XLA", "bf16[64, 56, 56, 64] x bf16[3, 3, 64, 64]")
    ]
    assert "conv_general_dilated" in equations(cutjax.fuse(fn), *args)
    assert "cutjax" not in str(jax.make_jaxpr(cutjax.fuse(fn))(*args)).replace("name=cutjax", "")


@pytest.mark.parametrize(("size", "channels", "window"), [(56, 144, 3), (14, 672, 5)])
def test_sums_of_norms_are_those_of_depthwise_kernels(size, channels, window):
    """Of a batch norm behind one, and of the derivatives of a norm and its activation before it; on an H200."""

    def normed(x, scale, bias):
        wide = x.astype(jnp.float32)
        mean, square = wide.mean((0, 1, 2)), jnp.square(wide).mean((0, 1, 2))
        return ((wide - mean) * (lax.rsqrt(square - mean**2 + 1e-5) * scale) + bias).astype(BF16)

    def loss(x, w, scale, bias):
        y = conv(jax.nn.silu(normed(x, scale, bias)), w, feature_group_count=channels)
        return normed(y, scale, bias).astype(jnp.float32).sum()

    per_channel = [jax.ShapeDtypeStruct((channels,), jnp.float32)] * 2
    fused = cutjax.fuse(jax.grad(loss, (0, 1, 2, 3)))
    reports = cutjax.explain(fused, platform="cuda", device="NVIDIA H200")(
        *avals((256, size, size, channels), (window, window, 1, channels)), *per_channel
    ).fusion
    sums = [report.epilogue.count("sum(") for report in reports if report.runs == "fused"]
    assert len(sums) == 2
    assert min(sums) >= 2
