"""The training of the network that ranks dense kernels, on samples whose times are made up."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import residual
from cutjax.kernels.sm90 import residual as shipped


def made_up(count, seed):
    """Products of 8 configs, of which the formula knows all but 5%, told by one input where another is positive."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8 * count, 3))
    formula = np.exp(rng.normal(size=8 * count) * 0.02)
    us = formula * np.exp(0.05 * np.sign(x[:, 0]) * (x[:, 1] > 0))
    return residual.Samples(x, formula, us, np.repeat(np.arange(count), 8))


def test_a_network_learns_what_the_formula_leaves(monkeypatch):
    monkeypatch.setattr(residual, "STEPS", 150)
    network = residual.trained(made_up(60, 0), 0)
    assert network == residual.trained(made_up(60, 0), 0)
    unseen = made_up(60, 1)
    by_formula = residual.figures(unseen, unseen.formula)
    by_both = residual.figures(unseen, residual.corrected(network, unseen))
    assert by_both["pick"]["mean"] - 1 < 0.5 * (by_formula["pick"]["mean"] - 1)
    assert by_both["best of three"]["mean"] <= by_both["pick"]["mean"]
    assert residual.figures(unseen, unseen.us)["pick"]["worst"] == 1
    picked = [np.minimum.reduceat(us, unseen.starts) for us in (unseen.formula, residual.corrected(network, unseen))]
    assert np.log(picked[0] / picked[1]).mean() == pytest.approx(0, abs=0.02)


def test_samples_of_several_sweeps_keep_their_products():
    parts = [made_up(3, 0), made_up(2, 1)]
    every = residual.joined(parts)
    assert len(every.starts) == 5
    some = every.of(np.array([False, True, False, False, True]))
    np.testing.assert_array_equal(some.us, np.concatenate([parts[0].us[8:16], parts[1].us[8:]]))
    assert len(some.starts) == 2


def test_what_ships_has_the_inputs_of_today():
    content = json.loads(shipped.FILE.read_text())
    rows = residual.fit.flatten(residual.fit.recorded(residual.HELD)[:1])
    data = residual.samples(rows)
    assert data.inputs.shape == (len(data.us), len(content["mean"]))
    assert np.all(np.abs(residual.corrected(content, data) / data.formula - 1) <= shipped.MOST + 1e-12)
