"""Products that jit divides, inside other transformations and programs; what explain and lowering say of them."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checks import integers, mesh_of, normal, same
from jax import lax
from partitions import MESH, D, T, at_most, laid, moved, sent

import cutjax
from cutjax.binding import placement

P = jax.P
H = jnp.bfloat16
X, W = integers(0, (8, 16)), integers(1, (16, 16))


def gemm(x, w):
    return cutjax.gemm(x, w)


def run(fn, args, specs):
    """The results of a program whose arguments are divided, and its text."""
    args = laid(args, specs)
    compiled = jax.jit(fn).lower(*args).compile()
    return jax.device_get(compiled(*args)), compiled.as_text()


PROGRAMS = {
    "scan": (
        lambda f: lambda x, w: lax.scan(lambda c, _: (jnp.sign(f(c, w)), None), x, None, length=3)[0],
        (X, W),
        ((D,), (None, T)),
    ),
    "remat": (
        lambda f: jax.grad(lambda x, w: (jax.checkpoint(f)(x, w) ** 2).sum(), (0, 1)),
        (X, W),
        ((D,), (None, T)),
    ),
    "vmap over a mesh axis": (
        lambda f: jax.vmap(f, (0, None), spmd_axis_name=D),
        (integers(2, (4, 8, 16)), W),
        ((D,), (None, T)),
    ),
    "vmap of gradients": (
        lambda f: jax.vmap(jax.grad(lambda w, x: (f(x, w) ** 2).sum()), (None, 0)),
        (W, integers(2, (4, 8, 16))),
        ((None, T), (D,)),
    ),
    "vmap of vmap": (
        lambda f: jax.grad(lambda x, w: (jax.vmap(jax.vmap(f, (0, None)), (0, None))(x, w) ** 2).sum(), (0, 1)),
        (integers(2, (2, 4, 8, 16)), W),
        ((D, T), ()),
    ),
    "cond": (
        lambda f: lambda x, w: lax.cond(x[0, 0] > 5, f, lambda x, w: f(x, w) + 1, x, w),
        (X, W),
        ((D,), (None, T)),
    ),
    "second derivative": (
        lambda f: lambda x, w: jax.jvp(jax.grad(lambda w: (f(x, w) ** 3).sum()), (w,), (w,))[1],
        (X, W),
        ((D,), (None, T)),
    ),
    "jit inside, twice": (lambda f: lambda x, w: jax.jit(f)(jax.jit(f)(x, w), w), (X, W), ((D,), (None, T))),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    transform, args, specs = PROGRAMS[name]
    (got, text), (expected, plain) = (run(transform(f), args, specs) for f in (gemm, jnp.matmul))
    same(got, expected)
    assert at_most(moved(text), moved(plain))


@pytest.mark.versions
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
@pytest.mark.parametrize("how", ["in_shardings", "constraint", "set_mesh"])
def test_ways_to_say_it(how, kind):
    mesh = mesh_of(kind, data=2, tensor=4)
    of_x, of_w = (jax.NamedSharding(mesh, P(*spec)) for spec in ((D,), (None, T)))
    if how == "in_shardings":
        f = jax.jit(gemm, in_shardings=(of_x, of_w))
    elif kind == jax.sharding.AxisType.Auto:
        f = jax.jit(lambda x, w: gemm(lax.with_sharding_constraint(x, of_x), lax.with_sharding_constraint(w, of_w)))
    else:
        f = jax.jit(lambda x, w: gemm(jax.reshard(x, of_x), jax.reshard(w, of_w)))
    with (
        jax.set_mesh(mesh)
        if how == "set_mesh" or kind != jax.sharding.AxisType.Auto
        else jax.ensure_compile_time_eval()
    ):
        args = X, W
        text = f.lower(*args).as_text()
        assert "@CustomSPMDPartitioning" in text
        compiled = f.lower(*args).compile()
        same(jax.device_get(compiled(*args)), jax.device_get(X @ W))
        assert not moved(compiled.as_text())


@pytest.mark.versions
def test_shard_map_and_one_device_stay_as_they_are():
    """No custom partitioning in programs that XLA does not divide, or where it does not say which axes it divides."""
    args = laid((X, W), ((D,), (None, T)))
    manual = jax.shard_map(gemm, mesh=MESH, in_specs=(P(D), P(None, T)), out_specs=P(D, T))
    three = mesh_of(data=2, tensor=2, stage=2)
    partly = jax.shard_map(gemm, mesh=three, in_specs=(P(D), P()), out_specs=P(D), axis_names={D})
    with cutjax.use_backend("xla"):
        left = jax.jit(lambda x, w: cutjax.gemm(x, w)).lower(*args)
    for program in (jax.jit(manual).lower(*args), jax.jit(partly).lower(X, W), jax.jit(gemm).lower(X, W), left):
        assert "CustomSPMDPartitioning" not in program.as_text()
    same(jax.device_get(jax.jit(partly)(X, W)), jax.device_get(X @ W))


# Products of one array by weights, in a shard_map that leaves an axis: how that axis divides the weights.
MIXED = {
    "gemm, columns": (lambda x, w: cutjax.gemm(x, w), jnp.matmul, (None, "left")),
    "gemm, k": (lambda x, w: cutjax.gemm(x, w), jnp.matmul, ("left", None)),
    "fused": (
        lambda x, w: cutjax.gemm(x, w, epilogue=jax.nn.relu),
        lambda x, w: jax.nn.relu(x @ w),
        (None, "left"),
    ),
    "mlp": (
        lambda x, w: cutjax.mlp(x, w, w.T, activation=jax.nn.relu),
        lambda x, w: jax.nn.relu(x @ w) @ w.T,
        (None, "left"),
    ),
    "grouped_gemm": (
        lambda x, w: cutjax.grouped_gemm(x, w[None], jnp.array([x.shape[0]])),
        jnp.matmul,
        (None, "left"),
    ),
    "syrk": (lambda x, w: cutjax.syrk(x @ w), lambda x, w: (x @ w) @ (x @ w).mT, (None, "left")),
}


# On explicit axes jnp refuses them: types do not say how a sum over a divided axis lies.
AMBIGUOUS = ("gemm, k", "mlp", "syrk")


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "manual", "kind"),
    [
        (name, (D, T)[(i + j) % 2], kind)
        for i, name in enumerate(MIXED)
        for j, kind in enumerate((jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit))
        if j == 0 or name not in AMBIGUOUS
    ],
    ids=str,
)
def test_a_shard_map_that_leaves_an_axis(name, manual, kind):
    """Each device has a kernel for its shard: values, gradients and collectives are those of jnp in its place."""
    ours, plain, spec = MIXED[name]
    left = D if manual == T else T
    mesh = mesh_of(data=2, tensor=4) if kind == jax.sharding.AxisType.Auto else mesh_of(kind, data=2, tensor=4)

    def program(f):
        def local(x, w):
            there = jax.sharding.get_abstract_mesh()
            if kind == jax.sharding.AxisType.Auto:
                w = lax.with_sharding_constraint(w, jax.NamedSharding(there, P(*(axis and left for axis in spec))))
            value, grads = jax.value_and_grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))(x, w)
            return value[None], grads

        return jax.jit(
            jax.shard_map(
                local, in_specs=(P(manual), P()), out_specs=(P(manual), (P(manual), P())), axis_names={manual}
            )
        )

    with jax.set_mesh(mesh):
        lies = P() if kind == jax.sharding.AxisType.Auto else P(*(axis and left for axis in spec))
        args = [jax.device_put(y, jax.NamedSharding(mesh, s)) for y, s in ((X, P(manual)), (W % 2, lies))]
        lowered = program(ours).lower(*args)
        assert "CustomSPMDPartitioning" in lowered.as_text()
        compiled, beside = lowered.compile(), program(plain).lower(*args).compile()
        got, expected = compiled(*args), beside(*args)
    same(jax.device_get(got), jax.device_get(expected))
    assert at_most(moved(compiled.as_text()), moved(beside.as_text()))


def test_explain_of_a_shard_map_that_leaves_an_axis():
    x, w = laid((jnp.ones((512, 1024), H), jnp.ones((1024, 2048), H)), ((D,), (None, T)))

    def local(x, w):
        w = lax.with_sharding_constraint(w, jax.NamedSharding(jax.sharding.get_abstract_mesh(), P(None, T)))
        return gemm(x, w)

    f = jax.shard_map(local, mesh=MESH, in_specs=(P(D), P()), out_specs=P(D), axis_names={D})
    (row,) = cutjax.explain(f, platform="cuda")(x, w).rows
    assert (row.choice.problem.m, row.choice.problem.n, row.choice.problem.k) == (256, 512, 1024)
    assert row.runs.startswith("sm90_bf16_nn")


@pytest.mark.versions
def test_export_leaves_it_to_xla():
    args = laid((X, W), ((D,), (None, T)))
    exported = jax.export.deserialize(jax.export.export(jax.jit(gemm))(*args).serialize())
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    same(jax.device_get(jax.jit(exported.call)(*args)), jax.device_get(X @ W))


def test_sizes_that_mesh_axes_do_not_divide():
    """No shard is padded: what does not divide evenly is whole."""

    def f(fn, x, w):
        x = lax.with_sharding_constraint(x, jax.NamedSharding(MESH, P(T, D)))
        return fn(x, lax.with_sharding_constraint(w, jax.NamedSharding(MESH, P(D, T))))

    x, w = integers(3, (6, 15)), integers(4, (15, 10))
    same(*(jax.device_get(jax.jit(functools.partial(f, fn))(x, w)) for fn in (gemm, jnp.matmul)))


@pytest.mark.parametrize(
    ("shape", "specs"),
    [((4, 8, 16), ((D,), (None, T))), ((8, 16), ((), (None, T))), ((8, 16), ((D, T), (T,)))],
    ids=str,
)
def test_dropout_is_the_same_however_divided(shape, specs):
    """Bits of positions in the whole result, not in the shard."""
    key, x = jax.random.key(0), integers(5, shape)

    def f(x, w):
        return cutjax.gemm(x, w, epilogue=lambda acc: jnp.where(jax.random.bernoulli(key, 0.5, acc.shape), acc, 0))

    same(run(f, (x, W), specs)[0], jax.device_get(f(x, W)))


# Terms of 1 and 2^-9 on each device: added in bfloat16 the small ones are lost.
SMALL = jnp.tile(jnp.array([1, 2**-9, 0, 0], H), (8, 4)), jnp.ones((16, 8), H)
DIVIDED = ((None, T), (T,))


@pytest.mark.versions
def test_partial_sums_in_float32():
    """By choice: what has 16 bits is rounded once."""
    with cutjax.use_partial_sums("float32"):
        got, text = run(gemm, SMALL, DIVIDED)
    assert np.all(got == np.asarray(4 + 4 * 2**-9, np.float32).astype(H))
    assert sent(text) == {("all-reduce", "f32"): 64}


def test_partial_sums_travel_as_those_of_jnp():
    """By default, of each dtype, and of some in gradients and with an epilogue; explain says it too."""
    specs = ((D, T), (T,))
    programs = {
        "plain": lambda f: f,
        "gradient": lambda f: jax.grad(lambda x, w: f(x, w).astype(jnp.float32).sum(), 1),
        "epilogue": lambda f: lambda x, w: jax.nn.relu(f(x, w)),
    }
    fused = lambda x, w: cutjax.gemm(x, w, epilogue=jax.nn.relu)  # noqa: E731
    for dtype in (H, jnp.float16, jnp.float32, jnp.int8, jnp.int16, jnp.float8_e4m3fn):
        args = X.astype(dtype), W.astype(dtype)
        for name, program in programs.items():
            if dtype not in {"gradient": (H, jnp.float32), "epilogue": (jnp.float16, jnp.int8)}.get(name, (dtype,)):
                continue
            expected, plain = run(program(jnp.matmul), args, specs)
            for ours in (
                gemm,
                *((cutjax.matmul,) * (dtype == H)),
                *((fused,) * (name == "epilogue" and dtype != jnp.int8)),
            ):
                got, text = run(ours if ours is fused else program(ours), args, specs)
                assert sent(text) == sent(plain), (name, dtype)
                same(got.astype(np.float32), expected.astype(np.float32))  # sums that are exact in few bits too
    assert np.all(run(gemm, SMALL, DIVIDED)[0] == np.asarray(4, H))
    for dtype, name in ((H, "bfloat16"), (jnp.float32, "float32")):
        (row,) = cutjax.explain(gemm, platform="cuda")(*laid((X.astype(dtype), W.astype(dtype)), specs)).rows
        assert row.why.startswith(f"a shard; psum of {name} over tensor; ")
    with pytest.raises(ValueError, match="unknown dtype 'bfloat16', expected one of"):
        cutjax.use_partial_sums("bfloat16")


def test_a_group_in_parts_and_rows_of_none():
    """Sizes that are negative or too many, groups that lie on several devices, and vmap of all that."""
    sizes = jnp.array([[5, -3, 0, 20], [0, 0, 1, 2]], jnp.int32)
    x, g = integers(6, (2, 16, 8)), integers(7, (4, 8, 16))
    f = jax.vmap(lambda x, s, g: cutjax.grouped_gemm(x, g, s), (0, 0, None))
    for spec in (((None, D), (), ()), ((None, (D, T)), (), ()), ((D,), (D,), (T,))):
        same(run(f, (x, sizes, g), spec)[0], jax.device_get(f(x, sizes, g)))


@pytest.mark.versions
def test_moe():
    x, logits = normal(8, (16, 16)), normal(9, (16, 8))
    up, down = normal(10, (8, 16, 32)) / 4, normal(11, (8, 32, 16)) / 4

    def loss(x, up, down):
        return (cutjax.moe(x, logits, up, up, down) ** 2).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    expected = jax.device_get(jax.jit(gradient)(x, up, down))
    got, text = run(gradient, (x, up, down), ((D,), (T,), (T,)))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())  # f32 added in another order
    assert moved(text).get("all-gather", 0) < up.size // 4  # weights stay where they are


# What is said of it.


@pytest.mark.versions
def test_explain_says_what_runs_a_shard():
    x, w = jnp.ones((512, 1024), H), jnp.ones((1024, 2048), H)
    explain = cutjax.explain(gemm, platform="cuda")
    (row,) = explain(*laid((x, w), ((D,), (None, T)))).rows
    assert (row.choice.problem.m, row.choice.problem.n, row.choice.problem.k) == (256, 512, 1024)
    assert row.runs.startswith("sm90_bf16_nn")
    (row,) = explain(*laid((x, w), ((D, T), (T,)))).rows
    assert row.why.startswith("a shard; psum of bfloat16 over tensor; ")
    assert row.runs.startswith("sm90_bf16_nn")
    with cutjax.use_partial_sums("float32"):
        (row,) = explain(*laid((x, w), ((D, T), (T,)))).rows
    assert row.why.startswith("a shard; psum of float32 over tensor; ")
    assert row.runs.startswith("sm90_bf16f32_nn")  # partial sums
    (row,) = explain(*laid((x, w), ((D,), (D, T)))).rows
    assert row.why.startswith("a shard; operand 1 is gathered over data; ")
    (row,) = explain(*laid((x, jnp.ones((1024, 12), H)), ((D,), (None, T)))).rows
    assert row.choice.problem.n == 3  # chosen for the shard
    twice = cutjax.explain(lambda x, w: (gemm(x, w), gemm(x + 1, w)), platform="cuda")
    (row,) = twice(*laid((x, w), ((D,), (None, T)))).rows
    assert (row.count, row.exact) == (2, True)


@pytest.mark.versions
def test_explain_equal_products_that_lie_differently():
    x = jnp.ones((512, 512), H)
    rows = cutjax.explain(lambda x, y: (gemm(x, x), gemm(y, y)), platform="cuda")(*laid((x, x), ((D,), (None, T)))).rows
    assert len(rows) == 2
    assert not any(row.exact for row in rows)  # which of them is which nobody says


def test_strict_backend():
    x, w = laid((X, W), ((D,), (None, T)))
    f = jax.jit(functools.partial(cutjax.gemm, backend="cuda"))
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        f.lower(x, w)
    with pytest.raises(NotImplementedError, match="no kernel for 8x16x16 nn u16"):
        f.trace(x.astype(jnp.uint16), w.astype(jnp.uint16)).lower(lowering_platforms=("cuda",))
    text = f.trace(x.astype(H), w.astype(H)).lower(lowering_platforms=("cuda",)).as_text()
    assert "@CustomSPMDPartitioning" in text


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((8, 512, 256), (D,)),
        ((8, 512, 256), (None, D)),
        ((8, 512, 256), ()),
        ((8, 4, 256, 256), (None, None, D)),
        ((8, 4, 256, 256), (D, T)),
    ],
    ids=str,
)
def test_weight_gradients_of_a_batch_have_kernels(shape, axes):
    """One product of all rows of the shard, or one for each matrix of a batch: under "cuda" nothing is left to XLA."""
    between = len(shape) == 4  # one matrix for each of the first axis: the axis added up is the second
    x, w = jnp.ones(shape, H), jnp.ones((*shape[:1], 1, 256, 128) if between else (256, 128), H)
    gradient = jax.grad(lambda x, w: cutjax.gemm(x, w, backend="cuda").astype(jnp.float32).sum(), (0, 1))
    args = laid((x, w), (axes, axes[:1] if between else ()))
    jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",))
    rows = cutjax.explain(gradient, platform="cuda")(*args).rows
    assert len(rows) >= 2
    assert all(row.runs.startswith("sm90_bf16") for row in rows)


@pytest.mark.parametrize("shape", [(2, 3, 8, 16), (2, 1, 8, 16)], ids=str)
def test_weight_gradients_over_axes_between_others(shape):
    """Values, on a mesh and on one device, where a batch axis is added up and another is not."""
    x = integers(8, shape)
    for w, axes in ((integers(9, (2, 1, 16, 8)), (D,)), (integers(9, (1, shape[1], 16, 8)), (D, None, T))):
        got = [jax.grad(lambda x, w, f=f: (f(x, w) ** 2).sum(), (0, 1)) for f in (gemm, jnp.matmul)]
        expected = jax.device_get(jax.jit(got[1])(x, w))
        same(jax.device_get(jax.jit(got[0])(x, w)), expected)
        same(run(got[0], (x, w), (axes, ()))[0], expected)


@pytest.mark.versions
def test_gpu_tests_lower():
    """The programs of the tests on several GPUs, lowered for them here."""
    path = pathlib.Path(__file__).parents[1] / "gpu" / "test_partition_gpu.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mesh = mesh_of(x=4)
    for fn, _, args, specs in module.CASES.values():
        args = [jax.device_put(x.astype(H), jax.NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]
        traced = jax.jit(jax.grad(functools.partial(module.loss, fn), has_aux=True)).trace(*args)
        assert "CustomSPMDPartitioning" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.versions
def test_the_shard_is_lowered_for_the_program_s_platform(monkeypatch):
    from cutjax.binding import lowering

    seen, decide = [], lowering.decide

    def watched(*args, **kwargs):
        seen.append((kwargs["platform"], kwargs["divided"], args[1][0].shape))
        return decide(*args, **kwargs)

    monkeypatch.setattr(lowering, "decide", watched)
    run(gemm, (X, W), ((D,), (None, T)))
    assert ("cpu", True, (8, 16)) in seen  # the whole
    assert ("cpu", False, (4, 16)) in seen  # the shard


@pytest.mark.versions
def test_programs_with_other_epilogues_have_other_texts():
    """Jax's cache of compiled programs may leave callbacks out of its key; what they do is in the text."""
    args = laid((X, W), ((D,), (None, T)))
    texts = [
        re.findall(r'cutjax = "(\w+)"', jax.jit(functools.partial(cutjax.gemm, epilogue=f)).lower(*args).as_text())
        for f in (jnp.tanh, jnp.sin, jnp.tanh)
    ]
    assert texts[0] == texts[2] != texts[1]


# The rule by itself.


def placed(rule, shapes, operands, results=(), itemsize=4):
    return placement.place(placement.Arrays(rule, {D: 2, T: 4}, shapes, operands, results, itemsize))


RULE = placement.Rule((("m", "k"), ("k", "n")), (("m", "n"),), 2, ("k",))
SHAPES = ((8, 16), (16, 32), (8, 32))
PLACES = {
    "rows and columns": ((((D,), ()), ((), (T,))), ((D,), (T,)), {"m": (D,), "n": (T,)}, {}),
    "partial sums": ((((D,), (T,)), ((T,), ())), ((D,), ()), {"m": (D,), "k": (T,)}, {}),
    "scattered": ((((D,), (T,)), ((T,), ())), ((D, T), ()), {"m": (D,), "k": (T,)}, {"m": (T,)}),
    "one side of the sum": ((((), (T,)), ((), ())), ((), ()), {}, {}),
    "one mesh axis twice": ((((T,), ()), ((), (T,))), ((), (T,)), {"n": (T,)}, {}),
    "the result alone": ((((), ()), ((), ())), ((D,), (T,)), {"m": (D,), "n": (T,)}, {}),
    "sums first, of all parts": ((((), (D, T)), ((D,), ())), ((), ()), {"k": (D, T)}, {}),
}


@pytest.mark.parametrize("name", PLACES)
def test_place(name):
    operands, result, axes, scattered = PLACES[name]
    found = placed(RULE, SHAPES, operands, (result,))
    assert (found.axes, found.scattered) == (axes, scattered)


def test_place_leaves_what_is_not_even():
    found = placed(RULE, ((6, 16), (16, 30), (6, 30)), (((T,), ()), ((), (D, T))), (((T,), (D, T)),))
    assert found.axes == {"n": (D,)}


def test_weights_divided_over_k_and_rows_over_the_same_devices():
    """Many rows gather the weights; few rows move, and their sums, instead of larger weights."""
    operands, result = (((D,), ()), ((D,), (T,))), (((D,), (T,)),)
    many = placed(RULE, ((65536, 8192), (8192, 32768), (65536, 32768)), operands, result, 2)
    assert (many.axes, many.scattered) == ({"m": (D,), "n": (T,)}, {})
    few = placed(RULE, ((64, 8192), (8192, 32768), (64, 32768)), operands, result, 2)
    assert (few.axes, few.scattered) == ({"k": (D,), "n": (T,)}, {"m": (D,)})
    apart = placed(RULE, ((64, 8192), (8192, 32768), (64, 32768)), (((D, T), ()), ((D,), ())), (((D, T), ()),), 2)
    assert apart.axes["k"] == (D,)  # rows move between divisions that are not alike: less than the weights


def test_few_rows_by_fully_sharded_weights():
    """Serving: no weight is gathered, in values that are those of jnp, and so in groups of rows."""
    x, w = integers(5, (16, 64)), integers(6, (64, 128))
    sizes = jnp.array([10, 6])
    for f, args, specs in (
        (gemm, (x, w), ((D,), (D, T))),
        (lambda x, w: cutjax.grouped_gemm(x, w, sizes), (x, jnp.stack([w, w])), ((D,), (None, D, T))),
    ):
        got, text = run(f, args, specs)
        same(got, np.asarray(x @ w))
        assert moved(text).get("all-gather", 0) < w.size // 4


@pytest.mark.versions
def test_rule_of_shardy():
    text, kinds = placement.Rule((("m", "k"), ("k", None)), (("m", None),), 2, ("k",)).shardy((0, 0))
    assert text == "m k, k whole0 -> m whole1"
    assert kinds == {"need_replication_factors": ("whole0", "whole1"), "reduction_factors": ("k",)}
    batched = placement.Rule((("b0", "m", "k"), (None, "k", "n")), (("b0", "m", "n"),), 2, ("k",))
    text, kinds = batched.shardy((0, 1))
    assert text == "b0 m k, k_shared n -> b0 m n"
    assert kinds == {"need_replication_factors": (), "reduction_factors": ("k", "k_shared")}


@pytest.mark.versions
def test_a_weight_of_fused_and_plain_products_is_gathered_once():
    """Where some read it with an axis of size 1 before it, XLA gathered it for each of them."""
    over = jax.NamedSharding(mesh_of(data=2), jax.P(D))
    args = [jax.device_put(x, over) for x in (normal(0, (8, 256, 64), H), normal(1, (64, 64), H))]

    def gathered(fuse):
        f = fuse(lambda x, w: jax.nn.silu(x @ w))

        def program(x, w):
            return (f(x, w) + lax.dot_general(x, w, (((2,), (1,)), ((), ())))).sum()

        return moved(jax.jit(program).lower(*args).compile().as_text())["all-gather"]

    assert gathered(functools.partial(cutjax.fuse, policy="always")) <= gathered(lambda f: f)


@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
def test_reshape_leaves_a_part_of_a_mesh_axis(shape):
    """As [8, k] that 8 devices divide becomes [2, 4, k], and a batch its groups: XLA's sharding names no mesh axis."""
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=2 * (jax.sharding.AxisType.Auto,))
    over = jax.NamedSharding(mesh, jax.P("x" if shape[1] == 1 else "y"))
    x, w = jnp.arange(32.0).reshape(8, 4), jnp.arange(8.0).reshape(2, 4)
    got = jax.jit(lambda x, w: cutjax.gemm(x.reshape(2, 4, 4), w[:, :, None]))(jax.device_put(x, over), w)
    np.testing.assert_array_equal(got[..., 0], np.einsum("gmk,gk->gm", x.reshape(2, 4, 4), w))
    taps = jnp.arange(8.0).reshape(1, 4, 2)
    fn = jax.jit(lambda x: cutjax.conv(x, taps, batch_group_count=2))
    np.testing.assert_array_equal(
        fn(jax.device_put(x[:, None], over)), cutjax.conv(x[:, None], taps, batch_group_count=2)
    )
