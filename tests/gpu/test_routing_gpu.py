"""Tokens routed on the device, beside XLA's top-k and sorts: the same experts and rows, weights to rounding."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.binding import lowering
from cutjax.kernels import routing
from cutjax.kernels.device import device_of
from cutjax.primitives.route import route_p

pytestmark = pytest.mark.gpu

KERNEL = r"route_(bf16|f16|f32)_\d"

# tokens, experts, k, dtype
CASES = [
    (1, 8, 2, "bfloat16"),
    (37, 61, 5, "bfloat16"),
    (128, 128, 8, "float32"),
    (1000, 64, 4, "float16"),
    (8192, 8, 2, "bfloat16"),
    (4097, 256, 8, "float32"),
    (32768, 128, 8, "bfloat16"),
    (3000, 1024, 10, "bfloat16"),
    (999, 512, 32, "float32"),
]
OPTIONS = {
    "default": {},
    "all": {"renormalize": False},
    "sigmoid": {"scoring": "sigmoid"},
    "sigmoid, all": {"scoring": "sigmoid", "renormalize": False},
}


def logits_of(tokens, experts, dtype, seed=0):
    """Some tokens of few values, and with NaN, infinities and zeros of either sign."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, experts)).astype(np.float32)
    x[1::5] = rng.integers(-2, 3, x[1::5].shape)
    places = rng.random(x[2::5].shape)
    for below, value in ((0.2, np.nan), (0.16, -np.nan), (0.12, -np.inf), (0.1, np.inf), (0.08, -0.0), (0.04, 0.0)):
        x[2::5] = np.where(places < below, np.float32(value), x[2::5])
    x[3::50] = -np.inf
    return jnp.asarray(x, jnp.dtype(dtype))


def both(fn, *args):
    """The function by kernels, which must run, and by XLA."""
    with cutjax.use_backend("cuda"):
        compiled = jax.jit(fn).lower(*args)
        assert re.search(KERNEL, compiled.as_text())
        got = compiled.compile()(*args)
    with cutjax.use_backend("xla"):
        return got, jax.jit(fn)(*args)


def same(got, expected):
    for name, x, y in zip(expected._fields, got, expected, strict=True):
        if name == "weights":
            np.testing.assert_allclose(x, y, rtol=4e-6, atol=1e-30)
        else:
            np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_of_a_routing(case, name):
    tokens, experts, k, dtype = case
    same(*both(functools.partial(cutjax.route, k=k, **OPTIONS[name]), logits_of(tokens, experts, dtype)))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shape", [(64,), (500, 1), (500, 64)], ids=str)
def test_bias(shape, scoring):
    """The bias decides, or is small: which of two is greater that are equal but for rounding is for rounding to say."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((500, 64)), jnp.float32)
    bias = rng.permutation(int(np.prod(shape))).reshape(shape) % 64 / (1024 if shape[-1] == 1 else 8)
    bias = jnp.asarray(bias, jnp.float32)
    route = functools.partial(cutjax.route, k=6, scoring=scoring)
    same(*both(lambda x, b: route(x, selection_bias=b), logits, bias))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=str)
def test_batches(mapped):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((3, 200, 16) if mapped[0] == 0 else (200, 16)), jnp.bfloat16)
    bias = jnp.asarray(rng.permutation(48).reshape(3, 16)[: 3 if mapped[1] == 0 else 1], jnp.float32)
    bias = bias if mapped[1] == 0 else bias[0]
    same(*both(jax.vmap(lambda x, b: cutjax.route(x, 3, selection_bias=b), mapped), logits, bias))


# Threads, lanes and blocks.
CONFIGS = [(128, 1, 1), (256, 1, 40), (1024, 4, 128), (1024, 32, 7), (512, 2, 200), (128, 8, 132)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs(config):
    logits = logits_of(10000, 128, "bfloat16")
    params = {"k": 8, "scoring": "softmax", "renormalize": True}
    problem = routing.Problem.of(logits, None, **params, device=device_of(lowering.target()))
    kernel = routing.resolve(problem, routing.Config(*config))
    call = kernel.call()
    got = jax.jit(lambda x: lowering.launch(call, kernel.results, x))(logits)
    same(cutjax.Routing(*got[:5]), cutjax.Routing(*route_p.bind(logits, **params, backend="xla")))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name):
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((700, 32)), jnp.float32)

    def pulled(x, g):
        weights, pull = jax.vjp(lambda x: cutjax.route(x, 4, **OPTIONS[name]).weights, x)
        return weights, *pull(g)

    g = jnp.asarray(np.random.default_rng(2).standard_normal((700, 4)), jnp.float32)
    for got, expected in zip(*both(pulled, logits, g), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_it_repeats():
    logits = logits_of(32768, 128, "bfloat16", seed=3)
    with cutjax.use_backend("cuda"):
        run = jax.jit(functools.partial(cutjax.route, k=8))
    first = run(logits)
    equal = jax.jit(lambda a, b: jnp.all(jnp.stack([jnp.all((x == y) | (x != x)) for x, y in zip(a, b, strict=True)])))
    assert all(bool(equal(run(logits), first)) for _ in range(50))
