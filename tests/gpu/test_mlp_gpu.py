"""mlp on the device against its form in plain JAX, in float32: values, gradients, and which kernels run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

pytestmark = pytest.mark.gpu

H = jnp.bfloat16
NAMES = {
    "plain": ("x", "w1", "w2"),
    "gated": ("x", "w1", "w2", "gate"),
    "biases": ("x", "w1", "w2", "b1", "b2"),
    "gated, biases": ("x", "w1", "w2", "gate", "b1", "b2"),
}
M, K, F, N = 264, 136, 392, 200
# Of a gradient in bf16 to the norm of the right one: several roundings to bf16 on the way, each 1.7e-3.
TOLERANCE = 8e-3


def arguments(name: str, layout: str = "nn", batch: tuple[int, ...] = ()) -> dict[str, jax.Array]:
    rng = np.random.default_rng(len(name))
    shapes = {"x": (*batch, M, K), "w1": (K, F), "gate": (K, F), "w2": (F, N), "b1": (F,), "b2": (N,)}
    found = {}
    for key in NAMES[name]:
        value = rng.standard_normal(shapes[key]) * (shapes[key][0] ** -0.5 if key in ("w1", "w2", "gate") else 1)
        value = value.mT if layout == "nt" and key in ("w1", "w2", "gate") else value
        found[key] = jnp.asarray(np.ascontiguousarray(value), H)
    return found


def plain(x, w1, w2, b1=None, b2=None, gate=None, *, activation, layout):
    """In the dtype of its arguments, at full precision."""

    def dot(x, w):
        return jnp.matmul(x, w if layout == "nn" else w.mT, precision="highest")

    z = dot(x, w1) if b1 is None else dot(x, w1) + b1
    h = activation(z) if gate is None else activation(dot(x, gate)) * z
    return dot(h, w2) if b2 is None else dot(h, w2) + b2


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def close(got, expected, tolerance=TOLERANCE):
    for out, ref in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert out.shape == ref.shape
        out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
        error = np.linalg.norm(out - ref) / np.linalg.norm(ref)
        assert error <= tolerance, error


@pytest.mark.parametrize("save", ["default", "recompute"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu], ids=["silu", "gelu"])
def test_values_and_gradients(name, layout, save, activation):
    args = arguments(name, layout)
    g = jnp.asarray(np.random.default_rng(9).standard_normal((M, N)), H)
    backend = "cuda"

    def fused(args):
        return cutjax.mlp(**args, activation=activation, layout=layout, save=save, backend=backend)

    def expected(args):
        return plain(**args, activation=activation, layout=layout)

    close(jax.jit(fused)(args), jax.jit(expected)(wide(args)), 4e-3)
    got = jax.jit(lambda args: jax.vjp(fused, args)[1](g))(args)
    close(got, jax.jit(lambda args: jax.vjp(expected, args)[1](wide(g)))(wide(args)))


@pytest.mark.parametrize("name", ["plain", "gated"])
def test_programs_are_kernels(name):
    """No product of XLA's, and of h's gradient nothing: its product's epilogue applies the activation's derivative.

    The gate shares a kernel with what it gates, forward, in the gradient of x and in those of both weights.
    """
    args = arguments(name)
    products = 2 + 4

    def loss(args):
        return (cutjax.mlp(**args, activation=jax.nn.silu, backend="cuda").astype(jnp.float32) ** 2).sum()

    text = jax.jit(jax.grad(loss)).lower(args).as_text()
    assert "dot_general" not in text
    assert text.count("@cutjax_launch") == products


def test_batches_and_vmap():
    args = arguments("gated", batch=(3,))

    def fused(x, rest):
        return cutjax.mlp(x, **rest, activation=jax.nn.silu, backend="cuda")

    rest = {key: value for key, value in args.items() if key != "x"}
    expected = plain(**wide(args), activation=jax.nn.silu, layout="nn")
    close(jax.jit(fused)(args["x"], rest), expected, 4e-3)
    close(jax.jit(jax.vmap(fused, (0, None)))(args["x"], rest), expected, 4e-3)


def test_scan_over_layers():
    args = arguments("gated")
    w1, gate = (jnp.stack([args[key]] * 3) for key in ("w1", "gate"))
    w2 = jnp.asarray(np.random.default_rng(5).standard_normal((3, F, K)) * F**-0.5, H)

    def loss(layer, x, *ws):
        return (jax.lax.scan(lambda h, ws: (h + layer(h, *ws), None), x, ws)[0].astype(jnp.float32) ** 2).mean()

    def fused(x, w1, gate, w2):
        return cutjax.mlp(x, w1, w2, gate=gate, activation=jax.nn.silu, backend="cuda")

    def expected(x, w1, gate, w2):
        return plain(x, w1, w2, gate=gate, activation=jax.nn.silu, layout="nn")

    got = jax.jit(jax.grad(lambda *xs: loss(fused, *xs), (0, 1, 2, 3)))(args["x"], w1, gate, w2)
    wanted = jax.jit(jax.grad(lambda *xs: loss(expected, *xs), (0, 1, 2, 3)))(*wide((args["x"], w1, gate, w2)))
    close(got, wanted, 2e-2)


def test_the_same_bits_every_time():
    args = arguments("gated")
    fn = jax.jit(
        jax.grad(lambda args: cutjax.mlp(**args, activation=jax.nn.silu, backend="cuda").astype(jnp.float32).sum())
    )
    first = fn(args)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, fn(args), first)
