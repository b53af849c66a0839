"""``precision=`` and ``jax.default_matmul_precision``: what reaches the products of the references, and the kernels."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import multiplied
from jax import lax

import cutjax
from cutjax import dot_precision
from cutjax.kernels.keys import key

X, W, B = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4)
V, WS, VS, S = jnp.ones((4, 3)), jnp.ones((1, 3, 4)), jnp.ones((1, 4, 3)), jnp.array([2])
# What each operation computes, in plain JAX, of one x and one w.
PLAIN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gemm": (cutjax.gemm, jnp.matmul),
    "fused": (
        lambda x, w, **p: cutjax.gemm(x, w, epilogue=lambda acc, b: jnp.tanh(acc + b), operands=(B,), **p),
        lambda x, w, **p: jnp.tanh(jnp.matmul(x, w, **p) + B),
    ),
    "recompute": (
        lambda x, w, **p: cutjax.gemm(x, w, epilogue=jnp.tanh, save="recompute", **p),
        lambda x, w, **p: jnp.tanh(jnp.matmul(x, w, **p)),
    ),
    "mlp": (
        lambda x, w, **p: cutjax.mlp(x, w, V, b1=B, **p),
        lambda x, w, **p: jnp.matmul(jax.nn.gelu(jnp.matmul(x, w, **p) + B), V, **p),
    ),
    "grouped_gemm": (
        lambda x, w, **p: cutjax.grouped_gemm(x, w[None], S, **p),
        lambda x, w, **p: lax.ragged_dot(x, w[None], S, **p),
    ),
    "grouped_fused": (
        lambda x, w, **p: cutjax.grouped_gemm(x, w[None], S, epilogue=jnp.add, operands=(B[None, None],), **p),
        lambda x, w, **p: lax.ragged_dot(x, w[None], S, **p) + B,
    ),
    "grouped_outer": (
        lambda x, w, **p: cutjax.grouped_outer(w, w, jnp.array([3]), **p)[0] * x.sum(),
        lambda x, w, **p: jnp.matmul(w.T, w, **p) * x.sum(),
    ),
    "accumulate": (
        lambda x, w, **p: cutjax.grouped_outer(w, w, jnp.array([3]), accumulate=jnp.ones((1, 4, 4)), **p)[0] * x.sum(),
        lambda x, w, **p: jnp.matmul(w.T, w, **p) * x.sum(),
    ),
    "grouped_mlp": (
        lambda x, w, **p: cutjax.grouped_mlp(x, w[None], VS, S, **p),
        lambda x, w, **p: jnp.matmul(jax.nn.gelu(jnp.matmul(x, w, **p)), V, **p),
    ),
    "moe": (
        lambda x, w, **p: cutjax.moe(x, jnp.ones((2, 1)), w[None], w[None], VS, 1, **p),
        lambda x, w, **p: jnp.matmul(jax.nn.silu(jnp.matmul(x, w, **p)) * jnp.matmul(x, w, **p), V, **p),
    ),
    "ragged_dot": (
        lambda x, w, **p: cutjax.ragged_dot(x, w[None], S, **p),
        lambda x, w, **p: lax.ragged_dot(x, w[None], S, **p),
    ),
}
OPERATIONS = list(PLAIN)


def precisions(fn: Callable[..., Any], *args: Any) -> set[str]:
    """The precision of every product of a function, as it is lowered."""
    text = jax.jit(fn).lower(*args).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert dots
    config = re.compile(r"precision(?:_config)? = \[(\w+), (\w+)\]")
    algorithm = re.compile(r"num_primitive_operations = (\d)")
    found = set()
    for line in dots:
        pair, many = config.search(line), algorithm.search(line)
        found.add(f"{' '.join(pair.groups()) if pair else 'DEFAULT DEFAULT'}{' x' + many[1] if many else ''}")
    return found


SCOPE = jax.default_matmul_precision


def inside(f, x, w):
    with SCOPE("float32"):
        return f(x, w)


def under_vjp(f, x, w):
    with SCOPE("float32"):
        y, vjp = jax.vjp(f, x, w)
    return vjp(y)


def only_backward(f, x, w):
    y, vjp = jax.vjp(f, x, w)
    with SCOPE("float32"):
        return y, vjp(y)


def only_forward_product(f, x, w):
    """The gradient of a function with the scope in it."""
    return jax.grad(lambda x, w: inside(f, x, w).sum(), (0, 1))(x, w)


def jitted_inside(f, x, w):
    with SCOPE("float32"):
        return jax.jit(f)(x, w)


def tangents(f, x, w):
    with SCOPE("tensorfloat32"):
        return jax.jvp(f, (x, w), (x, w))


def scanned(f, x, w):
    with SCOPE("high"):
        return lax.scan(lambda total, _: (total + f(x, w).sum(), None), 0.0, None, length=2)[0]


def mapped(f, x, w):
    with SCOPE("highest"):
        return jax.vmap(f, (0, None))(jnp.stack([x, x]), w)


def mapped_gradient(f, x, w):
    return jax.vmap(functools.partial(only_forward_product, f), (None, 0))(x, jnp.stack([w, w]))


def checkpointed(f, x, w):
    with SCOPE("float32"):
        return jax.grad(lambda x: jax.checkpoint(f)(x, w).sum())(x)


def second(f, x, w):
    with SCOPE("float32"):
        return jax.jvp(jax.grad(lambda x: (f(x, w) ** 2).sum()), (x,), (x,))


def algorithm(f, x, w):
    with SCOPE("BF16_BF16_F32_X3"):
        return jax.value_and_grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w)


SCOPES = [
    inside,
    under_vjp,
    only_backward,
    only_forward_product,
    jitted_inside,
    tangents,
    scanned,
    mapped,
    mapped_gradient,
    checkpointed,
    second,
    algorithm,
]


# All of gemm; of the others a third each, another from one to the next.
@pytest.mark.parametrize(
    ("name", "scope"),
    [
        (name, scope)
        for i, name in enumerate(OPERATIONS)
        for j, scope in enumerate(SCOPES)
        if name == "gemm" or (i + j) % 3 == 0
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_scopes(name, scope):
    """The sets of precisions of all products; lax.ragged_dot has none of its own on a CPU under vmap and jvp of it."""
    ours, plain = PLAIN[name]
    if name in ("grouped_gemm", "grouped_fused", "ragged_dot"):
        plain = {"grouped_fused": lambda x, w: jnp.matmul(x, w) + B}.get(name, jnp.matmul)
    got = precisions(functools.partial(scope, ours), X, W)
    expected = precisions(functools.partial(scope, plain), X, W)
    assert got == expected
    if scope is not only_backward:
        assert "DEFAULT DEFAULT" not in got


ARGUMENTS = [
    None,
    "default",
    "bfloat16",
    "high",
    "tensorfloat32",
    "highest",
    "float32",
    lax.Precision.HIGHEST,
    ("high", "highest"),
    ["high", "highest"],
    (lax.Precision.DEFAULT, lax.Precision.HIGH),
    "BF16_BF16_F32",
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
]


# Every form of it in gemm, which all others read it as; in those two kinds of four.
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("gemm", precision) for precision in ARGUMENTS),
        *((name, ARGUMENTS[i]) for turn, name in enumerate(OPERATIONS[1:]) for i in ((5, 8), (0, 12))[turn % 2]),
    ],
    ids=str,
)
def test_argument(name, precision):
    """That of the call is that of its gradients."""
    ours, plain = PLAIN[name]
    ours = functools.partial(ours, precision=precision)
    plain = functools.partial(plain, precision=tuple(precision) if isinstance(precision, list) else precision)
    if precision in (("high", "highest"), ["high", "highest"], (lax.Precision.DEFAULT, lax.Precision.HIGH)):
        got, expected = precisions(ours, X, W), precisions(plain, X, W)
    else:
        got, expected = (
            precisions(jax.value_and_grad(lambda x, w, f=f: f(x, w).sum(), (0, 1)), X, W) for f in (ours, plain)
        )
    assert got == expected


@pytest.mark.parametrize(("layout", "wrt"), [("nn", 0), ("nt", 1), ("tn", 0), ("tt", 1), ("nn", 1)])
def test_a_pair_in_gradients(layout, wrt):
    """In lax the cotangent has the first operand's; whichever operand it is here, so it is of the shape it has."""

    def found(product):
        text = jax.jit(jax.grad(lambda *args: product(*args).sum(), wrt)).lower(*operands).as_text()
        (line,) = (line for line in text.splitlines() if "dot_general" in line)
        pair = re.search(r"precision = \[(\w+), (\w+)\]", line)
        shapes = re.search(r": \(tensor<(\w+)>, tensor<(\w+)>\)", line)
        return sorted(zip(shapes.groups(), pair.groups(), strict=True))

    a, b = jnp.ones((2, 3)), jnp.ones((3, 4))
    operands = (a if layout[0] == "n" else a.T), (b if layout[1] == "n" else b.T)
    pair = ("high", "highest")

    def plain(a, b):
        contract = ([1 if layout[0] == "n" else 0], [0 if layout[1] == "n" else 1])
        return lax.dot_general(a, b, (contract, ([], [])), precision=pair)

    assert found(functools.partial(cutjax.gemm, layout=layout, precision=pair)) == found(plain)


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_a_pair_in_gradients_of_groups(layout):
    w = WS if layout == "nn" else WS.mT

    def precision_of(fn, primitive):
        jaxprs = [jax.make_jaxpr(fn)(X, w).jaxpr]
        return [eqn.params["precision"] for jaxpr in jaxprs for eqn in jaxpr.eqns if eqn.primitive.name == primitive]

    def product(x, w):
        return cutjax.grouped_gemm(x, w, S, layout=layout, precision=("high", "highest")).sum()

    high, highest = lax.Precision.HIGH, lax.Precision.HIGHEST
    assert precision_of(jax.grad(product), "cutjax_grouped_gemm")[-1] == (high, highest)  # of g and w
    expected = (high, highest) if layout == "nn" else (highest, high)  # of x and g
    assert precision_of(jax.grad(product, 1), "cutjax_grouped_outer") == [expected]


def test_the_scope_where_it_is_bound_not_where_it_is_lowered():
    traced = jax.jit(cutjax.gemm).trace(X, W)
    with SCOPE("float32"):
        assert "HIGHEST" not in traced.lower().as_text()
        traced = jax.jit(cutjax.gemm).trace(X, W)
    assert "HIGHEST" in traced.lower().as_text()


@pytest.mark.parametrize(
    "precision", ["bogus", 3, {}, ("highest",), ("highest", "bogus"), ("high", "F32_F32_F32")], ids=str
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_refused(name, precision):
    where = {"fused": "gemm", "recompute": "gemm", "grouped_fused": "grouped_gemm", "accumulate": "grouped_outer"}
    where |= {"ragged_dot": "ragged_dot_general"}
    got = "bogus" if "bogus" in str(precision) else str(precision)
    with pytest.raises(ValueError, match=rf"^{where.get(name, name)}: .*(?i:precision)[\s\S]*{re.escape(got)}"):
        PLAIN[name][0](X, W, precision=precision)


H = jnp.ones((64, 64), jnp.bfloat16)
SERVED = [None, "default", "high", "highest", ("high", "default"), "BF16_BF16_F32", "DEFAULT"]
SERVED += ["BF16_BF16_F32_X9", "TF32_TF32_F32"]  # of bf16 exact already
SERVED += [lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32)]
SERVED += [lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32, 1, 1, 9)]
OTHERS = ["BF16_BF16_F32_X3", "BF16_BF16_BF16", "F16_F16_F32", "F32_F32_F32"]
OTHERS += [lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)]
OTHERS += [lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32, 2, 1)]
SIZES = jnp.array([64])
KERNELS: dict[str, Callable[..., Any]] = {
    "gemm": lambda **p: cutjax.gemm(H, H, **p),
    "fused": lambda **p: cutjax.gemm(H, H, epilogue=jnp.tanh, **p),
    "mlp": lambda **p: cutjax.mlp(H, H, H, **p),
    "grouped_gemm": lambda **p: cutjax.grouped_gemm(H, H[None], SIZES, **p),
    "grouped_fused": lambda **p: cutjax.grouped_gemm(H, H[None], SIZES, epilogue=jnp.tanh, **p),
    "grouped_outer": lambda **p: cutjax.grouped_outer(H, H, SIZES, **p),
    "accumulate": lambda **p: cutjax.grouped_outer(H, H, SIZES, accumulate=jnp.ones((1, 64, 64)), **p),
    "grouped_mlp": lambda **p: cutjax.grouped_mlp(H, H[None], H[None], SIZES, **p),
    "moe": lambda **p: cutjax.moe(H, jnp.ones((64, 1)), H[None], H[None], H[None], 1, **p),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_kernels_serve(name, kernels_run):
    explain = functools.partial(cutjax.explain, platform="cuda")
    turn = list(KERNELS).index(name) % 3 if name != "gemm" else None  # all of gemm, a third of the others
    for precision in SERVED[turn :: 1 if turn is None else 3]:
        rows = explain(lambda p=precision: KERNELS[name](precision=p))().rows
        assert all("sm90" in row.runs for row in multiplied(rows))
    for precision in OTHERS[turn :: 1 if turn is None else 3]:
        reason = f"precision {dot_precision.canonical(precision, '')}: kernels have no such products of bfloat16, "
        reason += "added up in float32"
        for backend, runs in (("auto", "XLA"), ("cuda", "error")):
            rows = multiplied(explain(lambda p=precision, b=backend: KERNELS[name](precision=p, backend=b))().rows)
            assert rows
            assert all(row.runs == runs and row.why.endswith(reason) for row in rows)


def test_strict_raises_with_the_reason():
    traced = jax.jit(functools.partial(cutjax.gemm, precision="F16_F16_F16", backend="cuda")).trace(H, H)
    with pytest.raises(NotImplementedError, match="precision F16_F16_F16: kernels have no such products of bfloat16"):
        traced.lower(lowering_platforms=("cuda",))
    text = jax.jit(functools.partial(cutjax.gemm, precision="F32_F32_F32")).trace(H, H)
    text = text.lower(lowering_platforms=("cuda",)).as_text()
    assert "accumulation_type = f32" in text
    assert "cutjax_launch" not in text


def test_float8_algorithm_has_a_gradient():
    """Its cotangents are wider than float8, which the algorithm does not take."""
    x, w = (jnp.ones(shape, jnp.float8_e4m3fn) for shape in ((2, 3), (3, 4)))

    def loss(x, w):
        return cutjax.gemm(x, w, out_dtype=jnp.float32, precision="ANY_F8_ANY_F8_F32").sum()

    text = jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" in text


def test_canonical_is_idempotent():
    for precision in ARGUMENTS:
        once = dot_precision.canonical(precision, "")
        assert dot_precision.canonical(once, "") == once
        assert dot_precision.swapped(dot_precision.swapped(once)) == once
    uneven = lax.DotAlgorithm(np.float16, np.float32, np.float32, 1, 2)
    assert dot_precision.swapped(uneven) == lax.DotAlgorithm(np.float32, np.float16, np.float32, 2, 1)


PRESETS = ["F16_F16_F16", "F16_F16_F32", "BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"]
PRESETS += ["TF32_TF32_F32", "TF32_TF32_F32_X3", "F32_F32_F32", "F64_F64_F64", "BF16_BF16_BF16", "ANY_F8_ANY_F8_F32"]
PRESETS += ["ANY_F8_ANY_F8_F32_FAST_ACCUM"]
# For each of PRESETS; None where no kernel does as it says.
MATH: dict[str, list[str | None]] = {
    "bfloat16": [None, None, "", None, None, "", "", "", None, None, None, None, None],
    "float16": ["f16", "", None, "", None, "", "", "", None, None, None, None, None],
    "float32": [None, None, "bf16", "bf16x3", "bf16x6", "bf16x9", "tf32", "tf32x3", "", None, None, None, None],
    "float64": [*[None] * 9, "", None, None, None],
    "int8": [None] * 13,
    "complex64": [None] * 13,
    "float8_e5m2": [*[None] * 11, "", "fast"],
}


@pytest.mark.parametrize("name", MATH)
def test_math_of_presets(name):
    dtype = np.dtype(name)
    for preset, wanted in zip(PRESETS, MATH[name], strict=True):
        precision = lax.DotAlgorithmPreset[preset]
        found = dot_precision.math(precision, dtype, dot_precision.accumulator(dtype))
        if wanted is None:
            assert found == (
                f"precision {preset}: kernels have no such products of {name}, "
                f"added up in {dot_precision.accumulator(dtype)}",
            )
        else:
            assert found == wanted, preset


def test_float8_e5m2_by_itself_needs_a_name():
    """XLA adds up its products in float32, on an H200 with an error of 5e-8; a tensor core's is 8e-5."""
    x, y = jnp.ones((64, 64), jnp.float8_e5m2), jnp.ones((64, 64), jnp.float8_e4m3fn)
    explain = functools.partial(cutjax.explain, platform="cuda")
    for precision in (None, "default", "high", "highest"):
        f = functools.partial(cutjax.gemm, out_dtype=jnp.float32, precision=precision)
        assert [row.runs for row in explain(f)(x, x).rows] == ["XLA"]
    f = functools.partial(cutjax.gemm, out_dtype=jnp.float32, precision="ANY_F8_ANY_F8_F32", backend="cuda")
    assert all(row.runs.startswith(("sm90_", "mma_")) for row in explain(f)(x, x).rows)
    f = functools.partial(cutjax.gemm, out_dtype=jnp.float32, backend="cuda")
    assert all(row.runs.startswith(("sm90_", "mma_")) for row in explain(f)(y, y).rows)


def test_fast_sums_are_asked_for():
    """Float8 alone has them; gradients, of wider cotangents, do not."""
    x = jnp.ones((256, 256), jnp.float8_e4m3fn)
    q = cutjax.Quantized(x, jnp.ones((1, 1)))

    def maths(a, b, **how):
        rows = cutjax.explain(functools.partial(cutjax.gemm, backend="cuda", **how), platform="cuda")(a, b).rows
        return [(row.choice.problem.math, "fast" in row.runs) for row in rows]

    assert maths(x, x) == maths(q, q) == maths(x, x, accumulate="f32") == [("", False)]
    assert maths(x, x, accumulate="fast") == maths(q, q, accumulate="fast") == [("fast", True)]
    assert maths(x.astype(jnp.bfloat16), x, accumulate="fast") == [("", False)]
    assert maths(x, x, accumulate="fast", precision="ANY_F8_ANY_F8_F32") == [("", False)]
    loss = jax.jit(jax.grad(lambda q: (cutjax.gemm(q, q, accumulate="fast") ** 2).sum()))
    assert loss(q).scale.item() == 2.0**34
    with pytest.raises(ValueError, match="unknown accumulate 'f16', expected one of"):
        cutjax.gemm(x, x, accumulate="f16")
    sizes = jnp.array([200])
    assert cutjax.grouped_gemm(x, x[None], sizes, accumulate="fast", out_dtype=jnp.float32).sum() == 200 * 256 * 256


def test_math_without_an_algorithm():
    """TF32 is XLA's for float32 unless an operand's precision is the highest, where the device has it."""
    f32, f64, c64, c128 = (np.dtype(x) for x in ("float32", "float64", "complex64", "complex128"))
    for precision, wanted in (
        (None, "tf32"),
        ("DEFAULT", "tf32"),
        ("high", "tf32"),
        ("highest", ""),
        (("high", "highest"), ""),
    ):
        precision = dot_precision.canonical(precision, "")
        assert dot_precision.math(precision, f32, f32) == dot_precision.math(precision, c64, c64) == wanted
        assert dot_precision.math(precision, f32, f32, tf32=False) == ""
        for dtype in (f64, c128, *map(np.dtype, (jnp.bfloat16, np.float16, np.int8, jnp.float8_e4m3fn))):
            assert dot_precision.math(precision, dtype, dot_precision.accumulator(dtype)) == ""
        assert dot_precision.math(precision, f32, f64) == ""  # converted to float64 first
    assert dot_precision.math(lax.DotAlgorithmPreset.F64_F64_F64, f32, f64) == ""


def test_the_problem_says_the_math():
    def problems(x, **p):
        return [row.choice.problem for row in cutjax.explain(lambda: cutjax.gemm(x, x, **p), platform="cuda")().rows]

    x = jnp.ones((64, 64))
    for precision, wanted in ((None, "tf32"), ("highest", ""), ("BF16_BF16_F32_X6", "bf16x6")):
        (problem,) = problems(x, precision=precision)
        assert problem.math == wanted
        assert ("math" in key(problem)) == bool(wanted)
        assert (f"f32 x f32 by {wanted} -> f32" in str(problem)) == bool(wanted)
    (problem,) = problems(x.astype(jnp.int8))
    assert (problem.math, problem.accumulator) == ("", np.int32)
    with pytest.raises(ValueError, match="unknown math 'bf17', expected one of"):
        cutjax.Problem.of(8, 8, 8, math="bf17")


def test_highest_by_parts_where_that_is_faster():
    """In values, gradients and convolutions; where it is not, and for what has another precision, IEEE's."""
    x, w, small = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 4096), (4096, 4096), (64, 64)))
    image, taps = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64, 64, 128), (3, 3, 128, 256)))

    def maths(fn, *args):
        rows = cutjax.explain(fn, platform="cuda")(*args).rows
        return [row.choice.problem.math if row.runs != "XLA" else "XLA" for row in rows]

    product = functools.partial(cutjax.gemm, precision="highest")
    gradient = jax.grad(lambda x, w: product(x, w).sum(), (0, 1))
    cases = [
        (product, x, w),
        (gradient, x, w),
        (functools.partial(cutjax.conv, precision="highest"), image, taps),
    ]
    for fn, *args in cases:
        with cutjax.use_highest("bf16x9"):
            assert set(maths(fn, *args)) == {"bf16x9"}
        assert "bf16x9" not in maths(fn, *args)  # nor is the program of the scope reused
    with cutjax.use_highest("bf16x6"):
        assert maths(product, x, w) == ["bf16x6"]
        assert maths(product, small, small) != ["bf16x6"]
        assert "bf16x6" not in maths(cutjax.gemm, x, w)
        assert "bf16x6" not in maths(functools.partial(cutjax.gemm, precision=lax.DotAlgorithmPreset.F32_F32_F32), x, w)
        (row,) = cutjax.explain(product, platform="cuda")(x, w).rows
        assert "IEEE products take" in row.why
        with cutjax.use_highest("ieee"):
            assert maths(product, x, w) != ["bf16x6"]
    with pytest.raises(ValueError, match="use_highest: unknown way 'tf32', expected one of"):
        cutjax.use_highest("tf32")
