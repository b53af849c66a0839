"""Hints: no part of a product, and yet a part of what JAX keeps programs by."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from cutjax.primitives.dense import Dense
from cutjax.primitives.hints import Hints
from cutjax.primitives.product import multiply

X = jnp.ones((8, 8))
HOW = {"out_dtype": np.dtype(np.float32), "precision": None, "backend": "auto"}


def product(hints, x=X):
    return multiply(Dense("nn"), x, x, hints=hints, **HOW)


def eqn(fn):
    return jax.make_jaxpr(fn)(X).jaxpr.eqns[0]


def test_products_that_multiply_alike_are_equal():
    ours, dropin = eqn(lambda x: cutjax.gemm(x, x)), eqn(lambda x: cutjax.matmul(x, x))
    assert ours.params["product"] == dropin.params["product"]
    assert ours.params["hints"] != dropin.params["hints"]


def test_lowering_tells_hints_apart():
    """In whatever order: equal products are lowered apart where their hints say so."""
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    always, never, beside = Hints(lead=0.0), Hints(lead=1e9), Hints(lead=0.0, beside=True)
    for order in ((always, never, beside), (beside, never, always)):
        rows = cutjax.explain(lambda x, order=order: [product(hints, x) for hints in order], platform="cuda")(x).rows
        found = dict(zip(order, rows, strict=True))
        assert [found[hints].runs == "XLA" for hints in (always, never, beside)] == [False, True, False]
        assert found[always].choice.problem.device.sms > found[beside].choice.problem.device.sms
    both = jax.jit(lambda x: (product(always, x), product(never, x)))
    text = both.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@cutjax_launch") == text.count("stablehlo.dot_general") == 1


def test_cotangents_have_hints():
    told = Hints(("a is copied", "b is copied", "d is copied"), 2.0, True)
    _, pull = jax.vjp(lambda a, b: multiply(Dense("nn"), a, b, hints=told, **HOW), X, X)
    of_b, of_a = (x.params["hints"] for x in jax.make_jaxpr(pull)(X).jaxpr.eqns if "hints" in x.params)
    assert of_a == Hints(("the cotangent of d is copied", "", "the cotangent of a is copied"), 2.0, True)
    assert of_b == Hints(("", "the cotangent of d is copied", "the cotangent of b is copied"))


def test_sentences_compile_no_eager_call_again(caplog):
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        product(Hints(("a is copied", "", "")))
        caplog.clear()
        product(Hints(("a is copied at another place", "", "")))
        assert not caplog.records
