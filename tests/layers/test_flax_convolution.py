"""Conv and ConvTranspose of cutjax.flax: Flax's own layers and their activation, in one kernel."""

from __future__ import annotations

import functools
from typing import Any

import flax_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, mesh_of, normal
from flax import linen, nnx
from flax_cases import DTYPES, same_numbers, whole

import cutjax
import cutjax.flax.linen as our_linen
import cutjax.flax.nnx as our_nnx

KEY = jax.random.key(0)
MASK = np.tril(np.ones((3, 4, 5), np.float32))
# Channels of inputs and result, arguments, and the shape of the inputs.
CONV = {
    "1-D": (4, 5, {"kernel_size": (3,)}, (2, 7, 4)),
    "an int": (4, 5, {"kernel_size": 3, "padding": 1}, (2, 7, 4)),
    "2-D, strides": (4, 5, {"kernel_size": (3, 2), "strides": 2, "padding": "VALID"}, (2, 7, 8, 4)),
    "3-D": (2, 3, {"kernel_size": (2, 3, 1), "strides": (1, 2, 1), "padding": [(1, 0), 1, (0, 0)]}, (1, 3, 5, 4, 2)),
    "dilated": (4, 5, {"kernel_size": (3, 3), "kernel_dilation": (1, 2)}, (2, 7, 8, 4)),
    "inputs dilated": (4, 5, {"kernel_size": (3,), "input_dilation": 2, "padding": 2}, (2, 7, 4)),
    "groups": (4, 6, {"kernel_size": (3, 3), "feature_group_count": 2}, (2, 5, 6, 4)),
    "depthwise": (4, 8, {"kernel_size": (3,), "feature_group_count": 4, "padding": "CAUSAL"}, (2, 7, 4)),
    "causal, dilated": (4, 5, {"kernel_size": (3,), "kernel_dilation": 2, "padding": "CAUSAL"}, (2, 7, 4)),
    "circular": (4, 5, {"kernel_size": (3, 4), "strides": 2, "padding": "CIRCULAR"}, (2, 7, 8, 4)),
    "circular, dilated": (4, 5, {"kernel_size": (3,), "kernel_dilation": 2, "padding": "CIRCULAR"}, (2, 7, 4)),
    "reflect": (4, 5, {"kernel_size": (3, 4), "padding": "REFLECT"}, (2, 7, 8, 4)),
    "masked": (4, 5, {"kernel_size": (3,), "mask": MASK}, (2, 7, 4)),
    "no batch": (4, 5, {"kernel_size": (3, 3)}, (7, 8, 4)),
    "three batches": (4, 5, {"kernel_size": (3,)}, (2, 1, 3, 7, 4)),
    "no bias": (4, 5, {"kernel_size": (3,), "use_bias": False}, (2, 7, 4)),
    "nothing": (4, 5, {"kernel_size": (3,)}, (0, 7, 4)),
    "an empty result": (4, 5, {"kernel_size": (3,), "padding": "VALID"}, (2, 2, 4)),
}
TRANSPOSED = {
    "1-D": (4, 5, {"kernel_size": (3,)}, (2, 7, 4)),
    "an int": (4, 5, {"kernel_size": 3, "strides": (2,), "padding": 1}, (2, 7, 4)),
    "2-D": (4, 5, {"kernel_size": (2, 3), "strides": (2, 2), "padding": "VALID"}, (2, 4, 5, 4)),
    "kernel is stride": (4, 5, {"kernel_size": (2, 2), "strides": (2, 2)}, (2, 4, 5, 4)),
    "3-D": (2, 3, {"kernel_size": (2, 3, 1), "strides": (1, 2, 1), "padding": [(1, 0), 1, (0, 0)]}, (1, 3, 5, 4, 2)),
    "dilated": (4, 5, {"kernel_size": (3,), "strides": (2,), "kernel_dilation": (2,)}, (2, 7, 4)),
    "transposed kernel": (
        4,
        5,
        {"kernel_size": (3, 2), "strides": (2, 2), "kernel_dilation": (1, 2), "transpose_kernel": True},
        (2, 4, 5, 4),
    ),
    "circular": (4, 5, {"kernel_size": (3, 4), "strides": (2, 2), "padding": "CIRCULAR"}, (2, 4, 5, 4)),
    "circular, transposed": (
        4,
        5,
        {"kernel_size": (4, 3), "strides": (2, 2), "padding": "CIRCULAR", "transpose_kernel": True},
        (2, 4, 5, 4),
    ),
    "masked": (4, 5, {"kernel_size": (3,), "mask": MASK}, (2, 7, 4)),
    "three batches": (4, 5, {"kernel_size": (3,), "strides": (2,)}, (2, 1, 3, 7, 4)),
    "no bias": (4, 5, {"kernel_size": (3,), "use_bias": False}, (2, 7, 4)),
}
CASES = [("Conv", name) for name in CONV] + [("ConvTranspose", name) for name in TRANSPOSED]


def case(kind, name):
    return (CONV if kind == "Conv" else TRANSPOSED)[name]


def nnx_pair(kind, channels, features, **how):
    """Our layer and Flax's, alike, as functions of their parameters."""
    layers = [getattr(module, kind)(channels, features, rngs=nnx.Rngs(0), **how) for module in (our_nnx, nnx)]
    (graph, state), (flaxs, _) = map(nnx.split, layers)
    return state, [lambda state, x, graph=graph: nnx.merge(graph, state)(x) for graph in (graph, flaxs)], layers[0]


def linen_pair(kind, features, x, **how):
    layer, flaxs = (getattr(module, kind)(features, **how) for module in (our_linen, linen))
    variables = layer.init(KEY, x)
    return variables, layer, flaxs


def results(apply, activation, params, x):
    """The result and the gradients of parameters and inputs."""

    def loss(params, x):
        y = apply(params, x)
        y = y if activation is None else activation(y)
        return (y * whole(None, y.shape, y.dtype)).sum(dtype=jnp.float32), y

    (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return jax.tree.leaves((y, grads))


def check(kind, name, dtypes, activation=jax.nn.relu):
    channels, features, how, shape = case(kind, name)
    x_dtype, dtype, param_dtype, wide = DTYPES[dtypes]
    how = {**how, "kernel_init": whole, "bias_init": whole, "dtype": dtype, "param_dtype": param_dtype}
    x = whole(None, shape, x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        state, (apply, flaxs), layer = nnx_pair(kind, channels, features, preferred_element_type=wide, **how)
        layer.activation = activation
        graph, _ = nnx.split(layer)
        apply = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
        programs = [(apply, None, state), (flaxs, activation, state)]
        if wide is None:
            variables, layer, flaxs = linen_pair(kind, features, x, **how)
            programs += [
                (layer.copy(activation=activation).apply, None, variables),
                (flaxs.apply, activation, variables),
            ]
        # One program, for one compilation.
        found = jax.jit(lambda x: [results(*program, x) for program in programs])(x)
    for got, expected in zip(found[::2], found[1::2], strict=True):
        same_numbers(got, expected)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_equals_flax(kind, name):
    check(kind, name, "bf16")


@pytest.mark.parametrize(
    ("dtypes", "kind"),
    [(x, ("Conv", "ConvTranspose")[i % 2]) for i, x in enumerate(DTYPES)] + [("wide result", "Conv")],
)
def test_equals_flax_in_every_dtype(dtypes, kind):
    check(kind, "2-D, strides" if kind == "Conv" else "2-D", dtypes)


@pytest.mark.parametrize(("kind", "name"), [("Conv", "groups"), ("ConvTranspose", "transposed kernel")])
def test_parameters_are_those_of_flax(kind, name):
    """Of the same key the same numbers, under the same names, with the same metadata."""
    channels, features, how, shape = case(kind, name)
    how = {**how, "param_dtype": jnp.bfloat16, "bias_init": linen.initializers.normal()}
    layers = [
        getattr(module, kind)(channels, features, rngs=nnx.Rngs(0), kernel_metadata={"note": 1}, **how)
        for module in (our_nnx, nnx)
    ]
    states = [nnx.to_flat_state(nnx.state(layer)) for layer in layers]
    for (path, got), (other, expected) in zip(*states, strict=True):
        assert (path, type(got), got.get_metadata()) == (other, type(expected), expected.get_metadata())
        same_numbers([got[...]], [expected[...]])
    how["kernel_init"] = linen.with_partitioning(linen.initializers.lecun_normal(), ("x",))
    found = [
        getattr(module, kind)(features, **how).init(KEY, jnp.ones(shape, jnp.bfloat16)) for module in (our_linen, linen)
    ]
    assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])
    same_numbers(*map(jax.tree.leaves, found))


H = jnp.bfloat16
ONE = {
    "3x3": ("Conv", (64, 128, (3, 3)), {}, (8, 14, 14, 64)),
    "strides": ("Conv", (64, 128, (3, 3)), {"strides": 2}, (8, 14, 14, 64)),
    "a patch": ("Conv", (64, 128, (2, 2)), {"strides": 2, "padding": "VALID"}, (8, 14, 14, 64)),
    "transposed": ("ConvTranspose", (64, 128, (4, 4)), {"strides": (2, 2), "transpose_kernel": True}, (8, 14, 14, 64)),
}


@pytest.mark.parametrize("name", ONE)
def test_bias_and_activation_are_in_the_kernel(name):
    kind, args, how, shape = ONE[name]
    layer = getattr(our_nnx, kind)(*args, dtype=H, param_dtype=H, activation=jax.nn.gelu, rngs=nnx.Rngs(0), **how)
    graph, state = nnx.split(layer)
    found, text = flax_cases.kernels(lambda s, x: nnx.merge(graph, s)(x), state, jax.ShapeDtypeStruct(shape, H))
    assert found
    for absent in ("stablehlo.convolution", "stablehlo.add", "tanh"):
        assert absent not in text


def twice(*args, **kwargs):
    return 2 * jax.lax.conv_general_dilated(*args, **kwargs)


@pytest.mark.parametrize("how", [{"conv_general_dilated": twice}, {"conv_general_dilated_cls": lambda: twice}])
def test_a_convolution_of_the_user(how):
    x = normal(0, (2, 7, 4))
    variables, layer, flaxs = linen_pair("Conv", 5, x, kernel_size=(3,), **how)
    expected = jax.nn.gelu(flaxs.apply(variables, x))
    close(layer.copy(activation=jax.nn.gelu).apply(variables, x), expected)
    if "conv_general_dilated" in how:
        layers = [
            module.Conv(4, 5, (3,), rngs=nnx.Rngs(0), **how, **more)
            for module, more in ((our_nnx, {"activation": jax.nn.gelu}), (nnx, {}))
        ]
        close(layers[0](x), jax.nn.gelu(layers[1](x)))


@pytest.mark.versions
def test_flax_s_own_layers_with_the_drop_in():
    """Values and gradients; the product is ours."""
    x, how = normal(0, (2, 7, 8, 4)), {"kernel_size": (3, 3), "strides": 2}
    ours, plain = ({"conv_general_dilated": fn} for fn in (cutjax.conv_general_dilated, jax.lax.conv_general_dilated))
    layers = [nnx.Conv(4, 5, rngs=nnx.Rngs(0), **how, **own) for own in (ours, plain)]
    (graph, state), (flaxs, _) = map(nnx.split, layers)
    programs = [(lambda s, x, g=g: nnx.merge(g, s)(x), None, state) for g in (graph, flaxs)]
    layers = [linen.Conv(5, **how, **own) for own in (ours, {})]
    programs += [(layer.apply, None, layers[1].init(KEY, x)) for layer in layers]
    found = jax.jit(lambda x: [results(*program, x) for program in programs])(x)
    close(found[::2], found[1::2])
    assert "cutjax_conv" in str(jax.make_jaxpr(programs[0][0])(state, x))
    assert "cutjax_conv" in str(jax.make_jaxpr(programs[2][0])(programs[2][2], x))


def test_inputs_on_explicit_axes_are_left_to_flax():
    mesh = mesh_of(jax.sharding.AxisType.Explicit, x=8)
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(0, (8, 7, 4)), jax.NamedSharding(mesh, jax.P("x")))
        layers = [
            module.Conv(4, 5, (3,), bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0), **more)
            for module, more in ((our_nnx, {"activation": jax.nn.gelu}), (nnx, {}))
        ]
        y, expected = layers[0](x), jax.nn.gelu(layers[1](x))
    assert jax.typeof(y).sharding.spec == jax.P("x", None, None)
    close(y, expected)


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_transformations(kind):
    """vmap of an ensemble, and its layers one after the other in a scan with remat, against a loop."""

    def make(seed):
        return getattr(our_nnx, kind)(4, 4, (3,), activation=jnp.tanh, rngs=nnx.Rngs(seed))

    x = normal(0, (2, 7, 4))
    graph, _ = nnx.split(make(0))
    states = [nnx.state(make(seed)) for seed in range(2)]
    stack = nnx.merge(graph, jax.tree.map(lambda *xs: jnp.stack(xs), *states))
    apply = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def chain(layer, x):
        return layer(x)

    @nnx.jit
    def programs(stack, states, x):
        many = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x)
        grads = jax.tree.leaves(nnx.grad(lambda stack: (chain(stack, x) ** 2).sum())(stack))
        each = jax.grad(lambda states: (apply(states[1], apply(states[0], x)) ** 2).sum())(states)
        each = [jnp.stack(g) for g in zip(*map(jax.tree.leaves, each), strict=True)]
        return (many, chain(stack, x), grads), (
            jnp.stack([apply(state, x) for state in states]),
            apply(states[1], apply(states[0], x)),
            each,
        )

    close(*programs(stack, states, x))


def bad(match: str, make: Any, shape: Any, error: type[Exception] = ValueError) -> Any:
    return pytest.param(match, make, shape, error, id=match)


ours: Any = functools.partial(our_nnx.Conv, rngs=nnx.Rngs(0))
transposed: Any = functools.partial(our_nnx.ConvTranspose, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("match", "make", "shape", "error"),
    [
        bad(r"Conv: inputs are \(2, 7, 3\), expected 4 channels", lambda: ours(4, 5, (3,)), (2, 7, 3)),
        bad(r"ConvTranspose: inputs are \(2, 7, 3\), expected 4 channels", lambda: transposed(4, 5, (3,)), (2, 7, 3)),
        bad(r"Conv: inputs must have 2 axes of an image and channels", lambda: ours(4, 5, (3, 3)), (7, 4)),
        bad("Conv: 4 channels of the inputs do not divide", lambda: ours(4, 6, (3,), feature_group_count=3), ()),
        bad("Conv: mask must have the kernel's shape", lambda: ours(4, 6, (3,), mask=MASK), (2, 7, 4)),
        bad("Conv: padding must be", lambda: ours(4, 6, (3,), padding=[(1, 2, 3)]), (2, 7, 4)),
        bad("Causal padding is only implemented for 1D", lambda: ours(4, 6, (3, 3), padding="CAUSAL"), (2, 7, 7, 4)),
        bad("Conv: no argument is called stride; there are in_f", lambda: ours(4, 6, 3, stride=2), (), TypeError),
        bad("Conv: activation must be a function", lambda: ours(4, 6, 3, activation="relu"), (), TypeError),
    ],
)
def test_bad_arguments(match, make, shape, error):
    with pytest.raises(error, match=match):
        make()(jnp.ones(shape))
