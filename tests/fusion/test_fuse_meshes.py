"""cutjax.fuse on meshes of automatic, explicit and manual axes: values, types and gradients are those of plain JAX."""

from __future__ import annotations

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, scaled
from jax.sharding import AxisType
from partitions import at_most, moved

import cutjax

always = functools.partial(cutjax.fuse, policy="always")
P, AUTO, EXPLICIT = jax.P, AxisType.Auto, AxisType.Explicit
B, S, K, N = 8, 8, 16, 8
X, W, V, BIAS = scaled(0, (B, S, K)), scaled(1, (K, N)), scaled(2, (N, K)), scaled(3, (N,))


def mesh_of(*kinds):
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=kinds)


def layer(x, w, v, b):
    h = jax.nn.gelu(x @ w + b)
    lies = P(*jax.typeof(h).sharding.spec[:2], None) if jax.typeof(h).sharding.spec[2] else None
    return jnp.tanh(jnp.einsum("bsn,nk->bsk", h, v, out_sharding=lies)) * 2


def gate(x, w, v, b):
    return jax.nn.silu(x @ w) * (x @ v.T) + b


def heads(x, w, v, b):
    """Products of a batch, of axes that lie between others."""
    q = jnp.tanh(jnp.einsum("bsk,khd->bshd", x, w.reshape(K, 2, N // 2, out_sharding=P() if _explicit(w) else None)))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, q) * 0.5
    return jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1.0) + b.sum()


def reduced(x, w, v, b):
    y = x @ w + b
    return jnp.tanh(y), y.sum((0, 1)), jax.nn.relu(y).max()


def scanned(x, w, v, b):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w + b) @ v + c, c.sum()), x, None, length=2)


def update(x, w, v, b):
    return w - 0.1 * jnp.einsum("bsk,bsn->kn", x, jnp.tanh(x @ w), out_sharding=P() if _explicit(x) else None)


def windows(x, w, v, b):
    """Windows of rows. XLA divides these wrongly: a gradient of weights is twice what it should be (jax 0.10)."""

    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    y = jax.nn.silu(conv(x, jnp.stack([w, 0.5 * w])) + b)
    return y, y.sum((0, 1))


def _explicit(x):
    return any(axes is not None for axes in jax.typeof(x).sharding.spec)


PROGRAMS = [layer, gate, heads, reduced, scanned, update]
# Of x, w, v and b. What jnp multiplies without being told where the result lies.
LAYOUTS = {
    "data": (P("d"), P(), P(), P()),
    "tensor": (P(), P(None, "m"), P("m"), P("m")),
    "data and tensor": (P("d"), P(None, "m"), P("m"), P("m")),
    "rows": (P(None, "m"), P(), P(), P()),
    "both": (P("d", "m"), P(), P(), P()),
}


def put(mesh, layout):
    """The arrays on a mesh; axes that are automatic say nothing in types."""
    return [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip((X, W, V, BIAS), layout, strict=True)]


def types(tree):
    return [(x.shape, x.dtype, x.sharding.spec) for x in map(jax.typeof, jax.tree.leaves(tree))]


def total(fn):
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fn(*args)))


def check(fn, mesh, args, gradients=True):
    """Compares values and gradients, in one program; returns how many products were fused, None if JAX refuses."""
    fused = always(fn)

    def both(fn, *args):
        return fn(*args), jax.grad(total(fn), (0, 1, 2, 3))(*args) if gradients else None

    with jax.set_mesh(mesh):
        try:
            expected = jax.jit(functools.partial(both, fn))(*args)
        except Exception as error:
            with pytest.raises(type(error)):
                jax.jit(functools.partial(both, fused))(*args)
            return None
        outside = always(functools.partial(both, fn))
        for got in (jax.jit(functools.partial(both, fused))(*args), jax.jit(outside)(*args)):
            close(got, expected, 1e-4)  # the order of sums
            assert types(got) == types(expected)
        return fused_in(fused, args)


def fused_in(fn, args):
    return sum(report.runs == "fused" for report in cutjax.explain(fn)(*args).fusion)


@pytest.mark.parametrize("fn", [*PROGRAMS, windows], ids=lambda fn: fn.__name__)
def test_programs(fn):
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    assert check(fn, mesh, put(mesh, LAYOUTS["data"]))


@pytest.mark.parametrize("kinds", [(AUTO, AUTO), (EXPLICIT, AUTO), (AUTO, EXPLICIT)], ids=str)
def test_kinds_of_axes(kinds):
    mesh = mesh_of(*kinds)
    assert check(gate, mesh, put(mesh, LAYOUTS["data"]))


@pytest.mark.parametrize("layout", ["tensor", "data and tensor", "rows", "both"])
def test_layouts(layout):
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    assert check(layer, mesh, put(mesh, LAYOUTS[layout]))


@pytest.mark.parametrize("layout", ["data and tensor", "rows"])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_what_moves_is_what_moves_without(kind, layout):
    mesh = mesh_of(kind, kind)
    args = put(mesh, LAYOUTS[layout])
    with jax.set_mesh(mesh), cutjax.use_partial_sums("result"):
        ours, plain = (moved(jax.jit(fn).lower(*args).compile().as_text() or "") for fn in (always(layer), layer))
    assert at_most(ours, plain)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_prices_are_those_of_merged_rows(kind):
    """Batch axes stay apart on a mesh; a device merges those of its part."""

    def fn(x, w):
        return jax.nn.gelu(x @ w)

    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 1024, 4096), (4096, 14336))]
    (expected,) = cutjax.explain(cutjax.fuse(fn), platform="cuda")(*avals).fusion
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    lies = [jax.NamedSharding(mesh, spec) for spec in (P("d"), P())]
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y) for x, y in zip(avals, lies, strict=True)]
    with jax.set_mesh(mesh):
        (report,) = cutjax.explain(cutjax.fuse(fn), platform="cuda")(*avals).fusion
    assert (report.runs, report.why) == ("fused", expected.why)


def test_transformations_where_only_arrays_say_how_they_lie():
    """No mesh in scope: called as it is, under vmap and in forward mode."""
    args = put(mesh_of(EXPLICIT, EXPLICIT), LAYOUTS["data and tensor"])

    def ways(fn, x, w, v, b):
        rows, weights = jax.vmap(fn, (0, None, None, None)), jax.vmap(fn, (None, 0, None, None))
        dot = jax.jvp(fn, (x, w, v, b), (x, w, v, b))[1]
        return fn(x, w, v, b), rows(x, w, v, b), weights(x, jnp.stack([w, -w]), v, b), dot

    got, expected = (jax.jit(functools.partial(ways, fn))(*args) for fn in (always(gate), gate))
    close(got, expected, 1e-5)
    assert types(got) == types(expected)
    close(always(gate)(*args), expected[0], 1e-5)
    assert fused_in(always(gate), args) == 2


@pytest.mark.versions
def test_collectives_have_no_order():
    """A sum over devices may lie between a product and another sum that its tail takes."""

    def fn(x, w):
        y = x @ w
        first, second = (jax.lax.psum(z.sum(), "d") for z in (y, x))
        return jnp.tanh(y) * second, first

    mesh = mesh_of(AUTO, AUTO)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()))
    close(jax.jit(always(mapped))(X[0], W), jax.jit(mapped)(X[0], W))
    assert fused_in(always(mapped), (X[0], W)) == 1


# The kinds of the axes over which a shard_map does not map, and how many products are fused there.
LEFT = {
    "none": ((), 2),
    "one automatic": ((AUTO,), 2),
    "two automatic": ((AUTO, AUTO), 0),
    "explicit": ((EXPLICIT,), 0),
}


@pytest.mark.parametrize("left", LEFT)
def test_shard_maps_that_leave_axes(left):
    """A product that cannot be divided stays, and the function is what it was."""
    kinds, count = LEFT[left]
    names = ("d", "m", "n")[: 1 + len(kinds)]
    mesh = jax.make_mesh((2,) * len(names), names, axis_types=(kinds[0] if kinds else AUTO,) * len(names))

    def mapped(fn):
        return jax.shard_map(
            fn, mesh=mesh, axis_names={"d"}, in_specs=(P("d"), P(), P(), P()), out_specs=P("d"), check_vma=True
        )

    def both(fn, *args):
        return fn(*args), jax.grad(total(fn), (0, 1, 2, 3))(*args)

    with jax.set_mesh(mesh):
        args = put(mesh, (P("d"), P(), P(), P()))
        expected = jax.jit(functools.partial(both, mapped(gate)))(*args)
        for fn in (mapped(always(gate)), always(mapped(gate))):
            close(jax.jit(functools.partial(both, fn))(*args), expected, 1e-4)
            assert fused_in(fn, args) == count


def random_spec(rng, rank):
    """How an array lies: each mesh axis once."""
    found, free = [], {"d", "m"}
    for _ in range(rank):
        names = [(), (), ("d",), ("m",), ("d", "m")][rng.integers(5)]
        found.append(names if free.issuperset(names) and names else None)
        free -= {*(found[-1] or ())}
    return P(*found)


@pytest.mark.parametrize("seed", range(2))  # after a change of how fusion divides: 60
def test_random_layouts(seed):
    """Values, types and gradients are plain JAX's, and what it refuses is refused."""
    rng = np.random.default_rng(seed)
    mesh = mesh_of(*(EXPLICIT if rng.integers(4) else AUTO for _ in range(2)))
    weights = [random_spec(rng, 2) if rng.integers(2) else P() for _ in range(2)]
    layout = random_spec(rng, 3), *weights, random_spec(rng, 1) if rng.integers(2) else P()
    check(PROGRAMS[rng.integers(len(PROGRAMS))], mesh, put(mesh, layout), gradients=seed % 2 == 0)


def _traced_by(use):
    """The number of times that a function is traced where its fused form is used so."""
    count = 0

    def fn(x, w):
        nonlocal count
        count += 1
        return jax.nn.relu(x @ w)

    use(cutjax.fuse(fn))
    return count


@pytest.mark.versions
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT, None], ids=str)
def test_a_function_is_traced_once(kind):
    x, w = jnp.ones((8, 16)), jnp.ones((16, 8))
    captured = np.ones((8, 8), np.float32)

    def grad(f):
        return jax.grad(lambda x, w: (f(x, w) + captured).sum(), (0, 1))

    def scanned(f):
        return lambda x, w: jax.lax.scan(lambda c, _: (f(c, w), None), x[:, :8], None, length=2)[0]

    uses = {
        "eager": lambda f: f(x, w),
        "jit": lambda f: jax.jit(f)(x, w),
        "twice in jit": lambda f: jax.jit(lambda x, w: f(x, w) + f(2 * x, w))(x, w),
        "gradient in jit": lambda f: jax.jit(grad(f))(x, w),
        "gradient": lambda f: grad(f)(x, w),
        "vmap": lambda f: jax.vmap(f, (0, None))(jnp.stack([x, x]), w),
        "vmap in jit": lambda f: jax.jit(jax.vmap(f, (0, None)))(jnp.stack([x, x]), w),
        "checkpoint": lambda f: jax.jit(grad(jax.checkpoint(f)))(x, w),
        "scan": lambda f: jax.jit(scanned(f))(x, w[:8]),
    }
    if kind is not None:
        mesh = mesh_of(kind, kind)
        x, w = (jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in ((x, P("d")), (w, P(None, "m"))))
        uses = {name: use for name, use in uses.items() if name not in ("scan", "vmap", "vmap in jit")}
        specs, whole = {"mesh": mesh, "in_specs": (P("d"), P()), "out_specs": P("d")}, jnp.ones(w.shape)
        uses["shard_map"] = lambda f: jax.jit(jax.shard_map(f, **specs))(x, whole)
    with jax.set_mesh(mesh) if kind is not None else contextlib.nullcontext():
        counts = {name: _traced_by(use) for name, use in uses.items()}
    assert set(counts.values()) == {1}, counts


def test_constants_of_derivatives_are_no_obstacle():
    """Jax reshards the 1 of 1 - logistic(x) on a mesh of automatic axes; what reads it is fused as without a mesh."""
    shapes = (512, 64), (64, 256), (64, 256), (256, 64)

    def loss(x, gate, up, down):
        return ((jax.nn.silu(x @ gate) * (x @ up)) @ down).astype(jnp.float32).sum()

    def epilogues(**kwargs):
        args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, **kwargs) for shape in shapes]
        text = str(cutjax.explain(cutjax.fuse(jax.grad(loss, (0, 1, 2, 3)), policy="always"))(*args))
        return sorted(re.findall(r"epilogue +(.*)", text))

    whole = jax.NamedSharding(jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P())
    assert epilogues() == epilogues(sharding=whole)


def test_products_of_sums_over_axes_stay():
    """Types that say an array is a sum over a mesh axis, or yet to be added up: tensor-parallel gradients have both."""

    def summed(x, w):
        partial = jnp.matmul(x, w, out_sharding=P(None, None, unreduced={"d"}))
        return jax.nn.gelu(jax.reshard(partial, P(None, None))) * 2

    def loss(x, w):
        return summed(x, w).sum()

    def reads(x, w):
        return jax.nn.gelu(x @ w + 1)

    with jax.set_mesh(jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])):
        reduced = jax.device_put(X[0], P(None, None, reduced={"d"})), jax.device_put(W, P())
        divided = jax.device_put(X[0], P(None, "d")), jax.device_put(W, P("d"))
        for fn, args in ((reads, reduced), (summed, divided), (jax.grad(loss, (0, 1)), divided)):
            got, want = jax.jit(always(fn))(*args), jax.jit(fn)(*args)
            assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
            close(got, want)


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)], ids=str)
def test_forward_mode_inside_auto_axes(kinds):
    """Arrays there lie on another mesh than those around them; derivatives leave no function between the two."""

    @functools.partial(jax.sharding.auto_axes, axes="d", out_sharding=P("d", None))
    def inner(x, w, b):
        return jax.nn.gelu(x @ w) * b

    def tangent(*args):
        return jax.jvp(inner, args, args)

    def curvature(*args):
        return jax.jvp(jax.grad(lambda *args: inner(*args).sum(), (0, 1)), args, args)

    mesh = mesh_of(*kinds)
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, jax.NamedSharding(mesh, P("d"))) for x in (X[0], W, BIAS)]
        for fn in (tangent, curvature):
            got, want = jax.jit(always(fn))(*args), jax.jit(fn)(*args)
            assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
            close(got, want)
            shapes = jax.tree.map(jax.typeof, args)
            jax.jit(always(fn)).trace(*shapes).lower(lowering_platforms=("cuda",))
