"""Tails of products, one entry a kind: a function, its arguments, and the epilogues that it becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from checks import scaled
from jax import lax

BF16, F32 = jnp.bfloat16, jnp.float32
RATE, B1, B2 = 1e-2, 0.9, 0.999
B, S, K, N = 2, 4, 16, 8


class Case(NamedTuple):
    """A function and what becomes of its products.

    Attributes:
      fn: the function.
      args: of it.
      epilogues: those of its fused products, in order.
      stops: a part of what stopped each, of those that anything did.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    epilogues: tuple[str, ...]
    stops: tuple[str, ...] = ()


def x(*shape: int) -> jax.Array:
    return scaled(1, shape or (B, S, K), BF16)


def w(*shape: int) -> jax.Array:
    return scaled(2, shape or (K, N), BF16)


def v(*shape: int) -> jax.Array:
    return scaled(3, shape or (K, N), BF16)


def b(*shape: int) -> jax.Array:
    return scaled(4, shape or (N,), BF16)


def heads(x, w, b):
    return (jnp.einsum("bsk,khd->bshd", x, w) + b) * BF16(0.5)


def scores(q, k):
    masked = jnp.where(jnp.tril(jnp.ones((S, S), bool)), jnp.einsum("bhqd,bhkd->bhqk", q, k) * BF16(0.5), BF16(-1e4))
    return jax.nn.softmax(masked, -1)


def scores_of_heads(q, k):
    return jax.nn.relu(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * BF16(0.5)


def narrowed(x, w, b):
    return (jnp.matmul(x, w, preferred_element_type=jnp.float32) + b.astype(jnp.float32)).astype(BF16)


def norm(x, w, b):
    y = (x @ w + b).astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)


def dropout(x, w, key):
    y = x @ w
    return jnp.where(jax.random.bernoulli(key, 0.5, y.shape), y / BF16(0.5), BF16(0))


def bias_gradient(x, w, g):
    y = x @ w * g
    return y, y.sum((0, 1), dtype=jnp.float32)


def cycle(x, w):
    y = x @ w
    return y * jnp.cumsum(y, -1)


def saves(x, w, b):
    """As the forward pass of a gradient: pieces of gelu are used by what is elementwise, y by another product."""
    h = x @ w + b
    y = h * jax.nn.sigmoid(h)
    return y @ w.T, (jax.nn.sigmoid(h) * h).sum(-1)


def effect(x, w):
    y = x @ w
    jax.debug.callback(lambda _: None, y)
    return jnp.tanh(y)


def weight_step(x, g, w):
    return w - BF16(0.1) * jnp.einsum("bsk,bsn->kn", x, g)


def transposed(x, g, w):
    return w + jnp.einsum("bsk,bsn->nk", x, g).T


def merged(x, w, b):
    return (x.reshape(B * S, K) @ w).reshape(B, S, N) + b


def mask(x, w, m):
    return jnp.where(m, x @ w, BF16(0))


SIZES = (3, 0, 4)  # of 8 rows, so that one is of no group


def moe(x, w, v, down, r):
    sizes = jnp.array(SIZES)
    h = jax.nn.silu(lax.ragged_dot(x, w, sizes)) * lax.ragged_dot(x, v, sizes)
    return lax.ragged_dot(h, down, sizes) * r


def grouped_bias(x, w, b):
    return lax.ragged_dot(x, w, jnp.array(SIZES)) + b


IMAGES, GRID = (B, 6, 5, 4), (B, 3, 3, N)  # of windows 3 x 3 at strides of 2


def conv(x, w, strides=(2, 2), numbers=("NHWC", "HWIO", "NHWC"), groups=1):
    sizes = {"dimension_numbers": numbers, "feature_group_count": groups}
    return lax.conv_general_dilated(x, w, strides, "SAME", **sizes)


def images(*shape: int) -> jax.Array:
    return scaled(5, shape or IMAGES, BF16)


def kernel(*shape: int) -> jax.Array:
    return scaled(6, shape or (3, 3, 4, N), BF16) / BF16(3)


def folded(x, w, mean, scale, bias):
    """A norm over the batch in inference."""
    return jax.nn.relu((conv(x, w) - mean) * scale + bias)


def normed(x, w, scale):
    y = conv(x, w)
    wide = y.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    variance = (wide * wide).mean((0, 1, 2)) - mean * mean
    return ((wide - mean) * lax.rsqrt(variance + 1e-5)).astype(BF16) * scale


def of_images(x, w, g, scale):
    """The gradient of images, of a convolution by groups: weights are neither flipped nor moved."""
    (gradient,) = jax.linear_transpose(lambda x: conv(x, w, groups=2), x)(g)
    return gradient * jax.nn.sigmoid(scale)


def of_weights(x, w, g):
    """The step of a convolution's weights."""
    (gradient,) = jax.linear_transpose(lambda w: conv(x, w), w)(g)
    return w - BF16(0.1) * gradient


def embedded(x, w, b, time):
    return jax.nn.silu(conv(x, w) + b + time[:, None, None])


def pooled(x, w):
    y = jax.nn.relu(conv(x, w))
    return y, y.sum((1, 2))


def integers(x, w):
    return jnp.ones((4, 4), int) @ jnp.ones((4, 4), int) + 1


GELU = "t0 = acc + f32(x0); bf16(t0 * (0.5 * (1 + tanh(0.796875 * (t0 + (0.0446777 * (t0 ** 3)))))))"
SILU = "bf16((acc1 * logistic(acc1)) * acc0)"
SECOND = "t0 = acc + f32(x0); t1 = logistic(t0); bf16(t0 * t1), sum(t1 * t0, col)"
DROPOUT = (
    "bf16(where(max(0, ((bits_f32((random_bits(x0, x1, u32(col) + (u32(row) * 8)) >>> 9) | 1065353216) - 1) * (1 - 0)) "
    "+ 0) < 0.5, acc / 0.5, 0))"
)

CASES = {
    "bias": Case(lambda x, w, b: x @ w + b, (x(), w(), b()), ("bf16(acc + f32(x0))",), ()),
    "activation": Case(
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        (x(), w(), b()),
        (GELU,),
        (),
    ),
    "relu": Case(lambda x, w: jax.nn.relu(x @ w), (x(), w()), ("bf16(f32(max(bf16(acc), 0)))",), ()),
    "residual": Case(lambda x, w, r: r + x @ w, (x(), w(), x(B, S, N)), ("bf16(f32(x0) + acc)",), ()),
    "row": Case(lambda x, w, r: (x @ w) * r, (x(), w(), x(B, S, 1)), ("bf16(acc * f32(x0))",), ()),
    "scaling": Case(lambda x, w, s: (x @ w) * s, (x(), w(), jnp.asarray(0.5, BF16)), ("bf16(acc * f32(x0))",), ()),
    "cast": Case(narrowed, (x(), w(), b()), ("bf16(acc + x0)",), ()),
    "wider": Case(lambda x, w: (x @ w).astype(jnp.float32), (x(), w()), (), ("nothing is computed",)),
    "fp8": Case(lambda x, w: (x @ w).astype(jnp.float8_e4m3fn), (x(), w()), ("f8_e4m3fn(acc)",), ()),
    "mask": Case(mask, (x(), w(), x(B, S, N) > 0), ("bf16(where(x0, acc, 0))",), ()),
    "causal": Case(scores, (x(B, 2, S, K), x(B, 2, S, K)), ("bf16(where(x0, acc * 0.5, -9984))",), ("sub at",)),
    "strides": Case(scores_of_heads, (x(B, S, 2, K), x(B, S, 2, K)), ("bf16(f32(max(bf16(acc), 0)) * 0.5)",), ()),
    "dropout": Case(
        dropout,
        (x(), w(), jax.random.key(0)),
        (DROPOUT,),
        (),
    ),
    "gate": Case(
        lambda x, w, v: jax.nn.silu(x @ w) * (x @ v),
        (x(), w(), v()),
        (
            SILU,
            SILU,
        ),
        (),
    ),
    "bias gradient": Case(bias_gradient, (x(), w(), x(B, S, N)), ("t0 = acc * f32(x0); bf16(t0), sum(t0, row)",), ()),
    "heads": Case(heads, (x(), w(K, 2, 4), b(2, 4)), ("bf16((acc + f32(x0)) * 0.5)",), ()),
    "weight gradient": Case(
        weight_step,
        (x(), x(B, S, N), w()),
        ("bf16(f32(x0) - (0.100098 * acc))",),
        (),
    ),
    "transposed": Case(transposed, (x(), x(B, S, N), w()), ("bf16(f32(x0) + acc)",), ()),
    "merged": Case(merged, (x(), w(), b()), ("bf16(acc + f32(x0))",), ()),
    "norm": Case(norm, (x(), w(), b()), ("bf16(acc + f32(x0))",), ("mul at",)),
    "second result": Case(
        saves,
        (x(), w(), b()),
        (SECOND,),
        ("nothing is computed",),
    ),
    "cycle": Case(cycle, (x(), w()), (), ("made of the product by what no kernel computes",)),
    "effect": Case(effect, (x(), w()), ("bf16(acc), bf16(tanh(acc))",), ()),
    "chain": Case(
        lambda x, w, v: jnp.tanh(jnp.tanh(x @ w) @ v),
        (x(), w(), v(N, N)),
        (
            "bf16(tanh(acc))",
            "bf16(tanh(acc))",
        ),
        (),
    ),
    "reordered": Case(
        lambda x, w: jnp.tanh(lax.reshape(x @ w, (B, S, N), (1, 2, 0))), (x(), w()), (), ("nothing is computed",)
    ),
    "nothing": Case(lambda x, w: x @ w, (x(), w()), (), ("nothing is computed",)),
    "softmax": Case(lambda x, w: jax.nn.softmax(x @ w), (x(), w()), (), ("sub at",)),
    "moe": Case(
        moe,
        (x(8, K), w(3, K, N), v(3, K, N), w(3, N, K), x(8, 1)),
        (SILU, SILU, "bf16(acc * f32(x0))"),
        (),
    ),
    "grouped bias": Case(grouped_bias, (x(8, K), w(3, K, N), b()), (), ("add makes rows of no group other than zero",)),
    "convolution": Case(
        lambda x, w, b, r: jax.nn.silu(conv(x, w) + b) + r,
        (images(), kernel(), b(), images(*GRID)),
        ("t0 = acc + f32(x0); bf16((t0 * logistic(t0)) + f32(x1))",),
    ),
    "folded norm": Case(
        folded,
        (images(), kernel(), b(), b() * BF16(2), b() + BF16(1)),
        ("bf16(f32(max(bf16(((acc - f32(x0)) * f32(x1)) + f32(x2)), 0)))",),
    ),
    "norm of a batch": Case(
        normed,
        (images(), kernel(), b()),
        ("bf16(acc), sum(acc, b1+b0+row), sum(acc * acc, b1+b0+row)",),
        ("sub at",),
    ),
    "gradient of images": Case(
        of_images, (images(), kernel(3, 3, 2, N), images(*GRID), images()), ("bf16(acc * logistic(f32(x0)))",)
    ),
    "gradient of a window": Case(
        of_weights, (images(), kernel(), images(*GRID)), ("bf16(f32(x0) - (0.100098 * acc))",)
    ),
    "gate of windows": Case(
        lambda x, w, v: jnp.tanh(conv(x, w)) * jax.nn.sigmoid(conv(x, v)),
        (images(), kernel(), kernel() * BF16(0.5)),
        ("bf16(tanh(acc1) * logistic(acc0))",) * 2,
    ),
    "patches": Case(
        lambda x, w, b: conv(x, w, (3, 5)) + b, (images(), kernel(3, 5, 4, N), b()), ("bf16(acc + f32(x0))",)
    ),
    "embedded": Case(
        embedded,
        (images(), kernel(), b(), x(B, N)),
        ("bf16(acc + f32(x0))",),
        (f"an operand of shape {(B, 1, 1, N)} is not along rows or columns",),
    ),
    "pooled": Case(pooled, (images(), kernel()), ("bf16(f32(max(bf16(acc), 0)))",), ("not all rows, or columns",)),
    "channels first": Case(
        lambda x, w: jnp.tanh(conv(x, w, numbers=None)),
        (images(B, 4, 6, 5), kernel(N, 4, 3, 3)),
        (),
        ("XLA transposes its result",),
    ),
    "integers": Case(integers, (x(), w()), (), ("operands int32 and int32",)),
}


# Steps of AdamW on a layer, whose updates are fused with the products that make their gradients.


def loss(params, x):
    """A layer, and one whose weights are stored transposed."""
    h = jax.nn.gelu(x @ params["w"].astype(BF16))
    return (h @ params["v"].T.astype(BF16)).astype(F32).var()


def adamw(gradient, p, m, v, count):
    m, v = B1 * m + (1 - B1) * gradient, B2 * v + (1 - B2) * gradient**2
    update = m / (1 - B1**count) / (jnp.sqrt(v / (1 - B2**count)) + 1e-8)
    return p - RATE * (update + 1e-4 * p), m, v


def step(state, x):
    """One of AdamW, whose corrections are numbers of a function that is called for all parameters."""
    params, m, v, count = state
    value, gradient = jax.value_and_grad(loss)(params, x)
    found = {name: adamw(gradient[name], params[name], m[name], v[name], count) for name in params}
    return (*({name: found[name][i] for name in params} for i in range(3)), count + 1.0), value


def initial(params):
    m, v = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return params, m, v, jnp.ones((), F32)
