"""Kernels that divide k on the device: in clusters, as a batch and both, of every kind of product.

Small integers unless said otherwise: equal to numpy, bit for bit, or wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import grouped_problems as grouped
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import cutjax
from benchmarks import oracle

pytestmark = pytest.mark.gpu

Config = cutjax.Config
H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
LAYOUTS = ("nn", "nt", "tn", "tt")
SECONDS = 120  # a test takes a few: longer is a CTA that waits for another for ever

# Of one and of two warpgroups, 64 rows and 128 of each; 1, 2, 4 and 8 owners; as many as there are CTAs, and fewer.
IN_CLUSTERS = {
    2: (Config(64, 64, 64, 4), Config(128, 256, 64, 4), Config(256, 96, 64, 4), Config(64, 16, 64, 4)),
    3: (Config(128, 128, 64, 4), Config(64, 96, 64, 4)),
    4: (Config(128, 128, 64, 4), Config(64, 64, 128, 4), Config(256, 32, 64, 4), Config(128, 96, 64, 5)),
    6: (Config(128, 256, 64, 4), Config(64, 64, 64, 4)),
    8: (Config(128, 128, 64, 4), Config(64, 128, 64, 6), Config(128, 80, 64, 4), Config(64, 256, 64, 4)),
}
AS_BATCH = (
    Config(128, 128, 64, 4),
    Config(128, 128, 64, 4, schedule="pingpong"),
    Config(128, 256, 64, 4, cluster_m=2),
    Config(64, 64, 64, 4, cluster_n=2, schedule="pingpong"),
)
SHARED = [dataclasses.replace(config, cluster_k=k) for k, configs in IN_CLUSTERS.items() for config in configs]
BATCHED = [dataclasses.replace(config, splits=splits) for config in AS_BATCH for splits in (2, 3, 16)]
BOTH = [Config(128, 128, 64, 4, cluster_k=2, splits=3), Config(64, 64, 64, 4, cluster_k=8, splits=2)]
BOTH += [Config(64, 32, 64, 8, cluster_k=4, splits=16)]
SWAPPED = [Config(64, 32, 64, 8, swap=True, cluster_k=4), Config(128, 64, 64, 5, swap=True, cluster_k=2, splits=3)]
SWAPPED += [Config(64, 48, 64, 6, swap=True, splits=3), Config(64, 16, 128, 6, swap=True, cluster_k=8)]
CONFIGS = SHARED + BATCHED + BOTH + SWAPPED


def name(config: cutjax.Config) -> str:
    tile = f"{config.bm}x{config.bn}x{config.bk}_{config.schedule}_c{config.cluster_m}{config.cluster_n}"
    return f"{tile}_k{config.cluster_k}_s{config.splits}" + "_swap" * config.swap


def integers(seed: int, *shapes: tuple[int, ...], dtype: np.dtype = H) -> list[np.ndarray]:
    rng = np.random.default_rng([problems.SEED, seed, 31])
    values = np.arange(-2, 3).astype(dtype)
    return [values[rng.integers(0, 5, shape, dtype=np.int8)] for shape in shapes]


def gaussian(seed: int, *shapes: tuple[int, ...], dtype: np.dtype = H) -> list[np.ndarray]:
    rng = np.random.default_rng([problems.SEED, seed, 32])
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def check(out: Any, expected: np.ndarray, what: object = "") -> None:
    out = np.asarray(out)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(out, expected), f"{what}: {problems.mismatch(out, expected)}"


def check_exact(problem: cutjax.Problem, config: cutjax.Config) -> None:
    """Results land in donated NaN where the kernel writes them."""
    a, b = integers(problem.k, *problems.shapes(problem)[:2], dtype=problem.a.dtype)
    executable = problems.compiled(problem, config, "cuda")
    out = executable(*jax.device_put((a, b, problems.poison(problem))))
    check(out, problems.reference(a, b, problem.layout, np.float32).astype(problem.out_dtype), config)


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_every_config(config):
    """Several tiles with tails along every axis; fewer k blocks than parts; one."""
    for i, (m, n, k) in enumerate(((264, 328, 4104), (136, 72, 200), (520, 264, 72), (8, 16, 8))):
        out = (H, F32)[i % 2]
        check_exact(cutjax.Problem.of(m, n, k, LAYOUTS[i], out_dtype=out), config)


@pytest.mark.parametrize("config", [SHARED[6], SHARED[-1], *BATCHED[:4:3], BOTH[0], *SWAPPED], ids=name)
def test_rows_that_are_not_aligned(config):
    for i, layout in enumerate(LAYOUTS):
        check_exact(cutjax.Problem.of(137, 201 + i, 1999, layout, out_dtype=(H, F32)[i % 2]), config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [H, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize(
    "config",
    [Config(128, 128, 64, 4, cluster_k=4), Config(64, 64, 64, 4, splits=3), *BOTH[:1]],
    ids=name,
)
def test_layouts(config, layout, dtype):
    for out in (dtype, F32):
        check_exact(cutjax.Problem.of(200, 264, 1992, layout, dtype, dtype, out), config)


@pytest.mark.parametrize("config", [SHARED[0], SHARED[7], Config(128, 128, 64, 4, splits=3), *BOTH[:2]], ids=name)
def test_batches(config):
    for batch, a_batch, b_batch in (((3,), (3,), (3,)), ((2, 3), (2, 1), (1, 3)), ((2, 2, 2), (2, 1, 2), (1, 2, 2))):
        shape = {"batch": batch, "a_batch": a_batch, "b_batch": b_batch}
        check_exact(cutjax.Problem.of(136, 200, 1032, "nt", **shape), config)


LONG = {
    (256, 256, 65536, "nn"): [Config(128, 128, 64, 6, cluster_k=8), Config(128, 128, 64, 6, cluster_k=8, splits=4)],
    (64, 64, 262144, "nt"): [Config(64, 64, 64, 8, cluster_k=8, splits=16), Config(64, 64, 64, 8, splits=128)],
    (768, 768, 50432, "tn"): [Config(128, 256, 64, 4, cluster_k=4), Config(128, 128, 64, 4, splits=3)],
    (16, 4096, 14336, "nn"): [Config(64, 16, 64, 12, swap=True, cluster_k=2), Config(64, 128, 64, 6, cluster_k=4)],
    (5120, 1280, 12608, "tn"): [Config(128, 256, 64, 4, cluster_k=2), Config(128, 256, 64, 4, cluster_m=2, splits=3)],
}


def check_long(shape, config):
    """Against XLA's product of the same integers, which is exact as well: numpy takes minutes."""
    m, n, k, layout = shape
    problem = cutjax.Problem.of(m, n, k, layout, out_dtype=F32)
    a, b = jax.device_put(integers(k, *problems.shapes(problem)[:2]))
    expected = jax.jit(lambda a, b: cutjax.gemm(a, b, layout=layout, out_dtype=F32, backend="xla"))(a, b)
    out = problems.compiled(problem, config, "cuda")(a, b, jax.device_put(problems.poison(problem)))
    check(out, np.asarray(expected), config)


@pytest.mark.parametrize(("shape", "config"), [(s, c) for s, configs in LONG.items() for c in configs], ids=str)
def test_long_and_thin(shape, config):
    check_long(shape, config)


@pytest.mark.parametrize("out", [H, F32], ids=str)
@pytest.mark.parametrize("config", [SHARED[1], SHARED[6], SHARED[-1], *BATCHED[:3], *BOTH], ids=name)
def test_gaussian(config, out):
    """Within the tolerance of any kernel; and the same bits every time."""
    problem = cutjax.Problem.of(328, 520, 9992, "nn", out_dtype=out)
    a, b = gaussian(1, *problems.shapes(problem)[:2])
    executable = problems.compiled(problem, config, "cuda")
    first, *others = (np.asarray(executable(*jax.device_put((a, b, problems.poison(problem))))) for _ in range(10))
    error = oracle.compare(first, problems.reference(a, b, problem.layout, np.float64), problem.k)
    problems.note_worst(f"split norm, {out}", error.relative / error.tolerance)
    assert error.ok, f"{config}: {error}"
    for other in others:
        assert np.array_equal(other.view(np.uint8), first.view(np.uint8))


def gelu(acc: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(acc / 64 + bias.astype(acc.dtype)).astype(H)


def residual(acc: jax.Array, scale: jax.Array, bias: jax.Array, rows: jax.Array, x: jax.Array) -> jax.Array:
    wide = acc * scale + bias.astype(acc.dtype) + rows + x.astype(acc.dtype)
    return wide.astype(H)


def reductions(acc: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    y = acc + x.astype(acc.dtype)
    return y, acc.sum(0), acc.max(1), jnp.abs(y).max(), y.min(0), y.sum(1)


def gated(g: jax.Array, u: jax.Array) -> tuple[jax.Array, ...]:
    return jnp.where(g > 0, u, -u), g.astype(H)


def positions(acc: jax.Array) -> jax.Array:
    row, column = (jax.lax.broadcasted_iota(jnp.float32, acc.shape, acc.ndim - 2 + axis) for axis in range(2))
    return acc + row - 2 * column


M, N, K = 200, 328, 1992
# What is computed, of how many products, shapes and dtypes of operands, and how far results may be off, relative to 1
# and to themselves: gelu in its fast form by 2^-10, and where one side rounds up and the other down, 2^-7 of bf16.
FUSED: dict[str, tuple[Callable[..., Any], int, tuple[tuple[tuple[int, ...], np.dtype], ...], float]] = {
    "gelu": (gelu, 1, (((N,), H),), 2.0**-7),
    "residual": (residual, 1, (((), F32), ((N,), H), ((M, 1), F32), ((M, N), H)), 0),
    "reductions": (reductions, 1, (((M, N), F32),), 0),
    "gated": (gated, 2, (), 0),
    "positions": (positions, 1, (), 0),
}
FUSED_CONFIGS = [
    Config(128, 64, 64, 4, cluster_k=2),
    Config(128, 128, 64, 4, cluster_k=4),
    Config(64, 64, 64, 4, cluster_k=8),
    Config(256, 64, 64, 4, cluster_k=2),
    Config(128, 96, 64, 4, cluster_k=8),
    Config(128, 64, 64, 4, splits=3),
    Config(128, 64, 64, 4, splits=2, schedule="pingpong"),
    Config(128, 64, 64, 4, cluster_k=4, splits=2),
    Config(128, 64, 64, 4, swap=True, cluster_k=4),
    Config(64, 32, 64, 4, swap=True, cluster_k=2, splits=2),
]


def check_epilogue(config: cutjax.Config, case: str, batch: tuple[int, ...]) -> None:
    """Of one product or of a batch of them, which share the operands."""
    fn, products, shapes, tolerance = FUSED[case]
    if batch and case == "reductions":
        fn = jax.vmap(fn, (0, None))
    a, *bs = integers(5, (*batch, M, K), *[(*batch, K, N)] * products)
    operands = [x.astype(dtype) for x, (_, dtype) in zip(integers(6, *(s for s, _ in shapes)), shapes, strict=True)]

    def fused(a: Any, bs: Any, operands: Any) -> Any:
        b = tuple(bs) if products > 1 else bs[0]
        if batch and case == "reductions":
            own = FUSED[case][0]
            run = lambda a, b: cutjax.gemm(a, b, epilogue=own, operands=operands, config=config)  # noqa: E731
            return jax.vmap(run)(a, b)
        return cutjax.gemm(a, b, epilogue=fn, operands=operands, config=config)

    found = jax.tree.leaves(jax.jit(fused)(*jax.device_put((a, bs, operands))))
    accs = [problems.reference(a, b, "nn", np.float32) for b in bs]
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.tree.leaves(fn(*map(jnp.asarray, (*accs, *operands))))
    for i, (out, ref) in enumerate(zip(found, expected, strict=True)):
        ref = np.asarray(ref).astype(out.dtype)
        if tolerance:
            assert out.shape == ref.shape
            np.testing.assert_allclose(np.asarray(out, np.float32), ref.astype(np.float32), tolerance, tolerance)
        else:
            check(out, ref, f"{config}, result {i}")


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("config", FUSED_CONFIGS, ids=name)
def test_epilogues(config, case, batch):
    if config.swap and FUSED[case][1] > 1:
        pytest.skip("several products cannot be swapped")
    check_epilogue(config, case, batch)


GROUPED_CONFIGS = [
    Config(128, 128, 64, 4, cluster_k=2),
    Config(64, 64, 64, 4, cluster_k=8),
    Config(128, 256, 64, 4, cluster_k=4),
    Config(128, 128, 64, 4, splits=3),
    Config(128, 128, 64, 4, splits=2, schedule="pingpong"),
    Config(128, 128, 64, 4, splits=2, cluster_m=2, schedule="pingpong"),
    Config(128, 64, 64, 4, cluster_k=4, splits=3),
]
SIZES = {
    "even": [1000, 1000, 1000, 1000],
    "one deep": [0, 3800, 0, 7],
    "shallow": [1, 0, 63, 65],
    "none": [0, 0, 0, 0],
    "hostile": [-5, 3000, 2**31 - 1, 9],
}


@pytest.mark.parametrize("config", GROUPED_CONFIGS, ids=name)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_groups_of_k(config, batch):
    """NaN in the rows of no group; sizes are data of one executable, and each entry of the batch has its own."""
    parts = {"batch": batch, "a_batch": batch, "b_batch": (1,) * len(batch), "sizes_batch": batch}
    for out, leading in ((H, False), (F32, True)):
        problem = cutjax.Problem.of(136, 200, 4096, "tn", out_dtype=out, groups=4, ragged="k", leading=leading, **parts)
        executable = grouped.compiled(problem, config, "cuda")
        kinds = list(SIZES)
        for i, kind in enumerate(kinds):
            rows = [[11, *SIZES[x]] if leading else SIZES[x] for x in (kind, kinds[i - 1], kinds[i - 2])]
            sizes = np.array(rows if batch else rows[0], np.int32)
            a, b = grouped.integers(problem, i)
            expected = grouped.reference(problem, a, b, sizes, np.float32).astype(out)
            if not batch:  # b is shared by entries whose groups differ
                a, b = grouped.with_nan(problem, a, b, sizes)
            result = executable(*jax.device_put((a, b, sizes, grouped.poison(problem))))
            check(result, expected, f"{config}, {kind}, leading={leading}")


def test_many_groups_of_k():
    """More than a window of 32 of them."""
    problem = cutjax.Problem.of(136, 72, 5000, "tn", groups=70, ragged="k")
    rng = np.random.default_rng(3)
    sizes = (rng.integers(0, 140, 70) * (rng.random(70) < 0.8)).astype(np.int32)
    a, b = grouped.integers(problem, 1)
    expected = grouped.reference(problem, a, b, sizes, np.float32).astype(H)
    a, b = grouped.with_nan(problem, a, b, sizes)
    for config in (GROUPED_CONFIGS[0], GROUPED_CONFIGS[3], GROUPED_CONFIGS[4]):
        executable = grouped.compiled(problem, config, "cuda")
        check(executable(*jax.device_put((a, b, sizes, grouped.poison(problem)))), expected, config)


@pytest.mark.parametrize("config", [GROUPED_CONFIGS[0], GROUPED_CONFIGS[3]], ids=name)
def test_accumulate(config):
    """Into the memory of what is added to where the kernel writes."""
    sizes = np.array([1000, 0, 2000], np.int32)
    x, dy, to = integers(9, (4096, 136), (4096, 200), (3, 136, 200))
    problem = cutjax.Problem.of(136, 200, 4096, "tn", out_dtype=F32, groups=3, ragged="k")
    expected = grouped.reference(problem, x, dy, sizes, np.float32) + to.astype(F32)
    fn = jax.jit(lambda *xs: cutjax.grouped_outer(*xs[:3], accumulate=xs[3], config=config), donate_argnums=3)
    check(fn(*jax.device_put((x, dy, sizes, to.astype(F32)))), expected, config)


@pytest.mark.parametrize(
    "config",
    [
        Config(128, 128, 64, 4, cluster_k=4),
        Config(64, 64, 64, 4, cluster_k=8),
        Config(128, 128, 64, 4, splits=3),
        Config(128, 64, 64, 4, cluster_k=2, splits=2),
    ],
    ids=name,
)
def test_symmetric(config):
    for out in (H, F32):
        (a,) = integers(4, (2, 328, 2056))
        expected = problems.reference(a, a, "nt", np.float32).astype(out)
        check(jax.jit(lambda a, out=out: cutjax.syrk(a, out_dtype=out, config=config))(a), expected, config)
