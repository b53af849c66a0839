"""Sizes around 2^31: what explain says is what is lowered, and no kernel counts past 32 bits. Nothing is allocated."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.kernels import choose
from cutjax.kernels.device import reference
from cutjax.kernels.problem import Problem
from cutjax.runtime import compiler

H, F, S = jnp.bfloat16, np.float32, np.int32
SIZES = (2**31 - 8, 2**31, 2**32 + 8)


@pytest.fixture
def compile_nothing_at_all(monkeypatch):
    monkeypatch.setattr(compiler, "compiler_missing", lambda: "")


def of(*shape: int, dtype: Any = H) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def sizes(g: int) -> jax.ShapeDtypeStruct:
    return of(g, dtype=S)


def relu(acc: Any) -> Any:
    return jnp.maximum(acc, 0)


fused = functools.partial(cutjax.gemm, epilogue=relu)
# Calls with one large size n.
CALLS: dict[str, Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "gemm m": lambda n: (cutjax.gemm, (of(n, 8), of(8, 8))),
    "gemm n": lambda n: (cutjax.gemm, (of(8, 8), of(8, n))),
    "gemm k": lambda n: (cutjax.gemm, (of(8, n), of(n, 8))),
    "gemm batch": lambda n: (cutjax.gemm, (of(n, 8, 8), of(n, 8, 8))),
    "epilogue m": lambda n: (fused, (of(n, 8), of(8, 8))),
    "epilogue rows": lambda n: (lambda x, w: fused(x, w, epilogue=lambda a: (a, a.sum(0))), (of(n, 8), of(8, 8))),
    "epilogue f32": lambda n: (functools.partial(fused, precision="highest"), (of(n, 8, dtype=F), of(8, 8, dtype=F))),
    "integers n": lambda n: (cutjax.gemm, (of(2, 1, dtype=S), of(1, n // 4, dtype=S))),
    "integers k": lambda n: (cutjax.gemm, (of(1, n // 4, dtype=S), of(n // 4, 8, dtype=S))),
    "complex n": lambda n: (cutjax.gemm, (of(4, 4, dtype=jnp.complex64), of(4, n // 2, dtype=jnp.complex64))),
    "narrow n": lambda n: (cutjax.gemm, (of(8, 8), of(8, n, dtype=jnp.float8_e4m3fn))),
    "dot_general": lambda n: (lambda x, y: cutjax.dot_general(x, y, (((0,), (0,)), ((), ()))), (of(n, 8), of(n, 8))),
    "einsum": lambda n: (
        lambda x, y: cutjax.einsum("bhqd,bhkd->bqhk", x, y),
        (of(n // 8, 4, 2, 8), of(n // 8, 4, 2, 8)),
    ),
    "syrk": lambda n: (cutjax.syrk, (of(8, n),)),
    "grouped_gemm": lambda n: (cutjax.grouped_gemm, (of(n, 8), of(4, 8, 8), sizes(4))),
    "grouped_gemm of groups": lambda n: (cutjax.grouped_gemm, (of(8, 8), of(n, 8, 8), sizes(n))),
    "grouped_outer": lambda n: (cutjax.grouped_outer, (of(n, 8), of(n, 8), sizes(4))),
    "ragged_dot": lambda n: (cutjax.ragged_dot, (of(n, 8), of(4, 8, 8), sizes(4))),
    "mlp": lambda n: (cutjax.mlp, (of(n, 8), of(8, 8), of(8, 8))),
    "grouped_mlp": lambda n: (cutjax.grouped_mlp, (of(n, 8), of(4, 8, 8), of(4, 8, 8), sizes(4))),
    "route": lambda n: (lambda x: cutjax.route(x, 2), (of(n // 2, 4),)),
    "moe": lambda n: (
        lambda x, logits, w: cutjax.moe(x, logits, w, w, w, k=2),
        (of(n // 2, 8), of(n // 2, 4), of(4, 8, 8)),
    ),
    "load_balance_loss": lambda n: (lambda x: cutjax.load_balance_loss(x, k=2), (of(2, n // 4, 4),)),
}
NAMED = {
    "grouped_gemm",
    "grouped_gemm of groups",
    "grouped_outer",
    "ragged_dot",
    "grouped_mlp",
    "route",
    "moe",
    "load_balance_loss",
}


def attempt(f: Callable[[], Any]) -> Any:
    try:
        return f()
    except Exception as error:
        return error


@pytest.mark.parametrize("name", CALLS)
def test_explain_and_lowering_agree(name, compile_nothing_at_all):
    for size in SIZES:
        fn, args = CALLS[name](size)
        traced = attempt(lambda fn=fn, args=args: jax.jit(fn).trace(*args))
        report = attempt(lambda fn=fn, args=args: cutjax.explain(fn, platform="cuda")(*args))
        if isinstance(traced, Exception):
            assert name in NAMED
            assert size >= 2**31
            assert type(report) is type(traced) is ValueError
            assert str(report) == str(traced)
            assert re.match(rf"{name.split()[0]}(_general)?: [0-9,]+ .* more than int32 counts", str(traced)), traced
            continue
        assert not isinstance(report, Exception), report
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        kernels = {row.runs for row in report.rows} - {"XLA"}
        assert {*re.findall(r'kernel = "(\w+)"', text)} == kernels
        if size >= 2**31 and name != "einsum":
            assert not kernels, report
        traced.lower(lowering_platforms=("cpu",))


INSTANCES = {
    "terms left out": Problem.of(1, 8, 2**29 + 2**24, a_dtype=S, b_dtype=S, out_dtype=S),
    "a wild address": Problem.of(2, 2**29 + 2**24, 1, a_dtype=S, b_dtype=S, out_dtype=S),
    "highest": Problem.of(8, 8, 2**29, a_dtype=F, b_dtype=F, out_dtype=F),
    "float64": Problem.of(8, 8, 2**28, "nn", np.float64, np.float64, np.float64, arch="sm_80"),
    "nothing stored": Problem.of(2**31 - 8, 8, 8),
    "symmetric": Problem.of(2**31 - 8, 2**31 - 8, 8, "nt", symmetric=True),
    "complex": Problem.of(4, 2**30, 4, "nn", np.complex64, np.complex64, np.complex64, math="tf32"),
    "rows in groups": Problem.of(2**31 - 8, 64, 64, groups=4, ragged="m"),
    "groups of k": Problem.of(64, 64, 2**31 - 8, "tn", groups=4, ragged="k"),
}


@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_kernel_is_refused(name, arch):
    problem = INSTANCES[name] if name == "float64" else INSTANCES[name].on(reference(arch))
    choice = choose.choose(problem, backend="cuda")
    assert not choice.served
    assert any("kernels count with 32 bits" in reason for reason in choice.reasons), choice.reasons
