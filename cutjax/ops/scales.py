"""The scales of a product's operands: those of rows and columns multiply its sums, those of blocks of k are factors'.

The first become operands of the epilogue here, and nothing below an operation knows of them. The others, and all that
have zero points, go with the values: ``primitives/scaled.py``.
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

from cutjax.binding.rules import with_rank
from cutjax.dtypes import FOUR_BITS, NARROW, are_alike, promoted
from cutjax.kernels.prepared import along
from cutjax.ops import arguments
from cutjax.ops.arguments import contracted
from cutjax.ops.quantized import Quantized, blocked, is_quantized
from cutjax.primitives.accumulators import accumulator, converted
from cutjax.primitives.arrays import unwrapped
from cutjax.primitives.factors import Factors
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import Product
from cutjax.primitives.scaled import scaled
from cutjax.primitives.tracing import with_result_dtype

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


def promote_values(
    given: Sequence[Any],
    scales: Scales,
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
    that differ, or whose sums are too long, a becomes bfloat16, which holds either's; of wider integers, float32. Where
    scales are of blocks, values stay as they are, and arrays are in the dtype that is multiplied.

    Args:
      given: a, the bs, and what else has a say in the result's dtype.
      scales: those of a and the bs.
      last: whether a's last axis is the contracted one.
    """
    flat = [x for w in given for x in (w if isinstance(w, tuple) else (w,)) if x is not None]
    if not is_quantized(tuple(flat)):
        return arguments.promote(a, bs, out_dtype, where, narrow)
    of_scales = functools.reduce(promoted, [wide_dtype(x.scale) for x in flat if isinstance(x, Quantized)])
    arrays = (np.dtype(unwrapped(x).dtype) for x in flat if not isinstance(x, Quantized))
    floats = (dtype for dtype in arrays if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 1)
    out_dtype = (next(floats, None) or of_scales) if out_dtype is None else out_dtype
    if scales.blocks:
        found = [
            x if isinstance(w, Quantized) or x.dtype.name in NARROW else converted(x, scales.dtype, False)
            for w, x in zip(flat, (a, *bs), strict=False)
        ]
        return *found, arguments.result_of(out_dtype, where, scales.dtype), False
    both_narrow = a.dtype.name in NARROW and bs[0].dtype.name in NARROW
    if both_narrow:
        a, *bs = (_of_8_bits(x) for x in (a, *bs))
    apart = both_narrow and not are_alike(a.dtype, bs[0].dtype)
    if apart or may_wrap(a.dtype, bs[0].dtype, contracted(a, last)):
        a = converted(a, np.dtype(jnp.bfloat16) if both_narrow else promoted(of_scales, np.float32))
    return arguments.promote(a, bs, out_dtype, where, narrow)


def wide_dtype(scale: Any) -> np.dtype:
    """Returns the dtype of a scale, of one of 8 bits float32."""
    dtype = np.dtype(jnp.result_type(unwrapped(scale)))
    return dtype if dtype.itemsize > 1 else np.dtype(np.float32)


def _of_8_bits(x: jax.Array) -> jax.Array:
    """Returns values of 4 bits in 8, as they are multiplied by others of 8 or 4; all else as it is."""
    if x.dtype.name not in FOUR_BITS:
        return x
    return x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float8_e4m3fn)


def may_wrap(a: np.dtype, b: np.dtype, k: Any) -> bool:
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
    """The scales of a product's operands: those that its accumulators are multiplied by, and those of factors.

    Attributes:
      rows: that of a, ``[..., m or 1, 1]``; None where it has none.
      columns: those of the bs, ``[..., 1, n or 1]``; None of one that has none.
      blocks: of a and of each b, the scale that varies along k, or has zero points, and these; () where none has any.
      dtype: that in which factors are multiplied, where there are blocks: of the arrays without scales, or where there
        are none float32, or the scales' wider one.
    """

    rows: jax.Array | None
    columns: list[jax.Array | None]
    blocks: tuple[tuple[jax.Array, ...], ...] = ()
    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))

    def factored(
        self, product: Product, a: jax.Array, bs: Sequence[jax.Array], context: Sequence[jax.Array] = ()
    ) -> tuple[Product, Factors]:
        """Returns the product and its factors, with the scales of blocks."""
        return scaled(product, Factors(a, bs, context), self.blocks, self.dtype)

    def of_results(self) -> Scales:
        """Returns the same beside results of which each group has its own, an axis before the last two."""
        rows, *columns = (
            x if x is None else jnp.expand_dims(x, -3) if x.ndim > 2 else x for x in (self.rows, *self.columns)
        )
        return dataclasses.replace(self, rows=rows, columns=columns)

    @property
    def turned(self) -> Scales:
        """The scales of the transposed product, of an a by one b."""
        rows, columns = (x if x is None else jnp.matrix_transpose(x) for x in (*self.columns, self.rows))
        return Scales(rows, [columns])

    def before(
        self, epilogue: Callable[..., Any] | None, operands: Sequence[Any], values: np.dtype, out_dtype: Any
    ) -> tuple[Callable[..., Any] | None, Sequence[Any], Any]:
        """Returns the epilogue of accumulators that are scaled first, its operands, and the results' dtype to ask for.

        All as they are without scales. Integers are added up in integers whatever the result's dtype, which is then
        for the epilogue to make.
        """
        if self.rows is None and all(scale is None for scale in self.columns):
            return epilogue, operands, out_dtype
        exact = jnp.issubdtype(values, jnp.integer) and not isinstance(out_dtype, tuple)

        def of_scaled(*args: Any) -> Any:
            count = len(self.columns)
            rows, columns = args[count]
            accs = [times(acc, rows, scale) for acc, scale in zip(args[:count], columns, strict=True)]
            out = accs[0] if epilogue is None else epilogue(*accs, *args[count + 1 :])
            return with_result_dtype(out, accs[0], out_dtype) if exact else out

        return of_scaled, ((self.rows, self.columns), *operands), None if exact else out_dtype


def scales_of(a: Any, b: Any, layout: str, where: str, names: Sequence[str] = ("a", "b"), rank: int = 0) -> Scales:
    """Returns the scales of a product's operands.

    Args:
      a, b: what a caller gave: an array or one with a scale; of b also a tuple of these.
      layout: how the matrices lie.
      where, names: the operation and the arguments, as errors name them; of a tuple b each, or all.
      rank: of the result where rows have groups: a scale of b then has one axis more, with all groups before its last
        two.

    Raises:
      TypeError, ValueError: if a scale is no array of floats, or says no blocks of its values, or a tuple's differ.
    """
    several = isinstance(b, tuple)
    bs = b if several else (b,)
    rows, of_a = _scale(a, -1 if layout[0] == "n" else -2, names[0], where)
    rows = rows if rows is None or layout[0] == "n" else jnp.matrix_transpose(rows)
    columns, blocks = [], [of_a]
    for i, x in enumerate(bs):
        name = names[1 + i] if len(names) > 2 else f"{names[1]}[{i}]" if several else names[1]
        scale, of_b = _scale(x, -2 if layout[1] == "n" else -1, name, where)
        scale = scale if scale is None or layout[1] == "n" else jnp.matrix_transpose(scale)
        if rank and scale is not None:
            groups = np.shape(unwrapped(x.values))[-3]
            scale = with_rank(jnp.broadcast_to(scale, (*scale.shape[:-3], groups, *scale.shape[-2:])), rank + 1)
        columns.append(scale)
        blocks.append(of_b)
    if not any(blocks):
        return Scales(rows, columns)
    kinds = [[(y.dtype, *y.shape[-2:]) for y in of] for of in blocks[1:]]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"{where}: the matrices of a tuple have scales of the same blocks and dtype, or none, along k")
    arrays = [np.dtype(unwrapped(x).dtype) for x in (a, *bs) if x is not None and not isinstance(x, Quantized)]
    arrays = [dtype for dtype in arrays if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 1]
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in arrays):
        raise TypeError(f"{where}: scales of blocks along k beside complex numbers: dequantize them")
    arrays = arrays or [np.dtype(np.float32), *(wide_dtype(x.scale) for x in (a, *bs) if isinstance(x, Quantized))]
    return Scales(rows, columns, tuple(blocks), functools.reduce(promoted, arrays))


def _scale(x: Any, k: int, name: str, where: str) -> tuple[jax.Array | None, tuple[jax.Array, ...]]:
    """Returns the scale of a quantized operand that is for all of axis ``k``, or that of its blocks and zero points.

    Of the rank of its values; None and () of an array.
    """
    if not isinstance(x, Quantized):
        return None, ()
    shape = np.shape(unwrapped(x.values))
    scale, zero = blocked(x, name, where)
    if zero or scale.shape[k] != 1:
        return None, tuple(along(y, (*shape[:-2], *y.shape[-2:])) for y in (scale, *zero))
    whole = [1 if count == 1 else size for count, size in zip(scale.shape, shape, strict=True)]
    return along(scale if scale.dtype.itemsize > 1 else scale.astype(np.float32), whole), ()


def times(acc: jax.Array, *scales: jax.Array | None) -> jax.Array:
    """Returns accumulators times scales, in their own dtype; integers in float32, or in the scales' wider one."""
    known = [scale for scale in scales if scale is not None]
    if known and jnp.issubdtype(acc.dtype, jnp.integer):
        acc = acc.astype(functools.reduce(promoted, (scale.dtype for scale in known), np.dtype(np.float32)))
    return functools.reduce(lambda acc, scale: acc * scale.astype(acc.dtype), known, acc)
