"""The pages about Flax, Equinox, Haiku, tokamax and Qwix: their programs run, and what they say of these holds."""

from __future__ import annotations

import functools
import pathlib

import equinox as eqx
import flax_cases
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from checks import close, normal, scaled
from flax import linen as nn
from flax import nnx
from jax import lax
from pages import blocks

import cutjax

flags.FLAGS.mark_as_parsed()  # tokamax would read pytest's options
# Qwix looks for a class that Flax has under another name by now.
pytestmark = pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")
DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def programs():
    """The names of a page after each of its blocks, which run one after the other."""

    @functools.cache
    def run(page):
        names, after = {}, []
        for block in blocks((DOCS / page).read_text()):
            assert block.reason is None
            names = dict(names)  # whose functions go on seeing what they were written beside
            with jax.numpy_dtype_promotion("standard"):
                exec(block.code, names)
            after.append(names)
        return after

    return run


def test_blocks_about_flax(programs):
    after = programs("flax.md")
    linear, images = [(4, 128, 512)], [(2, 16, 16, 64)]
    shapes = [(4, 128, 2048)] * 3 + linear * 2 + images + linear * 3 + [(2, 16, 64)] * 2
    assert [names["y"].shape for names in after] == shapes
    names = after[-1]
    assert float(abs(names["moe"].selection_bias[...]).max()) == np.float32(0.001)
    kernel = names["swiglu"].down.kernel
    assert kernel[...].sharding.spec == jax.P("model", None)


@pytest.fixture
def of(programs):
    """The names after the last of so many blocks, and each block's y, of one library.

    Those of tokamax and Qwix are imported by the page: where a JAX of last night breaks them, other files still run.
    """
    order = ("equinox", "equinox", "haiku", "haiku", "tokamax", "tokamax", "qwix", "experts")

    def found(library):
        after = [names for name, names in zip(order, programs("other-libraries.md"), strict=True) if name == library]
        return after[-1], *(names["y"] for names in after)

    return found


def test_equinox(of):
    """One product of all examples, the layer's values, and kernels alone."""
    names, line, model = of("equinox")
    layer, mlp, x = names["layer"], names["mlp"], names["x"]
    close(line, jax.vmap(lambda x: jax.nn.gelu(layer(x)))(x), 1e-6)
    expected = x
    for i, dense in enumerate(mlp.layers):
        expected = expected @ dense.weight.T + dense.bias
        expected = jax.nn.relu(expected) if i < 2 else expected
    close(model, expected, 1e-6)


def test_equinox_runs_on_kernels_alone(of):
    names, *_ = of("equinox")
    mlp = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if isinstance(x, jax.Array) else x, names["mlp"])
    with jax.numpy_dtype_promotion("standard"):
        found, text = flax_cases.kernels(jax.vmap(mlp), jax.ShapeDtypeStruct((256, 64), jnp.bfloat16))
    assert len(found) == 3
    assert "dot_general" not in text


def test_haiku(of):
    names, line, model = of("haiku")
    expected = names["model"].apply(names["params"], names["x"])
    close(line, expected, 1e-6)
    close(model, expected, 1e-6)
    assert "cutjax_gemm" in str(jax.make_jaxpr(names["apply"])(names["params"], names["x"]))


def test_tokamax_ragged_dot(of):
    """Forward and backward, of plain sizes and of tokamax's own, with and without an activation."""
    names, y, _ = of("tokamax")
    tokamax, x, experts = (names[name] for name in ("tokamax", "x", "experts"))
    sizes = names["sizes"]
    close(y, lax.ragged_dot(x, experts, sizes), 1e-6)

    def run(x, experts, activation=None):
        given = tokamax.RaggedDotGroupSizes(sizes, (64,) * 4)
        how = {"activation": activation, "implementation": (names["on_cutjax"],)}
        return tokamax.ragged_dot(x, experts, given, **how)

    close(run(x, experts, jax.nn.relu), jax.nn.relu(y), 1e-6)
    gradient = jax.grad(lambda *args: run(*args).sum(dtype=jnp.float32), (0, 1))
    narrow = [x.astype(jnp.bfloat16) for x in (x, experts)]
    text = str(jax.make_jaxpr(gradient)(*narrow))
    assert "cutjax_grouped_outer" in text
    assert "ragged_dot_general" not in text
    plain = jax.grad(lambda *args: lax.ragged_dot(*args, sizes).sum(dtype=jnp.float32), (0, 1))
    close(gradient(*narrow), plain(*narrow), 2**-7)


def test_tokamax_gated_linear_unit(of):
    names, _, y = of("tokamax")
    tokamax, x, weights = names["tokamax"], names["x"], (names["gate"], names["up"])
    asked: list[None] = []
    with jax.numpy_dtype_promotion("standard"):
        close(y, tokamax.gated_linear_unit(x, weights, activation=jax.nn.silu), 1e-5)
        tokamax.gated_linear_unit(x, weights, implementation=(lambda *_, **__: asked.append(None),))
    assert not asked  # where this fails a function can be an implementation, and the page is to have one


@pytest.mark.usefixtures("kernels_win")
def test_tokamax_under_patch(of):
    """Its implementation for XLA: all products are seen, those of its rules for derivatives too."""
    names, *_ = of("tokamax")
    tokamax, x, experts = names["tokamax"], normal(0, (256, 128), jnp.bfloat16), scaled(1, (4, 128, 64), jnp.bfloat16)

    def layer(x, experts):
        y = tokamax.ragged_dot(x, experts, names["sizes"], implementation="xla")
        return tokamax.gated_linear_unit(y, (experts[0].T, experts[1].T), activation=jax.nn.silu, implementation="xla")

    with cutjax.patch() as patched, jax.numpy_dtype_promotion("standard"):
        fused = jax.jit(layer)
        close(fused(x, experts), layer(x, experts), 2**-5)
        gradient = jax.grad(lambda *args: layer(*args).astype(jnp.float32).sum(), (0, 1))
        close(jax.jit(gradient)(x, experts), gradient(x, experts), 2**-4)
    # The gradient of the experts is a product of x by values that tokamax has widened: of float32 in groups of k, of
    # which kernels were not faster on a device and are for backend="cuda" alone.
    assert [(program.products, program.kernels) for program in patched.programs] == [(3, 3), (9, 8)]


def test_tokamax_gate_in_one_kernel(of):
    """Of its implementation for XLA the gate, what it gates and the activation are one kernel, once that is faster."""
    names, *_ = of("tokamax")
    tokamax, x = names["tokamax"], jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def layer(x, gate, up):
        return tokamax.gated_linear_unit(x, (gate, up), activation=jax.nn.silu, implementation="xla")

    with jax.numpy_dtype_promotion("standard"):
        found = cutjax.explain(cutjax.fuse(layer), device="NVIDIA H200")(x, x, x)
    assert len(found.rows) == 1
    assert "2 of 2 products fused" in str(found)


def test_qwix(of):
    names, y = of("qwix")
    qwix, x = names["qwix"], names["x"]
    with jax.numpy_dtype_promotion("standard"):
        close(cutjax.gemm(x, names["qarray"]), x @ qwix.dequantize(names["qarray"]), 2**-7)
        theirs = qwix.quantize_model(names["layer"], qwix.PtqProvider([qwix.QuantizationRule(weight_qtype=jnp.int8)]))
        given = {"params": names["params"]}
        close(y, theirs.apply(given, x).astype(y.dtype), 2**-6)
        text = str(jax.make_jaxpr(names["model"].apply)(given, x))
    assert "cutjax_gemm" in text
    assert "dot_general" not in text
    assert y.dtype == jnp.bfloat16


def test_experts(of):
    """The last of the four ways is the first's values; tests/fusion/test_moe_of_others.py has layers with gradients."""
    names, y = of("experts")
    args = names["x"], names["x"] @ names["router"], names["gate"], names["up"], names["down"]
    for way in (names["experts_of"], cutjax.fuse(names["experts_of"])):
        close(y, way(*args), 1e-5)
    close(y, names["experts_of"](*args, ragged_dot=cutjax.ragged_dot), 1e-5)


MODELS = {
    "nnx": lambda x: (nnx.Linear(64, 128, rngs=nnx.Rngs(0)), lambda layer, x: nnx.jit(lambda m, x: m(x))(layer, x)),
    "linen": lambda x: (nn.Dense(128), lambda layer, x: jax.jit(layer.apply)(layer.init(jax.random.key(0), x), x)),
    "equinox": lambda x: (
        eqx.nn.Linear(64, 128, key=jax.random.key(0)),
        lambda layer, x: eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(layer, x),
    ),
    "haiku": lambda x: (
        hk.without_apply_rng(hk.transform(lambda x: hk.Linear(128)(x))),
        lambda layer, x: jax.jit(layer.apply)(layer.init(jax.random.key(0), x), x),
    ),
}


@pytest.mark.usefixtures("kernels_win")
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_others_under_patch(name):
    """Their layers as they are, jitted as each library does."""
    x = jnp.ones((256, 64))
    layer, run = MODELS[name](x)
    with jax.numpy_dtype_promotion("standard"), cutjax.patch() as patched:
        y = run(layer, x)
    assert [(program.products, program.kernels) for program in patched.programs] == [(1, 1)]
    with jax.numpy_dtype_promotion("standard"):
        close(y, run(layer, x), 1e-6)
