"""The examples of quantized checkpoints: their files, that decoding is that of the dequantized weights, and QLoRA."""

from __future__ import annotations

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python's floats with int32
        yield importlib.import_module


def test_files_are_those_of_safetensors(example, tmp_path):
    """Each reads what the other has written."""
    others = pytest.importorskip("safetensors.numpy")
    checkpoints = example("checkpoints")
    tensors = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b.c": np.ones((4,), np.float16)}
    checkpoints.save(tmp_path / "ours", tensors)
    others.save_file(tensors, tmp_path / "theirs", metadata={"format": "np"})
    for found in (others.load_file(tmp_path / "ours"), checkpoints.load(tmp_path / "theirs")):
        assert found.keys() == tensors.keys()
        for name, x in tensors.items():
            np.testing.assert_array_equal(found[name], x, strict=True)


DTYPES = {"gptq": "int4", "awq": "uint4", "mxfp4": "float4_e2m1fn", "fp8": "float8_e4m3fn", "bf16": "bfloat16"}
DTYPES |= {"int8": "int8", "int4": "int4"}


@pytest.mark.parametrize("weights", DTYPES)
def test_weights_are_read_as_they_are(example, tmp_path, weights):
    """Through a file: the operand has the format's dtype, and the deviation that random weights were made with."""
    checkpoints = example("checkpoints")
    n, k = 256, 128
    rng = np.random.default_rng(0)
    kind = weights if weights in checkpoints.FILES else "bf16"
    checkpoints.save(tmp_path / "file", checkpoints.random_linear(rng, "layers.1.x", n, k, kind))
    w, layout = checkpoints.linear(checkpoints.load(tmp_path / "file"), "layers.1.x", weights)
    assert layout == ("nn" if weights in ("gptq", "awq", "mxfp4", "int4") else "nt")
    assert w.shape == ((k, n) if layout == "nn" else (n, k))
    assert (w.dtype if weights == "bf16" else w.values.dtype) == DTYPES[weights]
    y = cutjax.gemm(jax.random.normal(jax.random.key(0), (4, k)), w, layout=layout)
    assert 0.7 < y.std() < 1.4


def test_symmetric_files_have_no_zero_points(example):
    checkpoints = example("checkpoints")
    tensors = checkpoints.random_linear(np.random.default_rng(0), "x", 64, 128, "gptq")
    w, _ = checkpoints.linear(tensors, "x")
    del tensors["x.qzeros"]
    found, layout = checkpoints.linear(tensors, "x")
    assert layout == "nn"
    jax.tree.map(np.testing.assert_array_equal, found, w)


def test_serving(example, monkeypatch, tmp_path, capsys):
    """Tokens are the likeliest of the dequantized model, step by step over the cache and in one pass."""
    serving, checkpoints = example("serve_quantized"), example("checkpoints")
    setup = serving.Setup(128, 2, 1, 128, 1, dtype="float32")
    monkeypatch.setattr(serving, "CONFIGS", {"cpu": setup})
    path = tmp_path / "model.safetensors"
    arguments = ["--weights", "awq", "--file", str(path), "--sequences", "2", "--tokens", "3", "--config", "cpu"]
    tokens = serving.main(arguments)
    printed = capsys.readouterr().out
    assert "awq: " in printed
    assert " x u4 " in printed
    assert path.exists()
    np.testing.assert_array_equal(serving.main(arguments), tokens)

    params, layout = serving.read(checkpoints.load(path), setup)
    assert checkpoints.bytes_of(params["layers"][0]["mlp.gate_up_proj"]) == 2 * (128 * 128 // 2 + 128 * 2 + 128 // 2)
    wide = [{name: getattr(w, "dequantize", lambda w=w: w)() for name, w in params["layers"][0].items()}]
    prompts = jax.random.randint(jax.random.key(0), (2, 8), 0, setup.vocabulary)
    whole = jnp.concatenate([prompts, tokens], 1)
    found, _ = jax.jit(lambda tokens: serving.logits({**params, "layers": wide}, tokens, None, 0, setup, layout))(whole)
    np.testing.assert_array_equal(jnp.argmax(found, -1)[:, 7:-1], tokens)


def test_serving_a_quantized_head(example, monkeypatch, tmp_path, capsys):
    """The head of 4 bits is multiplied as the layers are; a file's own formats have none."""
    serving, checkpoints = example("serve_quantized"), example("checkpoints")
    setup = serving.Setup(128, 2, 1, 128, 1, dtype="float32")
    monkeypatch.setattr(serving, "CONFIGS", {"cpu": setup})
    path = tmp_path / "model.safetensors"
    arguments = ["--weights", "int4", "--head", "--file", str(path), "--sequences", "2", "--tokens", "3"]
    assert serving.main([*arguments, "--config", "cpu"]).shape == (2, 3)
    params, layout = serving.read(checkpoints.load(path), setup, "int4", head=True)
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, setup.vocabulary)
    found, _ = serving.logits(params, tokens, None, 0, setup, layout)
    wide = {**params, "head": params["head"].dequantize().T}
    np.testing.assert_allclose(found, serving.logits(wide, tokens, None, 0, setup, layout)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(SystemExit):
        serving.main(["--weights", "awq", "--head"])
    assert "bf16" in capsys.readouterr().err


def test_qlora(example, monkeypatch):
    pytest.importorskip("optax")
    qlora = example("qlora")
    monkeypatch.setattr(qlora, "SETUP", qlora.Setup(128, 2, 1, 128, 1, dtype="float32"))
    monkeypatch.setattr(qlora, "CONTEXT", 16)
    first, second = qlora.main(["--steps", "6", "--rank", "2"])
    assert len(first) == len(second) == 6
    monkeypatch.setattr(qlora, "train", lambda loss, trained, *_: (trained, [0.0]))
    with pytest.raises(SystemExit, match="FAILED: adapters do not lower"):
        qlora.main([])
    dequantize = cutjax.Quantized.dequantize
    monkeypatch.setattr(cutjax.Quantized, "dequantize", lambda q, *dtype: 1.5 * dequantize(q, *dtype))
    with pytest.raises(SystemExit, match="FAILED: gradients differ"):
        qlora.main([])
