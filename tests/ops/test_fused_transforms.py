"""gemm with an epilogue: derivatives of many, what is kept, and how many products run. Else: the battery."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, compare, inexact, mesh_of, normal, squares, types
from checks import saved as residuals

import cutjax

M, N, K = 4, 6, 8
H = jnp.bfloat16
POLICIES = jax.checkpoint_policies


X, W, V, B, R = normal(0, (M, K)), normal(1, (K, N)), normal(2, (K, N)), normal(3, (N,)), normal(4, (M, N))


def bias_gelu(acc, b):
    return jax.nn.gelu(acc + b)


def many(acc, b, r):
    t = acc * b
    return jnp.tanh(t) + r, t.sum(0), jnp.max(acc * r), acc > 0


# (epilogue, weights, operands)
CASES = {
    "gelu": (bias_gelu, (W,), (B,)),
    "erf": (lambda acc, b: jax.nn.gelu(acc + b, approximate=False), (W,), (B,)),
    "relu": (lambda acc, r: jax.nn.relu(acc) * r, (W,), (R,)),
    "linear": (lambda acc, b, r: (acc + b) * 0.5 + r, (W,), (B, R)),
    "scaled": (lambda acc, s, t: acc * s * t, (W,), (jnp.float32(0.3), normal(5, (M, 1)))),
    "gated": (lambda g, u, b: jax.nn.silu(g) * (u + b), (W, V), (B,)),
    "three": (lambda p, q, r: jnp.sin(p) * q + r, (W, V, W - V), ()),
    "many": (many, (W,), (B, R)),
    "row max": (lambda acc: (acc.max(1), acc.sum(), jnp.exp(-acc)), (W,), ()),
}


def pair(name, **options):
    """The float results of x, the weights and the operands, in an epilogue and in plain JAX; and those arguments."""
    fn, ws, _ = CASES[name]
    n = len(ws)

    def got(x, *args):
        return cutjax.gemm(x, args[:n] if n > 1 else args[0], epilogue=fn, operands=args[n:], **options)

    def expected(x, *args):
        return fn(*(jnp.matmul(x, w) for w in args[:n]), *args[n:])

    return (lambda *args: inexact(got(*args)), lambda *args: inexact(expected(*args))), (X, *ws, *CASES[name][2])


@pytest.mark.parametrize(
    ("name", "save"), [*((name, "default") for name in CASES), *((name, "recompute") for name in ("many", "gated"))]
)
def test_derivatives(name, save):
    """Second derivatives in two ways: the Hessian is symmetric."""
    functions, args = pair(name, save=save)
    g = [normal(10 + i, y.shape, y.dtype) for i, y in enumerate(jax.eval_shape(functions[1], *args))]
    dots = tuple(normal(20 + i, x.shape) for i, x in enumerate(args))

    @jax.jit
    def program(*args):
        def gradient(f):
            return lambda *args: jax.vjp(f, *args)[1](g)

        found = [(jax.jvp(f, args, dots), jax.jvp(gradient(f), args, dots)) for f in functions]
        return found, jax.vjp(gradient(functions[0]), *args)[1](dots)

    (got, expected), second = program(*args)
    close(got, expected, 1e-4)
    close(second, expected[1][1], 1e-4)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("many", (2, 0, None)),
        ("many", (1, None, 0)),
        ("many", (None, None, 1)),
        ("gated", (None, 2, None)),
        ("gated", (0, 2, 0)),
    ],
    ids=str,
)
def test_vmap(name, axes):
    """Of x, the first of the weights, the operands."""
    functions, args = pair(name)
    n = len(CASES[name][1])
    dims = [axes[0], axes[1], *(None for _ in range(1, n)), *(axes[2] for _ in args[1 + n :])]
    args = [x if dim is None else jnp.stack([x, x + 1, -x], dim) for x, dim in zip(args, dims, strict=True)]

    def take(f):
        mapped = jax.vmap(f, dims)
        return lambda *args: (mapped(*args), jax.grad(squares(mapped), range(len(args)))(*args))

    compare(take, functions, args, 1e-4)


def test_vmap_of_what_depends_on_its_position():
    def fn(acc):
        i, j = jnp.arange(M)[:, None], jnp.arange(N)
        return jnp.where(i >= j, acc, 0), acc.sum(0)

    x = normal(0, (3, M, K))
    for dim in (0, 1, 2):
        moved = jnp.moveaxis(x, 0, dim)
        functions = lambda x: cutjax.gemm(x, W, epilogue=fn), lambda x: fn(x @ W)
        compare(lambda f, dim=dim: jax.vmap(f, dim), functions, (moved,), 1e-5)


def test_vmap_of_operands_alone_makes_one_product():
    b = normal(3, (5, N))
    f = jax.vmap(lambda b: cutjax.gemm(X, W, epilogue=bias_gelu, operands=(b,)))
    close(f(b), jax.vmap(lambda b: bias_gelu(X @ W, b))(b))
    (row,) = cutjax.explain(f)(b).rows
    assert (row.choice.problem.batch, row.count) == ((), 1)


def test_captured_values_are_operands():
    def both(product):
        def loss(x, w, scale, b):
            return jax.vmap(lambda b: product(x, w, lambda acc: jnp.tanh(acc * scale + b)).sum())(b).sum()

        return jax.value_and_grad(loss, (0, 1, 2, 3))(X, W, jnp.float32(0.3), normal(3, (3, N)))

    def fused(x, w, fn):
        return cutjax.gemm(x, w, epilogue=fn)

    close(*jax.jit(lambda: [both(f) for f in (fused, lambda x, w, fn: fn(x @ w))])())


def test_random_bits():
    def dropout(acc, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), acc * 2, 0)

    key = jax.random.key(7)
    functions = (
        lambda x: cutjax.gemm(x, W, epilogue=dropout, operands=(key,)).sum(),
        lambda x: dropout(x @ W, key).sum(),
    )
    compare(jax.value_and_grad, functions, (X,), 1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_random_bits_over_a_batch(shared):
    def dropout(acc, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), jnp.tanh(acc) * 2, 0)

    def fused(x, w, key):
        return cutjax.gemm(x, w, epilogue=dropout, operands=(key,))

    def plain(x, w, key):
        return dropout(x @ w, key)

    x, w, key = normal(0, (2, 3, M, K)), normal(1, (K, N) if shared else (2, 3, K, N)), jax.random.key(7)

    def gradient(f):
        return jax.value_and_grad(lambda x, w, key: f(x, w, key).sum(), (0, 1))

    compare(gradient, (fused, plain), (x, w, key), 1e-5)
    if shared:
        rows = cutjax.explain(gradient(fused))(x, w, key).rows
        assert {row.choice.problem.batch for row in rows} == {()}  # also of the gradient of w: nothing to add up
    for axes in ((2, None, None), (1, None, 0), (None, None, 0)) if shared else ((0, None, None), (0, 0, None)):
        keys = key if axes[2] is None else jax.random.split(key, 3 if axes[0] == 1 else 2)
        ws = w if shared or axes[1] == 0 else w[0, 0]
        compare(lambda f, axes=axes: gradient(jax.vmap(f, axes)), (fused, plain), (x, ws, keys), 1e-5)


def test_integer_operands_have_no_gradient():
    mask = jnp.asarray(np.arange(M * N).reshape(M, N) % 2)

    def loss(product, w, mask):
        return (product(w, mask) ** 2).sum()

    def fused(w, mask):
        return cutjax.gemm(X, w, epilogue=lambda acc, m: jnp.where(m == 1, jnp.exp(acc), acc), operands=(mask,))

    def plain(w, mask):
        return jnp.where(mask == 1, jnp.exp(X @ w), X @ w)

    compare(lambda product: jax.grad(functools.partial(loss, product)), (fused, plain), (W, mask), 1e-4)
    got = jax.grad(functools.partial(loss, fused), 1, allow_int=True)(W, mask)
    assert got.dtype == jax.dtypes.float0


# What runs, and what is kept.


def products(fn, *args) -> int:
    """Products in the program for CUDA, kernels or XLA's."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"@cutjax_launch|stablehlo\.dot_general", text))


HX, HW, HV, HB = (
    x.astype(H) for x in (normal(0, (64, 128)), normal(1, (128, 32)), normal(2, (128, 32)), normal(3, (32,)))
)


def saved(capsys, fn, *args) -> list[str]:
    return types(line for line in residuals(capsys, fn, *args) if "reshape" not in line)


def layer(x, w, b, *, fn=None, **options):
    fn = fn or (lambda acc, b: jax.nn.gelu(acc + b.astype(acc.dtype)))
    return cutjax.gemm(x, w, epilogue=fn, operands=(b,), **options)


def gated(x, w, v, **options):
    return cutjax.gemm(x, (w, v), epilogue=lambda g, u: jax.nn.silu(g) * u, **options)


def test_forward_is_one_kernel_and_the_gradient_of_each_argument_one_product():
    args = HX, HW, HB
    assert [len(row.outputs) for row in cutjax.explain(layer)(*args).rows] == [1]
    for argnums, count in (((), 0), ((0,), 1), ((1,), 1), ((2,), 0), ((0, 1), 2), ((0, 1, 2), 2)):
        if argnums:
            rows = cutjax.explain(jax.value_and_grad(squares(layer), argnums))(*args).rows
            assert sum(row.count for row in rows) == 1 + count
            assert [row.outputs for row in rows if row.epilogue] == [("bf16[64,32]",) * 2]
    assert (
        cutjax.explain(jax.jit(jax.value_and_grad(squares(gated), (0, 1, 2))))(HX, HW, HV).rows[0].outputs
        == ("bf16[64,32]",) * 3
    )
    rows = cutjax.explain(jax.value_and_grad(squares(gated), (0, 1, 2)))(HX, HW, HV).rows
    assert sum(row.count for row in rows) == 1 + 4


def test_lowered_program_has_as_many_products():
    args = HX, HW, HB
    assert products(layer, *args) == 1
    assert products(jax.value_and_grad(squares(layer), (0, 1, 2)), *args) == 3
    assert products(jax.value_and_grad(squares(functools.partial(layer, save="recompute")), (0, 1, 2)), *args) == 4


def test_the_backward_pass_is_elementwise():
    """Nothing of the layer is computed twice outside the kernel, and the forward pass computes no derivative."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(layer, *args))(HX, HW, HB)
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert names <= {"cutjax_gemm", "name", "reshape", "broadcast_in_dim", "convert_element_type"}


LINEAR = {
    "bias": lambda acc, b: acc + b.astype(acc.dtype),
    "scale": lambda acc, b: acc * 0.5 - b.astype(acc.dtype) / 3,
    "cast": lambda acc, b: acc.astype(jnp.bfloat16) + b,
}


@pytest.mark.parametrize("fn", LINEAR)
def test_linear_epilogues_save_nothing(capsys, fn):
    assert saved(capsys, functools.partial(layer, fn=LINEAR[fn]), HX, HW, HB) == []
    rows = cutjax.explain(jax.value_and_grad(squares(functools.partial(layer, fn=LINEAR[fn])), (0, 1, 2)))(
        HX, HW, HB
    ).rows
    assert [row.outputs for row in rows if row.epilogue] == [("bf16[64,32]",)]


def test_what_is_saved(capsys):
    args = HX, HW, HB
    assert saved(capsys, layer, *args) == ["bf16[64,32]"]
    assert saved(capsys, functools.partial(layer, out_dtype=jnp.float32), *args) == ["f32[64,32]"]
    assert saved(capsys, functools.partial(layer, save="recompute"), *args) == []
    assert saved(capsys, gated, HX, HW, HV) == ["bf16[64,32]"] * 2
    # A scale wants the accumulator for its own gradient alone.
    scaled = functools.partial(layer, fn=lambda acc, s: acc * s.astype(acc.dtype))
    assert saved(capsys, scaled, *args) == ["bf16[64,32]"]
    assert saved(capsys, lambda x, w: scaled(x, w, HB), HX, HW) == []
    # What the function returns is not written twice.
    rows = cutjax.explain(
        jax.grad(squares(lambda *args: sum(layer(*args, fn=lambda acc, b: (jnp.tanh(acc), acc)))), 1)
    )(*args).rows
    assert [row.outputs for row in rows if row.epilogue] == [("bf16[64,32]",) * 2]


def test_checkpoint_policies(capsys):
    def saves(policy, fn=layer):
        return saved(capsys, jax.checkpoint(fn, policy=policy), HX, HW, HB)

    assert saves(None) == saves(POLICIES.nothing_saveable) == []
    assert saves(POLICIES.save_only_these_names("cutjax_preactivation")) == ["bf16[64,32]"]
    assert saves(POLICIES.save_only_these_names("other")) == []
    kept = jax.checkpoint(layer, policy=POLICIES.save_only_these_names("cutjax_preactivation"))
    assert products(jax.grad(squares(kept), (0, 1, 2)), HX, HW, HB) == 3
    for policy in (None, POLICIES.save_only_these_names("cutjax_preactivation"), POLICIES.everything_saveable):
        f = jax.checkpoint(layer, policy=policy)
        close(jax.grad(squares(f), (0, 1, 2))(HX, HW, HB), jax.grad(squares(layer), (0, 1, 2))(HX, HW, HB))


def test_results_that_nothing_uses_are_not_written(kernels_run):
    @jax.jit
    def only_first(x, w, b):
        return cutjax.gemm(x, w, epilogue=lambda acc, b: (acc.astype(H), acc + b.astype(acc.dtype)), operands=(b,))[0]

    text = only_first.trace(HX, HW, HB).lower(lowering_platforms=("cuda",)).as_text()
    assert "cutjax_launch" in text  # the plain product
    assert "add" not in text
    # The loss itself is not asked for, so the gradient of a sum needs the accumulator and no activation.
    with cutjax.use_backend("cuda"):  # one of them has a k of 32
        text = jax.jit(jax.grad(lambda x: layer(x, HW, HB).astype(jnp.float32).sum())).trace(HX)
        assert text.lower(lowering_platforms=("cuda",)).as_text().count("cutjax_launch") == 2


def test_gradients_in_bfloat16_are_those_of_plain_jax():
    def plain(x, w, b):
        acc = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return jax.nn.gelu(acc + b.astype(acc.dtype)).astype(x.dtype)

    compare(lambda f: jax.grad(squares(f), (0, 1, 2)), (layer, plain), (HX, HW, HB), 0.02)


BIASES = {
    "acc + b": lambda acc, b, r: jax.nn.gelu(acc + b),
    "b + acc": lambda acc, b, r: jax.nn.gelu(b + acc),
    "between terms": lambda acc, b, r: jax.nn.gelu(acc * 1 + r + b) * 2,
    "scaled": lambda acc, b, r: jnp.tanh((acc + b) * 0.5) + r,
}


@pytest.mark.parametrize(
    ("form", "shape", "dtype", "save"),
    [
        *((form, (16,), H, "default") for form in BIASES),
        ("acc + b", (64, 1), jnp.float16, "default"),
        ("between terms", (), H, "recompute"),
    ],
    ids=str,
)
def test_a_bias_gradient_sums_what_is_rounded_for_the_products(form, shape, dtype, save):
    """XLA would write the gradient in float32 too, for the sum to read. w is the identity, so x's gradient is it."""
    x, w, r, g = normal(0, (64, 16), dtype), jnp.eye(16, dtype=dtype), normal(2, (64, 16)), normal(3, (64, 16), dtype)

    @jax.jit
    def gradient(x, b):
        def layer(x, b):
            return cutjax.gemm(x, w, epilogue=BIASES[form], operands=(b, r), save=save)

        return jax.vjp(layer, x, b)[1](g)

    dx, db = gradient(x, normal(1, shape))
    sums = dx.astype(jnp.float32).sum([i for i in range(2) if i - 2 + len(shape) < 0 or shape[i - 2] == 1])
    np.testing.assert_allclose(db, sums.reshape(shape), rtol=1e-5, atol=1e-5)


def test_other_gradients_are_not_rounded():
    """What is no bias alone keeps its own sum: of a scaled accumulator, of a b or an accumulator with another use."""
    x, w, b, g = normal(0, (64, 16), H), jnp.eye(16, dtype=H), normal(1, (16,)), normal(3, (64, 16), H)
    for fn in (
        lambda acc, b: jnp.tanh(acc * 0.3 + b),
        lambda acc, b: jnp.tanh(acc + b) * b,
        lambda acc, b: jnp.tanh(acc + b) * acc,
    ):

        def plain(x, b, fn=fn):
            return fn(x.astype(jnp.float32), b).astype(H)

        def fused(x, b, fn=fn):
            return cutjax.gemm(x, w, epilogue=fn, operands=(b,))

        compare(lambda f: lambda x, b: jax.vjp(f, x, b)[1](g)[1], (fused, plain), (x, b), 1e-5)


@pytest.mark.parametrize("axes", [None, (0, None, None), (None, None, 0)], ids=str)
def test_transformations_of_a_layer_in_bfloat16(axes):
    def plain(x, w, b):
        acc = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return jax.nn.gelu(acc + b.astype(acc.dtype)).astype(x.dtype)

    args, dots = (HX, HW, HB), tuple(normal(20 + i, v.shape, H) for i, v in enumerate((HX, HW, HB)))
    if axes:
        args = tuple(v if a is None else jnp.stack([v, v + 1, -v]) for v, a in zip(args, axes, strict=True))

    def take(f):
        gradient = jax.grad(squares(f), (0, 1, 2))

        def of(*args):
            if axes:
                mapped = jax.grad(squares(jax.vmap(f, axes)), (0, 1, 2))
                found = jax.vmap(gradient, axes)(*args), mapped(*args)
            else:
                found = jax.jvp(f, args, dots), jax.jvp(gradient, args, dots), jax.vjp(gradient, *args)[1](dots)
            return jax.tree.map(lambda v: v.astype(jnp.float32), found)

        return of

    compare(take, (layer, plain), args, 0.03)


def test_shard_map_of_what_captures_an_operand():
    p, q = jax.P("i"), jax.P()
    captured = jax.shard_map(
        lambda x, w, r: cutjax.gemm(w, w, layout="tn", epilogue=lambda acc: acc + r[:1].astype(acc.dtype)).sum(),
        mesh=mesh_of(i=8), in_specs=(p, q, p), out_specs=q, check_vma=False,
    )  # fmt: skip
    assert captured(HX, HW, normal(4, (64, 32), H)).shape == ()


def test_explain():
    text = str(cutjax.explain(layer)(HX, HW, HB))
    assert re.search(r"epilogue +.*acc.*tanh", text)
    assert re.search(r"operands +x0 bf16\[1,32\]", text)
    assert re.search(r"outputs +bf16\[64,32\]\n", text)
    assert re.search(r"derivative +saves acc as bf16\n", text)
    assert "multiplies acc0, acc1 again" in str(cutjax.explain(functools.partial(gated, save="recompute"))(HX, HW, HV))
    assert "needs no accumulator" in str(cutjax.explain(functools.partial(layer, fn=LINEAR["bias"]))(HX, HW, HB))
    assert "epilogue" not in str(cutjax.explain(cutjax.gemm)(HX, HW))
