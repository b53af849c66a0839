"""Calls as a user writes them and the documents show them, of every public name. Checked by pyright, never run."""

# pyright: strict

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import cutjax
import cutjax.flax.linen
import cutjax.flax.nnx

P = jax.P
Array = jax.Array


def gelu(acc: Array, bias: Array) -> Array:
    return jax.nn.gelu(acc + bias)


def swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def both(acc: Array) -> tuple[Array, Array]:
    return acc, jnp.square(acc)


def dense(x: Array, w: Array, bias: Array) -> Array:
    y: Array = cutjax.gemm(x, w)
    y = cutjax.gemm(x, np.ones((4, 4), np.float32), layout="nt", out_dtype=jnp.float32)
    y = cutjax.gemm(x, w, epilogue=gelu, operands=(bias,))
    y = cutjax.gemm(x, (w, w), epilogue=swiglu, out_dtype=jnp.bfloat16)
    y = cutjax.gemm(x, w, precision="highest", backend="auto", save="recompute", out_sharding=P("d", None))
    y = cutjax.gemm(x, w, config=cutjax.Config(bm=128, bn=256), precision=jax.lax.Precision.HIGHEST)
    y = cutjax.gemm(x, w, config=cutjax.MmaConfig())
    pair: tuple[Array, Array] = cutjax.gemm(x, w, epilogue=both)
    return cutjax.syrk(y) + cutjax.mlp(x, w, w, b1=bias, gate=w, activation=jax.nn.silu) + pair[0]


def programs_of_others(x: Array) -> list[str]:
    with cutjax.patch() as patched:
        cutjax.fuse(jnp.square)(x)
    return [f"{program.name}: {program.kernels} of {program.products}" for program in patched.programs]


def convolutions(x: Array, w: Array, bias: Array) -> Array:
    y: Array = cutjax.conv(x, w)
    y = cutjax.conv(x, w, window_strides=2, padding=((1, 1), (0, 2)), rhs_dilation=(2, 1), feature_group_count=4)
    y = cutjax.conv(x, w, epilogue=gelu, operands=(bias,), out_dtype=jnp.bfloat16)
    y += cutjax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + cutjax.conv_transpose(x, w, (2, 2), "SAME", transpose_kernel=True)


def quantized(x: Array, w: Array) -> Array:
    q = cutjax.quantize(w, jnp.int8, block=(-1, 1))
    narrow = cutjax.quantize(w, jnp.float8_e4m3fn, block=(1, -1))
    y: Array = cutjax.gemm(x, cutjax.quantize(w, jnp.int8, block=(-1, 1)))
    y = cutjax.gemm(x, (q, q), epilogue=swiglu)
    y = cutjax.gemm(x, narrow, layout="nt")
    y = cutjax.mlp(x, q, q, gate=q)
    rows = cutjax.quantize(x, jnp.int8, block=(1, -1))
    y = cutjax.gemm(rows, q, out_dtype=jnp.bfloat16) + cutjax.gemm(rows, w) + cutjax.mlp(rows, q, w)
    y += cutjax.grouped_gemm(rows, q, np.array([2, 2]))
    return y + q.dequantize(jnp.bfloat16)


def drop_ins(x: Array, w: Array) -> list[Array]:
    return [
        cutjax.matmul(x, w, precision="highest", preferred_element_type=jnp.float32),
        cutjax.dot(x, 2.0),
        cutjax.tensordot(x, w, axes=1),
        cutjax.tensordot(x, w, axes=((1,), (0,))),
        cutjax.einsum("ij,jk->ik", x, w),
        cutjax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        cutjax.dot_general(x, w, (((1,), (0,)), ((), ())), None, jnp.float32, out_sharding=P()),
        cutjax.ragged_dot(x, w, np.array([2, 2])),
        cutjax.ragged_dot_general(
            x, w, np.array([2, 2]), jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        ),
        cutjax.fp8_dot_general("block")(x, w, (((1,), (0,)), ((), ()))),
    ]


def groups(x: Array, w: Array, logits: Array) -> Array:
    sizes = np.array([2, 2])
    q = cutjax.quantize(w, jnp.int8, block=(-1, 1))
    y: Array = cutjax.grouped_gemm(x, w, sizes)
    y = cutjax.grouped_gemm(x, q, sizes, epilogue=gelu, operands=(x,))
    y = cutjax.grouped_mlp(x, q, q, sizes, gate=q)
    y = cutjax.grouped_outer(x, y, sizes)
    routing: cutjax.Routing = cutjax.route(logits, 2)
    y = cutjax.moe(x, logits, q, q, q, k=2) + routing.weights
    return cutjax.moe(x, logits, w, w, w, k=2, expert_axis="model") + cutjax.load_balance_loss(logits, routing.indices)


def layers(x: Array, w: Array, labels: Array) -> Array:
    y: Array = cutjax.fused_mlp(x, [w, w], [None, w[0]], jax.nn.relu, output_activation=jax.nn.sigmoid)
    y = cutjax.causal_conv1d(y, w, activation=jax.nn.silu)
    y, state = cutjax.causal_conv1d_update(y[..., 0, :], y, w)
    loss: Array = cutjax.linear_cross_entropy(x, w, labels, label_smoothing=0.1, reduction="mean")
    return loss + cutjax.router_z_loss(state)


def layers_of_flax(x: Array, labels: Array) -> Array:
    rngs = nnx.Rngs(0)
    dense = cutjax.flax.nnx.Linear(16, 32, activation=jax.nn.gelu, rngs=rngs)
    mlp = cutjax.flax.nnx.MLP(32, 64, activation=jax.nn.relu, use_bias=False, rngs=rngs)
    head = cutjax.flax.nnx.Head(32, 1000, use_bias=False, dot_general=cutjax.dot_general, rngs=rngs)
    loss: Array = head(mlp(dense(x)), labels, z_loss=1e-4)
    block = cutjax.flax.linen.GatedMLP(64, activation=jax.nn.silu, dtype=jnp.bfloat16)
    experts = cutjax.flax.linen.MoE(64, num_experts=8, k=2)
    return loss + block(x) + experts(x)


def checkpoints(qweight: Array, scales: Array, zeros: Array) -> list[cutjax.Quantized]:
    gptq, awq = cutjax.formats.gptq(qweight, scales, zeros), cutjax.formats.awq(qweight, scales, zeros)
    return [gptq, awq, cutjax.formats.mxfp4(qweight, scales), cutjax.formats.deepseek_fp8(qweight, scales)]


def loss(w: Array, x: Array) -> Array:
    return cutjax.einsum("ij,jk->", x, w)


def transformed(w: Array, x: Array) -> tuple[Array, Array]:
    step = cutjax.fuse(loss, donate_argnums=0, policy="auto")
    policies = cutjax.checkpoint_policies
    saved: list[Callable[..., Array]] = [
        jax.checkpoint(loss, policy=policy)  # pyright: ignore[reportUnknownMemberType] # jax says no more of it
        for policy in (policies.dots_saveable, policies.dots_with_no_batch_dims_saveable)
    ]
    return step(w, x), saved[0](w, x)


def twice(x: Array) -> cutjax.CudaLaunch:
    return cutjax.CudaLaunch(grid=-(-x.size // 256), block=256)


def kernel(x: Array) -> Array:
    return cutjax.cuda_kernel("twice.cu", "twice", out=jnp.square, launch=twice, reference=jnp.square)(x)


def over_devices(x: Array, w: Array, mesh: jax.sharding.Mesh) -> Array:
    rows, columns = P("model"), P(None, "model")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, columns), out_specs=columns)
    def layer(x: Array, w: Array) -> Array:
        return cutjax.all_gather_gemm(x, w, axis_name="model")

    y: Array = cutjax.gemm_reduce_scatter(x, w, axis_name="model", reduce_dtype=jnp.float32)
    with (
        cutjax.use_backend("xla"),
        cutjax.use_highest("bf16x9"),
        cutjax.use_partial_sums("float32"),
        cutjax.use_highest("bf16x9"),
        cutjax.use_tuning(None),
    ):
        return layer(x, w) + y


def said(x: Array, w: Array) -> str:
    explanation = cutjax.explain(cutjax.gemm, platform="cuda")(x, w, layout="nt")
    problem = cutjax.Problem(4096, 4096, 4096)
    kernels: list[str] = [row.runs for row in explanation.rows]
    return f"{explanation} {kernels} {cutjax.candidates(problem)[0]} {cutjax.reasons(cutjax.Config(), problem)}"


def tuned(x: Array, w: Array) -> str:
    report = cutjax.autotune(loss, candidates=8, path="tuned.json")(w, x)
    with cutjax.use_tuning("tuned.json", measure=3):
        y = cutjax.conv(x, w, config=cutjax.HaloConfig()) + cutjax.conv(x, w, config=cutjax.DirectConfig())
    return f"{report.before_us} {[row.after_us for row in report.rows]} {y}"
