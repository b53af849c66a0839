"""Grouped GEMMs with epilogues, on small integers: every kind of operand, several products and results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import grouped_problems as grouped
import jax
import jax.numpy as jnp
import numpy as np
import problems

import cutjax

H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
NONE = 15  # rows of no group, at the end


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """A function of jax's arrays and of numpy's.

    Attributes:
      fn: of the products and the operands, all f32.
      products: how many it takes.
      operands: their axes: "gn" is ``[g, 1, n]``, "g1" ``[g, 1, 1]``, "m1" ``[m, 1]``, "" a scalar.
      dtypes: of the results.
    """

    fn: Callable[..., Any]
    products: int
    operands: tuple[str, ...]
    dtypes: tuple[np.dtype, ...] = (F32,)


def relu2(x):
    """Twice relu, exactly."""
    return x + abs(x)


EPILOGUES = {
    "group bias": Epilogue(lambda acc, b: acc + b, 1, ("gn",), (H,)),
    "group and row scale": Epilogue(lambda acc, t, s: acc * t * s, 1, ("g1", "m1")),
    "residual": Epilogue(lambda acc, r: acc + r, 1, ("mn",), (H,)),
    "every operand": Epilogue(
        lambda acc, b, t, s, r, c, f: acc * s + b * t + r * c + f, 1, ("gn", "g1", "m1", "mn", "n", "")
    ),
    "gated": Epilogue(lambda g, u: relu2(g) * u, 2, ()),
    "gated with biases": Epilogue(lambda g, u, a, b, s: relu2(g + a) * (u + b) * s, 2, ("gn", "gn", "m1")),
    "two results": Epilogue(lambda acc, b: (acc + b, relu2(acc)), 1, ("gn",), (F32, H)),
    "three products": Epilogue(lambda x, y, z, b: relu2(x) * y - z + b, 3, ("gn",)),
}


@dataclasses.dataclass(frozen=True)
class Fused:
    """One of the epilogues on one product.

    Attributes:
      name: of the epilogue.
      layout, m, n, k, groups: the product.
      batch: axes of x, the sizes and what operands have of rows; weights and what groups have are shared.
      pinned: which candidate to pin, as a share of their number; None for the cost model's choice.
    """

    name: str
    layout: str = "nn"
    batch: tuple[int, ...] = ()
    pinned: float | None = None
    m: int = 2500  # with the other sizes, several tiles for every CTA
    n: int = 520
    k: int = 72
    groups: int = 48

    def __str__(self) -> str:
        return f"{self.name}-{self.layout}-{self.batch or ''}-{self.pinned}".replace(" ", "_")

    @property
    def epilogue(self) -> Epilogue:
        """The function of the products."""
        return EPILOGUES[self.name]

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Uneven, every fifth empty or nearly."""
        rng = np.random.default_rng([problems.SEED, 31])
        share = rng.dirichlet(np.where(np.arange(self.groups) % 5 == 0, 1e-3, 2.0), self.batch)
        return rng.multinomial(self.m - NONE, share).astype(np.int32)

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray, tuple[np.ndarray, ...]]:
        """x, the weights, the sizes and the operands."""
        rng = np.random.default_rng([problems.SEED, *map(ord, self.name), len(self.batch)])
        m, n, k, g = self.m, self.n, self.k, self.groups

        def draw(shape, dtype=H):
            return rng.integers(-2, 3, shape).astype(np.float32).astype(dtype)

        shared = (1,) * len(self.batch)
        shapes = {"gn": (*shared, g, 1, n), "g1": (*shared, g, 1, 1), "n": (n,), "": ()}
        shapes |= {"m1": (*self.batch, m, 1), "mn": (*self.batch, m, n)}
        ws = tuple(draw((g, k, n) if self.layout == "nn" else (g, n, k)) for _ in range(self.epilogue.products))
        operands = tuple(draw(shapes[axes], (H, F32)[i % 2]) for i, axes in enumerate(self.epilogue.operands))
        return draw((*self.batch, m, k)), ws, self.sizes, operands

    @functools.cached_property
    def expected(self) -> list[np.ndarray]:
        """A loop over the groups, in f32, each result rounded once; zero in the rows of no group."""
        x, ws, sizes, operands = self.arrays
        outs = [np.zeros((*self.batch, self.m, self.n), dtype) for dtype in self.epilogue.dtypes]
        for index in np.ndindex(self.batch):
            for group, (start, end) in enumerate(grouped.spans(sizes[index], self.m)):
                rows = x[index][start:end].astype(F32)
                accs = [rows @ (w[group] if self.layout == "nn" else w[group].T).astype(F32) for w in ws]
                seen = []
                for axes, value in zip(self.epilogue.operands, operands, strict=True):
                    if "g" in axes:
                        value = value.reshape(value.shape[-3:])[group]
                    elif "m" in axes:
                        value = value[index][start:end]
                    seen.append(value.astype(F32))
                values = self.epilogue.fn(*accs, *seen)
                for out, value in zip(outs, values if isinstance(values, tuple) else (values,), strict=True):
                    out[index][start:end] = value.astype(out.dtype)
        return outs

    def with_nan(self) -> tuple[Any, ...]:
        """The arrays with NaN in the rows of no group, and in all that empty groups have."""
        x, ws, sizes, operands = self.arrays
        x, ws, operands = x.copy(), tuple(w.copy() for w in ws), tuple(value.copy() for value in operands)
        empty = (sizes.reshape(-1, self.groups) == 0).all(0)
        of_axes = list(zip(self.epilogue.operands, operands, strict=True))
        for value in (*ws, *(value for axes, value in of_axes if "g" in axes)):
            value[..., empty, :, :] = np.nan
        for value in (x, *(value for axes, value in of_axes if "m" in axes)):
            value[..., -NONE:, :] = np.nan
        return x, ws, sizes, operands

    def gemm(self, config: cutjax.Config | None = None, backend: str = "cuda") -> Callable[..., Any]:
        """The fused product as a function of what ``arrays`` holds."""
        dtypes = self.epilogue.dtypes

        def epilogue(*args):
            return self.epilogue.fn(*(value.astype(jnp.float32) for value in args))

        params: dict[str, Any] = {"epilogue": epilogue, "layout": self.layout, "backend": backend, "config": config}
        params["out_dtype"] = dtypes if len(dtypes) > 1 else dtypes[0]

        def gemm(x, ws, sizes, operands):
            return cutjax.grouped_gemm(x, ws if len(ws) > 1 else ws[0], sizes, operands=operands, **params)

        return gemm

    @property
    def problem(self) -> cutjax.Problem:
        """The problem, with the epilogue as it is traced."""
        (row,) = cutjax.explain(self.gemm(backend="auto"), platform="cuda")(*self.arrays).rows
        assert row.choice is not None
        return row.choice.problem

    @property
    def config(self) -> cutjax.Config | None:
        """The pinned config."""
        return None if self.pinned is None else grouped.pick(self.problem, self.pinned)

    def compiled(self, config: cutjax.Config | None, backend: str = "cuda") -> jax.stages.Compiled:
        """The executable. Its last argument is memory for the first result, which it writes into."""
        gemm = self.gemm(config, backend)

        @functools.partial(jax.jit, donate_argnums=4, keep_unused=True)
        def fn(x, ws, sizes, operands, poison):
            return gemm(x, ws, sizes, operands)

        args = (*self.arrays, self.poison())
        return fn.lower(*jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), args)).compile()

    def poison(self) -> np.ndarray:
        """NaN in the shape of the first result."""
        return np.full((*self.batch, self.m, self.n), np.nan, self.epilogue.dtypes[0])

    def run(self, executable: Callable[..., Any]) -> list[np.ndarray]:
        """The results, of the arrays with NaN."""
        return [np.asarray(x) for x in jax.tree.leaves(executable(*jax.device_put((*self.with_nan(), self.poison()))))]
