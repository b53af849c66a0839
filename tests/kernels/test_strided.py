"""Arrays in an order of memory of their own: the same values, and tensor maps that walk them where they lie."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import changed, compare, integers, same, squares
from cubin import check_lean
from hypothesis import given, settings
from hypothesis import strategies as st

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels import xla
from cutjax.kernels.choose import candidates, choose
from cutjax.kernels.device import reference
from cutjax.kernels.families import in_order
from cutjax.kernels.keys import key
from cutjax.kernels.problem import LAYOUTS, strides
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.primitives.dense import Dense
from cutjax.primitives.factors import Factors
from cutjax.primitives.product import call, multiply
from cutjax.runtime import compiler
from cutjax.tuning import autotune, measure

H, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
HEADS = (0, 2, 1, 3)  # [batch, heads, rows, columns] that lie as [batch, rows, heads, columns]
AUTO = {"precision": None, "backend": "auto"}
CUDA = {"precision": None, "backend": "cuda"}
TILE = cutjax.Config(bm=64, bn=64, stages=2)


def heads(x):
    return x.transpose(HEADS)


def scores(q, k, orders=(HEADS, HEADS, ()), **params):
    """bqhd, bkhd -> bhqk."""
    return multiply(Dense("nt", orders), heads(q), heads(k), out_dtype=q.dtype, **(AUTO | params))


def mixed(p, v, orders=((), HEADS, HEADS), **params):
    """bhqk, bkhd -> bqhd."""
    return heads(multiply(Dense("nn", orders), p, heads(v), out_dtype=p.dtype, **(AUTO | params)))


NONE = ((), (), ())
Q, K, V = integers(0, (2, 5, 3, 4)), integers(1, (2, 6, 3, 4)), integers(2, (2, 6, 3, 4))


def attention(orders):
    ours = (HEADS, HEADS, ()), ((), HEADS, HEADS)
    first, second = ours if orders else (NONE, NONE)
    return lambda q, k, v: mixed(scores(q, k, first), v, second)


def gradients(f):
    return jax.grad(squares(f), (0, 1, 2))


TAKEN = {
    "value": lambda f: f,
    "gradient": gradients,
    "twice": lambda f: gradients(lambda *args: gradients(f)(*args)),
    "forwards": lambda f: lambda *args: jax.jvp(f, args, args),
    "mapped": lambda f: lambda q, k, v: jax.vmap(f, (2, None, 0), 3)(jnp.stack([q, 2 * q], 2), k, jnp.stack([v, -v])),
    "mapped twice": lambda f: (
        lambda q, k, v: jax.vmap(jax.vmap(f, (None, 0, 1)), (4, None, 1))(
            jnp.stack([q, 2 * q], 4), k[None], jnp.stack([jnp.stack([v, -v])] * 2, 1)[:, :, None, 0]
        )
    ),
    "gradient of mapped": lambda f: lambda q, k, v: gradients(jax.vmap(f, (None, 0, 1)))(q, k[None], v[:, None]),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_values_are_those_of_row_major_arrays(take):
    compare(take, (attention(True), attention(False)), (Q, K, V))


def test_with_an_epilogue():
    def fused(orders):
        product = Dense("nt", orders)
        bias = integers(5, (6,))
        return lambda q, k: call(
            product, lambda acc: jnp.maximum(acc + bias, 0), Factors(heads(q), [heads(k)]), (), out_dtype=F32, **AUTO
        )

    compare(lambda f: jax.grad(squares(f), (0, 1)), (fused((HEADS, HEADS, HEADS)), fused(NONE)), (Q, K))


def products(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return [eqn.params["product"] for eqn in jaxpr.eqns if eqn.primitive.name == "cutjax_gemm"]


def test_cotangents_permute_orders_as_layouts():
    """Of [k, m] and [n, k], which lie otherwise each, so that nothing is right by chance."""
    a_order, b_order, d_order = (1, 0, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)
    expected = {
        "nn": [("nt", d_order, b_order, a_order), ("tn", a_order, d_order, b_order)],
        "nt": [("nn", d_order, b_order, a_order), ("tn", d_order, a_order, b_order)],
        "tn": [("nt", b_order, d_order, a_order), ("nn", a_order, d_order, b_order)],
        "tt": [("tt", b_order, d_order, a_order), ("tt", d_order, a_order, b_order)],
    }
    for layout in LAYOUTS:
        x = integers(0, (2, 3, 4, 4))
        product = Dense(layout, (a_order, b_order, d_order))

        def back(a, b, product=product):
            return jax.vjp(lambda a, b: multiply(product, a, b, out_dtype=F32, **AUTO), a, b)[1](a)

        found = [(x.layout, *x.orders) for x in products(back, x, x)]
        assert sorted(found) == sorted([(layout, a_order, b_order, d_order), *expected[layout]])


def test_a_new_axis_is_the_slowest():
    def orders(fn, *args):
        return products(fn, *args)[0].orders

    q = jnp.stack([Q] * 2)
    assert orders(jax.vmap(scores, (0, None)), q, K) == ((0, 1, 3, 2, 4),) * 2 + ((),)
    inner = lambda q, k: multiply(Dense("nt", (HEADS, HEADS, ())), q, k, out_dtype=F32, **AUTO)  # noqa: E731
    q, k = jnp.stack([heads(Q)] * 2, 2), heads(K)
    assert orders(jax.vmap(inner, (2, None), 2), q, k) == ((2, 0, 3, 1, 4),) * 2 + ((),)


def test_hints_that_are_none():
    assert Dense("nn", ((0, 1, 2), (), (0, 1, 2, 3))) == Dense("nn")
    for orders in (((0, 2, 1), (), ()), ((0, 0, 1), (), ()), ((1, 2, 3), (), ())):
        with pytest.raises(ValueError, match="each of them once, and the last axis last"):
            Dense("nn", orders)
    with pytest.raises(ValueError, match="expected three"):
        Dense("nn", ((), ()))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="of arrays of 3 axes"):
        multiply(Dense("nn", (HEADS, (), ())), Q[0], Q[0].mT, out_dtype=F32, **AUTO)
    for more in ({"groups": 2, "ragged": "m", "sizes_batch": (2,)}, {"symmetric": True, "layout": "nt"}):
        with pytest.raises(ValueError, match="orders="):
            cutjax.Problem.of(8, 8, 8, batch=(2,), a_batch=(2,), b_batch=(2,), orders=((1, 0, 2), (), ()), **more)


# The maps, against arrays in memory.


def orders_of(rank):
    return st.permutations(range(rank + 1)).map(lambda order: (*order, rank + 1))


@st.composite
def problems(draw):
    axes = draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["both", "a", "b"])), max_size=4))
    m, n, k = (draw(st.integers(1, 20)) for _ in range(3))
    batches = {
        "batch": tuple(size for size, _ in axes),
        "a_batch": tuple(1 if of == "b" else size for size, of in axes),
        "b_batch": tuple(1 if of == "a" else size for size, of in axes),
    }
    problem = cutjax.Problem.of(m, 8 * n, k, draw(st.sampled_from(LAYOUTS)), out_dtype=F32, **batches)
    return in_order(problem, [draw(orders_of(len(axes))) for _ in range(3)])


def in_memory(shape, order, row):
    """Numbers of an array's elements, and where they lie, in rows that take so many elements; elsewhere is -1."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    padded = np.pad(numbers, [(0, 0)] * (len(shape) - 1) + [(0, row - shape[-1])], constant_values=-1)
    return numbers, padded.transpose(order or range(len(shape))).ravel()


def walked(memory, tensor_map, at):
    """The matrix that TMA finds at a number, in the elements of the memory: what it reads lies all inside."""
    (columns, rows, count), itemsize = tensor_map.dims, tensor_map.dtype.itemsize
    pitch, step = (stride // itemsize for stride in tensor_map.strides)
    assert 0 <= at < count
    assert (count - 1) * step + (rows - 1) * pitch + columns <= memory.size
    return memory[at * step + np.arange(rows)[:, None] * pitch + np.arange(columns)]


@given(problems(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_maps_walk_the_matrices_where_they_lie(problem, swap):
    config = dataclasses.replace(TILE, swap=swap)
    kernel = sm90.resolve(problem, config)
    if len(problem.batch_groups) > 3:
        assert "more than 3 groups" in "; ".join(sm90.facts_of(problem).reasons)
        return
    assert not isinstance(kernel, tuple), kernel
    given = {argument.name: argument.value for argument in kernel.arguments}
    number = {name: value.value for name, value in given.items() if hasattr(value, "value")}
    maps = [given["map_b0"], given["map_a"]] if swap else [given["map_a"], given["map_b0"]]
    names = ["b", "a"] if swap else ["a", "b"]
    assert [x.buffer for x in maps] == [0, 1]
    arrays = [*zip(maps, names, problem.shapes, problem.orders, strict=False)]
    if problem.orders[2]:
        arrays.append((given["map_d0"], "d", problem.shapes[2], problem.orders[2]))
    sizes = (-1, number["batch1"], number["batch2"])
    for tensor_map, name, shape, order in arrays:
        row = shape[-1] + sum(pad.columns for pad in sm90.operands.prepared(problem) if pad.buffer == tensor_map.buffer)
        numbers, memory = in_memory(shape, order, row)
        full = np.broadcast_to(numbers, (*problem.batch, *shape[-2:])).reshape(-1, *shape[-2:])
        for z in range(problem.batch_size):
            i1, i2 = z // sizes[2] % sizes[1], z % sizes[2]
            i0 = z // sizes[2] // sizes[1]
            at = sum(i * number[f"{name}_step{j}"] for j, i in enumerate((i0, i1, i2)))
            np.testing.assert_array_equal(walked(memory, tensor_map, at), full[z])


def test_strides():
    assert strides((2, 3, 4, 5)) == [60, 20, 5, 1]
    assert strides((2, 3, 4, 5), HEADS) == [60, 5, 15, 1]
    assert strides((2, 1, 4, 5), HEADS) == [20, 0, 5, 1]


def batched(*batch, m=2048, n=2048, k=128, layout="nt", orders=NONE, **more):
    return in_order(cutjax.Problem.of(m, n, k, layout, batch=batch, a_batch=batch, b_batch=batch, **more), orders)


def test_groups_of_batch_axes():
    """[b, s, h, d] has two; b and another slower axis are one; what lies in one order everywhere is merged."""
    assert batched(4, 16, orders=(HEADS, HEADS, ())).batch_groups == ((4, True, True), (16, True, True))
    more = (0, 1, 3, 2, 4)
    assert batched(3, 4, 16, orders=(more, more, ())).batch_groups == ((12, True, True), (16, True, True))
    rows_first = (2, 0, 1, 3)
    assert batched(4, 16, orders=(rows_first,) * 3).batch_groups == ((64, True, True),)
    assert batched(4, 16).batch_groups == ((64, True, True),)


def test_orders_that_are_kept():
    def kept(*batch, orders=(HEADS,) * 3, **more):
        return [bool(order) for order in batched(*batch, orders=orders, **more).orders]

    assert kept(4, 16) == [True] * 3
    assert kept(1, 16, orders=((0, 1),) * 3) == [False] * 3
    assert kept(4, 1) == [False] * 3  # an axis of one lies anywhere
    assert kept(4, 16, m=1) == [False, True, False]
    assert kept(4, 16, n=2052) == [True, True, False]  # rows that threads store
    assert kept(4, 16, n=2052, out_dtype=F32) == [True] * 3
    acc = jax.ShapeDtypeStruct((8, 8), F32)
    added = trace(lambda acc, x: acc + x, [acc], [jnp.ones((8, 8))]).epilogue.primal
    assert kept(4, 16, m=8, n=8, epilogue=added) == [True, True, False]
    biased = trace(lambda acc, x: acc + x, [acc], [jnp.ones(8)]).epilogue.primal
    assert kept(4, 16, m=8, n=8, epilogue=biased) == [True] * 3


def test_too_many_groups():
    order = (3, 2, 1, 0, 4)
    reasons = sm90.facts_of(cutjax.Problem.of(8, 8, 8, batch=(2,) * 3, a_batch=(2,) * 3, b_batch=(1,) * 3)).reasons
    assert reasons == ()
    four = batched(2, 2, 2, 2, m=8, n=8, k=8, orders=((4, 3, 2, 1, 0, 5), (), ()))
    assert "more than 3 groups" in "; ".join(sm90.facts_of(four).reasons)
    assert not sm90.facts_of(batched(2, 2, 2, m=8, n=8, k=8, orders=(order, (), ()))).reasons


def test_names_and_text():
    """Only what stores results in an order of their own has another text, and another name."""
    plain, walking = batched(4, 16), batched(4, 16, orders=(HEADS, HEADS, ()))
    storing = batched(4, 16, orders=(HEADS,) * 3)
    kernels = [sm90.resolved(problem, TILE) for problem in (plain, walking, storing)]
    assert kernels[0].name == kernels[1].name == kernels[2].name.removesuffix("_strided")
    assert kernels[0].source == kernels[1].source
    assert kernels[2].name.endswith("_strided")
    assert len({key(problem) for problem in (plain, walking, storing)}) == 3
    assert "orders" not in key(plain)
    assert str(walking).endswith("batch 4x16, a and b by strides")
    split = dataclasses.replace(TILE, splits=2)  # parts are row-major, for XLA to add up
    assert sm90.resolved(storing, split).name == sm90.resolved(plain, split).name


def test_predicted_times():
    plain, free = batched(4, 16), batched(64, orders=((1, 0, 2),) * 3)
    walking = batched(4, 16, orders=(HEADS, HEADS, ()))
    times = {problem: sm90.resolved(problem, TILE).time_us(problem.device) for problem in (plain, free, walking)}
    assert len(set(times.values())) == 1
    copies = {problem: xla._transposes_us(problem, reference("sm_90a")) for problem in times}
    assert copies[plain] == copies[free] == 0  # one batch axis has any stride
    two = 2 * (2 * 64 * 2048 * 128 * 2) / (0.8 * reference("sm_90a").bytes_per_second) * 1e6
    assert copies[walking] == pytest.approx(two + 2)
    assert choose(walking).xla_us == pytest.approx(choose(plain).xla_us + two + 2)
    crossing = changed(plain, a_batch=(4, 1), b_batch=(1, 16))  # one product of all rows, then a transpose
    assert xla._transposes_us(crossing, reference("sm_90a")) > 0


# Lowered for CUDA.


def shape(*sizes, dtype=H):
    return jax.ShapeDtypeStruct(sizes, dtype)


def calls(fn, *args):
    """Kernel, layouts (slowest axis first) and transposes of a program for CUDA."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in text.splitlines():
        if "@cutjax_launch" in line:
            layouts = re.findall(r"dense<\[?([\d, ]+)\]?> : tensor<\dxindex>", line)
            orders = [tuple(map(int, x.split(", ")))[::-1] for x in layouts]
            found.append((re.search(r'kernel = "(\w+)"', line)[1], orders))  # pyright: ignore[reportOptionalSubscript]
    return found, re.findall(r"stablehlo.transpose .* dims = \[([\d, ]+)\]", text)


ROWS = (0, 1, 2, 3)


def test_the_call_says_orders_as_layouts():
    q, k = shape(2, 136, 3, 72), shape(2, 200, 3, 72)
    found, transposes = calls(lambda q, k: scores(q, k, backend="cuda"), q, k)
    assert [orders for _, orders in found] == [[HEADS, HEADS, ROWS]]
    assert "_strided" not in found[0][0]
    assert transposes == ["0, 2, 1, 3"] * 2  # of q and k as given, which those layouts make no move of data
    found, transposes = calls(lambda p, v: mixed(p, v, backend="cuda"), shape(2, 3, 136, 200), k)
    assert [orders for _, orders in found] == [[ROWS, HEADS, HEADS]]
    assert "_strided" in found[0][0]
    found, _ = calls(lambda q, k: scores(q, k, NONE, backend="cuda"), q, k)
    assert [orders for _, orders in found] == [[ROWS] * 3]


def test_gradients_are_in_the_order_of_what_they_are_of():
    def back(q, k):
        return jax.vjp(lambda q, k: scores(q, k, backend="cuda"), q, k)[1](jnp.ones((2, 3, 136, 200), H))

    found, _ = calls(back, shape(2, 136, 3, 72), shape(2, 200, 3, 72))
    assert sorted(orders for _, orders in found) == [[ROWS, HEADS, HEADS]] * 2
    assert all("_strided" in name for name, _ in found)


def test_arrays_that_are_prepared_or_finished_have_orders_too():
    """Padded rows, tiles in parts, reductions, parts of k."""
    odd = shape(2, 136, 3, 33), shape(2, 200, 3, 33)
    found, _ = calls(lambda q, k: scores(q, k, backend="cuda"), *odd)
    assert found[0][1] == [HEADS, HEADS, ROWS]
    even = shape(2, 136, 3, 1024), shape(2, 200, 3, 1024)
    stream = dataclasses.replace(TILE, stream_k=True)
    found, _ = calls(lambda q, k: scores(q, k, (HEADS,) * 3, config=stream, **CUDA), *even)
    assert found[0][1][:3] == [HEADS] * 2 + [(0,)]  # and the tickets
    assert found[0][1][3] == HEADS
    split = dataclasses.replace(TILE, splits=2)
    found, _ = calls(lambda q, k: scores(q, k, (HEADS,) * 3, config=split, **CUDA), *even)
    assert found[0][1] == [HEADS, HEADS, (0, 1, 2, 3, 4)]

    def summed(q, k):
        product = Dense("nt", (HEADS,) * 3)
        fn = lambda acc: (acc, acc.sum(-1))  # noqa: E731
        return call(product, fn, Factors(heads(q), [heads(k)]), (), out_dtype=H, **CUDA)

    found, _ = calls(summed, *even)
    assert found[0][1] == [HEADS, HEADS, HEADS, ROWS]


def test_explain_names_them():
    text = str(cutjax.explain(scores, platform="cuda")(shape(2, 136, 3, 72), shape(2, 200, 3, 72)))
    assert "batch 2x3, a and b by strides" in text


CONFIGS = [
    cutjax.Config(64, 64, stages=2),
    cutjax.Config(128, 192, stages=2, schedule="pingpong"),
    cutjax.Config(128, 256, stages=2, cluster_m=2),
    cutjax.Config(128, 128, stages=2, cluster_n=2, schedule="pingpong"),
    cutjax.Config(128, 192, stages=2, schedule="pingpong", swap=True),
    cutjax.Config(128, 160, stages=4, stream_k=True),
    cutjax.Config(128, 128, stages=4, cluster_k=2),
]


@pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_kernels_compile_lean(layout):
    """What stores by strides spills nothing: every kind in one layout, at the most accumulators it may have."""
    asked = batched(4, 16, k=1024, layout=layout, orders=(HEADS,) * 3)
    assert {config.schedule for config in candidates(asked)} == {"coop", "pingpong"}
    turn = ["nn", "nt", "tn"].index(layout)
    check_lean(asked, CONFIGS[turn::3], 34 << 10)
    acc = jax.ShapeDtypeStruct((2048, 2048), F32)
    bias = trace(lambda acc, x, y: jax.nn.relu(acc * y + x).astype(H), [acc], [jnp.ones(2048), jnp.ones((2048, 1))])
    fused = dataclasses.replace(asked, epilogue=bias.epilogue.primal)
    check_lean(fused, [CONFIGS[0] if turn else dataclasses.replace(CONFIGS[1], bn=160)], 34 << 10)


def test_the_result_is_the_same_where_nothing_is_launched():
    same(jax.jit(scores)(Q, K), jnp.einsum("bqhd,bkhd->bhqk", Q, K))


def test_autotune_times_arrays_as_they_lie():
    """Its inputs and results have the axes that memory has, so that no copy is timed beside a product."""
    args = shape(2, 136, 3, 72), shape(2, 200, 3, 72)
    found, _ = autotune.walk.products(lambda q, k: scores(q, k, (HEADS,) * 3), args, {}, "cuda")
    (task,), skipped = autotune.tasks(found, 2)
    assert not skipped
    arrays = task.inputs(np.uint32(1), True)
    assert [x.shape for x in arrays] == [(2, 136, 3, 72), (2, 200, 3, 72)]
    (got,) = task._bound("xla", None)(*arrays)
    np.testing.assert_array_equal(got, heads(jnp.einsum("bqhd,bkhd->bhqk", *arrays)))
    assert measure.equal([got], task.reference(*arrays))
