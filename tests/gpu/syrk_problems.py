"""Random symmetric products from a seed, with epilogues, and what numpy makes of them; see the tests' problems.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
from problems import SEED

import cutjax

H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
_PRODUCTS, _ELEMENTS = 1 << 31, 1 << 23  # keep a problem's reference on one CPU core near 0.2 s
_EDGES = (8, 56, 64, 72, 120, 128, 136, 192, 200, 256, 264, 320, 392, 512, 520, 1024, 1032, 2056)

# Functions of float32 arrays, JAX's or numpy's, and what their operands are: "s" a scalar, "g" one a matrix, "x" a
# symmetric matrix of the result's dtype, "h" one of bfloat16, "o" one that the batch shares, of float32.
EPILOGUES: dict[str, tuple[Callable[..., Any] | None, str]] = {
    "plain": (None, ""),
    "scaled": (lambda acc, s: acc * s, "s"),
    "of a matrix": (lambda acc, s, g: acc * g - s, "sg"),
    "sum": (lambda acc, s, x: acc * s + x, "sx"),
    "shared": (lambda acc, o: acc + o, "o"),
    "narrow": (lambda acc, h: acc - h, "h"),
    "two results": (lambda acc, s, x: (acc * s + x, acc), "sx"),
}


@dataclasses.dataclass(frozen=True)
class Random:
    """One symmetric product with an epilogue.

    Attributes:
      name: of the epilogue.
      m, k, layout, dtype, out_dtype, batch: the product; of two results the second is bfloat16.
      pinned: which candidate to pin, as a share of their number; None for the cost model's choice.
      seed: of the operands.
    """

    name: str
    m: int
    k: int
    layout: str = "n"
    dtype: np.dtype = H
    out_dtype: np.dtype = H
    batch: tuple[int, ...] = ()
    pinned: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        batch = "x".join(map(str, self.batch))
        dtypes = f"{self.dtype.name}-{self.out_dtype.name}"
        return f"{self.seed}-{self.m}x{self.k}_{self.layout}_{dtypes}_{batch}_{self.name}".replace(" ", "_")

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """The dtypes of the results."""
        return (self.out_dtype, H) if self.name == "two results" else (self.out_dtype,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a."""
        return (*self.batch, *((self.m, self.k) if self.layout == "n" else (self.k, self.m)))

    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The avals of a and the operands."""
        full = (*self.batch, self.m, self.m)
        kinds = {"s": ((), F32), "g": ((*self.batch, 1, 1), F32), "x": (full, self.out_dtype), "h": (full, H)}
        kinds["o"] = (full[-2:], F32)
        found = [(self.shape, self.dtype), *(kinds[kind] for kind in EPILOGUES[self.name][1])]
        return tuple(jax.ShapeDtypeStruct(*each) for each in found)

    def integers(self) -> tuple[np.ndarray, ...]:
        """a of -2 to 2, and operands of small integers: every order of f32 summation is exact."""
        rng = np.random.default_rng([SEED, self.seed, 41])

        def matrices(*batch):
            x = rng.integers(-4, 5, (*batch, self.m, self.m))
            return x + np.swapaxes(x, -1, -2)

        def made(kind, aval):
            if kind == "s":
                return np.float32(0.5)
            x = rng.integers(-2, 3, aval.shape) if kind == "g" else matrices(*aval.shape[:-2])
            return x.astype(aval.dtype)

        a = np.arange(-2, 3).astype(self.dtype)[rng.integers(0, 5, self.shape, dtype=np.int8)]
        return a, *map(made, EPILOGUES[self.name][1], self.avals()[1:])

    def gaussian(self) -> np.ndarray:
        """a of zero mean and unit variance."""
        return np.random.default_rng([SEED, self.seed, 42]).standard_normal(self.shape, np.float32).astype(self.dtype)

    def expected(self, a: np.ndarray, *operands: np.ndarray, dtype: np.dtype = F32) -> list[np.ndarray]:
        """By numpy, in ``dtype``. It has a product of its own for an array and its transpose: not for a copy."""
        x = a.astype(dtype)
        turned = np.swapaxes(x, -1, -2).copy()
        acc = np.matmul(x, turned) if self.layout == "n" else np.matmul(turned, x)
        fn = EPILOGUES[self.name][0]
        outs = acc if fn is None else fn(acc, *(y.astype(dtype) for y in operands))
        return list(outs) if isinstance(outs, tuple) else [outs]

    def syrk(self, config: cutjax.Config | None = None, backend: str = "cuda") -> Callable[..., Any]:
        """The product as a function of a and the operands."""
        fn = EPILOGUES[self.name][0]
        how: dict[str, Any] = {"layout": self.layout, "backend": backend, "config": config}
        how["out_dtype"] = self.dtypes if len(self.dtypes) > 1 else self.out_dtype
        if fn is not None:
            how["epilogue"] = lambda *args: fn(*(x.astype(jnp.float32) for x in args))
        return lambda a, *operands: cutjax.syrk(a, operands=operands, **how)

    @functools.cached_property
    def problem(self) -> cutjax.Problem:
        """The problem, with the epilogue as it is traced."""
        (row,) = cutjax.explain(self.syrk(backend="auto"), platform="cuda")(*self.avals()).rows
        assert row.choice is not None
        return row.choice.problem

    @functools.cached_property
    def config(self) -> cutjax.Config | None:
        """The pinned config."""
        if self.pinned is None:
            return None
        served = problems._by_name(self.problem)
        return served[int(self.pinned * len(served))]

    def compiled(self, config: cutjax.Config | None) -> jax.stages.Compiled:
        """The executable. It takes a list of arrays first, like the results, and writes into their memory."""
        syrk = self.syrk(config)

        @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        def fn(poison, a, *operands):
            return syrk(a, *operands)

        poison = [jax.ShapeDtypeStruct((*self.batch, self.m, self.m), dtype) for dtype in self.dtypes]
        return fn.lower(poison, *self.avals()).compile()

    def poison(self) -> list[np.ndarray]:
        """NaN in the shapes of the results."""
        return [np.full((*self.batch, self.m, self.m), np.nan, dtype) for dtype in self.dtypes]

    def run(self, executable: Callable[..., Any], *args: Any) -> list[np.ndarray]:
        """The results, in memory that was NaN."""
        return [np.asarray(x) for x in jax.tree.leaves(executable(*jax.device_put((self.poison(), *args))))]


def generate(index: int, seed: int = SEED, name: str | None = None) -> Random:
    """Random symmetric product number ``index``: m from 8 to 2100, every layout, dtype, and epilogue in turn."""
    rng = np.random.default_rng([seed, index, 43])
    dtype = problems._INPUTS[int(rng.random() < 0.3)]
    out_dtype = (dtype, dtype, F32, *problems._INPUTS)[rng.integers(5)]
    batch = ((), (), (), (3,), (2, 2), (17,))[rng.integers(6)]
    name = name or list(EPILOGUES)[index % len(EPILOGUES)]
    m = int(rng.choice(_EDGES)) if rng.random() < 0.4 else 8 * int(np.exp(rng.uniform(0, np.log(262))) + 0.5)
    k = 8 * int(np.exp(rng.uniform(0, np.log(262))) + 0.5)
    layout = "nt"[rng.integers(2)]
    if layout == "t":  # k need not be whole lines then
        k = max(1, k - int(rng.integers(8)))
    count = int(np.prod(batch, dtype=int))
    while count * m * m * k > _PRODUCTS or count * m * max(m, k) > _ELEMENTS:
        m, k = max(8, m // 16 * 8), (k + 1) // 2 if layout == "t" else max(8, k // 16 * 8)
    pinned = float(rng.random()) if rng.random() < 0.75 else None
    return Random(name, m, k, layout, dtype, out_dtype, batch, pinned, index)
