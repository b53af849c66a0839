"""What gemm lowers to for CUDA, without a GPU: kernels and nothing else; and the exported program."""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mesh_of

import cutjax

LAYOUTS = ("nn", "nt", "tn", "tt")
H = jnp.bfloat16

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("kernels_run")]


def shapes(layout: str, batch=(), m=64, n=32, k=128, dtype=H):
    a = (m, k) if layout[0] == "n" else (k, m)
    b = (k, n) if layout[1] == "n" else (n, k)
    return jax.ShapeDtypeStruct((*batch, *a), dtype), jax.ShapeDtypeStruct(b, dtype)


def operations(fn, *args, backend="cuda") -> list[str]:
    """StableHLO operations of the program for CUDA; a kernel is its name less the tile."""
    with cutjax.use_backend(backend):  # whatever is predicted of XLA's
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in text.splitlines():
        if kernel := re.search(r'@cutjax_launch.*kernel = "(sm90_\w+?)_\d', line):
            found.append(kernel[1])
        elif operation := re.search(r"stablehlo\.(\w+)", line):
            found.append(operation[1])
    return sorted(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_is_one_kernel(layout):
    f = functools.partial(cutjax.gemm, layout=layout)
    a, b = shapes(layout)
    assert operations(f, a, b) == [f"sm90_bf16_{layout}"]
    stacked = jax.ShapeDtypeStruct((3, *b.shape), H)
    assert set(operations(jax.vmap(f, (None, 0)), a, stacked)) <= {f"sm90_bf16_{layout}", "reshape", "broadcast_in_dim"}


BACKWARD = {"nn": ["nt", "tn"], "nt": ["nn", "tn"], "tn": ["nn", "nt"], "tt": ["tt", "tt"]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_backward_is_two_kernels_and_no_transpose(layout, batch):
    a, b = shapes(layout, batch)
    g = jax.ShapeDtypeStruct((*batch, 64, 32), H)

    def backward(a, b, g):
        return jax.vjp(functools.partial(cutjax.gemm, layout=layout), a, b)[1](g)

    found = operations(backward, a, b, g)
    kernels = [name for name in found if name.startswith("sm90")]
    # A product whose batch is added up afterwards keeps its partial sums in f32.
    assert sorted(name.replace("bf16f32", "bf16") for name in kernels) == [f"sm90_bf16_{x}" for x in BACKWARD[layout]]
    assert "transpose" not in found
    assert "dot_general" not in found
    if not batch:
        assert found == kernels


def test_backward_of_a_wider_result_runs_kernels():
    a, b = shapes("nn")
    backward = jax.grad(lambda a, b: (cutjax.gemm(a, b, out_dtype=jnp.float32) ** 2).sum(), (0, 1))
    kernels = [name for name in operations(backward, a, b) if name.startswith("sm90")]
    assert kernels == ["sm90_bf16_nt", "sm90_bf16_tn", "sm90_bf16f32_nn"]


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_backward_of_vmap(axes):
    a, b = (
        jax.ShapeDtypeStruct(x.shape if axis is None else (3, *x.shape), H)
        for axis, x in zip(axes, shapes("nn"), strict=True)
    )
    g = jax.ShapeDtypeStruct((3, 64, 32), H)
    found = operations(lambda a, b, g: jax.vjp(jax.vmap(cutjax.gemm, axes), a, b)[1](g), a, b, g)
    assert len([name for name in found if name.startswith("sm90")]) == 2
    assert not {"transpose", "dot_general", "concatenate"} & set(found)


def test_fallback_is_one_product():
    """XLA's own operation, in the result's dtype so that its fusions see what they know; no copy for broadcast axes."""
    a, b = jax.ShapeDtypeStruct((2, 3, 5, 7), H), jax.ShapeDtypeStruct((3, 7, 9), H)
    gemm = functools.partial(cutjax.gemm, backend="xla")
    text = jax.jit(gemm).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert "cutjax_launch" not in text
    assert text.count("dot_general") == 1
    assert "f32" not in text
    assert "broadcast" not in text.replace("broadcast_in_dim %arg1, dims = [1, 2, 3]", "")  # the axis of size 1 of b


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fallback_of_float8_converts_no_result(dtype):
    """XLA multiplies float8 to bf16; a result in f32 it converts in a pass of its own."""
    a, b = shapes("nt", dtype="float8_e4m3fn")
    b = jax.ShapeDtypeStruct(b.shape, dtype)
    gemm = functools.partial(cutjax.gemm, layout="nt", out_dtype=H, backend="xla")
    text = jax.jit(gemm).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("dot_general") == 1
    assert "convert" not in text


def test_shard_map_lowers_to_kernels_of_the_local_problem_and_jit_to_partitions():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((512, 64), H), jax.NamedSharding(mesh, jax.P("i")))
    w = jax.device_put(jnp.ones((64, 32), H), jax.NamedSharding(mesh, jax.P()))
    inside = jax.shard_map(cutjax.gemm, mesh=mesh, in_specs=(jax.P("i"), jax.P()), out_specs=jax.P("i"))
    assert "sm90_bf16_nn" in operations(inside, x, w)
    for backend in ("auto", "cuda"):
        traced = jax.jit(functools.partial(cutjax.gemm, backend=backend)).trace(x, w)
        assert "@CustomSPMDPartitioning" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=str)
def test_export_round_trip(platforms):
    a, b = shapes("nt", (2,))

    def f(a, b):
        return cutjax.gemm(a, b, layout="nt", backend="cuda" if platforms == ("cuda",) else None)

    exempt = [jax.export.DisabledSafetyCheck.custom_call("cutjax_launch")]
    exported = jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=exempt)(a, b)
    restored = jax.export.deserialize(bytearray(exported.serialize()))
    assert restored.platforms == platforms
    assert restored.out_avals == exported.out_avals
    launch = re.compile(r"@cutjax_launch.*")
    assert launch.findall(restored.mlir_module()) == launch.findall(exported.mlir_module()) != []
    if "cpu" in platforms:
        rng = np.random.default_rng(0)
        x, w = (jnp.asarray(rng.integers(-2, 3, s.shape)).astype(H) for s in (a, b))
        np.testing.assert_array_equal(jax.jit(restored.call)(x, w), f(x, w))


def test_export_without_the_exemption_is_refused_by_jax():
    with pytest.raises(ValueError, match="cutjax_launch"):
        jax.export.export(jax.jit(cutjax.gemm), platforms=("cuda",))(*shapes("nn"))


def test_a_part_of_a_program_over_several_devices_takes_tiles_as_they_come():
    """NCCL's kernels may hold SMs at any time there; alone, blocks take their tiles in turns. XLA hears its time."""
    x = jax.ShapeDtypeStruct((16384, 8192), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)

    def text(fn):
        return jax.jit(fn).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()

    def product(x, w):
        return cutjax.gemm(x, w, backend="cuda")

    rows = jax.P("data")
    part = jax.shard_map(product, mesh=mesh_of(data=2), in_specs=(rows, jax.P()), out_specs=rows)
    for fn, counts in ((product, False), (part, True)):
        assert ("tensor<1xi32>" in text(fn)) == counts
        assert re.search(r'latency_metadata = "\d{6}"', text(fn))
