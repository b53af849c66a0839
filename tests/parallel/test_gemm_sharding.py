"""gemm on several devices: shard_map with check_vma=True, automatic and explicit sharding; 8 virtual CPU devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, mesh_of, same
from jax import lax

import cutjax

P = jax.P
K, N = 8, 16
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


@pytest.mark.versions
def test_shard_map_value_and_grad():
    """Rows divided, weights replicated: their gradient is summed over the devices, as check_vma makes sure."""
    x, w = integers(0, (16, K)), integers(1, (K, N))

    def f(product, x, w):
        return (product(x, w) ** 2).sum()

    @functools.partial(jax.shard_map, mesh=mesh_of(i=8), in_specs=(P("i"), P()), out_specs=(P(), (P("i"), P())))
    def sharded(x, w):
        value, grads = jax.value_and_grad(functools.partial(f, cutjax.gemm), (0, 1))(x, w)
        return lax.psum(value, "i"), grads

    got = jax.jit(sharded)(x, w)
    same(got, jax.value_and_grad(functools.partial(f, jnp.matmul), (0, 1))(x, w))


@pytest.mark.parametrize("order", ["grad outside", "grad inside"])
def test_shard_map_scan(order):
    x, w = integers(0, (16, K)), integers(1, (K, K))

    def loss(product, x, w):
        h, _ = lax.scan(lambda h, _: (product(h, w), None), x, None, length=3)
        return h.sum()

    mesh = mesh_of(i=8)

    def total(x, w):
        local = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("i"), P()), out_specs=P())
        return local(lambda x, w: lax.psum(loss(cutjax.gemm, x, w), "i"))(x, w)

    if order == "grad outside":
        got = jax.jit(jax.grad(total, (0, 1)))(x, w)
    else:
        inside = jax.grad(functools.partial(loss, cutjax.gemm), (0, 1))
        got = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(P("i"), P()), out_specs=(P("i"), P())))(x, w)
    same(got, jax.grad(functools.partial(loss, jnp.matmul), (0, 1))(x, w))


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_shard_map_two_axes(layout):
    """a varies over one mesh axis, b over the other; the contraction is divided as well and added by hand."""
    a, b = integers(0, (4, 16, K)), integers(1, (K, N))
    at, bt = (a if layout[0] == "n" else a.mT), (b if layout[1] == "n" else b.mT)
    a_spec = P(None, "i", "j") if layout[0] == "n" else P(None, "j", "i")
    b_spec = P("j", None) if layout[1] == "n" else P(None, "j")

    @functools.partial(jax.shard_map, mesh=mesh_of(i=2, j=4), in_specs=(a_spec, b_spec), out_specs=P(None, "i"))
    def product(a, b):
        return lax.psum(cutjax.gemm(a, b, layout=layout), "j")

    same(jax.jit(product)(at, bt), jnp.matmul(a, b))
    got = jax.jit(jax.grad(lambda a, b: (product(a, b) ** 2).sum(), (0, 1)))(at, bt)
    da, db = jax.grad(lambda a, b: (jnp.matmul(a, b) ** 2).sum(), (0, 1))(a, b)
    same(got, (da if layout[0] == "n" else da.mT, db if layout[1] == "n" else db.mT))


@pytest.mark.versions
def test_shard_map_of_vmap_and_vmap_of_shard_map():
    x, w = integers(0, (3, 16, K)), integers(1, (K, N))
    mesh = mesh_of(i=8)
    outer = jax.shard_map(
        jax.vmap(cutjax.gemm, (0, None)), mesh=mesh, in_specs=(P(None, "i"), P()), out_specs=P(None, "i")
    )
    inner = jax.vmap(jax.shard_map(cutjax.gemm, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")), (0, None))
    same(jax.jit(outer)(x, w), jnp.matmul(x, w))
    same(jax.jit(inner)(x, w), jnp.matmul(x, w))


LAYOUTS_OF_DATA = {
    "data parallel": (P("i", None, None), P(None, None)),
    "tensor parallel": (P(None, None, None), P(None, "i")),
    "contraction": (P(None, None, "i"), P("i", None)),
    "two axes": (P("i", None, None), P(None, "j")),
    "batch and rows": (P("i", "j", None), P(None, None)),
}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("specs", "kind"),
    [(specs, (EXPLICIT, AUTO)[i % 2]) for i, specs in enumerate(LAYOUTS_OF_DATA.values())],
    ids=LAYOUTS_OF_DATA.keys(),
)
def test_jit_over_several_devices(specs, kind):
    """No pmap and no shard_map: arrays that live on several devices, divided by XLA or by explicit sharding."""
    mesh = mesh_of(kind, i=4, j=2)
    x, w = integers(0, (8, 4, K)), integers(1, (K, N))

    summed = kind == EXPLICIT and specs[0][2] is not None
    ours = functools.partial(cutjax.gemm, out_sharding=P(*specs[0][:2], specs[1][1])) if summed else cutjax.gemm

    def loss(product, x, w):
        return (product(x, w) ** 2).sum()

    expected = jax.value_and_grad(functools.partial(loss, jnp.matmul), (0, 1))(x, w)
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(v, jax.NamedSharding(mesh, spec)) for v, spec in zip((x, w), specs, strict=True))
        got = jax.jit(jax.value_and_grad(functools.partial(loss, ours), (0, 1)))(x, w)
        if kind == EXPLICIT:
            assert [g.sharding.spec for g in got[1]] == [v.sharding.spec for v in (x, w)]
            d = jax.jit(ours)(x, w)
            assert d.sharding.spec == P(*specs[0][:2], specs[1][1])
    same(got, expected)


@pytest.mark.versions
@pytest.mark.parametrize("epilogue", [jax.nn.relu, jax.nn.gelu, lambda acc: jnp.where(acc > 0, acc, 0.5)])
def test_gradients_of_epilogues_on_explicit_axes(epilogue):
    """Numbers that an expression broadcasts lie as what they meet does."""
    mesh = mesh_of(EXPLICIT, i=4, j=2)
    x, w = integers(0, (16, K)), integers(1, (K, N))
    ours = lambda x, w: (cutjax.gemm(x, w, epilogue=epilogue) ** 2).sum()  # noqa: E731
    expected = jax.grad(lambda x, w: (epilogue(x @ w) ** 2).sum(), (0, 1))(x, w)
    with jax.set_mesh(mesh):
        x, w = jax.device_put(x, P("j")), jax.device_put(w, P(None, "i"))
        got = jax.jit(jax.grad(ours, (0, 1)))(x, w)
        assert [g.sharding.spec for g in got] == [P("j", None), P(None, "i")]
    for d, want in zip(got, expected, strict=True):  # float32, added up in another order
        np.testing.assert_allclose(d, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.versions
def test_contracted_axes_divided_alike():
    """As jnp.matmul: how a sum over devices lies is to be said."""
    mesh = mesh_of(EXPLICIT, i=8)
    with jax.set_mesh(mesh):
        x = jax.device_put(integers(0, (16, K)), jax.NamedSharding(mesh, P(None, "i")))
        w = jax.device_put(integers(1, (K, N)), jax.NamedSharding(mesh, P("i", None)))
        with pytest.raises(Exception, match=r"specify the output sharding via the `out_sharding` parameter") as error:
            cutjax.gemm(x, w)
    assert "gemm: of float32[16,8@i], float32[8@i,16], layout 'nn'" in error.value.__notes__
