"""Calls as a user writes them and the documents show them. Checked by pyright in strict mode, never run."""

# pyright: strict, reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import cutjax

P = jax.P


def dense(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    y: jax.Array = cutjax.gemm(x, w)
    y = cutjax.gemm(x, np.ones((4, 4), np.float32), layout="nt", out_dtype=jnp.float32)
    y = cutjax.gemm(x, w, epilogue=lambda acc, b: jax.nn.gelu(acc + b), operands=(bias,))
    y = cutjax.gemm(x, (w, w), epilogue=lambda a, b: jax.nn.silu(a) * b, out_dtype=jnp.bfloat16)
    y = cutjax.gemm(x, w, precision="highest", backend="auto", save="recompute", out_sharding=P("d", None))
    y = cutjax.gemm(x, w, config=cutjax.Config(bm=128, bn=256), precision=jax.lax.Precision.HIGHEST)
    y = cutjax.gemm(x, w, config=cutjax.MmaConfig())
    total: tuple[jax.Array, jax.Array] = cutjax.gemm(x, w, epilogue=lambda acc: (acc, acc.sum(-1)))
    return cutjax.syrk(y) + cutjax.mlp(x, w, w, b1=bias, gate=w, activation=jax.nn.silu) + total[0]


def programs_of_others(x: jax.Array) -> list[str]:
    with cutjax.patch() as patched:
        jax.jit(lambda x: x @ x)(x)
    return [f"{program.name}: {program.kernels} of {program.products}" for program in patched.programs]


def convolutions(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    y: jax.Array = cutjax.conv(x, w)
    y = cutjax.conv(x, w, window_strides=2, padding=((1, 1), (0, 2)), rhs_dilation=(2, 1), feature_group_count=4)
    y = cutjax.conv(x, w, epilogue=lambda acc, b: jax.nn.silu(acc + b), operands=(bias,), out_dtype=jnp.bfloat16)
    y += cutjax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + cutjax.conv_transpose(x, w, (2, 2), "SAME", transpose_kernel=True)


def quantized(x: jax.Array, w: jax.Array) -> jax.Array:
    q = cutjax.quantize(w, jnp.int8, block=(-1, 1))
    narrow = cutjax.quantize(w, jnp.float8_e4m3fn, block=(1, -1))
    y: jax.Array = cutjax.gemm(x, cutjax.quantize(w, jnp.int8, block=(-1, 1)))
    y = cutjax.gemm(x, (q, q), epilogue=lambda a, b: jax.nn.silu(a) * b)
    y = cutjax.gemm(x, narrow, layout="nt")
    y = cutjax.mlp(x, q, q, gate=q)
    rows = cutjax.quantize(x, jnp.int8, block=(1, -1))
    y = cutjax.gemm(rows, q, out_dtype=jnp.bfloat16) + cutjax.gemm(rows, w) + cutjax.mlp(rows, q, w)
    y += cutjax.grouped_gemm(rows, q, jnp.array([2, 2]))
    return y + q.dequantize(jnp.bfloat16)


def drop_ins(x: jax.Array, w: jax.Array) -> list[jax.Array]:
    return [
        cutjax.matmul(x, w, precision="highest", preferred_element_type=jnp.float32),
        cutjax.dot(x, 2.0),
        cutjax.tensordot(x, w, axes=1),
        cutjax.tensordot(x, w, axes=((1,), (0,))),
        cutjax.einsum("ij,jk->ik", x, w),
        cutjax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        cutjax.dot_general(x, w, (((1,), (0,)), ((), ())), None, jnp.float32, out_sharding=P()),
        cutjax.ragged_dot(x, w, jnp.array([2, 2])),
    ]


def groups(x: jax.Array, w: jax.Array, logits: jax.Array) -> jax.Array:
    sizes = jnp.array([2, 2])
    q = cutjax.quantize(w, jnp.int8, block=(-1, 1))
    y: jax.Array = cutjax.grouped_gemm(x, w, sizes)
    y = cutjax.grouped_gemm(x, q, sizes, epilogue=lambda acc, b: acc + b, operands=(x,))
    y = cutjax.grouped_mlp(x, q, q, sizes, gate=q)
    y = cutjax.grouped_outer(x, y, sizes)
    routing: cutjax.Routing = cutjax.route(logits, 2)
    y = cutjax.moe(x, logits, q, q, q, k=2) + routing.weights
    return cutjax.moe(x, logits, w, w, w, k=2, expert_axis="model") + cutjax.load_balance_loss(logits, routing.indices)


def over_devices(x: jax.Array, w: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    rows, columns = P("model"), P(None, "model")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, columns), out_specs=columns)
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return cutjax.all_gather_gemm(x, w, axis_name="model")

    with cutjax.use_backend("xla"), cutjax.use_partial_sums("float32"), cutjax.use_tuning(None):
        return layer(x, w)


def said(x: jax.Array, w: jax.Array) -> str:
    explanation = cutjax.explain(cutjax.gemm, platform="cuda")(x, w, layout="nt")
    problem = cutjax.Problem(4096, 4096, 4096)
    kernels: list[str] = [row.runs for row in explanation.rows]
    return f"{explanation} {kernels} {cutjax.candidates(problem)[0]} {cutjax.reasons(cutjax.Config(), problem)}"
