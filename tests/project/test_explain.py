"""cutjax.explain: every product of a function, what runs for it, and why."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import cutjax
from cutjax.kernels import device
from cutjax.runtime import settings

H = jnp.bfloat16


def shape(*sizes, dtype=H):
    return jax.ShapeDtypeStruct(sizes, dtype)


X, W = shape(256, 512), shape(512, 512)


def counts(fn, *args):
    return [(row.count, row.exact) for row in cutjax.explain(fn)(*args).rows]


def test_row_on_cuda():
    (row,) = cutjax.explain(cutjax.gemm, platform="cuda")(X, W).rows
    assert row.runs == row.kernel == row.choice.kernel
    assert row.runs.startswith("sm90_bf16_nn_")
    assert row.choice.problem == cutjax.Problem.of(256, 512, 512)
    assert row.choice.config == cutjax.candidates(row.choice.problem)[0]
    assert row.choice.time_us > 0
    assert 0 < row.choice.roofline <= 1


def test_row_elsewhere_says_both():
    explanation = cutjax.explain(cutjax.gemm)(X, W)
    (row,) = explanation.rows
    assert explanation.platform == "cpu"
    assert (row.runs, row.kernel) == ("XLA", row.choice.kernel)
    assert row.why.startswith("platform cpu; on cuda: predicted fastest of")


def test_what_explain_says_is_what_is_lowered():
    x, w, tall = jnp.ones((256, 512), H), jnp.ones((512, 512), H), jnp.ones((64, 100))

    def fn(x, w, tall):
        kernel = functools.partial(cutjax.gemm, backend="cuda")
        return jax.vmap(kernel)(jnp.stack([x, x]), jnp.stack([w, w])), cutjax.gemm(tall, tall, layout="tn")

    rows = cutjax.explain(fn, platform="cuda")(x, w, tall).rows
    text = jax.jit(fn).trace(x, w, tall).lower(lowering_platforms=("cuda",)).as_text()
    assert [f'kernel = "{row.runs}"' in text for row in rows] == [True, False]
    assert [row.runs == "XLA" for row in rows] == [False, True]


def test_why_xla():
    def fn(x, y):
        return cutjax.gemm(x, x), cutjax.gemm(y, y), cutjax.gemm(y, y, backend="xla"), cutjax.gemm(x, x, backend="cuda")

    rows = cutjax.explain(fn, platform="cuda")(shape(12, 12, dtype=jnp.int16), shape(256, 256)).rows
    assert [row.runs for row in rows[:1] + rows[2:]] == ["XLA", "XLA", "error"]
    assert "s16 x s16: both operands are bf16, f16, f32, of float8 or of 8-bit integers" in rows[0].why
    assert rows[1].runs.startswith("sm90_")
    assert rows[2].why == "backend 'xla'"
    (row,) = cutjax.explain(lambda x: cutjax.gemm(x, x, backend="cuda"))(shape(256, 256)).rows
    assert row.runs == "error"
    with cutjax.use_backend("xla"):
        assert cutjax.explain(cutjax.gemm)(X, W).rows[0].backend == "xla"


def test_for_another_gpu():
    """Without such a device; the same program is explained anew for each."""
    fn = jax.jit(cutjax.fuse(lambda x, w: jax.nn.silu(x @ w) * (x @ w)))
    square = shape(4096, 4096)
    here, turing = cutjax.explain(fn, platform="cuda")(square, square), cutjax.explain(fn, arch="sm_75")(square, square)
    assert (turing.platform, turing.arch, turing.device) == ("cuda", "sm_75", "Tesla T4")
    assert [row.runs.startswith("sm90_") for row in here.rows] == [True]
    assert not any(row.runs.startswith("sm90_") for row in turing.rows)
    assert str(cutjax.explain(fn, platform="cuda")(square, square)) == str(here)
    strict = functools.partial(cutjax.gemm, backend="cuda")
    slow = cutjax.explain(strict, device="NVIDIA H100 PCIe")(X, shape(512, 8192))
    fast = cutjax.explain(strict, arch="sm_90")(X, shape(512, 8192))
    assert str(fast).endswith("sm_90a (NVIDIA H200)")
    assert (slow.device, fast.device) == ("NVIDIA H100 PCIe", "NVIDIA H200")
    assert slow.rows[0].choice.problem.device == device.named("NVIDIA H100 PCIe")
    assert slow.rows[0].choice.time_us > fast.rows[0].choice.time_us
    (row,) = cutjax.explain(cutjax.gemm, device="NVIDIA A100-SXM4-80GB")(X, W).rows
    assert row.choice.problem.device.name == "NVIDIA A100-SXM4-80GB"
    assert cutjax.explain(cutjax.gemm, platform="cpu", arch="sm_80")(X, W).platform == "cpu"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"platform": "CUDA"}, "explain: platform must be one of cpu, cuda, gpu, rocm, tpu, got 'CUDA'"),
        ({"arch": "sm_99"}, "explain: expected an architecture such as sm_90a, one of sm_75, .* got 'sm_99'"),
        ({"device": "A900"}, "explain: unknown device 'A900'; known are "),
        ({"device": "NVIDIA L4", "arch": "sm_80"}, "explain: arch='sm_80', but NVIDIA L4 is sm_89"),
    ],
)
def test_an_unknown_gpu_or_platform(fields, message):
    with pytest.raises(ValueError, match=message):
        cutjax.explain(cutjax.gemm, **fields)


def test_the_architecture_of_the_settings():
    with settings.override(target_arch="sm_80"):
        explanation = cutjax.explain(cutjax.gemm, platform="cuda")(X, W)
        assert (explanation.arch, explanation.rows[0].choice.problem.arch) == ("sm_80", "sm_80")
        assert cutjax.explain(cutjax.gemm, arch="sm_90a")(X, W).rows[0].runs.startswith("sm90_")


def test_pinned_config():
    config = cutjax.Config(bm=64, bn=128, stages=4)
    (row,) = cutjax.explain(lambda x, w: cutjax.gemm(x, w, config=config), platform="cuda")(X, W).rows
    assert row.runs == "sm90_bf16_nn_64x128x64_s4_c1x1_coop"
    assert "pinned" in row.why


def test_counts():
    def step(h, _):
        return cutjax.gemm(h, h), None

    def scanned(h):
        return lax.scan(lambda h, _: lax.scan(step, h, None, length=3), h, None, length=5)[0]

    def looped(h):
        return lax.while_loop(lambda h: h[0, 0] < 3, lambda h: cutjax.gemm(h, h), h)

    def either(h):
        return lax.cond(h[0, 0] > 0, lambda h: cutjax.gemm(h, h), lambda h: h, cutjax.gemm(h, h))

    square = shape(64, 64)
    assert counts(scanned, square) == [(15, True)]
    assert counts(looped, square) == [(1, False)]
    assert counts(either, square) == [(1, True), (1, False)]
    assert counts(lambda x: cutjax.gemm(cutjax.gemm(x, x), x), square) == [(2, True)]
    assert "* of one iteration" in str(cutjax.explain(looped)(square))


def test_inside_every_transformation():
    @jax.custom_vjp
    def custom(x):
        return cutjax.gemm(x, x)

    custom.defvjp(lambda x: (custom(x), x), lambda x, g: (g,))

    @jax.custom_jvp
    def other(x):
        return cutjax.gemm(x, x)

    other.defjvp(lambda p, t: (other(*p), t[0]))
    square = shape(64, 64)
    for wrap in (jax.jit, jax.checkpoint, lambda _: custom, lambda _: other, lambda f: jax.jit(jax.jit(f))):
        assert counts(wrap(lambda x: cutjax.gemm(x, x)), square) == [(1, True)]
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(cutjax.gemm, mesh=mesh, in_specs=(jax.P("i"), jax.P()), out_specs=jax.P("i"))
    (row,) = cutjax.explain(sharded, platform="cuda")(X, W).rows
    assert row.choice.problem.m == 32


def test_equal_epilogues_are_one_row():
    def two(x, w):
        return [cutjax.gemm(x, w, epilogue=lambda acc: jax.nn.relu(acc)) for _ in range(2)]

    assert counts(two, X, W) == [(2, True)]


def test_dead_products_are_left_out():
    def loss(x, w):
        return cutjax.gemm(x, w).astype(jnp.float32).sum()

    assert counts(jax.jit(jax.grad(loss)), X, W) == [(1, True)]
    assert counts(jax.value_and_grad(loss, (0, 1)), X, W) == [(1, True)] * 3


def test_divided_by_xla():
    """Rows of x and columns of w are divided: of w, which lies by rows too, all are gathered."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((512, 512), H), jax.NamedSharding(mesh, jax.P("i")))
    (row,) = cutjax.explain(cutjax.gemm, platform="cuda")(x, x).rows
    assert row.runs.startswith("sm90_")
    assert row.choice.problem.m == 64
    assert row.why.startswith("a shard; operand 1 is gathered over i; ")


def test_table():
    text = str(cutjax.explain(lambda x, w: cutjax.gemm(x, w), platform="cuda")(X, W))
    head, rule, row, note = text.splitlines()
    assert head.split() == ["count", "problem", "runs", "us", "roofline", "why"]
    assert set(rule) == {"-", " "}
    assert row.split()[:3] == ["1", "256x512x512", "nn"]
    assert "%" in row
    assert note == "platform cuda; us and roofline are predicted for one launch on cuda, sm_90a"
    assert "on cuda" in str(cutjax.explain(cutjax.gemm)(X, W))
    assert str(cutjax.explain(lambda x: x)(1.0)) == "platform cpu: no cutjax operation"


def test_errors_of_the_function_come_through():
    with pytest.raises(ValueError, match="contracting dimensions differ"):
        cutjax.explain(cutjax.gemm)(X, shape(256, 256))


def test_keyword_arguments_that_are_static():
    """Of a function that is not jitted: strings, functions, dtypes and numbers are its own, arrays are traced."""
    x, w, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (1024, 256), (1024,)))
    explain = cutjax.explain(cutjax.gemm, platform="cuda")
    (row,) = explain(x, w, layout="nt").rows
    assert row.choice.problem.layout == "nt"
    (row,) = explain(
        x, w, layout="nt", epilogue=lambda acc, b: acc + b.astype(acc.dtype), operands=(b,), out_dtype=jnp.float32
    ).rows
    assert row.outputs == ("f32[512,1024]",)
    logits, weights = jnp.ones((64, 8)), jnp.ones((8, 256, 256))
    assert cutjax.explain(cutjax.moe)(jnp.ones((64, 256)), logits, weights, weights, weights, k=2).rows
    jitted = jax.jit(cutjax.gemm, static_argnames="layout")
    assert cutjax.explain(jitted, platform="cuda")(x, w, layout="nt").rows
