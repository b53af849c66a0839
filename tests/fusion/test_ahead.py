"""Kernels of a fused program are compiled ahead of its lowering, and none of a program that is transformed later."""

import jax
import jax.numpy as jnp
import pytest

import cutjax
from cutjax.binding import ahead, lowering
from cutjax.runtime import compiler

X, W = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 11008), jnp.bfloat16)


def loss(x, w):
    return jnp.sum(jax.nn.gelu(x @ w).astype(jnp.float32))


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that threads are asked to compile."""
    names = []

    class Threads:
        def submit(self, call):
            names.append(call.__self__.kernel)

    monkeypatch.setattr(ahead, "_pool", Threads)
    monkeypatch.setattr(lowering, "on_cuda", lambda: True)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(compiler, "compiler_missing", lambda: None)
    return names


def test_those_of_a_step_while_it_is_traced(compiled):
    step = jax.jit(cutjax.fuse(jax.value_and_grad(loss), policy="always"))
    step.trace(X, W)
    assert compiled
    found = {row.kernel for row in cutjax.explain(step, device="NVIDIA H200")(X, W).rows}
    assert set(compiled) == found


def test_none_of_what_is_transformed(compiled):
    jax.jit(jax.grad(cutjax.fuse(loss, policy="always"))).trace(X, W)
    more = jax.ShapeDtypeStruct((2, *X.shape), X.dtype)
    jax.jit(jax.vmap(cutjax.fuse(lambda x, w: x @ w, policy="always"), (0, None))).trace(more, W)
    assert not compiled
