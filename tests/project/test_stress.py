"""The stress commands themselves, at sizes that a CPU runs in seconds: what they run, and that they see a wrong bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stress
import stress_compile
import stress_programs

from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))


def some(names, tiny):
    """The first program of each name."""
    found = stress_programs.programs(lambda name: any(name.startswith(x) for x in names), tiny)
    return [next(program for program in found if program.name.startswith(x)) for x in names]


FAMILIES = ["gemm plain nn", "gemm residual", "gemm bias gradient", "gemm products", "grouped nn", "grouped tn"]
FAMILIES += ["grouped add", "grouped gated with biases", "mlp biases nn default silu", "moe nn default"]


def test_every_family_repeats_its_bits(capsys):
    record = stress.repeat(some(FAMILIES, tiny=True), 0, seed=1, rounds=2)
    assert [row["runs"] for row in record["programs"]] == [6] * len(FAMILIES)
    assert record["failures"] == []
    text = stress.table({"cpu": record})
    assert "all: 60 runs, 0 differ, fewer than 1 in 20 at 95%" in text
    assert all(name in text for name in FAMILIES)


def test_a_difference_is_found_and_described(capsys):
    calls = iter(range(100))

    def changing(x):
        turn = jax.pure_callback(lambda: np.int32(next(calls)), jax.ShapeDtypeStruct((), jnp.int32))
        return x, jnp.where(turn == 4, x.at[3, 2].set(jnp.nan).at[4, 1].add(1), x)

    program = stress_programs.Program("changing", changing, lambda: (np.ones((8, 4), np.float32),))
    record = stress.repeat([program], 0, seed=7, rounds=2)
    assert [row["mismatches"] for row in record["programs"]] == [1]
    (text,) = record["failures"]
    assert text.startswith(
        "changing: seed 7, round 1, run 3: result 1: 2 of 32 (1 NaN) in [3..4, 1..2] of (8, 4); (3, 2): nan"
    )
    assert "1 differ, -" in stress.table({"cpu": record})


def test_equal_values_of_other_bits_differ():
    assert int(stress._differing([jnp.array([0.0, jnp.nan])], [jnp.array([-0.0, jnp.nan])])) == 1


@pytest.mark.compiles
@needs_nvrtc
def test_programs_have_kernels(capsys):
    """A few of them; `python -m tests.gpu.stress --lower` compiles all."""
    found = some(["gemm bias gradient", "grouped add"], tiny=False)
    assert stress.lower(found) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "1"]


@needs_nvrtc
def test_compilation(tmp_path, capsys):
    command = ["--minutes", "0.02", "--threads", "2", "--processes", "2", "--kernels", "2", "--folder", str(tmp_path)]
    assert stress_compile.main(command) == 0, capsys.readouterr().out
    assert "ok: in fewer than one in" in capsys.readouterr().out
