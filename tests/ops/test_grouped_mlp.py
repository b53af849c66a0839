"""grouped_mlp alone: rows of no group, hostile sizes, and what its backward pass runs. Else: the battery."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, compare, mesh_of, problems, saved, scaled, squares, types
from oracles import grouped_mlp as plain

import cutjax

M, K, F, N, G = 9, 8, 16, 6, 4
SIZES = jnp.array([3, 0, 4, 1])  # the last row is of no group
H = jnp.bfloat16
POLICIES = jax.checkpoint_policies


X, W1, W2, GATE = scaled(0, (M, K)), scaled(1, (G, K, F)), scaled(2, (G, F, N)), scaled(3, (G, K, F))
SCALE = jnp.abs(scaled(4, (M, 1)))
ARGS = X, W1, W2, GATE, SCALE


def fused(x, w1, w2, gate, scale):
    return cutjax.grouped_mlp(x, w1, w2, SIZES, gate=gate, row_scale=scale)


def reference(x, w1, w2, gate, scale):
    return plain(x, w1, w2, SIZES, gate, scale)


def gradient(f):
    return jax.value_and_grad(squares(f), range(5))


def test_layout_and_offset():
    """Weights of groups 1 and 2 of four, transposed."""
    args = [X, *(w[1:3] for w in (W1, W2, GATE)), SCALE]

    def fused(x, w1, w2, gate, scale):
        return cutjax.grouped_mlp(
            x, w1.mT, w2.mT, SIZES, gate=gate.mT, row_scale=scale, layout="nt", group_offset=jnp.array([1])
        )

    def reference(x, w1, w2, gate, scale):
        w1, w2, gate = (jnp.pad(w, ((1, 1), (0, 0), (0, 0))) for w in (w1, w2, gate))
        return plain(x, w1, w2, SIZES, gate, scale)  # the gelu of zero is zero

    compare(gradient, (fused, reference), args, 1e-5)


def test_nothing_of_rows_of_no_group_reaches_a_gradient():
    gradient = jax.jit(jax.grad(squares(fused), range(5)))
    poisoned = tuple(x.at[-1].set(jnp.nan) if x.shape[0] == M else x for x in ARGS)
    found = gradient(*poisoned)
    assert all(np.isfinite(x).all() for x in found)
    close(found, gradient(*ARGS))


def test_hostile_sizes():
    sizes = np.array([-3, 4, np.iinfo(np.int32).max, 2])
    hostile, clamped = jnp.array(sizes), jnp.array([0, 4, M - 4, 0])
    functions = (lambda *args: cutjax.grouped_mlp(*args, hostile), lambda *args: plain(*args, clamped))
    compare(lambda f: jax.grad(squares(f), (0, 1, 2)), functions, (X, W1, W2), 1e-5)


def test_batches():
    """All with a batch axis, that of the weights of size 1; rows of another number in each."""
    args = jnp.stack([X, X + 1]), W1[None], W2[None], GATE[None], SCALE
    sizes = jnp.stack([SIZES, SIZES[::-1]])

    def fused(x, w1, w2, gate, scale):
        return cutjax.grouped_mlp(x, w1, w2, sizes, gate=gate, row_scale=scale)

    def reference(x, w1, w2, gate, scale):
        return jnp.stack([plain(x[i], w1[0], w2[0], sizes[i], gate[0], scale) for i in range(2)])

    compare(gradient, (fused, reference), args, 1e-5)


def test_activation_that_captures_what_is_differentiated():
    def take(layer):
        def value(slope, x):
            def leaky(z):
                return jnp.where(z > 0, z, slope * z)

            return layer(x, W1, W2, SIZES, activation=leaky, row_scale=SCALE).sum()

        return jax.grad(value, (0, 1))

    compare(take, (cutjax.grouped_mlp, plain), (jnp.full((F,), 0.1), X), 1e-5)


def test_shard_map():
    """Groups over i, what lies between the products over j."""
    mesh, p = mesh_of(i=2, j=4), jax.P

    def split(x, w1, w2, gate, scale):
        offset = jax.lax.axis_index("i") * (G // 2)
        y = cutjax.grouped_mlp(x, w1, w2, SIZES, gate=gate, row_scale=scale, group_offset=offset)
        return jax.lax.psum(y, ("i", "j"))

    specs = p(), p("i", None, "j"), p("i", "j"), p("i", None, "j"), p()
    inside = jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=p())
    compare(gradient, (inside, reference), ARGS, 1e-5)


# What runs, and what is kept.

HX, HW1, HW2, HGATE = (scaled(i, s, H) for i, s in enumerate(((64, 128), (G, 128, 256), (G, 256, 32), (G, 128, 256))))
HSCALE, HSIZES = jnp.full((64, 1), 0.5), jnp.array([20, 0, 31, 7])


def layer(x, w1, w2, gate, row_scale, **options):
    return cutjax.grouped_mlp(x, w1, w2, HSIZES, gate=gate, row_scale=row_scale, activation=jax.nn.silu, **options)


HARGS = HX, HW1, HW2, HGATE, HSCALE
BETWEEN = "bf16[64,256]"


def test_backward_runs_the_derivative_of_the_activation_in_a_kernel():
    products = [
        (64, 256, 128, "nn", (BETWEEN,) * 3),  # what is between, and both preactivations
        (64, 32, 256, "nn", ()),
        (256, 32, 64, "tn", ()),  # of w2
        (64, 256, 32, "nt", (BETWEEN, BETWEEN, "f32[64]")),  # of both preactivations, and of the scale
        (128, 256, 64, "tn", ("bf16[4,128,256]",) * 2),  # of both weights
        (64, 128, 2 * 256, "nt", ()),  # of x, a sum of two
    ]
    assert problems(gradient(layer), *HARGS) == sorted(products)
    products[3] = (64, 256, 32, "nt", (BETWEEN,) * 2)
    assert problems(jax.value_and_grad(squares(layer), range(4)), *HARGS) == sorted(products)
    assert problems(layer, *HARGS) == [(64, 32, 256, "nn", ()), (64, 256, 128, "nn", (BETWEEN,))]


def test_nothing_elementwise_is_left_between_the_products():
    """Under grad no array of the size of what is between is read or written but by products."""
    jaxpr = jax.jit(jax.grad(squares(layer), range(4))).trace(*HARGS).jaxpr
    touched = {
        eqn.primitive.name for eqn in jaxpr.eqns for x in (*eqn.invars, *eqn.outvars) if x.aval.shape == (64, 256)
    }
    assert touched == {"cutjax_grouped_gemm", "cutjax_grouped_outer", "cutjax_sum", "name"}


def test_forward_mode_is_plain_products():
    found = problems(lambda *args: jax.jvp(layer, args, args), *HARGS)
    assert [p[-1] for p in found if p[-1]] == [(BETWEEN,) * 2, (BETWEEN,) * 2, (BETWEEN,) * 3]
    assert len(found) == 1 + 1 + 2 + 2  # between; y; the tangents; those of both preactivations in x, and in weights


def between(capsys, fn):
    """Types of the residuals of the size of what is between; beside them there are some of one value a row."""
    return [x for x in types(saved(capsys, fn, *HARGS)) if "64,256]" in x]


def test_what_is_saved(capsys):
    assert between(capsys, layer) == [BETWEEN] * 3
    assert between(capsys, functools.partial(layer, save="recompute")) == []
    for names, count in (((), 0), (("cutjax_preactivation",), 2), (("cutjax_preactivation", "cutjax_hidden"), 3)):
        f = jax.checkpoint(layer, policy=POLICIES.save_only_these_names(*names))
        assert between(capsys, f) == [BETWEEN] * count


def test_dtypes():
    assert layer(*HARGS).dtype == H
    assert layer(*HARGS, out_dtype=jnp.float32).dtype == jnp.float32
    close(layer(*HARGS, out_dtype=jnp.float32, backend="xla").astype(H), layer(*HARGS))


REFUSED = [
    (ValueError, "grouped_mlp: unknown layout 'tn'", {"layout": "tn"}),
    (ValueError, "grouped_mlp: unknown save 'all'", {"save": "all"}),
    (ValueError, "grouped_mlp: unknown backend 'gpu'", {"backend": "gpu"}),
    (ValueError, r"grouped_mlp: x is \(9, 8\), w1 is \(4, 16, 8\), layout 'nn': k differs", {"w1": W1.mT}),
    (ValueError, r"grouped_mlp: w1 is \(4, 8, 16\), w2 is \(4, 6, 16\), layout 'nn': h differs", {"w2": W2.mT}),
    (ValueError, r"grouped_mlp: gate is float32\[4,8,15\], but w1 is", {"gate": GATE[..., :-1]}),
    (ValueError, r"of as many groups, .* w1 is \(4, 8, 16\), w2 is \(3, 16, 6\)", {"w2": W2[:3]}),
    (ValueError, r"of as many groups, .* w1 is \(8, 16\)", {"w1": W1[0]}),
    (ValueError, r"numbers of groups differ: group_sizes is \(3,\), w1 is \(4, 8, 16\)", {"group_sizes": SIZES[:3]}),
    (TypeError, "grouped_mlp: group_sizes must be integers", {"group_sizes": SIZES.astype(float)}),
    (
        ValueError,
        "grouped_mlp: batch axes do not broadcast",
        {"x": scaled(0, (2, M, K)), "w1": scaled(0, (3, G, K, F))},
    ),
    (TypeError, "grouped_mlp: w2 is bfloat16, but the product of x and w1 is float32", {"w2": W2.astype(H)}),
    (ValueError, "the activation must return one array", {"activation": lambda z: (z, z)}),
    (ValueError, r"row_scale is \(4, 1\), which does not broadcast against \(9, 1\)", {"row_scale": SCALE[:4]}),
    (ValueError, r"row_scale is \(9, 16\), which does not", {"row_scale": jnp.ones((M, F))}),
]


@pytest.mark.parametrize(("error", "match", "options"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_refused(error, match, options):
    with pytest.raises(error, match=match):
        cutjax.grouped_mlp(**({"x": X, "w1": W1, "w2": W2, "group_sizes": SIZES} | options))
