"""A product in float8 of operands that it quantizes itself, and its derivatives, which are such products too."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding import lowering
from cutjax.binding.define import define
from cutjax.binding.partition import mark_of
from cutjax.binding.rules import batch_axis, is_linear, is_zero, match_varying, zero_tangent
from cutjax.kernels import choose, xla
from cutjax.kernels.device import Device, device_of
from cutjax.kernels.families import fastest
from cutjax.kernels.operand import Scale
from cutjax.kernels.problem import Problem
from cutjax.ops.gemm import gemm
from cutjax.ops.quantized import Quantized, quantize
from cutjax.primitives.dense import FLIP

BLOCK = 128
ACTIVATIONS, WEIGHTS, GRADIENTS = "activations", "weights", "gradients"  # what an operand is, by which it is quantized
Roles = tuple[str, str]
# Of a copy's bandwidth, what XLA's passes reach that quantize; they read twice: for the scales, then for the values.
PASS_BANDWIDTH = 0.7
# Measured times over predicted ones of float8 kernels on an H200, at 4096 x 7168 x 16384, 4096 x 24576 x 1536 and 8192
# cubed: with scales of blocks 1.30 to 1.47, without 1.19 to 1.31. These multiply what is predicted.
SLOWER = {"block": 1.47, "row": 1.25, "tensor": 1.25}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The way in which operands are quantized.

    Attributes:
      name: "tensor", "row" or "block".
      gradients: the dtype of gradients; all else is float8_e4m3fn.
      policy: "auto" or "always", of products that float8 does not make faster.
    """

    name: str
    gradients: str
    policy: str

    def dtype(self, role: str) -> str:
        """Returns the dtype of an operand."""
        return self.gradients if role == GRADIENTS else "float8_e4m3fn"

    def block(self, role: str) -> tuple[int, int]:
        """Returns the sizes of a block along the rows, or columns, and along the contraction; -1 is the whole axis."""
        if self.name == "block":
            return (BLOCK if role == WEIGHTS else 1, BLOCK)
        return (-1, -1) if self.name == "tensor" else (1, -1)


@functools.lru_cache(maxsize=4096)
def why_wide(
    recipe: Recipe, roles: Roles, a: Any, b: Any, layout: str, dtypes: tuple[Any, Any, Any], backend: str
) -> str:
    """Returns the reason why a product is not predicted to be faster in float8, or "".

    Args:
      a, b: the operands' shapes, in a layout.
      dtypes: those of a, b and the result.
      backend: as in ``cutjax.gemm``.
    """
    if recipe.policy == "always":
        return ""
    if backend == "xla":
        return "XLA has no products of float8 with such scales" if recipe.name == "block" else ""
    return _why_wide(recipe, roles, a, b, layout, dtypes, device_of(lowering.target()))


def _why_wide(
    recipe: Recipe, roles: Roles, a: Any, b: Any, layout: str, dtypes: tuple[Any, Any, Any], device: Device
) -> str:
    m, k = a[-2:] if layout[0] == "n" else a[:-3:-1]
    n = b[-1] if layout[1] == "n" else b[-2]
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    of = functools.partial(Problem.of, out_dtype=dtypes[2], device=device)
    lies: dict[str, Any] = {"batch": batch, "a_batch": a[:-2], "b_batch": b[:-2]}
    wide = min(dtypes[:2], key=lambda dtype: dtype.itemsize)
    wide_us = xla.time_us(of(m, n, k, layout, wide, wide, **lies))
    if wide_us is None:
        return f"nobody knows XLA's time of it in {dtypes[0]}"
    blocks = recipe.name == "block"
    n, k = (_padded(size, BLOCK if blocks else 1) for size in (n, k))
    problem = of(m, n, k, "nt", recipe.dtype(roles[0]), recipe.dtype(roles[1]), **lies)
    if blocks:
        of_a, of_b = (Scale(np.dtype(np.float32), recipe.block(role)[0], BLOCK) for role in roles)
        (rhs,) = problem.bs
        rhs = dataclasses.replace(rhs, scale=of_b)
        problem = dataclasses.replace(problem, a=dataclasses.replace(problem.a, scale=of_a), bs=(rhs,))
    found = fastest(problem)
    if found is None:
        return "; ".join(choose.choose(problem).reasons)
    passes_us = sum(
        _quantized_us(math.prod(shape), dtype.itemsize, turned, device)
        for shape, dtype, turned in ((a, dtypes[0], layout[0] == "t"), (b, dtypes[1], layout[1] == "n"))
    )
    narrow_us = SLOWER[recipe.name] * found[1]
    if narrow_us + passes_us < wide_us:
        return ""
    return f"{wide_us:.1f} us in {dtypes[0]}, {narrow_us:.1f} in float8 after {passes_us:.1f} that quantize"


def _quantized_us(size: int, itemsize: int, turned: bool, device: Device) -> float:
    """Returns the time in which XLA quantizes so many elements, and transposes the values where they do not lie so."""
    return 1e6 * size * (2 * itemsize + 1 + 2 * turned) / (device.bytes_per_second * PASS_BANDWIDTH)


def product(
    a: jax.Array, b: jax.Array, *, layout: str, recipe: Recipe, roles: Roles, out_dtype: Any, backend: str
) -> jax.Array:
    """Returns ``a @ b``, in float8 where that is predicted to be faster, or the recipe says "always"."""
    a, b = match_varying(a, b)
    dtypes = a.dtype, b.dtype, np.dtype(out_dtype)
    if why_wide(recipe, roles, a.shape, b.shape, layout, dtypes, backend):
        dtype = np.promote_types(a.dtype, b.dtype) if a.dtype == b.dtype else np.dtype(np.float32)
        return gemm(a.astype(dtype), b.astype(dtype), layout=layout, out_dtype=out_dtype, backend=backend)
    how = {"layout": layout, "recipe": recipe, "roles": roles, "out_dtype": dtypes[2], "backend": backend}
    return fp8_p.bind(a, b, **how, mark=mark_of(backend))


def quantized(x: jax.Array, recipe: Recipe, role: str, last: bool) -> Quantized:
    """Returns an operand quantized as a recipe says, its contracted axis last.

    Values are quantized as they lie and transposed afterwards, in 8 bits: weights have the same values either way, so
    XLA finds that a step quantizes them once. Of blocks axes are padded with zeros to whole ones.

    Args:
      x: ``[..., mn, k]``, or ``[..., k, mn]``.
      recipe, role: how.
      last: whether its contracted axis is the last.
    """
    block = recipe.block(role)
    sizes = x.shape[-2:] if last else x.shape[:-3:-1]
    pads = [_padded(size, step) - size for size, step in zip(sizes, block, strict=True)]
    if any(pads):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 2) + [(0, p, 0) for p in _turned(pads, last)])
    q = quantize(x, recipe.dtype(role), block=_turned(block, last))
    return q if last else Quantized(q.values.mT, q.scale.mT)


def _turned(pair: Sequence[int], last: bool) -> Sequence[int]:
    return tuple(pair) if last else tuple(pair)[::-1]


def _padded(size: int, step: int) -> int:
    return size if step < 2 else -(-size // step) * step


def _reference(
    a: jax.Array, b: jax.Array, *, layout: str, recipe: Recipe, roles: Roles, out_dtype: Any, backend: str
) -> jax.Array:
    m = a.shape[-2 if layout[0] == "n" else -1]
    n = b.shape[-1 if layout[1] == "n" else -2]
    of_a = quantized(a, recipe, roles[0], layout[0] == "n")
    of_b = quantized(b, recipe, roles[1], layout[1] == "t")
    d = gemm(of_a, of_b, layout="nt", out_dtype=out_dtype, backend=backend)
    return d if d.shape[-2:] == (m, n) else d[..., :m, :n]


def _abstract(a: Any, b: Any, *, layout: str, out_dtype: Any, **_: Any) -> Any:
    m = a.shape[-2 if layout[0] == "n" else -1]
    n = b.shape[-1 if layout[1] == "n" else -2]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n)
    return a.update(shape=shape, dtype=out_dtype, weak_type=False)


def _batch(args: Any, dims: Any, *, layout: str, recipe: Recipe, **how: Any) -> tuple[jax.Array, int]:
    """Batches rows as rows where b is shared, unless one scale is for all of them."""
    how |= {"layout": layout, "recipe": recipe}
    a, b = batch_axis(args, dims, 0)
    if dims[1] is None and a.ndim == 3 and layout[0] == "n" and recipe.name != "tensor":
        d = _bound(lax.reshape(a, (a.shape[0] * a.shape[1], a.shape[2])), args[1], **how)
        return lax.reshape(d, (*a.shape[:2], d.shape[1])), 0
    return _bound(a, b, **how), 0


def _bound(a: jax.Array, b: jax.Array, *, backend: str, **how: Any) -> jax.Array:
    return fp8_p.bind(a, b, backend=backend, **how, mark=mark_of(backend))


def _jvp(primals: Any, tangents: Any, *, roles: Roles, **how: Any) -> tuple[jax.Array, Any]:
    """The tangent is that of the product itself, of a quantized tangent and the other operand, quantized."""
    a, b = primals
    d, (a_dot, b_dot) = _bound(a, b, roles=roles, **how), tangents
    terms = []
    if not is_zero(a_dot):
        terms.append(product(a_dot, b, roles=(GRADIENTS, roles[1]), **how))
    if not is_zero(b_dot):
        terms.append(product(a, b_dot, roles=(roles[0], GRADIENTS), **how))
    return d, functools.reduce(lax.add, terms) if terms else zero_tangent(d)


def _transpose(g: Any, a: Any, b: Any, *, layout: str, roles: Roles, out_dtype: Any, **how: Any) -> list[Any]:
    left = is_linear(a)
    if is_zero(g):
        return [None, None]
    like, other = (a.aval, b) if left else (b.aval, a)
    stays = layout[0 if left else 1] == "n"
    letter = layout[1] if left else layout[0]
    role = roles[1 if left else 0]
    # Of d = a b: a' = g b^T and b' = a^T g, or the transposes of these where a or b lies transposed.
    if left and stays:
        x, y, way, of = g, other, "n" + FLIP[letter], (GRADIENTS, role)
    elif left:
        x, y, way, of = other, g, letter + "t", (role, GRADIENTS)
    elif stays:
        x, y, way, of = other, g, FLIP[letter] + "n", (role, GRADIENTS)
    else:
        x, y, way, of = g, other, "t" + letter, (GRADIENTS, role)
    axes = [i for i, size in enumerate(like.shape[:-2]) if size == 1 != g.shape[i]]
    dtype = np.dtype(np.float32) if axes else like.dtype
    found = product(x, y, layout=way, roles=of, out_dtype=dtype, **how)
    if axes:  # of an operand that was for a whole batch
        found = found.sum(axes, keepdims=True).astype(like.dtype)
    return [found, None] if left else [None, found]


fp8_p = define(
    "cutjax_fp8",
    abstract=_abstract,
    reference=_reference,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)
