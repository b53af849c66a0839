"""cutjax.flax.linen: Flax's own layers and their activation, in one kernel; MLP, GatedMLP and MoE."""

from __future__ import annotations

import functools

import flax_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, normal
from flax import linen as nn
from flax_cases import DTYPES, EINSUMS, same_numbers, whole

import cutjax.flax.linen as ours

KEY = jax.random.key(0)
LAYERS = {
    "Dense": ("Dense", (5,), {}, (2, 3, 8)),
    "Dense of a vector": ("Dense", (5,), {}, (8,)),
    "Dense without bias": ("Dense", (5,), {"use_bias": False}, (3, 8)),
    "DenseGeneral": ("DenseGeneral", ((4, 2),), {}, (2, 3, 8)),
    "DenseGeneral, two axes": ("DenseGeneral", (5,), {"axis": (-1, -2)}, (2, 3, 4, 2)),
    "DenseGeneral, axes apart": ("DenseGeneral", ((4, 5),), {"axis": (0, -1)}, (2, 6, 3)),
    "DenseGeneral, batch": ("DenseGeneral", ((4, 2),), {"batch_dims": 0}, (2, 3, 8)),
    "DenseGeneral, both": ("DenseGeneral", (5,), {"batch_dims": (0,), "axis": (1, -1)}, (2, 4, 3, 2)),
}


def pair(kind, args, **kwargs):
    """Our layer and Flax's, alike."""
    return tuple(getattr(module, kind)(*args, **kwargs) for module in (ours, nn))


def results(layer, activation, variables, x):
    """The result and the gradients of parameters and inputs, under jit."""

    def loss(variables, x):
        y = layer.apply(variables, x)
        y = y if activation is None else activation(y)
        return (y * whole(None, y.shape, y.dtype)).sum(dtype=jnp.float32), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, x)
    return jax.tree.leaves((y, grads))


def both(layer, layers, activation=None):
    """The results of our layer and of Flax's, in one program."""
    return jax.jit(lambda *args: (results(layer, None, *args), results(layers, activation, *args)))


def check(kind, args, kwargs, shape, dtypes, activation=jax.nn.relu):
    x_dtype, dtype, param_dtype, _ = DTYPES[dtypes]
    kwargs |= {"kernel_init": whole, "bias_init": whole, "dtype": dtype, "param_dtype": param_dtype}
    layer, flaxs = pair(kind, args, **kwargs)
    layer, x = layer.copy(activation=activation), whole(None, shape, x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        same_numbers(*both(layer, flaxs, activation)(jax.jit(layer.init)(KEY, x), x))


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [(("Dense", "DenseGeneral, batch")[i % 2], x) for i, x in enumerate(DTYPES) if DTYPES[x][3] is None],
)
def test_equals_flax_in_every_dtype(name, dtypes):
    check(*LAYERS[name], dtypes)


@pytest.mark.parametrize("name", LAYERS)
def test_equals_flax(name):
    check(*LAYERS[name], "bf16")


@pytest.mark.parametrize(("equation", "x", "kernel", "bias"), EINSUMS, ids=[x[0] for x in EINSUMS])
def test_einsum_equals_flax(equation, x, kernel, bias):
    check("Einsum", (kernel, equation), {}, x, "bf16")


def test_einsum_of_the_call():
    layer, flaxs = pair("Einsum", ((8, 5),))
    x = normal(0, (3, 8))

    @jax.jit
    def program(x):
        variables = layer.init(KEY, x, "ab,bc->ac")
        return variables, layer.apply(variables, x, " a b, b c -> a c"), flaxs.apply(variables, x, "ab,bc->ac")

    variables, *found = program(x)
    close(*found)
    with pytest.raises(ValueError, match="exactly two operands"):
        layer.apply(variables, x, "ab->a")


@pytest.mark.parametrize(
    ("kind", "args", "shape"),
    [
        ("Dense", (5,), (3, 8)),
        ("DenseGeneral", ((5, 3), (-2, -1), (0,)), (2, 3, 2, 4)),
        ("Einsum", ((8, 4, 2), "btd,dhk->bthk"), (2, 3, 8)),
    ],
)
@pytest.mark.parametrize("boxed", [False, True])
def test_parameters_are_those_of_flax(kind, args, shape, boxed):
    """Of the same key the same numbers, under the same names, in the same boxes of metadata."""
    init = nn.initializers.lecun_normal()
    init = nn.with_partitioning(init, ("x", "y")) if boxed else init
    layers = pair(kind, args, kernel_init=init, bias_init=nn.initializers.normal(), param_dtype=jnp.bfloat16)
    got, expected = jax.jit(lambda x: [layer.init(KEY, x) for layer in layers])(normal(0, shape, jnp.bfloat16))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert isinstance(got["params"]["kernel"], nn.Partitioned) == boxed
    same_numbers(*map(jax.tree.leaves, (got, expected)))


class Layers(nn.Module):
    """A block of Flax's own layers, the parameters named like ours."""

    gated: bool
    use_bias: bool

    @nn.compact
    def __call__(self, x):
        how = {"use_bias": self.use_bias, "bias_init": nn.initializers.normal()}
        up, down = nn.Dense(16, name="up", **how), nn.Dense(5, name="down", **how)
        return down(jax.nn.silu(nn.Dense(16, name="gate", **how)(x)) * up(x) if self.gated else jax.nn.gelu(up(x)))


@pytest.mark.parametrize(("kind", "use_bias"), [("MLP", True), ("GatedMLP", False), ("GatedMLP", True)])
def test_mlp(kind, use_bias):
    block = getattr(ours, kind)(16, 5, use_bias=use_bias, bias_init=nn.initializers.normal())
    layers, x = Layers(kind == "GatedMLP", use_bias), normal(0, (2, 3, 8))
    got, variables = jax.jit(lambda x: [layer.init(KEY, x) for layer in (block, layers)])(x)
    same_numbers(*map(jax.tree.leaves, (got, variables)))
    close(*both(block, layers)(variables, x))


def moe(**how):
    return ours.MoE(16, 4, **how)


def test_moe_is_its_definition_and_sows_its_losses():
    layer, x = moe(), normal(1, (2, 3, 8))
    variables = jax.jit(layer.init)(KEY, x)
    assert list(variables) == ["params"]
    params = variables["params"] | {"router": variables["params"]["router"]["kernel"]}

    @jax.jit
    def choose(logits):
        best, at = jax.lax.top_k(logits, 2)
        return (jax.nn.one_hot(at, 4) * jax.nn.softmax(best)[..., None]).sum(-2)

    y, state = jax.jit(functools.partial(layer.apply, mutable=["losses", "intermediates"]))(variables, x)

    @jax.jit
    def expected(x, params):
        logits = x @ params["router"]
        share = (choose(logits) > 0).reshape(-1, 4).mean(0) / 2
        balance = 4 * (share * jax.nn.softmax(logits).reshape(-1, 4).mean(0)).sum()
        return flax_cases.experts(x, params, choose), (jax.nn.logsumexp(logits, -1) ** 2).mean(), balance, share

    *found, share = expected(x, params)
    close([y, state["losses"]["router_z_loss"], state["losses"]["load_balance_loss"]], found)
    assert state["intermediates"]["tokens_per_expert"].tolist() == (np.asarray(share) * 12).tolist()
    close(jax.jit(layer.apply)(variables, x), y)


def test_experts_in_groups():
    """DeepSeek-V3's choice, with a bias that changes it, which is no parameter."""
    how = {"scoring": "sigmoid", "num_groups": 4, "groups_per_token": 2, "scale": 2.5, "use_selection_bias": True}
    layer, x = ours.MoE(16, 8, 3, **how), normal(1, (2, 6, 8))
    variables = jax.jit(layer.init)(KEY, x)
    variables["router_state"]["selection_bias"] = bias = 0.3 * np.asarray(normal(2, (8,)))
    params = variables["params"] | {"router": variables["params"]["router"]["kernel"]}
    choose = functools.partial(flax_cases.of_groups, bias=bias, k=3, groups=4, of_token=2, scale=2.5)
    close(jax.jit(layer.apply)(variables, x), flax_cases.experts(x, params, choose))


BLOCKS = {"Dense": ours.Dense(8, activation=jnp.tanh), "MLP": ours.MLP(16), "GatedMLP": ours.GatedMLP(16), "MoE": moe()}


class Step(nn.Module):
    """A block as the body of a scan."""

    block: nn.Module

    @nn.compact
    def __call__(self, x, _):
        return nn.remat(type(self.block))(**{**vars_of(self.block), "name": "layer"})(x), None


def vars_of(layer):
    return {name: getattr(layer, name) for name in layer.__dataclass_fields__ if name not in ("parent", "name")}


@pytest.mark.parametrize("kind", ["GatedMLP", "MoE"])
def test_transformations(kind):
    """vmap of an ensemble, and its layers one after the other in a scan with remat, against a loop."""
    layer, x = BLOCKS[kind], normal(0, (2, 3, 8))
    lifted = {"variable_axes": {"params": 0, "losses": 0}, "split_rngs": {"params": True}}
    many = nn.vmap(type(layer), in_axes=None, axis_size=2, **lifted)(**vars_of(layer))
    chain = nn.scan(Step, length=2, **lifted)(layer)

    @jax.jit
    def programs(x):
        variables = chain.init(KEY, x, None)["params"]["layer"]
        y, losses = chain.apply({"params": {"layer": variables}}, x, None, mutable=["losses"])
        grads = jax.grad(lambda v: (chain.apply({"params": {"layer": v}}, x, None)[0] ** 2).sum())(variables)
        each = [jax.tree.map(lambda v, i=i: v[i], variables) for i in range(2)]
        apply = lambda v, x: layer.apply({"params": v}, x)  # noqa: E731
        expected = jax.grad(lambda each: (apply(each[1], apply(each[0], x)) ** 2).sum())(each)
        ys = many.apply({"params": variables}, x), y[0], grads
        found = (
            jnp.stack([apply(v, x) for v in each]),
            apply(each[1], apply(each[0], x)),
            jax.tree.map(lambda *g: jnp.stack(g), *expected),
        )
        return ys, found, losses

    ys, expected, losses = programs(x)
    close(ys, expected)
    assert [v.shape for v in jax.tree.leaves(losses)] == ([(2,), (2,)] if kind == "MoE" else [])


@pytest.mark.parametrize("kind", BLOCKS)
def test_abstract(kind):
    """Parameters without memory, and the shape of a result."""
    x = jax.ShapeDtypeStruct((2, 3, 8), jnp.float32)
    y, variables = jax.eval_shape(BLOCKS[kind].init_with_output, KEY, x)
    assert (y.shape, y.dtype) == ((2, 3, 8), jnp.float32)
    assert all(isinstance(v, jax.ShapeDtypeStruct) for v in jax.tree.leaves(variables))


H = jnp.bfloat16
ONE = {
    "Dense": (ours.Dense(256, dtype=H, param_dtype=H, activation=jax.nn.gelu), (4, 64, 512)),
    "heads": (ours.DenseGeneral((4, 64), dtype=H, param_dtype=H, activation=jax.nn.gelu), (4, 64, 512)),
    "Einsum": (
        ours.Einsum((512, 4, 64), "btd,dhk->bthk", dtype=H, param_dtype=H, activation=jax.nn.gelu),
        (4, 64, 512),
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_bias_and_activation_are_in_the_kernel(name):
    layer, shape = ONE[name]
    x = jax.ShapeDtypeStruct(shape, H)
    found, text = flax_cases.kernels(layer.apply, jax.eval_shape(layer.init, KEY, x), x)
    assert len(found) == 1
    for absent in ("dot_general", "stablehlo.add", "tanh", "stablehlo.transpose", "broadcast"):
        assert absent not in text


@pytest.mark.parametrize("kind", ["Dense", "DenseGeneral"])
def test_a_dot_general_of_the_user(kind):
    def twice(*args, **kwargs):
        return 2 * jax.lax.dot_general(*args, **kwargs)

    for how in ({"dot_general": twice}, {"dot_general_cls": lambda: twice}):
        layer, flaxs = pair(kind, (5,), **how)
        variables = jax.jit(layer.init)(KEY, normal(0, (3, 8)))
        close(*both(layer.copy(activation=jax.nn.gelu), flaxs, jax.nn.gelu)(variables, normal(0, (3, 8))))


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (
            TypeError,
            "Dense: no argument is called bias; there are features, .*activation",
            lambda: ours.Dense(5, bias=1),
        ),
        (TypeError, "GatedMLP: no argument is called hidden; there are hidden_f", lambda: ours.GatedMLP(5, hidden=3)),
        (TypeError, "MoE: no argument is called top_k; there are", lambda: moe(top_k=2)),
        (TypeError, "activation must be a function", lambda: ours.Dense(5, activation="relu").init(KEY, jnp.ones(8))),
        (ValueError, r"Dense: inputs are \(\): they have no axis -1", lambda: ours.Dense(5).init(KEY, jnp.float32(0))),
        (ValueError, "DenseGeneral: .* no axis 2", lambda: ours.DenseGeneral(5, axis=2).init(KEY, jnp.ones((3, 8)))),
        (ValueError, "GatedMLP: .* no axis -1", lambda: ours.GatedMLP(5).init(KEY, jnp.float32(0))),
        (ValueError, "4 experts do not divide", lambda: moe(num_groups=3).init(KEY, jnp.ones((3, 8)))),
        (ValueError, "must be consecutive", lambda: ours.DenseGeneral(5, batch_dims=1).init(KEY, jnp.ones((3, 8, 2)))),
    ],
)
def test_bad_arguments(error, match, call):
    with pytest.raises(error, match=match):
        call()
