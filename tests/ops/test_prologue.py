"""Prologues: what is special to them. Every transformation: the battery. Kernels: test_prologue_kernels.py."""

from __future__ import annotations

import custom_rules
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, mesh_of, normal, rounding, saved, types
from hypothesis import given, settings
from jax.ad_checkpoint import checkpoint_name
from strategies import epilogues

import cutjax

M, K, N = 6, 8, 5
BF16, F32 = jnp.bfloat16, jnp.float32
X, W, R, G = normal(0, (M, K)), normal(1, (K, N)), normal(2, (M, 1)), normal(3, (K,))


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def norm(a, r, g):
    return a * r * g


@settings(max_examples=6, derandomize=True, database=None, deadline=None)  # 100 after a change of expressions
@given(epilogues(products=1, outputs=1, depth=4, smooth=True))
def test_random_functions(case):
    """Values, gradients and second derivatives of random functions are those of plain JAX, of batches too."""
    operands = [jnp.asarray(x) for x in case.arrays((M, K))]
    floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

    def both(x, w, *moved):
        given = [moved[floats.index(i)] if i in floats else y for i, y in enumerate(operands)]
        yield cutjax.gemm(x, w, prologue=case, prologue_operands=given)
        yield jnp.matmul(case(x, *given), w)

    def gradient(*args):
        at = tuple(range(len(args)))
        return [jax.grad(lambda *args, i=i: jnp.sin([*both(*args)][i]).sum(), at)(*args) for i in range(2)]

    args = X, W, *(operands[i] for i in floats)
    dots = tuple(normal(10 + i, x.shape, x.dtype) for i, x in enumerate(args))
    batch = jnp.stack([X, X + 1])
    values, (gradients, second), batched = jax.jit(
        lambda *args: (
            [*both(*args)],
            jax.jvp(gradient, args, dots),
            jax.vmap(lambda x: [*both(x, *args[1:])])(batch),
        )
    )(*args)
    for ours, plain in (values, gradients, second, batched):
        close(ours, plain, 1e-3)


PAIRS = {  # dtypes of x, w and r, and of the product
    "bfloat16 by float32": (BF16, BF16, F32, BF16),
    "narrow x": (jnp.int8, BF16, F32, BF16),
    "wide w": (BF16, F32, BF16, F32),
    "wide x": (F32, BF16, F32, F32),
    "narrow w": (BF16, jnp.int8, F32, BF16),
    "of integers": (jnp.int32, F32, F32, F32),
    "in float8": (jnp.float8_e4m3fn, jnp.float8_e4m3fn, F32, jnp.float8_e4m3fn),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_function_sees_x_and_its_result_is_in_the_dtype_of_the_product(name):
    of_x, of_w, of_r, dtype = PAIRS[name]
    x, w, r = (4 * X).astype(of_x), (4 * W).astype(of_w), jnp.abs(R).astype(of_r)
    seen = []

    def function(a, r):
        seen.append(a.dtype)
        return jnp.sin(a.astype(r.dtype)) * r

    def ours(r, w):
        return cutjax.gemm(x, w, prologue=function, prologue_operands=(r,))

    def plain(r, w):
        return cutjax.gemm(function(x, r).astype(dtype), w, out_dtype=jax.eval_shape(ours, r, w).dtype)

    assert ours(r, w).dtype == cutjax.gemm(x, w).dtype
    assert set(seen) == {np.dtype(of_x)}
    wrt = (0, 1) if jnp.issubdtype(of_w, jnp.inexact) else 0
    (got, dots), (expected, plain_dots) = (
        rounding(lambda r, w, f=f: (f(r, w), jax.grad(lambda *args: f(*args).astype(F32).sum(), wrt)(r, w)))(r, w)
        for f in (ours, plain)
    )
    close(got, expected, 2**-8 if dtype == BF16 else 1e-5)
    close(dots, plain_dots, 2**-7)


@pytest.mark.parametrize("save", ["default", "recompute"])
def test_its_derivative_keeps_the_array_and_the_operands(save, capsys):
    """They are arguments, and nothing else of x's size is kept."""

    def loss(x, w, r, g):
        y = cutjax.gemm(
            x,
            w,
            prologue=lambda *args: jax.nn.silu(norm(*args)),
            prologue_operands=(r, g),
            epilogue=lambda acc: acc * 2,
            save=save,
        )
        return y.sum()

    kept = types(saved(capsys, loss, X, W, R, G))
    assert not {"f32[6,8]", "f32[6,5]"} & {*kept}
    plain = types(saved(capsys, lambda x, w, r, g: (jax.nn.silu(norm(x, r, g)) @ w).sum(), X, W, R, G))
    assert "f32[6,8]" in plain


def relu_then(a, r):
    return jax.nn.relu(a) * r


RULES = {
    "relu": relu_then,
    "straight": lambda a, r: custom_rules.straight(a * r),
    "straight_anew": lambda a, r: custom_rules.straight_anew(3 * a) * r,
    "clip": lambda a, r: custom_rules.clip(a) * r,
    "doubled": lambda a, r: custom_rules.quantized(a * r),
    "sums": lambda a, r: custom_rules.lsq(a, jnp.abs(r[0, 0]) + 0.5),
    "named": lambda a, r: checkpoint_name(a * r, "scaled") + a,
    "stopped": lambda a, r: a * jax.lax.stop_gradient(r) + r,
}


@pytest.mark.parametrize("name", RULES)
def test_functions_with_derivatives_of_their_own(name):
    """First and second derivatives are JAX's, of one and of several weights."""

    def ours(x, w, r):
        of_several = cutjax.gemm(x, (w, -w), prologue=RULES[name], prologue_operands=(r,), epilogue=jnp.multiply)
        return cutjax.gemm(x, w, prologue=RULES[name], prologue_operands=(r,)), of_several

    def plain(x, w, r):
        once, again = RULES[name](x, r), RULES[name](x, r)  # a rule sees the cotangents of one call
        return once @ w, (again @ w) * (again @ -w)

    def gradient(f):
        return jax.grad(lambda *args: sum(jnp.sin(y).sum() for y in f(*args)), (0, 1, 2))

    def second(f):
        return jax.grad(lambda *args: sum(jnp.sin(y).sum() for y in gradient(f)(*args)), (0, 1, 2))

    found = jax.jit(lambda *args: [(f(*args), gradient(f)(*args), second(f)(*args)) for f in (ours, plain)])(X, W, R)
    close(found[0], found[1], 1e-3)


def test_policies_see_names_within(capsys):
    def loss(x, w, r):
        return jnp.sin(cutjax.gemm(x, w, prologue=RULES["named"], prologue_operands=(r,))).sum()

    policy = jax.checkpoint_policies.save_only_these_names("scaled")
    assert types(saved(capsys, jax.checkpoint(loss, policy=policy), X, W, R)) == ["f32[6,8]"]


def test_operands_alone_in_a_batch():
    r = jnp.stack([R, 2 * R, -R])
    found = jax.vmap(lambda r: cutjax.gemm(X, W, prologue=norm, prologue_operands=(r, G)))(r)
    close(found, jnp.stack([norm(X, each, G) @ W for each in r]), 1e-5)


def test_batches_become_rows():
    """One product of more rows, as without a prologue; where an operand is of part of the rows, a batch."""
    x, r = normal(4, (3, M, K)), normal(5, (3, M, 1))

    def shapes(**given):
        jaxpr = jax.make_jaxpr(lambda x, w: cutjax.gemm(x, w, prologue=norm, **given))(x, W)
        return [eqn.invars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "cutjax_scaled"]

    assert shapes(prologue_operands=(r, G)) == [(3 * M, K)]
    assert shapes(prologue_operands=(r[:, :1], G)) == [(3, M, K)]
    vmapped = jax.make_jaxpr(jax.vmap(lambda x, r: cutjax.gemm(x, W, prologue=norm, prologue_operands=(r, G))))(x, r)
    assert "f32[18,8]" in str(vmapped)


def test_captured_arrays_and_positions():
    def function(a):
        rows = jax.lax.broadcasted_iota(jnp.int32, a.shape, 0)
        return jnp.where(rows > 2, a * R, a) + G

    def keyed(a, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, a.shape), a, 0)

    key = jax.random.key(3)
    gradient = jax.grad(lambda g: cutjax.gemm(X, W, prologue=lambda a: a * g).sum())(G)
    close(gradient, (X.T @ jnp.ones((M, N)) * W).sum(1), 1e-5)
    close(cutjax.gemm(X, W, prologue=function), function(X) @ W, 1e-5)
    close(cutjax.gemm(X, W, prologue=keyed, prologue_operands=(key,)), keyed(X, key) @ W, 1e-5)


@pytest.mark.parametrize(
    "number", [2, 2.5, True, np.float64(2.5), np.float32(2.5), np.array(2.5), np.full(K, 2.5)], ids=repr
)
def test_operands_that_are_numbers(number):
    """Of Python and of numpy, with the promotion that they have in plain JAX."""
    x, w = X.astype(BF16), W.astype(BF16)
    got = cutjax.gemm(x, w, prologue=jnp.multiply, prologue_operands=(number,))
    close(got, jnp.multiply(x, number).astype(BF16) @ w, 2**-6)
    h = cutjax.mlp(x, w, w.T, prologue=lambda a, s: a * s["s"], prologue_operands=({"s": number},))
    close(h, cutjax.mlp((x * number).astype(BF16), w, w.T), 2**-6)


@pytest.mark.parametrize("save", [None, "default"], ids=["plain", "epilogue"])
def test_products_of_integers_have_no_derivative(save):
    x, w = (y.astype(jnp.int8) for y in (X, W))
    how = {} if save is None else {"epilogue": lambda acc: acc * 2, "save": save}

    def loss(r):
        return cutjax.gemm(x, w, prologue=lambda a, r: a * r, prologue_operands=(r,), **how).astype(F32).sum() * r.sum()

    value, gradient = jax.value_and_grad(loss)(R)
    close(gradient, jnp.full(R.shape, value / R.sum()), 1e-5)


def test_divided_over_devices():
    """Rows, or the contraction; positions are those in the whole array."""
    mesh = mesh_of(p=2, q=2)
    x, w, r = normal(6, (8, K)), normal(7, (K, 4)), normal(8, (8, 1))

    def function(a, r, g):
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, a.shape, i) for i in range(2))
        return jnp.where((rows + columns) % 3 == 0, a * r, a) * g

    def loss(x, w, r, g):
        return jnp.sin(cutjax.gemm(x, w, prologue=function, prologue_operands=(r, g))).sum()

    def plain(x, w, r, g):
        return jnp.sin(function(x, r, g) @ w).sum()

    expected = jax.value_and_grad(plain, (0, 1, 2, 3))(x, w, r, G)
    for spec in (jax.P("p", "q"), jax.P(("p", "q"))):
        placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
        close(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(placed, w, r, G), expected, 1e-4)


def test_rows_of_no_group_reach_nothing():
    """Neither values nor operands there, whatever the function makes of them and of zero."""
    w, sizes = normal(9, (2, K, N)), jnp.array([2, 1])
    bad = jnp.arange(M)[:, None] >= 3
    x, r = jnp.where(bad, jnp.nan, X), jnp.where(bad, 0.0, jnp.abs(R))
    g = jnp.abs(normal(10, (2, 1, K)))

    def function(a, r, g):
        return jnp.log(jnp.abs(a)) * jax.lax.rsqrt(r) * jnp.sqrt(g)

    def ours(x, w, r, g):
        return jnp.sin(cutjax.grouped_gemm(x, w, sizes, prologue=function, prologue_operands=(r, g))).sum()

    def plain(x, w, r, g):
        at = jnp.array([0, 0, 1])
        made = function(x[:3], r[:3], g[at, 0])
        return jnp.sin(jnp.einsum("mk,mkn->mn", made, w[at])).sum()

    args = x, w, r, g
    found, expected = (jax.value_and_grad(f, (0, 1, 2, 3))(*args) for f in (ours, plain))
    close(found, expected, 1e-4)
    directions = jax.tree.map(jnp.ones_like, args)
    second = [jax.jvp(jax.grad(f, (0, 1, 2, 3)), args, directions)[1] for f in (ours, plain)]
    close(second[0], second[1], 1e-3)


REFUSED = {
    "no elementwise function: sub at": ({"prologue": lambda a: a - a.max(-1, keepdims=True)}, NotImplementedError),
    "no elementwise function: sort at": ({"prologue": lambda a: jnp.sort(a)}, NotImplementedError),
    "no elementwise function: it reduces its argument": (
        {"prologue": lambda a: jnp.broadcast_to(a.sum(), a.shape)},
        NotImplementedError,
    ),
    r"one array of its argument's shape \(6, 8\), got shape \(6,\)": ({"prologue": lambda a: a.sum(-1)}, ValueError),
    r"one array of its argument's shape \(6, 8\), got tuple": ({"prologue": lambda a: (a, a)}, ValueError),
    r"got shape \(2, 6, 8\)": ({"prologue": jnp.multiply, "prologue_operands": (jnp.ones((2, M, K)),)}, ValueError),
    "returns complex64, but the product is of float32": ({"prologue": lambda a: a * 1j}, TypeError),
    "missing a required argument: 'r'": ({"prologue": norm}, TypeError),
    "prologue must be a function, got int": ({"prologue": 3}, TypeError),
    "1 prologue_operands, but no prologue": ({"prologue_operands": (G,)}, ValueError),
    r"must be a tuple, got .*; write prologue_operands=\(r,\)": ({"prologue": norm, "prologue_operands": G}, TypeError),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words):
    given, error = REFUSED[words]
    with pytest.raises(error, match=words):
        cutjax.gemm(X, W, **given)
    with pytest.raises(error, match=words.replace(r"\(6, 8\)", r"\(6, 8\)")):
        cutjax.mlp(X, W, W.T, **given)


def test_refusals_of_what_it_is_of():
    q = cutjax.quantize(X, "int8")
    with pytest.raises(TypeError, match=r"a is a cutjax\.Quantized, but a prologue is of an array"):
        cutjax.gemm(q, W, prologue=jnp.sin)
    with pytest.raises(ValueError, match=r"an operand of the prologue is \(3, 1, 8\).*expected \[..., 2, 1, 8 or 1\]"):
        cutjax.grouped_gemm(
            X, normal(9, (2, K, N)), jnp.array([2, 1]), prologue=jnp.multiply, prologue_operands=(jnp.ones((3, 1, K)),)
        )


def test_the_identity_is_no_prologue():
    assert "cutjax_scaled" not in str(jax.make_jaxpr(lambda x, w: cutjax.gemm(x, w, prologue=lambda a: a))(X, W))


def test_weights_in_blocks_beside_a_prologue():
    q = cutjax.quantize(normal(11, (64, 8)), "int8", block=(32, 1))
    x, g = normal(12, (4, 64)), normal(13, (64,))

    def ours(x, g):
        return jnp.sin(cutjax.gemm(x, q, prologue=jnp.multiply, prologue_operands=(g,))).sum()

    def plain(x, g):
        return jnp.sin(cutjax.gemm(x * g, q)).sum()

    close(jax.value_and_grad(ours, (0, 1))(x, g), jax.value_and_grad(plain, (0, 1))(x, g), 1e-4)


def test_linear_ones_transpose():
    def linear(x):
        return cutjax.gemm(x, W, prologue=norm, prologue_operands=(R, G))

    (found,) = jax.linear_transpose(linear, X)(jnp.ones((M, N)))
    close(found, jnp.ones((M, N)) @ W.T * R * G, 1e-5)
