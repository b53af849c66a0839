"""Random layouts of every product in groups under jit: values and gradients are those of one device.

A draw is an operation with its options and operands, a mesh, and how it divides each operand and result: evenly or
not. Operands are small integers, so that sums are exact in any order; DRAWS in the environment says how many are drawn:
100 after a change of how products in groups are divided.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, integers, same
from jax import lax

import cutjax

MESHES = ({"a": 2}, {"a": 2, "b": 2}, {"a": 2, "b": 4})


class Draw(NamedTuple):
    """A function of arrays that are divided as the specs say, results too; numbers that are only rounded, or exact."""

    name: str
    fn: Callable[..., Any]
    args: list[jax.Array]
    specs: list[jax.P]
    results: Callable[[int, int], jax.P] | None
    mesh: jax.sharding.Mesh
    rounded: bool = False


class Drawing:
    """Random choices of a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        axes = MESHES[self.rng.integers(len(MESHES))]
        kinds, size = (jax.sharding.AxisType.Auto,) * len(axes), int(np.prod([*axes.values()]))
        self.mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:size])
        self.m, self.g = int(self.pick([4, 8, 12, 16, 64, 256])), int(self.pick([2, 4, 8, 3]))
        self.k, self.n, self.h = (int(x) for x in self.rng.choice([8, 16, 24, 10], 3))
        self.offset = int(self.rng.integers(-1, 3)) if self.rng.random() < 0.3 else None
        self.batch = (2,) if self.rng.random() < 0.2 else ()
        self.args: list[jax.Array] = []

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self.rng.integers(len(values))]

    def some(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)

    def array(self, *shape: int) -> int:
        """Adds an operand, and returns its number."""
        self.args.append(jax.device_put(self.rng.integers(-2, 3, shape).astype(np.float32)))
        return len(self.args) - 1

    def sizes(self, groups: int) -> jax.Array:
        """Sizes with empty groups, sometimes negative ones, and rows of none."""
        share = self.rng.dirichlet([0.5] * (groups + 1))
        ends = np.round(np.cumsum(share) * self.m).astype(np.int32)
        sizes = (
            np.diff(ends[: groups + self.some(0.0)], prepend=0) if self.some() else np.diff(ends, prepend=0)[:groups]
        )
        if self.some(0.2):
            sizes[self.rng.integers(groups)] = self.pick([-3, 0, 2 * self.m])
        return jax.device_put(np.broadcast_to(sizes, (*(self.batch if self.some() else ()), groups)).astype(np.int32))

    def options(self, groups: int) -> tuple[jax.Array, dict[str, Any]]:
        """Sizes of all groups, and the group that the first of so many is."""
        if self.offset is None:
            return self.sizes(groups), {}
        return self.sizes(groups + 2), {"group_offset": self.offset}

    def spec(self, rank: int) -> jax.P:
        """A layout in which each mesh axis divides one axis, or none."""
        spec: list[tuple[str, ...]] = [() for _ in range(rank)]
        for axis in self.rng.permutation(self.mesh.axis_names):
            if rank and self.some(0.75):
                at = self.rng.integers(rank)
                spec[at] = (*spec[at], str(axis))
        return jax.P(*(x or None for x in spec))

    def batched(self) -> tuple[int, ...]:
        return self.batch if self.some(0.7) else (1,) * len(self.batch) if self.some() else ()

    def draw(self) -> Draw:
        make = self.pick(
            [self.gemm, self.gemm, self.fused, self.fused, self.fused, self.outer, self.mlp, self.ragged, self.moe]
        )
        name, fn, rounded = make()
        layouts = [self.spec(5) for _ in range(4)]
        results = lambda i, rank: jax.P(*[*layouts[i % 4]][:rank])  # noqa: E731
        specs = [self.spec(x.ndim) for x in self.args]
        asked = self.some()
        return Draw(name, fn, self.args, specs, results if asked else None, self.mesh, rounded)

    def gemm(self) -> Any:
        layout = self.pick(["nn", "nt"])
        sizes, options = self.options(self.g)
        matrix = (self.k, self.n) if layout == "nn" else (self.n, self.k)
        self.array(*self.batched(), self.m, self.k), self.array(*self.batched(), self.g, *matrix)
        return (
            f"grouped_gemm {layout} {options}",
            lambda x, w: cutjax.grouped_gemm(x, w, sizes, layout=layout, **options),
            False,
        )

    def fused(self) -> Any:
        sizes, options = self.options(self.g)
        products, m, n, g = 1 + self.some(0.3), self.m, self.n, self.g
        self.array(*self.batched(), m, self.k)
        ws = self.batched()
        for _ in range(products):
            self.array(*ws, g, self.k, n)
        found = self.args[0].shape[:-2], ws, sizes.shape[:-1]
        full = len(np.broadcast_shapes(*found))
        kinds = [(g, 1, n), (g, 1, 1), (m, 1), (m, n), (1, n), (n,), (), (1, 1)]
        shapes = [self.pick(kinds) for _ in range(self.rng.integers(1, 4))]
        for shape in shapes:
            more = (1,) * full if len(shape) == 3 else ()
            self.array(*more, *shape)
        positions, reductions = self.some(0.3), self.some(0.3)

        def epilogue(*args: Any) -> Any:
            accs, operands = args[:products], args[products:]
            y = sum(accs)
            for i, x in enumerate(operands):
                y = y * x if i % 2 else y + x
            y = jnp.maximum(y, 1)
            if positions:
                y = y + lax.broadcasted_iota(jnp.int32, y.shape, y.ndim - 2).astype(y.dtype)
                y = y * (lax.broadcasted_iota(jnp.int32, y.shape, y.ndim - 1) % 3).astype(y.dtype)
            return (y, y.sum(-2), y.max(-1), accs[0].sum((-2, -1))) if reductions else y

        def fn(x: Any, *args: Any) -> Any:
            ws, operands = args[:products], args[products:]
            ws = ws if products > 1 else ws[0]
            return cutjax.grouped_gemm(x, ws, sizes, epilogue=epilogue, operands=operands, **options)

        return f"grouped_gemm {products} {shapes} {options} {positions} {reductions}", fn, False

    def outer(self) -> Any:
        sizes, options = self.options(self.g)
        options |= {"groups": self.g} if options else {}
        self.array(*self.batched(), self.m, self.k), self.array(*self.batched(), self.m, self.n)
        shapes = *(x.shape[:-2] for x in self.args), sizes.shape[:-1]
        if more := self.some(0.4):
            self.array(*np.broadcast_shapes(*shapes), self.g, self.k, self.n)

        def fn(x: Any, dy: Any, *to: Any) -> Any:
            return cutjax.grouped_outer(x, dy, sizes, accumulate=to[0] if to else None, **options)

        return f"grouped_outer {more} {options}", fn, False

    def mlp(self) -> Any:
        sizes, options = self.options(self.g)
        gate, scale, k, h, n = self.some(), self.some(), self.k, self.h, self.n
        self.array(self.m, k), self.array(self.g, k, h), self.array(self.g, h, n)
        if gate:
            self.array(self.g, k, h)
        if scale:
            self.array(self.m, 1)
        save = self.pick(["default", "recompute"])

        def fn(x: Any, up: Any, down: Any, *more: Any) -> Any:
            given = dict(zip(["gate"] * gate + ["row_scale"] * scale, more, strict=True))
            options_ = options | given
            return cutjax.grouped_mlp(x, up, down, sizes, activation=jax.nn.relu, save=save, **options_)

        return f"grouped_mlp {gate} {scale} {options}", fn, True

    def ragged(self) -> Any:
        sizes = self.sizes(self.g).reshape(-1, self.g)[0]
        mode, b = self.pick(["plain", "m", "k"]), 2
        if mode == "plain":
            self.array(self.m, self.k), self.array(self.g, self.k, self.n)
            return "ragged_dot", lambda x, w: cutjax.ragged_dot(x, w, sizes), False
        if mode == "m":
            dims = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), [1], [0])
            self.array(b, self.m, self.k), self.array(self.g, b, self.k, self.n)
        else:
            dims = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((0,), (0,))), [1], [])
            self.array(b, self.m, self.k), self.array(b, self.m, self.n)
        return f"ragged_dot_general {mode}", lambda x, w: cutjax.ragged_dot_general(x, w, sizes, dims), False

    def moe(self) -> Any:
        k, h, n = self.k, self.h, self.n
        batch = self.batched()
        self.array(*batch, self.m, k)
        logits = jax.device_put(self.rng.standard_normal((*batch, self.m, self.g)).astype(np.float32))
        self.args.append(logits)
        self.array(self.g, k, h), self.array(self.g, k, h), self.array(self.g, h, n)
        chosen = int(self.rng.integers(1, self.g + 1))
        scoring = self.pick(["softmax", "sigmoid"])

        def fn(*args: Any) -> Any:
            return cutjax.moe(*args, k=chosen, scoring=scoring, activation=jax.nn.relu)

        return f"moe {chosen}", fn, True


def loss(fn: Callable[..., Any], *args: Any) -> Any:
    """A sum in which elements count -1, 0, 1 or 2 times, and the results."""
    outs = fn(*args)
    return sum(
        (y * (jnp.arange(y.size, dtype=y.dtype) % 4 - 1).reshape(y.shape)).sum() for y in jax.tree.leaves(outs)
    ), outs


def divided(draw: Draw) -> Callable[..., Any]:
    def lies(x: Any, spec: jax.P) -> Any:
        return lax.with_sharding_constraint(x, jax.NamedSharding(draw.mesh, spec))

    def fn(*args: Any) -> Any:
        outs = draw.fn(*(lies(x, spec) for x, spec in zip(args, draw.specs, strict=True)))
        if draw.results is None:
            return outs
        leaves, tree = jax.tree.flatten(outs)
        return tree.unflatten(lies(x, draw.results(i, x.ndim)) for i, x in enumerate(leaves))

    return fn


@pytest.mark.parametrize("seed", range(int(os.environ.get("DRAWS", "3"))))
def test_layouts(seed):
    draw = Drawing(seed).draw()
    at = tuple(range(len(draw.args)))
    expected, got = (
        jax.jit(jax.grad(functools.partial(loss, fn), at, has_aux=True))(*draw.args) for fn in (draw.fn, divided(draw))
    )
    what = f"{draw.name}, {[x.shape for x in draw.args]} {draw.specs} on {dict(draw.mesh.shape)}"
    try:
        close(jax.device_get(got), jax.device_get(expected), 1e-5 if draw.rounded else 1e-7)
    except AssertionError as error:
        error.add_note(what)
        raise


X, W, OF_GROUPS = integers(0, (16, 32)), integers(1, (4, 32, 24)), integers(2, (4, 1, 24))
SUMS = {  # of partial products, on which the epilogue runs: how x, w, the operand and the result lie
    "few rows by fully sharded weights": ((2, 1), (("a",), (None, "a"), (), ("a",)), {}),
    "rows of no group": ((2, 2), (("a",), (None, "a", "b"), (None, None, "b"), ("a", "b")), {}),
    "some of the groups": ((2, 1), (("a",), (None, "a"), ("a",), ("a",)), {"group_offset": 1}),
    "k and groups": ((2, 2), ((None, "a"), ("b", "a"), ("b",), ()), {}),
    "a batch that sizes have": ((2, 2), ((), ("a", "b"), (), ("a",)), {}),
}


@pytest.mark.parametrize("name", SUMS)
def test_epilogues_of_partial_sums(name):
    """A device has the groups of the rows that it keeps, and operands of all groups; rows of no group are zero."""
    shape, specs, options = SUMS[name]
    mesh = jax.make_mesh(
        shape, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[: shape[0] * shape[1]]
    )
    sizes = jnp.array([3, 2, 0, 6, 1, 2][: 4 + 2 * bool(options)], jnp.int32)
    sizes = jnp.stack([sizes, sizes[::-1]]) if "batch" in name else sizes
    lies = [jax.NamedSharding(mesh, jax.P(*spec)) for spec in specs]

    def fn(x, w, c):
        y = cutjax.grouped_gemm(x, w, sizes, epilogue=lambda a, c: a + c, operands=(c,), **options)
        return jnp.maximum(y, 0) * y

    def divided(x, w, c):
        args = (lax.with_sharding_constraint(x, s) for x, s in zip((x, w, c), lies, strict=False))
        return lax.with_sharding_constraint(fn(*args), lies[-1])

    args = X, W, OF_GROUPS[None] if "batch" in name else OF_GROUPS
    got, expected = (
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2), has_aux=True))(*args) for f in (divided, fn)
    )
    same(jax.device_get(got), jax.device_get(expected))
