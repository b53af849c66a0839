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
from cutjax.ops.einsum import product_of
from cutjax.runtime import tuning_file

H, F = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def fastest(equation, shapes, dtype, backend="auto", lead=1.08):
    lhs, rhs = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    dims, permutation = product_of(equation, lhs, rhs)
    plans = contractions(*shapes, dims, permutation, itemsizes=(dtype.itemsize,) * 3)
    return plans, contraction_price.fastest(plans, lhs, rhs, dtype, None, backend, lead)


def test_many_small_matrices_are_copied_to_one():
    plans, found = fastest("bsic,bsjd->bijcd", ((1, 512, 128, 32), (1, 512, 128, 32)), H, "cuda")
    assert found == (plans[-1], "cuda")
    assert plans[-1].copied > plans[0].copied


def test_strides_are_taken_where_nothing_is_gained_by_copies():
    plans, found = fastest("bqhd,bkhd->bhqk", ((8, 1024, 16, 128), (8, 1024, 16, 128)), H)
    assert found == (*plans, "auto")


def test_xla_keeps_what_it_multiplies_faster():
    equation, shapes = "imae,mbie->mbae", ((32, 32, 96, 96), (32, 32, 32, 96))
    assert fastest(equation, shapes, F)[1] == (None, "auto")
    assert fastest(equation, shapes, F, "cuda")[1][0] is not None
    plans, found = fastest(equation, shapes, F, "xla")
    assert found == (plans[0], "xla")
    avals = [jax.ShapeDtypeStruct(shape, F) for shape in shapes]
    text = str(jax.make_jaxpr(lambda x, y: cutjax.einsum(equation, x, y))(*avals))
    assert "cutjax_gemm" not in text
    assert "dot_general" in text


def test_kernels_take_what_xla_has_to_transpose():
    """Matrices of one operand are rows to XLA, which copies both and the result; our kernels of 96 columns do not."""
    plans, (plan, backend) = fastest("iad,bcdk->ikabc", ((8, 96, 96), (96, 96, 96, 8)), F)
    assert (plan, backend) == (plans[0], "auto")
    plans, (plan, backend) = fastest("imae,mbej->ijab", ((32, 32, 96, 96), (32, 96, 96, 32)), F)
    assert (plan, backend) == (plans[-1], "auto")


@pytest.mark.parametrize(
    ("equation", "shapes", "dtype", "plan", "by"),
    [
        # Rows on both sides of a batch axis are copied by XLA, and so is the result: 13 us for its 34 (measured on an
        # H200, experiments/contractions-again-h200.json, as are the others).
        ("blmi,lio->blmo", ((64, 16, 31, 128), (16, 128, 128)), "float32", 0, "auto"),
        # Vectors: XLA takes 0.86 of the time for the product of one plan. (Our kernel takes 0.55, but is told more.)
        ("nui,uv->nvi", ((16384, 128, 3), (128, 128)), "float32", -1, "xla"),
        # Copies that both take, and a deep product of few tiles: 63 us for 72, and 206 for 257.
        ("mnaf,mnef->ae", ((32, 32, 96, 96), (32, 32, 96, 96)), "float32", 0, "auto"),
        ("Qpi,Qqi->pq", ((1536, 320, 64), (1536, 320, 64)), "float32", 0, "auto"),
        # cuBLAS's tiles of complex numbers are wide: 0.72 ms for 1.48.
        ("xaybz,abcd->xcydz", ((64, 2, 256, 2, 512), (2, 2, 2, 2)), "complex64", -1, "auto"),
    ],
)
def test_what_was_faster_is_taken(equation, shapes, dtype, plan, by):
    plans, found = fastest(equation, shapes, jnp.dtype(dtype))
    assert found == (plans[plan], by)
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    jax.jit(lambda x, y: cutjax.einsum(equation, x, y)).lower(*avals)  # where there is no GPU, too


@pytest.mark.parametrize("equation", ["iqrs,qj->ijrs", "qj,iqrs->ijrs"])
@pytest.mark.parametrize(("columns", "dtype", "taken"), [(32, F, True), (160, F, False), (16, H, True), (32, H, False)])
def test_xla_multiplies_few_columns_along_a_middle_axis(equation, columns, dtype, taken):
    sizes = dict.fromkeys("iqrs", 112) | {"j": columns}
    lhs, rhs = equation.split("->")[0].split(",")
    plans, (plan, backend) = fastest(equation, [tuple(sizes[x] for x in seq) for seq in (lhs, rhs)], dtype)
    assert ((plan, backend) == (plans[-1], "xla")) == taken
    assert plans[-1].layout[0] == "t"
    assert plans[-1].a.shape == (112, 112**3)  # the larger operand's are the rows, whichever it is


def test_xla_mixes_heads_of_attention_in_one_kernel():
    """By strides our kernel took 262 us, XLA's own contraction 484, the plan of one matrix by XLA 155."""
    plans, found = fastest("bhqk,hg->bgqk", ((8, 16, 1024, 1024), (16, 16)), H)
    assert found == (plans[-1], "xla")


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
            assert (fastest("bskh,hkn->bsn", shapes, H)[1][0] is not None) == taken


@pytest.mark.parametrize("dtype", [H, F])
def test_values_are_the_same_whatever_is_chosen(dtype):
    shapes = (2, 6, 5, 3), (2, 6, 4, 7)
    x, y = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes))
    expected = jnp.einsum("bsic,bsjd->bijcd", x, y)
    found = cutjax.einsum("bsic,bsjd->bijcd", x, y)
    assert jnp.allclose(found.astype(F), expected.astype(F), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("equation", ["ijeb,ae->ijab", "ae,ijeb->ijab"])
def test_gradients_of_what_xla_multiplies_in_one_kernel(equation):
    sizes = {"i": 4, "j": 8, "e": 96, "b": 96, "a": 32}
    shapes = [tuple(sizes[x] for x in seq) for seq in equation.split("->")[0].split(",")]
    assert fastest(equation, shapes, F)[1][1] == "xla"
    x, y = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    expected = jax.grad(lambda x, y: jnp.sin(jnp.einsum(equation, x, y)).sum(), (0, 1))(x, y)
    found = jax.grad(lambda x, y: jnp.sin(cutjax.einsum(equation, x, y)).sum(), (0, 1))(x, y)
    for a, b in zip(found, expected, strict=True):
        assert jnp.allclose(a, b, rtol=1e-3, atol=2e-3)
