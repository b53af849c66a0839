"""The choice among the plans of a contraction: by predicted and by measured time, and what XLA keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import cutjax
from cutjax.kernels import families, tuned
from cutjax.kernels.keys import key
from cutjax.ops import contraction_price
from cutjax.ops.contraction import contractions
from cutjax.runtime import tuning_file

H, F = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def fastest(equation, shapes, dtype, backend="auto", lead=1.08):
    lhs, rhs = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.einsum(equation, x, y))(lhs, rhs).jaxpr
    product, *after = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("dot_general", "transpose")]
    dims, permutation = product.params["dimension_numbers"], after[0].params["permutation"] if after else None
    plans = contractions(*shapes, dims, permutation, itemsizes=(dtype.itemsize,) * 3)
    return plans, contraction_price.fastest(plans, lhs, rhs, dtype, None, backend, lead)


def test_many_small_matrices_are_copied_to_one():
    plans, found = fastest("bsic,bsjd->bijcd", ((1, 512, 128, 32), (1, 512, 128, 32)), H, "cuda")
    assert found == plans[-1] != plans[0]
    assert found.copied > 0


def test_strides_are_taken_where_nothing_is_gained_by_copies():
    plans, found = fastest("bqhd,bkhd->bhqk", ((8, 1024, 16, 128), (8, 1024, 16, 128)), H)
    assert (found,) == plans


def test_xla_keeps_what_it_multiplies_faster():
    shapes = (32, 32, 96, 96), (32, 96, 96, 32)
    assert fastest("imae,mbej->ijab", shapes, F)[1] is None
    assert fastest("imae,mbej->ijab", shapes, F, "cuda")[1] is not None
    plans, found = fastest("imae,mbej->ijab", shapes, F, "xla")
    assert found == plans[0]
    avals = [jax.ShapeDtypeStruct(shape, F) for shape in shapes]
    text = str(jax.make_jaxpr(lambda x, y: cutjax.einsum("imae,mbej->ijab", x, y))(*avals))
    assert "cutjax_gemm" not in text
    assert "dot_general" in text


def test_measured_times_go_before_predicted_ones(tmp_path):
    shapes, out = ((4, 512, 64, 16), (16, 64, 1024)), tmp_path / "tuned.json"
    with cutjax.use_tuning(None):
        plans, _ = fastest("bskh,hkn->bsn", shapes, H)
        (plan,) = plans
        device = contraction_price.device_of(contraction_price.lowering.target())
        problem = contraction_price._problem(plan, (H, H, H), device)
        config = cutjax.candidates(problem)[0]
    fields = tuple(sorted(families.fields_of(config).items()))
    for time_us, xla_us, taken in ((10.0, 20.0, True), (20.0, 10.0, False)):
        entry = tuned.Entry(fields, time_us, xla_us)
        tuning_file.merge(out, {problem.device.name: {key(problem): entry.encoded(cutjax="0", jax="0", date="0")}})
        tuned.read_again()
        with cutjax.use_tuning(out):
            assert (fastest("bskh,hkn->bsn", shapes, H)[1] is not None) == taken


@pytest.mark.parametrize("dtype", [H, F])
def test_values_are_the_same_whatever_is_chosen(dtype):
    shapes = (2, 6, 5, 3), (2, 6, 4, 7)
    x, y = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes))
    expected = jnp.einsum("bsic,bsjd->bijcd", x, y)
    found = cutjax.einsum("bsic,bsjd->bijcd", x, y)
    assert jnp.allclose(found.astype(F), expected.astype(F), rtol=2e-2, atol=2e-2)
