"""The cases of ``python -m cutjax bench``: what is computed, by us and in plain JAX, in the order of measuring."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from cutjax.binding import walk
from cutjax.tuning import measure

KINDS = ("product", "fused", "grouped", "convolution", "low precision", "model")


class Array(NamedTuple):
    """An argument of a case: normal numbers times a scale."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    scale: float = 1.0


def weight(*shape: int) -> Array:
    """Returns weights that keep the variance of what they multiply: their last axis is that of the result."""
    return Array(shape, "bfloat16", math.prod(shape[:-1]) ** -0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """One computation.

    Attributes:
      kind: of `KINDS`.
      name: unique.
      ours: a function of the arrays; where it is one product, of a ``config=`` too.
      plain: the same in plain JAX.
      arrays: the arguments.
      rows: of each group, an argument after the arrays; empty where there are no groups.
      wide: ``plain`` with results in the dtype of its sums, where a kernel's result is to be that, rounded once. None
        where either rounds on its way.
      close: whether results are held to plain JAX's element by element: those of many products are by their norms.
      rate: the name that a Device has for the rate of the product; "" where the case tells none.
      precision: of the product, as in ``cutjax.gemm``.
      brief: False for a size between others, which is in the file and not in the table.
    """

    kind: str
    name: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    arrays: tuple[Array, ...]
    rows: tuple[int, ...] = ()
    wide: Callable[..., Any] | None = None
    close: bool = True
    rate: str = ""
    precision: Any = None
    brief: bool = True

    @property
    def dtype(self) -> str:
        """The dtype of the first array."""
        return self.arrays[0].dtype

    @property
    def x64(self) -> bool:
        """True if JAX is to compute in 64 bits."""
        return self.dtype in ("float64", "complex128")

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of the arguments."""
        found = [jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype)) for array in self.arrays]
        return [*found, jax.ShapeDtypeStruct((len(self.rows),), jnp.int32)] if self.rows else found

    def inputs(self, seed: jax.Array, integers: bool) -> list[jax.Array]:
        """Returns the arguments; of small integers, of which every sum is exact, where results are to be equal."""
        made = []
        for i, (shape, dtype, scale) in enumerate(self.arrays):
            of_array = seed * np.uint32(len(self.arrays)) + np.uint32(i)
            exact = integers and self.wide is not None
            x = measure.random_array(of_array, shape, jnp.dtype(dtype), exact)
            made.append(x if exact or scale == 1 else x * jnp.asarray(scale, x.dtype))
        return [*made, jnp.array(self.rows, jnp.int32)] if self.rows else made

    def found(self, backend: str) -> list[walk.Found]:
        """Returns the products of ours as a program has them."""
        with cutjax.use_backend(backend):
            return walk.products(self.ours, self.avals(), {}, "cuda")[0]


# Products.

_PRESETS = lax.DotAlgorithmPreset
# Every way to multiply, by the name that a Device has for its rate; dtypes where they are not of that name.
_WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {},
    "float16_f16": {"dtype": "float16", "precision": _PRESETS.F16_F16_F16},
    "tf32": {"dtype": "float32", "precision": _PRESETS.TF32_TF32_F32},
    "tf32x3": {"dtype": "float32", "precision": _PRESETS.TF32_TF32_F32_X3},
    "bf16x3": {"dtype": "float32", "precision": _PRESETS.BF16_BF16_F32_X3},
    "bf16x6": {"dtype": "float32", "precision": _PRESETS.BF16_BF16_F32_X6},
    "bf16x9": {"dtype": "float32", "precision": _PRESETS.BF16_BF16_F32_X9},
    "float32": {"precision": "highest"},
    "float64": {},
    "complex64": {"precision": "highest"},
    "complex128": {},
    "int8": {"out": "int32"},
    "uint8": {"out": "uint32"},
    "float8_e4m3fn": {"out": "bfloat16"},
    "float8_e5m2": {"out": "bfloat16", "precision": _PRESETS.ANY_F8_ANY_F8_F32},
}


def product(rate: str, *sizes: int, weights: str = "", rows: tuple[int, ...] = (), brief: bool = True) -> Case:
    """Returns the case of a product, plain or of rows in groups.

    Args:
      rate: of `_WAYS`.
      sizes: m, n, k, after those of a batch.
      weights: dtype of b, by default a's.
      rows: of each group.
      brief: as the case has it.
    """
    *batch, m, n, k = sizes
    way = {"dtype": rate, "precision": None, **_WAYS[rate]}
    dtype, how = way["dtype"], {"precision": way["precision"]}
    out, made = way.get("out", dtype), weights or dtype
    a, b = Array((*batch, m, k), dtype), Array((*((len(rows),) if rows else batch), k, n), made)
    name = f"{'x'.join(map(str, sizes))}:{rate}" + f" x {made}" * bool(weights) + f":{len(rows)} groups" * bool(rows)
    multiply: Any = lax.ragged_dot if rows else jnp.matmul

    def plain(a: jax.Array, b: jax.Array, *groups: jax.Array, dtype: str = out) -> jax.Array:
        return multiply(a, b.astype(a.dtype), *groups, preferred_element_type=jnp.dtype(dtype), **how)

    def wide(*arrays: jax.Array) -> jax.Array:
        return plain(*arrays, dtype="float32" if jnp.dtype(out).itemsize < 4 else out).astype(out)

    ours = functools.partial(cutjax.grouped_gemm if rows else cutjax.gemm, out_dtype=out, **how)
    kind = "grouped" if rows else "low precision" if jnp.dtype(made).itemsize == 1 else "product"
    told = "" if weights else rate
    return Case(kind, name, ours, plain, (a, b), rows, wide, rate=told, precision=way["precision"], brief=brief)


def cube(rate: str, side: int, brief: bool = True) -> Case:
    """Returns the case of a product of square matrices."""
    return product(rate, side, side, side, brief=brief)


# Fused.


def _mixed(epilogue: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an epilogue in float32, whatever the dtype of its operands."""
    return lambda acc, *operands: epilogue(acc, *(x.astype(acc.dtype) for x in operands))


def epilogue(name: str, m: int, n: int, k: int, function: Callable[..., Any], *operands: Array) -> Case:
    """Returns the case of a function of a product and of further arrays."""

    def ours(x: jax.Array, w: jax.Array, *rest: jax.Array, **how: Any) -> jax.Array:
        return cutjax.gemm(x, w, epilogue=_mixed(function), operands=rest, **how)

    def plain(x: jax.Array, w: jax.Array, *rest: jax.Array) -> jax.Array:
        return function(x @ w, *rest)

    return Case("fused", f"{m}x{n}x{k} {name}", ours, plain, (Array((m, k)), weight(k, n), *operands))


def gated(m: int, n: int, k: int) -> Case:
    """Returns the case of a product that is gated by another of the same left operand."""

    def combine(g: jax.Array, u: jax.Array) -> jax.Array:
        return jax.nn.silu(g) * u

    def ours(x: jax.Array, g: jax.Array, u: jax.Array, **how: Any) -> jax.Array:
        return cutjax.gemm(x, (g, u), epilogue=combine, **how)

    def plain(x: jax.Array, g: jax.Array, u: jax.Array) -> jax.Array:
        return combine(x @ g, x @ u)

    return Case("fused", f"{m}x{n}x{k} silu(x@g)*(x@u)", ours, plain, (Array((m, k)), weight(k, n), weight(k, n)))


# Convolutions, channels last.


def convolved(name: str, x: tuple[int, ...], w: tuple[int, ...], strides: int = 1, dilation: int = 1) -> Case:
    """Returns the case of a convolution, of as many groups of channels as the weights say."""
    axes = len(x) - 2
    groups = x[-1] // w[-2]
    spatial = {1: "W", 2: "HW"}[axes]
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    common: dict[str, Any] = {"rhs_dilation": (dilation,) * axes, "feature_group_count": groups}
    common |= {"window_strides": (strides,) * axes, "padding": "SAME"}
    plain = functools.partial(lax.conv_general_dilated, dimension_numbers=numbers, **common)
    return Case("convolution", name, functools.partial(cutjax.conv, **common), plain, (Array(x), weight(*w)))


# Models: a result, and gradients for its cotangent.


def _gradient(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the result of a function of some arrays, and their gradients for its cotangent, the last argument.

    The cotangent comes when the result is there, as in a network.
    """

    def both(*arrays: jax.Array) -> Any:
        y, pull = jax.vjp(fn, *arrays[:-1])
        y, cotangent = lax.optimization_barrier((y, arrays[-1]))
        return y, *pull(cotangent)

    return both


def swiglu(tokens: int, hidden: int, width: int) -> Case:
    """Returns the case of a gated network of two layers, forward and backward."""

    def ours(x: jax.Array, g: jax.Array, u: jax.Array, d: jax.Array) -> jax.Array:
        return cutjax.mlp(x, u, d, gate=g, activation=jax.nn.silu)

    def plain(x: jax.Array, g: jax.Array, u: jax.Array, d: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ g) * (x @ u)) @ d

    into = weight(width, hidden)
    arrays = (Array((tokens, width)), into, into, weight(hidden, width), Array((tokens, width)))
    name = f"SwiGLU {tokens}x{hidden}x{width}, gradient"
    return Case("model", name, _gradient(ours), _gradient(plain), arrays, close=False)


def block(batch: int, time: int, width: int, heads: int, kv_heads: int, hidden: int) -> Case:
    """Returns the case of a block like Llama's, forward and backward: in plain JAX, and the same by ``cutjax.fuse``."""
    size = width // heads

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

    def turned(x: jax.Array) -> jax.Array:
        rates = 10000.0 ** (-jnp.arange(size // 2, dtype=jnp.float32) / (size // 2))
        angles = jnp.arange(time, dtype=jnp.float32)[:, None, None] * rates
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def plain(x: jax.Array, *params: jax.Array) -> jax.Array:
        before, wq, wk, wv, wo, after, g, u, d = params
        y = norm(x, before)
        q, k, v = ((y @ w).reshape(batch, time, -1, size) for w in (wq, wk, wv))
        mixed = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ wo
        y = norm(x, after)
        return x + (jax.nn.silu(y @ g) * (y @ u)) @ d

    square, few, into = weight(width, width), weight(width, kv_heads * size), weight(width, hidden)
    x = Array((batch, time, width))
    params = (Array((width,)), square, few, few, square, Array((width,)), into, into, weight(hidden, width))
    both = _gradient(plain)
    return Case("model", "Llama block, gradient", cutjax.fuse(both), both, (x, *params, x), close=False)


# Rows of each group, uneven as tokens of experts are.
_MANY, _FEW = (1107, 519, 730, 1233, 620, 1555, 803, 1625), (11, 4, 11, 18, 3, 35, 20, 26)


def _of_kind() -> Iterator[tuple[Case, ...]]:
    """Yields the cases of each kind, the most telling first."""
    vector, matrix = Array((4096,)), Array((4096, 4096))
    yield (
        cube("bfloat16", 8192),
        product("bfloat16", 16, 8192, 8192),
        cube("tf32", 8192),
        product("bfloat16", 1000, 1001, 1003),
        cube("float32", 4096),
        cube("float64", 4096),
        cube("float16", 8192),
        product("bfloat16", 4096, 1024, 4096),
        product("bfloat16", 64, 512, 512, 128),
        product("float32", 4096, 32, 32, 32),
    )
    yield (
        epilogue("gelu(x@w+b)", 4096, 4096, 4096, lambda y, b: jax.nn.gelu(y + b), vector),
        gated(2048, 2048, 2048),
        epilogue("gelu(x@w+b)", 16384, 1024, 1024, lambda y, b: jax.nn.gelu(y + b), Array((1024,))),
        epilogue("s*x@w+b+r", 4096, 4096, 4096, lambda y, s, b, r: y * s + b + r, Array(()), vector, matrix),
    )
    yield (
        product("bfloat16", sum(_MANY), 14336, 4096, rows=_MANY),
        product("float32", 8192, 2048, 1024, rows=(1024,) * 8),
        product("bfloat16", sum(_FEW), 14336, 4096, rows=_FEW),
    )
    yield (
        convolved("resnet50 3x3 /2, 32 images", (32, 28, 28, 256), (3, 3, 256, 256), strides=2),
        convolved("convnext 7x7 each, 64 images", (64, 14, 14, 384), (7, 7, 1, 384)),
        convolved("hifigan 11 taps by 5, 16 signals", (16, 8192, 256), (11, 256, 256), dilation=5),
        convolved("sd-unet 3x3, 16 images", (16, 8, 8, 2560), (3, 3, 2560, 1280)),
    )
    yield (
        cube("int8", 2048),
        product("bfloat16", 16, 8192, 8192, weights="int8"),
        cube("float8_e4m3fn", 8192),
        cube("int8", 8192),
    )
    yield swiglu(2048, 8192, 2048), block(2, 2048, 2048, 32, 8, 8192)


def _ordered() -> Iterator[Case]:
    """Yields one case of each kind, then the next of each; then sizes between others, by which the model is judged."""
    for turn in itertools.zip_longest(*_of_kind()):
        yield from filter(None, turn)
    for rate in ("bfloat16", "tf32", "float32", "float64"):
        yield from (cube(rate, side, brief=False) for side in (512, 2048))
    yield from (cube("int8", 512, brief=False), cube("float8_e4m3fn", 2048, brief=False))


CASES = tuple(_ordered())
WAYS = tuple(cube(rate, 4096) for rate in _WAYS)
