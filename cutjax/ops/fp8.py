"""fp8_dot_general: jax.lax's dot_general with operands quantized to float8 as they come, for training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cutjax import dot_precision
from cutjax.binding.explicit import automatic
from cutjax.binding.rules import any_reduced, symbolic
from cutjax.ops.contraction import contraction
from cutjax.ops.fp8_product import ACTIVATIONS, WEIGHTS, Float8, Recipe, Roles, float8_product, why_wide
from cutjax.primitives.accumulators import converted
from cutjax.primitives.arrays import is_array_like, unwrapped
from cutjax.primitives.dense import Dense
from cutjax.primitives.product import Product
from cutjax.runtime import backends

# The dtype of gradients by default: with one scale for all of them the range of float8_e5m2 is wanted.
RECIPES = {"tensor": "float8_e5m2", "row": "float8_e4m3fn", "block": "float8_e4m3fn"}
POLICIES = ("auto", "always")
_WIDE = ("bfloat16", "float16", "float32")
# Whether another product has one of two arrays quantized: told which, its shape, its role, and if along its last axis.
Made = Callable[[int, tuple[int, ...], str, bool], bool]


@dataclasses.dataclass(frozen=True)
class Fp8DotGeneral:
    """A function with the signature of ``jax.lax.dot_general``; ``cutjax.fp8_dot_general`` makes it.

    Attributes:
      recipe: how operands are quantized.
    """

    recipe: Recipe

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Returns the product of activations and weights, as ``jax.lax.dot_general`` would."""
        return self.of_roles(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding, (ACTIVATIONS, WEIGHTS)
        )

    def of_roles(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any,
        dtype: Any,
        out_sharding: Any,
        roles: Roles,
        made: Made = lambda *_: False,
    ) -> jax.Array:
        """Returns the product of operands that are what the roles say; of what is ``made``, as ``why_not`` has it."""
        lhs, rhs = unwrapped(lhs), unwrapped(rhs)

        def of_lax(x: jax.Array, y: jax.Array) -> jax.Array:
            return lax.dot_general(x, y, dimension_numbers, precision, dtype, out_sharding=out_sharding)

        if not (is_array_like(lhs) and is_array_like(rhs)):
            return of_lax(lhs, rhs)  # says what is wrong
        (out,) = jax.make_jaxpr(of_lax)(lhs, rhs).out_avals  # says what is wrong with the rest
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
        how = dot_precision.canonical(precision, "fp8_dot_general")
        if self.why_not(lhs, rhs, dimension_numbers, how, out, roles, made):
            return of_lax(lhs, rhs)
        dims: Any = tuple(tuple(map(tuple, pair)) for pair in dimension_numbers)
        return _planned(lhs, rhs, dims, self.recipe, roles, out)

    def product(
        self,
        product: Product,
        a: Any,
        b: Any,
        groups: int,
        precision: Any,
        backend: str,
        roles: Roles = (ACTIVATIONS, WEIGHTS),
        made: tuple[bool, bool] = (False, False),
    ) -> Product | str:
        """Returns a product, dense or of rows in groups, in float8, or the reason against it; told its factors.

        Of those that are ``made``, another product has the same quantized: that is free.
        """
        if a.dtype.name not in _WIDE or b.dtype.name not in _WIDE:
            return f"float8 is made of {', '.join(_WIDE)}, got {a.dtype} and {b.dtype}"
        if not _is_default(precision):
            return f"precision {precision} asks for more than float8 has"
        if any(symbolic(x) or 0 in x.shape for x in (a, b)):
            return f"it needs known sizes above 0, got {a.shape}, {b.shape}"
        of_a, of_b = ((tuple(x.shape), np.dtype(x.dtype)) for x in (a, b))
        why = why_wide(self.recipe, roles, product, groups, of_a, of_b, backend, made)
        return why or Float8(product, self.recipe, roles, backend, groups)

    def why_not(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any,
        out: Any,
        roles: Roles,
        made: Made = lambda *_: False,
    ) -> str:
        """Returns the reason why a product of two arrays or avals is not quantized, or ""; what is ``made`` is free."""
        if lhs.dtype.name not in _WIDE or rhs.dtype.name not in _WIDE or out.dtype.name not in _WIDE:
            return f"float8 is made of {', '.join(_WIDE)}, got {lhs.dtype} and {rhs.dtype}"
        if not _is_default(precision):
            return f"precision {precision} asks for more than float8 has"
        if any(symbolic(x) for x in (lhs, rhs)) or 0 in (*lhs.shape, *rhs.shape, *out.shape):
            return f"it needs known sizes above 0, got {lhs.shape}, {rhs.shape}"
        if any_reduced(*(jax.typeof(x) if isinstance(x, jax.Array) else x for x in (lhs, rhs)), out):
            return "an array is a sum that no device has"
        dims: Any = tuple(tuple(map(tuple, pair)) for pair in dimension_numbers)
        plan = contraction(lhs.shape, rhs.shape, dims)
        a, b = (rhs, lhs) if plan.swapped else (lhs, rhs)
        roles = (roles[1], roles[0]) if plan.swapped else roles
        backend = backends.resolve(None, "fp8_dot_general")
        shaped = (plan.a.shape, np.dtype(a.dtype)), (plan.b.shape, np.dtype(b.dtype))
        of_a = made(int(plan.swapped), plan.a.shape, roles[0], plan.layout[0] == "n")
        of_b = made(int(not plan.swapped), plan.b.shape, roles[1], plan.layout[1] == "t")
        return why_wide(self.recipe, roles, Dense(plan.layout), 0, *shaped, backend, (of_a, of_b))


Float8Recipe = str | Fp8DotGeneral | None


def in_float8(
    fp8: Float8Recipe,
    product: Product,
    pairs: Sequence[tuple[Any, Any]],
    groups: int,
    precision: Any,
    backend: str,
    where: str,
) -> Product:
    """Returns a product of activations and weights in float8, where a recipe says so of all pairs; else as it is.

    Args:
      fp8: as ``cutjax.grouped_gemm`` takes it.
      product: a dense one, or one of rows in groups.
      pairs: the factors, or what has their shapes and dtypes, of each of the products that are made so.
      groups: how many the rows have; 0 where they have none.
      precision: as ``dot_precision.canonical`` returns it.
      backend: as in ``cutjax.gemm``.
      where: the operation, for errors.

    Raises:
      TypeError: if ``fp8`` is none.
    """
    if fp8 is None:
        return product
    if not isinstance(fp8, str | Fp8DotGeneral):
        raise TypeError(f"{where}: fp8 must be a recipe, or cutjax.fp8_dot_general(...), got {fp8!r}")
    function = fp8_dot_general(fp8) if isinstance(fp8, str) else fp8
    made = [function.product(product, a, b, groups, precision, backend) for a, b in pairs]
    first, *_ = made  # each is the same product, of whatever shapes
    return product if any(isinstance(x, str) for x in made) or isinstance(first, str) else first


def _is_default(precision: Any) -> bool:
    return precision in (None, dot_precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


@automatic(lambda out, **_: lambda result: list(out.sharding.spec))
def _planned(lhs: jax.Array, rhs: jax.Array, dims: Any, recipe: Recipe, roles: Roles, out: Any) -> jax.Array:
    plan = contraction(lhs.shape, rhs.shape, dims)  # on a mesh too: gradients of weights sum over all rows at once
    a, b = plan.operands(lhs, rhs)
    roles = (roles[1], roles[0]) if plan.swapped else roles
    backend = backends.resolve(None, "fp8_dot_general")
    d = float8_product(a, b, layout=plan.layout, recipe=recipe, roles=roles, out_dtype=out.dtype, backend=backend)
    return converted(plan.result(d), out.dtype, out.weak_type)


def fp8_dot_general(
    recipe: str = "block", *, gradients: DTypeLike | None = None, policy: str = "auto"
) -> Fp8DotGeneral:
    """Returns a ``dot_general`` for training in float8: ``q(x) @ q(w)``, of operands that it quantizes as they come.

    Its derivatives are ``dx = q(dy) @ q(w)^T`` and ``dw = q(x)^T @ q(dy)``, each operand quantized along the
    contraction of that product: rounding itself has the derivative 1. Derivatives of these are such products again.
    Scales are those of the data, without state (current scaling): the largest magnitude of a block becomes the dtype's
    largest. Sums are in float32.

    Any contraction, batched or not, is taken. These stay ``jax.lax.dot_general``: products asked for in a higher
    precision, such as logits by ``precision="highest"``, which costs 16-bit operands nothing; operands other than
    bfloat16, float16 and float32; those of symbolic sizes (``jax.export``), under each policy; and those that float8 is
    not predicted to make faster.

    Args:
      recipe: the scales. "tensor": one for each matrix. "row": one for each row of the left matrix and each column of
        the right one. "block": as DeepSeek-V3's, for 1 x 128 of activations and gradients, along the contraction, and
        for 128 x 128 of weights, which are the right operand; sizes that 128 does not divide are padded with zeros.
      gradients: float8_e4m3fn or float8_e5m2, of gradients; by default the second for "tensor", else the first.
        All other operands are float8_e4m3fn.
      policy: "auto", or "always": float8 also where it is not predicted to be faster, as of small products, and on
        machines without a kernel.

    Returns:
      A function with the signature of ``jax.lax.dot_general``, hashable and equal to another of the same arguments;
      for ``dot_general=`` of Flax's layers, and ``cutjax.fuse(step, fp8=...)``.

    Raises:
      ValueError: if the recipe, the dtype or the policy is none of these.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> dot_general = cutjax.fp8_dot_general("block", policy="always")
      >>> layer = nnx.Linear(256, 128, dtype=jnp.bfloat16, dot_general=dot_general, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 256))).shape
      (4, 128)
    """
    if recipe not in RECIPES:
        raise ValueError(f"fp8_dot_general: unknown recipe {recipe!r}, expected one of {tuple(RECIPES)}")
    if policy not in POLICIES:
        raise ValueError(f"fp8_dot_general: unknown policy {policy!r}, expected one of {POLICIES}")
    dtype = np.dtype(RECIPES[recipe] if gradients is None else gradients).name
    if dtype not in ("float8_e4m3fn", "float8_e5m2"):
        raise ValueError(f"fp8_dot_general: gradients are float8_e4m3fn or float8_e5m2, got {dtype}")
    return Fp8DotGeneral(Recipe(recipe, dtype, policy))
