"""Quantized operands: narrow values with scales of rows, columns or blocks, and what makes them of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cutjax.binding.rules import with_rank
from cutjax.dtypes import NARROW
from cutjax.kernels.prepared import along, dequantized
from cutjax.ops.arguments import integer
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.quantization import in_blocks

SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An operand ``(values - zero_point) * scale``, wherever an array is one; ``cutjax.quantize`` makes it.

    The scale's shape says the blocks: each axis is 1, the values', or a divisor of that, so that ``[k / 128, n]``
    beside values ``[k, n]`` is a scale for each group of 128 along k. A kernel reads the values as they are. Scales
    that do not vary along the contracted axis multiply the sums, in its epilogue; others multiply the values, which are
    rounded to the dtype of the other operand, or the sums of each block where both operands are narrow. A pytree:
    gradients are those of its arrays, of integer values float0.

    An object with ``qvalue``, ``scale`` and ``zero_point``, such as Qwix's QArray, is taken for one; codes of its "nf4"
    are read from the table first.

    Attributes:
      values: matrices of int8, uint8, int4, uint4, float8_e4m3fn, float8_e5m2 or float4_e2m1fn, or of any other dtype.
      scale: floats, such as float32, bfloat16, float16, float8_e8m0fnu (mx) or float8_e4m3fn (nvfp4).
      zero_point: numbers that broadcast against the scale, such as those in the dtype of the values; or None.

    Raises:
      TypeError: if the scale is no array of floats, or the zero points are no numbers. Here as below, not when one is
        made, which a transformation may do with anything, but by an operation or a method that reads it.
      ValueError: if the shape of either says no blocks of the values.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w = jnp.ones((4, 64), jnp.bfloat16), jax.random.normal(jax.random.key(0), (64, 32))
      >>> q = cutjax.quantize(w, jnp.int8, block=(-1, 1))  # a scale for each column
      >>> q.values.dtype, q.scale.shape
      (dtype('int8'), (1, 32))
      >>> cutjax.gemm(x, q).dtype
      dtype(bfloat16)
      >>> groups = cutjax.quantize(w, jnp.int4, block=(32, 1), scale_dtype=jnp.bfloat16)
      >>> groups.scale.shape, cutjax.gemm(x, groups).shape
      ((2, 32), (4, 32))
    """

    values: Any
    scale: Any
    zero_point: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return np.shape(unwrapped(self.values))

    @property
    def ndim(self) -> int:
        """The rank of the values."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> Quantized:
        """Returns the matrices at an index of the axes before the last two, such as those of a layer or of experts.

        Raises:
          IndexError: if it is an index of the last two axes, too.
        """
        if index is Ellipsis:
            return self
        if len(index if isinstance(index, tuple) else (index,)) > self.ndim - 2:
            raise IndexError(
                f"Quantized: {index} of values {self.shape}: expected an index of the axes before the last two"
            )
        scale, zero = blocked(self, "the operand", "Quantized")
        found = (along(x, (*self.shape[:-2], *x.shape[-2:]))[index] for x in (scale, *zero))
        return Quantized(jnp.asarray(unwrapped(self.values))[index], *found)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns ``(values - zero_point) * scale``, rounded once to a dtype."""
        scale, zero = blocked(self, "the operand", "dequantize")
        return dequantized(jnp.asarray(unwrapped(self.values)), (scale, *zero), np.dtype(dtype))


Weights = ArrayLike | Quantized  # what operations take as an operand, or as each of several weights


def quantize(
    x: ArrayLike,
    dtype: DTypeLike,
    *,
    block: Sequence[int] | None = None,
    scale_dtype: DTypeLike = jnp.float32,
    zero_point: bool = False,
) -> Quantized:
    """Quantizes matrices: in each block the largest magnitude becomes the dtype's largest.

    ``scale = max(abs(x)) / largest``, rounded to its dtype (of float8_e8m0fnu to the next greater power of two), and
    ``values = x / scale``, rounded to the nearest, ties to even, and cut off at the largest. Integers are symmetric: of
    int8 -127 to 127. A block of zeros has scale 1; one with a number that is not finite has scale NaN, so that none of
    it goes unseen. With zero points, integers are ``round(x / scale) + zero_point`` instead, where the scale is that of
    the range from the block's least to its greatest, zero among them: 0 is exact.

    Args:
      x: ``[..., r, c]`` of floats.
      dtype: of the values: int8, uint8, int4, uint4, float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
      block: sizes along the last two axes, each a divisor, or -1 for the whole axis; None is the whole matrix. Of
        weights ``[k, n]``, (-1, 1) is a scale for each column, (128, 1) for groups along k, (128, 128) for squares; of
        rows ``[m, k]``, (1, -1) is one a row, (1, 128) for groups along k.
      scale_dtype: float32, bfloat16, float16, float8_e8m0fnu or float8_e4m3fn.
      zero_point: whether each block has one, in the values' dtype. Of integers; those without a sign need them.

    Returns:
      `Quantized`, its scale ``[..., r / block[0], c / block[1]]``, and its zero points, if any, alike.

    Raises:
      TypeError: if x is no array of floats, or a dtype is none of these.
      ValueError: if x is no matrix, or the block does not divide it.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> w = jax.random.normal(jax.random.key(0), (256, 128))
      >>> q = cutjax.quantize(w, jnp.uint4, block=(64, 1), zero_point=True)
      >>> q.scale.shape, q.zero_point.dtype.name, q.dequantize(jnp.bfloat16).shape
      ((4, 128), 'uint4', (256, 128))
    """
    where = "quantize"
    x, dtype, scale_dtype = matrix(x, "x", where), np.dtype(dtype), np.dtype(scale_dtype)
    if dtype.name not in NARROW:
        raise TypeError(f"{where}: dtype must be one of {', '.join(NARROW)}, got {dtype}")
    if scale_dtype.name not in SCALES:
        raise TypeError(f"{where}: scale_dtype must be one of {', '.join(SCALES)}, got {scale_dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{where}: x must be floating-point numbers, got {x.dtype}")
    integers = jnp.issubdtype(dtype, jnp.integer)
    if zero_point and not integers:
        raise ValueError(f"{where}: zero points are of integers, got {dtype}")
    if integers and not zero_point and jnp.iinfo(dtype).min == 0:
        raise ValueError(f"{where}: {dtype} has no negative numbers: expected zero_point=True, or a dtype with a sign")
    return Quantized(*in_blocks(x, dtype, _sizes(block, x.shape[-2:]), scale_dtype, zero_point))


def _sizes(block: Any, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of a block of matrices of that shape."""
    if block is None:
        block = (-1, -1)
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise ValueError(f"quantize: block must be two sizes, of the last two axes, got {block!r}")
    found = []
    for size, whole in zip(block, shape, strict=True):
        size = integer(size, "a size of block", "quantize")
        if size != -1 and (size < 1 or whole % size):
            raise ValueError(f"quantize: block {tuple(block)} does not divide {tuple(shape)}: each is a divisor, or -1")
        found.append(whole if size == -1 else size)
    return found[0], found[1]


def as_quantized(x: Any) -> Any:
    """Returns an object that stands for a quantized operand as one, and the members of a tuple; all else as it is."""
    if isinstance(x, tuple) and not isinstance(x, Quantized):
        return tuple(map(as_quantized, x))
    if not isinstance(x, Quantized) and hasattr(x, "qvalue") and hasattr(x, "scale"):
        return Quantized(_numbers(x), x.scale, getattr(x, "zero_point", None))
    return x


# What the codes of Qwix's "nf4" stand for: Dettmers et al., QLoRA (arXiv 2305.14314), appendix E.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Names of numbers that the values themselves are: of fewer bits than their dtype, or with scales of some kind.
_LINEAR = ("int2", "int3", "int5", "int6", "int7", "mxfp8", "mxfp8_16", "mxfp4", "nvfp4")


def _numbers(x: Any) -> Any:
    """Returns the values of an object that stands for a quantized operand, codes as the numbers they stand for."""
    kind = getattr(x, "qtype", None)
    if not isinstance(kind, str) or kind in _LINEAR:
        return x.qvalue
    if kind == "nf4":
        return jnp.asarray(_NF4, jnp.result_type(unwrapped(x.scale)))[jnp.asarray(x.qvalue).astype(np.int32)]
    try:
        np.dtype(kind)
    except TypeError:
        raise TypeError(f"the values of an operand are codes of {kind!r}, which is unknown: dequantize it") from None
    return x.qvalue


def is_quantized(w: Any) -> bool:
    """True of a quantized operand, and of a tuple with some."""
    return any(isinstance(x, Quantized) for x in (w if isinstance(w, tuple) else (w,)))


def values_of(w: Any) -> Any:
    """Returns the values of a quantized operand, or of each of a tuple's; all else as it is."""
    if isinstance(w, tuple):
        return tuple(values_of(x) for x in w)
    return w.values if isinstance(w, Quantized) else w


def blocked(x: Quantized, name: str, where: str) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the scale of a quantized operand, and its zero points or none, of one shape: of the values' rank.

    Raises:
      TypeError, ValueError: if either is no array of numbers, or its shape says no blocks of the values.
    """
    shape = np.shape(unwrapped(x.values))
    scale = _blocks(x.scale, shape, jnp.floating, f"{where}: the scale of {name}")
    if x.zero_point is None:
        return scale, ()
    zero = _blocks(x.zero_point, shape, jnp.number, f"{where}: the zero points of {name}")
    counts = tuple(math.lcm(*pair) for pair in zip(scale.shape, zero.shape, strict=True))
    return along(scale, counts), (along(zero, counts),)


def _blocks(x: Any, shape: Sequence[int], kind: Any, what: str) -> jax.Array:
    x = unwrapped(x)
    words = "floating-point numbers" if kind is jnp.floating else "numbers"
    if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int) or not jnp.issubdtype(
        jnp.result_type(x), kind
    ):
        got = jax.typeof(jnp.asarray(x)).str_short() if isinstance(x, jax.Array | np.ndarray) else repr(x)
        raise TypeError(f"{what} must be an array of {words}, got {got}")
    x = jnp.asarray(x)
    found = with_rank(x, len(shape)) if x.ndim <= len(shape) else x
    sizes = zip(found.shape, shape, strict=False)
    if x.ndim > len(shape) or any(n != size and (n == 0 or size % n) for n, size in sizes):
        raise ValueError(
            f"{what} {'is' if kind is jnp.floating else 'are'} {x.shape}, but its values are {tuple(shape)}: expected "
            "axes that are 1, the values', or divide them, which says the blocks"
        )
    return found
