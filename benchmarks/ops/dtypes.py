"""Products in every dtype by their public calls, beside XLA's: ``python -m benchmarks run --op dtypes --tag suite``.

The kernels of ``backend="cuda"``, also where "auto" would leave a product to XLA. Where operands are wider than 16 bits
the result may be at most twice as far from a float64 product as XLA's. "quantized" has 8-bit weights beside bf16
activations; XLA is given ``x @ w.astype(bf16)``; the peer "bf16" is our kernel for weights that were bf16 all along.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from benchmarks.cases import operands
from benchmarks.suite import Peer, Product, Suite

WORSE = 2.0  # than XLA's error, at most
# Of a result that is rounded to bf16 once; and of exact arithmetic, which XLA may have and we may not.
LEAST_ERROR = {"bfloat16": 3e-3, "float32": 1e-6, "complex64": 1e-6, "float64": 1e-14, "complex128": 1e-14}


@dataclasses.dataclass(frozen=True)
class Typed:
    """A product in a dtype.

    Attributes:
      m, n, k: the problem.
      dtype: of a and the result.
      weights: dtype of b, "" for the same.
      precision: as in ``jax.lax.dot``.
      batch: of both operands.
      groups: of rows, of equal size; 0 for a dense product.
      gelu: whether gelu is applied to the result.
      tags: the sets this case belongs to.
      target: the least ratio to XLA's time asked for, or None.
    """

    m: int
    n: int
    k: int
    dtype: str
    weights: str = ""
    precision: str | None = None
    batch: tuple[int, ...] = ()
    groups: int = 0
    gelu: bool = False
    tags: tuple[str, ...] = ("suite",)
    target: float | None = None

    @property
    def name(self) -> str:
        """E.g. ``4096x4096x4096 float32 highest gelu``."""
        sizes = "x".join(map(str, (*self.batch, self.m, self.n, self.k)))
        dtypes = f"{self.dtype} x {self.weights}" if self.weights else self.dtype
        more = (self.precision, f"{self.groups}g" if self.groups else "", "gelu" if self.gelu else "")
        return " ".join(filter(None, (sizes, dtypes, *more)))

    def multiply(self, a: jax.Array, b: jax.Array, **how: Any) -> jax.Array:
        """Our product."""
        if self.groups:
            return cutjax.grouped_gemm(a, b, self.sizes, precision=self.precision, **how)
        epilogue = jax.nn.gelu if self.gelu else None
        return cutjax.gemm(a, b, epilogue=epilogue, precision=self.precision, out_dtype=a.dtype, **how)

    def multiply_in_xla(self, a: jax.Array, b: jax.Array, precision: Any) -> jax.Array:
        """The product that a JAX user writes."""
        b = b.astype(a.dtype)
        if self.groups:
            return lax.ragged_dot(a, b, self.sizes, precision=precision)
        product = jnp.matmul(a, b, precision=precision)
        return jax.nn.gelu(product) if self.gelu else product

    @property
    def sizes(self) -> jax.Array:
        """Rows of each group."""
        return jnp.full(self.groups, self.m // self.groups, jnp.int32)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a and b."""
        groups = (self.groups,) if self.groups else ()
        return (*self.batch, self.m, self.k), (*self.batch, *groups, self.k, self.n)

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Random normal a and b, integers 32 times as large; and b in the dtype of a where it has its own."""
        a, b = operands(self.shapes, (self.dtype, self.weights or self.dtype))(seed)
        return (a, b, b.astype(a.dtype)) if self.weights else (a, b)


def products(case: Typed) -> list[Product]:
    """The product, checked against float64."""
    wide = np.complex128 if np.dtype(jnp.dtype(case.dtype)).kind == "c" else np.float64

    def ours(config: Any) -> Any:
        return lambda a, b, *stored: case.multiply(a, b, backend="cuda", config=config)

    def xla() -> Any:
        return lambda a, b, *stored: case.multiply_in_xla(a, b, case.precision)

    def look(args: Any, out: jax.Array, theirs: jax.Array) -> Any:
        a, b = (x.astype(wide) for x in args[:2])
        exact = case.multiply_in_xla(a, b, lax.Precision.HIGHEST)
        return [jnp.linalg.norm(x.astype(wide) - exact) / jnp.linalg.norm(exact) for x in (out, theirs)]

    def judge(seen: Any) -> tuple[float, str]:
        error, theirs = map(float, seen)
        most = max(WORSE * theirs, LEAST_ERROR[case.dtype])
        return error, "" if error <= most else f"wrong: {error:.3g}, at most {most:.3g}"

    sizes = jnp.dtype(case.dtype).itemsize, jnp.dtype(case.weights or case.dtype).itemsize
    shapes = *case.shapes, (*case.batch, case.m, case.n)
    moved = sum(int(np.prod(s)) * size for s, size in zip(shapes, (*sizes, sizes[0]), strict=True))
    flops = 2 * case.m * case.n * case.k * int(np.prod(case.batch)) * (4 if wide is np.complex128 else 1)
    peers = {"xla": Peer(xla, check=False)}
    if case.weights:
        peers["bf16"] = Peer(lambda: lambda a, b, stored: case.multiply(a, stored, backend="cuda"), check=False)
    targets = {"xla": case.target} if case.target else {}
    return [Product("", flops, moved, ours, peers, look, judge, beside="xla", targets=targets)]


CASES = (
    *(Typed(s, s, s, "float64", target=1.0) for s in (4096, 8192)),
    *(Typed(s, s, s, "float32", precision="highest", target=1.0) for s in (4096, 8192)),
    *(Typed(s, s, s, "complex64", precision="highest", target=1.1) for s in (2048, 4096)),
    *(Typed(s, s, s, "complex64", target=1.1) for s in (2048, 4096)),
    *(Typed(s, s, s, "complex128", target=1.1) for s in (2048, 4096)),
    *(Typed(4096, 4096, 4096, "float32", precision=p, gelu=True, target=1.0) for p in (None, "highest")),
    *(Typed(8192, 2048, 1024, "float32", precision=p, groups=8, target=1.0) for p in (None, "highest")),
    Typed(8192, 2048, 1024, "float64", groups=8, target=1.0),
    *(Typed(32, 32, 32, "float32", precision=p, batch=(4096,), target=1.0) for p in (None, "highest")),
    *(Typed(*sizes, "bfloat16", target=1.3) for sizes in ((1000, 1001, 1003), (8192, 4100, 1030))),
    *(
        Typed(m, n, k, "bfloat16", weights, tags=("quantized",))
        for weights in ("int8", "float8_e4m3fn")
        for n, k in ((8192, 8192), (14336, 4096))
        for m in (1, 4, 16, 64, 256, 1024, 4096)
    ),
)
SUITE = Suite("dtypes", CASES, Typed.inputs, products, rough=2, reps=(5, 60), timed_us=60e3, x64=True)
