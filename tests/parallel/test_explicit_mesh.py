"""Every operation under a mesh of explicit axes, the default of jax.make_mesh, with replicated operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import normal
from operations import OPERATIONS, M, arrays, both, differentiable, expected, in_turn, main, operands, uses

import cutjax

pytestmark = pytest.mark.versions

EXPLICIT = jax.sharding.AxisType.Explicit


def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(EXPLICIT,), devices=jax.devices()[:2])


@pytest.mark.parametrize("name", OPERATIONS)
def test_lowers(name):
    """Values and gradients are run below, of every other option."""
    found = [uses(name)[use] for use in ("tangent", "batch of one", "batch of gradients")]
    with jax.set_mesh(mesh()):
        jax.jit(lambda *args: [use(*args) for use in found]).lower(*operands(name))


# Operations with groups or routing, whose operands are divided below; those of dense ones are in test_explicit_dense.
FAMILIES = ("grouped", "ragged", "route", "dispatch", "moe", "load")
IN_GROUPS = [name for name in OPERATIONS if name.startswith(FAMILIES) and main(name)]


@pytest.mark.parametrize("name", [name for name in in_turn(1) if name not in IN_GROUPS and "moe" not in name])
def test_values(name):
    with jax.set_mesh(mesh()):
        got = both(name)(*operands(name))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3), got, expected(name))


# All operands divided: their first and last axes, over mesh axes of 2 devices each.
WAYS = {"first": (("x", "y"),), "last": (None, "x"), "first and last": ("x", "y")}


def divided(operand, way):
    """The operand with its first and its last axis over those mesh axes that divide it."""
    sizes = [operand.shape[0], *[1] * (operand.ndim - 2), operand.shape[-1]][: operand.ndim]
    spec = [None] * operand.ndim
    for at, over in zip((0, -1), way, strict=False):
        if over is not None and spec[at] is None and sizes[at] % (2 * len(over)) == 0:
            spec[at] = over
    return jax.device_put(operand, jax.NamedSharding(jax.sharding.get_mesh(), jax.P(*spec)))


# All in the last way, which has the others in it; products themselves in those too.
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "first and last") for name in (*IN_GROUPS, "grouped_gemm, epilogue")),
        *((name, way) for name in ("grouped_gemm", "grouped_outer") for way in ("first", "last")),
    ],
)
def test_divided_operands(name, way):
    """Values and gradients are those of whole operands, and a gradient lies as its operand does."""
    given = operands(name)
    at = differentiable(given)
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), axis_types=(EXPLICIT, EXPLICIT), devices=jax.devices()[:4])):
        there = [divided(x, WAYS[way]) for x in given]
        got = both(name)(*there)
        for i, gradient in zip(at, got[1], strict=True):
            assert gradient.sharding.spec == there[i].sharding.spec
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3), got, expected(name))


def test_results_lie_as_the_operands():
    """Rows as those of x, columns as those of w; in any transformation, with and without a mesh in scope."""
    there = jax.make_mesh((2, 4), ("x", "y"), axis_types=(EXPLICIT, EXPLICIT))
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(there, jax.P(*spec)))  # noqa: E731
    found = arrays()
    x, w, sizes = put(found["x"], "x"), put(found["g"], None, None, "y"), found["sizes"]
    value = cutjax.grouped_gemm(found["x"], found["g"], sizes)

    def lies(array, *spec):
        np.testing.assert_allclose(array[..., :M, :], jnp.broadcast_to(value, array.shape), rtol=1e-5, atol=1e-5)
        assert array.sharding.spec == jax.P(*spec)

    f = lambda x, w: cutjax.grouped_gemm(x, w, sizes)  # noqa: E731
    lies(f(x, w), "x", "y")
    lies(jax.jit(f)(x, w), "x", "y")
    lies(jax.jit(jax.vmap(f, (None, 0)))(x, put(jnp.stack(3 * [found["g"]]), None, None, None, "y")), None, "x", "y")
    with jax.set_mesh(there):
        lies(jax.jit(f)(x, w), "x", "y")
        lies(cutjax.ragged_dot(x, w, sizes), "x", "y")
        turned = cutjax.grouped_gemm(x, put(found["g"], None, None, "x"), sizes)
        lies(turned, "x", None)  # columns are whole where the same mesh axis divides the rows
        outer = cutjax.grouped_outer(put(found["x"], None, "y"), put(found["dy"], None, "x"), sizes)
        assert outer.sharding.spec == jax.P(None, "y", "x")
        layer = jax.jit(lambda x: cutjax.moe(x, put(found["logits"], "x"), found["g"], found["u"], found["d"]))(x)
        assert layer.sharding.spec == jax.P("x", None)


@pytest.mark.parametrize(
    ("name", "whole"), [("grouped_gemm", False), ("grouped_mlp", False), ("moe", False), ("moe", True)]
)
def test_captured_arrays(name, whole):
    """What a function captures may lie on explicit axes too; its gradient lies alike."""
    shapes = (8, 16), (3, 16, 8), (3, 8, 16), (8,), (8, 8)
    given = [normal(i, shape) / 4 for i, shape in enumerate(shapes)]
    specs = [*(() if whole else ("x",), () if whole else (None, None, "y"), (), ("y",), () if whole else ("x", "y"))]
    sizes = np.array([3, 2, 1])

    def program(x, w, v, bias, mask):
        activation = lambda acc: jax.nn.softplus(acc + jnp.tanh(bias))  # noqa: E731
        masked = lambda acc: jnp.where(mask > 0, activation(acc), acc * mask)  # noqa: E731
        y = {
            "grouped_gemm": lambda: cutjax.grouped_gemm(x, w, sizes, epilogue=masked),
            "grouped_mlp": lambda: cutjax.grouped_mlp(x, w, v, sizes, activation=activation),
            "moe": lambda: cutjax.moe(x, x[:, :3], w, w, v, activation=activation),
        }[name]()
        return jnp.sin(y).sum()

    both = jax.value_and_grad(program, (0, 1, 3, 4))
    without = jax.jit(both)(*given)
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), axis_types=(EXPLICIT, EXPLICIT), devices=jax.devices()[:4])):
        there = [jax.device_put(x, jax.P(*spec)) for x, spec in zip(given, specs, strict=True)]
        got = jax.jit(both)(*there)
        for i, gradient in zip((0, 1, 3, 4), got[1], strict=True):
            assert jax.typeof(gradient) == jax.typeof(there[i])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, without)


def test_a_refusal_names_the_line_of_a_function_that_captures():
    given = [normal(i, shape) for i, shape in enumerate(((8, 16), (3, 16, 8), (8,)))]

    def program(x, w, bias):
        chosen = lambda acc: jax.lax.cond(bias.sum() > 0, jnp.sin, jnp.cos, acc + bias)  # noqa: E731
        return cutjax.grouped_gemm(x, w, np.array([3, 2, 1]), epilogue=chosen)

    with jax.set_mesh(mesh()):
        there = [jax.device_put(x, jax.P(*[None] * (x.ndim - 1), "x")) for x in given]
        with pytest.raises(NotImplementedError, match=r"cond at \S*test_explicit_mesh.py:"):
            jax.eval_shape(program, *there)


@pytest.mark.parametrize("spec", [jax.P("x"), jax.P(None, "x"), jax.P(None, None, None, "x")])
def test_convolution_of_whole_operands_is_divided_as_asked(spec):
    """Its gradients are whole, as the operands are."""
    over = jax.NamedSharding(mesh(), spec)
    whole = [
        jax.device_put(normal(i, s), jax.NamedSharding(mesh(), jax.P()))
        for i, s in enumerate(((2, 4, 6, 3), (3, 3, 3, 4)))
    ]
    last = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), "out_sharding": over}

    def all_of(module):
        def conv(x, w):
            return module.conv_general_dilated(x, w, (1, 1), **last)

        return jax.jit(lambda x, w: (conv(x, w), *jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1))(x, w)))(
            *whole
        )

    for ours, theirs in zip(all_of(cutjax), all_of(jax.lax), strict=True):
        assert jax.typeof(ours) == jax.typeof(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


SIZES = np.array([3, 2, 1])
BATCHED = {
    "conv": (lambda x, w: cutjax.conv(x, w, epilogue=jax.nn.silu), (1, 6, 4), (3, 4, 8)),
    "grouped_gemm": (lambda x, w: cutjax.grouped_gemm(x, w, SIZES, epilogue=jax.nn.silu), (6, 4), (3, 4, 8)),
    "grouped_outer": (lambda x, dy: cutjax.grouped_outer(x, dy, SIZES), (6, 4), (6, 8)),
    "causal_conv1d": (lambda x, w: cutjax.causal_conv1d(x, w, state=x[:2]), (6, 4), (3, 4)),
    "route": (lambda x, b: cutjax.route(x, selection_bias=b).weights * b[:, :2], (6, 4), (6, 4)),
    "dispatch": (lambda x, b: cutjax.route(b).combine(cutjax.route(b).dispatch(x)) * b, (6, 4), (6, 4)),
    "moe": (lambda x, w: cutjax.moe(x, x[:, :3], w, w, w), (6, 4), (3, 4, 4)),
    "moe, loads": (lambda x, w: cutjax.moe(x, x[:, :3], w, w, w, gather="loads"), (6, 4), (3, 4, 4)),
}


@pytest.mark.parametrize("batched", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("name", BATCHED)
def test_batches_stay_divided(name, batched):
    """Under vmap over an axis that is: results and gradients lie as the batch does."""
    operation, *shapes = BATCHED[name]
    given = [
        normal(i, shape if axis is None else (2, *shape))
        for i, (shape, axis) in enumerate(zip(shapes, batched, strict=True))
    ]

    def program(*args):
        fn = jax.vmap(operation, batched)
        return fn(*args), *jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1))(*args)

    without = jax.jit(program)(*given)
    with jax.set_mesh(mesh()):
        there = [
            jax.device_put(x, jax.P() if axis is None else jax.P("x")) for x, axis in zip(given, batched, strict=True)
        ]
        got = jax.jit(program)(*there)
        first, *gradients = (jax.typeof(y).sharding.spec[0] for y in got)
    assert first == "x"
    assert gradients == [None if axis is None else "x" for axis in batched]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, without)


@pytest.mark.parametrize("over", [(None, None, "x"), ("x",), (None, "x")])
@pytest.mark.parametrize("whole", [True, False, None])
def test_states_of_sequences_lie_as_they_do(over, whole):
    """One that is given may lie otherwise, and may be none."""
    x, w, state, after = (normal(i, shape) for i, shape in enumerate(((2, 6, 4), (3, 4), (2, 2, 4), (2, 4))))
    state = None if whole is None else state

    def program(x, w, state, after):
        y, last = cutjax.causal_conv1d(x, w, state=state, activation="silu", return_state=True)
        return y, last, *cutjax.causal_conv1d_update(after, last, w)

    without = jax.jit(program)(x, w, state, after)
    batch, length, channels = *over, *(None,) * (3 - len(over))
    of_state = jax.P() if whole else jax.P(batch, None, channels)
    with jax.set_mesh(mesh()):
        there = None if whole is None else jax.device_put(state, of_state)
        got = jax.jit(program)(jax.device_put(x, jax.P(*over)), w, there, jax.device_put(after, jax.P(batch, channels)))
        found = [tuple(jax.typeof(y).sharding.spec) for y in got]
    assert found == [(batch, length, channels), (batch, None, channels), (batch, channels), (batch, None, channels)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, without)
