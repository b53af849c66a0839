"""What is special to linear_cross_entropy: chunks, shifts, labels, dtypes, devices, what it keeps and lowers to."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from checks import close, mesh_of, normal

import cutjax
from cutjax.primitives import vocabulary

P = jax.P
T, D, V = 300, 16, 260  # of which a shift is taken from the first 256 columns


def inputs(dtype=jnp.float32, scale=1.0):
    x, w, b = normal(0, (T, D)) * scale, normal(1, (D, V)) / 4, normal(2, (V,))
    return x.astype(dtype), w.astype(dtype), b, jnp.arange(T, dtype=jnp.int32) * 7 % V


@pytest.fixture
def small_chunks(monkeypatch):
    """Rows in chunks of 128: three, the last of which is not full."""
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", 128 * V * 4)


def both(fn, *args):
    return jax.jit(jax.value_and_grad(fn, (0, 1, 2)))(*args)


OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "z_loss": 1e-3},
    "capped": {"softcap": 3.0, "z_loss": 1e-3},
    "none": {"reduction": "none", "softcap": 3.0},
    "smoothed": {"label_smoothing": 0.1, "softcap": 3.0},
}


@pytest.mark.parametrize("scale", [1, 300], ids=["near", "far"])  # of logits, from those of the first columns
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks(options, scale, small_chunks):
    x, w, b, y = inputs(scale=scale)
    w = w.at[:, 256:].multiply(4)
    where = np.arange(T) % 3 > 0

    def total(f, x, w, b):
        found = f(x, w, y, bias=b, where=where, **OPTIONS[options])
        return (found * jnp.cos(jnp.arange(found.size, dtype=jnp.float32))).sum()

    ours, plain = (
        both(functools.partial(total, f), x, w, b) for f in (cutjax.linear_cross_entropy, oracles.linear_cross_entropy)
    )
    close(ours, plain, 1e-5)


def test_as_optax():
    x, w, _, y = inputs()

    def theirs(x, w, reduction):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, y)
        return losses.mean() if reduction == "mean" else losses

    for reduction in ("mean", "none"):
        mine = jax.jit(functools.partial(cutjax.linear_cross_entropy, reduction=reduction))(x, w, y)
        close(mine, jax.jit(theirs, static_argnums=2)(x, w, reduction), 1e-6)
    smooth = optax.softmax_cross_entropy(x @ w, optax.smooth_labels(jax.nn.one_hot(y, V), 0.2)).mean()
    close(cutjax.linear_cross_entropy(x, w, y, label_smoothing=0.2), smooth, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8], ids=str)
def test_labels_outside_of_the_vocabulary(dtype):
    """Those from the end count, others are NaN, of loss and label alone: gradients are optax's."""
    x, w, _, _ = inputs()
    w = w[:, :100]
    y = jnp.array([0, 99, 100, 127, *([-1, -100, -101] if dtype != jnp.uint8 else [255])]).astype(dtype)
    x = x[: y.shape[0]]

    def theirs(x, w):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, y)

    def ours(x, w):
        return cutjax.linear_cross_entropy(x, w, y, reduction="none")

    got, expected = jax.jit(ours)(x, w), jax.jit(theirs)(x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert np.isnan(got).sum() == (2 if dtype == jnp.uint8 else 3) + (dtype == jnp.uint8)
    total = lambda f: jax.jit(jax.grad(lambda *args: f(*args).sum(), (0, 1)))(x, w)  # noqa: E731
    close(total(ours), total(theirs), 1e-5)
    fast = total(lambda x, w: cutjax.linear_cross_entropy(x, w, y, reduction="sum"))
    close(fast, total(theirs), 1e-5)


def test_what_does_not_count_may_be_anything():
    x, w, b, y = inputs()
    where = jnp.arange(T) % 3 > 0
    bad = jnp.where(where[:, None], x, jnp.nan), jnp.where(where, y, -100)

    def loss(x, w, b, y):
        return cutjax.linear_cross_entropy(x, w, y, bias=b, where=where)

    got, expected = both(loss, bad[0], w, b, bad[1]), both(loss, x, w, b, y)
    close(got, expected, 1e-6)
    losses = cutjax.linear_cross_entropy(bad[0], w, bad[1], where=where, reduction="none")
    assert (np.asarray(losses != 0) == np.asarray(where)).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_of_no_token_is_nan_and_its_gradients_zeros(smoothing):
    for x, where in ((jnp.ones((4, 8)), np.zeros(4, bool)), (jnp.ones((4, 8)), False), (jnp.ones((0, 8)), None)):
        y = jnp.zeros(len(x), jnp.int32)
        loss, gradients = jax.value_and_grad(
            lambda x, w, y=y, where=where: cutjax.linear_cross_entropy(x, w, y, where=where, label_smoothing=smoothing),
            (0, 1),
        )(x, jnp.ones((8, 12)))
        assert jnp.isnan(loss)
        assert not any(g.any() for g in gradients)


def test_logits_of_no_product():
    x, w, y, b = jnp.ones((4, 0)), jnp.ones((0, 12)), jnp.arange(4), normal(0, (12,))
    loss, gradient = jax.value_and_grad(lambda b: cutjax.linear_cross_entropy(x, w, y, bias=b))(b)
    close(loss, jax.nn.logsumexp(b) - b[:4].mean(), 1e-6)
    close(gradient, jax.nn.softmax(b) - jax.nn.one_hot(y, 12).mean(0), 1e-6)


def test_columns_that_are_masked_by_the_bias():
    """As padded vocabularies are, the first columns, of which the shift is taken, among them."""
    x, w, b, y = inputs()
    b = b.at[:257].set(-jnp.inf)
    y = 257 + y % 3
    got = both(lambda x, w, b: cutjax.linear_cross_entropy(x, w, y, bias=b), x, w, b)
    expected = both(lambda x, w, b: oracles.linear_cross_entropy(x, w, y, b), x, w, b)
    close(got, expected, 1e-5)
    assert (np.asarray(got[1][1])[:, :257] == 0).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_second_derivatives_in_a_loop(options):
    """JAX divides a scan into what depends on its carry and what does not, and differentiates each again."""
    x, w, b, y = inputs()
    x, w, b, y = x[:12], w[:, :12], b[:12], y[:12] % 12

    def derivatives(f, x, w, b):
        def total(x, w, scale):
            def step(sums, t):
                found = f(jnp.tanh(x) * t, w, y, bias=b, **OPTIONS[options])
                return sums + scale * found.sum(), None

            return jax.lax.scan(step, 0.0, jnp.arange(1.0, 3.0))[0]

        twice = jax.grad(lambda x: jnp.sin(jax.grad(total)(x, w, 1.0)).sum())(x)
        beside = jax.grad(lambda w: jax.grad(total, 2)(x, w, 1.0))(w)
        return twice, beside, jax.jvp(jax.grad(lambda x: total(x, w, 1.0)), (x,), (x,))[1]

    ours, plain = (
        jax.jit(functools.partial(derivatives, f))(x, w, b)
        for f in (cutjax.linear_cross_entropy, oracles.linear_cross_entropy)
    )
    close(ours, plain, 1e-4)


@pytest.mark.parametrize("lse", [-1.0, -1.0 - 2**-23, -0.99999, -1.01])
def test_z_loss_whose_slope_ends_that_of_the_loss(lse):
    """Where 1 + 2 z log(sum) is zero or near, the gradient of the logits is all at the label."""
    x, w, y = jnp.ones((3, 1)), jnp.full((1, 4), lse - math.log(4), jnp.float32), jnp.arange(3)

    def gradients(f):
        return jax.jit(jax.grad(lambda x, w: f(x, w, y, z_loss=0.5, reduction="sum"), (0, 1)))(x, w)

    close(gradients(cutjax.linear_cross_entropy), gradients(oracles.linear_cross_entropy), 1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_that_do_not_count_may_have_labels_that_the_bias_masks(options):
    """As padding is, by the label of a token that is never to be said."""
    x, w, b, y = inputs()
    b, where = b.at[:2].set(-jnp.inf), np.arange(T) % 3 > 0
    y = jnp.where(where, y.clip(2), 0)
    options = {"reduction": "mean", **OPTIONS[options], "label_smoothing": 0.0}

    def total(f, x, w, b):
        return f(x, w, y, bias=b, where=where, **options).sum()

    ours, plain = (
        both(functools.partial(total, f), x, w, b) for f in (cutjax.linear_cross_entropy, oracles.linear_cross_entropy)
    )
    assert np.isfinite(ours[0])
    close(ours[0], plain[0], 1e-5)
    assert all(np.isfinite(g).all() for g in ours[1])


def test_fuse_leaves_its_logits_in_their_dtype():
    x, w, _, y = inputs(jnp.bfloat16)
    step = jax.value_and_grad(lambda x, w: cutjax.linear_cross_entropy(x, w, y), (0, 1))
    fused = cutjax.fuse(step, fp8=cutjax.fp8_dot_general("row", policy="always"))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(fused)(x, w), jax.jit(step)(x, w))


def test_vocabularies_of_any_size():
    """Of a size that is known when the program runs; not one that labels cannot count."""
    x, w, _, y = inputs()
    fn = jax.jit(jax.value_and_grad(lambda x, w, y: cutjax.linear_cross_entropy(x, w, y, z_loss=0.1), (0, 1)))
    (v,) = jax.export.symbolic_shape("v")
    y = y.astype(jnp.uint8)[:8] % 90
    avals = jax.ShapeDtypeStruct((8, D), x.dtype), jax.ShapeDtypeStruct((D, v), w.dtype), y
    exported = jax.export.export(fn)(*avals)
    for size in (90, 260):
        args = x[:8], w[:, :size], y
        close(exported.call(*args), fn(*args), 1e-6)
    avals = avals[0], jax.ShapeDtypeStruct((D, 2**31), w.dtype), y
    with pytest.raises(ValueError, match="linear_cross_entropy: 2,147,483,648 columns of the logits"):
        jax.eval_shape(fn, *avals)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_sixteen_bits(dtype, small_chunks):
    """The loss is that of the product in float32; gradients err as much as a rounding or two of each element."""
    x, w, b, y = inputs(dtype)
    got = both(lambda x, w, b: cutjax.linear_cross_entropy(x, w, y, bias=b), x, w, b)
    expected = both(
        lambda x, w, b: oracles.linear_cross_entropy(x, w, y, b), *(v.astype(jnp.float32) for v in (x, w, b))
    )
    assert [v.dtype for v in jax.tree.leaves(got)] == [jnp.float32, dtype, dtype, jnp.float32]
    close(got[0], expected[0], 1e-6)
    for mine, exact in zip(got[1], expected[1], strict=True):
        error = np.asarray(mine.astype(jnp.float32) - exact)
        assert np.linalg.norm(error) < 2 * float(jnp.finfo(dtype).eps) * np.linalg.norm(exact)


def test_no_logits_in_memory(small_chunks):
    """Under jit, forward and backward, nothing is as large as the logits; an operand that is frozen has no gradient."""
    x, w, _, y = inputs()

    def sizes(fn, *args):
        text = jax.jit(fn).lower(*args).as_text()
        return {tuple(map(int, shape.split("x")[:-1])) for shape in re.findall(r"tensor<([\dx]+x\w+)>", text)}

    loss = lambda x, w: cutjax.linear_cross_entropy(x, w, y)  # noqa: E731
    for fn in (loss, jax.grad(loss, (0, 1)), lambda *a: cutjax.linear_cross_entropy(*a, y, reduction="none")):
        found = sizes(fn, x, w)
        assert (128, V) in found
        assert not found & {(T, V), (384, V), (3, 128, V)}
    assert (D, V) in sizes(jax.grad(loss, 1), x, w)
    assert not any(math.prod(shape) == D * V for shape in sizes(jax.grad(loss), x, w) - {(D, V)})


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_cuda(layout):
    """Three kernels of a chunk: the powers and their sums, the gradient of x, and that of w, added to where it is."""
    of = jax.ShapeDtypeStruct
    rows, d, vocabulary = 4096, 1024, 128256
    shape = (d, vocabulary) if layout == "nn" else (vocabulary, d)
    args = of((rows, d), jnp.bfloat16), of(shape, jnp.bfloat16), of((rows,), jnp.int32)
    fn = jax.value_and_grad(functools.partial(cutjax.linear_cross_entropy, layout=layout, backend="cuda"), (0, 1))
    found = {(row.choice.problem.m, row.choice.problem.n, row.choice.problem.k): row for row in explained(fn, *args)}
    of_w = (d, vocabulary) if layout == "nn" else (vocabulary, d)
    chunks = (1024,)
    assert set(found) == {
        sizes
        for chunk in chunks
        for sizes in ((chunk, 256, d), (chunk, vocabulary, d), (chunk, d, vocabulary), (*of_w, chunk))
    }
    assert all(found[chunk, vocabulary, d].choice.served for chunk in chunks)


def explained(fn, *args):
    return cutjax.explain(fn, platform="cuda")(*args).rows


# Devices.


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("options", ["mean", "smoothed"])
def test_vocabulary_over_an_axis(options, check_vma, small_chunks):
    x, w, b, y = inputs()
    w, b, y = w[:, :240], b[:240], (y % 240).at[3].set(-1)
    mesh = mesh_of(i=2, v=4)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("i"), P(None, "v"), P("v"), P("i")),
        out_specs=P(),
        check_vma=check_vma,
    )
    def divided(x, w, b, y):
        total = cutjax.linear_cross_entropy(x, w, y, bias=b, axis_name="v", **OPTIONS[options])
        return jax.lax.pmean(total, "i")

    def derivatives(f):
        """Of first and second order, the latter along x, w and b themselves, and transposed."""
        first = jax.grad(f, (0, 1, 2))
        along = jax.jvp(first, (x, w, b), (x, w, b))
        return f(x, w, b), along, jax.vjp(first, x, w, b)[1]((x, w, b))

    ours = jax.jit(functools.partial(derivatives, lambda x, w, b: divided(x, w, b, y)))()
    plain = functools.partial(oracles.linear_cross_entropy, **OPTIONS[options])
    close(ours, jax.jit(functools.partial(derivatives, lambda x, w, b: plain(x, w, y, b)))(), 1e-5)


@pytest.mark.parametrize("spec", [(P("i"), P()), (P(), P(None, "i")), (P("i"), P(None, "j"))], ids=str)
def test_under_jit(spec):
    x, w, b, y = inputs()
    mesh = mesh_of(i=2, j=2)
    x, w = (jax.device_put(v, jax.NamedSharding(mesh, s)) for v, s in zip((x, w), spec, strict=True))
    with jax.set_mesh(mesh):
        ours = both(lambda x, w, b: cutjax.linear_cross_entropy(x, w, y, bias=b), x, w, b)
    x, w = map(np.asarray, (x, w))
    close(ours, both(lambda x, w, b: oracles.linear_cross_entropy(x, w, y, b), x, w, b), 1e-5)


# Refusals.

REFUSED = {
    "labels": (lambda x, w, y: (x, w, y[:-1]), {}, "one for each token"),
    "floats": (lambda x, w, y: (x, w, y.astype(jnp.float32)), {}, "must be integers"),
    "w": (lambda x, w, y: (x, w[None], y), {}, "must have rank 2"),
    "sizes": (lambda x, w, y: (x, w.T, y), {}, "contracting dimensions differ"),
    "integers": (lambda x, w, y: (x.astype(jnp.int32), w.astype(jnp.int32), y), {}, "floating-point"),
    "bias": (None, {"bias": np.ones(3, np.float32)}, "one for each column"),
    "where": (None, {"where": np.ones(T, np.float32)}, "must be booleans"),
    "where's shape": (None, {"where": np.ones(7, bool)}, "does not broadcast"),
    "smoothing": (None, {"label_smoothing": 1.5}, "at most 1"),
    "softcap": (None, {"softcap": 0}, "above 0"),
    "a traced option": (None, {"z_loss": np.ones(2)}, "must be a number"),
    "reduction": (None, {"reduction": "max"}, "unknown reduction"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    change, options, why = REFUSED[name]
    x, w, _, y = inputs()
    args = change(x, w, y) if change else (x, w, y)
    with pytest.raises((TypeError, ValueError), match=f"^linear_cross_entropy: .*{why}"):
        cutjax.linear_cross_entropy(*args, **options)
