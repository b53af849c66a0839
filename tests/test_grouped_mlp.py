"""grouped_mlp against its form in plain JAX under every transformation, and what its backward pass runs."""

from __future__ import annotations

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

import cutjax

M, K, F, N, G = 9, 8, 16, 6, 4
SIZES = jnp.array([3, 0, 4, 1])  # the last row is of no group
H = jnp.bfloat16
POLICIES = jax.checkpoint_policies


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) / shape[-2] ** 0.5).astype(dtype)


def close(got, expected, tolerance=1e-5):
    def check(x, y):
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1, np.abs(y).max(initial=0)))

    jax.tree.map(check, got, expected)


X, W1, W2, GATE = normal(0, (M, K)), normal(1, (G, K, F)), normal(2, (G, F, N)), normal(3, (G, K, F))
SCALE = jax.random.uniform(jax.random.key(4), (M, 1))
ARGS = {
    "plain": {"x": X, "w1": W1, "w2": W2},
    "gated": {"x": X, "w1": W1, "w2": W2, "gate": GATE},
    "scaled": {"x": X, "w1": W1, "w2": W2, "row_scale": SCALE},
    "gated, scaled": {"x": X, "w1": W1, "w2": W2, "gate": GATE, "row_scale": SCALE},
}


def plain(x, w1, w2, gate=None, row_scale=None, activation=jax.nn.gelu, sizes=SIZES):
    """Rows gather their weights; only those that have a group count."""
    ends = jnp.cumsum(sizes)
    has = (jnp.arange(x.shape[0]) < ends[-1])[:, None]
    group = jnp.minimum(jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right"), sizes.shape[0] - 1)

    def product(x, w):
        return jnp.einsum("mk,mkn->mn", x, w[group])

    x = jnp.where(has, x, 0)
    z = product(x, w1)
    h = activation(z) if gate is None else activation(product(x, gate)) * z
    y = product(h, w2) * (1 if row_scale is None else jnp.where(has, row_scale, 0))
    return jnp.where(has, y, 0)


def pair(name, **options):
    """grouped_mlp and its plain form, as functions of the sizes and the arguments' values."""
    args = ARGS[name]

    def fused(sizes, *values):
        named = dict(zip(args, values, strict=True))
        return cutjax.grouped_mlp(named.pop("x"), named.pop("w1"), named.pop("w2"), sizes, **named, **options)

    def reference(sizes, *values):
        return plain(**dict(zip(args, values, strict=True)), sizes=sizes)

    return fused, reference, tuple(args.values())


def loss(f):
    return lambda *args: (f(*args).astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize(
    ("name", "save"), [*((name, "default") for name in ARGS), ("scaled", "recompute"), ("gated, scaled", "recompute")]
)
def test_derivatives(name, save):
    got, expected, args = pair(name, save=save)
    got, expected = (functools.partial(f, SIZES) for f in (got, expected))
    g = normal(6, (M, N))
    dots = tuple(normal(20 + i, x.shape) for i, x in enumerate(args))

    def gradient(f):
        return lambda *args: jax.vjp(f, *args)[1](g)

    def each(transform):
        return [jax.jit(transform(f))(*args) for f in (got, expected)]

    close(got(*args), expected(*args))
    close(*each(lambda f: lambda *args: jax.jvp(f, args, dots)))
    close(*each(gradient))
    close(*each(lambda f: lambda *args: jax.jvp(gradient(f), args, dots)), 1e-4)
    close(*each(lambda f: lambda *args: jax.vjp(gradient(f), *args)[1](dots)), 1e-4)


def test_gradient_of_each_argument_alone():
    got, expected, args = pair("gated, scaled")
    for i in range(len(args)):
        close(*(jax.jit(jax.grad(loss(functools.partial(f, SIZES)), i))(*args) for f in (got, expected)))


def test_layout_and_offset():
    """Weights of groups 1 and 2 of four, transposed."""
    args = [X, *(w[1:3] for w in (W1, W2, GATE)), SCALE]

    def fused(x, w1, w2, gate, scale):
        return cutjax.grouped_mlp(
            x, w1.mT, w2.mT, SIZES, gate=gate.mT, row_scale=scale, layout="nt", group_offset=jnp.array([1])
        )

    def reference(x, w1, w2, gate, scale):
        w1, w2, gate = (jnp.pad(w, ((1, 1), (0, 0), (0, 0))) for w in (w1, w2, gate))
        return plain(x, w1, w2, gate, scale)  # the gelu of zero is zero

    grads = [jax.jit(jax.value_and_grad(loss(f), tuple(range(5))))(*args) for f in (fused, reference)]
    close(*grads)


def test_nothing_of_rows_of_no_group_reaches_a_gradient():
    got, _, args = pair("gated, scaled")
    gradient = jax.jit(jax.grad(loss(functools.partial(got, SIZES)), tuple(range(len(args)))))
    poisoned = tuple(x.at[-1].set(jnp.nan) if x.shape[0] == M else x for x in args)
    found = gradient(*poisoned)
    assert all(np.isfinite(x).all() for x in found)
    close(found, gradient(*args))


def test_hostile_sizes():
    sizes = np.array([-3, 4, np.iinfo(np.int32).max, 2])
    gradient = jax.jit(jax.grad(lambda *args: loss(cutjax.grouped_mlp)(*args, jnp.array(sizes)), (0, 1, 2)))
    clamped = jax.grad(loss(lambda *args: plain(*args, sizes=jnp.array([0, 4, M - 4, 0]))), (0, 1, 2))
    close(gradient(X, W1, W2), clamped(X, W1, W2))


@pytest.mark.parametrize("mapped", ["x", "sizes", "w1", "row_scale", "x sizes row_scale", "x sizes w2 gate"])
def test_vmap(mapped):
    got, expected, args = pair("gated, scaled")
    names, values = ["sizes", *ARGS["gated, scaled"]], (SIZES, *args)
    dims = tuple((1 if key == "x" else 0) if key in mapped.split() else None for key in names)
    values = tuple(x if d is None else jnp.stack([x, x[::-1]], d) for x, d in zip(values, dims, strict=True))
    real = tuple(range(1, len(values)))

    def each(transform, tolerance=1e-4):
        close(*(jax.jit(transform(f))(*values) for f in (got, expected)), tolerance)

    each(lambda f: jax.value_and_grad(loss(jax.vmap(f, dims)), real))
    each(lambda f: jax.vmap(jax.grad(loss(f), real), dims))
    if " " in mapped:
        each(lambda f: lambda *args: jax.jvp(functools.partial(jax.vmap(f, dims), args[0]), args[1:], args[1:])[1])


def test_batches():
    """All with a batch axis, that of the weights of size 1; rows of another number in each."""
    args = jnp.stack([X, X + 1]), W1[None], W2[None], GATE[None], SCALE
    sizes = jnp.stack([SIZES, SIZES[::-1]])

    def fused(x, w1, w2, gate, scale):
        return cutjax.grouped_mlp(x, w1, w2, sizes, gate=gate, row_scale=scale)

    def reference(x, w1, w2, gate, scale):
        return jnp.stack([plain(x[i], w1[0], w2[0], gate[0], scale, sizes=sizes[i]) for i in range(2)])

    close(*(jax.jit(jax.value_and_grad(loss(f), tuple(range(5))))(*args) for f in (fused, reference)))


def test_activation_that_captures_what_is_differentiated():
    def value(layer, slope, x):
        def leaky(z):
            return jnp.where(z > 0, z, slope * z)

        return layer(x, W1, W2, activation=leaky, row_scale=SCALE).sum()

    def fused(x, w1, w2, **options):
        return cutjax.grouped_mlp(x, w1, w2, SIZES, **options)

    args = jnp.full((F,), 0.1), X
    close(*(jax.jit(jax.grad(functools.partial(value, f), (0, 1)))(*args) for f in (fused, plain)))


def test_inside_scan_and_checkpoint():
    w1, w2 = normal(1, (3, G, K, F)), normal(2, (3, G, F, K))

    def value(layer, x, w1, w2):
        return (jax.lax.scan(lambda h, ws: (layer(h, *ws), None), x, (w1, w2))[0] ** 2).sum()

    def fused(x, w1, w2):
        return cutjax.grouped_mlp(x, w1, w2, SIZES)

    def grads(layer):
        return jax.jit(jax.grad(functools.partial(value, layer), (0, 1, 2)))(X, w1, w2)

    close(grads(fused), grads(plain), 1e-4)
    close(grads(jax.checkpoint(fused)), grads(plain), 1e-4)


def test_shard_map():
    """Groups over i, what lies between the products over j."""
    mesh = jax.make_mesh((2, 4), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    p = jax.P

    def split(x, w1, w2, gate, scale):
        offset = jax.lax.axis_index("i") * (G // 2)
        y = cutjax.grouped_mlp(x, w1, w2, SIZES, gate=gate, row_scale=scale, group_offset=offset)
        return jax.lax.psum(y, ("i", "j"))

    specs = p(), p("i", None, "j"), p("i", "j"), p("i", None, "j"), p()
    inside = jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=p())
    args = X, W1, W2, GATE, SCALE
    close(*(jax.jit(jax.value_and_grad(loss(f), tuple(range(5))))(*args) for f in (inside, plain)))


# What runs, and what is kept.

HX, HW1, HW2, HGATE = (normal(i, s, H) for i, s in enumerate(((64, 128), (G, 128, 256), (G, 256, 32), (G, 128, 256))))
HSCALE, HSIZES = jnp.full((64, 1), 0.5), jnp.array([20, 0, 31, 7])


def layer(x, w1, w2, gate, row_scale, **options):
    return cutjax.grouped_mlp(x, w1, w2, HSIZES, gate=gate, row_scale=row_scale, activation=jax.nn.silu, **options)


HARGS = HX, HW1, HW2, HGATE, HSCALE
BETWEEN = "bf16[64,256]"


def problems(fn, *args):
    """The products of a function, fused ones with their results."""
    found = []
    for row in cutjax.explain(fn)(*args).rows:
        p = row.choice.problem
        found += [(p.m, p.n, p.k, p.layout, row.outputs)] * row.count
    return sorted(found)


def test_backward_runs_the_derivative_of_the_activation_in_a_kernel():
    products = [
        (64, 256, 128, "nn", (BETWEEN,) * 3),  # what is between, and both preactivations
        (64, 32, 256, "nn", ()),
        (256, 32, 64, "tn", ()),  # of w2
        (64, 256, 32, "nt", (BETWEEN,) * 3),  # of both preactivations, and what adds up to that of the scale
        *[(128, 256, 64, "tn", ())] * 2,
        *[(64, 128, 256, "nt", ())] * 2,
    ]
    assert problems(jax.value_and_grad(loss(layer), tuple(range(5))), *HARGS) == sorted(products)
    products[3] = (64, 256, 32, "nt", (BETWEEN,) * 2)
    assert problems(jax.value_and_grad(loss(layer), tuple(range(4))), *HARGS) == sorted(products)
    assert problems(layer, *HARGS) == [(64, 32, 256, "nn", ()), (64, 256, 128, "nn", (BETWEEN,))]


def test_nothing_elementwise_is_left_between_the_products():
    """Under grad no array of the size of what is between is read or written but by products."""
    jaxpr = jax.jit(jax.grad(loss(layer), tuple(range(4)))).trace(*HARGS).jaxpr
    touched = {
        eqn.primitive.name for eqn in jaxpr.eqns for x in (*eqn.invars, *eqn.outvars) if x.aval.shape == (64, 256)
    }
    assert touched == {"cutjax_grouped_gemm", "cutjax_grouped_outer", "name"}


def test_forward_mode_is_plain_products():
    found = problems(lambda *args: jax.jvp(layer, args, args), *HARGS)
    assert [p[-1] for p in found if p[-1]] == [(BETWEEN,) * 3]
    assert len(found) == 1 + 1 + 2 + 4  # between; y; the tangents; those of both preactivations


def saved(capsys, fn, *args) -> list[str]:
    """Types of the residuals of the size of what is between; beside them there are some of one value a row."""
    print_saved_residuals(fn, *args)
    lines = capsys.readouterr().out.splitlines()
    return sorted(x.split()[0] for x in lines if "from the argument" not in x and "64,256]" in x)


def test_what_is_saved(capsys):
    assert saved(capsys, layer, *HARGS) == [BETWEEN] * 3
    assert saved(capsys, functools.partial(layer, save="recompute"), *HARGS) == []
    for names, count in (((), 0), (("cutjax_preactivation",), 2), (("cutjax_preactivation", "cutjax_hidden"), 3)):
        f = jax.checkpoint(layer, policy=POLICIES.save_only_these_names(*names))
        assert saved(capsys, f, *HARGS) == [BETWEEN] * count


def test_gradients_in_bfloat16_are_those_of_plain_jax():
    def reference(*args):
        x, w1, w2, gate, scale = (v.astype(jnp.float32) for v in args)
        return plain(x, w1, w2, gate, scale, jax.nn.silu, HSIZES).astype(H)

    grads = [jax.jit(jax.grad(loss(f), tuple(range(5))))(*HARGS) for f in (layer, reference)]
    close(*grads, 0.03)  # three roundings to bfloat16 of what is between and its gradient, 2^-8 each of the largest


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
        {"x": normal(0, (2, M, K)), "w1": normal(0, (3, G, K, F))},
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


def test_docstring_example():
    (example,) = doctest.DocTestFinder().find(cutjax.grouped_mlp, "grouped_mlp")
    runner = doctest.DocTestRunner()
    assert runner.run(example).failed == 0
    assert runner.tries
