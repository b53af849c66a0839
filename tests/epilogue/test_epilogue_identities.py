"""Epilogues around identities that mean something: names of jax.checkpoint, barriers, shardings; their derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checks import close, integers, same, scaled
from identities import MEANING, SHARDING, names, products
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import cutjax
from cutjax.epilogue.trace import trace

policies = jax.checkpoint_policies
X, W, V, C = scaled(1, (6, 4)), scaled(2, (4, 4)), scaled(3, (4, 4)), scaled(4, (4,))
G, SIZES = scaled(5, (3, 4, 4)), jnp.array([2, 0, 4])


def named(a, *rest):
    """A name within, and one of a result."""
    return checkpoint_name(jnp.sin(checkpoint_name(jnp.tanh(a), "a") * 2), "b")


# An operation with an epilogue, and the same in plain JAX.
OPERATIONS = {
    "gemm": (lambda e, x, w: cutjax.gemm(x, w, epilogue=e), lambda e, x, w: e(x @ w)),
    "operand": (
        lambda e, x, w: cutjax.gemm(x, w, epilogue=lambda a, c: e(a + c), operands=(C,)),
        lambda e, x, w: e(x @ w + C),
    ),
    "gate": (
        lambda e, x, w: cutjax.gemm(x, (w, V), epilogue=lambda a, b: e(a) * b),
        lambda e, x, w: e(x @ w) * (x @ V),
    ),
    "two": (
        lambda e, x, w: cutjax.gemm(x, w, epilogue=lambda a: (e(a), a)),
        lambda e, x, w: (e(x @ w), x @ w),
    ),
    "grouped": (
        lambda e, x, w: cutjax.grouped_gemm(x, w * G, SIZES, epilogue=e),
        lambda e, x, w: e(lax.ragged_dot(x, w * G, SIZES)),
    ),
    "mlp": (lambda e, x, w: cutjax.mlp(x, w, V, activation=e), lambda e, x, w: e(x @ w) @ V),
    "gated mlp": (
        lambda e, x, w: cutjax.mlp(x, w, V, gate=V, activation=e),
        lambda e, x, w: (e(x @ V) * (x @ w)) @ V,
    ),
}
FUNCTIONS = {name: MEANING[name] for name in MEANING if name not in ("constraint", "placed")} | {"named": named}


def loss(fn):
    return lambda x, w: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fn(x, w)))


# Each function in two of the operations, each operation with four or more; all of them while this was written.
PAIRS = [
    (list(OPERATIONS)[(i + other) % len(OPERATIONS)], function)
    for i, function in enumerate(FUNCTIONS)
    for other in (0, 3)
]


@pytest.mark.parametrize(("operation", "function"), PAIRS)
def test_derivatives(operation, function):
    """Values, first and second derivatives, forward mode."""
    ours, plain = (lambda x, w, f=f: f(FUNCTIONS[function], x, w) for f in OPERATIONS[operation])

    def taken(fn):
        first = jax.grad(loss(fn), (0, 1))
        found = [fn(X, W), first(X, W)]
        if function != "custom_vjp":
            found.append(jax.jvp(fn, (X, W), (W[:1] + X, W * 2)))
        if operation != "grouped":  # of which JAX has no second derivative
            found.append(jax.grad(lambda *args: sum(jnp.sum(jnp.cos(y)) for y in first(*args)), (0, 1))(X, W))
        return found

    got, expected = jax.jit(lambda: (taken(ours), taken(plain)))()
    close(got, expected, 1e-4)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["a", "b"])
def test_names_are_saved(operation, name):
    ours, plain = (lambda x, w, f=f: f(named, x, w) for f in OPERATIONS[operation])
    save = policies.save_only_these_names(name)
    of = lambda fn, policy: jax.value_and_grad(loss(jax.checkpoint(fn, policy=policy)), (0, 1))  # noqa: E731
    assert names(of(ours, save), X, W) == names(of(plain, save), X, W) == {"a", "b"}
    assert products(of(ours, save), X, W) <= products(of(plain, save), X, W)
    close(of(ours, save)(X, W), of(plain, None)(X, W), 1e-4)


def test_a_name_of_a_result_costs_nothing():
    """The kernel's derivative stays its own."""
    fn = lambda a: checkpoint_name(jnp.tanh(a), "b")  # noqa: E731
    found = trace(fn, [jax.ShapeDtypeStruct((6, 4), jnp.float32)])
    assert found.outside is None
    assert str(found.epilogue) == "tanh(acc)"
    assert trace(named, [jax.ShapeDtypeStruct((6, 4), jnp.float32)]).outside is not None


@pytest.mark.parametrize("tell", [MEANING["constraint"], MEANING["placed"], lambda x: jax.device_put(x, SHARDING)])
def test_what_no_kernel_can_keep_is_refused(tell):
    with pytest.raises(NotImplementedError, match="is no elementwise operation of a kernel; apply it to the result"):
        cutjax.gemm(X, W, epilogue=lambda a: tell(a) * 2)
    # Of an operand it stays where it was.
    fn = lambda x, w: cutjax.gemm(x, w, epilogue=lambda a, c: a + tell(c), operands=(C,))  # noqa: E731
    close(fn(X, W), X @ W + tell(C), 1e-6)


def test_a_barrier_keeps_what_it_stands_between():
    """XLA would drop a conversion to 16 bits and back, were it not for the barrier."""

    def fn(a):
        return lax.optimization_barrier(a.astype(jnp.bfloat16)).astype(jnp.float32)

    x, w = integers(1, (4, 8)) * 0.37, integers(2, (8, 4))
    same(jax.jit(lambda x, w: cutjax.gemm(x, w, epilogue=fn))(x, w), fn(x @ w))
    wide = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    kernel = lambda x, w: cutjax.gemm(x, w, epilogue=fn, backend="cuda")  # noqa: E731
    (row,) = cutjax.explain(kernel, platform="cuda")(wide, wide).rows
    assert row.choice.kernel is not None
