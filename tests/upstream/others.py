"""The programs of docs/other-libraries.md that need tokamax and Qwix, and layers of tokamax under cutjax.patch."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import pytest
import qwix
import tokamax
from absl import flags
from checks import close
from jax import lax
from pages import blocks

import cutjax
from cutjax.fusion import price

flags.FLAGS.mark_as_parsed()  # tokamax would read pytest's options
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "other-libraries.md"


@pytest.fixture(scope="module")
def programs():
    """The blocks, run one after the other: their names, and each block's y."""
    names, results = {"jax": jax, "jnp": jnp, "cutjax": cutjax}, []
    for block in blocks(PAGE.read_text()):
        if block.reason:
            with jax.numpy_dtype_promotion("standard"):
                exec(block.code, names)
            results.append((names["y"], names["x"]))
    return names, results


@pytest.fixture
def kernels_win(monkeypatch):
    """Every product that has a kernel becomes one."""
    monkeypatch.setattr(price, "LEAD", 0.0)


def test_ragged_dot(programs):
    names, ((y, x), *_) = programs
    experts, sizes = names["experts"], names["sizes"]
    close(y, lax.ragged_dot(x, experts, sizes), 1e-6)

    def run(x, activation=None):
        given = tokamax.RaggedDotGroupSizes(sizes, (64,) * 4)
        how = {"activation": activation, "implementation": (names["on_cutjax"],)}
        return tokamax.ragged_dot(x, experts, given, **how)

    assert "cutjax_grouped_gemm" in str(jax.make_jaxpr(run)(x))
    close(run(x, jax.nn.relu), jax.nn.relu(y), 1e-6)


def test_gated_linear_unit(programs):
    names, (_, (y, x), *_) = programs
    with jax.numpy_dtype_promotion("standard"):
        close(y, tokamax.gated_linear_unit(x, (names["gate"], names["up"]), activation=jax.nn.silu), 1e-5)


def test_qwix(programs):
    names, (*_, (y, x)) = programs
    with jax.numpy_dtype_promotion("standard"):
        close(cutjax.gemm(x, names["qarray"]), x @ qwix.dequantize(names["qarray"]), 2**-7)
        theirs = qwix.quantize_model(names["layer"], qwix.PtqProvider([qwix.QuantizationRule(weight_qtype=jnp.int8)]))
        given = {"params": names["params"]}
        close(y, theirs.apply(given, x).astype(y.dtype), 2**-6)
        text = str(jax.make_jaxpr(names["model"].apply)(given, x))
    assert "cutjax_gemm" in text
    assert "dot_general" not in text
    assert y.dtype == jnp.bfloat16


def test_tokamax_under_patch(programs, kernels_win):
    names, _ = programs
    x, experts = jnp.ones((256, 128), jnp.bfloat16), names["experts"].astype(jnp.bfloat16)

    def layer(x, experts):
        y = tokamax.ragged_dot(x, experts, names["sizes"], implementation="xla")
        return tokamax.gated_linear_unit(y, (experts[0].T, experts[1].T), activation=jax.nn.silu, implementation="xla")

    with cutjax.patch() as patched, jax.numpy_dtype_promotion("standard"):
        fused = jax.jit(layer)
        close(fused(x, experts), layer(x, experts), 2**-5)
        gradient = jax.grad(lambda *args: layer(*args).astype(jnp.float32).mean(), (0, 1))
        for mine, theirs in zip(jax.jit(gradient)(x, experts), gradient(x, experts), strict=True):
            close(mine, theirs, 2**-4)
    assert all(program.kernels == program.products >= 3 for program in patched.programs)
