"""The benchmark of whole models: its models are what they are named after, and all ways of each one agree."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import run, suite
from benchmarks.models import gpt2, ways
from benchmarks.ops import programs
from benchmarks.record import Roofline

PROGRAMS = {program.name: program for program in programs.SUITE.cases}
# Each way in some program; the command line runs decoding, and others are traced. All in all of them: --tag tiny.
TINY = {
    "tiny llama block": ("dropin", "fuse", "flax"),
    "tiny deepseek block": ("fuse",),
    "tiny gpt2 medium": ("step",),
    "tiny resnet50": ("flax",),
}
TRACED = ("tiny vit b16", "tiny convnext-t", "tiny diffusion u-net", "tiny 3-d u-net", "tiny efficientnet-b0")
RUN = suite.Run("host", Roofline(math.nan, math.nan))


@pytest.fixture
def quick(monkeypatch):
    """One turn of one step."""
    monkeypatch.setattr(programs, "ROUNDS", 1)
    monkeypatch.setattr(programs, "ROUND_S", 0.0)
    strict = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax multiplies Python's floats with int32
    yield
    jax.config.update("jax_numpy_dtype_promotion", strict)


@pytest.mark.parametrize("name", TINY)
def test_the_ways_agree(quick, name):
    asked = suite.Run("host", RUN.roofline, peers=TINY[name])
    rows = {row.product: row for row in programs.measure_case(PROGRAMS[name], asked)}
    assert [*rows] == [*PROGRAMS[name].baselines, *TINY[name]]
    for row in rows.values():
        assert not row.failure
        assert row.us > 0
        assert row.peak_mib > 0
        assert row.error <= programs.LOSSES
        assert len(row.figures["losses"]) == programs.CHECKED
        assert ("jax" in row.ratios) == (row.product not in PROGRAMS[name].baselines)
    if PROGRAMS[name].trains:
        assert rows["jax"].figures["losses"][0] > rows["jax"].figures["losses"][-1]


@pytest.mark.parametrize("name", TRACED)
def test_gradients_are_traced(name):
    """In plain JAX and by fuse, of models like those that are run."""
    model = PROGRAMS[name].make()
    with jax.numpy_dtype_promotion("standard"):
        params, inputs = jax.eval_shape(model.init, jax.random.key(0))
        for way in ("jax", "fuse"):
            gradients = jax.eval_shape(jax.grad(model.loss(ways.way(way))), params, inputs)
            assert jax.tree.structure(gradients) == jax.tree.structure(params)


def test_a_way_that_is_wrong_or_fails_is_told(quick, monkeypatch):
    right = ways.way

    def wrong(name):
        if name == "flax":
            raise RuntimeError("no such thing")
        if name != "dropin":
            return right(name)

        def multiplied(x, *args, **kwargs):
            return 8 * jnp.einsum(x, *args, **kwargs)

        return right("jax")._replace(name=name, einsum=multiplied)

    monkeypatch.setattr(ways, "way", wrong)
    asked = suite.Run("host", RUN.roofline, peers=("dropin", "flax"))
    rows = {row.product: row for row in programs.measure_case(PROGRAMS["tiny decoding"], asked)}
    assert [*rows] == ["jax", "dropin", "flax"]
    assert rows["dropin"].failure.startswith("wrong: losses differ by")
    assert rows["flax"].failure == "RuntimeError: no such thing"
    assert not rows["jax"].failure


def test_gradients_of_a_network_with_norms_are_compared_with_float32(quick, monkeypatch):
    right = ways.way

    def wrong(name):
        def halved(gradient):
            def found(*args):
                value, grads = gradient(*args)
                return value, jax.tree.map(lambda x: x / 2, grads)

            return found

        return right("jax")._replace(name=name, transform=halved) if name == "step" else right(name)

    monkeypatch.setattr(ways, "way", wrong)
    asked = suite.Run("host", RUN.roofline, peers=("dropin", "step"))
    rows = {row.product: row for row in programs.measure_case(PROGRAMS["tiny hifi-gan"], asked)}
    assert 0 < rows["jax"].figures["gradients"] < 0.1
    assert not rows["jax"].failure
    assert not rows["dropin"].failure
    assert rows["step"].figures["gradients"] > 0.4
    assert rows["step"].failure.startswith("wrong")


def test_the_command_line(quick, tmp_path):
    out = tmp_path / "programs.json"
    arguments = ["--op", "programs", "--tag", "tiny-e", "--peers", "dropin", "--out", str(out)]
    assert run.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"], row["product"]) for row in rows] == [("tiny decoding", "jax"), ("tiny decoding", "dropin")]
    assert "programs" in run.tables.COLUMNS


# Weights: of the blocks, norms 2 x width, attention width x (2 heads + 2 kv_heads) x size, and what follows.
SIZES = {
    "llama block": 2 * 4096 + 4096 * 128 * (64 + 16) + 3 * 4096 * 14336,
    "deepseek block": 2 * 2048 + 2048 * 128 * 64 + 3 * 2048 * (64 * 1408 + 2816) + 64 * 2048,
    "gpt2 medium": 354_823_168,  # as published
    "vit b16": 86_567_656,  # as published
    "resnet50": 25_557_032,  # as published, as are the others
    "convnext-t": 28_589_128,
    "efficientnet-b0": 5_288_548,
    "hifi-gan": 13_926_017,
    "decoding": 4 * (2 * 4096 + 4096 * 128 * 80 + 3 * 4096 * 14336) + 2 * 32000 * 4096 + 4096,
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    """Of the parameters, at the sizes that are reported."""
    model = PROGRAMS[name].make()
    with jax.numpy_dtype_promotion("standard"):
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == SIZES[name]


@pytest.mark.filterwarnings("ignore")  # of the Flax classes, which transformers 5 has no more
def test_gpt2_is_that_of_transformers():
    import transformers

    dtype = jnp.bfloat16  # in which it also tells that both round in the same places
    sizes = gpt2.Sizes(64, 4, 2, 32, 101)
    config = transformers.GPT2Config(vocab_size=101, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    with jax.numpy_dtype_promotion("standard"):
        theirs = transformers.FlaxGPT2LMHeadModel(config, seed=0, input_shape=(1, 8), dtype=dtype, _do_init=False)
        tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 101)
        ours = gpt2.GPT2(sizes, ways.way("jax"), dtype)
        key, rng = jax.random.key(1), np.random.default_rng(1)
        shapes = jax.eval_shape(lambda: ours.init(key, tokens)["params"])
        assert shapes == jax.eval_shape(lambda: theirs.init_weights(key, (1, 8)))
        params = jax.tree.map(lambda x: (0.1 * rng.standard_normal(x.shape)).astype(x.dtype), shapes)
        got, expected = jax.jit(lambda p: (ours.apply({"params": p}, tokens), theirs(tokens, params=p).logits))(params)
    assert got.dtype == expected.dtype == dtype
    # Equal to the bit where it was written; the logits are at most 0.8.
    np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), rtol=0, atol=1e-6)
