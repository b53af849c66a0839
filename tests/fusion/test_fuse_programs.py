"""cutjax.fuse on whole programs: control flow, checkpoints, custom rules, shard_map, steps of training."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import pytest
from checks import close, same, scaled
from jax import lax

import cutjax

pytestmark = pytest.mark.versions

always = functools.partial(cutjax.fuse, policy="always")
BF16 = jnp.bfloat16
ROUNDING = 2**-6  # as in test_fuse.py

X, W, V, BIAS = scaled(1, (16, 32), BF16), scaled(2, (32, 32), BF16), scaled(3, (32, 32), BF16), scaled(4, (32,), BF16)


def layer(x, w, b):
    return jax.nn.gelu(x @ w + b)


def loss(x, w, b):
    return (layer(layer(x, w, b), w, b).astype(jnp.float32) ** 2).mean()


def scanned(x, w, b):
    return lax.scan(lambda c, _: (layer(c, w, b), c.sum()), x, None, length=3)


def through_jit(x, w, b):
    return jax.jit(lambda x: layer(x, w, b))(x) * BF16(2)


def through_jit_twice(x, w, b):
    jitted = jax.jit(layer)
    return jitted(jitted(x, w, b), w, b)


def residuals(x, w, b):
    """What is around a layer that is called twice belongs to its product."""
    jitted = jax.jit(lambda x: x @ w)
    x = x + jitted(x)
    return jnp.tanh(jitted(x)) * b


def while_loop(x, w, b):
    return lax.while_loop(
        lambda c: jnp.tanh(c[1] @ w).sum() < 1e4 * (3 - c[0]), lambda c: (c[0] + 1, layer(c[1], w, b)), (0, x)
    )


def cond(x, w, b):
    return lax.cond(x[0, 0] > 0, lambda: layer(x, w, b), lambda: jnp.tanh(x @ w))


def switch(x, w, b):
    return lax.switch(1, [lambda: layer(x, w, b), lambda: jnp.tanh(x @ w), lambda: x])


def checkpointed(policy=None):
    return jax.grad(lambda *args: jax.checkpoint(loss, policy=policy)(*args), (0, 1, 2))


def named(x, w, b):
    h = jax.ad_checkpoint.checkpoint_name(x @ w + b, "h")
    return (jnp.tanh(h).astype(jnp.float32) ** 2).mean()


@jax.custom_vjp
def with_vjp(x, w, b):
    return jnp.tanh(x @ w)


with_vjp.defvjp(lambda *args: (with_vjp(*args), args), lambda r, g: (jnp.tanh(g @ r[1].T), r[1] * BF16(3), r[2]))


@jax.custom_jvp
def with_jvp(x, w, b):
    return jnp.tanh(x @ w)


with_jvp.defjvp(lambda primals, dots: (with_jvp(*primals), dots[0] * BF16(3)))


def step(x, w, b):
    gradients = jax.grad(loss, (1, 2))(x, w, b)
    return jax.tree.map(lambda p, g: p - BF16(0.1) * g, (w, b), gradients)


# The function, and how many of its products are fused with what is around them.
PROGRAMS = {
    "layer": (layer, 1),
    "gradient": (jax.grad(loss, (0, 1, 2)), 4),
    "jit": (through_jit, 1),
    "jit twice": (through_jit_twice, 2),
    "residuals of jitted layers": (residuals, 2),
    "gradient of jit": (jax.grad(jax.jit(loss), (0, 1, 2)), 4),
    "scan": (scanned, 1),
    "gradient of scan": (jax.grad(lambda *args: (scanned(*args)[0].astype(jnp.float32) ** 2).sum(), (0, 1, 2)), 1),
    "while": (while_loop, 2),
    "cond": (cond, 2),
    "switch": (switch, 2),
    "checkpoint": (checkpointed(), 4),
    "checkpoint dots": (checkpointed(jax.checkpoint_policies.dots_saveable), 4),
    "checkpoint everything": (checkpointed(jax.checkpoint_policies.everything_saveable), 2),
    "custom_vjp": (with_vjp, 1),
    "gradient of custom_vjp": (jax.grad(lambda *args: (with_vjp(*args).astype(jnp.float32) ** 2).sum(), (0, 1)), 2),
    "custom_jvp": (with_jvp, 1),
    "vmap": (jax.vmap(layer, (0, None, None)), 1),
    "step": (step, 4),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    fn, count = PROGRAMS[name]
    args = (jnp.stack([X, -X]) if name == "vmap" else X), W, BIAS
    fused = always(fn)
    assert sum(report.runs == "fused" for report in cutjax.explain(fused)(*args).fusion) == count
    close(fused(*args), jax.jit(fn)(*args), ROUNDING)


@pytest.mark.parametrize("fn", [with_vjp, with_jvp])
def test_rules_stay_as_they_were(fn):
    def gradient(fn):
        return jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum(), (0, 1))(X, W, BIAS)

    same(gradient(always(fn)), gradient(fn))


@pytest.mark.parametrize("policy", [jax.checkpoint_policies.save_only_these_names("h"), None])
def test_checkpoint_around_what_is_fused(policy):
    """The names of values mean the same to a policy of a checkpoint around what is fused, or within."""
    expected = jax.grad(named, (0, 1, 2))(X, W, BIAS)
    outside = jax.grad(jax.checkpoint(always(named), policy=policy), (0, 1, 2))
    inside = jax.grad(always(jax.checkpoint(named, policy=policy)), (0, 1, 2))
    close(jax.jit(outside)(X, W, BIAS), expected, 2 * ROUNDING)
    close(jax.jit(inside)(X, W, BIAS), expected, 2 * ROUNDING)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("d"), jax.P(), jax.P()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=check_vma)
    def mapped(x, w, b):
        return lax.pmean(layer(x, w, b).astype(jnp.float32).sum(0), "d")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=check_vma)
    def gradients(x, w, b):
        return lax.pmean(jax.grad(loss, 1)(x, w, b).astype(jnp.float32), "d")

    # With varying axes the gradients of both layers are added up over devices before they are added.
    for fn, count in ((mapped, 1), (gradients, 3 if check_vma else 4)):
        fused = always(fn)
        assert sum(report.runs == "fused" for report in cutjax.explain(fused)(X, W, BIAS).fusion) == count
        close(fused(X, W, BIAS), jax.jit(fn)(X, W, BIAS), ROUNDING)


@pytest.mark.parametrize(("policy", "size"), [("auto", "b"), ("always", "2*b"), ("always", "b + 1")])
def test_symbolic_sizes_stay(size, policy):
    """Of all operands, of some, and under vmap: what plain JAX exports is exported, and computes the same."""

    def fn(x, w, b):
        both = jnp.tanh(w @ w) * 2  # of known sizes
        rows = jax.vmap(cutjax.fuse(lambda x: jnp.tanh(x[None] @ w) * 2, policy=policy))(x)
        return loss(x, w, b), jax.grad(loss, 1)(x, w, b), layer(x, both, b), rows

    (rows,) = jax.export.symbolic_shape(size)
    shapes = jax.ShapeDtypeStruct((rows, *X.shape[1:]), X.dtype), W, BIAS
    fused = cutjax.fuse(fn, policy=policy)
    jax.export.export(jax.jit(fused), platforms=["cuda"])(*shapes)
    exported = jax.export.export(jax.jit(fused), platforms=["cpu", "cuda"])(*shapes)
    close(exported.call(X, W, BIAS), jax.jit(fn)(X, W, BIAS), ROUNDING)


def test_the_program_of_a_large_repeated_layer_is_rewritten_once():
    def fn(x, w, b):
        jitted = jax.jit(lambda x, w, b: functools.reduce(lambda x, _: layer(x, w, b), range(8), x))
        return functools.reduce(lambda x, _: jitted(x, w, b), range(5), x)

    jaxpr = jax.make_jaxpr(always(fn))(X, W, BIAS).jaxpr
    inner = [eqn.params["jaxpr"] for eqn in jax.extend.core.jaxprs_in_params(jaxpr.eqns[0].params).__next__().eqns]
    assert len({id(x) for x in inner}) == 1


def test_second_derivatives():
    def fn(x, w, b):
        return jnp.tanh(x @ w + b).sum()

    args = [x.astype(jnp.float32) for x in (X[:4, :4], W[:4, :4], BIAS[:4])]
    expected = jax.jit(jax.hessian(fn))(*args)
    close(jax.jit(jax.hessian(always(fn)))(*args), expected, 1e-4)
    close(always(jax.hessian(fn))(*args), expected, 1e-4)


@pytest.mark.versions
def test_functions_with_a_rule_for_vmap():
    """Products in them are fused; vmapped, the rule runs as it is."""

    @jax.custom_batching.custom_vmap
    def layer(x, w):
        return jax.nn.relu(x @ w)

    @layer.def_vmap
    def rule(size, batched, x, w):
        assert batched == [True, False]
        return 2 * jax.nn.relu(x @ w), True

    fused, x, w = always(layer), jnp.ones((64, 32), BF16), jnp.ones((32, 128), BF16)
    assert "cutjax_gemm" in str(jax.make_jaxpr(fused)(x, w))
    close(fused(x, w), layer(x, w), ROUNDING)
    close(jax.vmap(fused, (0, None))(x[None], w), 2 * layer(x, w)[None], ROUNDING)


@pytest.mark.parametrize(("around", "fused"), [(lambda fn: fn, "1 of 3"), (jax.checkpoint, "2 of 4")])
def test_forward_rules_with_optimize_remat(around, fused):
    """Their products are in an equation that jax.checkpoint may leave out for the function itself."""

    @jax.custom_vjp
    def layer(x, w):
        return jax.nn.relu(x @ w)

    def forward(x, w):
        y = jax.nn.relu(x @ w)
        return y, (x, w, y)

    def backward(kept, g):
        x, w, y = kept
        g = jnp.where(y > 0, g, 0)
        return g @ w.T, x.T @ g

    layer.defvjp(forward, backward, optimize_remat=True)
    gradient = jax.grad(lambda x, w: around(layer)(x, w).sum(dtype=jnp.float32), (0, 1))
    x, w = scaled(5, (64, 32), BF16), scaled(6, (32, 128), BF16)
    assert f"{fused} products fused" in str(cutjax.explain(always(gradient))(x, w))
    close(always(gradient)(x, w), gradient(x, w), ROUNDING)
