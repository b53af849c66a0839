"""Cases of benchmarks/ops/dtypes.py, made small: the standard passes its own check, and what is wrong does not."""

import dataclasses

import jax
import pytest

from benchmarks.ops import dtypes


def small(case: dtypes.Typed) -> dtypes.Typed:
    """The same with sizes that a CPU multiplies at once."""
    return dataclasses.replace(case, m=16, n=24, k=32, batch=(3,) if case.batch else (), groups=2 if case.groups else 0)


KINDS = {small(case).name: small(case) for case in dtypes.CASES}


@pytest.mark.parametrize("case", KINDS.values(), ids=str)
def test_results_are_judged(case):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        (product,) = dtypes.products(case)
        args = case.inputs(0)
        theirs = case.multiply_in_xla(*args[:2], case.precision)
        ours = case.multiply(*args[:2], backend="xla")
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        error, wrong = product.judge(product.look(args, ours, theirs))
        assert not wrong
        assert error < 1e-2
        assert product.judge(product.look(args, ours.at[..., :8].set(0), theirs))[1]
        assert product.judge(product.look(args, ours * 1.01, theirs))[1]


def test_names_are_unique():
    assert len({case.name for case in dtypes.CASES}) == len(dtypes.CASES)
