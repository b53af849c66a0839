"""What explain says is what is lowered: the kernels it names are the custom calls of the program for CUDA."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from checks import mesh_of, multiplied
from jax import lax

import cutjax
from cutjax.binding import lowering
from cutjax.runtime import compiler

H = jnp.bfloat16
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
P = jax.P
SIZES = jnp.array([8, 0, 40, 16], jnp.int32)


def ones(*shape, dtype=H):
    return jnp.ones(shape, dtype)


# Names of kernels are all that is looked at.
pytestmark = [pytest.mark.usefixtures("kernels_run"), pytest.mark.versions]
X, W, V = ones(64, 64), ones(64, 128), ones(128, 64)
G, U, D = ones(4, 64, 128), ones(4, 64, 128), ones(4, 128, 64)
BIAS = jnp.ones(128)
LOGITS = jax.random.normal(jax.random.key(0), (64, 4))

# Name -> (function of x alone, whose rows are 64): every operation, and its gradient where that adds products.
OPERATIONS = {
    "gemm": lambda x, **how: cutjax.gemm(x, W, **how),
    "fused": lambda x, **how: cutjax.gemm(x, (W, W), epilogue=lambda g, u: jax.nn.silu(g) * u, **how),
    "mlp": lambda x, **how: cutjax.mlp(x, W, V, gate=W, **how),
    "grouped_gemm": lambda x, **how: cutjax.grouped_gemm(x, G, SIZES, **how),
    "grouped_fused": lambda x, **how: cutjax.grouped_gemm(x, G, SIZES, epilogue=jax.nn.gelu, **how),
    "grouped_outer": lambda x, **how: cutjax.grouped_outer(x, x, SIZES, **how),
    "grouped_outer_add": lambda x, **how: cutjax.grouped_outer(
        x, x, SIZES, accumulate=jnp.zeros((4, 64, 64), jnp.float32), **how
    ),
    "grouped_mlp": lambda x, **how: cutjax.grouped_mlp(x, G, D, SIZES, gate=U, **how),
    "moe": lambda x, **how: cutjax.moe(x, LOGITS, G, U, D, **how),
    "ragged_dot": lambda x, **how: scoped(lambda x: cutjax.ragged_dot(x, G, SIZES), **how)(x),
}


def scoped(fn, backend="auto"):
    def inside(*args):
        with cutjax.use_backend(backend):
            return fn(*args)

    return inside


def gradient(fn):
    return jax.grad(lambda x: fn(x).astype(jnp.float32).sum())


def lowered_kernels(fn, *args) -> set[str]:
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    text = jitted.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r'@cutjax_launch.*?kernel = "(\w+)"', text))


def agree(fn, *args):
    """The kernels of a program, of which explain and lowering say the same; and explain's rows."""
    rows = cutjax.explain(fn, platform="cuda")(*args).rows
    errors = [row for row in rows if row.runs == "error"]
    if errors:
        with pytest.raises(NotImplementedError) as error:
            lowered_kernels(fn, *args)
        assert any(row.why in str(error.value) for row in errors)
        return set(), rows
    kernels = {row.runs for row in rows} - {"XLA"}
    assert kernels == lowered_kernels(fn, *args)
    return kernels, rows


def divided(fn, *args):
    """The rows of a program that XLA divides: of what one device computes, which is lowered when it is compiled."""
    found = cutjax.explain(fn, platform="cuda")(*args).rows
    rows = multiplied(found)
    assert {row.why for row in found if row not in rows} <= {lowering.PARTITIONED}  # XLA divides its own gather
    assert rows
    assert all(row.why.startswith("a shard") for row in rows)
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    text = jitted.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "@CustomSPMDPartitioning" in text
    assert "@cutjax_launch" not in text
    return rows


@pytest.mark.parametrize("backend", ["auto", "cuda", "xla"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_backends(name, backend):
    fn = functools.partial(OPERATIONS[name], backend=backend)
    uses = {"auto": (fn, X), "cuda": (gradient(fn), X), "xla": (jax.vmap(fn), ones(2, 64, 64))}
    for each, x in uses.values() if name in ("gemm", "moe") else (uses[backend],):
        kernels, rows = agree(each, x)
        assert rows
        assert bool(kernels) == (backend != "xla")


DIVIDED = {
    "in_shardings": lambda f, s: jax.jit(f, in_shardings=s),
    "out_shardings": lambda f, s: jax.jit(lambda x: (f(x), x)[1] + f(x).sum().astype(H), out_shardings=s),
    "inner in_shardings": lambda f, s: lambda x: jax.jit(f, in_shardings=s)(x) * 2,
    "constraint": lambda f, s: lambda x: f(lax.with_sharding_constraint(x, s)),
    "constraint elsewhere": lambda f, s: lambda x: (f(x), lax.with_sharding_constraint(x + 1, s)),
    "constraint in a scan": lambda f, s: (
        lambda x: lax.scan(lambda c, _: (lax.with_sharding_constraint(c, s), f(c).sum()), x, None, length=3)
    ),
    "shard_map elsewhere": lambda f, s: (
        lambda x: (
            f(x),
            jax.shard_map(lambda x: x + 1, mesh=s.mesh, in_specs=s.spec, out_specs=s.spec)(x),
        )
    ),
    "device_put": lambda f, s: lambda x: f(jax.device_put(x, s)),
}


@pytest.mark.parametrize(
    ("name", "how"), [*(("gemm", how) for how in DIVIDED), ("grouped_fused", "in_shardings"), ("moe", "constraint")]
)
def test_divided_by_xla(name, how):
    sharding = jax.NamedSharding(mesh_of(i=8), P("i"))
    divided(DIVIDED[how](OPERATIONS[name], sharding), X)
    one = jax.NamedSharding(mesh_of(i=1), P("i"))
    assert agree(DIVIDED[how](OPERATIONS[name], one), X)[0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_sharded_arguments(name):
    sharding = jax.NamedSharding(mesh_of(i=8), P("i"))
    rows = divided(OPERATIONS[name], jax.device_put(X, sharding))
    assert divided(OPERATIONS[name], jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)) == rows
    if name == "gemm":  # jax drops an argument that nothing reads, and its devices with it
        assert agree(lambda x, unused: OPERATIONS[name](x), X, jax.device_put(ones(8), sharding))[0]


def test_closed_over_and_sharded():
    w = jax.device_put(W, jax.NamedSharding(mesh_of(i=8), P("i")))
    agree(lambda x: cutjax.gemm(x, w), X)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_mesh_in_scope(kind):
    with jax.set_mesh(mesh_of(kind, i=8)):
        divided(OPERATIONS["gemm"], jax.ShapeDtypeStruct((64, 64), H))


MANUAL, BUT_ONE, BUT_TWO = ("i", "j", "k"), ("i", "k"), ("i",)


@pytest.mark.parametrize(
    ("name", "axes"),
    [*((name, MANUAL) for name in OPERATIONS), *itertools.product(("gemm", "mlp", "moe"), (BUT_ONE, BUT_TWO))],
)
def test_shard_map(name, axes):
    mesh = mesh_of(i=2, j=2, k=2)
    fn = jax.shard_map(
        lambda x: OPERATIONS[name](x).sum().reshape(1),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={*axes},
        check_vma=False,
    )
    if len(axes) == 3:
        assert agree(lambda x: jax.jit(fn)(x) + 1, X)[0]
    elif len(axes) == 2:
        divided(fn, X)
    else:
        kernels, rows = agree(fn, X)
        assert not kernels
        assert {row.why for row in rows} == {lowering.PARTITIONED}


def test_shard_map_in_shard_map():
    mesh = mesh_of(i=4, j=2)
    how = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    inner = jax.shard_map(lambda x: cutjax.gemm(x, W), axis_names={"j"}, **how)
    fn = jax.shard_map(inner, mesh=mesh, axis_names={"i"}, **how)
    assert agree(fn, X)[0]
    both = jax.shard_map(lambda x: (inner(x), cutjax.gemm(x, W)), mesh=mesh, axis_names={"i"}, **how)
    rows = cutjax.explain(both, platform="cuda")(X).rows
    assert {row.why.startswith("a shard") for row in rows} == {True, False}  # divided over j by XLA, and by hand
    assert "XLA" not in {row.runs for row in rows}


def twice(x):
    """A result that is used, and one that is not."""
    return cutjax.gemm(x, W).astype(jnp.float32).sum(), cutjax.gemm(x, x)


@jax.custom_jvp
def ruled(x):
    return twice(x)


ruled.defjvp(lambda p, t: (ruled(*p), ruled(*t)))


@jax.custom_vjp
def ruled_back(x):
    return twice(x)


ruled_back.defvjp(lambda x: (ruled_back(x), None), lambda _, g: (g[1],))

UNUSED = {
    "plain": lambda x: twice(x)[0],
    "jit": lambda x: jax.jit(twice)(x)[0],
    "scan": lambda x: lax.scan(lambda c, _: (c, twice(c)), x, None, length=3)[1][0],
    "scan's carry": lambda x: lax.scan(
        lambda c, _: ((c[0], cutjax.gemm(c[1], c[1])), twice(c[0])[0]), (x, x), None, length=3
    )[1],
    "cond": lambda x: lax.cond(x[0, 0] > 0, twice, lambda x: (x.sum(dtype=jnp.float32), x), x)[0],
    "checkpoint": lambda x: jax.checkpoint(twice)(x)[0],
    "custom_jvp": lambda x: ruled(x)[0],
    "custom_vjp": lambda x: ruled_back(x)[0],
    "nested": lambda x: jax.jit(lambda x: lax.scan(lambda c, _: (c, jax.jit(twice)(c)), x, None, length=2))(x)[1][0],
    "while": lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (cutjax.gemm(x, x), c[1] + 1), (x, 0))[1],
    "grad": lambda x: gradient(lambda x: twice(x)[0])(x),
    "of a fused product": lambda x: cutjax.gemm(
        x, W, epilogue=lambda a, b: (a + b, a * 2), operands=(ones(128, dtype=jnp.float32),)
    )[1],
    "of a grouped one": lambda x: cutjax.grouped_gemm(x, G, SIZES, epilogue=lambda a: (a, a * 2))[1],
    "routing": lambda x: cutjax.route(LOGITS).indices,
}


@pytest.mark.parametrize("name", UNUSED)
def test_unused_results(name):
    kernels, rows = agree(UNUSED[name], X)
    if name not in ("while", "routing"):
        assert len(kernels) == len(rows) > 0
    if name not in ("while", "routing", "grad", "custom_vjp"):
        assert len(kernels) == 1


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "auto") for name in OPERATIONS), *itertools.product(("gemm", "moe"), ("cuda", "xla"))],
)
def test_without_a_compiler(name, backend, monkeypatch):
    monkeypatch.setattr(compiler, "_compiler", lambda: "NVRTC is not installed")
    monkeypatch.setattr(lowering, "_warn_once", lambda message: None)
    kernels, rows = agree(functools.partial(OPERATIONS[name], backend=backend), X)
    assert not kernels
    if backend != "xla":
        assert {row.runs for row in multiplied(rows)} == {"XLA" if backend == "auto" else "error"}
        assert all("NVRTC is not installed" in row.why for row in multiplied(rows))


@pytest.mark.parametrize(
    "config", [cutjax.Config(64, 32), cutjax.Config(128, 256, bk=128, stages=8)], ids=["serves", "does not"]
)
def test_pinned(config):
    sharding = jax.NamedSharding(mesh_of(i=8), P("i"))
    for x in (X, ones(0, 64), ones(64, 64, dtype=jnp.float32)):
        agree(lambda x: cutjax.gemm(x, W.astype(x.dtype), config=config), x)
        agree(lambda x: cutjax.grouped_gemm(x, G.astype(x.dtype), SIZES, config=config), x)
    (row,) = cutjax.explain(lambda x: cutjax.gemm(x, W, config=config), platform="cuda")(
        jax.device_put(X, sharding)
    ).rows
    assert row.why.startswith("a shard")
    assert (row.runs == "error") == (config.stages == 8)


@pytest.mark.parametrize("backend", ["auto", "cuda"])
@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (12, 12, 12)], ids=str)
def test_sizes_without_a_kernel(shape, backend):
    m, n, k = shape
    agree(lambda a, b: cutjax.gemm(a, b, backend=backend), ones(m, k), ones(k, n))
    agree(lambda a, b: cutjax.gemm(a, b, backend=backend, epilogue=jnp.tanh), ones(m, k), ones(k, n))
    agree(lambda a, b: cutjax.grouped_gemm(a, b, SIZES[:3], backend=backend), ones(m, k), ones(3, k, n))
    agree(lambda a, b: cutjax.grouped_gemm(a, b, SIZES[:0], backend=backend), ones(m, k), ones(0, k, n))


def test_one_branch_for_each_platform():
    def fn(x):
        return lax.platform_dependent(
            x, cuda=lambda x: cutjax.gemm(x, x), cpu=lambda x: cutjax.gemm(x, W)[:, :64], default=lambda x: x
        )

    assert len(agree(fn, X)[1]) == 1
    for platform, n in (("cuda", 64), ("cpu", 128), ("tpu", None)):
        assert [row.choice.problem.n for row in cutjax.explain(fn, platform=platform)(X).rows] == [n] * bool(n)


def test_lowering_afterwards_is_not_changed():
    """explain lowers too, to count devices: nothing of that is kept."""
    fn = jax.jit(lambda x: cutjax.gemm(x, x))
    cutjax.explain(fn, platform="cuda")(X)
    cutjax.explain(fn)(X)
    assert lowered_kernels(fn, X)
    assert fn(X)[0, 0] == 64


def test_what_only_the_other_platform_can_lower():
    def fn(x):
        jax.debug.print("{}", x[0, 0])
        return cutjax.gemm(x, x)

    (row,) = cutjax.explain(fn, platform="cuda")(X).rows
    assert row.runs.startswith("sm90_")


def test_arguments_that_are_static():
    fn = jax.jit(lambda x, name: getattr(jax.nn, name)(cutjax.gemm(x, x)), static_argnames="name")
    assert agree(lambda x: fn(x, "relu"), X)[0]
    assert cutjax.explain(fn, platform="cuda")(X, "relu").rows[0].runs.startswith("sm90_")


def test_inside_a_trace():
    seen = []

    @jax.jit
    def fn(x):
        seen.append(cutjax.explain(cutjax.gemm, platform="cuda")(x, x).rows[0].runs)
        return x

    jax.vmap(fn)(ones(2, 64, 64))
    assert seen[0].startswith("sm90_")


def test_no_derivative():
    fn = functools.partial(cutjax.gemm, epilogue=lambda acc: lax.nextafter(acc, acc * 2))
    (row,) = agree(fn, X, X)[1]
    assert row.saves.startswith("has no derivative") or row.saves == "needs no accumulator"  # after jax 0.10


def test_gpu_is_cuda():
    explanation = cutjax.explain(cutjax.gemm, platform="gpu")(X, X)
    assert explanation.platform == "cuda"
    assert explanation.rows[0].runs.startswith("sm90_")
