"""Cases of the layers of both APIs of Flax: equal to Flax's own layer and the activation after it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checks import integers

import cutjax

# Inputs, computation, parameters, the product's result. Without a dtype for the computation Flax promotes.
DTYPES = {
    "f32": ("float32", None, "float32", None),
    "promoted": ("bfloat16", None, "float32", None),
    "bf16": ("float32", "bfloat16", "float32", None),
    "f16": ("float16", "float16", "float16", None),
    "wide result": ("bfloat16", "bfloat16", "bfloat16", "float32"),
}
# An equation, the shapes of inputs, kernel and bias. The first three are one product of matrices, the last three not.
EINSUMS = (
    ("btd,dhk->bthk", (2, 3, 8), (8, 4, 2), (4, 2)),
    ("btd,bkd->kbt", (2, 3, 8), (2, 5, 8), (5, 2)),
    ("...ab,cb->...ca", (2, 3, 4, 8), (5, 8), (5,)),
    ("bd,bd->bd", (3, 8), (3, 8), (3, 8)),
    ("btd,dk->bk", (2, 3, 8), (8, 5), (5,)),
    ("b...d,...dk->b...k", (2, 3, 8), (1, 8, 5), (1, 5)),
)


def whole(key: Any, shape: Any, dtype: Any, **how: Any) -> jax.Array:
    """An initializer of -2..2, of which all sums here are exact."""
    return integers(sum(shape), shape, dtype)


def same_numbers(got: Any, expected: Any) -> None:
    """Asserts that two lists of leaves are equal, dtypes included; -0 is 0."""
    assert len(got) == len(expected)
    for x, y in zip(got, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def kernels(fn: Callable[..., Any], *args: Any) -> tuple[list[str], str]:
    """Names of the kernels that a function launches where it must, and its text."""
    with cutjax.use_backend("cuda"):  # "auto" may leave small products to XLA
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r'@cutjax_launch.*kernel = "(\w+)"', text), text


def experts(x: jax.Array, params: dict[str, jax.Array], choose: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """A mixture by its definition: every expert computes every token, ``choose(logits)`` are the weights."""

    @jax.jit
    def mixture(x, params, weights):
        g, u = (jnp.einsum("btd,edh->bteh", x, params[name]) for name in ("gate_kernel", "up_kernel"))
        y = jnp.einsum("bteh,ehn->bten", jax.nn.silu(g) * u, params["down_kernel"])
        return (weights[..., None] * y).sum(-2)

    return mixture(x, params, choose(x @ params["router"]))


def of_groups(logits: jax.Array, bias: jax.Array, k: int, groups: int, of_token: int, scale: float) -> jax.Array:
    """The weights of DeepSeek-V3's router, token by token in numpy: [tokens, experts]."""
    scores, out = 1 / (1 + np.exp(-np.asarray(logits, np.float64))), np.zeros(logits.shape)
    for at in np.ndindex(logits.shape[:-1]):
        biased = (scores[at] + bias).reshape(groups, -1)
        best = np.sort(biased, -1)[:, -2:].sum(-1)
        masked = np.where(np.isin(np.arange(groups), np.argsort(-best)[:of_token])[:, None], biased, -np.inf).ravel()
        chosen = np.argsort(-masked)[:k]
        out[at][chosen] = scale * scores[at][chosen] / scores[at][chosen].sum()
    return jax.device_put(out.astype(np.float32))
