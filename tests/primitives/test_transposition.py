"""Linear functions of products with epilogues, and of cutjax.fuse, transpose as in plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, scaled
from jax import lax
from jax.scipy.sparse.linalg import bicgstab

import cutjax

always = functools.partial(cutjax.fuse, policy="always")
M, K, N, G = 6, 8, 8, 3
X, W, V, C = scaled(0, (M, K)), scaled(1, (K, N)), scaled(2, (K, N)), scaled(3, (M, N))
E, SIZES = scaled(4, (G, K, N)), jnp.array([2, 0, 3])  # of 6 rows, so that one is of no group
BIAS = scaled(5, (G, 1, N))


GROUP_OF_ROW = jnp.array([[1, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]], jnp.float32)


def of_groups(x, w):
    return jnp.einsum("mg,mk,gkn->mn", GROUP_OF_ROW, x, w)


def two(a, b, c):
    return (a * 2 - b * c).astype(jnp.float32), (a + b).sum(-1)


# A linear function of one array, the same in plain JAX, and the array.
FUNCTIONS = {
    "a": (lambda x: cutjax.gemm(x, W, epilogue=lambda a: a * 2), lambda x: x @ W * 2, X),
    "b": (lambda w: cutjax.gemm(X, w, epilogue=lambda a: a / 3 - a), lambda w: X @ w / 3 - X @ w, W),
    "operand": (lambda c: cutjax.gemm(X, W, epilogue=lambda a, c: a * c, operands=(c,)), lambda c: X @ W * c, C),
    "operand of one row": (
        lambda c: cutjax.gemm(X, W, epilogue=lambda a, c: jnp.where(a > 0, c, -c), operands=(c,)),
        lambda c: jnp.where(X @ W > 0, c, -c),
        C[0],
    ),
    "a and an operand": (
        lambda x: cutjax.gemm(x, W, epilogue=lambda a, r: a * 2 + r, operands=(x,)),
        lambda x: x @ W * 2 + x,
        X,
    ),
    "several products and results": (
        lambda x: cutjax.gemm(x, (W, V), epilogue=two, operands=(C,)),
        lambda x: two(x @ W, x @ V, C),
        X,
    ),
    "batch": (
        lambda w: cutjax.gemm(X[None, :2], w, epilogue=lambda a: -a),
        lambda w: -(X[None, :2] @ w),
        scaled(6, (2, K, N)),
    ),
    "rows in groups": (
        lambda x: cutjax.grouped_gemm(x, E, SIZES, epilogue=lambda a: a * 2),
        lambda x: of_groups(x, E) * 2,
        X,
    ),
    "matrices of groups": (
        lambda w: cutjax.grouped_gemm(X, w, SIZES, epilogue=lambda a, c: a * c, operands=(C,)),
        lambda w: of_groups(X, w) * C,
        E,
    ),
    "an operand of groups": (
        lambda o: cutjax.grouped_gemm(X, E, SIZES, epilogue=lambda a, o: a * o, operands=(o,)),
        lambda o: of_groups(X, E) * (GROUP_OF_ROW @ o[:, 0]),
        BIAS,
    ),
    "depth in groups": (
        lambda a: cutjax.grouped_outer(a, C, SIZES, accumulate=E),
        lambda a: jnp.einsum("mg,mk,mn->gkn", GROUP_OF_ROW, a, C) + E,
        X,
    ),
    "syrk's operand": (
        lambda c: cutjax.syrk(X, epilogue=lambda a, c: a * c, operands=(c,)),
        lambda c: X @ X.T * c,
        jnp.float32(2),
    ),
    "mlp": (lambda x: cutjax.mlp(x, W, V, activation=lambda h: h * 2), lambda x: (x @ W * 2) @ V, X),
    "mlp's second weight": (lambda w: cutjax.mlp(X, W, w, activation=jnp.tanh), lambda w: jnp.tanh(X @ W) @ w, V),
    "fuse": (always(lambda x: x @ W * 2 + x), lambda x: x @ W * 2 + x, X),
    "fuse of a scan": (
        always(lambda x: lax.scan(lambda c, _: (c @ W * 2 + c, None), x, None, length=3)[0]),
        lambda x: lax.scan(lambda c, _: (c @ W * 2 + c, None), x, None, length=3)[0],
        X,
    ),
    "fuse of a linearized function": (
        always(jax.linearize(lambda x: jnp.tanh(x @ W), X)[1]),
        jax.linearize(lambda x: jnp.tanh(x @ W), X)[1],
        X,
    ),
}


def transposed(fn, x):
    """The transpose at a fixed cotangent for each result."""

    def of(g):
        cotangents = jax.tree.map(lambda y: g * scaled(9, y.shape, y.dtype), jax.eval_shape(fn, x))
        return jax.linear_transpose(fn, x)(cotangents)[0]

    return of


@pytest.mark.parametrize("name", FUNCTIONS)
def test_linear_functions_transpose(name):
    """By itself, jitted, batched, of what is batched, and differentiated."""
    fn, plain, x = FUNCTIONS[name]

    def ways(fn):
        one, both = jnp.float32(1), jnp.stack([x, -x])
        found = transposed(fn, x)
        batched = jax.vmap(found)(jnp.stack([one, -one])), transposed(jax.vmap(fn), both)(one)
        return found(one), transposed(jax.jit(fn), x)(one), batched, jax.jvp(found, (one,), (one,))[1]

    got, expected = jax.jit(lambda: (ways(fn), ways(plain)))()
    close(got, expected, 1e-5)


@pytest.mark.parametrize("seed", range(5))  # after a change of transposition: 100
def test_random_linear_functions_transpose(seed):
    """Products and what is linear around them, under fuse: the transpose, and the transpose of that."""

    def fn(x):
        rng = np.random.default_rng(seed)
        pick = lambda values: values[rng.integers(len(values))]  # noqa: E731
        unary = [
            lambda y: y * C,
            lambda y: -y / 3,
            lambda y: jnp.where(C > 0, y, 0.0),
            lambda y: y.reshape(2, 3, N).sum(1, keepdims=True).repeat(3, 1).reshape(M, N),
            lambda y: y.astype(jnp.bfloat16).astype(jnp.float32) if seed % 4 == 0 else y + y,
            lambda y: jnp.concatenate([y[:2], y[2:]]),
            lambda y: y - jnp.mean(y, -1, keepdims=True),
        ]
        values = [x]
        for step in range(9):
            y = pick(values)
            if step % 3 == 0:
                y = y @ pick([W, V, W.T]) if rng.integers(2) else (pick([W, V]).T @ y.T).T
            elif rng.integers(3):
                y = pick(unary)(y)
            else:
                y = y - 2 * pick(values)
            values.append(y)
        return values[-1], values[-2].sum(0)

    def ways(fn):
        one = jnp.float32(1)
        again = transposed(lambda g: jax.linear_transpose(fn, X)(g)[0], jax.eval_shape(fn, X))
        return transposed(fn, X)(one), again(one)

    got, expected = jax.jit(lambda: (ways(always(fn)), ways(fn)))()
    close(got, expected, 2**-6 if seed % 4 == 0 else 1e-4)  # what is rounded to 16 bits; the order of sums


A, B = np.asarray(scaled(7, (K, K))) / 4 + 2 * np.eye(K, dtype=np.float32), scaled(8, (M, K))
MATVECS = {
    "fuse": lambda a: always(lambda x: x @ a * 2 + x),
    "gemm": lambda a: lambda x: cutjax.gemm(x, a, epilogue=lambda acc, r: acc * 2 + r, operands=(x,)),
}


@pytest.mark.parametrize("name", MATVECS)
def test_gradients_of_linear_solves(name):
    def gradients(matvec):
        def loss(a, b):
            x = bicgstab(matvec(a), b, tol=1e-6)[0]
            direct = lax.custom_linear_solve(
                matvec(a),
                b,
                lambda _, b: b @ jnp.linalg.inv(2 * a + jnp.eye(K)),
                lambda _, b: b @ jnp.linalg.inv(2 * a + jnp.eye(K)).T,
            )
            return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(direct))

        return jax.jit(jax.grad(loss, (0, 1)))(A, B)

    close(gradients(MATVECS[name]), gradients(lambda a: lambda x: x @ a * 2 + x), 1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def of(matvec):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P("d"), check_vma=check_vma
        )
        def mapped(a, x):
            return jax.linear_transpose(matvec(a), x)(x)[0]

        return jax.jit(mapped)(A, B)

    for matvec in MATVECS.values():
        close(of(matvec), of(lambda a: lambda x: x @ a * 2 + x), 1e-5)


NOT_LINEAR = {
    "tanh": lambda x: cutjax.gemm(x, W, epilogue=jnp.tanh),
    "square": lambda x: cutjax.gemm(x, W, epilogue=lambda a: a * a),
    "both operands": lambda x: cutjax.gemm(x, x.T),
    "both operands, scaled": lambda x: cutjax.gemm(x, x.T, epilogue=lambda a: a * 2),
    "an operand by the product": lambda x: cutjax.gemm(x, W, epilogue=lambda a, c: a * c, operands=(x,)),
    "syrk": cutjax.syrk,
    "rows in groups": lambda x: cutjax.grouped_gemm(x, E, SIZES, epilogue=jax.nn.relu),
    "stop_gradient": lambda x: cutjax.gemm(x, W, epilogue=lax.stop_gradient),
    "fuse": always(lambda x: jnp.tanh(x @ W)),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_says_so(name):
    fn = NOT_LINEAR[name]
    with pytest.raises(NotImplementedError, match=r"no transpose, for it is not linear in argument 0.*use jax\.vjp"):
        jax.linear_transpose(fn, X)(fn(X))


@pytest.mark.parametrize("epilogue", [None, lambda a: a * 2])
def test_integers_have_the_zeros_that_jax_gives(epilogue):
    x, w = jnp.ones((M, K), jnp.int32), jnp.ones((K, N), jnp.int32)
    (zero,) = jax.linear_transpose(lambda x: cutjax.gemm(x, w, epilogue=epilogue), x)(x @ w)
    assert (zero.shape, zero.dtype) == (x.shape, jax.dtypes.float0)
