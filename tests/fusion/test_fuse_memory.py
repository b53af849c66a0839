"""cutjax.fuse: what its kernels leave in memory, and the memory that results share with operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from checks import close, scaled
from jax.ad_checkpoint import checkpoint_name

import cutjax
from cutjax.binding import walk

always = functools.partial(cutjax.fuse, policy="always")
BF16 = jnp.bfloat16
ROUNDING = 2**-6  # as in test_fuse.py
X, W, V = scaled(1, (64, 32), BF16), scaled(2, (32, 48), BF16), scaled(3, (32, 48), BF16)
DOWN, OUT = scaled(4, (48, 32), BF16), scaled(5, (64, 32), BF16)


def shared(fn, *args):
    """Returns, of each fused product that explain would show, the operands that share memory with results."""
    found, _ = walk.products(fn, args, {}, "cuda")
    return [x.eqn.params["in_place"] for x in found if not x.eqn.params["epilogue"].primal.plain]


def gated(x, w, v, down):
    return (jax.nn.silu(x @ w) * (x @ v)) @ down


def gradients(x, w, v, down, g):
    return jax.vjp(gated, x, w, v, down)[1](g)


def test_gradients_of_a_gate_take_the_place_of_what_they_are_made_of():
    args = X, W, V, DOWN, OUT
    assert sorted(shared(always(gradients), *args)) == [(), ((0, 0),), ((0, 0), (1, 1))]
    close(always(gradients)(*args), jax.jit(gradients)(*args), 2 * ROUNDING)


def test_memory_that_is_read_later_is_not_shared():
    def block(x, w, y, more=lambda h: ()):
        h = jax.lax.sort(y)
        return x @ w + h, more(h)

    args = X, W, scaled(6, (64, 48), BF16)
    assert shared(always(block), *args) == [((0, 0),)]
    named = always(lambda x, w, y: checkpoint_name(checkpoint_name(x @ w, "a") + jax.lax.sort(y), "b"))
    assert shared(named, *args) == [((0, 0),)]
    assert shared(always(lambda x, w, y: x @ w + y), *args) == [()]  # an argument, the caller's
    for more in (lambda h: h, lambda h: h[:1], lambda h: h.reshape(-1)):
        assert shared(always(functools.partial(block, more=more)), *args) == [()]


def test_what_passes_make_of_memory_is_read_before_it_is_shared():
    """As in ResNet's gradients: a weight's reads what a pass makes of the residual's, so XLA computes that again."""

    def block(x, w, y, between):
        h = jax.lax.sort(y)
        scaled_h = 2 * h
        return between(x, jax.lax.sort(scaled_h)) @ w + h, jax.lax.sort(scaled_h.T)

    args = X, W, scaled(6, (64, 48), BF16)
    before = always(functools.partial(block, between=lambda x, z: x + z[:, :32]))
    assert shared(before, *args) == [()]
    alone = always(lambda *args: block(*args, between=lambda x, z: x + z[:, :32])[0])
    assert shared(alone, *args) == [((0, 0),)]


def test_masks_are_not_kept():
    """As of ResNet's sums: a kernel reads the activations, which are kept for a weight's gradient."""

    def block(x, w, y, down, g):
        more = jax.lax.sort(y)
        h = x @ w + more
        return jax.nn.relu(h) @ down, jnp.where(h > 0, g @ down.T, more)

    args = [jnp.sign(x) for x in (X, W, scaled(6, (64, 48), BF16), DOWN, OUT)]  # no rounding changes a mask
    found, _ = walk.products(always(block), args, {}, "cuda")
    tails = [product.eqn.params["epilogue"].primal for product in found]
    assert [[x.dtype for x in tail.operands] for tail in tails] == [["bfloat16"], ["bfloat16", "bfloat16"]]
    assert [len(tail.outputs) for tail in tails] == [1, 1]
    close(always(block)(*args), jax.jit(block)(*args), 2 * ROUNDING)


def test_an_operand_of_the_product_is_not_written_over():
    def residual(x, w):
        h = jax.lax.sort(x)
        return h @ w + h

    w = scaled(7, (32, 32), BF16)
    assert shared(always(residual), X, w) == [()]
    close(always(residual)(X, w), jax.jit(residual)(X, w), ROUNDING)


def test_derivatives_keep_what_they_read():
    """The operand is needed by the derivative, so the kernel that saves for it does not write over it."""

    def loss(x, w, y):
        h = jax.lax.sort(y)
        return (jnp.tanh(x @ w) * h).astype(jnp.float32).sum()

    y = scaled(6, (64, 48), BF16)
    gradient = jax.grad(always(loss), (0, 1, 2))
    assert not any(shared(gradient, X, W, y))
    close(gradient(X, W, y), jax.jit(jax.grad(loss, (0, 1, 2)))(X, W, y), 2 * ROUNDING)


def test_no_results_are_added_to_what_xla_keeps():
    """XLA keeps one product of which two later passes make what they read; a kernel would write both."""

    def block(x, y, w, v, name=lambda x, _: x):
        acc = x @ w
        first, second = name(jnp.sin(acc), "first"), name(jnp.cos(acc), "second")
        return (y @ v) * first, (y[::-1] @ v) * second

    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((8192, 4096),) * 2 + ((4096, 4096),) * 2]

    def first(**more):
        return cutjax.explain(cutjax.fuse(functools.partial(block, **more)), platform="cuda")(*args).fusion[0]

    why = "it would keep 1 results of full size more in memory than XLA"
    assert why in first(name=checkpoint_name).stops  # no kernel makes again what has a name
    assert why not in first().stops
