"""Sums of products: what gemm and grouped_gemm make of a tuple of first operands and one of second ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from cutjax import dot_precision
from cutjax.ops.arguments import check_epilogue, promote
from cutjax.ops.quantized import as_quantized, is_quantized
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import converted
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Product

Pair = tuple[jax.Array, jax.Array]


def pairs_of(a: Any, b: Any, where: str, names: tuple[str, str] = ("a", "b"), **others: Any) -> list[Pair]:
    """Returns the factors of each product, told the arguments that a sum has not, by name."""
    if not isinstance(a, tuple) or not isinstance(b, tuple) or len(a) != len(b) or len(a) < 2:
        got = ", ".join(
            f"{name} is {f'a tuple of {len(x)}' if isinstance(x, tuple) else type(x).__name__}"
            for name, x in zip(names, (a, b), strict=True)
        )
        raise TypeError(f"{where}: a sum of products is of two tuples of as many arrays, two or more: {got}")
    if is_quantized(as_quantized((a, b))):
        raise TypeError(f"{where}: a sum of products is of arrays, got cutjax.Quantized: dequantize them")
    if given := [name for name, x in others.items() if x is not None]:
        raise ValueError(f"{where}: a sum of products has no {' and no '.join(given)}")
    found = [
        (matrix(x, f"{names[0]}[{i}]", where), matrix(y, f"{names[1]}[{i}]", where))
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]
    for name, arrays in zip(names, zip(*found, strict=True), strict=True):
        if len(dtypes := {x.dtype for x in arrays}) > 1:
            raise TypeError(f"{where}: the arrays of {name} have one dtype, got {', '.join(map(str, dtypes))}")
    if found[0][0].dtype == found[0][1].dtype == bool:
        raise TypeError(f"{where}: a sum of products is of numbers, got bool: add them up by jnp.logical_or")
    return found


def sum_of(
    product: Product,
    pairs: Sequence[Pair],
    context: Sequence[jax.Array],
    *,
    where: str,
    epilogue: Callable[..., Any] | None,
    operands: Sequence[Any],
    out_dtype: Any,
    save: str,
    accumulate: str,
    precision: Any,
    **params: Any,
) -> Any:
    """Returns the sum of products, each of which was checked, or what an epilogue makes of it."""
    check_epilogue(None, epilogue, operands, out_dtype, save, where)
    each = [product.aligned(Factors(a, [b], context)) for a, b in pairs]
    shapes = [(*product.tile(*map(jax.typeof, of.arrays)).shape, *of.bs[0].shape[of.a.ndim - 2 : -2]) for of in each]
    if len(set(shapes)) > 1:
        raise ValueError(f"{where}: products that are added up have one shape, got {', '.join(map(str, shapes))}")
    several = isinstance(out_dtype, tuple)
    found = [promote(a, [b], None if several else out_dtype, where) for a, b in pairs]
    dtype, weak = found[0][2], all(weak for *_, weak in found)
    (a, b), *others = (given[:2] for given in found)
    params["precision"] = dot_precision.accumulated(precision, accumulate, a.dtype, b.dtype)
    total = product.sum_of(len(pairs))
    assert total is not None
    factors = Factors(a, [b], context, [[x for x, _ in others], [y for _, y in others]])
    if epilogue is None:
        return converted(products.multiply(total, *factors.arrays, out_dtype=dtype, **params), dtype, weak)
    operands, out = jax.tree.map(unwrapped, tuple(operands)), out_dtype if several else dtype
    return products.call(total, epilogue, factors, operands, out_dtype=out, save=save, **params)
