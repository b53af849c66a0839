"""The precision of a product: what ``precision=`` means to references and kernels, and the accumulators' dtype."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.dtypes import FLOAT8, promoted

Canonical = None | tuple[lax.Precision, lax.Precision] | lax.DotAlgorithmPreset | lax.DotAlgorithm

DEFAULT = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
_FLOAT8 = tuple(preset for preset in lax.DotAlgorithmPreset if preset.name.startswith("ANY_F8"))


def canonical(precision: Any, where: str) -> Canonical:
    """Returns a precision in jax.lax's canonical form; None is that of the scope.

    The scope's is ``jax.default_matmul_precision``. Hashable; again canonical it is the same. An error says in which
    operation it was.
    """
    precision = tuple(precision) if type(precision) is list else precision
    try:
        hash(precision)
        return _canonical(precision, repr(precision), jax.config.jax_default_matmul_precision)  # pyright: ignore[reportAttributeAccessIssue]
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError):
            raise ValueError(f"{where}: {error}") from None
        raise ValueError(f"{where}: precision must be one that jax.lax.dot takes, got {precision!r}") from None


@functools.cache
def _canonical(precision: Any, shown: str, scope: str | None) -> Canonical:
    """Returns the parameter of the dot_general that jax.lax makes; it depends on the scope.

    ``shown`` tells from each other what is equal, and not the same to jax: 1, 1.0 and True.
    """
    x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    dot = functools.partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), precision=precision)
    (eqn,) = jax.make_jaxpr(dot)(x, x).jaxpr.eqns
    return eqn.params["precision"]


ACCUMULATE = ("f32", "fast")


def accumulated(precision: Canonical, accumulate: str, *dtypes: np.dtype) -> Canonical:
    """Returns the precision of a product, of float8 that of sums as fast as the tensor cores have them where asked."""
    if accumulate == "f32" or precision is not None or any(dtype.name not in FLOAT8 for dtype in dtypes):
        return precision
    return lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


def swapped(precision: Canonical) -> Canonical:
    """Returns the precision of a product whose operands have changed places."""
    if isinstance(precision, lax.DotAlgorithm):
        p = precision
        return p._replace(
            lhs_precision_type=p.rhs_precision_type,
            rhs_precision_type=p.lhs_precision_type,
            lhs_component_count=p.rhs_component_count,
            rhs_component_count=p.lhs_component_count,
        )
    return (precision[1], precision[0]) if isinstance(precision, tuple) else precision


def of_cotangents(precision: Canonical, dtype: np.dtype, where: str) -> Canonical:
    """Returns the precision of a product with a cotangent, in ``dtype``, of a product in that precision: the same.

    As in lax None is again what the scope says. A float8 algorithm takes no wider operands.
    """
    return canonical(of_wider(precision) if dtype.itemsize > 1 else precision, where)


def of_wider(precision: Canonical) -> Canonical:
    """Returns the precision of the same product of wider operands: None in place of a float8 algorithm."""
    return None if precision in _FLOAT8 else precision


def math(
    precision: Canonical, dtype: np.dtype, accumulator: np.dtype, tf32: bool = True, both: bool = True
) -> str | tuple[str, ...]:
    """Returns the way in which operands of a dtype are multiplied, a ``Problem.math``, or the reasons against a kernel.

    A name says no less than XLA does: "tf32" is what XLA makes of float32 and complex64 unless either operand's
    precision is "highest". Operands of 16 bits are multiplied exactly by all that would split or shorten float32.

    Args:
      precision: as `canonical` returns it.
      dtype: the left operand's.
      both: whether the right one has the same.
      accumulator: that in which the products are added up.
      tf32: whether the device has TF32, from sm_80 on.
    """
    if precision is None or precision is lax.DotAlgorithmPreset.DEFAULT or type(precision) is tuple:
        if both and dtype == jnp.float8_e5m2:  # of float8_e4m3fn XLA has the same instruction
            return ("XLA adds up products of float8_e5m2 in float32, kernels only by a preset's name, in fewer bits",)
        rounded = dtype in _TF32 and accumulator == dtype and tf32 and not highest(precision)
        return "tf32" if rounded else ""
    algorithm = _preset(precision) if isinstance(precision, lax.DotAlgorithm) else precision
    name = algorithm.name if isinstance(algorithm, lax.DotAlgorithmPreset) else ""
    if name == "F64_F64_F64" and np.float64 == accumulator:
        return ""
    found = _MATH.get((name, dtype.name)) if accumulator.itemsize == 4 else None
    if found is None:
        return (f"precision {precision}: kernels have no such products of {dtype.name}, added up in {accumulator}",)
    return found


def highest(precision: Canonical) -> bool:
    """True if a canonical precision is "highest", of either operand."""
    return type(precision) is tuple and lax.Precision.HIGHEST in precision


# The names of what XLA does with operands of a dtype, other than to round them to 16 bits first.
_MATH = {
    ("F16_F16_F16", "float16"): "f16",
    ("F16_F16_F32", "float16"): "",
    ("BF16_BF16_F32", "bfloat16"): "",
    ("BF16_BF16_F32", "float32"): "bf16",
    ("F32_F32_F32", "float32"): "",
}
# Of these XLA adds up more closely than tensor cores do, where it divides k or rounds less often.
_CLOSER = {("BF16_BF16_F32_X3", "bfloat16"), ("BF16_BF16_F32_X6", "bfloat16"), ("BF16_BF16_F32_X6", "float16")}
for _name in ("BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "TF32_TF32_F32", "TF32_TF32_F32_X3"):
    _MATH[_name, "float32"] = _name.split("_")[0].lower() + (_name[-2:].lower() if "X" in _name else "")
    # Of fewer bits than TF32 has, or than two parts of bf16: products that are exact already.
    _MATH |= {(_name, dtype): "" for dtype in ("bfloat16", "float16") if (_name, dtype) not in _CLOSER}
for _preset_of_8_bits in _FLOAT8:
    _how = "fast" if "FAST" in _preset_of_8_bits.name else ""
    _MATH |= {(_preset_of_8_bits.name, name): _how for name in ("float8_e4m3fn", "float8_e5m2")}
_TF32 = (np.dtype(np.float32), np.dtype(np.complex64))


@functools.cache
def _preset(algorithm: lax.DotAlgorithm) -> lax.DotAlgorithmPreset | None:
    """Returns the preset that says the same as an algorithm spelled out; TF32 cannot be."""
    left, right, acc = (np.dtype(x) for x in algorithm[:3])
    if algorithm[3:5] != (1, 1) or left.itemsize != right.itemsize or (left != right and left.itemsize > 1):
        return None
    operand, result = (f"{'BF' if x == jnp.bfloat16 else 'F'}{8 * x.itemsize}" for x in (left, acc))
    many = algorithm.num_primitive_operations
    fast = "_FAST_ACCUM" if algorithm.allow_imprecise_accumulation else ""
    name = f"ANY_F8_ANY_F8_{result}{fast}" if left.itemsize == 1 else f"{operand}_{operand}_{result}"
    return lax.DotAlgorithmPreset.__members__.get(name + (f"_X{many}" if many > 1 else ""))


@functools.cache
def accumulator(dtype: np.dtype, out_dtype: np.dtype | None = None) -> np.dtype:
    """Returns the dtype in which products of a dtype are added up: at least 32 bits, and as wide as the result."""
    if out_dtype is not None:
        if jnp.issubdtype(out_dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
            out_dtype = np.dtype(jnp.finfo(out_dtype).dtype)
        own, out = accumulator(dtype), accumulator(out_dtype)
        if jnp.issubdtype(own, jnp.integer) and jnp.issubdtype(out, jnp.integer):
            return max(out, own, key=lambda dtype: dtype.itemsize)  # of whatever sign: sums are exact, modulo 2^bits
        return promoted(own, out)
    if dtype.itemsize < 4:
        if jnp.issubdtype(dtype, jnp.floating):
            return np.dtype(np.float32)
        if jnp.issubdtype(dtype, jnp.integer):
            return np.dtype(np.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint32)
    return dtype
