"""Quantized operands: narrow values, and scales of rows or columns, which multiply the sums of their products.

Scales are taken off here, and become operands of the epilogue: nothing below an operation knows of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cutjax.binding.rules import with_rank
from cutjax.dtypes import NARROW, are_alike, promoted
from cutjax.ops import arguments
from cutjax.ops.arguments import contracted
from cutjax.primitives.accumulators import accumulator, converted
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import with_result_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An operand ``values * scale``: either of ``gemm`` and ``grouped_gemm``, weights and x of ``mlp`` and
    ``grouped_mlp``, weights of ``moe``.

    A kernel reads weights' values as they are, of 8 bits, and multiplies them, exactly, in the dtype of the other
    operand. Where both are quantized, integers of one dtype are multiplied in integers, and float8 by float8 in
    float32. The scales multiply the sums in its epilogue, before they are rounded. A pytree: gradients are those of
    both arrays, of integer values float0.

    Attributes:
      values: matrices of int8, uint8, float8_e4m3fn or float8_e5m2.
      scale: what broadcasts to the values, of size 1 along the contracted axis: one a column of weights, or one a row
        of the first operand.

    Example:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w = jnp.ones((4, 64), jnp.bfloat16), jax.random.normal(jax.random.key(0), (64, 32))
      >>> q = cutjax.Quantized.of(w)
      >>> q.values.dtype, q.scale.shape
      (dtype('int8'), (1, 32))
      >>> cutjax.gemm(x, q).dtype
      dtype(bfloat16)
      >>> rows = cutjax.Quantized.of(x, layout="t")  # k is x's last axis
      >>> rows.scale.shape, cutjax.gemm(rows, q, out_dtype=jnp.bfloat16).dtype
      ((4, 1), dtype(bfloat16))
    """

    values: Any
    scale: Any

    @classmethod
    def of(cls, w: ArrayLike, dtype: DTypeLike = jnp.int8, *, layout: str = "n") -> Quantized:
        """Quantizes symmetrically: the largest magnitude along the contracted axis becomes the dtype's largest.

        Args:
          w: ``[..., k, n]``, or ``[..., n, k]`` where layout is "t".
          dtype: int8, float8_e4m3fn or float8_e5m2.
          layout: "n" or "t": whether the contracted axis is the last but one, or the last. The second letter of the
            product's layout of weights; for rows of the first operand the other one, "t" in the layouts "nn" and "nt".

        Raises:
          TypeError: if w is no array, or the dtype is none of these.
          ValueError: if the layout is neither, or w no matrix.
        """
        w, dtype = matrix(w, "w", "Quantized.of"), np.dtype(dtype)
        if dtype.name not in ("int8", "float8_e4m3fn", "float8_e5m2"):
            raise TypeError(f"Quantized.of: dtype must be int8, float8_e4m3fn or float8_e5m2, got {dtype}")
        if not jnp.issubdtype(w.dtype, jnp.floating):
            raise TypeError(f"Quantized.of: w must be floating-point numbers, got {w.dtype}")
        if layout not in ("n", "t"):
            raise ValueError(f"Quantized.of: unknown layout {layout!r}, expected 'n' or 't'")
        integers = jnp.issubdtype(dtype, jnp.integer)
        most = float(jnp.iinfo(dtype).max if integers else jnp.finfo(dtype).max)
        wide = w.astype(promoted(w.dtype, jnp.float32))
        scale = jnp.max(jnp.abs(wide), axis=-2 if layout == "n" else -1, keepdims=True) / most
        scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
        values = wide / scale
        return cls((jnp.round(values) if integers else jnp.clip(values, -most, most)).astype(dtype), scale)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns ``values * scale``, rounded once to a dtype."""
        wide = promoted(dtype, jnp.float32)
        return (jnp.asarray(self.values).astype(wide) * jnp.asarray(self.scale).astype(wide)).astype(dtype)


Weights = ArrayLike | Quantized  # what operations take as an operand, or as each of several weights
# A product of a quantized a with so few columns is computed transposed, so that a kernel reads a as it is: for as many
# rows XLA takes 1.2 to 2.2 times as long (benchmarks/results/quantized-h200.json). The result is transposed once more.
COLUMNS = 16
TURNED = Hints(("", "", "the result is transposed: kernels read narrow columns, not rows"), lead=1.08)


def converted_rows(dtype: np.dtype) -> Hints:
    """Returns the hints for a product of a narrow a that is converted to a dtype before."""
    return Hints((f"a is converted to {dtype}: kernels read narrow columns, not rows", "", ""))


def few_columns(b: jax.Array, layout: str) -> bool:
    """True if b has columns known to be few."""
    n = contracted(b, layout[1] == "n")
    return not jax.export.is_symbolic_dim(n) and n <= COLUMNS


def is_quantized(w: Any) -> bool:
    """True of a quantized operand, and of a tuple with some."""
    return any(isinstance(x, Quantized) for x in (w if isinstance(w, tuple) else (w,)))


def values_of(w: Any) -> Any:
    """Returns the values of a quantized operand, or of each of a tuple's; all else as it is."""
    if isinstance(w, tuple):
        return tuple(values_of(x) for x in w)
    return w.values if isinstance(w, Quantized) else w


def promote_values(
    given: Sequence[Any],
    a: jax.Array,
    bs: Sequence[jax.Array],
    out_dtype: Any,
    where: str,
    narrow: bool = True,
    last: bool = True,
) -> tuple[Any, ...]:
    """``arguments.promote`` of the values of operands, of which some were ``given`` with scales.

    The result is then in the dtype of the first floating-point array given, else in that of the scales. Values of one
    dtype, or both of float8, are multiplied as they are: integers in integers, where no sum can wrap. Of two of 8 bits
    that differ, or whose sums are too long, a becomes bfloat16, which holds either's; of wider integers, float32.

    Args:
      last: whether a's last axis is the contracted one.
    """
    flat = [x for w in given for x in (w if isinstance(w, tuple) else (w,)) if x is not None]
    scales = [jnp.result_type(unwrapped(x.scale)) for x in flat if isinstance(x, Quantized)]
    if scales:
        arrays = (np.dtype(unwrapped(x).dtype) for x in flat if not isinstance(x, Quantized))
        floats = (dtype for dtype in arrays if jnp.issubdtype(dtype, jnp.inexact))
        out_dtype = (next(floats, None) or functools.reduce(promoted, scales)) if out_dtype is None else out_dtype
        both_narrow = a.dtype.name in NARROW and bs[0].dtype.name in NARROW
        apart = both_narrow and not are_alike(a.dtype, bs[0].dtype)
        if apart or _may_wrap(a.dtype, bs[0].dtype, contracted(a, last)):
            wide = jnp.bfloat16 if both_narrow else functools.reduce(promoted, scales, np.dtype(np.float32))
            a = converted(a, np.dtype(wide))
    return arguments.promote(a, bs, out_dtype, where, narrow)


def _may_wrap(a: np.dtype, b: np.dtype, k: Any) -> bool:
    """True if sums of k products of two dtypes of integers may pass what they are added up in."""
    if not all(jnp.issubdtype(dtype, jnp.integer) for dtype in (a, b)):
        return False
    if jax.export.is_symbolic_dim(k):
        return True
    of_a, of_b, of_sum = (jnp.iinfo(dtype) for dtype in (a, b, accumulator(promoted(a, b))))
    edges = [int(x) * int(y) for x in (of_a.min, of_a.max) for y in (of_b.min, of_b.max)]
    return k * max(edges) > of_sum.max or k * min(edges) < of_sum.min


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of a product's operands, as its accumulators have them; None of an operand without.

    Attributes:
      rows: that of a, ``[..., m or 1, 1]``.
      columns: those of the bs, ``[..., 1, n or 1]``.
    """

    rows: jax.Array | None
    columns: list[jax.Array | None]

    def __bool__(self) -> bool:
        return self.rows is not None or any(scale is not None for scale in self.columns)

    @property
    def turned(self) -> Scales:
        """The scales of the transposed product, of an a that has one by a b without."""
        assert self.rows is not None
        return Scales(None, [jnp.matrix_transpose(self.rows)])

    def before(
        self, epilogue: Callable[..., Any] | None, operands: Sequence[Any], values: np.dtype, out_dtype: Any
    ) -> tuple[Callable[..., Any] | None, Sequence[Any], Any]:
        """Returns the epilogue of accumulators that are scaled first, its operands, and the results' dtype to ask for.

        All as they are without scales. Integers are added up in integers whatever the result's dtype, which is then
        for the epilogue to make.
        """
        if not self:
            return epilogue, operands, out_dtype
        exact = jnp.issubdtype(values, jnp.integer) and not isinstance(out_dtype, tuple)

        def of_scaled(*args: Any) -> Any:
            count = len(self.columns)
            rows, columns = args[count]
            accs = [times(acc, rows, scale) for acc, scale in zip(args[:count], columns, strict=True)]
            out = accs[0] if epilogue is None else epilogue(*accs, *args[count + 1 :])
            return with_result_dtype(out, accs[0], out_dtype) if exact else out

        return of_scaled, ((self.rows, self.columns), *operands), None if exact else out_dtype


def scales_of(a: Any, b: Any, layout: str, where: str, names: tuple[str, str] = ("a", "b"), rank: int = 0) -> Scales:
    """Returns the scales of a product's operands.

    Args:
      a, b: what a caller gave: an array or one with a scale; of b also a tuple of these.
      layout: how the matrices lie.
      where, names: the operation and the arguments, as errors name them.
      rank: of the result where rows have groups: a scale of b then has one axis more, with all groups before its last
        two.
    """
    rows = scale_of(a, -1 if layout[0] == "n" else -2, names[0], where)
    several = isinstance(b, tuple)
    columns = []
    for i, x in enumerate(b if several else (b,)):
        scale = scale_of(x, -2 if layout[1] == "n" else -1, f"{names[1]}[{i}]" if several else names[1], where)
        scale = scale if scale is None or layout[1] == "n" else jnp.matrix_transpose(scale)
        if rank and scale is not None:
            groups = np.shape(unwrapped(x.values))[-3]
            scale = with_rank(jnp.broadcast_to(scale, (*scale.shape[:-3], groups, *scale.shape[-2:])), rank + 1)
        columns.append(scale)
    return Scales(rows if rows is None or layout[0] == "n" else jnp.matrix_transpose(rows), columns)


def scale_of(x: Any, k: int, name: str, where: str) -> jax.Array | None:
    """Returns the scale of a quantized operand, of the rank of its values; None of an array.

    Raises:
      TypeError, ValueError: if it is no array of floats that broadcasts to the values, of size 1 along axis ``k``.
    """
    if not isinstance(x, Quantized):
        return None
    scale, shape = unwrapped(x.scale), np.shape(unwrapped(x.values))
    if not isinstance(scale, jax.Array | np.ndarray | np.generic | float) or not jnp.issubdtype(
        jnp.result_type(scale), jnp.floating
    ):
        got = jax.typeof(jnp.asarray(scale)).str_short() if isinstance(scale, jax.Array | np.ndarray) else repr(scale)
        raise TypeError(f"{where}: the scale of {name} must be an array of floating-point numbers, got {got}")
    scale = jnp.asarray(scale)
    fits = scale.ndim <= len(shape) and all(
        n in (1, size) for n, size in zip(scale.shape[::-1], shape[::-1], strict=False)
    )
    scale = with_rank(scale, len(shape)) if fits else scale
    if not fits or scale.shape[k] != 1:
        raise ValueError(
            f"{where}: the scale of {name} is {scale.shape}, but its values are {shape}: expected one a row of the "
            f"first operand, or one a column of the second, of size 1 along k, which is axis {k}"
        )
    return scale


def times(acc: jax.Array, *scales: jax.Array | None) -> jax.Array:
    """Returns accumulators times scales, in their own dtype; integers in float32, or in the scales' wider one."""
    known = [scale for scale in scales if scale is not None]
    if known and jnp.issubdtype(acc.dtype, jnp.integer):
        acc = acc.astype(functools.reduce(promoted, (scale.dtype for scale in known), np.dtype(np.float32)))
    return functools.reduce(lambda acc, scale: acc * scale.astype(acc.dtype), known, acc)
