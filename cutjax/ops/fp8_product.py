"""Products in float8 of operands that they quantize themselves, dense and of rows in groups.

Their derivatives are such products too, and they have epilogues as any other has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding import lowering
from cutjax.binding.rules import match_varying
from cutjax.dot_precision import Canonical
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels import choose, quantization, xla
from cutjax.kernels.device import Device, device_of
from cutjax.kernels.families import fastest
from cutjax.kernels.operand import Scale
from cutjax.ops.quantized import Quantized, quantize
from cutjax.ops.scales import scales_of
from cutjax.primitives import product as products
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors
from cutjax.primitives.groups import in_some_group
from cutjax.primitives.hints import NO_HINTS
from cutjax.primitives.product import Folded, Product
from cutjax.primitives.product_rules import define_product
from cutjax.primitives.quantization import quantize_p
from cutjax.primitives.ragged import Depth, Rows
from cutjax.primitives.wrapped import Wrapped

BLOCK = 128
ACTIVATIONS, WEIGHTS, GRADIENTS = "activations", "weights", "gradients"  # what an operand is, by which it is quantized
Roles = tuple[str, str]
# Of a copy's bandwidth, what XLA's passes reach that quantize; they read twice: for the scales, then for the values.
PASS_BANDWIDTH = 0.7
# What XLA's time may be of that of a kernel whose results have scales of matrices, or of rows and columns, as they are
# predicted: 0.85 at least of 256 sizes, so that XLA runs where there is no kernel. Of scales of matrices XLA's product
# writes float32, which a pass scales and rounds: 8192 x 4096 x 14336 took 745 us and a kernel 712, 14336 x 4096 x 8192
# 754 and 675. Of rows, 8192 cubed took 835 us and XLA 888, predicted equal, 4096 x 7168 x 16384 720 and 730, predicted
# 760 and 733. XLA's autotuner compiles many Triton kernels for each such product: a step with seven was not compiled in
# 150 s, with none in 14 (experiments/gates-groups-h200.json, experiments/fp8-passes-h200.json).
SCALES_LEAD = 0.8
# Measured times over predicted ones on an H200: of float8 kernels with scales in blocks, or in groups, 1.10 at most; of
# others, dense, 0.83 to 1.0 over 18 sizes and two recipes, which leaves room for what a program's epilogue would have
# saved. And of 16 bits in groups, of which nobody knows XLA's time, 0.80 to 0.86 where k is over 1,000
# (experiments/experts-again-h200.json).
SLOWER, GROUPED_WIDE = 1.12, 0.85


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


@define_product("cutjax_fp8", composed=True)
@dataclasses.dataclass(frozen=True)
class Float8(Wrapped):
    """Another product, dense or of rows in groups, of factors that are quantized first.

    Attributes:
      recipe: how.
      roles: what a and b are.
      backend: that of its derivatives, of which each is float8 where that is predicted to be faster.
      count: of the groups that the rows have; 0 where they have none.
      both: of a and of b, whether the program wants it contracted along its other axis too. Then a pass over it writes
        both orders, and XLA keeps one of the equal passes that its products ask for.
      rounded: of a and of b, the dtype to which the program rounds it, and which is multiplied; "" where it is that.
    """

    recipe: Recipe
    roles: Roles
    backend: str
    count: int = 0
    both: tuple[bool, bool] = (False, False)
    rounded: tuple[str, str] = ("", "")

    def multiplied(self, a: np.dtype) -> np.dtype:
        return np.dtype(self.rounded[0] or a)

    def tile(self, a: Any, *rest: Any) -> Any:
        return self.product.tile(a, *rest).update(dtype=self.multiplied(a.dtype), weak_type=False)

    def composed(
        self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array], **params: Any
    ) -> Sequence[jax.Array]:
        inner, (a, *bs) = self._quantized(factors)
        layout = layout_of(inner)
        of_results = isinstance(inner, Depth)
        rank = factors.a.ndim if isinstance(inner, Rows) else 0
        scales = scales_of(a, tuple(bs), layout, self.where, rank=rank)
        scales = scales.of_results() if of_results else scales
        found, given = scales.factored(inner, a.values, [b.values for b in bs], factors.context)
        values, params = found.multiplied(a.values.dtype), {**params, "in_place": (), "config": None}
        if self.recipe.name != "block":
            hints = params.get("hints", NO_HINTS)
            params["hints"] = dataclasses.replace(hints, lead=min(hints.lead, SCALES_LEAD))
        if epilogue.plain:
            (out,) = epilogue.outputs
            before, taken, dtype = scales.before(None, (), values, np.dtype(out.dtype))
            if before is None:
                return [products.multiply(found, *given.arrays, out_dtype=np.dtype(out.dtype), **params)]
            return [products.call(found, before, given, taken, out_dtype=dtype, **params)]
        count = epilogue.products

        def applied(*args: jax.Array) -> list[jax.Array]:
            return list(epilogue.apply(args[:count], args[count:]))

        before, taken, _ = scales.before(applied, tuple(operands), values, None)
        assert before is not None
        if before is applied:
            return products.bind(found, epilogue, given, operands, **params)
        return products.call(found, before, given, taken, out_dtype=None, **params)

    def _quantized(self, factors: Factors) -> tuple[Product, list[Quantized]]:
        """Returns the product of factors whose contracted axis is last, where it can have them so, and these."""
        layout, product = layout_of(self.product), self.product
        rows = [(factors.a, layout[0] == "n"), *((b, layout[1] == "t") for b in factors.bs)]
        if isinstance(product, Dense):
            product, turned = Dense("nt", lies=product.lies), True
        elif isinstance(product, Rows):
            product, turned = Rows(product.leading, "nt"), True
        else:
            turned = False
        of_a, of_b = zip(self.roles, self.both, self.rounded, strict=True)
        how = [of_a, *(of_b for _ in factors.bs)]
        found = []
        for i, ((x, last), (role, both, rounded)) in enumerate(zip(rows, how, strict=True)):
            backend = self.backend
            if factors.context and _reaches(product, i, self.recipe, role):
                (sizes,), m, leading = factors.context, factors.a.shape[-2], product.leading  # pyright: ignore[reportAttributeAccessIssue]
                x, backend = in_some_group(x, sizes, m, leading), "xla"  # which quantizes in the same fusions
            found.append(quantized(x, self.recipe, role, last, turned, both, backend, rounded))
        return product, found

    def fold(self, epilogue: Epilogue, factors: Factors, operands: Sequence[jax.Array]) -> Folded | None:
        folded = None if self.recipe.name == "tensor" else self.product.fold(epilogue, factors, operands)
        return folded and folded._replace(product=dataclasses.replace(self, product=folded.product))

    # Its derivatives: rounding has the derivative 1.

    def tangents(
        self, multiply: Callable[..., list[jax.Array]], factors: Factors, dots: Factors
    ) -> list[jax.Array | None]:
        found = []
        for b, b_dot in zip(factors.bs, dots.bs, strict=True):
            terms = []
            if dots.a is not None:
                a_dot, other = self._round(0, dots.a), self._round(1, b)
                product, a_dot, other = self._of(self.product, (GRADIENTS, self.roles[1]), a_dot, other)
                terms += multiply(product, a_dot, [other])
            if b_dot is not None:
                a, b_dot = self._round(0, factors.a), self._round(1, b_dot)
                product, a, b_dot = self._of(self.product, (self.roles[0], GRADIENTS), a, b_dot)
                terms += multiply(product, a, [b_dot])
            found.append(functools.reduce(lax.add, terms) if terms else None)
        return found

    def cotangent(
        self, i: int, g: jax.Array, other: jax.Array, precision: Canonical
    ) -> tuple[Product, tuple[jax.Array, jax.Array], Canonical]:
        back, (x, y), precision = self.product.cotangent(i, g, self._round(1 - i, other), precision)
        role = self.roles[1 - i]
        first = x is g
        back, x, y = self._of(back, (GRADIENTS, role) if first else (role, GRADIENTS), x, y)
        if isinstance(back, Float8) and isinstance(back.product, Dense):
            gradient = back.product.tile(jax.typeof(x), jax.typeof(y))
            if self._wants(1 - i, jax.typeof(g), gradient):
                back = dataclasses.replace(back, both=(first, not first))
        return back, (x, y), precision

    def _wants(self, i: int, g: Any, other: Any) -> bool:
        """True if the gradient in a (i = 0) or b (1) is a product in float8, too: along another axis of g."""
        back, (x, y), _ = self.product.cotangent(i, g, other, None)
        role = self.roles[1 - i]
        roles = (GRADIENTS, role) if x is g else (role, GRADIENTS)
        return not why_wide(self.recipe, roles, back, 0, _shaped(x), _shaped(y), self.backend)

    def with_cotangent(self, g: jax.Array, other: jax.Array, of: np.dtype) -> tuple[jax.Array, jax.Array]:
        return g, other

    def widened(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return a, b

    def _round(self, i: int, x: jax.Array) -> jax.Array:
        return x.astype(self.rounded[i] or x.dtype)

    def _of(self, product: Product, roles: Roles, a: jax.Array, b: jax.Array) -> tuple[Product, jax.Array, jax.Array]:
        return float8(product, a, b, self.recipe, roles, self.backend, self.count)


def float8(
    product: Product, a: Any, b: Any, recipe: Recipe, roles: Roles, backend: str, groups: int = 0
) -> tuple[Product, Any, Any]:
    """Returns a product of two arrays as one of float8 where that is to be, and the arrays; else in one dtype."""
    if not why_wide(recipe, roles, product, groups, _shaped(a), _shaped(b), backend):
        return Float8(product, recipe, roles, backend, groups), a, b
    dtype = a.dtype if a.dtype == b.dtype else np.dtype(np.float32)
    return product, a.astype(dtype), b.astype(dtype)


def _shaped(x: Any) -> tuple[tuple[int, ...], np.dtype]:
    return tuple(x.shape), np.dtype(x.dtype)


def layout_of(product: Product) -> str:
    """Returns the layout of a product's factors: "n" or "t" of each, as of a dense one."""
    return "tn" if isinstance(product, Depth) else product.layout  # pyright: ignore[reportAttributeAccessIssue]


Shaped = tuple[tuple[int, ...], np.dtype]


def why_wide(
    recipe: Recipe,
    roles: Roles,
    product: Product,
    groups: int,
    a: Shaped,
    b: Shaped,
    backend: str,
    made: tuple[bool, bool] = (False, False),
) -> str:
    """Returns the reason why a product is not predicted to be faster in float8, or "".

    Args:
      recipe: how its factors would be quantized.
      roles: what they are.
      product: a dense one, or one of rows in groups.
      groups: how many the rows have; 0 where they have none.
      a: the shape and dtype of the first factor.
      b: those of the second.
      backend: as in ``cutjax.gemm``.
      made: of a and of b, whether another product has it quantized so, which then costs nothing.
    """
    if recipe.policy == "always":
        return ""
    if backend == "xla":
        return "XLA has no products of float8 with such scales" if recipe.name == "block" else ""
    return _why_wide(recipe, roles, product, groups, a, b, device_of(lowering.target()), made)


@functools.lru_cache(maxsize=4096)
def _why_wide(
    recipe: Recipe,
    roles: Roles,
    product: Product,
    groups: int,
    a: Shaped,
    b: Shaped,
    device: Device,
    made: tuple[bool, bool] = (False, False),
) -> str:
    layout, (a, b) = layout_of(product), _aligned(product, a, b)
    sizes = [jax.ShapeDtypeStruct((*(1 for _ in a[0][:-2]), groups + product.leading), np.int32)] if groups else []  # pyright: ignore[reportAttributeAccessIssue]
    out = min((a[1], b[1]), key=lambda dtype: dtype.itemsize)
    wide = product.problem(*(jax.ShapeDtypeStruct(x[0], out) for x in (a, b)), *sizes, out_dtype=out, device=device)
    wide_us = xla.time_us(wide)
    if wide_us is None and groups and (ours := fastest(wide)):
        wide_us = GROUPED_WIDE * ours[1]
    if wide_us is None:
        return f"nobody knows XLA's time of it in {a[1]}"
    blocks, inner, avals = recipe.name == "block", product, []
    lies = "nt" if not isinstance(product, Depth) else layout
    if isinstance(product, Dense | Rows):
        inner = Dense("nt") if isinstance(product, Dense) else Rows(product.leading, "nt")
    for (shape, _), last, now, role in zip((a, b), (layout[0] == "n", layout[1] == "t"), lies, roles, strict=True):
        mn, k = shape[-2:] if last else shape[:-3:-1]
        k = _padded(k, BLOCK if blocks else 1)
        k_last = (now == "n") == (len(avals) == 0)
        avals.append(jax.ShapeDtypeStruct((*shape[:-2], *((mn, k) if k_last else (k, mn))), recipe.dtype(role)))
    problem = inner.problem(*avals, *sizes, out_dtype=out, device=device)
    if blocks:
        each = [recipe.block(role)[0] for role in roles]
        each = [1 if size % step else step for size, step in zip((problem.m, problem.n), each, strict=True)]
        of_a, of_b = (Scale(np.dtype(np.float32), step, BLOCK) for step in each)
        (rhs,) = problem.bs
        rhs = dataclasses.replace(rhs, scale=of_b)
        problem = dataclasses.replace(problem, a=dataclasses.replace(problem.a, scale=of_a), bs=(rhs,))
    found = fastest(problem)
    if found is None:
        return "; ".join(choose.choose(problem).reasons)
    factors = (a, roles[0], layout[0] == "n"), (b, roles[1], layout[1] == "t")
    passes_us = sum(
        _quantized_us(x, recipe, role, last, bool(groups) and _reaches(product, i, recipe, role), device)
        for i, (x, role, last) in enumerate(factors)
        if not made[i]
    )
    narrow_us = SLOWER * found[1]
    if narrow_us + passes_us < wide_us:
        return ""
    return f"{wide_us:.1f} us in {a[1]}, {narrow_us:.1f} in float8 after {passes_us:.1f} that quantize"


def _reaches(product: Product, i: int, recipe: Recipe, role: str) -> bool:
    """True if what lies in rows of no group would reach a scale of the first factor (i = 0) or of another.

    Where each row has scales of its own it reaches none: no product reads such rows.
    """
    return isinstance(product, Depth) or (isinstance(product, Rows) and i == 0 and recipe.block(role)[0] != 1)


def _aligned(product: Product, a: Shaped, b: Shaped) -> tuple[Shaped, Shaped]:
    """Returns shapes of as many batch axes each, those of a as more rows where one matrix is for all of them."""
    (of_a, *_), (of_b, *_) = a, b
    _, own = product.own_axes(1)[:2]
    if isinstance(product, Dense) and product.layout[0] == "n" and math.prod(of_b[:-2]) == 1:
        return ((math.prod(of_a[:-1]), of_a[-1]), a[1]), (of_b[-2:], b[1])
    rank = max(len(of_a) - 2, len(of_b) - own)
    of_a, of_b = (1,) * (rank + 2 - len(of_a)) + of_a, (1,) * (rank + own - len(of_b)) + of_b
    return (of_a, a[1]), (of_b, b[1])


def _quantized_us(x: Shaped, recipe: Recipe, role: str, last: bool, by_xla: bool, device: Device) -> float:
    """Returns the time in which an operand is quantized, and values are transposed that do not lie along k.

    Of gradients, which two products want in either order, a pass that writes both counts for half.
    """
    (shape, dtype), both = x, role == GRADIENTS
    if not by_xla:
        aval = jax.ShapeDtypeStruct(shape, dtype)
        block, to = recipe.block(role), np.dtype(recipe.dtype(role))
        orders = {"own": last or both, "turned": not last or both}
        choice = quantization.choose(quantization.Problem.of(aval, to, block, device=device, **orders), "auto")
        if choice.time_us is not None:
            return choice.time_us / (1 + both)
    sizes = shape[-2:] if last else shape[:-3:-1]
    written = math.prod(shape[:-2]) * math.prod(map(_padded, sizes, recipe.block(role)))
    moved = math.prod(shape) * 2 * dtype.itemsize + written * (1 + 2 * (not last))
    return 2 * xla.PASS_US + 1e6 * moved / (device.bytes_per_second * PASS_BANDWIDTH)


def float8_product(
    a: jax.Array, b: jax.Array, *, layout: str, recipe: Recipe, roles: Roles, out_dtype: Any, backend: str
) -> jax.Array:
    """Returns ``a @ b`` in float8; whether each of its derivatives is, the recipe says."""
    a, b = match_varying(a, b)
    return products.multiply(
        Float8(Dense(layout), recipe, roles, backend),
        a,
        b,
        out_dtype=np.dtype(out_dtype),
        precision=None,
        backend=backend,
    )


def quantized(
    x: jax.Array,
    recipe: Recipe,
    role: str,
    last: bool,
    turned: bool,
    both: bool = False,
    backend: str = "auto",
    rounded: str = "",
) -> Quantized:
    """Returns an operand quantized as a recipe says.

    Values are quantized as they lie and transposed afterwards, in 8 bits: weights have the same values either way, so
    XLA finds that a step quantizes them once. The contracted axis is padded with zeros to whole blocks; a block that
    the other axis has a part of is one of each row, or column, in it.

    Args:
      x: ``[..., mn, k]``, or ``[..., k, mn]``.
      recipe: how.
      role: what it is.
      last: whether its contracted axis is the last.
      turned: whether that is to be the last.
      both: whether one pass is to write what another product wants too, which contracts the other axis.
      backend: of that pass.
      rounded: the dtype to which it is rounded first, if any.
    """
    block = recipe.block(role)
    sizes = x.shape[-2:] if last else x.shape[:-3:-1]
    pads = [_padded(size, step) - size for size, step in zip(sizes, block, strict=True)]
    if (last or turned) and not any(x.shape[i] % BLOCK for i in (-2, -1)):
        orders = {"own": last or both, "turned": not last or both}
        how = {"dtype": np.dtype(recipe.dtype(role)), "block": block, "backend": backend, "rounded": rounded}
        found = quantize_p.bind(x, **how, **orders)
        return Quantized(*(found[:2] if last else found[-2:]))
    x = x.astype(rounded or x.dtype)
    if any(pads):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 2) + [(0, p, 0) for p in _turned(pads, last)])
    q = quantize(x, recipe.dtype(role), block=_turned(block, last))
    if pads[0]:
        at = x.ndim - (2 if last else 1)
        scale = jnp.repeat(q.scale, block[0], at)
        q = Quantized(*(lax.slice_in_dim(y, 0, sizes[0], axis=at) for y in (q.values, scale)))
    return q if last or not turned else Quantized(q.values.mT, q.scale.mT)


def _turned(pair: Sequence[int], last: bool) -> Sequence[int]:
    return tuple(pair) if last else tuple(pair)[::-1]


def _padded(size: int, step: int) -> int:
    return size if step < 2 else -(-size // step) * step
