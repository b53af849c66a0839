"""Grouped products on several devices: shard_map with check_vma=True, and XLA's partitioner; 8 virtual CPU devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, mesh_of, same
from jax import lax
from oracles import masked_multiply, masked_outer

import cutjax

P = jax.P
M, K, N, G = 32, 8, 16, 8
SIZES = jnp.array([5, 0, 10, 1, 3, 0, 0, 9], jnp.int32)  # four rows have no group
X, W, DY = integers(0, (M, K)), integers(1, (G, K, N)), integers(2, (M, N))


MESH = mesh_of(i=8)


def loss(f, x, w):
    return (f(x, w) ** 2).sum()


EXPECTED = jax.jit(jax.value_and_grad(functools.partial(loss, lambda x, w: masked_multiply(x, w, SIZES)), (0, 1)))(X, W)


def expert_parallel(x, w):
    """Each device has the weights of some experts and adds what they make of all rows."""
    local = cutjax.grouped_gemm(x, w, SIZES, group_offset=lax.axis_index("i") * w.shape[0])
    return lax.psum(local, "i")


def tensor_parallel(x, w):
    """Each device has some columns of every expert."""
    return cutjax.grouped_gemm(x, w, SIZES)


def contraction_parallel(x, w):
    return lax.psum(cutjax.grouped_gemm(x, w, SIZES), "i")


PATTERNS = {
    "expert": (expert_parallel, P(), P("i"), P()),
    "tensor": (tensor_parallel, P(), P(None, None, "i"), P(None, "i")),
    "contraction": (contraction_parallel, P(None, "i"), P(None, "i"), P()),
}
patterns = pytest.mark.parametrize(("fn", "x_spec", "w_spec", "y_spec"), PATTERNS.values(), ids=PATTERNS.keys())


@pytest.mark.versions
@patterns
def test_gradient_of_shard_map(fn, x_spec, w_spec, y_spec):
    sharded = jax.shard_map(fn, mesh=MESH, in_specs=(x_spec, w_spec), out_specs=y_spec)
    gradient = jax.value_and_grad(functools.partial(loss, sharded), (0, 1))
    same(jax.jit(gradient)(X, W), EXPECTED)


@pytest.mark.versions
@patterns
def test_gradient_inside_shard_map(fn, x_spec, w_spec, y_spec):
    def inside(x, w):
        value, grads = jax.value_and_grad(functools.partial(loss, fn), (0, 1))(x, w)
        return (lax.psum(value, "i") if y_spec == P(None, "i") else value), grads

    sharded = jax.shard_map(inside, mesh=MESH, in_specs=(x_spec, w_spec), out_specs=(P(), (x_spec, w_spec)))
    same(jax.jit(sharded)(X, W), EXPECTED)


def test_rows_divided():
    """Each device has rows and sizes of its own; the weights are replicated, so their gradient is a sum."""
    sizes = jnp.array(np.random.default_rng(0).integers(-1, 3, (8, G)), jnp.int32)

    def local(x, w, sizes):
        return cutjax.grouped_gemm(x, w, sizes[0])

    def divided(f, x, w):
        return jax.shard_map(f, mesh=MESH, in_specs=(P("i"), P(), P("i")), out_specs=P("i"))(x, w, sizes)

    def whole(x, w):
        clipped = jnp.maximum(sizes, 0)
        return jax.vmap(masked_multiply, (0, None, 0))(x.reshape(8, -1, K), w, clipped).reshape(M, N)

    got = jax.jit(jax.value_and_grad(functools.partial(loss, functools.partial(divided, local)), (0, 1)))(X, W)
    same(got, jax.value_and_grad(functools.partial(loss, whole), (0, 1))(X, W))


def test_outer_and_accumulate():
    def local(x, dy, to):
        offset = lax.axis_index("i") * to.shape[0]
        plain = cutjax.grouped_outer(x, dy, SIZES, group_offset=offset, groups=to.shape[0])
        return plain, cutjax.grouped_outer(x, dy, SIZES, accumulate=to, group_offset=offset, groups=to.shape[0])

    to = integers(3, W.shape)
    sharded = jax.shard_map(local, mesh=MESH, in_specs=(P(), P(), P("i")), out_specs=P("i"))
    expected = masked_outer(X, DY, SIZES)
    same(jax.jit(sharded)(X, DY, to), (expected, expected + to))
    gradient = jax.grad(lambda x, dy, to: sum((v**2).sum() for v in sharded(x, dy, to)), (0, 1, 2))
    plain = jax.grad(lambda x, dy, to: sum((masked_outer(x, dy, SIZES) + t) ** 2 for t in (0, to)).sum(), (0, 1, 2))
    same(jax.jit(gradient)(X, DY, to), plain(X, DY, to))


@pytest.mark.versions
def test_scan_and_vmap_inside_shard_map():
    w = integers(1, (3, G, K, K)) % 2

    def layers(multiply, x, w):
        return lax.scan(lambda h, w: (multiply(h, w), None), x, w)[0]

    def mapped(x, w):
        return jax.vmap(functools.partial(layers, expert_parallel), (0, None))(x, w)

    xs = jnp.stack([X, -X])
    sharded = jax.shard_map(mapped, mesh=MESH, in_specs=(P(), P(None, "i")), out_specs=P())
    plain = jax.vmap(functools.partial(layers, lambda x, w: masked_multiply(x, w, SIZES)), (0, None))
    got, expected = (jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1)))(xs, w) for f in (sharded, plain))
    same(got, expected)


@pytest.mark.versions
def test_vmap_of_shard_map():
    sharded = jax.shard_map(expert_parallel, mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
    got = jax.jit(jax.vmap(sharded, (0, None)))(jnp.stack([X, X + 1]), W)
    same(got, jax.vmap(lambda x: masked_multiply(x, W, SIZES))(jnp.stack([X, X + 1])))


def quantized(zeros: bool) -> tuple[cutjax.Quantized, jax.Array]:
    """Weights with a scale, and a zero point or none, for each column and 4 of k, and x beside them."""
    k = 8 * K
    values, scale = integers(4, (G, k, N), jnp.int4), jnp.exp2(integers(5, (G, k // 4, N)))
    zero = integers(6, scale.shape, jnp.int4) if zeros else None
    return cutjax.Quantized(values, scale, zero), integers(7, (M, k))


@pytest.mark.parametrize("zeros", [False, True])
@patterns
def test_quantized_weights_divide_with_their_scales(fn, x_spec, w_spec, y_spec, zeros):
    """Values, scales and zero points by one spec; the gradients in x and in the scales."""
    q, x = quantized(zeros)

    def run(multiply, x, scale):
        return (multiply(x, cutjax.Quantized(q.values, scale, q.zero_point)) ** 2).sum()

    def local(x, *arrays):
        return fn(x, cutjax.Quantized(*arrays))

    arrays = q.values, q.scale, *((q.zero_point,) if zeros else ())
    specs = (w_spec,) * len(arrays)
    sharded = jax.shard_map(local, mesh=MESH, in_specs=(x_spec, *specs), out_specs=y_spec)

    def divided(x, q):
        return sharded(x, q.values, q.scale, *((q.zero_point,) if zeros else ()))

    got = jax.jit(jax.value_and_grad(functools.partial(run, divided), (0, 1)))(x, q.scale)
    plain = functools.partial(run, lambda x, q: masked_multiply(x, q.dequantize(), SIZES))
    same(got, jax.jit(jax.value_and_grad(plain, (0, 1)))(x, q.scale))


@pytest.mark.parametrize("spec", [spec for _, _, spec, _ in PATTERNS.values()], ids=PATTERNS)
def test_quantized_weights_divided_by_jit(spec):
    q, x = quantized(True)
    put = functools.partial(jax.device_put, device=jax.NamedSharding(MESH, spec))
    there = jax.tree.map(put, q)
    assert there.zero_point.sharding.shard_shape(q.scale.shape) != q.scale.shape
    same(jax.jit(cutjax.grouped_gemm)(x, there, SIZES), masked_multiply(x, q.dequantize(), SIZES))
