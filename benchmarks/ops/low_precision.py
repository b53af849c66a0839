"""Products of float8, 8-bit and 4-bit operands beside XLA's: ``python -m benchmarks run --op low_precision --tag fp8``.

Kernels of ``backend="cuda"``, the cost model's first; XLA multiplies float8 as it is, scaling the result by rows and
columns, and dequantizes what has scales of blocks or integers beside 16 bits. The peer "bf16" is our kernel for
operands that were bf16 all along. Right is what is near the product of the dequantized operands in TF32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import cutjax
from benchmarks.suite import Function, Peer, Product, Suite

E4M3, BF16 = "float8_e4m3fn", "bfloat16"
WRONG = 8e-3  # in Frobenius norm: a result is rounded to bf16, dequantized weights too


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A product a [m, k] by b of narrow operands; the result is bf16.

    Attributes:
      m, n, k: the problem; m is of all groups.
      a, b: dtypes.
      layout: as gemm's.
      of_a, of_b: blocks of the scales, as ``cutjax.quantize`` takes them of the arrays; None where there are none.
      groups: of rows, of equal size, each with its b; 0 for a dense product.
      outer: whether rows are contracted in groups: the weight gradient a^T b, m by n for each group, k in all.
      accumulate: as gemm's.
      us: the time asked for.
      tags: the sets this case belongs to.
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    layout: str = "nt"
    of_a: tuple[int, int] | None = None
    of_b: tuple[int, int] | None = None
    groups: int = 0
    outer: bool = False
    accumulate: str = "f32"
    us: float = 0.0
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """E.g. ``128x24576x1536 float8_e4m3fn 1x128 by 128x128``."""
        scales = " by ".join("x".join(map(str, block)) if block else "1" for block in (self.of_a, self.of_b))
        dtypes = self.a if self.a == self.b else f"{self.a} x {self.b}"
        more = f"{self.groups}g" if self.groups else "", "outer" if self.outer else "", self.accumulate
        words = f"{self.m}x{self.n}x{self.k}", self.layout, dtypes, scales if self.of_a or self.of_b else "", *more
        return " ".join(word for word in words if word and word != "f32")

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.outer:
            return (self.k, self.m), (self.k, self.n)
        groups = (self.groups,) if self.groups else ()
        a = (self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)
        return a, (*groups, *((self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)))

    def inputs(self, seed: int) -> tuple[Any, ...]:
        """Random normal operands, quantized; both in bf16; the sizes of groups, which a program would compute."""
        found = []
        for key, shape, dtype, block in zip(
            jax.random.split(jax.random.key(seed, impl="rbg")),
            self._shapes(),
            (self.a, self.b),
            (self.of_a, self.of_b),
            strict=True,
        ):
            found.append(_drawn(key, shape, dtype, block))
        return *found, *(_wide(x, jnp.bfloat16) for x in found), self.sizes

    @property
    def sizes(self) -> jax.Array:
        """Rows of each group; none where there are no groups."""
        return jnp.full(self.groups, (self.k if self.outer else self.m) // max(self.groups, 1), jnp.int32)

    def multiply(self, a: Any, b: Any, sizes: jax.Array, **how: Any) -> jax.Array:
        """Our product."""
        how["out_dtype"] = jnp.bfloat16
        if self.outer:
            return cutjax.grouped_outer(a, b, sizes, **how)
        how["accumulate"] = self.accumulate
        if self.groups:
            return cutjax.grouped_gemm(a, b, sizes, layout=self.layout, **how)
        return cutjax.gemm(a, b, layout=self.layout, **how)

    def multiply_wide(self, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        """Our product of the operands in bf16."""
        wide = dataclasses.replace(self, a=BF16, b=BF16, of_a=None, of_b=None, accumulate="f32")
        return wide.multiply(a, b, sizes, backend="cuda")

    def plain(self, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
        """The product of two arrays, as a JAX user writes it for groups of equal size."""
        if self.outer:
            a, b = (x.reshape(self.groups, -1, x.shape[-1]) for x in (a, b))
            return jnp.einsum("gkm,gkn->gmn", a, b, preferred_element_type=dtype)
        if self.groups:
            a = a.reshape(self.groups, -1, self.k)
            form = "gmk,gkn->gmn" if self.layout[1] == "n" else "gmk,gnk->gmn"
            return jnp.einsum(form, a, b, preferred_element_type=dtype).reshape(self.m, self.n)
        dims = ((1 if self.layout[0] == "n" else 0,), (0 if self.layout[1] == "n" else 1,)), ((), ())
        return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: str, block: tuple[int, int] | None) -> Any:
    if block is None:
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)
    one = jax.jit(
        lambda key, shape: cutjax.quantize(jax.random.normal(key, shape), dtype, block=block), static_argnums=1
    )
    if len(shape) == 2:
        return one(key, shape)
    several = [one(key, shape[1:]) for key in jax.random.split(key, shape[0])]  # float32 of all would not fit
    return jax.tree.map(lambda *xs: jnp.stack(xs), *several)


def _wide(x: Any, dtype: Any) -> jax.Array:
    return jax.jit(lambda x: x.dequantize(dtype) if isinstance(x, cutjax.Quantized) else x.astype(dtype))(x)


def _by_xla(case: Narrow) -> Function:
    """Returns the product in plain JAX: of values as they are where scales are of rows and columns, else in bf16."""
    direct = case.a == case.b and not case.groups

    def run(a: Any, b: Any, *stored: jax.Array) -> jax.Array:
        blocks = [block and min(block[1], case.k) not in (-1, case.k) for block in (case.of_a, case.of_b)]
        if not direct or any(blocks):
            return case.plain(_dequantized(a), _dequantized(b), jnp.bfloat16)
        sums = jnp.int32 if case.a == "int8" else jnp.float32 if case.of_a else jnp.bfloat16
        values = [x.values if isinstance(x, cutjax.Quantized) else x for x in (a, b)]
        y = case.plain(*values, sums)
        for x, axis in ((a, 0), (b, 1)):
            if isinstance(x, cutjax.Quantized):
                y = y * jnp.expand_dims(x.scale.reshape(-1), 1 - axis)
        return y.astype(jnp.bfloat16)

    return run


def _dequantized(x: Any) -> jax.Array:
    return x.dequantize(jnp.bfloat16) if isinstance(x, cutjax.Quantized) else x.astype(jnp.bfloat16)


def products(case: Narrow) -> list[Product]:
    """The product, checked against that of the dequantized operands."""

    def ours(config: Any) -> Function:
        pinned = {} if config is None else {"config": config}
        return lambda a, b, *stored: case.multiply(a, b, stored[-1], backend="cuda", **pinned)

    def look(args: Any, out: jax.Array) -> jax.Array:
        exact = case.plain(*(_wide(x, jnp.float32) for x in args[:2]), jnp.float32)
        return jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)

    def judge(error: Any) -> tuple[float, str]:
        return float(error), "" if float(error) <= WRONG else f"wrong: {float(error):.3g}, at most {WRONG}"

    shapes = case._shapes()
    moved = sum(_bytes(*pair) for pair in zip(shapes, (case.a, case.b), strict=True))
    moved += 2 * case.m * case.n * (case.groups if case.outer else 1)
    peers = {
        "xla": Peer(lambda: _by_xla(case), check=False),
        "bf16": Peer(lambda: lambda a, b, *stored: case.multiply_wide(*stored), check=False),
    }
    return [
        Product(
            "",
            2 * case.m * case.n * case.k,
            moved,
            ours,
            peers,
            lambda args, out, theirs: look(args, out),
            judge,
            figures={"asked_us": case.us} if case.us else {},
        )
    ]


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    size = 1
    for length in shape:
        size *= length
    return size // 2 if dtype in ("int4", "uint4", "float4_e2m1fn") else size * jnp.dtype(dtype).itemsize


def _fp8() -> list[Narrow]:
    large, found = ((8192, 8192, 8192), (4096, 7168, 16384), (4096, 24576, 1536)), []
    for (m, n, k), us in zip(large, (706, 604, 200), strict=True):
        found.append(Narrow(m, n, k, E4M3, E4M3, us=us, tags=("fp8",)))
        found.append(Narrow(m, n, k, E4M3, E4M3, accumulate="fast", tags=("fp8",)))
        found.append(Narrow(m, n, k, E4M3, E4M3, of_a=(1, -1), of_b=(1, -1), us=us, tags=("fp8",)))
    for (m, n, k), us in zip(
        ((4096, 7168, 16384), (4096, 4096, 7168), (4096, 24576, 1536), (128, 7168, 16384), (128, 24576, 1536)),
        (663, 174, 247, 36, 10),
        strict=True,
    ):
        found.append(Narrow(m, n, k, E4M3, E4M3, of_a=(1, 128), of_b=(128, 128), us=us, tags=("fp8", "blocks")))
    scales = {"of_a": (1, 128), "of_b": (128, 128)}
    found.append(Narrow(8192, 4096, 7168, E4M3, E4M3, **scales, groups=8, us=370, tags=("fp8", "groups")))
    scales = {"of_a": (128, 1), "of_b": (128, 1)}
    found.append(
        Narrow(4096, 7168, 8192, E4M3, E4M3, "tn", **scales, groups=8, outer=True, us=458, tags=("fp8", "groups"))
    )
    return found


def _weights() -> list[Narrow]:
    group = {"of_b": (128, 1), "layout": "nn"}
    found = [
        Narrow(m, 8192, 8192, BF16, "int8", "nn", of_b=(-1, 1), us=us, tags=("w8a16",))
        for m, us in ((16, 19), (64, 24), (256, 52), (1024, 185))
    ]
    found += [
        Narrow(m, n, k, BF16, "int4", **group, us=us, tags=("w4a16",))
        for m, n, k, us in (
            (16, 14336, 4096, 11.5),
            (1, 8192, 8192, 18),
            (1, 20480, 7168, 37),
            (64, 14336, 4096, 0),
            (256, 14336, 4096, 0),
            (4096, 14336, 4096, 751),
        )
    ]
    found += [
        Narrow(m, 14336, 4096, BF16, "int4", **group, groups=8, tags=("w4a16", "groups")) for m in (128, 512, 2048)
    ]
    by_fp8 = {"of_a": (1, 128), "of_b": (128, 1), "layout": "nn"}
    found += [Narrow(m, 14336, 4096, E4M3, "int4", **by_fp8, groups=8, tags=("w4a8", "groups")) for m in (128, 512)]
    found += [
        Narrow(m, 14336, 4096, E4M3, E4M3, "nt", of_a=(1, 128), of_b=(128, 128), groups=8, tags=("w4a8", "groups"))
        for m in (128, 512)
    ]
    return found


CASES = (
    *_fp8(),
    *_weights(),
    Narrow(4096, 4096, 4096, "int8", "int8", of_a=(1, -1), of_b=(1, -1), tags=("int8",)),
    Narrow(8192, 8192, 8192, "int8", "int8", of_a=(1, -1), of_b=(1, -1), tags=("int8",)),
)
SUITE = Suite("low_precision", CASES, Narrow.inputs, products, rough=2, reps=(10, 60), timed_us=60e3)
