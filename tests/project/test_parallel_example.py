"""examples/parallel_lm.py: on meshes of virtual devices, and of two processes, the losses are those of one device."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
TINY = {"width": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "layers": 1, "context": 16, "batch": 4}
SIZES = ["--set", json.dumps(TINY), "--config", "cpu", "--steps", "2"]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python's floats with int32
        yield importlib.import_module("parallel_lm")


def test_losses_are_those_of_one_device(example, capsys):
    """Of experts, and four devices that share two heads of keys; so these are whole on each."""
    losses = example.main([*["--data", "2", "--model", "4", "--fsdp", "--experts", "4"], *SIZES, "--check"])
    assert len(losses) == 2
    assert "equal to one device's" in capsys.readouterr().out


def test_how_parameters_are_divided(example):
    """Every matrix of a block over "model", and with fsdp over "data" too; so what the optimizer keeps."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    setup = example.dataclasses.replace(example.CONFIGS["cpu"], **TINY | {"kv_heads": 4})

    def params():
        return example.nnx.split(example.Transformer(setup, example.way("jax"), example.nnx.Rngs(0)))[1]

    shapes = jax.eval_shape(params)
    state = jax.eval_shape(example.make_optimizer(setup).init, shapes)
    for tree in (shapes, state):
        matrices = [
            (path, x, place)
            for (path, x), place in zip(
                jax.tree_util.tree_leaves_with_path(tree),
                jax.tree.leaves(example.shardings(tree, mesh, True)),
                strict=True,
            )
            if x.ndim > 1
        ]
        assert len(matrices) >= 9
        for path, x, place in matrices:
            parts = 2 if any(name in str(path) for name in ("embed", "head'")) else 8
            assert np.prod(place.shard_shape(x.shape)) * parts == x.size, path


def test_what_does_not_divide_is_refused(example):
    with pytest.raises(SystemExit, match="hidden is 50, which does not divide over 4 devices"):
        example.main(["--model", "4", *SIZES[2:], "--set", json.dumps(TINY | {"hidden": 50})])
    with pytest.raises(SystemExit):
        example.main(["--data", "3", "--model", "4", *SIZES])


def test_two_processes(example, capsys):
    """Two processes of two devices each, one mesh; gloo between them. The losses are those of this process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [
        sys.executable,
        str(EXAMPLES / "parallel_lm.py"),
        "--data",
        "2",
        "--model",
        "2",
        "--virtual",
        "2",
        *SIZES,
    ]
    flags = [x for x in os.environ["XLA_FLAGS"].split() if "device_count" not in x]  # all but conftest.py's 8 devices
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), environment.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [*command, "--fsdp", "--coordinator", address, "--processes", "2", "--process", str(i)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    example.main(["--data", "1", *SIZES])
    printed = outputs[0], capsys.readouterr().out
    found, alone = (text.partition("losses ")[2].split("\n")[0].split(", ") for text in printed)
    np.testing.assert_allclose([float(x) for x in found], [float(x) for x in alone], rtol=0, atol=2e-4)
    assert len(found) == 2
