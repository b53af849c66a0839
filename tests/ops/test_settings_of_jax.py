"""Every operation under jax's own settings: strict promotion of ranks and dtypes, leak checks, 64 bits, NaN checks."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from fuse_cases import CASES
from jax.ad_checkpoint import checkpoint_name
from operations import OPERATIONS, in_turn, main, operands, uses

import cutjax


@pytest.mark.parametrize("name", in_turn(0))
def test_promotes_nothing_by_itself_and_leaks_no_tracer(name):
    """Lowered, which traces the references, in 64 bits, which change nothing: strictest, as no dtype is another."""
    args, found = operands(name), [uses(name)[use] for use in ("gradient", "tangent", "batch of one")]

    def fn(*args):
        return [use(*args) for use in found]

    expected = jax.eval_shape(fn, *args)
    # The search for leaks collects garbage, all of the process's: of each operation, not of each form of it.
    leaks = jax.checking_leaks() if main(name) else contextlib.nullcontext()
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), leaks:
        lowered = jax.jit(fn).lower(*args)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), lowered.out_info) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )


@pytest.mark.parametrize("name", in_turn(1))
def test_values_in_64_bits_and_no_nan(name):
    """What a kernel or a reference does not need, such as rows of no group, must not be NaN on the way either."""
    expected = jax.jit(OPERATIONS[name].fn)(*operands(name))
    with jax.enable_x64(True), jax.debug_nans(True):
        got = OPERATIONS[name].fn(*operands(name))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(got))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3), got, expected)


def always(fn):
    return cutjax.fuse(fn, policy="always")


def layer(x, w):
    return jnp.log(checkpoint_name(x @ w, "name") * -1) + 1


def total(fn):
    """A loss whose gradient has NaN where its value has none: 0 times infinity."""
    return lambda *args: jnp.sqrt(fn(*args) * 0).sum()


# What makes NaN of ones, and what the error names.
NANS = {
    "drop-in": (lambda x, w: cutjax.matmul(jnp.where(x > 0, jnp.inf, x), w - 1), "cutjax_gemm"),
    "gemm": (lambda x, w: cutjax.gemm(jnp.where(x > 0, jnp.inf, x), w - 1), "cutjax_gemm"),
    "epilogue": (lambda x, w: cutjax.gemm(x, w, epilogue=lambda a: jnp.log(-a)), "cutjax_gemm"),
    "grouped": (
        lambda x, w: cutjax.grouped_gemm(x, jnp.stack([w, w]), jnp.array([1, 3]), epilogue=lambda a: jnp.log(-a)),
        "cutjax_grouped_gemm",
    ),
    "mlp": (lambda x, w: cutjax.mlp(x, w, w, activation=lambda a: jnp.log(-a)), "cutjax_gemm"),
    "fuse": (always(layer), "log"),
    "fuse, jit": (always(jax.jit(layer)), "log"),
    "fuse, scan": (always(lambda x, w: jax.lax.scan(lambda c, _: (layer(c, w), None), x, None, 2)[0]), "scan"),
    "fuse, vmap": (lambda x, w: jax.vmap(always(layer), (None, 0))(x, jnp.stack([w, w])), "log"),
    "gradient of gemm": (jax.grad(total(lambda x, w: cutjax.gemm(x, w, epilogue=jnp.sin))), "mul"),
    "gradient of an epilogue": (
        jax.grad(lambda x, w: cutjax.gemm(x, w, epilogue=lambda a: jnp.sqrt(a * 0)).sum()),
        "mul",
    ),
    "gradient of fuse": (jax.grad(total(always(lambda x, w: jnp.sin(x @ w)))), "mul"),
    "fused gradient": (always(jax.grad(total(lambda x, w: jnp.sin(x @ w)))), "mul"),
}


@pytest.mark.parametrize(("name", "jitted"), [(name, i % 2 == 0) for i, name in enumerate(NANS)])
def test_errors_name_what_made_a_nan(name, jitted):
    fn, made_by = NANS[name]
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=rf"\(nan\) encountered in {made_by}\b"):
        (jax.jit(fn) if jitted else fn)(jnp.ones((4, 8)), jnp.ones((8, 8)))


def test_errors_name_what_made_an_infinity():
    def fn(x, w):
        return jnp.exp(x @ w * 1000)

    for each in (always(fn), jax.grad(lambda *args: always(fn)(*args).sum())):
        with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) encountered in exp\b"):
            each(jnp.ones((4, 8)), jnp.ones((8, 4)))


@pytest.mark.parametrize("name", ["gate", "moe"])
def test_fused_programs_under_checks(name):
    """Nothing leaks, jaxprs are well-formed, nothing is NaN on the way, and jit can be disabled."""
    fn, args = CASES[name].fn, CASES[name].args
    floats = tuple(i for i, x in enumerate(args) if x.dtype == jnp.bfloat16)

    def gradient(fn):
        return jax.grad(lambda *args: sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(fn(*args))), floats)

    expected = jax.jit(gradient(fn))(*args)
    checks = jax.checking_leaks(), jax.enable_checks(True), jax.debug_nans(True)
    for settings in (checks, (jax.disable_jit(),)):
        with contextlib.ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting)
            for got in (gradient(always(fn))(*args), always(gradient(fn))(*args)):
                close(got, expected, 2**-5)  # 16 bits, rounded at other places
