"""Layers of experts on the device, beside their form in plain JAX in float32: values, gradients, which kernels run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import cutjax

pytestmark = pytest.mark.gpu

BACKEND = "cuda"
CALL = "@cutjax_launch"
H = jnp.bfloat16
TOKENS, D, F, EXPERTS, K = 200, 72, 136, 8, 3
NAMES = ("x", "logits", "gate", "up", "down")
# Of a value or a gradient in bf16 to the norm of the right one: several roundings to bf16 on the way, each 1.7e-3.
TOLERANCE = 1e-2


def arguments(layout: str = "nn", batch: tuple[int, ...] = ()) -> list[jax.Array]:
    """Unit variance throughout; the last expert is never chosen."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((*batch, TOKENS, EXPERTS))
    logits[..., -1] = -30
    found = {"x": rng.standard_normal((*batch, TOKENS, D)), "logits": logits}
    for name, (k, n) in {"gate": (D, F), "up": (D, F), "down": (F, D)}.items():
        w = rng.standard_normal((EXPERTS, k, n)) * k**-0.5
        found[name] = np.ascontiguousarray(w if layout == "nn" else w.mT)
    return [jnp.asarray(found[name], H) for name in NAMES]


def plain(x, logits, gate, up, down, layout="nn"):
    """Each token by the matrices of each of its experts."""
    values, experts = jax.lax.top_k(jax.nn.softmax(logits), K)
    weights = values / values.sum(-1, keepdims=True)
    if layout == "nt":
        gate, up, down = (w.mT for w in (gate, up, down))
    dot = functools.partial(jnp.einsum, precision="highest")
    hidden = jax.nn.silu(dot("td,tkdf->tkf", x, gate[experts])) * dot("td,tkdf->tkf", x, up[experts])
    return dot("tkf,tkfd,tk->td", hidden, down[experts], weights)


def close(got, expected) -> None:
    for out, ref in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert out.shape == ref.shape
        out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
        error = np.linalg.norm(out - ref) / np.linalg.norm(ref)
        problems.note_worst("layer of experts", float(error) / TOLERANCE)
        assert error <= TOLERANCE, error


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@pytest.mark.parametrize("gather", ["copy", "loads"])
@pytest.mark.parametrize("save", ["default", "recompute"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_values_and_gradients(layout, save, gather):
    args, g = arguments(layout), jnp.asarray(np.random.default_rng(2).standard_normal((TOKENS, D)), H)

    def fused(*args):
        return cutjax.moe(*args, k=K, layout=layout, save=save, gather=gather, backend=BACKEND)

    @jax.jit
    def pulled(args, g):
        out, pull = jax.vjp(fused, *args)
        return out, pull(g)

    @jax.jit
    def expected(args, g):
        out, pull = jax.vjp(functools.partial(plain, layout=layout), *args)
        return out, pull(g)

    close(pulled(args, g), expected(wide(args), wide(g)))
    text = pulled.lower(args, g).as_text()
    assert "dot_general" not in text
    assert text.count(CALL) >= 2 + 2 + 3  # the forward products, what flows back through them, the weights' gradients
    assert ("_gathered" in text) == (gather == "loads")


def test_an_expert_without_tokens_has_no_gradient():
    args = arguments()
    grads = jax.jit(jax.grad(lambda *ws: cutjax.moe(*args[:2], *ws, k=K).astype(jnp.float32).sum(), (0, 1, 2)))
    for grad in grads(*args[2:]):
        assert not np.asarray(grad[-1]).astype(np.float32).any()
        assert np.isfinite(np.asarray(grad).astype(np.float32)).all()


def test_batches_are_more_tokens():
    args = arguments(batch=(2,))
    out = jax.jit(lambda *args: cutjax.moe(*args, k=K, backend=BACKEND))(*args)
    each = [plain(*wide([args[0][i], args[1][i], *args[2:]])) for i in range(2)]
    close(out, jnp.stack(each))


def test_nan_of_a_token_stays_in_it():
    args = arguments()
    function = jax.jit(lambda *args: cutjax.moe(*args, k=K, backend=BACKEND))
    right = np.asarray(function(*args)).astype(np.float32)
    out = np.asarray(function(args[0].at[7, 3].set(jnp.nan), *args[1:])).astype(np.float32)
    assert np.isnan(out[7]).all()
    np.testing.assert_array_equal(np.delete(out, 7, 0), np.delete(right, 7, 0))


@pytest.mark.parametrize("gather", ["copy", "loads"])
def test_the_same_bits_every_time(gather):
    args, how = arguments(), {"k": K, "gather": gather, "backend": BACKEND}
    function = jax.jit(jax.grad(lambda *args: cutjax.moe(*args, **how).astype(jnp.float32).sum(), (0, 1, 2, 3, 4)))
    first = function(*args)
    for _ in range(10):
        jax.tree.map(np.testing.assert_array_equal, function(*args), first)
