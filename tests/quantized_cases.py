"""Random products of quantized operands, each with the float64 product of what was quantized and a bound of the error.

A case is drawn from its seed alone: the operation, dtypes, blocks, scales, zero points, layouts, batch axes and groups,
and what it is called through. ``check`` runs it, on whatever device there is.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from cutjax import Quantized

OPERATIONS = ("gemm", "gemm", "fused", "dot_general", "grouped_gemm", "grouped_outer", "ragged_dot", "mlp", "conv")
INTEGERS, FLOATS = ("int8", "uint8", "int4", "uint4"), ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
SCALES = ("float32", "float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn")
ARRAYS = ("bfloat16", "bfloat16", "float16", "float32")
THROUGH = ("jit", "jit", "vmap", "checkpoint", "scan", "gradient")
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-21}


class Case(NamedTuple):
    """A product: ``call(*operands)`` beside ``exact``, in float64, each number within ``bound`` of it."""

    name: str
    call: Any
    operands: tuple[Any, ...]
    exact: np.ndarray
    bound: np.ndarray


def wide(q: Any) -> np.ndarray:
    """An operand in float64, by numpy alone."""
    if not isinstance(q, Quantized):
        return np.asarray(q, np.float64)
    values = np.asarray(q.values, np.float64)
    zero = 0.0 if q.zero_point is None else _repeated(q.zero_point, values.shape)
    return (values - zero) * _repeated(q.scale, values.shape)


def _repeated(x: Any, shape: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    for axis, size in enumerate(shape):
        x = np.repeat(x, size // x.shape[axis], axis)
    return x


def _block(rng: Any, size: int) -> int:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return int(rng.choice([1, -1, -1, int(rng.choice(divisors)), int(rng.choice(divisors))]))


def operand(rng: Any, shape: tuple[int, ...], quantized: bool, array: str) -> Any:
    """An array, or one quantized by a block, with scales of a dtype, and zero points or none, in any of its forms."""
    x = rng.standard_normal(shape) * (np.exp(rng.standard_normal(shape)) if rng.random() < 0.3 else 1)
    x = jnp.asarray(x, jnp.float32)
    if not quantized:
        return x.astype(array)
    dtype = str(rng.choice(INTEGERS if rng.random() < 0.55 else FLOATS))
    zero = dtype in INTEGERS and (dtype[0] == "u" or rng.random() < 0.25)
    block = _block(rng, shape[-2]), _block(rng, shape[-1])
    q = cutjax.quantize(x, dtype, block=block, scale_dtype=str(rng.choice(SCALES)), zero_point=bool(zero))
    if rng.random() < 0.15 and q.scale.size == q.scale.shape[-1]:
        q = Quantized(q.values, q.scale.reshape(-1)[-q.scale.shape[-1] :], None if not zero else q.zero_point)
    return q


def _turned(x: Any) -> Any:
    return jax.tree.map(lambda y: jnp.swapaxes(y, -1, -2) if y.ndim > 1 else y.reshape(-1, 1), x)


def _dtype(x: Any) -> str:
    return "float32" if isinstance(x, Quantized) else x.dtype.name


def _multiplied(a: Any, b: Any) -> float:
    """The rounding of factors: of one quantized that meets an array, to the array's dtype.

    On a GPU sums of 128 products of float8 have 14 bits.
    """
    if _both(a, b) and jax.default_backend() == "gpu" and all(x.values.dtype.name in FLOATS for x in (a, b)):
        return 2.0**-12
    return min(EPS[name] for name in (_dtype(a), _dtype(b))) if _both(a, b) else max(EPS[_dtype(a)], EPS[_dtype(b)])


def _both(a: Any, b: Any) -> bool:
    return isinstance(a, Quantized) and isinstance(b, Quantized)


def draw(seed: int) -> Case:
    """Returns the case of a seed."""
    rng = np.random.default_rng((29, seed))
    kind, array = str(rng.choice(OPERATIONS)), str(rng.choice(ARRAYS))
    m, k, n = (int(rng.choice([8, 16, 24, 40, 64, 96, 128, 160])) for _ in range(3))
    of_a, of_b = ((True, True), (False, True), (True, False))[int(rng.choice([0, 1, 1, 2]))]
    make = {"fused": _gemm, "gemm": _gemm, "dot_general": _dot_general, "mlp": _mlp, "conv": _conv}.get(kind, _grouped)
    call, operands, exact, size, eps = make(rng, kind, array, (m, k, n), of_a, of_b)
    out = str(rng.choice(["", "float32", "bfloat16"]))
    name = f"{seed}: {kind}, {', '.join(_shown(x) for x in operands)}, out {out or 'default'}"
    run = functools.partial(call, out_dtype=out or None)
    rounding = 2.0**-7 if out != "float32" else 2.0**-21
    return Case(name, run, operands, exact, eps * size + rounding * np.abs(exact) + 1e-30)


def _shown(x: Any) -> str:
    if not isinstance(x, Quantized):
        return f"{x.dtype}{list(x.shape)}"
    zero = "" if x.zero_point is None else " zero"
    return f"{x.values.dtype}{list(x.shape)} {x.scale.dtype}{list(x.scale.shape)}{zero}"


def _gemm(rng: Any, kind: str, array: str, sizes: Any, of_a: bool, of_b: bool) -> Any:
    m, k, n = sizes
    batches = ((), ()), ((3,), ()), ((3,), (3,)), ((), (2,)), ((2, 1), (3,))
    batch = batches[int(rng.choice([0, 0, 0, 1, 2, 3, 4]))]
    a, b = operand(rng, (*batch[0], m, k), of_a, array), operand(rng, (*batch[1], k, n), of_b, array)
    layout = str(rng.choice(["nn", "nt", "tn", "tt"]))
    exact, size = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b))
    operands = tuple(_turned(x) if turn else x for x, turn in ((a, layout[0] == "t"), (b, layout[1] == "t")))
    if kind == "gemm":
        return functools.partial(cutjax.gemm, layout=layout), operands, exact, size, _multiplied(a, b)
    bias = jnp.asarray(rng.standard_normal(n), jnp.float32)

    def call(a: Any, b: Any, **how: Any) -> Any:
        return cutjax.gemm(a, b, layout=layout, epilogue=lambda acc, c: jnp.tanh(acc) + c, operands=(bias,), **how)

    return call, operands, np.tanh(exact) + np.asarray(bias), size + 2.0**-18, _multiplied(a, b)


def _dot_general(rng: Any, kind: str, array: str, sizes: Any, of_a: bool, of_b: bool) -> Any:
    m, k, n = sizes
    a, b = operand(rng, (2, m, k), of_a, array), operand(rng, (3, k, n), of_b, array)
    numbers, text = [
        ((((2,), (1,)), ((), ())), "amk,bkn->ambn"),
        ((((2,), (2,)), ((), ())), "amk,bnk->ambn"),
        ((((1, 2), (1, 2)), ((), ())), "axy,bxy->ab"),
    ][int(rng.integers(3))]
    if "nk" in text:
        b = _turned(b)
    if "xy" in text:
        b = operand(rng, (3, m, k), of_b, array)

    def call(a: Any, b: Any, out_dtype: Any) -> Any:
        return cutjax.dot_general(a, b, numbers, preferred_element_type=out_dtype)

    x, y = wide(a), wide(b)
    return call, (a, b), np.einsum(text, x, y), np.einsum(text, np.abs(x), np.abs(y)), _multiplied(a, b)


def _grouped(rng: Any, kind: str, array: str, sizes: Any, of_a: bool, of_b: bool) -> Any:
    m, k, n = sizes
    groups = int(rng.integers(1, 5))
    ends = np.sort(rng.integers(0, m + 1, groups))
    starts = np.concatenate([[0], ends[:-1]])
    counts = jnp.asarray(ends - starts, jnp.int32)
    x = operand(rng, (m, k), of_a, array)
    if kind == "grouped_outer":
        dy = operand(rng, (m, n), of_b, array)
        pairs = [(wide(x)[s:e].T, wide(dy)[s:e]) for s, e in zip(starts, ends, strict=True)]
        exact, size = (np.stack([f(a) @ f(b) for a, b in pairs]) for f in (lambda y: y, np.abs))

        def outer(x: Any, dy: Any, **how: Any) -> Any:
            return cutjax.grouped_outer(x, dy, counts, **how)

        return outer, (x, dy), exact, size, _multiplied(x, dy)
    w = operand(rng, (groups, k, n), of_b, array)
    exact, size = np.zeros((m, n)), np.zeros((m, n))
    for i, (s, e) in enumerate(zip(starts, ends, strict=True)):
        exact[s:e], size[s:e] = wide(x)[s:e] @ wide(w)[i], np.abs(wide(x))[s:e] @ np.abs(wide(w))[i]
    layout = str(rng.choice(["nn", "nt"]))

    def call(x: Any, w: Any, out_dtype: Any) -> Any:
        if kind == "ragged_dot":
            return cutjax.ragged_dot(x, w, counts, preferred_element_type=out_dtype)
        return cutjax.grouped_gemm(x, w if layout == "nn" else _turned(w), counts, layout=layout, out_dtype=out_dtype)

    return call, (x, w), exact, size, _multiplied(x, w)


def _mlp(rng: Any, kind: str, array: str, sizes: Any, of_a: bool, of_b: bool) -> Any:
    m, k, n = sizes
    x, w, v = (
        operand(rng, shape, q, array)
        for shape, q in zip(((m, k), (k, n), (n, k)), (of_a and of_b, True, of_b), strict=True)
    )
    h = np.tanh(wide(x) @ wide(w))
    inner = np.abs(wide(x)) @ np.abs(wide(w)) + 1

    def call(x: Any, w: Any, v: Any, out_dtype: Any) -> Any:
        return cutjax.mlp(x, w, v, activation=jnp.tanh, out_dtype=out_dtype)

    # What lies between the products is rounded to the arrays' dtype, or to the scales'.
    return call, (x, w, v), h @ wide(v), inner @ np.abs(wide(v)), 2.0**-7


def _conv(rng: Any, kind: str, array: str, sizes: Any, of_a: bool, of_b: bool) -> Any:
    _, c, n = (min(size, 24) for size in sizes)
    image, window = (int(x) for x in rng.choice([3, 5, 6], 2))
    x, w = rng.standard_normal((2, image + 3, image, c)), rng.standard_normal((window, 3, c, n))
    x, w = (jnp.asarray(y, jnp.float32) for y in (x, w))

    def of(y: Any, quantized: bool, axis: int) -> Any:
        if not quantized:
            return y.astype(array)
        dtype = str(rng.choice(["int8", "int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]))
        q = cutjax.quantize(y.reshape(1, -1), dtype)
        shape = [size if i == axis and rng.random() < 0.7 else 1 for i, size in enumerate(y.shape)]
        scale = jnp.asarray(rng.random(shape) / 100 + 0.01, str(rng.choice(["float32", "bfloat16"])))
        return Quantized(q.values.reshape(y.shape), scale)

    x, w = of(x, of_a, int(rng.choice([0, 0, 3]))), of(w, of_b, int(rng.choice([3, 3, 2])))
    strides = int(rng.integers(1, 3))

    def convolved(a: Any, b: Any) -> np.ndarray:
        pads = [((window - 1) // 2, window // 2), (1, 1)]
        a = np.pad(a, [(0, 0), *pads, (0, 0)])
        rows, columns = (1 + (a.shape[i + 1] - b.shape[i]) // strides for i in range(2))
        out = np.zeros((a.shape[0], rows, columns, b.shape[-1]))
        for i in range(b.shape[0]):
            for j in range(b.shape[1]):
                part = a[:, i : i + strides * rows : strides, j : j + strides * columns : strides]
                out += part[:, :rows, :columns] @ b[i, j]
        return out

    padding = [((window - 1) // 2, window // 2), (1, 1)]

    def call(x: Any, w: Any, out_dtype: Any) -> Any:
        return cutjax.conv(x, w, window_strides=strides, padding=padding, out_dtype=out_dtype)

    exact, size = convolved(wide(x), wide(w)), convolved(np.abs(wide(x)), np.abs(wide(w)))
    return call, (x, w), exact, size, _multiplied(x, w)


def check(seed: int) -> None:
    """Asserts that a case is within its bound, through jit or a transformation, and that its gradient is the formula's.

    The gradient is that of a random linear function in the operand that is an array. Products are in "highest"
    precision: a GPU's default for float32 is TF32.
    """
    with jax.default_matmul_precision("highest"):
        _check(draw(seed), seed)


def _check(case: Case, seed: int) -> None:
    through = THROUGH[seed % len(THROUGH)]
    arrays = [i for i, x in enumerate(case.operands) if not isinstance(x, Quantized)]
    if through == "vmap":
        found = jax.jit(jax.vmap(lambda *xs: case.call(*xs)))(*jax.tree.map(lambda x: jnp.stack([x, x]), case.operands))
        np.testing.assert_array_equal(*(np.asarray(y, np.float64) for y in found), err_msg=case.name)
        found = found[1]
    elif through == "scan":
        stacked = jax.tree.map(lambda x: x[None], case.operands)
        found = jax.jit(lambda xs: jax.lax.scan(lambda _, x: (None, case.call(*x)), None, xs)[1])(stacked)[0]
    elif through == "checkpoint":
        found = jax.jit(jax.checkpoint(case.call))(*case.operands)
    else:
        found = jax.jit(case.call)(*case.operands)
    error = np.abs(np.asarray(found, np.float64) - case.exact)
    assert found.shape == case.exact.shape, case.name
    assert (error <= case.bound).all(), f"{case.name}: {(error / case.bound).max()} of the bound"
    if through != "gradient" or not arrays:
        return

    def loss(call: Any, i: int, x: Any) -> jax.Array:
        args = [x if j == i else y for j, y in enumerate(case.operands)]
        return (call(*args).astype(jnp.float32) * weight).sum()

    def plain(*args: Any, out_dtype: Any = None) -> Any:
        wide_args = [x.dequantize() if isinstance(x, Quantized) else x.astype(jnp.float32) for x in args]
        return case.call(*wide_args, out_dtype=jnp.float32)

    (i,) = arrays[:1]
    weight = jnp.asarray(np.random.default_rng(seed).standard_normal(case.exact.shape), jnp.float32)
    ours, exact = (jax.jit(jax.grad(functools.partial(loss, f, i)))(case.operands[i]) for f in (case.call, plain))
    ours, exact = (np.asarray(y, np.float64) for y in (ours, exact))
    off = np.linalg.norm(ours - exact) / max(np.linalg.norm(exact), 1e-30)
    assert off < 0.02, f"{case.name}: its gradient is {off} off"
