"""Quantized operands of the arrays in checkpoints that others made: GPTQ, AWQ, gpt-oss's mxfp4, DeepSeek's float8.

Functions of arrays, whatever read the file. Matrices of 4 bits become ``[k, n]``, as kernels read them, those of float8
stay ``[n, k]``; axes before them are layers or experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cutjax.ops.quantized import Quantized
from cutjax.primitives.arrays import matrix

# The place in a word of each of the 8 columns that AWQ packs into it: evens before odds, so that a mask and one shift
# give its kernels pairs of neighbours.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
IN_ORDER = tuple(range(8))
DEEPSEEK_BLOCK = 128


def gptq(
    qweight: ArrayLike,
    scales: ArrayLike,
    qzeros: ArrayLike | None = None,
    g_idx: ArrayLike | None = None,
    *,
    version: int = 1,
) -> Quantized:
    """Weights of 4 bits as GPTQ's tools save them, ``(value - zero) * scale`` in groups along k.

    Args:
      qweight: int32 ``[..., k / 8, n]``: 8 neighbours along k in a word, the first in its lowest bits.
      scales: floats ``[..., k / group, n]``.
      qzeros: int32 ``[..., k / group, n / 8]``: zero points, 8 neighbours along n in a word. None says that all are 8,
        as in symmetric checkpoints: the values become int4 without zero points, which kernels read.
      g_idx: int32 ``[..., k]``: the group of each row. They must be in order, and are looked at: no tracer is taken.
      version: of the format. 1 stores zero points less one, in 4 bits; 2 ("gptq_v2") as they are.

    Returns:
      `Quantized` ``[..., k, n]``, for layout "nn": uint4 with zero points, or int4 with scales in float32 for float16.

    Raises:
      TypeError: if an array has another dtype.
      ValueError: if the shapes do not fit together, or the groups are not in order (``desc_act`` of its configuration):
        sort the rows by group then, and the columns of x alike.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> words, scales = jnp.full((16, 32), 0x76543210, jnp.int32), jnp.ones((1, 32), jnp.float16)
      >>> q = cutjax.formats.gptq(words, scales, jnp.full((1, 4), 0x77777777, jnp.int32))
      >>> q.values.dtype.name, q.shape, q.dequantize()[:8, 0].tolist()
      ('uint4', (128, 32), [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0])
    """
    where = "formats.gptq"
    if version not in (1, 2):
        raise ValueError(f"{where}: version must be 1 or 2, got {version!r}")
    words, scales = _array(qweight, "qweight", "int32", where), _array(scales, "scales", jnp.floating, where)
    *batch, packed, n = words.shape
    shape = (*batch, 8 * packed, n)
    _check_groups(scales, "scales", shape, where)
    if g_idx is not None:
        k, groups = shape[-2], scales.shape[-2]
        of_rows = np.asarray(g_idx)
        if of_rows.shape != (*batch, k):
            raise ValueError(f"{where}: g_idx is {of_rows.shape}, expected {(*batch, k)}, a group for each row")
        if (of_rows != np.arange(k) // (k // groups)).any():
            raise ValueError(
                f"{where}: g_idx is not in order: expected row i in group i // {k // groups}. The checkpoint was made "
                "with desc_act: sort its rows by g_idx, and the columns of x alike"
            )
    values = _unpacked(words, -2, IN_ORDER)
    if qzeros is None:
        # Less 8, in two's complement. Kernels in bfloat16 read no scales in float16, which are float32 exactly.
        wide = scales.astype(jnp.float32) if scales.dtype == jnp.float16 else scales
        return Quantized((values ^ jnp.uint4(8)).view(jnp.int4), wide)
    return Quantized(values, scales, _zeros(qzeros, scales, IN_ORDER, version == 1, where))


def awq(qweight: ArrayLike, scales: ArrayLike, qzeros: ArrayLike) -> Quantized:
    """Weights of 4 bits as AWQ's tools save them ("gemm"), ``(value - zero) * scale`` in groups along k.

    Args:
      qweight: int32 ``[..., k, n / 8]``: 8 neighbours along n in a word, the columns 0, 2, 4, 6, 1, 3, 5, 7 from its
        lowest bits on.
      scales: floats ``[..., k / group, n]``.
      qzeros: int32 ``[..., k / group, n / 8]``: zero points, packed like the weights.

    Returns:
      `Quantized` ``[..., k, n]`` of uint4 with zero points, for layout "nn".

    Raises:
      TypeError: if an array has another dtype.
      ValueError: if the shapes do not fit together.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> words, zeros = jnp.full((128, 4), 0x75316420, jnp.int32), jnp.zeros((1, 4), jnp.int32)
      >>> q = cutjax.formats.awq(words, jnp.ones((1, 32), jnp.float16), zeros)
      >>> q.shape, q.dequantize()[0, :8].tolist()
      ((128, 32), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    """
    where = "formats.awq"
    words, scales = _array(qweight, "qweight", "int32", where), _array(scales, "scales", jnp.floating, where)
    _check_groups(scales, "scales", (*words.shape[:-1], 8 * words.shape[-1]), where)
    return Quantized(_unpacked(words, -1, AWQ_ORDER), scales, _zeros(qzeros, scales, AWQ_ORDER, False, where))


def mxfp4(blocks: ArrayLike, scales: ArrayLike) -> Quantized:
    """Weights of float4_e2m1fn in groups of 32 along k, as gpt-oss has them; scales are powers of two.

    The matrices are transposed, and the scales become bfloat16, which has the same exponents: kernels read that.

    Args:
      blocks: uint8 ``[..., n, k / 32, 16]``: two values in a byte, the first in its lower bits.
      scales: uint8 ``[..., n, k / 32]``: exponents plus 127.

    Returns:
      `Quantized` ``[..., k, n]`` with scales in bfloat16, for layout "nn".

    Raises:
      TypeError: if an array has another dtype.
      ValueError: if the shapes do not fit together.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> blocks, scales = jnp.full((8, 2, 16), 0x42, jnp.uint8), jnp.full((8, 2), 128, jnp.uint8)
      >>> q = cutjax.formats.mxfp4(blocks, scales)
      >>> q.shape, q.dequantize()[:4, 0].tolist(), cutjax.gemm(jnp.ones((4, 64)), q).shape
      ((64, 8), [2.0, 4.0, 2.0, 4.0], (4, 8))
    """
    where = "formats.mxfp4"
    data, scales = _array(blocks, "blocks", "uint8", where), _array(scales, "scales", "uint8", where)
    if data.shape != (*scales.shape, 16):
        raise ValueError(
            f"{where}: blocks are {data.shape}, expected {(*scales.shape, 16)} beside scales {scales.shape}"
        )
    return Quantized(*_of_mxfp4(data, scales))


def deepseek_fp8(weight: ArrayLike, weight_scale_inv: ArrayLike) -> Quantized:
    """Weights of float8_e4m3fn in squares of 128, as DeepSeek-V3 has them: ``weight * weight_scale_inv``.

    The squares at the end of an axis that 128 does not divide are smaller; the blocks of the operand are then the
    greatest that divide both.

    Args:
      weight: float8_e4m3fn ``[..., n, k]``.
      weight_scale_inv: float32 ``[..., ceil(n / 128), ceil(k / 128)]``; a factor, in spite of its name.

    Returns:
      `Quantized` ``[..., n, k]``, for layout "nt".

    Raises:
      TypeError: if an array has another dtype.
      ValueError: if the shapes do not fit together.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> weight, scale = jnp.ones((576, 256), jnp.float8_e4m3fn), jnp.full((5, 2), 0.5)
      >>> q = cutjax.formats.deepseek_fp8(weight, scale)
      >>> q.scale.shape, q.dequantize()[0, 0].item()
      ((9, 2), 0.5)
    """
    where = "formats.deepseek_fp8"
    values = _array(weight, "weight", "float8_e4m3fn", where)
    scale = _array(weight_scale_inv, "weight_scale_inv", jnp.floating, where)
    expected = (*values.shape[:-2], *(-(-size // DEEPSEEK_BLOCK) for size in values.shape[-2:]))
    if scale.shape != expected:
        raise ValueError(
            f"{where}: weight_scale_inv is {scale.shape}, expected {expected} of weight {values.shape}: a factor for "
            f"each square of {DEEPSEEK_BLOCK}"
        )
    for axis in (-2, -1):
        size = values.shape[axis]
        block = math.gcd(DEEPSEEK_BLOCK, size)
        if size % DEEPSEEK_BLOCK and scale.shape[axis] > 1:
            scale = jnp.take(scale, np.arange(size // block) * block // DEEPSEEK_BLOCK, axis)
    return Quantized(values, scale)


def _array(x: Any, name: str, kind: Any, where: str) -> jax.Array:
    """Returns an argument as a matrix, or as several, of a dtype or a kind of it."""
    x = matrix(x, name, where)
    if not (x.dtype.name == kind if isinstance(kind, str) else jnp.issubdtype(x.dtype, kind)):
        expected = kind if isinstance(kind, str) else "floating-point numbers"
        raise TypeError(f"{where}: {name} must be {expected}, got {x.dtype.name}")
    return x


def _check_groups(x: jax.Array, name: str, shape: Sequence[int], where: str) -> None:
    """Raises an error if an array has no row for each group of the rows of weights."""
    *batch, k, n = shape
    if x.shape[:-2] != tuple(batch) or x.shape[-1] != n or not x.shape[-2] or k % x.shape[-2]:
        raise ValueError(
            f"{where}: {name} are {x.shape}, but the weights are {tuple(shape)}: expected {(*batch, 'k / group', n)}"
        )


def _zeros(qzeros: ArrayLike, scales: jax.Array, order: tuple[int, ...], less_one: bool, where: str) -> jax.Array:
    """Returns the zero points of each group, which are packed along n."""
    words = _array(qzeros, "qzeros", "int32", where)
    expected = (*scales.shape[:-1], scales.shape[-1] // 8)
    if words.shape != expected or scales.shape[-1] % 8:
        raise ValueError(f"{where}: qzeros are {words.shape}, expected {expected} beside scales {scales.shape}")
    return _unpacked(words, -1, order, int(less_one))


@jax.jit
def _of_mxfp4(data: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values ``[..., k, n]`` and scales."""
    values = jnp.stack((data & 15, data >> 4), -1).astype(jnp.uint4).reshape(*scales.shape[:-1], -1)
    scales = scales.view(jnp.float8_e8m0fnu).astype(jnp.bfloat16)
    return jnp.matrix_transpose(values).view(jnp.float4_e2m1fn), jnp.matrix_transpose(scales)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))  # so that no array of 8 whole words is ever in memory
def _unpacked(words: jax.Array, axis: int, order: tuple[int, ...], added: int = 0) -> jax.Array:
    """Returns the 8 numbers of each word, in an order, along an axis: uint4, modulo 16 where one is added."""
    shifts = np.expand_dims(4 * np.asarray(order, np.int32), tuple(range(1, -axis)))
    found = jax.lax.shift_right_logical(*jnp.broadcast_arrays(jnp.expand_dims(words, axis % words.ndim + 1), shifts))
    shape = list(words.shape)
    shape[axis] *= 8
    return ((found + added) & 15).astype(jnp.uint4).reshape(shape)
