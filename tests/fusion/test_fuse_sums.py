"""cutjax.fuse: sums over the rows of images that no product makes."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, scaled

import cutjax
from cutjax.binding import walk

always = functools.partial(cutjax.fuse, policy="always")
BF16, F32 = jnp.bfloat16, jnp.float32
SHAPE = (4, 6, 5, 16)


def sums(fn, *args):
    """Returns the number of sums of each kernel of a program."""
    found, _ = walk.products(fn, args, {}, "cuda")
    return [len(x.eqn.params["expression"].outputs) for x in found if x.eqn.primitive.name == "cutjax_row_sums"]


def batch_norm(x, scale, shift):
    axes = tuple(range(x.ndim - 1))
    wide = x.astype(F32)
    mean = wide.mean(axes)
    var = jnp.square(wide).mean(axes) - jnp.square(mean)
    return ((wide - mean) * (jax.lax.rsqrt(var + 1e-3) * scale) + shift).astype(x.dtype)


def layer_of_two_passes(x, scale, shift):
    """Whose variance is made of the mean: its sum is a kernel of its own."""
    axes = tuple(range(x.ndim - 1))
    wide = x.astype(F32)
    mean = wide.mean(axes, keepdims=True)
    var = jnp.square(wide - mean).mean(axes, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(var + 1e-3) * scale + shift).astype(x.dtype)


def group_norm(x, scale, shift):
    apart = x.reshape(*x.shape[:-1], 4, -1).astype(F32)
    axes = (*range(1, x.ndim - 1), x.ndim)
    mean = apart.mean(axes, keepdims=True)
    var = jnp.square(apart).mean(axes, keepdims=True) - jnp.square(mean)
    y = ((apart - mean) * jax.lax.rsqrt(var + 1e-3)).reshape(x.shape)
    return (y * scale + shift).astype(x.dtype)


def squeeze(y, g):
    """A gate of each image by the mean of its pixels."""
    mean = y.mean(tuple(range(1, y.ndim - 1)), keepdims=True)
    return y * jax.nn.sigmoid(mean @ g)


def loss(norm, x, w, v, g, scale, shift):
    """A product, a norm, an activation, a squeeze and a product."""
    y = jax.lax.sort(x @ w)  # nothing is fused across it
    y = squeeze(jax.nn.silu(norm(y, scale, shift)), g)
    return jnp.square((y @ v).astype(F32)).mean()


def arguments(shape=SHAPE, dtype=BF16):
    c = shape[-1]
    keys = iter(range(20, 40))
    x, w, v, g = (scaled(next(keys), s, dtype) for s in (shape, (c, c), (c, 8), (c, c)))
    return x, w, v, g, 1 + scaled(next(keys), (c,), F32), scaled(next(keys), (c,), F32)


NORMS = {"batch": batch_norm, "two passes": layer_of_two_passes, "group": group_norm}
SHAPES = {"images": SHAPE, "volumes": (2, 3, 4, 5, 16), "an image": (1, 7, 9, 16), "pixels": (4, 1, 1, 16)}
# Plain JAX rounds what it computes to bfloat16 between operations, kernels once (docs/fuse.md).
TOLERANCES = {BF16: 2**-4, F32: 2e-5}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_and_gradients(norm, shape, dtype):
    args = arguments(SHAPES[shape], dtype)
    step = jax.value_and_grad(functools.partial(loss, NORMS[norm]), tuple(range(6)))
    assert len(sums(always(step), *args)) >= 3
    found, expected = always(step)(*args), step(*args)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        close(got.astype(F32), want.astype(F32), TOLERANCES[dtype])


def test_sums_of_the_same_arrays_are_one_kernel():
    """Two moments; the mean behind an activation; of the gradient the gate's, and the norm's."""
    args = arguments()
    step = jax.grad(functools.partial(loss, batch_norm), tuple(range(6)))
    found = sums(always(step), *args)
    assert found[0] == 2
    assert max(found) <= 4
    assert len(sums(always(jax.grad(functools.partial(loss, layer_of_two_passes), 1)), *args)) > len(found) - 2


def test_sums_that_differ_by_their_sign_are_one():
    """And by casts. What multiplies all rows stays inside: sums without it overflow, or lose a NaN."""
    x, w = scaled(1, SHAPE, F32), scaled(2, (16, 16), F32)

    def several(x, w, channel):
        y = jax.lax.sort(x @ w)
        terms = [y, -y, y.astype(BF16).astype(F32), -y * channel]
        return [z.sum(axes) for z in terms for axes in ((1, 2), (0, 1, 2))], x @ w

    channel = scaled(4, (16,), F32)
    assert sums(always(several), x, w, channel) == [2]
    close(always(several)(x, w, channel), several(x, w, channel), 2**-7)  # what is cast to 16 bits and back

    def weighed(x, w, by):
        return (jnp.sort(x) * by).sum((1, 2)), w @ w

    for value, by in ((1e38, 1 / 30), (0.0, np.inf)):
        args = jnp.full(SHAPE, value), w, jnp.full(16, by)
        for f in (weighed, lambda x, w, _, by=by: weighed(x, w, by)):
            np.testing.assert_array_equal(always(f)(*args)[0], f(*args)[0])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_places_of_a_maximum_are_counted_as_it_was_made(dtype):
    """Of what a program rounds, a kernel that does not would find none of them."""
    x, w = scaled(3, (2, 6, 5, 16), dtype), scaled(2, (16, 16), dtype)

    def pooled(x, w):
        return (w @ w).sum().astype(F32) + jax.nn.silu(x * 1.5).max((1, 2)).astype(F32).sum()

    close(always(jax.grad(pooled))(x, w).astype(F32), jax.grad(pooled)(x, w).astype(F32), 2**-6)

    def counted(x, w):
        y = jax.nn.silu(x)
        most = y.max((1, 2), keepdims=True)
        return w @ w, (y == most).astype(F32).sum((1, 2)), jnp.where(y >= most, 1.0, 0.0).sum((1, 2))

    for got, want in zip(always(counted)(x, w)[1:], counted(x, w)[1:], strict=True):
        np.testing.assert_array_equal(got, want)

    def below(x, w):
        y = x * jnp.asarray(1.3, dtype)
        return jnp.sqrt((y - y.min((1, 2), keepdims=True)).astype(F32)).sum((1, 2)), w @ w

    close(always(below)(x, w)[0], below(x, w)[0], 2**-6)
    assert sums(always(lambda x, w: (w @ w, jnp.where(x == x.max((1, 2), keepdims=True), 1.0, 0.0).sum((1, 2)))), x, w)


def test_derivatives_of_a_fused_program():
    """In both modes, of first and second order, are those of plain JAX; vmap and scan too."""
    args = arguments((2, 3, 3, 16), F32)
    plain = functools.partial(loss, batch_norm)
    fused = always(plain)
    assert sums(fused, *args)
    numbers = tuple(range(6))
    close(jax.grad(fused, numbers)(*args), jax.grad(plain, numbers)(*args), 2e-5)
    close(jax.jvp(fused, args, args)[1], jax.jvp(plain, args, args)[1], 2e-5)

    def twice(f):
        return jax.grad(lambda scale: jax.grad(f, 5)(*args[:4], scale, args[5]).sum())(args[4])

    close(twice(fused), twice(plain), 1e-4)
    several = jnp.stack([args[0], 2 * args[0]])
    close(jax.vmap(lambda x: fused(x, *args[1:]))(several), jax.vmap(lambda x: plain(x, *args[1:]))(several), 2e-5)
    mapped = always(lambda x: jax.vmap(lambda x: plain(x, *args[1:]))(x))
    close(mapped(several), jax.vmap(lambda x: plain(x, *args[1:]))(several), 2e-5)

    def scanned(x, *rest):
        return jax.lax.scan(
            lambda c, w: (jax.nn.relu(batch_norm(c @ w, *rest)), c.sum((1, 2))), x, jnp.stack([args[1]] * 3)
        )

    assert sums(always(scanned), args[0], *args[4:])
    close(always(scanned)(args[0], *args[4:]), scanned(args[0], *args[4:]), 2e-5)


def test_a_linear_function_is_transposed():
    x, w = scaled(1, SHAPE, F32), scaled(2, (16, 16), F32)

    def linear(x):
        return (x * w[0]).sum((0, 1, 2)), (x * w[1]).sum((1, 2)) @ w

    assert sums(always(linear), x)
    ct = linear(x)
    close(jax.linear_transpose(always(linear), x)(ct), jax.linear_transpose(linear, x)(ct), 2e-5)


@pytest.mark.parametrize("spec", [jax.P("d"), jax.P(None, "d"), jax.P(None, None, "d"), jax.P(None, None, None, "d")])
def test_images_that_are_divided_stay_where_they_are(spec):
    """Along images, pixels of either axis, and channels: XLA divides what it adds up."""
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x, w = scaled(1, (4, 6, 4, 16), F32), scaled(2, (16, 16), F32)
    x = jax.device_put(x, jax.NamedSharding(mesh, spec))

    def moments(x, w):
        return (jax.nn.silu(x * w[0]).sum((1, 2)), jnp.square(x).sum((0, 1, 2))), w @ w

    fused = always(moments)
    assert sums(fused, x, w)
    text = jax.jit(fused).lower(x, w).compile().as_text()
    assert not re.search(r"\[4,\d+,\d+,\d+\]\S* all-gather", text)
    close(jax.jit(fused)(x, w), moments(x, w), 2e-5)


def test_what_is_summed_in_16_bits_is_added_up_in_float32():
    x, w = scaled(1, (2, 40, 40, 16), BF16), scaled(2, (16, 16), BF16)

    def gates(x, w):
        y = jax.lax.sort(x @ w)
        return jax.lax.reduce_sum_p.bind(y * x, axes=(1, 2), out_sharding=None) @ w

    assert sums(always(gates), x, w) == [1]
    (exact,) = [jnp.einsum("nhwc,nhwc->nc", jax.lax.sort(x @ w).astype(F32), x.astype(F32))]
    close(always(gates)(x, w).astype(F32), (exact.astype(BF16) @ w).astype(F32), 2**-6)


def test_what_is_left_to_xla():
    """Rows of a matrix, sums over columns or images, integers, and few bytes."""
    x, w = scaled(1, SHAPE, F32), scaled(2, (16, 16), F32)

    def after(reduce):
        return lambda x, w: (reduce(jax.lax.sort(x @ w)), x @ w)

    cases = {
        "matrix": lambda y: y.reshape(-1, 16).sum(0),
        "columns": lambda y: jnp.square(y).sum(3),
        "images": lambda y: jnp.square(y).sum(0),
        "all": lambda y: y.sum(),
        "integers": lambda y: y.astype(jnp.int32).sum((1, 2)),
        "greatest": lambda y: y.max((1, 2)),
    }
    for name, reduce in cases.items():
        assert sums(always(after(reduce)), x, w) == [], name
        close(always(after(reduce))(x, w), after(reduce)(x, w), 2e-5)
    for factor in (jnp.arange(6.0)[:, None, None], jax.random.normal(jax.random.key(0), SHAPE)):
        weighed = after(lambda y, factor=factor: (y * factor).sum((1, 2)))
        assert sums(always(weighed), x, w) == [1]
        close(always(weighed)(x, w), weighed(x, w), 2e-5)
    drawn = after(lambda y: (y * jax.random.normal(jax.random.key(0), y.shape)).sum((1, 2)))
    close(always(drawn)(x, w), drawn(x, w), 2e-5)
    moments = after(lambda y: (y.sum((1, 2)), jnp.square(y).sum((1, 2))))
    assert sums(always(moments), x, w) == [2]
    assert sums(cutjax.fuse(moments), x, w) == []  # it is small
