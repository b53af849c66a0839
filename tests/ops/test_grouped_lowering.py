"""What grouped products lower to: for CUDA kernels and nothing else, or one loop; exported programs; explain."""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers

import cutjax

pytestmark = pytest.mark.versions

H = jnp.bfloat16
M, K, N, G = 256, 64, 128, 4


def shape(*sizes: int, dtype=H) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def operands(layout: str = "nn", dtype=H):
    sizes = shape(G, dtype=jnp.int32)
    return shape(M, K, dtype=dtype), shape(G, *((K, N) if layout == "nn" else (N, K)), dtype=dtype), sizes


def text(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def operations(fn, *args) -> list[str]:
    """StableHLO operations of the program for CUDA; a kernel is its name less the tile."""
    found = []
    for line in text(fn, *args).splitlines():
        if kernel := re.search(r'@cutjax_launch.*kernel = "(sm90_\w+?)_\d\w*?(_groups_[mk])', line):
            found.append(kernel[1] + kernel[2])
        elif operation := re.search(r"stablehlo\.(\w+)", line):
            found.append(operation[1])
    return sorted(found)


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_one_kernel_forward_and_two_backward(layout):
    f = functools.partial(cutjax.grouped_gemm, layout=layout)
    x, w, sizes = operands(layout)
    assert operations(f, x, w, sizes) == [f"sm90_bf16_{layout}_groups_m"]

    def backward(x, w, sizes, dy):
        return jax.vjp(lambda x, w: f(x, w, sizes), x, w)[1](dy)

    back = {"nn": "nt", "nt": "nn"}[layout]
    assert operations(backward, x, w, sizes, shape(M, N)) == [f"sm90_bf16_{back}_groups_m", "sm90_bf16_tn_groups_k"]


def test_weight_gradient_in_place():
    """One kernel whose result is the memory of the array added to."""
    args = shape(M, K), shape(M, N), shape(G, dtype=jnp.int32), shape(G, K, N, dtype=jnp.float32)

    def add(x, dy, sizes, to):
        return cutjax.grouped_outer(x, dy, sizes, accumulate=to)

    assert operations(add, *args) == ["sm90_bf16_tn_groups_k"]
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 3" in text(add, *args)
    # An operand that a batch shares is copied for each index, as the result needs all of them.
    mapped = jax.vmap(add, (0, None, None, None))
    found = operations(mapped, shape(3, M, K), *args[1:])
    assert "sm90_bf16_tn_groups_k" in found
    assert set(found) <= {"sm90_bf16_tn_groups_k", "broadcast_in_dim", "reshape"}


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)], ids=str)
def test_vmap_is_one_kernel(axes):
    args = [x if axis is None else shape(3, *x.shape, dtype=x.dtype) for x, axis in zip(operands(), axes, strict=True)]
    found = operations(jax.vmap(cutjax.grouped_gemm, axes), *args)
    assert set(found) <= {"sm90_bf16_nn_groups_m", "broadcast_in_dim", "reshape"}
    assert found.count("sm90_bf16_nn_groups_m") == 1


def test_group_offset_is_one_kernel_and_arithmetic_on_sizes():
    found = operations(lambda x, w, s: cutjax.grouped_gemm(x, w[:2], s, group_offset=1), *operands())
    assert found.count("sm90_bf16_nn_groups_m") == 1
    assert not {"while", "dot_general"} & set(found)


def test_fallback_is_one_loop_of_known_length():
    """The host waits for no size: XLA knows how often the loop runs."""
    lowered = text(cutjax.grouped_gemm, *operands(dtype=jnp.int16))
    assert "cutjax_launch" not in lowered
    assert lowered.count("stablehlo.while") == 1
    assert lowered.count("stablehlo.dot_general") == 1
    # Blocks of 128 rows, and one more for each group at most.
    assert f"dense<{M // 128 + G}> : tensor<i32>" in lowered


def test_strict_backend_says_why():
    x, w, sizes = operands(dtype=jnp.int16)
    with pytest.raises(NotImplementedError, match=r"cutjax_grouped_gemm: no kernel for .*s16 x s16"):
        text(functools.partial(cutjax.grouped_gemm, backend="cuda"), x, w, sizes)
    with cutjax.use_backend("cuda"), pytest.raises(NotImplementedError, match=r"cutjax_grouped_outer: no kernel for"):
        text(cutjax.grouped_outer, x, x, sizes)
    with pytest.raises(NotImplementedError, match=r"cutjax_grouped_gemm: backend 'cuda' needs an NVIDIA GPU"):
        cutjax.grouped_gemm(jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([1, 2]), backend="cuda")
    assert "while" in operations(functools.partial(cutjax.grouped_gemm, backend="xla"), *operands())
    with cutjax.use_backend("xla"):
        assert "while" in operations(cutjax.grouped_outer, x, x, sizes)


def test_config_is_of_this_product_alone():
    x, w, sizes = operands()
    config = cutjax.Config(64, 64, 64, 4, schedule="coop")
    assert "sm90_bf16_nn_64x64x64_s4_c1x1_coop" in text(
        functools.partial(cutjax.grouped_gemm, config=config), x, w, sizes
    )

    def loss(x, w, sizes):
        return cutjax.grouped_gemm(x, w, sizes, config=config).astype(jnp.float32).sum()

    (row, *back) = cutjax.explain(jax.value_and_grad(loss, (0, 1)))(x, w, sizes).rows
    assert row.choice.config == config
    assert [other.choice.reasons[0].startswith("predicted") for other in back] == [True, True]


def test_explain():
    x, w, sizes = operands()
    (row,) = cutjax.explain(cutjax.grouped_gemm, platform="cuda")(x, w, sizes).rows
    expected = cutjax.Problem.of(M, N, K, b_batch=(), groups=G, ragged="m")
    assert row.choice.problem == expected
    assert row.runs == row.choice.config.name(expected)
    batched = shape(2, 3, M, K)
    (row,) = cutjax.explain(lambda x, s: cutjax.grouped_outer(x, x, s, group_offset=1, groups=2))(
        batched, shape(3, G, dtype=jnp.int32)
    ).rows
    assert row.choice.problem == cutjax.Problem.of(
        K,
        K,
        M,
        "tn",
        batch=(2, 3),
        a_batch=(2, 3),
        b_batch=(2, 3),
        groups=2,
        ragged="k",
        leading=True,
        sizes_batch=(1, 3),
    )


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=str)
def test_export_round_trip(platforms):
    args = operands()
    exempt = [jax.export.DisabledSafetyCheck.custom_call("cutjax_launch")]
    exported = jax.export.export(jax.jit(cutjax.grouped_gemm), platforms=platforms, disabled_checks=exempt)(*args)
    restored = jax.export.deserialize(bytearray(exported.serialize()))
    assert restored.platforms == platforms
    launch = re.compile(r"@cutjax_launch.*")
    assert launch.findall(restored.mlir_module()) == launch.findall(exported.mlir_module()) != []
    if "cpu" in platforms:
        x, w = (integers(i, s.shape, H) for i, s in enumerate(args[:2]))
        sizes = jnp.array([100, 0, 60, 7], jnp.int32)
        np.testing.assert_array_equal(jax.jit(restored.call)(x, w, sizes), cutjax.grouped_gemm(x, w, sizes))
