"""A kernel of each architecture that some family is for compiles as it should; `compile_all` does all of them."""

from __future__ import annotations

import dataclasses

import pytest
from compile_all import Compiled, cases, compile_one, compiled, kernels, main, sampled
from cubin import nvdisasm

import cutjax
from cutjax.kernels.sm90 import family as sm90
from cutjax.kernels.sm90 import kernel
from cutjax.runtime import compiler
from cutjax.runtime.architectures import ARCHITECTURES

pytestmark = pytest.mark.skipif(
    compiler.compiler_missing() is not None or nvdisasm() is None, reason="needs NVRTC and nvidia-cuda-nvdisasm"
)
EACH, EVERY = 1, 21


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sample(arch):
    if not kernels(arch, EVERY):
        pytest.skip(f"no family is for {arch}")
    found = list(compiled(arch, EACH, EVERY))
    assert len(found) == EACH
    assert not [str(one) for one in found if one.wrong]


def test_what_is_wrong_is_said(capsys, monkeypatch):
    problem = cutjax.Problem.of(256, 256, 256)
    resolved = kernel.resolved(problem, cutjax.Config())
    entry = sm90, problem, cutjax.Config()
    one = compile_one(entry, resolved.source, resolved.name)
    assert (one.name, one.arch, one.wrong) == (resolved.name, "sm_90a", ())
    assert one.registers in range(64, 256)
    idle = 'extern "C" __global__ void idle(float* x) { x[0] = 1; }'
    (why,) = compile_one(entry, idle, "idle").wrong
    assert why == "has none of HGMMA, but no multiplication"
    spills = 'extern "C" __global__ void __launch_bounds__(1024, 2) s(float* x) { float y[64]; for (int i = 0; i < 64; '
    spills += "++i) y[i] = x[i]; __syncthreads(); for (int i = 0; i < 64; ++i) x[64 + i] = y[i] * y[63 - i]; }"
    assert any(why.startswith("spills: ") for why in compile_one(entry, spills, "s").wrong)
    (why,) = compile_one(entry, "nothing", "n").wrong
    assert why.startswith("does not compile: ")
    monkeypatch.setattr("compile_all.compiled", lambda *_: iter([one, dataclasses.replace(one, wrong=("spills",))]))
    assert main(["--arch", "sm_90", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: spills" in out
    assert "sm_90a: 2 kernels, 1 wrong" in out
    assert isinstance(one, Compiled)


def test_samples():
    lists = [[1, 2, 3], [4], [5, 6]]
    assert list(sampled(lists, None)) == [1, 4, 5, 2, 6, 3]
    assert list(sampled(lists, 4)) == list(sampled(lists, 4))
    assert sorted(sampled(lists, 4)) == [1, 2, 3, 4, 5, 6]


def test_every_kind_of_product_is_there():
    names = {getattr(function, "func", function).__name__ for function, _ in cases()}
    own = {"fused", "quantized", "added", "added_in_groups", "several"}
    assert names == {"gemm", "grouped_gemm", "grouped_outer", "syrk", *own}
