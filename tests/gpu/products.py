"""Products of every dtype and kind on small integers, with epilogues, and what numpy makes of them, exactly."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grouped_problems as grouped
import jax
import jax.numpy as jnp
import launches
import numpy as np
import problems

import cutjax
from cutjax import dot_precision
from cutjax.dtypes import EIGHT_BITS, short
from cutjax.epilogue.expression import identity
from cutjax.epilogue.trace import Traced, trace
from cutjax.kernels.joined import Joined
from cutjax.kernels.mma.math import MATHS, MIXED

H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
# Ways to multiply: the dtypes of a and b, and Problem.math.
WAYS = {short(dtype) + math: (dtype, dtype, math) for dtype, math in MATHS}
WAYS |= {f"{short(a)}x{short(b)}": (a, b, "") for a, b in MIXED}
WAYS |= {f"{short(a)}x{short(b)}": (a, b, "") for a in ("bfloat16", "float16") for b in EIGHT_BITS}

KINDS = ("dense", "rows", "k", "symmetric")  # groups of rows and of k are those of docs/grouped.md
GROUPS = 4

# Functions of JAX's arrays and of numpy's, how many products they take, and the axes of their operands: "g1n" is one of
# each group, "h" one of bfloat16. Of the rest operands have the accumulators' dtype.
EPILOGUES: dict[str, tuple[Callable[..., Any], int, tuple[str, ...]]] = {
    "plain": (lambda acc: acc, 1, ()),
    "operands": (lambda acc, s, c, r, f: (acc * s + c + r + f, acc), 1, ("11", "1n", "m1", "mn")),
    "residual": (lambda acc, f: (acc + f.astype(acc.dtype)).astype(H), 1, ("mnh",)),
    "sum": (lambda acc, s, f: acc * s + f, 1, ("11", "mn")),
    "products": (lambda x, y, c: (x * c + y, y), 2, ("1n",)),
    "several": (lambda x, y: (x, y), 2, ()),
    "sums": (lambda acc, f: ((y := acc + f), y.sum(-2), y.sum(-1)), 1, ("mn",)),
    "extremes": (lambda acc, c: (acc, (acc + c).max(-1), acc.min(-2), acc.max((-2, -1))), 1, ("1n",)),
    "of rows": (lambda acc, f: ((y := acc + f), acc, y.sum(-1)), 1, ("mn",)),
    "largest of rows": (lambda acc: (acc, (acc - 99).max(-1)), 1, ()),
    "group bias": (lambda acc, b: acc + b, 1, ("g1n",)),
}


def epilogues(way: str, kind: str) -> list[str]:
    """The names of those that a product can have."""
    accumulator = accumulator_of(way)
    if kind == "symmetric":
        return ["plain", "sum"]
    if kind == "k":
        return ["plain", "sum", "several", *["residual"] * (accumulator == F32)]
    names = ["plain", "operands", "sum", "products", "several"]
    names += ["residual"] * (accumulator == F32) + ["group bias"] * (kind == "rows")
    names += ["of rows"] + ["largest of rows"] * (accumulator.kind != "c")
    names += ["sums"] * (kind != "rows") + ["extremes"] * (kind != "rows" and accumulator.kind != "c")
    return names


def accumulator_of(way: str) -> np.dtype:
    """The dtype in which products are added up; of integers of both signs a signed one."""
    a, b, _ = WAYS[way]
    return min((dot_precision.accumulator(jnp.dtype(x)) for x in (a, b)), key=lambda dtype: dtype.kind)


@dataclasses.dataclass(frozen=True)
class Item:
    """One product.

    Attributes:
      way, kind, layout, m, n, k: of `WAYS` and `KINDS`, in the layout "tn" of groups of k.
      epilogue: its name.
      out: the dtype of a plain result; "" is the accumulators'.
      batches: shapes of the batch of a and of b.
      arch: the architecture; "" is sm_90a.
      seed: of the data.
      hostile: of groups, one of grouped_problems.KINDS.
      more: contractions of further products that are added to the first.
    """

    way: str
    kind: str
    layout: str
    m: int
    n: int
    k: int
    epilogue: str = "plain"
    out: str = ""
    batches: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    arch: str = ""
    seed: int = 0
    hostile: str = "short"
    more: tuple[int, ...] = ()

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(np.broadcast_shapes(*self.batches))

    @property
    def full(self) -> tuple[int, ...]:
        """The shape of the accumulators."""
        return (*self.batch, *[GROUPS] * (self.kind == "k"), self.m, self.n)

    @functools.cached_property
    def operands(self) -> list[np.ndarray]:
        """The operands of the epilogue."""
        rng, found = np.random.default_rng([self.seed, 1]), []
        for axes in EPILOGUES[self.epilogue][2]:
            shape = [{"1": 1, "m": self.m, "n": self.n, "g": GROUPS}[axis] for axis in axes.rstrip("h")]
            batch = self.full[:-2] if "mn" in axes else (*[1] * len(self.batch), *self.full[len(self.batch) : -2])
            x = self._integers(rng, (*batch, *shape), accumulator_of(self.way))
            x = x + x.swapaxes(-1, -2) if self.kind == "symmetric" else x
            found.append(x.astype(H) if axes.endswith("h") else x)
        return found

    @functools.cached_property
    def traced(self) -> Traced:
        """The epilogue and its operands."""
        fn, products, _ = EPILOGUES[self.epilogue]
        accumulator = accumulator_of(self.way)
        with launches.wide([accumulator]):
            accs = [jax.ShapeDtypeStruct(self.full, accumulator)] * products
            operands = [jnp.asarray(x) for x in self.operands]
            return trace(fn, accs, operands, GROUPS if self.epilogue == "group bias" else None)

    @functools.cached_property
    def problem(self) -> cutjax.Problem:
        problem = self._first
        if not self.more:
            return problem
        view = Joined((self.k, *self.more))
        a, *bs = (dataclasses.replace(x, view=view) for x in (problem.a, *problem.bs))
        return dataclasses.replace(problem, k=sum(view.ks), a=a, bs=tuple(bs))

    @functools.cached_property
    def _first(self) -> cutjax.Problem:
        """The problem of the first product alone."""
        a, b, math = WAYS[self.way]
        accumulator = accumulator_of(self.way)
        out = np.dtype(self.out or accumulator)
        epilogue = identity(out, accumulator) if self.epilogue == "plain" else self.traced.epilogue
        groups = {"groups": GROUPS, "ragged": "m" if self.kind == "rows" else "k", "sizes_batch": self.batches[0]}
        if self.kind == "k":  # operands are of the groups, which are no axis of the batch
            specs = [dataclasses.replace(spec, batch=spec.batch[:-1]) for spec in epilogue.operands]
            epilogue = dataclasses.replace(epilogue, operands=tuple(specs))
        return cutjax.Problem.of(
            self.m,
            self.n,
            self.k,
            self.layout,
            jnp.dtype(a),
            jnp.dtype(b),
            out,
            self.batch,
            *self.batches,
            arch=self.arch,
            math=math,
            epilogue=epilogue,
            symmetric=self.kind == "symmetric",
            **(groups if self.kind in ("rows", "k") else {}),
        )

    def data(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The arrays of a launch, NaN where nothing may read, and the results."""
        rng, p = np.random.default_rng([self.seed, 2]), self._first
        fn, accumulators = EPILOGUES[self.epilogue][0], np.complex128 if p.accumulator.kind == "c" else np.float64
        of_each = [dataclasses.replace(p, k=k) for k in (self.k, *self.more)]
        each = []
        for of in of_each:
            shape_a, shape_b = (grouped.shapes if p.groups else problems.shapes)(of)[:2]
            a = self._integers(rng, shape_a, p.a.dtype)
            each.append((a, [self._integers(rng, shape_b, p.bs[0].dtype) for _ in range(p.products)]))
        with launches.wide([p.accumulator]):
            operands = [np.asarray(x) for x in self.traced.operands]
        values = [x.astype(accumulators) for x in self.operands]
        if not p.groups:
            each = [(a, [a] if p.symmetric else bs) for a, bs in each]
            sums = [[problems.reference(a, b, p.layout, accumulators) for b in bs] for a, bs in each]
            given = [(a, []) for a, _ in each] if p.symmetric else each
            return _in_order(given, [], operands), _listed(fn(*_added(sums), *values))
        sizes = np.empty((*p.groups.batch, GROUPS), np.int32)
        for index in np.ndindex(p.groups.batch):
            sizes[index] = grouped.draw_sizes(rng, self.hostile, grouped.rows(p), GROUPS)
        sums = [
            [grouped.reference(of, a, b, sizes, accumulators) for b in bs]
            for of, (a, bs) in zip(of_each, each, strict=True)
        ]
        group = np.full((*p.batch, grouped.rows(p)), -1)
        for index, _, _, at in grouped.entries(p):
            for i, (start, end) in enumerate(grouped.spans(sizes[at], grouped.rows(p))):
                group[index][start:end] = i
        if self.epilogue == "group bias":
            (bias,) = values
            values = [bias.reshape(GROUPS, self.n)[group]]
        found = _listed(fn(*_added(sums), *values))
        if p.divided == "m":
            has = group[..., None] >= 0
            found = [np.where(has if x.ndim > group.ndim else has[..., 0], x, x.dtype.type(0)) for x in found]
        if jnp.issubdtype(p.a.dtype, jnp.inexact) and jnp.issubdtype(p.bs[0].dtype, jnp.inexact):
            for i, (of, (a, bs)) in enumerate(zip(of_each, each, strict=True)):
                pairs = [grouped.with_nan(of, a, b, sizes) for b in bs]
                each[i] = pairs[0][0], [b for _, b in pairs]
        return _in_order(each, [sizes], operands), found

    def _integers(self, rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Random integers whose products and sums every accumulator holds: of float16 -1 to 1."""
        low, high = (-1, 2) if self.way == "f16f16" else (0 if np.dtype(dtype).kind == "u" else -2, 3)
        x = rng.integers(low, high, shape).astype(np.float64)
        if np.dtype(dtype).kind == "c":
            x = x + 1j * rng.integers(low, high, shape)
        return x.astype(dtype)


def _added(sums: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """The accumulators of each product, told those of what each is the sum of."""
    return [functools.reduce(np.add, terms) for terms in zip(*sums, strict=True)]


def _in_order(each: Any, context: Sequence[np.ndarray], operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays of a launch: a and the bs, what is told beside them, further arrays of a and of each b, operands."""
    (a, bs), *more = each
    further = [a for a, _ in more] + [b for of_each in zip(*(bs for _, bs in more), strict=True) for b in of_each]
    return [a, *bs, *context, *further, *operands]


def _listed(found: Any) -> list[np.ndarray]:
    return [*found] if isinstance(found, tuple) else [found]
