"""Several plain products of one a, bound as one, whose kernel may read a once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cutjax.epilogue.expression import identity
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Product, bind, multiply


def multiply_each(
    product: Product, a: Any, bs: Sequence[Any], *beside: Any, out_dtype: np.dtype, **params: Any
) -> list[jax.Array]:
    """Binds the plain products of a and each b, as one where b are alike.

    Beside them are the context of one, or a longer one, and scales. A pinned config is for a product by itself.
    """
    if len(bs) == 1 or len(set(map(jax.typeof, bs))) > 1 or product.sum_of(2) is None:
        return [multiply(product, a, b, *beside, out_dtype=out_dtype, **params) for b in bs]
    epilogue = identity(out_dtype, accumulator(product.multiplied(a.dtype), out_dtype), len(bs))
    factors = product.aligned(Factors(a, tuple(bs), beside[: len(product.axes) - 2]))
    return bind(product, epilogue, factors, (), **params)
