"""The kernels that route tokens: machine code, plans, who refuses, which config is chosen, and what is lowered."""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mesh_of
from cubin import code_bytes

import cutjax
from cutjax.binding import lowering
from cutjax.kernels import routing
from cutjax.kernels.device import reference
from cutjax.primitives.route import route_p
from cutjax.runtime import compiler
from cutjax.runtime.launch import Int32, Int64, Pointer

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason="needs NVRTC")
H = jnp.bfloat16


def problem(
    tokens=64, experts=16, k=2, dtype=H, scoring="softmax", renormalize=True, bias=None, batch=(), arch="sm_90a"
):
    logits = jax.ShapeDtypeStruct((*batch, tokens, experts), jnp.dtype(dtype))
    given = bias and jax.ShapeDtypeStruct(bias, jnp.float32)
    return routing.Problem.of(logits, given, k, scoring, renormalize, reference(arch))


COMPILED = {
    "layer": (problem(32768, 128, 8), None),
    "few": (problem(16, 256, 8), None),
    "all options": (problem(4096, 256, 8, "float32", "sigmoid", False, (1, 256)), None),
    "many choices": (problem(4096, 512, 32, "float32", bias=(4096, 512)), None),
    "many lanes": (problem(32768, 128, 8, "float16", renormalize=False), routing.Config(1024, 4, 128)),
    "old": (problem(32768, 60, 4, arch="sm_75"), None),
}


@needs_nvrtc
@pytest.mark.parametrize("name", COMPILED)
def test_machine_code(name):
    asked, config = COMPILED[name]
    kernel = routing.choose(asked, "cuda").resolved if config is None else routing.resolve(asked, config)
    for entry in kernel.entries:
        cubin = compiler.compile_kernel(entry.source, name=entry.name, arch=asked.arch)
        assert "warning" not in cubin.log
        assert cubin.resources.spill_store_bytes == cubin.resources.stack_bytes == 0
        assert cubin.resources.registers * entry.threads <= 65536
        assert code_bytes(cubin.image) <= (70_000 if asked.k > 8 else 32_000)


def test_the_plan():
    asked = problem(1000, 60, 4, "float32", bias=(2, 1, 60), batch=(2,))
    kernel = routing.Kernel(asked, routing.Config(128, 4, 3))
    first, second = kernel.entries
    assert (first.name, second.name) == ("route_f32_60k4_bias_128x4", "route_60k4_place")
    assert (first.blocks, first.threads, first.shared_bytes) == (2 * 3, 128, 4 * 60 * 3)
    assert (kernel.vector, kernel.list, kernel.chunk, kernel.pitch) == (4, 4, 334, 64)
    pointers = [0, 1, *range(2, 8)]
    assert [argument.value for argument in first.arguments] == [
        *map(Pointer, pointers),
        *map(Int32, (1000, 3, 334)),
        *map(Int64, (60 * 1000 * 4, 60, 0, 1)),
    ]
    sizes = [*map(Pointer, (2, 4, 5, 6, 7)), *map(Int32, (1000, 3, 334))]
    assert [argument.value for argument in second.arguments] == sizes
    assert [x.shape for x in kernel.results] == [(2, 1000, 4)] * 2 + [(2, 4000), (2, 1000, 4), (2, 60), (6, 64)]
    (alone,) = routing.Kernel(problem(), routing.Config(256, 2, 1)).entries
    assert alone.name == "route_bf16_16k2_256x2_alone"
    assert alone.arguments[1].value == Pointer(0)  # no bias


REFUSED = [
    ({"k": 33, "experts": 64}, "k = 33: kernels choose up to 32"),
    ({"dtype": jnp.float64}, "logits of float64: kernels read bf16, f16, f32"),
    ({"experts": 2**16}, "65536 experts: kernels number them with 16 bits"),
    ({"tokens": 0}, "a size is 0: nothing to launch"),
    ({"tokens": 2**28, "k": 8}, "pairs of up to .* count with 32 bits"),
    ({"experts": 30000, "arch": "sm_75"}, "bytes of shared memory, at most 65536"),
    ({"arch": "sm_61"}, "sm_61: an architecture that is not known"),
    ({"batch": (2, 2), "bias": (2, 1, 64, 16)}, "the logits and the bias, each has all of it or none"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_refused(fields, why):
    with jax.enable_x64(True):
        choice = routing.choose(problem(**fields), "cuda")
    assert not choice.served
    assert re.search(why, "; ".join(choice.reasons))


def test_configs():
    """One block, and one launch, for few tokens; whole steps in each block, and all SMs, for many."""
    assert routing.choose(problem(16, 256, 8), "cuda").resolved.config.blocks == 1
    for tokens, experts, k in ((32768, 128, 8), (8192, 8, 2), (777, 61, 5)):
        kernel = routing.choose(problem(tokens, experts, k), "cuda").resolved
        blocks = kernel.config.blocks
        assert (blocks - 1) * kernel.chunk < tokens <= blocks * kernel.chunk
        assert blocks <= 2 * reference("sm_90a").sms


# Of tokens, experts, k, dtype, scoring and a bias: kernels within a tenth of the fastest measured on an H200.
FAST = {
    (8192, 8, 2, "bfloat16", "softmax", False): ("128x1b64", "256x1b32"),
    (16384, 64, 4, "bfloat16", "softmax", False): ("256x2b128", "512x4b128", "256x4b128", "1024x8b128"),
    (24576, 128, 8, "bfloat16", "softmax", False): ("512x8b128",),
    (32768, 128, 8, "bfloat16", "softmax", False): ("1024x8b128", "512x4b128", "1024x4b128", "512x8b128"),
    (1, 128, 8, "bfloat16", "softmax", False): ("128x16b1", "128x8b1", "256x16b1", "256x8b1"),
    (128, 128, 8, "bfloat16", "softmax", False): ("128x8b8", "128x16b16", "256x16b8", "256x8b4"),
    (32768, 128, 8, "float32", "softmax", False): ("1024x4b128", "512x4b128", "512x2b128", "1024x8b128"),
    (16384, 256, 8, "float32", "sigmoid", True): ("1024x8b128", "512x8b128", "512x4b128"),
    (32768, 512, 10, "bfloat16", "softmax", False): ("1024x8b128", "512x2b128", "512x4b128"),
}


@pytest.mark.parametrize("case", FAST, ids=str)
def test_picks_are_among_the_fastest_measured(case):
    tokens, experts, k, dtype, scoring, bias = case
    asked = routing.Problem(
        tokens,
        experts,
        k,
        np.dtype(jnp.dtype(dtype)),
        scoring,
        True,
        (1, experts) if bias else None,
        (),
        (1, 1),
        reference("sm_90a"),
    )
    c = routing.choose(asked, "auto").resolved.config
    assert f"{c.threads}x{c.lanes}b{c.blocks}" in FAST[case]


def test_auto_is_the_predicted_faster(monkeypatch):
    choose = functools.partial(routing.choose.__wrapped__, backend="auto")
    choice = choose(problem(32768, 128, 8))
    assert choice.kernel.startswith("route_bf16_128k8_")
    assert choice.time_us < 25
    monkeypatch.setattr(routing, "LAUNCH_US", 100.0)
    assert choose(problem(32768, 64, 2)).reasons[0].startswith("XLA's sorts are predicted to take")


# What is lowered.

T, E, K = 16, 8, 2
LOGITS = np.random.default_rng(0).standard_normal((T, E)).astype(np.float32)


def lowered(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def routed(logits, **how):
    with cutjax.use_backend("cuda"):
        return cutjax.route(logits, K, **how)


@pytest.mark.versions
def test_lowered_by_name():
    text = lowered(routed, LOGITS)
    assert 'kernel = "route_f32_8k2_' in text
    assert "sort" not in text
    assert 'kernel = "route_f32_8k2_' in lowered(lambda x: cutjax.route(x, K), LOGITS)
    for dtype in (jnp.bfloat16, jnp.float16):
        text = lowered(routed, LOGITS.astype(dtype))
        assert f'kernel = "route_{"bf16" if dtype == jnp.bfloat16 else "f16"}_8k2_' in text
        assert "stablehlo.convert" not in text
    assert "_bias_" in lowered(lambda x, b: routed(x, selection_bias=b), LOGITS, LOGITS[0])
    batched = lowered(jax.vmap(lambda x, b: routed(x, selection_bias=b), (None, 0)), LOGITS, LOGITS[:3])
    assert "tensor<3x8xi32>" in batched
    assert "route_f32_8k2_bias_" in batched
    gradient = lowered(jax.grad(lambda x: (routed(x).weights ** 2).sum()), LOGITS)
    assert gradient.count("@cutjax_launch") == 1
    assert "scatter" not in gradient
    assert routed(LOGITS).indices.shape == (T, K)  # of this platform
    (rows,) = jax.export.symbolic_shape("rows")
    of_any = jax.export.export(jax.jit(routed), platforms=["cuda"])(jax.ShapeDtypeStruct((rows, E), jnp.float32))
    assert "cutjax_launch" not in of_any.mlir_module()


@pytest.mark.versions
def test_over_devices():
    """A kernel on each device inside shard_map; XLA's top-k where XLA divides the program."""
    mesh, p = mesh_of(i=2), jax.P("i")
    inside = jax.shard_map(lambda x: routed(x).indices, mesh=mesh, in_specs=p, out_specs=p)
    assert "route_f32" in lowered(inside, LOGITS)
    assert "route_f32" not in lowered(routed, jax.device_put(LOGITS, jax.NamedSharding(mesh, p)))


def test_explained():
    (row,) = cutjax.explain(routed, platform="cuda")(LOGITS).rows
    assert row.runs.startswith("route_f32_8k2_")
    assert str(row.choice.problem) == "routing f32[16,8] k=2"
    assert row.why == "one pass over the logits"
    assert route_p in lowering.optional <= set(lowering.choosers)
