"""What fused products of groups lower to for CUDA, without a GPU: one kernel each, with all it needs in registers."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
import strategies

import cutjax
from cutjax.kernels.sm90 import kernel as sm90

H = jnp.bfloat16
RANDOM = 2  # after a change of what an epilogue becomes: 40
M, N, K, G = 136, 264, 72, 5
# Of which "batch" is one value for each group and "batch_col" one for each column of each group: (G, 1, 1), (G, 1, N).
KINDS = ("batch", "batch_col", "col", "full", "row", "scalar")

pytestmark = pytest.mark.compiles


def shape(*sizes: int, dtype=H) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def lowered(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> list[str]:
    return re.findall(r'@cutjax_launch.*kernel = "(\w+)"', text)


def check_kernels(fn, *args, count: int) -> None:
    """All products are kernels that do not spill."""
    text = lowered(fn, *args)
    assert len(kernels(text)) == count
    assert not re.search("dot_general|stablehlo.while|scatter", text)
    rows = cutjax.explain(fn, platform="cuda")(*args).rows
    for row in rows:
        found = sm90.resolved(row.choice.problem, row.choice.config).compile().resources
        assert not (found.spill_store_bytes or 0) + (found.spill_load_bytes or 0)
    assert sum(row.count for row in rows) == count


SIZES = shape(G, dtype=jnp.int32)


@pytest.mark.parametrize("index", range(RANDOM))
def test_random_epilogues_are_one_kernel(index):
    case = strategies.examples(RANDOM, KINDS)[index]
    operands = tuple(shape(*v.shape, dtype=v.dtype) for v in case.arrays((G, M, N)))
    layout = ("nn", "nt")[index % 2]

    def fn(x, ws, sizes, operands):
        w = ws if len(ws) > 1 else ws[0]
        options = {"layout": layout, "backend": "cuda", "out_dtype": (None,) * len(case.trees)}
        return cutjax.grouped_gemm(x, w, sizes, epilogue=case, operands=operands, **options)

    w = shape(G, K, N) if layout == "nn" else shape(G, N, K)
    check_kernels(fn, shape(M, K), (w,) * case.products, SIZES, operands, count=1)


@pytest.mark.parametrize("batch", [(2,)], ids=str)
def test_gradients_are_kernels(batch):
    def loss(x, w, v, b, s, sizes):
        y = cutjax.grouped_gemm(
            x, (w, v), sizes, epilogue=lambda g, u, b, s: jax.nn.silu(g + b) * u * s, operands=(b, s), backend="cuda"
        )
        return (y.astype(jnp.float32) ** 2).sum()

    w, s = shape(*batch, G, K, N), shape(*batch, M, 1, dtype=jnp.float32)
    args = shape(*batch, M, K), w, w, shape(*batch, G, 1, N, dtype=jnp.float32), s, shape(*batch, G, dtype=jnp.int32)
    # The forward pass; x, a sum of two products; both weights, two products of x; the sum over each group's rows.
    check_kernels(jax.value_and_grad(loss, (0, 1, 2, 3, 4)), *args, count=1 + 1 + 1 + 1)


@pytest.mark.parametrize("batch", [()], ids=str)
def test_a_gated_mlp_and_its_gradient_are_kernels(batch):
    def loss(x, w1, w2, gate, scale, sizes):
        y = cutjax.grouped_mlp(
            x, w1, w2, sizes, gate=gate, row_scale=scale, activation=jax.nn.silu, layout="nt", backend="cuda"
        )
        return (y.astype(jnp.float32) ** 2).sum()

    w1, w2 = shape(*batch, G, N, K), shape(*batch, G, K, N)
    args = shape(*batch, M, K), w1, w2, w1, shape(*batch, M, 1, dtype=jnp.float32), shape(*batch, G, dtype=jnp.int32)
    # In this layout the gradients of both weights are products of x, which is their b: one each.
    check_kernels(jax.value_and_grad(loss, (0, 1, 2, 3, 4)), *args, count=7)
