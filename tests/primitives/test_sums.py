"""Sums of products, and several of one a, as what derivatives make them of. What all operations do: the battery."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import compare, mesh_of, normal, problems, squares
from oracles import masked_multiply

import cutjax
from cutjax.epilogue.expression import identity
from cutjax.epilogue.trace import trace
from cutjax.primitives.sums import with_terms

H, F32 = jnp.bfloat16, np.dtype(np.float32)
M, K, N, G = 64, 128, 32, 4
X, W, V = normal(0, (M, K), H), normal(1, (K, N), H), normal(2, (K, N), H)
GW, GV, SIZES = normal(3, (G, K, N), H), normal(4, (G, K, N), H), jnp.array([20, 0, 31, 7])
AVALS = [jax.ShapeDtypeStruct((M, N), F32)]


def gated(g, u):
    return jax.nn.silu(g) * u


def dense(x, w, v, **options):
    return cutjax.gemm(x, (w, v), epilogue=gated, **options)


def grouped(x, w, v, **options):
    return cutjax.grouped_gemm(x, (w, v), SIZES, epilogue=gated, **options)


def primitives(fn, *args) -> list[str]:
    """The names of the products in a program that is traced."""
    eqns = jax.jit(fn).trace(*args).jaxpr.eqns
    return sorted(eqn.primitive.name for eqn in eqns if eqn.primitive.name.startswith("cutjax"))


# What the derivative of one a with several b is.


@pytest.mark.parametrize(("layer", "args"), [(dense, (X, W, V)), (grouped, (X, GW, GV))], ids=["dense", "grouped"])
def test_gradients_are_a_sum_and_several_products(layer, args):
    for argnums, of_x, of_w in (((0, 1, 2), 1, 1), ((0,), 1, 0), ((1, 2), 0, 1), ((0, 2), 1, 1)):
        found = primitives(jax.grad(squares(layer), argnums), *args)
        assert found.count("cutjax_sum") == of_x
        assert len(found) == 1 + of_x + of_w


@pytest.mark.parametrize(("layer", "args"), [(dense, (X, W, V)), (grouped, (X, GW, GV))], ids=["dense", "grouped"])
def test_values_do_not_depend_on_it(layer, args):
    """Beside the derivative of two products by themselves, in float32: a sum is rounded once, so it is no worse."""

    def apart(x, w, v):
        multiply = cutjax.gemm if layer is dense else functools.partial(cutjax.grouped_gemm, group_sizes=SIZES)
        return gated(multiply(x, w), multiply(x, v))

    wide = [x.astype(jnp.float32) for x in args]
    found, other = (jax.grad(squares(fn), (0, 1, 2))(*args) for fn in (layer, apart))
    exact = jax.grad(squares(apart), (0, 1, 2))(*wide)
    for got, alone, true in zip(found, other, exact, strict=True):
        errors = [jnp.linalg.norm((x.astype(jnp.float32) - true).ravel()) for x in (got, alone)]
        assert errors[0] <= 1.05 * errors[1]


def test_weights_that_are_transposed_have_products_of_their_own():
    """The gradients in w[n, k] are products of g and x, and x is the second of both."""

    def layer(x, w, v):
        return cutjax.gemm(x, (w.T, v.T), layout="nt", epilogue=gated)

    found = primitives(jax.grad(squares(layer), (0, 1, 2)), X, W, V)
    assert found == ["cutjax_gemm"] * 3 + ["cutjax_sum"]


def test_narrow_weights_are_added_up_outside():
    """A cotangent of 16 bits by weights of 8: kernels decode those of one product."""
    q = (8 * W).astype(jnp.int8)
    found = primitives(jax.grad(squares(lambda x: cutjax.gemm(x, (q, q), epilogue=gated))), X)
    assert found == ["cutjax_gemm"] * 3


def test_what_nothing_uses_is_not_multiplied():
    def first(x, w, v):
        return jax.jvp(lambda x: cutjax.gemm(x, (w, v), epilogue=lambda *accs: accs), (x,), (x,))[1][0]

    assert "cutjax_gemm" in primitives(first, X, W, V)
    (row,) = cutjax.explain(first)(X, W, V).rows
    assert (row.count, row.epilogue) == (1, None)
    compare(lambda f: f, (first, lambda x, w, v: x @ w), (X, W, V), 1e-2)


def test_of_float8_each_is_quantized_by_itself():
    v = normal(5, (G, N, K), H)

    def layer(x, w):
        return cutjax.grouped_mlp(x, w, v, SIZES, gate=w, fp8=cutjax.fp8_dot_general(policy="always"))

    assert "cutjax_sum" not in primitives(jax.grad(squares(layer)), X, GW)


def test_second_derivatives():
    def value(layer):
        return lambda x: jax.grad(lambda x: squares(layer)(x))(x).sum()

    x, w, v = (y.astype(jnp.float32) / 8 for y in (X[:5, :6], W[:6, :7], V[:6, :7]))
    functions = (
        lambda x: cutjax.gemm(x, (w, v), epilogue=gated),
        lambda x: gated(x @ w, x @ v),
    )
    compare(lambda f: jax.hessian(squares(f)), functions, (x,), 1e-4)
    compare(lambda f: jax.jit(jax.grad(value(f))), functions, (x,), 1e-4)


# A sum.


def test_contractions_of_different_lengths_in_batches():
    a, b, c, d = (normal(i, s) for i, s in enumerate(((3, 1, 5, 4), (2, 4, 6), (5, 7), (3, 2, 7, 6))))
    fn = functools.partial(lambda multiply, a, b, c, d: multiply(a, b, c, d))
    ours, plain = (
        functools.partial(fn, f)
        for f in (lambda a, b, c, d: cutjax.gemm((a, c), (b, d)), lambda a, b, c, d: a @ b + c @ d)
    )
    compare(lambda f: jax.value_and_grad(squares(f), range(4)), (ours, plain), (a, b, c, d), 1e-5)


@pytest.mark.parametrize("axes", [(0, None, None, None), (None, 0, None, None), (None, None, 1, 0), (0, 0, 0, 0)])
def test_vmap(axes):
    args = [normal(i, s) for i, s in enumerate(((5, 4), (4, 6), (5, 3), (3, 6)))]
    args = [x if at is None else jnp.stack([x, 2 * x], at) for x, at in zip(args, axes, strict=True)]

    def take(f):
        return jax.vmap(jax.value_and_grad(squares(f), range(4)), axes)

    functions = lambda a, b, c, d: cutjax.gemm((a, c), (b, d)), lambda a, b, c, d: a @ b + c @ d
    compare(take, functions, args, 1e-5)


def test_rows_in_a_batch_are_rows():
    """One matrix for all: the batch is folded into the rows of each product."""
    a, c = normal(0, (2, 3, 5, 4), H), normal(1, (2, 3, 5, 8), H)
    b, d = normal(2, (4, 6), H), normal(3, (8, 6), H)
    assert [p[:3] for p in problems(lambda *xs: cutjax.gemm(xs[:2], xs[2:], backend="cuda"), a, c, b, d)] == [
        (30, 6, 12)
    ]


def test_export():
    args = X, W, X[:, :8], W[:8]
    exported = jax.export.export(jax.jit(lambda a, b, c, d: cutjax.gemm((a, c), (b, d))), platforms=("cpu", "cuda"))
    found = jax.export.deserialize(exported(*args).serialize()).call(*args)
    np.testing.assert_array_equal(found, cutjax.gemm((X, X[:, :8]), (W, W[:8])))


@pytest.mark.parametrize("spec", ["rows", "columns", "contraction"])
def test_divided_over_devices(spec):
    mesh, p = mesh_of(i=4), jax.P
    of_a, of_b = {"rows": (p("i"), p()), "columns": (p(), p(None, "i")), "contraction": (p(None, "i"), p("i"))}[spec]
    place = lambda x, of: jax.device_put(x, jax.NamedSharding(mesh, of))  # noqa: E731
    for k in (8, 12):  # of different lengths the contraction is whole
        a, b, c, d = normal(0, (16, 8)), normal(1, (8, 24)), normal(2, (16, k)), normal(3, (k, 24))
        args = [place(x, of) for x, of in zip((a, b, c, d), (of_a, of_b) * 2, strict=True)]
        functions = lambda a, b, c, d: cutjax.gemm((a, c), (b, d)), lambda a, b, c, d: a @ b + c @ d
        compare(lambda f: jax.jit(jax.value_and_grad(squares(f), range(4))), functions, args, 1e-5)


def test_groups_over_devices():
    mesh, p = mesh_of(i=4), jax.P
    x, w = normal(0, (M, 8)), normal(1, (G, 8, 6))
    args = [jax.device_put(y, jax.NamedSharding(mesh, of)) for y, of in ((x, p()), (w, p("i")))]
    ours = lambda x, w: cutjax.grouped_gemm((x, 2 * x), (w, w), SIZES)  # noqa: E731
    compare(
        lambda f: jax.jit(jax.value_and_grad(squares(f), (0, 1))),
        (ours, lambda x, w: 3 * masked_multiply(x, w, SIZES)),
        args,
        1e-5,
    )


# What runs where there is no kernel for all at once.


def test_groups_are_added_in_an_epilogue():
    """Of more arrays than a launch has parameters for."""
    count = 40
    avals = lambda *shapes: [jax.ShapeDtypeStruct(shape, H) for shape in shapes]  # noqa: E731
    of_groups = lambda x, w: cutjax.grouped_gemm((x,) * count, (w,) * count, SIZES)  # noqa: E731
    rows = cutjax.explain(of_groups, arch="sm_90a")(*avals((4096, 256), (G, 256, 1024))).rows
    assert {str(row.epilogue): row.count for row in rows} == {"None": 1, "acc + x0": count - 2, "bf16(acc + x0)": 1}
    assert all(row.kernel != "XLA" for row in rows)


def test_terms_are_added_before_an_epilogue():
    traced = trace(lambda acc, b: jnp.tanh(acc) + acc * b, AVALS, (jnp.ones(N),))
    operands = (identity(F32), traced.epilogue)[1].operands
    residual = trace(lambda acc, c: acc + c.astype(acc.dtype), AVALS, (jnp.ones((M, N), H),)).epilogue.operands
    found = with_terms(traced.epilogue, residual)
    assert found.operands == operands + residual
    acc, b, c = normal(0, (M, N)), normal(1, (1, N)), normal(2, (M, N), H)
    (got,), (want,) = found.apply([acc], [b, c]), traced.epilogue.apply([acc + c.astype(F32)], [b])
    np.testing.assert_array_equal(got, want)


def test_backend_cuda_needs_a_kernel_of_each_product_alone():
    """More arrays than a launch has parameters for."""
    count = 40
    x, w = (jax.ShapeDtypeStruct(shape, H) for shape in ((256, 64), (G, 64, 128)))
    fn = lambda x, w: cutjax.grouped_gemm((x,) * count, (w,) * count, SIZES, backend="cuda")  # noqa: E731
    rows = cutjax.explain(fn, arch="sm_90a")(x, w).rows
    assert sum(row.count for row in rows) == count
    assert all(row.kernel.startswith("sm90") for row in rows)


def test_what_a_sum_is_not_of():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 3))
    with pytest.raises(TypeError, match="a sum of products is of numbers, got bool"):
        cutjax.gemm((x > 0, x > 0), (w > 0, w > 0))
    with pytest.raises(TypeError, match="the arrays of a have one dtype, got"):
        cutjax.gemm((x, x.astype(H)), (w, w))
    with pytest.raises(ValueError, match="products that are added up have one shape"):
        cutjax.gemm((x, jnp.ones((7, 4, 8))), (w, w))
    with pytest.raises(ValueError, match="a sum of products has no prologue"):
        cutjax.gemm((x, x), (w, w), prologue=lambda x: x)
