"""The examples of convolutions, small: each checks itself, and ends with an error where its losses part."""

from __future__ import annotations

import importlib
import pathlib

import jax
import numpy as np
import pytest

pytest.importorskip("flax")
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name."""
    pytest.importorskip("optax")
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python's floats with int32
        yield importlib.import_module


def test_convnet(example, monkeypatch, capsys):
    convnet = example("convnet")
    small = convnet.Setup((8,), 1, 8, 4, 2, "float32")
    monkeypatch.setattr(convnet, "CONFIGS", {"cpu": small})
    losses = convnet.main(["--with", "all", "--config", "cpu", "--steps", "3"])
    assert [*losses] == list(convnet.WAYS)
    assert all(len(found) == 3 for found in losses.values())
    assert capsys.readouterr().out.count("images/s") == 4
    monkeypatch.setattr(convnet, "train", lambda setup, way: ([float(way == "flax")], 1.0))
    with pytest.raises(SystemExit, match="FAILED: the losses of flax differ from those of jax"):
        convnet.main(["--with", "jax,flax", "--config", "cpu"])


def test_mamba(example, monkeypatch):
    """Decoding goes on from the state of a prompt; without it the example says that the logits are others."""
    mamba = example("mamba")
    small = mamba.Setup(8, 1, 2, 12, 2, 2, "float32", vocabulary=8)
    losses = mamba.main([], small)
    np.testing.assert_allclose(losses["ours"], losses["plain"], rtol=1e-5)
    forgets = mamba.update
    monkeypatch.setattr(mamba, "update", lambda x, kernel, bias, state: forgets(x, kernel, bias, 0 * state))
    with pytest.raises(SystemExit, match="FAILED"):
        mamba.main([], small)
