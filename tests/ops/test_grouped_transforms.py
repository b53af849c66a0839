"""grouped_gemm and grouped_outer alone: vmap without copies, what runs backward, sizes as data. Else: the battery."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checks import integers, same
from oracles import masked_multiply, masked_outer

import cutjax

M, K, N, G = 24, 8, 6, 4
SIZES = jnp.array([5, 0, 10, 6], jnp.int32)  # three rows have no group


def operands(layout: str, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    return integers(0, (M, K), dtype), integers(1, (G, *((K, N) if layout == "nn" else (N, K))), dtype)


SOME_AXES = [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (1, None, 1), (None, 2, 0), (0, 1, 0)]


def test_vmap_of_group_offset():
    x, w = operands("nn")
    got = jax.vmap(lambda w, i: cutjax.grouped_gemm(x, w[None], SIZES, group_offset=i))(w, jnp.arange(G))
    same(got.sum(0), masked_multiply(x, w, SIZES))


def primitives(fn, *args) -> list[str]:
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return sorted(eqn.primitive.name for eqn in jaxpr.eqns)


@pytest.mark.versions
@pytest.mark.parametrize("axes", SOME_AXES, ids=str)
def test_vmap_never_copies_the_weights(axes):
    """A batch axis of the operation, of size 1 where an operand is shared; in the backward pass, too."""
    x, w = (jnp.stack([v] * 3) if axis is not None else v for v, axis in zip(operands("nn"), axes, strict=False))
    sizes = SIZES if axes[2] is None else jnp.stack([SIZES] * 3)
    axes = tuple(axis if axis is None else 0 for axis in axes)
    mapped = jax.vmap(cutjax.grouped_gemm, axes)
    for fn in (mapped, lambda x, w, sizes: jax.vjp(lambda x, w: mapped(x, w, sizes), x, w)[1](jnp.ones((3, M, N)))):
        jaxpr = jax.make_jaxpr(fn)(x, w, sizes).jaxpr
        for eqn in jaxpr.eqns:
            assert eqn.primitive.name not in ("transpose", "concatenate", "gather")
            if eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape:
                assert eqn.invars[0].aval.size == eqn.outvars[0].aval.size


@pytest.mark.versions
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_backward_is_two_products_and_no_transpose(layout):
    x, w = operands(layout)
    dy = integers(3, (M, N))

    def backward(x, w, dy):
        return jax.vjp(lambda x, w: cutjax.grouped_gemm(x, w, SIZES, layout=layout), x, w)[1](dy)

    products = [name for name in primitives(backward, x, w, dy) if name.startswith("cutjax")]
    assert products == ["cutjax_grouped_gemm", "cutjax_grouped_gemm", "cutjax_grouped_outer"]
    assert "transpose" not in primitives(backward, x, w, dy)
    problems = [row.choice.problem for row in cutjax.explain(jax.jit(backward))(x, w, dy).rows]
    assert sorted(p.layout for p in problems) == sorted(["nt" if layout == "nn" else "nn", "tn"])  # and no forward


def test_gradient_of_shared_weights_is_rounded_once():
    """The terms of a batch sum stay in float32: 257 is none of bfloat16's numbers, yet 257 - 256 is 1."""
    x = jnp.array([[[256], [1]], [[-256], [0]]], jnp.bfloat16)
    w = jnp.ones((1, 1, 1), jnp.bfloat16)

    def total(w, x):
        return cutjax.grouped_gemm(x, w, jnp.array([2]), out_dtype=jnp.float32).sum()

    dw = jax.grad(lambda w: jax.vmap(total, (None, 0))(w, x).sum())(w)
    assert (dw.dtype, dw[0, 0, 0]) == (jnp.bfloat16, 1)
    dx = jax.grad(
        lambda x: jax.vmap(total, (0, None))(jnp.array([256, 1, -256], x.dtype)[:, None, None, None], x).sum()
    )
    assert dx(jnp.ones((2, 1), jnp.bfloat16))[0, 0] == 1


def test_gradients_have_the_operands_dtype():
    x, w = operands("nn", jnp.bfloat16)
    grad = jax.grad(lambda x, w: cutjax.grouped_gemm(x, w, SIZES, out_dtype=jnp.float32).sum(), (0, 1))
    assert [g.dtype for g in grad(x, w)] == [jnp.bfloat16] * 2
    rows = cutjax.explain(grad)(x, w).rows
    assert {row.choice.problem.a.dtype.name for row in rows} == {"bfloat16"}  # a kernel can serve it


@pytest.mark.versions
def test_sizes_are_data(caplog):
    """No size is read by the host: one program serves all of them, and they may come from the device."""
    x, w = operands("nn")
    routed = jax.jit(lambda x, w, e: cutjax.grouped_gemm(x, w, jnp.bincount(e, length=G)))
    routed(x, w, jnp.zeros(M, jnp.int32))
    experts = jnp.arange(M, dtype=jnp.int32) % G
    with jax.log_compiles(), jax.transfer_guard_device_to_host("disallow"):
        caplog.clear()
        y = routed(x, w, experts)
        assert not [record for record in caplog.records if "ompil" in record.getMessage()]
    same(y, masked_multiply(x, w, jnp.full(G, M // G)))


@pytest.mark.versions
def test_disable_jit_and_donation():
    x, w = operands("nn")
    expected = masked_multiply(x, w, SIZES)
    with jax.disable_jit():
        same(cutjax.grouped_gemm(x, w, SIZES), expected)
    to = integers(2, (G, K, N))
    expected = to + masked_outer(x, x[:, :N], SIZES)
    add = jax.jit(lambda x, dy, to: cutjax.grouped_outer(x, dy, SIZES, accumulate=to), donate_argnums=2)
    same(add(x, x[:, :N], to), expected)
    assert to.is_deleted()


@pytest.mark.versions
def test_sizes_have_no_tangent():
    x, w = operands("nn")
    _, vjp = jax.vjp(cutjax.grouped_gemm, x, w, SIZES)
    assert vjp(jnp.ones((M, N)))[2].dtype == jax.dtypes.float0
    with jax.numpy_dtype_promotion("standard"):
        dw = jax.grad(lambda w: cutjax.grouped_gemm(x.astype(jnp.int8), w, SIZES).sum())(w)  # integers have none either
    assert dw.shape == w.shape
