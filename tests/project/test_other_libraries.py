"""The pages about Flax, Equinox and Haiku: their programs run, and what they say of other libraries' layers holds."""

from __future__ import annotations

import pathlib

import flax_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from pages import blocks

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def programs():
    """The blocks of a page, run one after the other: their names, and each block's y."""

    def run(page):
        names, results = {}, []
        for block in blocks((DOCS / page).read_text()):
            if block.reason is None:  # tests/upstream/others.py runs the rest
                with jax.numpy_dtype_promotion("standard"):
                    exec(block.code, names)
                results.append(names.get("y"))
        return names, results

    found = {page: run(page) for page in ("flax.md", "other-libraries.md")}
    return found.__getitem__


def test_blocks_about_flax(programs):
    names, results = programs("flax.md")
    linear, images = [(4, 128, 512)], [(2, 16, 16, 64)]
    shapes = [(4, 128, 2048)] * 3 + linear * 2 + images + linear * 3 + [(2, 16, 64)] * 2
    assert [y.shape for y in results] == shapes
    assert float(abs(names["moe"].selection_bias[...]).max()) == np.float32(0.001)
    kernel = names["swiglu"].down.kernel
    assert kernel[...].sharding.spec == jax.P("model", None)


def test_equinox(programs):
    """One product of all examples, the layer's values, and kernels alone."""
    names, (line, model, *_) = programs("other-libraries.md")
    layer, mlp, x = names["layer"], names["mlp"], names["x"]
    close(line, jax.vmap(lambda x: jax.nn.gelu(layer(x)))(x), 1e-6)
    expected = x
    for i, dense in enumerate(mlp.layers):
        expected = expected @ dense.weight.T + dense.bias
        expected = jax.nn.relu(expected) if i < 2 else expected
    close(model, expected, 1e-6)


def test_equinox_runs_on_kernels_alone(programs):
    names, _ = programs("other-libraries.md")
    mlp = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if isinstance(x, jax.Array) else x, names["mlp"])
    with jax.numpy_dtype_promotion("standard"):
        found, text = flax_cases.kernels(jax.vmap(mlp), jax.ShapeDtypeStruct((256, 64), jnp.bfloat16))
    assert len(found) == 3
    assert "dot_general" not in text


def test_haiku(programs):
    names, (*_, line, model) = programs("other-libraries.md")
    expected = names["model"].apply(names["params"], names["x"])
    close(line, expected, 1e-6)
    close(model, expected, 1e-6)
    assert "cutjax_gemm" in str(jax.make_jaxpr(names["apply"])(names["params"], names["x"]))
