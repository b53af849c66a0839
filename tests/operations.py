"""Entries of the battery: every public operation on small operands, and how each is written in plain JAX.

To add an operation is to add one entry to OPERATIONS; test_battery_*.py then transform it in every way, and
test_settings_of_jax, test_explicit_mesh, test_varying and test_arguments use it as well:
  fn        of the operands by position; where there are ``layouts``, also of ``layout=``
  operands  their names in arrays(), where a new operand gets its line
  plain     the oracle: the same function of the same operands in jnp and lax alone
  layouts   layout -> names of the operands that lie transposed in it; fn is called with those as x.mT
  linear    operands in each of which the function is linear: jax.linear_transpose
  dtypes    the floats other than float32 of which there may be operands; none where results do not depend on them
  symbolic  True if programs are exported for any number of rows; otherwise they are refused, naming the function
An entry with a comma in its name is an option of the operation before it, and is transformed in fewer ways.
Refusals that are special to an operation stay in its own test file; test_battery_refusals makes those that all share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from checks import integers, normal
from jax import lax

import cutjax

M, K, N, EXPERTS = 12, 8, 16, 4
NARROW = ("bfloat16", "float16")  # of wider operands the weights of routing stay float32
FLOATS = (*NARROW, "float64")


@dataclasses.dataclass(frozen=True)
class Operation:
    fn: Callable[..., Any]
    operands: str
    plain: Callable[..., Any]
    layouts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    linear: str = ""
    dtypes: tuple[str, ...] = FLOATS
    symbolic: bool = True

    def of_layout(self, layout: str) -> Callable[..., Any]:
        """The function of operands as ``plain`` takes them."""
        if not layout:
            return self.fn
        turned = [name in self.layouts[layout].split() for name in self.operands.split()]
        return lambda *args: self.fn(*(x.mT if t else x for x, t in zip(args, turned, strict=True)), layout=layout)


def _half(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(normal(seed, shape)) / 2


@functools.cache
def _numbers() -> dict[str, np.ndarray]:
    found = {
        "x": _half(0, (M, K)),
        "w": _half(1, (K, N)),
        "v": _half(2, (N, K)),
        "b": normal(3, (N,)),
        "c": normal(4, (K,)),
        "g": _half(5, (EXPERTS, K, N)),
        "u": _half(6, (EXPERTS, K, N)),
        "d": _half(7, (EXPERTS, N, K)),
        "s": normal(8, (M, 1)),
        "of_groups": normal(9, (EXPERTS, 1, N)),
        "dy": normal(10, (M, N)),
        "to": normal(11, (EXPERTS, K, N)),
        "t": normal(14, (1, 1)),
        "sizes": np.array([5, 0, 4, 2], np.int32),
        "logits": normal(12, (M, EXPERTS)),
        "bias": normal(13, (EXPERTS,)),
        "q": integers(15, (K, N), jnp.int8),
        "qg": integers(16, (EXPERTS, K, N), jnp.int8),
        "qd": integers(17, (EXPERTS, N, K), jnp.int8),
        "qx": integers(18, (M, K), jnp.int8),
        "im": normal(19, (M, 5, 4)) / 2,
        "cw": normal(20, (3, 4, N)) / 2,
        "gw": normal(21, (2, 2, N)) / 2,
        "tw": normal(22, (3, N, 4)) / 2,
        "tc": normal(26, (3, 4)),
        "ts": normal(27, (M, 2, 4)),
        "tx": normal(28, (M, 4)),
        "sk": _half(23, (K // 4, N)),
        "zk": integers(24, (K // 4, N), jnp.int8),
        "sgk": _half(25, (EXPERTS, K // 4, N)),
        "labels": np.array([0, 15, 3, -1, 7, 7, 9, 14, 2, -16, 11, 5], np.int32),
    }
    return {name: np.asarray(x) for name, x in found.items()}


def arrays() -> dict[str, jax.Array]:
    """The operands by name; a function, because tests make them under other settings."""
    return {name: jax.device_put(x) for name, x in _numbers().items()}


def _biased(acc, b):
    return jax.nn.gelu(acc + b[None, :].astype(acc.dtype))


def _of_blocks(q, s, z=0):
    """Values of blocks of 4 along k."""
    z = z if isinstance(z, int) else jnp.repeat(z, 4, -2)
    return (q - z).astype(s.dtype) * jnp.repeat(s, 4, -2)


def _normed(a, s, c):
    c = jnp.expand_dims(c, tuple(range(a.ndim - c.ndim)))
    return jax.nn.silu(a * s.astype(a.dtype)) * c.astype(a.dtype)


def _odd_rows(a, q):
    """A function of a mask of a's size, and of which row is which."""
    odd = lax.broadcasted_iota(jnp.int32, a.shape, a.ndim - 2) % 2
    return jnp.where(jnp.greater(q, 0), jnp.tanh(a), a) * (1 + odd).astype(a.dtype)


def _gated(p, q, b):
    return jax.nn.silu(p) * q + b[None, :].astype(p.dtype)


def _shrunk(acc, t):
    return jnp.tanh(acc) * t.astype(acc.dtype)


def _scaled(acc, s, b):
    return jnp.tanh(acc * s.astype(acc.dtype) + b.astype(acc.dtype))


def _silu(acc, b):
    return jax.nn.silu(acc + b[None, None, :].astype(acc.dtype))


def _sums(acc, s):
    return jnp.tanh(acc * s.astype(acc.dtype)), acc.sum((0, 1)), (acc * acc).sum(1), acc.max(-1)


def _windows(im, cw, strides):
    return lax.conv_general_dilated(im, cw, strides, "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def _past(im, tc, state=None):
    """The sums of causal_conv1d with weights of width 3."""
    im = jnp.concatenate([jnp.zeros((len(im), 2, 4), im.dtype) if state is None else state, im], 1)
    return im[:, :-2] * tc[None, :1] + im[:, 1:-1] * tc[None, 1:2] + im[:, 2:] * tc[None, 2:]


def _contracted(x, dy, sizes):
    return cutjax.ragged_dot_general(x, dy, sizes, lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []))


def _grouped(epilogue):
    """As an oracle: the epilogue of a masked product, with each row's value of an operand of groups."""

    def plain(x, w, sizes, *operands):
        at, has = oracles.rows(sizes, x.shape[0])
        of_rows = [v[at, 0] if v.ndim == 3 else v for v in operands]
        return epilogue(oracles.masked_multiply(x, w, sizes), has, *of_rows)

    return plain


def _network(x, w, v, b, c, **how):
    return cutjax.fused_mlp(x, (w, v), (b, c), jnp.tanh, **how)


_LOSS = {"where": np.ones(1, bool), "z_loss": 0.01, "softcap": 2.0, "reduction": "sum"}


def _launch(x, s, y):
    if x.dtype != jnp.float32:
        raise NotImplementedError(f"{x.dtype}: the kernel is for float32")
    return cutjax.CudaLaunch(grid=x.shape[0], block=x.shape[1], arguments=(x, s, y))


_own = cutjax.cuda_kernel(
    """extern "C" __global__ void scaled(const float* x, const float* s, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = tanhf(x[i]) * s[blockIdx.x];
}""",
    "scaled",
    name="cuda_kernel",
    out=lambda x, s: x,
    launch=_launch,
    reference=lambda x, s: jnp.tanh(x) * s,
)
LAYOUTS = {"nn": "", "nt": "w", "tn": "x", "tt": "x w"}
OPERATIONS: dict[str, Operation] = {
    "gemm": Operation(cutjax.gemm, "x w", jnp.matmul, LAYOUTS, linear="x w"),
    "gemm, quantized": Operation(
        lambda x, q, b: cutjax.gemm(x, cutjax.Quantized(q, b)),
        "x q b",
        lambda x, q, b: x @ (q.astype(b.dtype) * b),
    ),
    "gemm, quantized rows": Operation(
        lambda qx, s, q, b: cutjax.gemm(cutjax.Quantized(qx, s), cutjax.Quantized(q, b)),
        "qx s q b",
        lambda qx, s, q, b: (qx.astype(s.dtype) @ q.astype(s.dtype)) * s * b,
    ),
    "gemm, blocks": Operation(
        lambda x, q, sk, zk: cutjax.gemm(x, cutjax.Quantized(q, sk, zk)), "x q sk zk", lambda x, *q: x @ _of_blocks(*q)
    ),
    "gemm, layout": Operation(lambda x, v: cutjax.gemm(x, v, layout="nt"), "x v", lambda x, v: x @ v.T, linear="x v"),
    "gemm, epilogue": Operation(
        lambda x, w, b, **how: cutjax.gemm(x, w, epilogue=_biased, operands=(b,), **how),
        "x w b",
        lambda x, w, b: _biased(x @ w, b),
        LAYOUTS,
    ),
    "gemm, two products": Operation(
        lambda x, w, g: cutjax.gemm(x, (w, g[0]), epilogue=lambda p, q: jax.nn.silu(p) * q),
        "x w g",
        lambda x, w, g: jax.nn.silu(x @ w) * (x @ g[0]),
    ),
    "gemm, several products": Operation(
        lambda x, w, g: cutjax.gemm(x, (w, g[0]), epilogue=lambda *accs: accs),
        "x w g",
        lambda x, w, g: (x @ w, x @ g[0]),
        linear="x",
    ),
    "gemm, sum": Operation(  # of contractions of different lengths
        lambda x, w, s, of_groups, **how: cutjax.gemm((x, s), (w, of_groups[0]), **how),
        "x w s of_groups",
        lambda x, w, s, of_groups: x @ w + s @ of_groups[0],
        {"nn": "", "nt": "w of_groups", "tn": "x s"},
    ),
    "gemm, sum and epilogue": Operation(
        lambda x, w, g, b: cutjax.gemm((x, x, x), (w, g[0], g[1]), epilogue=_biased, operands=(b,)),
        "x w g b",
        lambda x, w, g, b: _biased(x @ (w + g[0] + g[1]), b),
    ),
    "gemm, reductions": Operation(
        lambda x, w, s: cutjax.gemm(x, w, epilogue=lambda a, s: (a * s, a.sum(0), a.max(1)), operands=(s,)),
        "x w s",
        lambda x, w, s: (x @ w * s, (x @ w).sum(0), (x @ w).max(1)),
        dtypes=("float64",),  # of narrower ones the sum and the maximum stay in float32
    ),
    "gemm, recompute": Operation(
        lambda x, w, b: cutjax.gemm(x, w, epilogue=_biased, operands=(b,), save="recompute"),
        "x w b",
        lambda x, w, b: _biased(x @ w, b),
    ),
    "gemm, prologue": Operation(
        lambda x, w, s, c, layout="nn": cutjax.gemm(
            x, w, prologue=_normed, prologue_operands=(s, c) if layout[0] == "n" else (s.mT, c[:, None]), layout=layout
        ),
        "x w s c",
        lambda x, w, s, c: _normed(x, s, c) @ w,
        LAYOUTS,
    ),
    "gemm, prologue and epilogue": Operation(
        lambda x, w, g, b, qx: cutjax.gemm(
            x, (w, g[0]), prologue=_odd_rows, prologue_operands=(qx,), epilogue=_gated, operands=(b,), save="recompute"
        ),
        "x w g b qx",
        lambda x, w, g, b, qx: _gated(_odd_rows(x, qx) @ w, _odd_rows(x, qx) @ g[0], b),
    ),
    "cuda_kernel": Operation(_own, "x s", lambda x, s: jnp.tanh(x) * s, symbolic=False),
    "syrk": Operation(cutjax.syrk, "x", lambda x: x @ x.mT, {"n": "", "t": "x"}),
    "syrk, epilogue": Operation(
        lambda x, t, **how: cutjax.syrk(x, epilogue=_shrunk, operands=(t,), **how),
        "x t",
        lambda x, t: _shrunk(x @ x.mT, t),
    ),
    "mlp": Operation(cutjax.mlp, "x w v", lambda x, w, v: jax.nn.gelu(x @ w) @ v, {"nn": "", "nt": "w v"}, linear="v"),
    "mlp, all": Operation(
        lambda x, w, v, b, c, **how: cutjax.mlp(x, w, v, gate=w, b1=b, b2=c, activation=jax.nn.silu, **how),
        "x w v b c",
        lambda x, w, v, b, c: (jax.nn.silu(x @ w) * (x @ w + b)) @ v + c,
    ),
    "mlp, recompute": Operation(
        lambda x, w, v, b, c: cutjax.mlp(x, w, v, b1=b, b2=c, save="recompute"),
        "x w v b c",
        lambda x, w, v, b, c: jax.nn.gelu(x @ w + b) @ v + c,
    ),
    "mlp, prologue": Operation(
        lambda x, w, v, b, s, c: cutjax.mlp(x, w, v, gate=w, b1=b, prologue=_normed, prologue_operands=(s, c)),
        "x w v b s c",
        lambda x, w, v, b, s, c: (jax.nn.gelu(_normed(x, s, c) @ w) * (_normed(x, s, c) @ w + b)) @ v,
    ),
    "fused_mlp": Operation(_network, "x w v b c", lambda x, w, v, b, c: jnp.tanh(x @ w + b) @ v + c),
    "fused_mlp, kernel": Operation(
        lambda x, w, v, b, c: _network(x, w, v, b, c, backend="cuda"),
        "x w v b c",
        lambda x, w, v, b, c: jnp.tanh(x @ w + b) @ v + c,
        dtypes=NARROW,  # of float64 it is products
    ),
    "grouped_gemm": Operation(
        cutjax.grouped_gemm, "x g sizes", oracles.masked_multiply, {"nn": "", "nt": "g"}, linear="x g"
    ),
    "grouped_gemm, offset": Operation(
        lambda x, g, sizes: cutjax.grouped_gemm(x, g[:2], sizes, group_offset=1),
        "x g sizes",
        lambda x, g, sizes: oracles.masked_multiply(x, jnp.pad(g[:2], ((1, 1), (0, 0), (0, 0))), sizes),
        linear="x g",
    ),
    "grouped_gemm, epilogue": Operation(
        lambda x, g, sizes, s, of_groups, **how: cutjax.grouped_gemm(
            x, g, sizes, epilogue=lambda a, s, b: (jax.nn.gelu(a + b) * s, a.sum(0)), operands=(s, of_groups), **how
        ),
        "x g sizes s of_groups",
        _grouped(lambda a, has, s, b: (jnp.where(has, jax.nn.gelu(a + b) * s, 0), a.sum(0))),
        {"nn": "", "nt": "g"},
        dtypes=("float64",),
    ),
    "grouped_gemm, sum": Operation(
        lambda x, g, s, of_groups, sizes, **how: cutjax.grouped_gemm((x, s), (g, of_groups), sizes, **how),
        "x g s of_groups sizes",
        lambda x, g, s, of_groups, sizes: (
            oracles.masked_multiply(x, g, sizes) + oracles.masked_multiply(s, of_groups, sizes)
        ),
        {"nn": "", "nt": "g of_groups"},
    ),
    "grouped_gemm, recompute": Operation(
        lambda x, g, sizes, s, of_groups: cutjax.grouped_gemm(
            x, g, sizes, epilogue=_scaled, operands=(s, of_groups), save="recompute"
        ),
        "x g sizes s of_groups",
        _grouped(lambda a, has, s, b: jnp.where(has, _scaled(a, s, b), 0)),
    ),
    "grouped_gemm, quantized rows": Operation(
        lambda qx, s, qg, of_groups, sizes: cutjax.grouped_gemm(
            cutjax.Quantized(qx, s), cutjax.Quantized(qg, of_groups), sizes
        ),
        "qx s qg of_groups sizes",
        lambda qx, s, qg, of_groups, sizes: oracles.masked_multiply(
            qx.astype(s.dtype) * s, qg.astype(s.dtype) * of_groups, sizes
        ),
    ),
    "grouped_gemm, blocks": Operation(
        lambda x, qg, sgk, sizes: cutjax.grouped_gemm(x, cutjax.Quantized(qg, sgk), sizes),
        "x qg sgk sizes",
        lambda x, qg, sgk, sizes: oracles.masked_multiply(x, _of_blocks(qg, sgk), sizes),
    ),
    "grouped_gemm, prologue": Operation(
        lambda x, g, sizes, s, d: cutjax.grouped_gemm(x, g, sizes, prologue=_normed, prologue_operands=(s, d[:, :1])),
        "x g sizes s d",
        lambda x, g, sizes, s, d: oracles.masked_multiply(
            _normed(x, s, d[oracles.rows(sizes, x.shape[0])[0], 0]), g, sizes
        ),
    ),
    "grouped_outer": Operation(cutjax.grouped_outer, "x dy sizes", oracles.masked_outer, linear="x dy"),
    "grouped_outer, accumulate": Operation(
        lambda x, dy, sizes, to: cutjax.grouped_outer(x, dy, sizes, accumulate=to),
        "x dy sizes to",
        lambda x, dy, sizes, to: to + oracles.masked_outer(x, dy, sizes),
    ),
    "grouped_outer, several": Operation(
        lambda x, dy, sizes, to, g: cutjax.grouped_outer(x, (dy, dy), sizes, accumulate=(to, g)),
        "x dy sizes to g",
        lambda x, dy, sizes, *added: tuple(y + oracles.masked_outer(x, dy, sizes) for y in added),
    ),
    "grouped_mlp": Operation(
        lambda x, g, u, d, sizes, s, **how: cutjax.grouped_mlp(x, g, d, sizes, gate=u, row_scale=s, **how),
        "x g u d sizes s",
        lambda x, g, u, d, sizes, s: oracles.grouped_mlp(x, g, d, sizes, u, s),
        {"nn": "", "nt": "g u d"},
    ),
    "grouped_mlp, quantized": Operation(
        lambda x, qg, of_groups, qd, c, sizes: cutjax.grouped_mlp(
            x, cutjax.Quantized(qg, of_groups), cutjax.Quantized(qd, c), sizes, activation=jnp.tanh
        ),
        "x qg of_groups qd c sizes",
        lambda x, qg, of_groups, qd, c, sizes: oracles.grouped_mlp(
            x, qg.astype(x.dtype) * of_groups.astype(x.dtype), qd.astype(x.dtype) * c, sizes, activation=jnp.tanh
        ),
    ),
    "grouped_mlp, prologue": Operation(
        lambda x, g, d, sizes, s, c: cutjax.grouped_mlp(x, g, d, sizes, prologue=_normed, prologue_operands=(s, c)),
        "x g d sizes s c",
        lambda x, g, d, sizes, s, c: oracles.grouped_mlp(_normed(x, s, c), g, d, sizes),
    ),
    "grouped_mlp, recompute": Operation(
        lambda x, g, d, sizes: cutjax.grouped_mlp(x, g, d, sizes, save="recompute", group_offset=0),
        "x g d sizes",
        oracles.grouped_mlp,
    ),
    "linear_cross_entropy": Operation(
        cutjax.linear_cross_entropy,
        "x w labels",
        oracles.linear_cross_entropy,
        {"nn": "", "nt": "w"},
        dtypes=("float64",),  # of others the loss is float32
    ),
    "linear_cross_entropy, sum": Operation(
        lambda x, w, labels, b, **how: cutjax.linear_cross_entropy(x, w, labels, bias=b, **_LOSS, **how),
        "x w labels b",
        lambda x, w, labels, b: oracles.linear_cross_entropy(x, w, labels, b, **_LOSS),
        dtypes=("float64",),
    ),
    "linear_cross_entropy, none": Operation(
        lambda x, w, labels: cutjax.linear_cross_entropy(x, w, labels, reduction="none"),
        "x w labels",
        lambda x, w, labels: oracles.linear_cross_entropy(x, w, labels, reduction="none"),
        dtypes=("float64",),
    ),
    "dot_general": Operation(
        lambda x, dy: cutjax.dot_general(x, dy, (((0,), (0,)), ((), ()))),
        "x dy",
        lambda x, dy: x.T @ dy,
        linear="x dy",
    ),
    "matmul": Operation(  # refused in the words of jax.numpy, as are those below
        lambda x, g: cutjax.matmul(x, g),
        "x g",
        lambda x, g: jnp.stack([x @ y for y in g]),
        linear="x g",
    ),
    "einsum": Operation(
        lambda x, g, u: cutjax.einsum("mk,gkn,gon->mgo", x, g, u),
        "x g u",
        lambda x, g, u: jnp.stack([x @ y @ z.T for y, z in zip(g, u, strict=True)], 1),
        linear="x g u",
    ),
    "conv": Operation(cutjax.conv, "im cw", lambda im, cw: _windows(im, cw, (1,)), linear="im cw"),
    "conv, epilogue": Operation(
        lambda im, cw, b, **how: cutjax.conv(im, cw, window_strides=2, epilogue=_silu, operands=(b,), **how),
        "im cw b",
        lambda im, cw, b: _silu(_windows(im, cw, (2,)), b),
    ),
    "conv, reductions": Operation(
        lambda im, cw, s: cutjax.conv(im, cw, epilogue=_sums, operands=(s[:, :, None],), save="recompute"),
        "im cw s",
        lambda im, cw, s: _sums(_windows(im, cw, (1,)), s[:, :, None]),
        dtypes=("float64",),
    ),
    "causal_conv1d": Operation(cutjax.causal_conv1d, "im tc", _past, linear="im tc"),
    "causal_conv1d, all": Operation(
        lambda im, tc, c, ts: cutjax.causal_conv1d(im, tc, c[:4], state=ts, activation="silu", return_state=True),
        "im tc c ts",
        lambda im, tc, c, ts: (jax.nn.silu(_past(im, tc, ts) + c[None, None, :4]), im[:, -2:]),
    ),
    "causal_conv1d_update": Operation(
        lambda tx, ts, tc: cutjax.causal_conv1d_update(tx, ts, tc, activation="silu"),
        "tx ts tc",
        lambda tx, ts, tc: (
            jax.nn.silu(_past(tx[:, None], tc, ts)[:, 0]),
            jnp.concatenate([ts[:, 1:], tx[:, None]], 1),
        ),
    ),
    "conv_general_dilated": Operation(  # in groups, with dilation
        lambda im, gw: cutjax.conv_general_dilated(im, gw, (2,), ((1, 3),), (2,), (3,), ("NWC", "WIO", "NCW"), 2),
        "im gw",
        lambda im, gw: lax.conv_general_dilated(im, gw, (2,), ((1, 3),), (2,), (3,), ("NWC", "WIO", "NCW"), 2),
        linear="im gw",
    ),
    "conv_transpose": Operation(
        lambda im, tw: cutjax.conv_transpose(im, tw, (2,), "SAME", transpose_kernel=True),
        "im tw",
        lambda im, tw: lax.conv_transpose(im, tw, (2,), "SAME", transpose_kernel=True),
        linear="im tw",
    ),
    "ragged_dot": Operation(cutjax.ragged_dot, "x g sizes", oracles.masked_multiply, linear="x g"),
    "ragged_dot_general": Operation(_contracted, "x dy sizes", oracles.masked_outer, linear="x dy"),
    "route": Operation(lambda logits: cutjax.route(logits).weights, "logits", lambda x: oracles.route(x)[1], dtypes=()),
    "route, all": Operation(
        lambda logits, bias: (
            cutjax.route(logits, k=3, scoring="sigmoid", renormalize=False, selection_bias=bias).weights
        ),
        "logits bias",
        lambda logits, bias: oracles.route(logits, 3, "sigmoid", False, bias)[1],
        dtypes=(),
    ),
    "dispatch and combine": Operation(
        lambda x, logits: cutjax.route(logits).combine(cutjax.route(logits).dispatch(x)),
        "x logits",
        lambda x, logits: 2 * x + 0 * logits[:, :1].astype(x.dtype),
        linear="x",
        dtypes=NARROW,
    ),
    "moe": Operation(cutjax.moe, "x logits g u d", oracles.moe, {"nn": "", "nt": "g u d"}, linear="d", dtypes=NARROW),
    "moe, all": Operation(
        lambda x, logits, g, u, d, bias: cutjax.moe(
            x, logits, g, u, d, 3, renormalize=False, selection_bias=bias, save="recompute", group_offset=0
        ),
        "x logits g u d bias",
        lambda x, logits, g, u, d, bias: oracles.moe(x, logits, g, u, d, 3, renormalize=False, selection_bias=bias),
        dtypes=NARROW,
    ),
    "moe, loads": Operation(
        lambda x, logits, g, u, d, layout="nn": cutjax.moe(x, logits, g, u, d, layout=layout, gather="loads"),
        "x logits g u d",
        oracles.moe,
        {"nn": "", "nt": "g u d"},
        linear="d",
        dtypes=NARROW,
    ),
    "load_balance_loss": Operation(cutjax.load_balance_loss, "logits", oracles.load_balance_loss, dtypes=()),
    "load_balance_loss, all": Operation(
        lambda logits, bias: cutjax.load_balance_loss(logits, 3, scoring="sigmoid", selection_bias=bias),
        "logits bias",
        lambda logits, bias: oracles.load_balance_loss(logits, 3, "sigmoid", bias),
        dtypes=(),
    ),
    "router_z_loss": Operation(
        cutjax.router_z_loss,
        "logits",
        lambda logits: (jax.nn.logsumexp(logits, -1) ** 2).mean(),
        dtypes=(),
    ),
}
# (name, layout) of every operation, and of its other layouts.
FORMS = [(name, layout) for name, op in OPERATIONS.items() for layout in op.layouts or ("",)]


def telling(form: tuple[str, str]) -> bool:
    """True if the layout is the first, or that of a product: other layouts of layers are those of their products."""
    name, layout = form
    op = OPERATIONS[name]
    return layout == next(iter(op.layouts), "") or " " in op.linear or " " not in op.operands


def main(name: str) -> bool:
    """True if the entry is its operation's first, of which the others are options."""
    return "," not in name


def in_turn(turn: int) -> list[str]:
    """The operations, and every other option: of two tests that repeat much, each has one half of the options."""
    options = [name for name in OPERATIONS if not main(name)]
    return [name for name in OPERATIONS if main(name) or options.index(name) % 2 == turn]


def operands(name: str) -> list[jax.Array]:
    return [jax.device_put(_numbers()[x]) for x in OPERATIONS[name].operands.split()]


def loss(name: str):
    """A scalar of everything the operation returns."""

    def scalar(*args):
        outs = jax.tree.leaves(OPERATIONS[name].fn(*args))
        return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in outs)

    return scalar


def differentiable(args) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))


def of_floats(fn: Callable[..., Any], args) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """The function of the operands that are differentiated alone, and those."""
    wrt = differentiable(args)

    def of(*xs):
        found = dict(zip(wrt, xs, strict=True))
        return fn(*(found.get(i, x) for i, x in enumerate(args)))

    return of, tuple(args[i] for i in wrt)


def both(name: str):
    """Values and gradients, under jit."""
    found = uses(name)
    return jax.jit(lambda *args: (found["value"](*args), found["gradient"](*args)))


@functools.cache
def expected(name: str) -> Any:
    """Values and gradients of the entry's operands, on one device: compiled for once by all that compare with them."""
    return both(name)(*operands(name))


def uses(name: str) -> dict[str, Callable[..., Any]]:
    """Everything done with an operation: its values, its gradients in both modes, and batches of them."""
    fn, args = OPERATIONS[name].fn, operands(name)
    wrt = differentiable(args)

    def forward(*args):
        of, floats = of_floats(fn, args)
        return jax.jvp(of, floats, floats)[1]

    return {
        "value": fn,
        "gradient": jax.grad(loss(name), wrt),
        "tangent": forward,
        "batch of values": lambda *args: jax.vmap(fn)(*(jnp.stack([x, x]) for x in args)),
        "batch of one": lambda *args: jax.vmap(fn, [0, *(None for _ in args[1:])])(
            jnp.stack([args[0], args[0]]), *args[1:]
        ),
        "batch of gradients": lambda *args: jax.vmap(jax.grad(loss(name), wrt))(*(jnp.stack([x, x]) for x in args)),
    }
