"""cutjax.flax.nnx: Flax's own layers and their activation, in one kernel; MLP, GatedMLP and MoE."""

from __future__ import annotations

import functools

import flax_cases
import jax
import jax.numpy as jnp
import pytest
from checks import close, mesh_of, normal
from flax import nnx
from flax_cases import DTYPES, EINSUMS, same_numbers, whole

import cutjax.flax.nnx as ours
from cutjax.ops.routing import route

# Arguments, and the shape of the inputs.
LAYERS = {
    "Linear": ("Linear", (8, 5), {}, (2, 3, 8)),
    "Linear of a vector": ("Linear", (8, 5), {}, (8,)),
    "Linear without bias": ("Linear", (8, 5), {"use_bias": False}, (3, 8)),
    "Linear of nothing": ("Linear", (8, 5), {}, (0, 8)),
    "LinearGeneral": ("LinearGeneral", (8, (4, 2)), {}, (2, 3, 8)),
    "LinearGeneral, two axes": ("LinearGeneral", ((4, 2), 5), {"axis": (-2, -1)}, (2, 3, 4, 2)),
    "LinearGeneral, axes apart": ("LinearGeneral", ((2, 3), (4, 5)), {"axis": (0, -1)}, (2, 6, 3)),
    "LinearGeneral, batch": ("LinearGeneral", (8, (4, 2)), {"batch_axis": {0: 2}, "axis": -1}, (2, 3, 8)),
    "LinearGeneral, both": ("LinearGeneral", ((4, 2), 5), {"batch_axis": {0: 2}, "axis": (1, -1)}, (2, 4, 3, 2)),
}


def pair(kind, args, **kwargs):
    """Our layer and Flax's, alike."""
    return tuple(getattr(module, kind)(*args, rngs=nnx.Rngs(0), **kwargs) for module in (ours, nnx))


def results(layer, activation, x, c):
    """The result and the gradients of parameters and inputs, under jit."""

    def loss(state, x):
        y = nnx.merge(graph, state)(x)
        y = y if activation is None else activation(y)
        return (y * c.astype(y.dtype)).sum(dtype=jnp.float32), y

    graph, state = nnx.split(layer)
    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(state, x)
    return jax.tree.leaves((y, grads))


def both(layer, flaxs, activation):
    """The results of our layer and of Flax's, in one program."""
    return jax.jit(lambda *args: (results(layer, None, *args), results(flaxs, activation, *args)))


def check(kind, args, kwargs, shape, dtypes, activation=jax.nn.relu):
    x_dtype, dtype, param_dtype, wide = DTYPES[dtypes]
    kwargs |= {"kernel_init": whole, "bias_init": whole, "dtype": dtype, "param_dtype": param_dtype}
    layer, flaxs = pair(kind, args, **kwargs, preferred_element_type=wide)
    layer.activation = activation
    x = whole(None, shape, x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        c = whole(None, jax.eval_shape(layer, x).shape, jnp.float32)
        same_numbers(*both(layer, flaxs, activation)(x, c))


@pytest.mark.parametrize(
    ("name", "dtypes"), [(("Linear", "LinearGeneral, batch")[i % 2], dtypes) for i, dtypes in enumerate(DTYPES)]
)
def test_equals_flax_in_every_dtype(name, dtypes):
    check(*LAYERS[name], dtypes)


@pytest.mark.parametrize("name", LAYERS)
def test_equals_flax(name):
    check(*LAYERS[name], "bf16")


@pytest.mark.parametrize(
    ("equation", "x", "kernel", "bias", "activation"),
    [(*einsum, jax.nn.relu if i % 2 else None) for i, einsum in enumerate(EINSUMS)],
    ids=[x[0] for x in EINSUMS],
)
def test_einsum_equals_flax(equation, x, kernel, bias, activation):
    check("Einsum", (equation, kernel, bias), {}, x, "bf16", activation)


def test_einsum_of_the_call():
    layer, flaxs = pair("Einsum", ("ab,bc->ac", (8, 5), (5,)))
    x = normal(0, (3, 8))
    close(*jax.jit(lambda x: (layer(x, " a b, b c -> c a"), flaxs(x, "ab,bc->ca")))(x))
    with pytest.raises(ValueError, match="exactly two operands"):
        layer(x, "ab->a")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-7)])
def test_gelu_is_flax_s_to_rounding(dtype, tolerance):
    """Flax rounds the sum with the bias, and the activation's steps, once more each: two units in the last place."""
    layer, flaxs = pair("Linear", (64, 32), dtype=dtype, bias_init=nnx.initializers.normal())
    layer.activation, x = jax.nn.gelu, normal(1, (4, 64))
    with jax.numpy_dtype_promotion("standard"):
        close(*both(layer, flaxs, jax.nn.gelu)(x, normal(2, (4, 32))), tolerance)


@pytest.mark.parametrize(
    ("kind", "args", "kwargs"),
    [
        ("Linear", (8, 5), {}),
        ("Linear", (8, 5), {"param_dtype": jnp.bfloat16, "bias_init": nnx.initializers.normal()}),
        ("LinearGeneral", ((2, 4), (5, 3)), {"axis": (-2, -1), "batch_axis": {0: 2}}),
        ("Einsum", ("ab,bc->ac", (8, 5), (5,)), {}),
        ("Linear", (8, 5), {"kernel_metadata": {"out_sharding": ("x", None)}, "bias_metadata": {"note": 1}}),
        ("LinearGeneral", (8, (5, 3)), {"kernel_init": nnx.with_partitioning(whole, ("x", None, None))}),
    ],
)
def test_parameters_are_those_of_flax(kind, args, kwargs):
    with jax.set_mesh(mesh_of(x=8)):
        states = [nnx.to_flat_state(nnx.state(layer)) for layer in pair(kind, args, **kwargs)]
    for (path, got), (name, expected) in zip(*states, strict=True):
        assert (path, type(got), got.get_metadata()) == (name, type(expected), expected.get_metadata())
        same_numbers([got[...]], [expected[...]])
        assert got[...].sharding == expected[...].sharding


def blocks():
    rngs = nnx.Rngs(0)
    return {
        "Linear": ours.Linear(8, 8, activation=jnp.tanh, rngs=rngs),
        "MLP": ours.MLP(8, 16, rngs=rngs),
        "GatedMLP": ours.GatedMLP(8, 16, rngs=rngs),
        "MoE": ours.MoE(8, 16, 4, rngs=rngs),
    }


BLOCKS = nnx.jit(blocks)()


@pytest.mark.parametrize(
    ("kind", "use_bias", "batch"), [("MLP", True, (2, 3)), ("GatedMLP", True, (2, 3)), ("GatedMLP", False, ())]
)
def test_mlp(kind, use_bias, batch):
    block = getattr(ours, kind)(8, 16, 5, use_bias=use_bias, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    graph, state = nnx.split(block)

    def layers(block, x):
        if kind == "MLP":
            return block.down(jax.nn.gelu(block.up(x)))
        return block.down(jax.nn.silu(block.gate(x)) * block.up(x))

    def loss(fn, state, x):
        y = fn(nnx.merge(graph, state), x)
        return (y**2).sum(), y

    found = [
        jax.jit(jax.value_and_grad(functools.partial(loss, fn), (0, 1), has_aux=True))(state, normal(0, (*batch, 8)))
        for fn in (lambda block, x: block(x), layers)
    ]
    close(*map(jax.tree.leaves, found), tolerance=1e-5)


def test_moe_is_its_definition():
    layer, x = BLOCKS["MoE"], normal(1, (2, 3, 8))

    def choose(logits):
        best, at = jax.lax.top_k(logits, 2)
        return (jax.nn.one_hot(at, 4) * jax.nn.softmax(best)[..., None]).sum(-2)

    def by_definition(layer, x):
        names = "gate_kernel", "up_kernel", "down_kernel"
        params = {"router": layer.router.kernel[...]} | {name: getattr(layer, name)[...] for name in names}
        return flax_cases.experts(x, params, choose)

    graph, state = nnx.split(layer)
    found = [
        jax.jit(jax.value_and_grad(lambda state, x, fn=fn: (fn(nnx.merge(graph, state), x) ** 2).sum(), (0, 1)))(
            state, x
        )
        for fn in (lambda layer, x: layer(x), by_definition)
    ]
    close(*map(jax.tree.leaves, found))


def test_experts_in_groups():
    """DeepSeek-V3's choice, with a bias that changes it, which is a state and no parameter."""
    how = {"scoring": "sigmoid", "num_groups": 4, "groups_per_token": 2, "scale": 2.5, "use_selection_bias": True}
    layer, x = ours.MoE(8, 16, 8, 3, rngs=nnx.Rngs(0), **how), normal(1, (2, 6, 8))
    layer.selection_bias[...] = 0.3 * normal(2, (8,))
    assert "selection_bias" not in nnx.state(layer, nnx.Param)
    names = "gate_kernel", "up_kernel", "down_kernel"
    params = {"router": layer.router.kernel[...]} | {name: getattr(layer, name)[...] for name in names}
    weights = functools.partial(flax_cases.of_groups, bias=layer.selection_bias[...], k=3, groups=4, of_token=2)
    y, aux = nnx.jit(lambda layer, x: layer(x, return_aux=True))(layer, x)
    close(y, flax_cases.experts(x, params, functools.partial(weights, scale=2.5)))
    counts = (weights(layer.router(x), scale=1.0) > 0).sum((0, 1))
    assert aux["tokens_per_expert"].tolist() == counts.tolist()
    free = route(layer.router(x).reshape(-1, 8), 3, scoring="sigmoid").group_sizes
    assert free.tolist() != counts.tolist()


def test_groups_of_softmax_scores_count_their_best_expert():
    """Experts 0 and 1 have the largest sum, 2 the best score."""
    layer = ours.MoE(4, 8, 4, 1, num_groups=2, router_kernel_init=lambda *_: jnp.eye(4), rngs=nnx.Rngs(0))
    _, aux = nnx.jit(lambda layer, x: layer(x, return_aux=True))(layer, jnp.array([[2.0, 2.0, 2.5, -9.0]]))
    assert aux["tokens_per_expert"].tolist() == [0, 0, 1, 0]


def test_losses_have_gradients_under_nnx():
    def loss(layer, x):
        y, aux = layer(x, return_aux=True)
        return (y**2).mean() + 0.01 * aux["load_balance_loss"] + 0.001 * aux["router_z_loss"]

    x = normal(3, (2, 3, 8))
    grads = nnx.jit(nnx.grad(loss))(BLOCKS["MoE"], x)
    without = nnx.jit(nnx.grad(lambda layer, x: (layer(x) ** 2).mean()))(BLOCKS["MoE"], x)
    assert abs(grads.router.kernel[...] - without.router.kernel[...]).max() > 1e-5
    close(grads.down_kernel[...], without.down_kernel[...])


def stacked(state):
    """A state and its half: both as one, and each."""
    return jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), state), state, jax.tree.map(lambda x: 0.5 * x, state)


@pytest.mark.parametrize("kind", ["Linear", "MoE"])
def test_transformations(kind):
    """vmap of an ensemble, and its layers one after the other in a scan with remat, against a loop."""
    x = normal(0, (2, 3, 8))
    graph, state = nnx.split(BLOCKS[kind])
    stack, *each = (nnx.merge(graph, state) for state in jax.jit(stacked)(state))

    @nnx.jit
    def programs(stack, each, x):
        many = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(layer, x):
            return layer(x)

        grads = nnx.grad(lambda stack: (forward(stack, x) ** 2).sum())(stack)
        return many, forward(stack, x), jax.tree.leaves(grads)

    @nnx.jit
    def loops(each, x):
        grads = nnx.grad(lambda each: (each[1](each[0](x)) ** 2).sum())(each)
        grads = [jnp.stack(g) for g in zip(*map(jax.tree.leaves, (grads[0], grads[1])), strict=True)]
        return jnp.stack([layer(x) for layer in each]), each[1](each[0](x)), grads

    close(programs(stack, each, x), loops(nnx.List(each), x))


@pytest.mark.parametrize("kind", BLOCKS)
def test_abstract(kind):
    """Parameters without memory, and the shape of a result."""
    abstract = nnx.eval_shape(lambda: blocks()[kind])
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(abstract)))
    y = nnx.eval_shape(lambda layer, x: layer(x), abstract, jax.ShapeDtypeStruct((2, 3, 8), jnp.float32))
    assert (y.shape, y.dtype) == ((2, 3, 8), jnp.float32)


H = jnp.bfloat16
ONE = {
    "Linear": (lambda **how: ours.Linear(512, 256, **how), (4, 64, 512)),
    "heads": (lambda **how: ours.LinearGeneral(512, (4, 64), **how), (4, 64, 512)),
    "heads joined": (lambda **how: ours.LinearGeneral((8, 64), 256, axis=(-2, -1), **how), (4, 64, 8, 64)),
    "a batch": (lambda **how: ours.LinearGeneral(512, 256, batch_axis={0: 4}, **how), (4, 64, 512)),
    "Einsum": (lambda **how: ours.Einsum("btd,dhk->bthk", (512, 4, 64), (4, 64), **how), (4, 64, 512)),
}


@pytest.mark.parametrize("name", ONE)
def test_bias_and_activation_are_in_the_kernel(name):
    make, shape = ONE[name]
    graph, state = nnx.split(make(dtype=H, param_dtype=H, activation=jax.nn.gelu, rngs=nnx.Rngs(0)))
    found, text = flax_cases.kernels(lambda s, x: nnx.merge(graph, s)(x), state, jax.ShapeDtypeStruct(shape, H))
    assert len(found) == 1
    for absent in ("dot_general", "stablehlo.add", "tanh", "broadcast"):
        assert absent not in text
    assert name == "a batch" or "stablehlo.transpose" not in text  # there an axis of size 1 of the bias is moved


def test_activation_of_a_module():
    """Its parameters are the layer's, and get gradients."""
    prelu = nnx.PReLU()
    layer, x = ours.Linear(8, 5, activation=prelu, rngs=nnx.Rngs(0)), normal(0, (3, 8))
    flaxs = nnx.Linear(8, 5, rngs=nnx.Rngs(0))

    @nnx.jit
    def program(layer, prelu):
        got = nnx.grad(lambda layer: layer(x).sum())(layer).activation.negative_slope[...]
        wanted = nnx.grad(lambda prelu: prelu(flaxs(x)).sum())(prelu).negative_slope[...]
        return (layer(x), got), (prelu(flaxs(x)), wanted)

    close(*program(layer, prelu))


@pytest.mark.parametrize("where", ["dot_general", "sharded"])
def test_what_is_left_to_flax(where):
    """A dot_general of the user's, and inputs divided over explicit axes."""
    layer, flaxs = pair("Linear", (8, 5))
    layer.activation, x = jax.nn.gelu, normal(0, (8, 3, 8))
    if where == "dot_general":
        layer.dot_general = flaxs.dot_general = lambda *args, **kwargs: 2 * jax.lax.dot_general(*args, **kwargs)
        return close(layer(x), jax.nn.gelu(flaxs(x)))
    mesh = mesh_of(jax.sharding.AxisType.Explicit, x=8)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
        (layer, flaxs), (y, expected) = pair("Linear", (8, 5), bias_init=nnx.initializers.normal()), (None, None)
        layer.activation = jax.nn.gelu
        y, expected = layer(x), jax.nn.gelu(flaxs(x))
    assert jax.typeof(y).sharding.spec == jax.P("x", None, None)
    close(y, expected)
    return None


def test_bad_arguments():
    rngs = nnx.Rngs(0)
    cases = {
        r"Linear: no argument is called activatoin; there are in_features, .*activation": lambda: ours.Linear(
            8, 5, activatoin=jax.nn.relu, rngs=rngs
        ),
        r"GatedMLP: no argument is called hidden; there are in_features, .*down_bias_metadata": lambda: ours.GatedMLP(
            8, 5, hidden=3, rngs=rngs
        ),
        r"MoE: no argument is called top_k; there are in_features": lambda: ours.MoE(8, 5, 4, top_k=2, rngs=rngs),
        r"LinearGeneral: activation must be a function": lambda: ours.LinearGeneral(8, 5, activation="relu", rngs=rngs),
    }
    for match, call in cases.items():
        with pytest.raises(TypeError, match=match):
            call()


@pytest.mark.parametrize(
    ("match", "call"),
    [
        (r"Linear: inputs are \(3, 7\), the kernel is \(8, 8\): axis 1", lambda: BLOCKS["Linear"](jnp.ones((3, 7)))),
        (r"Linear: inputs are \(\): they have no axis -1", lambda: BLOCKS["Linear"](jnp.float32(0))),
        ("LinearGeneral: .* no axis 2", lambda: ours.LinearGeneral(8, 5, axis=2, rngs=nnx.Rngs(0))(jnp.ones((3, 8)))),
        (r"MLP: inputs must be \[\.\.\., 8\], got \(\)", lambda: BLOCKS["MLP"](jnp.float32(0))),
        ("k is 5, but there are 4 experts", lambda: ours.MoE(8, 16, 4, 5, rngs=nnx.Rngs(0))),
        ("4 experts do not divide into 3 groups", lambda: ours.MoE(8, 16, 4, num_groups=3, rngs=nnx.Rngs(0))),
        ("unknown scoring 'relu'", lambda: ours.MoE(8, 16, 4, scoring="relu", rngs=nnx.Rngs(0))),
        (
            "1 groups of 2 experts are fewer experts than k, 3",
            lambda: ours.MoE(8, 16, 8, 3, num_groups=4, rngs=nnx.Rngs(0)),
        ),
        (
            "groups_per_token is 5, but there are 4",
            lambda: ours.MoE(8, 16, 8, num_groups=4, groups_per_token=5, rngs=nnx.Rngs(0)),
        ),
    ],
)
def test_bad_sizes(match, call):
    with pytest.raises(ValueError, match=match):
        call()
