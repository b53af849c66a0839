"""The operation syrk: a matrix by its own transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.kernels.families import AnyConfig
from cutjax.ops.arguments import check_config, check_epilogue, promote
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import converted
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.factors import Factors
from cutjax.primitives.symmetric import Symmetric
from cutjax.runtime import backends

LAYOUTS = ("n", "t")


def syrk(
    a: ArrayLike,
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    layout: str = "n",
    out_dtype: DTypeLike | tuple[DTypeLike | None, ...] | None = None,
    precision: lax.PrecisionLike = None,
    backend: str | None = None,
    config: AnyConfig | None = None,
    save: str = "default",
) -> Any:
    """Multiplies a matrix by its own transpose: ``d[..., i, j] = sum_k a[..., i, k] * a[..., j, k]``.

    The result is symmetric, so kernels multiply what is on and below its diagonal alone, and store each value in both
    places: about half the work of ``cutjax.gemm(a, a, layout="nt")``, with sums accumulated as there. The inner product
    of Shampoo's statistics, and of the Newton-Schulz iterations of Muon (examples/muon.py).

    Differentiable and batchable like any JAX function. The gradient is one product, ``(g + g^T) @ a``, where plain JAX
    multiplies twice and adds: the sum of g and its transpose is rounded to a's dtype first.

    Args:
      a: ``[..., m, k]``, or ``[..., k, m]`` in the layout "t".
      epilogue: a function ``(acc, *operands)`` as in ``cutjax.gemm``, that treats (i, j) and (j, i) alike: elementwise,
        of scalars, one a matrix (``[..., 1, 1]``), and symmetric matrices. Its results are symmetric.
      operands: its further arguments. One of ``[..., m, m]`` must be symmetric: kernels read one triangle of it.
      layout: "n" for ``a a^T``, "t" for ``a^T a``.
      out_dtype: dtype of the result, as in ``cutjax.gemm``.
      precision: as in ``cutjax.gemm``.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      config: pins the kernel of this product. Its gradient chooses its own.
      save: what the derivative of an epilogue keeps, "default" or "recompute", see ``cutjax.gemm``.

    Returns:
      ``[..., m, m]``, or what the epilogue returns.

    Raises:
      TypeError: if a is no array of numbers.
      ValueError: if a has no two axes, or the layout, the precision or the backend is unknown.
      NotImplementedError: if the epilogue is no elementwise function, or not symmetric; and when compiled, if backend
        is "cuda" and no kernel serves the problem; lists every reason.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> a = jnp.arange(6.0).reshape(2, 3)
      >>> cutjax.syrk(a).tolist()
      [[5.0, 14.0], [14.0, 50.0]]
      >>> cutjax.syrk(a, layout="t", epilogue=lambda acc: acc / 2)[0].tolist()
      [4.5, 6.0, 7.5]
    """
    where = "syrk"
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: unknown layout {layout!r}, expected one of {LAYOUTS}")
    check_config(config, where)
    backend = backends.resolve(backend, where)
    out_dtype = tuple(out_dtype) if isinstance(out_dtype, list) else out_dtype
    check_epilogue(a, epilogue, operands, out_dtype, save, where, "a")
    several = isinstance(out_dtype, tuple)
    x = matrix(a, "a", where)
    x, _, dtype, weak = promote(x, [x], None if several else out_dtype, where)
    product, params = Symmetric(layout), {"backend": backend, "config": config}
    params["precision"] = dot_precision.canonical(precision, where)
    if epilogue is None:
        return converted(products.multiply(product, x, out_dtype=dtype, **params), dtype, weak)
    out, operands = out_dtype if several else dtype, jax.tree.map(unwrapped, tuple(operands))
    return products.call(product, epilogue, Factors(x), operands, out_dtype=out, save=save, **params)
