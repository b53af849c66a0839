"""The operation gemm: its arguments, checked, and the product that they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import as_matmul
from cutjax.dtypes import are_narrow
from cutjax.kernels.families import AnyConfig
from cutjax.kernels.problem import LAYOUTS
from cutjax.ops.arguments import check_accumulate, check_config, check_epilogue, check_shapes, weights
from cutjax.ops.prologue import check_prologue, multiplied
from cutjax.ops.quantized import Weights, as_quantized, is_quantized, values_of
from cutjax.ops.scales import TURNED, converted_rows, few_columns, promote_values, scales_of
from cutjax.ops.sums import pairs_of, sum_of
from cutjax.primitives import product as products
from cutjax.primitives.accumulators import converted
from cutjax.primitives.arrays import matrix, unwrapped
from cutjax.primitives.dense import FLIP, Dense
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import Product
from cutjax.runtime import backends


def gemm(
    a: Weights | tuple[ArrayLike, ...],
    b: Weights | tuple[Weights, ...],
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    prologue: Callable[..., Any] | None = None,
    prologue_operands: Sequence[Any] = (),
    layout: str = "nn",
    out_dtype: DTypeLike | tuple[DTypeLike | None, ...] | None = None,
    precision: lax.PrecisionLike = None,
    accumulate: str = "f32",
    backend: str | None = None,
    config: AnyConfig | None = None,
    save: str = "default",
    out_sharding: Any = None,
) -> Any:
    """Multiplies matrices: ``d[..., m, n] = sum_k a[..., m, k] * b[..., k, n]``, accumulated in float32.

    Differentiable and batchable like any JAX function. No operand is ever transposed in memory, in the backward pass
    neither; there the cotangent is first rounded to the operands' dtype, so that the same kernels serve it. (float64
    accumulates in float64, integers in at least int32.)

    With an epilogue the result is that of ``epilogue(acc, *operands)``, computed on the accumulators before they leave
    the kernel. It is written in JAX: elementwise functions of the accumulator ``acc[..., m, n]``, float32, of operands
    that broadcast against it and of arrays it captures; and as further results sums, maxima and minima over rows,
    columns or both.

    With a prologue the product is that of ``prologue(a, *prologue_operands)``, an elementwise function of a in its own
    dtype whose result is rounded to the dtype in which ``gemm(a, b)`` would multiply: that of a, or the wider one of a
    and b. Its derivative keeps a and the operands, not what it makes of them.

    A tuple of a and one of as many b is a sum of products, added up in one kernel where there is one: ``a[0] @ b[0] +
    a[1] @ b[1] + ...``. Each may have a contraction of its own length; all a are of one dtype, all b too, and all
    products of one shape. An epilogue takes the one sum, which has no prologue and no out_sharding, and lies as its
    first product.

    Args:
      a: ``[..., m, k]``, or ``[..., k, m]`` where ``layout[0]`` is "t"; or `cutjax.Quantized`, a scale for each row; or
        a tuple of arrays.
      b: ``[..., k, n]``, or ``[..., n, k]`` where ``layout[1]`` is "t". Batch axes broadcast and dtypes promote as in
        ``jnp.matmul``, but bfloat16 with float16 is refused, and beside those a kernel reads 8-bit integers and
        float8 as they are, and multiplies them exactly; or `cutjax.Quantized`. With an epilogue also a tuple of two or
        three of equal shape and dtype; the epilogue then takes as many accumulators.
      epilogue: a function ``(acc, *operands)`` that returns an array or a pytree of them.
      operands: its further arguments: scalars, ``[n]``, ``[m, 1]``, ``[m, n]``, batched or not.
      prologue: a function ``(a, *prologue_operands)`` that returns an array of a's shape. Experimental: kernels that
        compute it themselves were slower than a pass before the product.
      prologue_operands: its further arguments, which broadcast against a: scalars, ``[k]``, ``[m, 1]``, ``[m, k]``,
        batched or not; where ``layout[0]`` is "t" against ``[k, m]``, as a lies.
      layout: "nn", "nt", "tn" or "tt".
      out_dtype: dtype of the result; by default the dtype of a and b, of two `cutjax.Quantized` that of the scales.
        With an epilogue: that of every ``[..., m, n]`` result which the function returns in float32, the accumulator's
        dtype. Results in another dtype keep it, and so do reductions. A tuple says it for each result, None there keeps
        the function's.
      precision: as in ``jax.lax.dot``; None is what ``jax.default_matmul_precision`` says. The kernels accumulate
        16-bit operands in float32; XLA runs any other algorithm.
      accumulate: "f32", or "fast": products of float8 are then added up in as many bits as the tensor cores have (14 on
        Hopper), by kernels and XLA alike, where no precision says otherwise. Of other dtypes it says nothing.
      backend: "auto", "cuda" or "xla", see ``cutjax.use_backend``, which sets the default.
      config: pins the kernel of this product. Its gradients choose their own.
      save: what the derivative of an epilogue keeps of the accumulators it needs. "default": their values, in the dtype
        of a and b (float32 if a result is), written by the same kernel and named "cutjax_preactivation" for
        ``jax.checkpoint`` policies. "recompute": nothing, they are multiplied again. A linear epilogue needs none.
      out_sharding: how the product lies on explicit mesh axes, as in ``jax.numpy.matmul``: asked for where both
        operands divide the contracted axis.

    Returns:
      The product, ``[..., m, n]``, or what the epilogue returns.

    Raises:
      TypeError: if an operand is no array, or the dtypes have no product.
      ValueError: if shapes do not fit, or the layout, the precision or the backend is unknown.
      NotImplementedError: if the epilogue or the prologue is no elementwise function; and when compiled, if backend is
        "cuda" and no kernel serves the problem; lists every reason.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> x, w = jnp.ones((2, 8, 16), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16)
      >>> cutjax.gemm(x, w, layout="nt").shape
      (2, 8, 32)
      >>> bias = jnp.ones(32)
      >>> cutjax.gemm(x, w, layout="nt", epilogue=lambda acc, b: jax.nn.gelu(acc + b), operands=(bias,)).dtype
      dtype(bfloat16)
      >>> scale = jnp.ones((8, 1), jnp.bfloat16)
      >>> cutjax.gemm(x, w, layout="nt", prologue=lambda a, r: a * r, prologue_operands=(scale,)).dtype
      dtype(bfloat16)
    """
    if layout not in LAYOUTS:
        raise ValueError(f"gemm: unknown layout {layout!r}, expected one of {LAYOUTS}")
    check_config(config, "gemm")
    check_accumulate(accumulate, "gemm")
    backend = backends.resolve(backend, "gemm")
    out_dtype = tuple(out_dtype) if isinstance(out_dtype, list) else out_dtype
    params: dict[str, Any] = {"backend": backend, "config": config}
    params["precision"] = dot_precision.canonical(precision, "gemm")
    if isinstance(a, tuple):
        pairs = pairs_of(a, b, "gemm", prologue=prologue, out_sharding=out_sharding)
        for x, y in pairs:
            check_shapes(x, y, layout, "gemm")
        params |= {"epilogue": epilogue, "operands": operands, "out_dtype": out_dtype, "save": save}
        product = Dense(layout, lies=as_matmul(*pairs[0][:1], pairs[0][1:], layout, None, "gemm"))
        return sum_of(product, pairs, (), where="gemm", accumulate=accumulate, **params)
    check_epilogue(b, epilogue, operands, out_dtype, save)
    check_prologue(a, prologue, prologue_operands, "gemm")
    a, b = as_quantized(a), as_quantized(b)
    x, ys = matrix(values_of(a), "a"), weights(values_of(b), "b")
    given = x
    scales = scales_of(a, b, layout, "gemm")
    several = isinstance(out_dtype, tuple)
    check_shapes(x, ys[0], layout, "gemm")
    narrow = is_quantized(a) and are_narrow(ys[0].dtype, x.dtype) and not scales.blocks
    turned = narrow and backend != "xla" and few_columns(ys[0], layout)
    turned = turned and all(x is None for x in (epilogue, config, out_sharding))
    if narrow:
        params["hints"] = TURNED if turned else converted_rows(ys[0].dtype)
    if turned:  # kernels decode b: the transposed product has a there
        x, ys, scales, layout = ys[0], [x], scales.turned, FLIP[layout[1]] + FLIP[layout[0]]
        params["precision"] = dot_precision.swapped(params["precision"])
    asked = None if several else out_dtype
    x, *ys, dtype, weak = promote_values((a, b), scales, x, ys, asked, "gemm", last=layout[0] == "n")
    params["precision"] = dot_precision.accumulated(params["precision"], accumulate, x.dtype, ys[0].dtype)
    product = Dense(layout, lies=as_matmul(x, ys, layout, out_sharding, "gemm"))
    product, factors = scales.factored(product, x, ys)
    out = out_dtype if several else dtype
    epilogue, operands, out = scales.before(epilogue, tuple(operands), product.multiplied(x.dtype), out)
    operands = jax.tree.map(unwrapped, operands)

    def run(product: Product, factors: Factors) -> Any:
        if epilogue is None:
            return converted(products.multiply(product, *factors.arrays, out_dtype=dtype, **params), dtype, weak)
        d = products.call(product, epilogue, factors, operands, out_dtype=out, save=save, **params)
        return jnp.matrix_transpose(d) if turned else d

    return multiplied("gemm", prologue, prologue_operands, given, product, factors, run, **params)
