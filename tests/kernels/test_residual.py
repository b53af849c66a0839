"""The network that ranks dense kernels: where it is asked, and that its sums are exact."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import cutjax
from cutjax.kernels.device import named, reference
from cutjax.kernels.sm90 import cost, dense_cost, family, kernel, residual

CONTENT = json.loads(residual.FILE.read_text())
H200 = reference("sm_90a")


def inputs(problem):
    found = []
    for config in list(family.configs(problem))[::7]:
        resolved = kernel.resolve(problem, config)
        if isinstance(resolved, kernel.Kernel):
            features = dense_cost.features(resolved, problem.device)
            found.append(residual.inputs(residual.product(resolved), features, dense_cost.costs(features)))
    return np.hstack(found)


def test_every_sum_is_a_whole_number_that_float64_holds():
    most = np.full(len(CONTENT["mean"]), residual.SPREAD * residual.UNIT, float)
    for layer in CONTENT["layers"]:
        weights, bias = np.array(layer["weights"]), np.array(layer["bias"])
        assert weights.dtype == bias.dtype == np.int64
        most = np.abs(weights) @ most + np.abs(bias)
        assert np.all(most < 2**53)
        most = most / residual.UNIT


def test_what_it_says_does_not_depend_on_the_order_of_sums_or_on_what_is_beside():
    network, x = residual.network(), inputs(cutjax.Problem.of(1000, 3000, 4096, "tn"))
    said = network(x)
    assert np.ptp(said) > 0.01  # it tells kernels apart
    assert np.all(np.abs(said) <= residual.MOST)
    np.testing.assert_array_equal(said, [network(x[:, [i]])[0] for i in range(x.shape[1])])
    order = np.random.default_rng(0).permutation(len(x))
    (weights, bias), *others = network.layers
    other = dataclasses.replace(
        network, mean=network.mean[order], scale=network.scale[order], layers=((weights[:, order], bias), *others)
    )
    np.testing.assert_array_equal(said, other(x[order]))


# A cap of the inputs keeps sizes far from those of the sweeps within what it was trained on.
@pytest.mark.parametrize("sizes", [(1, 8, 8), (1 << 20, 1 << 20, 1 << 10), (8, 8, 1 << 22)])
def test_sizes_far_from_those_recorded(sizes):
    prices = family.prices(cutjax.Problem.of(*sizes))
    assert np.all(np.abs(prices.ranked_us / prices.us - 1) < residual.MOST + 1e-12)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, True),
        ({"a_dtype": np.dtype("float16"), "b_dtype": np.dtype("float16")}, True),
        (dict.fromkeys(("batch", "a_batch", "b_batch"), (12,)), True),
        ({"device": named("H100 80GB HBM3")}, True),
        ({"a_dtype": np.dtype("int8"), "b_dtype": np.dtype("int8"), "out_dtype": np.dtype("int32")}, False),
        ({"groups": 4, "ragged": "m"}, False),
        ({"device": named("H20")}, False),
        ({"device": H200.beside_transfers()}, False),
    ],
    ids=str,
)
def test_it_ranks_what_it_was_trained_on(fields, asked):
    prices = family.prices(cutjax.Problem.of(512, 1024, 2048, **fields))
    assert np.any(prices.ranked_us != prices.us) == asked


def test_a_kernel_by_itself_is_ranked_as_among_many():
    problem = cutjax.Problem.of(700, 1024, 2048)
    prices = family.prices(problem)
    for i in (0, len(prices.us) - 1):
        one = kernel.resolved(problem, prices.config(i))
        us, ranked_us, _ = cost.times(one, problem.device)
        assert us == pytest.approx(prices.us[i], rel=1e-12)
        assert ranked_us == pytest.approx(prices.ranked_us[i], rel=1e-12)
