"""cutjax.fuse: what becomes of each kind of tail, the prices, what explain says, arguments and errors."""

from __future__ import annotations

import functools
import re

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same, scaled

import cutjax
from cutjax.fusion import price
from cutjax.fusion.jaxprs import Graph
from cutjax.kernels import xla

always = functools.partial(cutjax.fuse, policy="always")
BF16 = jnp.bfloat16
# A result of 16 bits is rounded once where plain JAX rounds after each operation.
ROUNDING = 2**-6


@pytest.mark.versions
@pytest.mark.parametrize("name", fuse_cases.CASES)
def test_tails(name):
    case = fuse_cases.CASES[name]
    found = cutjax.explain(always(case.fn))(*case.args).fusion
    assert tuple(report.epilogue for report in found if report.runs == "fused") == case.epilogues
    stops = [stop for report in found for stop in report.stops or ([report.why] if report.why else [])]
    assert len(stops) == len(case.stops)
    assert all(part in stop for part, stop in zip(case.stops, stops, strict=True))
    tolerance = 2**-3 if name == "fp8" else ROUNDING  # a step of float8, to which plain JAX rounds a second time
    close(always(case.fn)(*case.args), jax.jit(case.fn)(*case.args), tolerance)


def test_dropout_drops_the_same_elements():
    case = fuse_cases.CASES["dropout"]
    same(always(case.fn)(*case.args) == 0, case.fn(*case.args) == 0)


@pytest.mark.versions
@pytest.mark.parametrize(
    "name", ["gate", "bias gradient", "heads", "dropout", "moe", "convolution", "norm of a batch", "gate of windows"]
)
def test_gradients_on_either_side(name):
    case = fuse_cases.CASES[name]
    floats = tuple(i for i, x in enumerate(case.args) if x.dtype == BF16)

    def gradient(fn):
        return jax.grad(
            lambda *args: sum((x.astype(jnp.float32) ** 2).mean() for x in jax.tree.leaves(fn(*args))), floats
        )

    expected = jax.jit(gradient(case.fn))(*case.args)
    close(jax.jit(gradient(always(case.fn)))(*case.args), expected, 2 * ROUNDING)
    close(always(gradient(case.fn))(*case.args), expected, 2 * ROUNDING)


@pytest.mark.versions
@pytest.mark.parametrize("name", ["gate", "row", "heads", "convolution", "gate of windows"])
def test_vmap_on_either_side(name):
    case = fuse_cases.CASES[name]
    axes = (0, *(None for _ in case.args[1:]))
    args = jnp.stack([case.args[0], case.args[0][::-1], -case.args[0]]), *case.args[1:]
    expected = jax.jit(jax.vmap(case.fn, axes))(*args)
    close(jax.vmap(always(case.fn), axes)(*args), expected, ROUNDING)
    inside = always(jax.vmap(case.fn, axes))
    close(inside(*args), expected, ROUNDING)
    fused = [report for report in cutjax.explain(inside)(*args).fusion if report.runs == "fused"]
    assert len(fused) == len(case.epilogues)


def layer(x, w, b):
    return jax.nn.gelu(x @ w + b)


def test_a_backward_pass_reads_what_the_forward_pass_wrote():
    """The kernels write two results and one, and read nothing but that: no piece of gelu is ever in memory."""

    def loss(x, w, v, b):
        return ((layer(x, w, b) @ v).astype(jnp.float32) ** 2).mean()

    args = scaled(0, (32, 16), BF16), scaled(1, (16, 24), BF16), scaled(2, (24, 8), BF16), scaled(3, (24,), BF16)
    gradient = jax.grad(loss, (0, 1, 2, 3))
    rows = cutjax.explain(always(gradient))(*args).rows
    shapes = [(row.operands, row.outputs) for row in rows if row.epilogue is not None]
    assert shapes[0] == (("bf16[1,24]",), ("bf16[32,24]", "bf16[32,24]"))  # before the bias, and after gelu
    # Of the former, and the bias once more: the gradient, and that of the bias.
    assert shapes[-1] == (("bf16[32,24]", "bf16[1,24]"), ("bf16[32,24]", "f32[24]"))
    assert len(shapes) == 3  # and the derivative of the loss, after the second product
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(always(gradient))(*args).jaxpr.eqns]
    assert "tanh" not in names


def test_no_more_results_of_full_size():
    def fn(x, w):
        h = x @ w
        a, b, c, d, e = (f(h) for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.log1p))
        return a, b, c, d, e

    (report,) = cutjax.explain(always(fn))(scaled(0, (8, 8)), scaled(1, (8, 8))).fusion
    assert report.runs == "XLA"
    assert report.stops == ("5 values of its tail are used elsewhere",)


def test_what_is_used_elsewhere_is_written_in_the_fewest_bytes():
    def fn(x, w, r):
        u = r + x @ w
        y = u.astype(jnp.float32)  # which XLA makes of u where it reads it
        return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True)), u[:2]

    args = scaled(0, (8, 8), BF16), scaled(1, (8, 8), BF16), scaled(2, (8, 8), BF16)
    (row,) = cutjax.explain(always(fn))(*args).rows
    assert row.outputs == ("bf16[8,8]",)


SIZES = ((8, 1024, 4096), (4096, 14336), (4096, 14336))
LARGE = [jax.ShapeDtypeStruct(shape, BF16) for shape in SIZES]


def gated(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


def test_prices_decide():
    reports = cutjax.explain(cutjax.fuse(gated), platform="cuda")(*LARGE).fusion
    assert [report.runs for report in reports] == ["fused", "fused"]
    assert re.fullmatch(r"XLA [\d.]+ us, kernel and XLA's pass [\d.]+ us, fused [\d.]+ us", reports[0].why)
    bias = jax.ShapeDtypeStruct((14336,), BF16)
    (report,) = cutjax.explain(cutjax.fuse(lambda x, w, b: x @ w + b), platform="cuda")(*LARGE[:2], bias).fusion
    assert report.runs == "XLA"  # cuBLAS adds a bias of its own


def test_products_of_groups_become_kernels_of_their_own():
    case = fuse_cases.CASES["moe"]
    reports = cutjax.explain(cutjax.fuse(lambda *args: case.fn(*args)), platform="cuda")(*case.args).fusion
    assert {report.runs for report in reports} <= {"fused", "kernel"}
    backward = cutjax.fuse(jax.grad(lambda *args: case.fn(*args).astype(jnp.float32).sum(), 1))
    assert {report.runs for report in cutjax.explain(backward, platform="cuda")(*case.args).fusion} <= {
        "fused",
        "kernel",
    }
    close(
        backward(*case.args), jax.grad(lambda *args: case.fn(*args).astype(jnp.float32).sum(), 1)(*case.args), ROUNDING
    )


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_the_backend_of_a_scope_counts(policy):
    with cutjax.use_backend("xla"):
        reports = cutjax.explain(cutjax.fuse(gated, policy=policy), platform="cuda")(*LARGE).fusion
    assert {(report.runs, report.why) for report in reports} == {("XLA", "backend 'xla'")}


def test_what_has_no_price_stays_as_it_was(monkeypatch):
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SIZES]
    monkeypatch.setattr(xla, "time_us", lambda problem: None)
    monkeypatch.setattr(price, "_of_problem", price._of_problem.__wrapped__)
    assert str(jax.make_jaxpr(gated)(*avals)).count("dot_general") == 2
    found = jax.make_jaxpr(cutjax.fuse(gated))(*avals)
    assert "cutjax" not in str(found)
    reports = cutjax.explain(cutjax.fuse(gated), platform="cuda")(*avals).fusion
    assert all(report.runs == "XLA" and report.why.startswith("no prediction of XLA's time") for report in reports)


def test_explain_prints_each_product():
    text = str(
        cutjax.explain(always(lambda x, w, v: gated(x, w, v) @ w.T))(*(scaled(i, (16, 16), BF16) for i in range(3)))
    )
    assert "cutjax.fuse: 2 of 3 products fused with what is around them" in text
    assert "epilogue of 2 products bf16((acc0 * logistic(acc0)) * acc1)" in text or "epilogue of 2 products" in text
    assert "test_fuse.py" in text


@pytest.mark.versions
def test_one_equation_whatever_is_inside():
    jaxpr = jax.make_jaxpr(always(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w)))(*[scaled(i, (8, 8)) for i in range(2)])
    assert len(jaxpr.jaxpr.eqns) == 1


@pytest.mark.versions
def test_arguments_are_seen_as_they_are():
    seen = []

    def fn(tree, mode, *, scale, deep=True):
        seen.append((mode, scale, deep))
        y = tree["x"] @ tree["w"]
        return {"y": jnp.tanh(y) * scale if mode == "tanh" and deep else y, "none": None}

    tree = {"x": scaled(0, (8, 8)), "w": np.asarray(scaled(1, (8, 8)))}
    fused = always(fn)
    for _ in range(2):
        got = fused(tree, "tanh", scale=2.0)
    assert seen == [("tanh", 2.0, True)]  # traced once
    close(got, fn(tree, "tanh", scale=2.0))
    close(fused(tree, "other", scale=2.0, deep=False), fn(tree, "other", scale=2.0, deep=False))
    assert fused.__name__ == "fn"


@pytest.mark.versions
def test_what_is_captured_may_be_traced():
    w = scaled(1, (8, 8))

    @jax.jit
    def outer(x):
        captured = w * 2
        return always(lambda y: jnp.tanh(y @ captured))(x)

    close(outer(w), jnp.tanh(w @ (w * 2)))


def test_results_that_are_arguments_or_numbers():
    got = always(lambda x: (x, 3, jnp.tanh(x @ x)))(scaled(0, (4, 4)))
    same(got[0], scaled(0, (4, 4)))
    assert got[1] == 3


@pytest.mark.versions
def test_without_jit():
    with jax.disable_jit():
        close(always(layer)(*(scaled(i, (4, 4)) for i in range(3))), layer(*(scaled(i, (4, 4)) for i in range(3))))


@pytest.mark.versions
def test_errors():
    with pytest.raises(TypeError, match="fuse: expected a function, got int"):
        cutjax.fuse(3)
    with pytest.raises(ValueError, match="fuse: unknown policy 'all', expected one of"):
        cutjax.fuse(layer, policy="all")

    def branches(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        cutjax.fuse(branches)(jnp.ones(3))
    assert any("while cutjax.fuse traced branches" in note for note in error.value.__notes__)


@pytest.mark.versions
def test_equations_keep_their_order_of_effects():
    seen = []

    def fn(x, w):
        jax.debug.callback(lambda: seen.append("first"), ordered=True)
        y = jnp.tanh(x @ w)
        jax.debug.callback(lambda: seen.append("second"), ordered=True)
        return y

    always(fn)(scaled(0, (4, 4)), scaled(1, (4, 4)))
    jax.effects_barrier()
    assert seen == ["first", "second"]


def test_effects_are_no_way_around_a_region():
    """A product's tail would take a value that is read after one of the same tail is written."""

    def fn(x, w):
        y = x @ w
        ref = jax.new_ref(jnp.zeros_like(y))
        ref[...] = jnp.tanh(y)
        return ref[...] * y

    args = scaled(0, (4, 4)), scaled(1, (4, 4))
    close(jax.jit(always(fn))(*args), jax.jit(fn)(*args))


def test_regions_may_not_depend_on_each_other():
    """Each of two products would take what the other's result is made of."""

    def fn(x, w, v):
        a, b = x @ w, x @ v.T
        return jnp.cumsum(a, 0) * b + jnp.tanh(a), jnp.cumsum(b, 0) * a + jnp.tanh(b)

    args = [scaled(i, (8, 8)) for i in range(3)]
    close(always(fn)(*args), fn(*args), 1e-5)
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    assert len(Graph(jaxpr).equations()) == len(jaxpr.eqns)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_results_in_float8_are_rounded(dtype):
    """What follows a product in float8 reads what overflows and what is rounded, as between any two operations."""

    def fn(x, w):
        return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ()))).astype(jnp.float32) * 2

    for value in (1.125, 1.25, 60.0):
        x = jnp.full((8, 8), value, dtype)
        np.testing.assert_array_equal(jax.jit(always(fn))(x, x), jax.jit(fn)(x, x))
