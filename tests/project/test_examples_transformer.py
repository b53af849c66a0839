"""The transformer of examples/: its batches, that training resumes bit for bit, that the ways agree, and its cache."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.progress import Progress

import cutjax

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
TINY = {"width": 32, "heads": 2, "kv_heads": 1, "hidden": 48, "layers": 1, "context": 16, "batch": 4}


@pytest.fixture
def lm(monkeypatch):
    """The modules of the example."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names = ("data", "ways", "model", "transformer", "serve", "fp8")
    modules = SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    modules.setup = dataclasses.replace(modules.model.CONFIGS["cpu"], **TINY, steps=6)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python's floats with int32
        yield modules


def train(lm, setup, folder=None, name="jax"):
    text = lm.data.encode(lm.data.TEXT.read_text())
    checkpoints = lm.transformer.Checkpoints(folder, every=2)
    return lm.transformer.train(setup, name, text, checkpoints, Progress(disable=True))


def test_an_epoch_has_every_window_once(lm):
    text = np.arange(1000, dtype=np.int32)
    batches = lm.data.Batches(text, 3, 10, seed=1)
    epoch = [next(batches) for _ in range(batches.per_epoch)]
    starts = np.concatenate([batch[:, 0] for batch in epoch])
    assert len({*starts}) == len(starts) == 99
    assert len({start % 10 for start in starts}) == 1
    assert all(np.array_equal(row, row[0] + np.arange(11)) for batch in epoch for row in batch)
    assert not np.array_equal(next(batches), epoch[0])
    resumed = lm.data.Batches(text, 3, 10, seed=1, position=20)
    np.testing.assert_array_equal(next(resumed), epoch[20])
    with pytest.raises(ValueError, match="longer than 30"):
        lm.data.Batches(text[:30], 3, 10)


def test_training_resumes_bit_for_bit(lm, tmp_path):
    """Of experts, whose state has more than parameters."""
    setup = dataclasses.replace(lm.setup, experts=4)
    _, whole = train(lm, setup)
    _, first = train(lm, dataclasses.replace(setup, steps=4), tmp_path)
    state, second = train(lm, setup, tmp_path)
    assert (first.first, second.first) == (0, 4)
    assert [*first.losses, *second.losses] == whole.losses
    assert lm.transformer.Checkpoints(tmp_path).setup() == setup
    restored, step = lm.transformer.Checkpoints(tmp_path).restore(lm.transformer.fresh_state(setup), setup)
    assert step == 6
    for a, b in zip(jax.tree.leaves(restored.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(SystemExit, match="the checkpoint in"):
        train(lm, dataclasses.replace(setup, width=64), tmp_path)


@pytest.mark.parametrize(("experts", "ways"), [(0, ("jax", "dropin", "fuse")), (4, ("jax", "flax"))])
def test_the_ways_agree(lm, experts, ways):
    setup = dataclasses.replace(lm.setup, experts=experts)
    curves = {name: train(lm, setup, name=name)[1] for name in ways}
    # They differ by at most 1e-6 where the products round in another order.
    for name in ways[1:]:
        np.testing.assert_allclose(curves[name].losses, curves["jax"].losses, rtol=0, atol=2e-5, err_msg=name)
    lm.transformer.check(curves, setup)
    curves[ways[-1]].losses[3] += 0.01
    with pytest.raises(SystemExit, match=f"the losses of {ways[-1]} differ from those of jax"):
        lm.transformer.check(curves, setup)
    names = [str(cell) for cell in lm.transformer.table(curves).columns[0].cells]
    assert names == list(ways)


def test_the_cache_changes_nothing(lm):
    """Logits of a pass in two parts over a cache, and of one pass."""
    setup = dataclasses.replace(lm.setup, layers=2)
    model = nnx.jit(nnx.merge(lm.model.build(setup), lm.model.init(setup)), static_argnums=2)
    tokens = jax.random.randint(jax.random.key(0), (3, 12), 0, 256)
    whole = model(tokens)[0]
    blank = jnp.zeros((3, 16, setup.kv_heads, setup.size))
    first, _, cache = model(tokens[:, :8], [(blank, blank)] * 2)
    second = model(tokens[:, 8:], cache, 8)[0]
    # The largest difference is 1e-6; of logits one position further, 3.
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=0, atol=1e-5)


def test_serve_writes_what_the_model_finds_likeliest(lm, tmp_path, capsys):
    """In two ways, of one training."""
    state, _ = train(lm, dataclasses.replace(lm.setup, steps=2), tmp_path)
    model = nnx.jit(nnx.merge(lm.model.build(lm.setup), state.params))
    for name in ("dropin", "flax"):
        arguments = [str(tmp_path), "--with", name, "--sequences", "3", "--tokens", "5", "--temperature", "0"]
        tokens = lm.serve.main(arguments)
        assert f"3 sequences of 5 tokens with {name}" in capsys.readouterr().out
        prompts = [lm.data.encode(prompt) for prompt in lm.serve.PROMPTS[:3]]  # as long as each other
        logits = model(jnp.asarray(np.concatenate([prompts, tokens], 1)))[0]
        np.testing.assert_array_equal(jnp.argmax(logits, -1)[:, len(prompts[0]) - 1 : -1], tokens)


@pytest.mark.parametrize(("weights", "experts"), [("int4", 0), ("fp8", 0), ("mxfp4", 2)])
def test_serving_narrow_weights(lm, tmp_path, capsys, weights, experts):
    """Writes what the model of the dequantized weights finds likeliest; other ways than cutjax.flax take none."""
    setup = dataclasses.replace(lm.setup, steps=2, experts=experts)
    checkpoints, state = lm.transformer.Checkpoints(tmp_path), lm.transformer.fresh_state(setup)
    checkpoints.save(2, state, setup)
    checkpoints.manager.wait_until_finished()
    arguments = [str(tmp_path), "--weights", weights, "--sequences", "2", "--tokens", "4", "--temperature", "0"]
    tokens = lm.serve.main(arguments)
    assert "of 4 tokens with flax" in capsys.readouterr().out
    narrow = jax.jit(lm.serve.narrowed, static_argnums=1)(state.params, weights)
    assert lm.serve.bytes_of(narrow) < 0.75 * lm.serve.bytes_of(state.params)  # half of the rest is the embedding

    def wide(leaf):
        w = leaf[...]
        return leaf.replace(w.dequantize() if isinstance(w, cutjax.Quantized) else w)

    @jax.jit
    def likeliest(narrow, tokens):
        leaves = [(path, wide(leaf)) for path, leaf in nnx.to_flat_state(narrow)]
        model = nnx.merge(lm.model.build(setup, "flax"), nnx.from_flat_state(leaves))
        return jnp.argmax(model(tokens)[0], -1)

    prompts = [lm.data.encode(prompt) for prompt in lm.serve.PROMPTS[:2]]
    found = likeliest(narrow, jnp.asarray(np.concatenate([prompts, tokens], 1)))
    np.testing.assert_array_equal(found[:, len(prompts[0]) - 1 : -1], tokens)
    with pytest.raises(SystemExit):
        lm.serve.main([*arguments, "--with", "jax"])


def test_the_command_line(lm, tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--set", '{"width": 32, "hidden": 48, "layers": 1, "context": 16, "batch": 4}', "--config", "cpu"]
    out = tmp_path / "out.png"
    curves = lm.transformer.main(["--with", "jax", "--steps", "2", "--out", str(out), *sizes])
    assert [*curves] == ["jax"]
    assert out.stat().st_size > 10_000
    with pytest.raises(SystemExit):
        lm.transformer.main(["--with", "jax,torch"])
    with pytest.raises(SystemExit):
        lm.transformer.main(["--with", "all", "--checkpoints", str(tmp_path)])


def test_float8_trains_as_bfloat16_does(lm, tmp_path):
    sizes = json.dumps(TINY)
    curves = lm.fp8.main(["--recipes", "block", "--steps", "6", "--set", sizes, "--out", str(tmp_path / "fp8.png")])
    wide, narrow = curves.values()
    assert (tmp_path / "fp8.png").stat().st_size > 0
    # The first losses are of the same parameters: they differ by what float8 rounds, 9e-3 here.
    assert 0 < abs(narrow.losses[0] - wide.losses[0]) < 0.05
    assert narrow.losses[-1] < narrow.losses[0]
    narrow.losses[-1] += 1
    with pytest.raises(SystemExit, match="fp8-block ends with"):
        lm.fp8.check(curves)
