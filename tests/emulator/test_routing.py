"""Kernels that route tokens, run on the CPU: the choice of XLA's top-k bit for bit, and its order of pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax.kernels import routing
from cutjax.kernels.device import reference
from cutjax.primitives.route import route_p
from emulator import device

# tokens, experts, k, dtype, config; then what else there is.
CASES = {
    "two steps of a block": ((300, 64, 4, "bfloat16", (128, 2, 3)), {}),
    "alone": ((70, 128, 8, "float16", (128, 8, 1)), {}),
    "one lane": ((300, 64, 4, "float32", (128, 1, 2)), {}),
    "ragged pieces": ((33, 60, 5, "float32", (128, 4, 2)), {}),
    "single elements": ((33, 61, 5, "bfloat16", (128, 32, 2)), {}),
    "all experts": ((9, 6, 6, "bfloat16", (128, 2, 1)), {}),
    "many choices": ((6, 512, 32, "float32", (128, 32, 2)), {}),
    "many experts": ((5, 1024, 8, "bfloat16", (128, 1, 1)), {}),
    "not renormalized": ((20, 40, 8, "float32", (128, 2, 1)), {"renormalize": False}),
    "sigmoid": ((20, 40, 8, "float16", (128, 4, 2)), {"scoring": "sigmoid"}),
    "sigmoid, all": ((20, 40, 8, "float32", (128, 4, 1)), {"scoring": "sigmoid", "renormalize": False}),
    "bias": ((20, 256, 8, "bfloat16", (128, 16, 3)), {"scoring": "sigmoid", "bias": (1, 256)}),
    "bias of tokens": ((20, 40, 8, "float32", (128, 4, 1)), {"renormalize": False, "bias": (20, 1)}),
    "batch": ((11, 24, 3, "float32", (128, 2, 2)), {"batch": (2, 2)}),
    "batch of biases": ((11, 24, 3, "float32", (128, 2, 1)), {"batch": (1,), "bias": (3, 11, 24)}),
    "batch, one bias": ((11, 24, 3, "bfloat16", (128, 1, 2)), {"batch": (3,), "bias": (1, 1, 24)}),
}


def logits_of(rng, shape, special):
    """Some tokens of few values, of zeros and NaN of either sign and infinities, and without a choice."""
    x = rng.standard_normal(shape).astype(np.float32)
    if special:
        places = rng.random(shape)
        for below, value in ((0.3, np.nan), (0.26, -np.nan), (0.22, -np.inf), (0.2, np.inf), (0.15, -0.0), (0.08, 0.0)):
            x = np.where(places < below, np.float32(value), x)
        x[..., 1::3, :] = rng.integers(-2, 3, x[..., 1::3, :].shape)
        x[..., 2::5, :] = -np.inf
    return x


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_that_of_top_k(name):
    (tokens, experts, k, dtype, config), how = CASES[name]
    how = {"scoring": "softmax", "renormalize": True, "bias": None, "batch": (), **how}
    rng = np.random.default_rng(0)
    # Scores to which a bias is added are as exact as exponentials are: none of those here are nearly equal.
    logits = jnp.asarray(logits_of(rng, (*how["batch"], tokens, experts), how["bias"] is None), jnp.dtype(dtype))
    bias = None if how["bias"] is None else jnp.asarray(rng.standard_normal(how["bias"]), jnp.float32)
    arrays = [logits] if bias is None else [logits, bias]
    params = {"k": k, "scoring": how["scoring"], "renormalize": how["renormalize"]}
    asked = routing.Problem.of(logits, bias, **params, device=reference("sm_90a"))
    kernel = routing.resolve(asked, routing.Config(*config))
    with device.emulated():
        call = kernel.call()
    machine = device.Machine(seed=1, eagerness=3)
    got = machine.execute(
        call, list(map(np.asarray, arrays)), [device.poison(x.shape, x.dtype) for x in kernel.results]
    )
    expected = jax.jit(lambda *xs: route_p.bind(*xs, **params, backend="xla"))(*arrays)
    for i, (x, y) in enumerate(zip(got, expected, strict=False)):
        if i == 1:
            np.testing.assert_allclose(x, y, rtol=2e-6)
        else:
            np.testing.assert_array_equal(x, y)
