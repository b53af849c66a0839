"""mlp alone: batches that broadcast, biases of every shape, and what its backward pass runs. Else: the battery."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, compare, mesh_of, normal, problems, saved, scaled, squares, types
from jax.extend.core import Literal

import cutjax

M, K, F, N = 4, 8, 16, 6
H = jnp.bfloat16
POLICIES = jax.checkpoint_policies


X, W1, W2, GATE = scaled(0, (M, K)), scaled(1, (K, F)), scaled(2, (F, N)), scaled(3, (K, F))
B1, B2 = normal(4, (F,)), normal(5, (N,))


def plain(x, w1, w2, b1=None, b2=None, gate=None, activation=jax.nn.gelu):
    z = jnp.matmul(x, w1) + (0 if b1 is None else b1)
    h = activation(z) if gate is None else activation(jnp.matmul(x, gate)) * z
    return jnp.matmul(h, w2) + (0 if b2 is None else b2)


@pytest.mark.parametrize(
    ("layout", "batches"),
    [("nt", ((2, 3), (), ())), ("nn", ((3,), (3,), (3,))), ("nt", ((), (3,), (3,))), ("nn", ((3,), (), (3,)))],
    ids=str,
)
def test_batches_and_layouts(layout, batches):
    x, w1, w2, gate = (
        scaled(i, (*batch, *v.shape))
        for i, (batch, v) in enumerate(zip((*batches, batches[1]), (X, W1, W2, GATE), strict=True))
    )

    def fused(x, w1, w2, b1, b2, gate):
        if layout == "nt":
            w1, w2, gate = w1.mT, w2.mT, gate.mT
        return cutjax.mlp(x, w1, w2, b1=b1, b2=b2, gate=gate, layout=layout)

    def take(f):
        return jax.value_and_grad(lambda *args: (f(*args) ** 2).sum(), range(6))

    compare(take, (fused, plain), (x, w1, w2, B1, B2, gate), 1e-4)


def test_activation_that_captures_what_is_differentiated():
    def take(layer):
        def loss(slope, x):
            def leaky(z):
                return jnp.where(z > 0, z, slope * z)

            return (layer(x, W1, W2, activation=leaky, b1=B1) ** 2).sum()

        return jax.grad(loss, (0, 1))

    compare(take, (cutjax.mlp, plain), (jnp.float32(0.1), X), 1e-5)
    close(take(cutjax.mlp)(jnp.float32(0.1), X), take(plain)(jnp.float32(0.1), X))  # also outside jit


def test_full_size_and_column_biases():
    for b1 in (normal(7, (M, F)), normal(7, (M, 1)), jnp.float32(0.5)):
        functions = [lambda x, b1, f=f: f(x, W1, W2, b1=b1) for f in (cutjax.mlp, plain)]
        compare(lambda f: jax.grad(squares(f), (0, 1)), functions, (X, b1), 1e-5)


def test_shard_map():
    mesh, p = mesh_of(i=4, j=2), jax.P

    def split(x, w1, w2, gate, b1):  # rows over i, what lies between the products over j
        return jax.lax.psum(cutjax.mlp(x, w1, w2, gate=gate, b1=b1), "j")

    inside = jax.shard_map(
        split, mesh=mesh, in_specs=(p("i"), p(None, "j"), p("j"), p(None, "j"), p("j")), out_specs=p("i")
    )
    args = X, W1, W2, GATE, B1

    def loss(f):
        return jax.value_and_grad(lambda *args: (f(*args) ** 2).sum(), tuple(range(5)))

    compare(loss, (inside, lambda x, w1, w2, gate, b1: plain(x, w1, w2, gate=gate, b1=b1)), args, 1e-5)


# What runs, and what is kept.

HX, HW1, HW2, HGATE = (scaled(i, s, H) for i, s in enumerate(((64, 128), (128, 256), (256, 32), (128, 256))))
HB1, HB2 = normal(4, (256,), H), normal(5, (32,), H)


def gradient(**options):
    def loss(x, w1, w2, *rest):
        named = dict(zip(options.get("names", ()), rest, strict=True))
        fn = functools.partial(cutjax.mlp, **{k: v for k, v in options.items() if k != "names"})
        return (fn(x, w1, w2, **named).astype(jnp.float32) ** 2).sum()

    return jax.value_and_grad(loss, tuple(range(3 + len(options.get("names", ())))))


def test_backward_runs_the_derivative_of_the_activation_in_a_kernel():
    fn = gradient(names=("b1", "b2"))
    assert problems(fn, HX, HW1, HW2, HB1, HB2) == sorted(
        [
            (64, 256, 128, "nn", ("bf16[64,256]",) * 2),  # h and the preactivation
            (64, 32, 256, "nn", ("bf16[64,32]",)),
            (256, 32, 64, "tn", ()),  # of w2
            (64, 256, 32, "nt", ("bf16[64,256]", "f32[256]")),  # of the preactivation, and of b1
            (128, 256, 64, "tn", ()),  # of w1
            (64, 128, 256, "nt", ()),  # of x
        ]
    )
    fn = gradient(names=("gate",), activation=jax.nn.silu)
    assert problems(fn, HX, HW1, HW2, HGATE) == sorted(
        [
            (64, 256, 128, "nn", ("bf16[64,256]",) * 3),  # h and both preactivations
            (64, 32, 256, "nn", ()),
            (256, 32, 64, "tn", ()),
            (64, 256, 32, "nt", ("bf16[64,256]",) * 2),  # of both preactivations
            *[(128, 256, 64, "tn", ())] * 2,
            *[(64, 128, 256, "nt", ())] * 2,
        ]
    )


def test_nothing_elementwise_is_left_between_the_products():
    """Under grad no array of h's size is read or written but by products."""
    fn = gradient(names=("b1",))
    jaxpr = jax.jit(fn).trace(HX, HW1, HW2, HB1).jaxpr
    touched = {
        eqn.primitive.name
        for eqn in jaxpr.eqns
        for x in (*eqn.invars, *eqn.outvars)
        if x.aval.shape == (64, 256) and not all(isinstance(y, Literal) for y in eqn.invars)
    }
    assert touched <= {"cutjax_gemm", "name"}


def test_lowered_program():
    text = jax.jit(gradient()).trace(HX, HW1, HW2).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"@cutjax_launch|stablehlo\.dot_general", text)) == 6
    assert "stablehlo.transpose" not in text


def test_forward_writes_only_the_result():
    assert problems(cutjax.mlp, HX, HW1, HW2) == [(64, 32, 256, "nn", ()), (64, 256, 128, "nn", ("bf16[64,256]",))]


def test_forward_mode_is_plain_products():
    args = HX, HW1, HW2
    found = problems(lambda *args: jax.jvp(cutjax.mlp, args, args), *args)
    assert [p[-1] for p in found] == [()] * 3 + [()] * 2 + [("bf16[64,256]",) * 2]  # y' h' w2', x' w1', h


def test_batch_of_shared_weights_is_rows():
    fn = gradient(names=("b1",))
    x = jnp.stack([HX, HX])
    rows = [p[0] for p in problems(fn, x, HW1, HW2, HB1) if p[3] in ("nn", "nt")]
    assert rows == [128] * len(rows)

    def mapped(x, w1, w2, b1):
        f = jax.vmap(lambda x: cutjax.mlp(x, w1, w2, b1=b1))
        return jax.grad(lambda *args: f(*args).astype(jnp.float32).sum())(x)

    assert (128, 256, 32, "nt", ("bf16[128,256]",)) in problems(mapped, x, HW1, HW2, HB1)
    per_example = jax.vmap(fn, (0, None, None, None))  # a gradient of w1 for each
    assert (64, 256, 32, "nt", ("bf16[2,64,256]", "f32[2,256]")) in problems(per_example, x, HW1, HW2, HB1)


def test_what_is_saved(capsys):
    args = HX, HW1, HW2
    both = ["bf16[64,256]"] * 2
    assert types(saved(capsys, cutjax.mlp, *args)) == both
    assert saved(capsys, functools.partial(cutjax.mlp, save="recompute"), *args) == []
    for names, expected in (
        ((), []),
        (("cutjax_preactivation",), both[:1]),
        (("cutjax_preactivation", "cutjax_hidden"), both),
    ):
        f = jax.checkpoint(cutjax.mlp, policy=POLICIES.save_only_these_names(*names))
        assert types(saved(capsys, f, *args)) == expected


def test_bias_gradients_are_summed_in_float32():
    x, w1, w2 = (scaled(i, shape, H) for i, shape in enumerate([(4096, K), (K, F), (F, N)]))
    g = normal(7, (4096, N), H)
    _, pull = jax.vjp(lambda b2: cutjax.mlp(x, w1, w2, b2=b2, activation=jax.nn.gelu), B2.astype(H))
    np.testing.assert_allclose(pull(g)[0].astype(np.float32), np.asarray(g, np.float64).sum(0), rtol=2**-8)


def test_dtypes():
    assert cutjax.mlp(HX, HW1, HW2).dtype == H
    assert cutjax.mlp(HX, HW1, HW2, b2=HB2, out_dtype=jnp.float32).dtype == jnp.float32
    close(
        cutjax.mlp(HX, HW1, HW2, b2=HB2, out_dtype=jnp.float32, backend="xla").astype(H),
        cutjax.mlp(HX, HW1, HW2, b2=HB2),
    )


REFUSED = [
    (
        TypeError,
        "mlp: the activation returns complex64, but the product is of float32",
        {"activation": lambda h: jax.lax.complex(h, h)},
    ),
    (ValueError, "mlp: unknown layout 'tn'", {"layout": "tn"}),
    (ValueError, "mlp: unknown save 'all'", {"save": "all"}),
    (ValueError, "mlp: unknown backend 'gpu'", {"backend": "gpu"}),
    (ValueError, r"mlp: x is \(4, 8\), w1 is \(16, 8\), layout 'nn': k differs", {"w1": W1.T}),
    (ValueError, r"mlp: w1 is \(8, 16\), w2 is \(6, 16\), layout 'nn': h differs", {"w2": W2.T}),
    (ValueError, r"mlp: gate is float32\[8,15\], but w1 is float32\[8,16\]", {"gate": GATE[:, :-1]}),
    (ValueError, "mlp: batch axes do not broadcast", {"x": normal(0, (2, M, K)), "w1": normal(0, (3, K, F))}),
    (ValueError, r"mlp: x must have rank 2 or more", {"x": X[0]}),
    (TypeError, "mlp: w2 is bfloat16, but the product of x and w1 is float32", {"w2": W2.astype(H)}),
    (TypeError, "mlp: x is bfloat16|mlp: a is float16", {"x": X.astype(jnp.float16), "w1": W1.astype(H)}),
    (
        TypeError,
        "must be floating-point numbers, got int32",
        {"x": X.astype(int), "w1": W1.astype(int), "w2": W2.astype(int)},
    ),
    (ValueError, "the activation must return one array", {"activation": lambda z: (z, z)}),
    (
        NotImplementedError,
        "combines a reduction with an accumulator",
        {"activation": lambda z: z / z.sum(1, keepdims=True)},
    ),
    (ValueError, r"mlp: b1 is \(6,\), which does not broadcast against \(4, 16\)", {"b1": B2}),
    (ValueError, r"mlp: b2 is \(16,\), which does not broadcast against \(4, 6\)", {"b2": B1}),
    (ValueError, r"mlp: b2 is \(1, 1, 6\), which does not", {"b2": B2[None, None]}),
]


@pytest.mark.parametrize(("error", "match", "options"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_refused(error, match, options):
    with pytest.raises(error, match=match):
        cutjax.mlp(**({"x": X, "w1": W1, "w2": W2} | options))
