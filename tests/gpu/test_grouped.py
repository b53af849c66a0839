"""Grouped GEMMs on the device: random sizes, hostile sizes, NaN next door, every config, transformations, graphs.

Small integers unless said otherwise: equal to a loop over the groups by numpy, bit for bit, or wrong.
"""

from __future__ import annotations

import functools
import os

import grouped_problems as grouped
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import cutjax
from benchmarks import oracle

pytestmark = pytest.mark.gpu

BACKEND = "cuda"
CALL = "@cutjax_launch"
COUNT = int(os.environ.get("CUTJAX_TEST_GROUPED", "330"))
ITEMS = [grouped.generate(index) for index in range(COUNT)]
GAUSSIAN = [grouped.generate(index) for index in range(10_000, 10_000 + 45)]
H = np.dtype(jnp.bfloat16)


def run(executable, problem, a, b, sizes) -> np.ndarray:
    return np.asarray(executable(*jax.device_put((a, b, sizes, grouped.poison(problem)))))


def check(out: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    assert out.dtype == expected.dtype
    assert np.array_equal(out, expected), f"{what}: {problems.mismatch(out, expected)}"


def _prepare(item):
    executable = grouped.compiled(item.problem, item.config, BACKEND)
    runs = []
    for turn in range(2):
        sizes = grouped.all_sizes(item, turn)
        a, b = grouped.integers(item.problem, 2 * item.index + turn)
        # f32 holds these sums exactly; numpy then rounds to nearest even, as the kernel must.
        expected = grouped.reference(item.problem, a, b, sizes, np.float32).astype(item.problem.out_dtype)
        runs.append((*grouped.with_nan(item.problem, a, b, sizes), sizes, expected))
    return executable, runs


prefetch = problems.prefetching(ITEMS, _prepare, ahead=48)


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_exact(item, prefetch):
    """Results land in donated NaN; the rows of no group and the matrices of empty groups are NaN."""
    executable, runs = prefetch.get(item)
    for kind, (a, b, sizes, expected) in zip(item.kinds, runs, strict=True):
        out = run(executable, item.problem, a, b, sizes)
        check(out, expected, f"{item.config}, {kind} sizes {sizes.tolist()}"[:600])


def test_every_kind_is_drawn():
    drawn = {(item.problem.divided, item.problem.layout, kind) for item in ITEMS for kind in item.kinds}
    if len(ITEMS) >= 300:
        assert len(drawn) == 3 * len(grouped.KINDS)


def _prepare_gaussian(item):
    executable = grouped.compiled(item.problem, item.config, BACKEND)
    a, b = grouped.gaussian(item.problem, item.index)
    sizes = grouped.all_sizes(item, 0)
    return executable, a, b, sizes, grouped.reference(item.problem, a, b, sizes, np.float64)


prefetch_gaussian = problems.prefetching(GAUSSIAN, _prepare_gaussian, ahead=48)


@pytest.mark.parametrize("item", GAUSSIAN, ids=str)
def test_gaussian(item, prefetch_gaussian):
    executable, a, b, sizes, expected = prefetch_gaussian.get(item)
    k = item.problem.k if item.problem.divided == "m" else max(1, int(sizes.max()))
    error = oracle.compare(run(executable, item.problem, a, b, sizes), expected, k)
    problems.note_worst(f"grouped norm, {item.problem.out_dtype}", error.relative / error.tolerance)
    problems.note_worst(f"grouped element, {item.problem.out_dtype}", error.worst)
    assert error.ok, f"{item.config}: {error}"


# Every config, on problems where every CTA of the largest tiles walks two tiles or more.
FORWARD = [
    cutjax.Problem.of(3000, 520, 136, layout, dtype, dtype, dtype, groups=70, ragged="m")
    for layout, dtype in (("nn", H), ("nt", np.dtype(np.float16)))
]
OUTER = [
    cutjax.Problem.of(264, 520, 3000, "tn", dtype, dtype, out, groups=70, ragged="k")
    for dtype, out in ((np.dtype(np.float16), np.dtype(np.float32)), (H, H))
]


def every_config():
    """Of each product every config once, layouts and dtypes in turn."""
    found = []
    for several in (FORWARD, OUTER):
        for number, config in enumerate(problems._by_name(several[0])):
            turn = [p for p in (*several[number % 2 :], *several[: number % 2]) if not cutjax.reasons(config, p)]
            found.append((turn[0], config))
    return found


def _name(value):
    problem, config = value
    return f"{problem.divided}-{config.name(problem)}"


def mixed_sizes(problem: cutjax.Problem, seed: int) -> np.ndarray:
    """Empty groups, one row, whole tiles and tails, and a few rows of no group at the end."""
    rng = np.random.default_rng([seed, 15])
    sizes = np.concatenate([(0, 1, 128, 0, 64, 7, 257), rng.integers(0, 81, problem.groups.count - 7)])
    left = grouped.rows(problem) - 5 - sizes[:-1].sum()
    sizes[-1] = max(0, left)
    return sizes.astype(np.int32)


def _prepare_config(value):
    problem, config = value
    return grouped.compiled(problem, config, BACKEND)


@functools.cache
def _inputs(problem: cutjax.Problem):
    a, b = grouped.integers(problem, 1)
    sizes = mixed_sizes(problem, 1)
    expected = grouped.reference(problem, a, b, sizes, np.float32).astype(problem.out_dtype)
    return (*jax.device_put((*grouped.with_nan(problem, a, b, sizes), sizes)), expected)


EVERY = every_config()
prefetch_configs = problems.prefetching(EVERY, _prepare_config, ahead=48)


@pytest.mark.parametrize("value", EVERY, ids=_name)
def test_every_config(value, prefetch_configs):
    problem, config = value
    *args, expected = _inputs(problem)
    out = prefetch_configs.get(value)(*args, jax.device_put(grouped.poison(problem)))
    check(np.asarray(out), expected, config)


def test_shipped_configs_cover_every_schedule_and_cluster():
    for ragged in "mk":
        configs = [config for problem, config in EVERY if problem.divided == ragged]
        assert {config.schedule for config in configs} == {"coop", "pingpong"}
        assert (1, 1) in {(config.cluster_m, config.cluster_n) for config in configs}


def _spread(values, count):
    """Some of a list, the first and last among them."""
    return [values[i * (len(values) - 1) // (count - 1)] for i in range(count)] if len(values) > count else values


FEW = [v for several in (FORWARD, OUTER) for v in _spread([v for v in EVERY if v[0] in several], 9)]
prefetch_few = problems.prefetching(FEW, _prepare_config, ahead=48)


def _rows_of(problem, sizes, parity):
    inside = np.zeros(grouped.rows(problem), bool)
    for group, (start, end) in enumerate(grouped.spans(sizes, grouped.rows(problem))):
        inside[start:end] = group % 2 == parity
    return inside


@pytest.mark.parametrize("value", FEW, ids=_name)
def test_nan_stays_in_its_group(value, prefetch_few):
    """Every other group is NaN or infinite, by its rows or its weights; the groups between are as they were."""
    problem, _ = value
    executable = prefetch_few.get(value)
    a, b = grouped.integers(problem, 2)
    sizes = mixed_sizes(problem, 2)
    expected = grouped.reference(problem, a, b, sizes, np.float32).astype(problem.out_dtype)
    nonempty = np.array([end > start for start, end in grouped.spans(sizes, grouped.rows(problem))])
    for parity in (0, 1):
        rows, groups = _rows_of(problem, sizes, parity), np.arange(problem.groups.count) % 2 == parity
        for of_a, of_b in ((np.nan, None), (None, np.nan), (np.inf, np.inf)):
            x, y = a.copy(), b.copy()
            if of_a is not None:
                x[rows] = of_a
            if of_b is not None:
                y[rows if problem.divided == "k" else groups] = of_b
            out = run(executable, problem, x, y, sizes)
            clean = ~(groups & nonempty) if problem.divided == "k" else ~rows
            check(out[clean], expected[clean], f"parity {parity}, a {of_a}, b {of_b}")
            assert not np.isfinite(out[~clean].astype(np.float32)).any()


def test_one_nan_reaches_one_row_or_column(gpus):
    """The tail of a group's last tile: neighbours' rows lie in the same tile."""
    forward = cutjax.Problem.of(300, 136, 72, groups=5, ragged="m")
    sizes = np.array([5, 64, 0, 130, 60], np.int32)
    a, b = grouped.integers(forward, 3)
    expected = grouped.reference(forward, a, b, sizes, np.float32).astype(H)
    executable = grouped.compiled(forward, None, BACKEND)
    for row in (0, 4, 5, 68, 69, 198, 199, 258, 259, 299):
        x = a.copy()
        x[row, 3] = np.nan
        out = run(executable, forward, x, b, sizes)
        assert np.isnan(out[row].astype(np.float32)).all() == (row < 259)
        keep = np.arange(300) != row
        check(out[keep], expected[keep], row)
    outer = cutjax.Problem.of(72, 136, 300, "tn", groups=5, ragged="k")
    a, b = grouped.integers(outer, 4)
    expected = grouped.reference(outer, a, b, sizes, np.float32).astype(H)
    executable = grouped.compiled(outer, None, BACKEND)
    for row in (0, 4, 5, 68, 69, 198, 199, 258, 259, 299):
        x, y = a.copy(), b.copy()
        x[row, 3], y[row, 5] = np.nan, np.inf
        out = run(executable, outer, x, y, sizes)
        group = next((g for g, (start, end) in enumerate(grouped.spans(sizes, 300)) if start <= row < end), None)
        bad = np.zeros(out.shape, bool)
        if group is not None:
            bad[group, 3], bad[group, :, 5] = True, True
            assert np.isnan(out[group, 3].astype(np.float32)).all()
        check(out[~bad], expected[~bad], row)


MOST = np.iinfo(np.int32).max
HOSTILE = {
    "negative": [-5, 100, -MOST - 1, 50, -1, 20, 0],
    "past the end": [100, 0, 150, 200, 300, 1, 7],
    "all the largest": [MOST] * 7,
    "wraps to 0": [1 << 30, 1 << 30, 1 << 30, 1 << 30, 5, 5, 5],
    "wraps to a small size": [10, MOST, MOST, 20, 30, 40, 50],
    "largest last": [10, 20, 30, 40, 50, 60, MOST],
    "largest after the end": [300, MOST, 3, 0, MOST, 1, 1],
    "all negative": [-MOST - 1] * 7,
    "exactly all": [0, 0, 0, 300, 0, 0, 0],
    "none": [0] * 7,
}


@pytest.mark.parametrize("leading", [False, True], ids=["first", "leading"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sizes(name, leading, gpus):
    sizes = np.array(HOSTILE[name], np.int32)
    shape = {"groups": 7 - leading, "leading": leading}
    for problem in (
        cutjax.Problem.of(300, 136, 72, ragged="m", **shape),
        cutjax.Problem.of(72, 136, 300, "tn", ragged="k", **shape),
    ):
        a, b = grouped.integers(problem, 5)
        expected = grouped.reference(problem, a, b, sizes, np.float32).astype(H)
        executable = _hostile_executable(problem)
        check(run(executable, problem, *grouped.with_nan(problem, a, b, sizes), sizes), expected, name)


@functools.cache
def _hostile_executable(problem):
    return grouped.compiled(problem, None, BACKEND)


def test_poison_is_the_result(gpus):
    """The array of NaN really is the memory the kernel writes: else unwritten elements would not be seen."""
    for item in (ITEMS[0], ITEMS[2]):
        a, b = grouped.integers(item.problem, 6)
        args = jax.device_put((a, b, grouped.all_sizes(item, 0), grouped.poison(item.problem)))
        address = args[3].unsafe_buffer_pointer()
        out = grouped.compiled(item.problem, item.config, BACKEND)(*args)
        assert out.unsafe_buffer_pointer() == address
        assert args[3].is_deleted()


def test_the_same_bits_every_time(gpus):
    for problem in (FORWARD[0], OUTER[1]):
        a, b = grouped.gaussian(problem, 7)
        sizes = mixed_sizes(problem, 7)
        executable = grouped.compiled(problem, None, BACKEND)
        first = run(executable, problem, a, b, sizes)
        for _ in range(10):
            assert np.array_equal(run(executable, problem, a, b, sizes), first)


# The public functions and what JAX makes of them.

M, N, K, G = 300, 136, 72, 6
SIZES = np.array([40, 0, 130, 1, 64, 50], np.int32)  # 15 rows of no group
gemm = functools.partial(cutjax.grouped_gemm, backend=BACKEND)
outer = functools.partial(cutjax.grouped_outer, backend=BACKEND)


def ints(seed: int, *shape: int, dtype=H) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32), dtype)


def weights(seed: int, layout: str, *batch: int) -> jax.Array:
    return ints(seed, *batch, G, *((K, N) if layout == "nn" else (N, K)))


def forward(x, w, sizes=SIZES, layout="nn") -> np.ndarray:
    """f32 by numpy, for one entry of a batch."""
    x, w, sizes = np.asarray(x, np.float32), np.asarray(w, np.float32), np.asarray(sizes)
    out = np.zeros((len(x), w.shape[-1] if layout == "nn" else w.shape[-2]), np.float32)
    for group, (start, end) in enumerate(grouped.spans(sizes, len(x))):
        out[start:end] = x[start:end] @ (w[group] if layout == "nn" else w[group].T)
    return out


def backward(x, dy, sizes=SIZES, layout="nn") -> np.ndarray:
    """The weights' gradient."""
    x, dy = np.asarray(x, np.float32), np.asarray(dy, np.float32)
    pairs = [(x[start:end], dy[start:end]) for start, end in grouped.spans(np.asarray(sizes), len(x))]
    return np.stack([(a.T @ b) if layout == "nn" else (b.T @ a) for a, b in pairs])


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_jit_eager_and_backward(layout):
    x, w, dy = ints(1, M, K), weights(2, layout), ints(3, M, N)
    function = functools.partial(gemm, layout=layout)
    jitted = jax.jit(function)
    assert jitted.lower(x, w, SIZES).as_text().count(CALL) == 1
    check(np.asarray(jitted(x, w, SIZES)), forward(x, w, layout=layout).astype(H))
    check(np.asarray(function(x, w, jnp.asarray(SIZES))), forward(x, w, layout=layout).astype(H))

    pull = jax.jit(lambda x, w, sizes, dy: jax.vjp(lambda x, w: function(x, w, sizes), x, w)[1](dy))
    text = pull.lower(x, w, SIZES, dy).as_text()
    assert text.count(CALL) == 2
    assert "stablehlo.transpose" not in text
    dx, dw = pull(x, w, SIZES, dy)
    check(np.asarray(dx), forward(dy, w, layout="nt" if layout == "nn" else "nn").astype(H))
    check(np.asarray(dw), backward(x, dy, layout=layout).astype(H))


def test_outer_and_its_gradient():
    a, b, ct = ints(1, M, K), ints(2, M, N), ints(3, G, K, N)
    check(np.asarray(jax.jit(outer)(a, b, SIZES)), backward(a, b).astype(H))
    pull = jax.jit(lambda a, b, sizes, ct: jax.vjp(lambda a, b: outer(a, b, sizes), a, b)[1](ct))
    text = pull.lower(a, b, SIZES, ct).as_text()
    assert text.count(CALL) == 2
    assert "stablehlo.transpose" not in text
    da, db = pull(a, b, SIZES, ct)
    check(np.asarray(da), forward(b, ct, layout="nt").astype(H))
    check(np.asarray(db), forward(a, ct).astype(H))


def test_outer_accumulates_into_a_gradient():
    a, b, into = ints(1, M, K), ints(2, M, N), ints(3, G, K, N, dtype=np.float32)
    function = jax.jit(lambda a, b, sizes, into: outer(a, b, sizes, accumulate=into), donate_argnums=3)
    expected = np.asarray(into) + backward(a, b)
    check(np.asarray(function(a, b, SIZES, into)), expected)


def test_jvp():
    x, w, dx, dw = ints(1, M, K), weights(2, "nn"), ints(3, M, K), weights(4, "nn")
    out, tangent = jax.jit(lambda *xs: jax.jvp(lambda x, w: gemm(x, w, SIZES), xs[:2], xs[2:]))(x, w, dx, dw)
    check(np.asarray(out), forward(x, w).astype(H))
    rounded = [forward(*pair).astype(H).astype(np.float32) for pair in ((dx, w), (x, dw))]
    check(np.asarray(tangent), (rounded[0] + rounded[1]).astype(H))


@pytest.mark.parametrize("moves", [m for m in np.ndindex(2, 2, 2) if any(m)], ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_vmap(layout, moves):
    """Over every subset of the arrays: one kernel, and what is shared is read in place."""
    batch = 3
    x, w = ints(1, batch, M, K), weights(2, layout, batch)
    sizes = jnp.asarray(np.stack([SIZES, SIZES[::-1], [0, 300, 5, -7, 0, 1]]).astype(np.int32))
    args = [value if moved else value[0] for value, moved in zip((x, w, sizes), moves, strict=True)]
    axes = tuple(0 if moved else None for moved in moves)

    def each(reference, *rest):
        picked = ([value[i] if moved else value for value, moved in zip(args, moves, strict=True)] for i in range(3))
        return np.stack([reference(*one, *(r[i] for r in rest)) for i, one in enumerate(picked)]).astype(H)

    function = jax.jit(jax.vmap(functools.partial(gemm, layout=layout), in_axes=axes))
    text = function.lower(*args).as_text()
    assert text.count(CALL) == 1
    if not moves[1]:
        assert f"tensor<{batch}x{G}x{w.shape[-2]}x" not in text  # one copy of the weights, stride 0
    check(np.asarray(function(*args)), each(functools.partial(forward, layout=layout)))

    dy = ints(3, batch, M, N)
    pulled = jax.jit(
        jax.vmap(lambda x, w, s, dy: jax.vjp(lambda *a: gemm(*a, s, layout=layout), x, w)[1](dy), (*axes, 0))
    )
    dx, dw = pulled(*args, dy)
    flip = "nt" if layout == "nn" else "nn"
    check(np.asarray(dx), each(lambda x, w, s, dy: forward(dy, w, s, layout=flip), dy))
    check(np.asarray(dw), each(lambda x, w, s, dy: backward(x, dy, s, layout=layout), dy))


def test_vmap_over_other_axes():
    x, w, sizes = ints(1, M, 3, K), ints(2, G, K, 3, N), jnp.asarray(np.stack([SIZES, SIZES[::-1], SIZES], 1))
    out = jax.jit(jax.vmap(gemm, (1, 2, 1), 2))(x, w, sizes)
    expected = np.stack([forward(x[:, i], w[:, :, i], sizes[:, i]) for i in range(3)], 2)
    check(np.asarray(out), expected.astype(H))


def test_scan_over_layers():
    order = np.stack([np.random.default_rng(i).permutation(K) for i in range(5 * G)]).reshape(5, G, K)
    w = jnp.asarray(np.eye(K, dtype=np.float32)[order], H)  # permutations: exact however often they are applied
    x = ints(1, M, K)

    @jax.jit
    def layers(x, w, sizes):
        return jax.lax.scan(lambda x, w: (gemm(x, w, sizes), None), x, w)[0]

    expected = np.asarray(x, np.float32)
    for i in range(5):
        expected = forward(expected, w[i])
    check(np.asarray(layers(x, w, SIZES)), expected.astype(H))


def test_group_offset():
    """Groups 2 and 3 of six live here: the rows of the others are zero, and get no gradient."""
    x, w, dy = ints(1, M, K), weights(2, "nn"), ints(3, M, N)
    own = np.zeros(M, bool)
    for start, end in grouped.spans(SIZES, M)[2:4]:
        own[start:end] = True

    @jax.jit
    def function(x, w, sizes, offset):
        return gemm(x, w, sizes, group_offset=offset)

    for offset in (2, jnp.int32(2), jnp.array([2], jnp.int32)):
        out = np.asarray(function(x, w[2:4], SIZES, offset))
        check(out, np.where(own[:, None], forward(x, w), 0).astype(H), offset)
    pull = jax.jit(lambda x, w, s, o, dy: jax.vjp(lambda x, w: function(x, w, s, o), x, w)[1](dy))
    dx, dw = pull(x, w[2:4], SIZES, 2, dy)
    check(np.asarray(dx), np.where(own[:, None], forward(dy, w, layout="nt"), 0).astype(H))
    check(np.asarray(dw), backward(x, dy)[2:4].astype(H))


@pytest.mark.parametrize("dtype", [None, np.float32], ids=["bfloat16", "float32"])
def test_ragged_dot_is_lax_ragged_dot(dtype):
    x, w = ints(1, M, K), weights(2, "nn")
    dy = ints(3, M, N, dtype=dtype or H)

    def results(ragged_dot):
        @jax.jit
        def fn(x, w, sizes, dy):
            out, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, preferred_element_type=dtype), x, w)
            return out, *pull(dy)

        return fn(x, w, SIZES, dy)

    for got, wanted in zip(results(cutjax.ragged_dot), results(jax.lax.ragged_dot), strict=True):
        check(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize("options", [{}, {"xla_gpu_graph_min_graph_size": 1}], ids=["default", "graph"])
def test_graph_replay_with_other_sizes(options):
    """XLA captures a run of launches as a CUDA graph: its replays read each call's sizes from that call's buffers."""

    def chain(x, ws, sizes):
        for i in range(len(ws)):
            x = jnp.clip(gemm(x, ws[i], sizes[i]), -2, 2)
        return x, outer(x, x, sizes[0])

    ws = [ints(10 + i, G, K, K) for i in range(5)]
    function = jax.jit(chain, compiler_options=options if jax.default_backend() == "gpu" else {})
    kept = []
    for i in range(20):
        rng = np.random.default_rng(i)
        sizes = [grouped.draw_sizes(rng, grouped.KINDS[(i + j) % len(grouped.KINDS)], M, G) for j in range(5)]
        x = ints(100 + i, M, K)
        expected = np.asarray(x)
        for w, of_groups in zip(ws, sizes, strict=True):
            expected = np.clip(forward(expected, w, of_groups).astype(H).astype(np.float32), -2, 2).astype(H)
        kept.append(
            (function(x, ws, jax.device_put(sizes)), expected, sizes[0])
        )  # alive: the next call gets other memory
    for (out, square), expected, of_groups in kept:
        check(np.asarray(out), expected)
        check(np.asarray(square), backward(expected, expected, of_groups).astype(H))


@pytest.mark.parametrize("shape", [(0, 72, 136, 4), (64, 0, 136, 4), (64, 72, 136, 0), (0, 72, 136, 0)], ids=str)
def test_zero_sizes(shape):
    m, k, n, g = shape
    sizes = np.full(g, 16, np.int32)
    out = gemm(ints(1, m, k), ints(2, g, k, n), sizes)
    check(np.asarray(out), np.zeros((m, n), H))
    out = outer(ints(1, m, k), ints(2, m, n), sizes)
    expected = backward(ints(1, m, k), ints(2, m, n), sizes) if g else np.zeros((0, k, n))
    check(np.asarray(out), expected.astype(H))


def test_rows_that_are_copied_to_padded_ones():
    x, w = ints(1, 64, 100), ints(2, 3, 100, 64)  # rows of 200 bytes
    sizes = np.array([10, 20, 30], np.int32)
    check(np.asarray(gemm(x, w, sizes)), forward(x, w, sizes).astype(H))
