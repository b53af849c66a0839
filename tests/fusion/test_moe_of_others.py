"""Layers of experts in the ways of MaxText and of Marin: under cutjax.patch, fused, and with cutjax.ragged_dot.

Written after what these do, in their order of operations: MaxText's two ways, by lax.ragged_dot and with a capacity,
and Marin's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from checks import close, normal, scaled
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import cutjax

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("kernels_win")]

BF16 = jnp.bfloat16
TOKENS, WIDTH, HIDDEN, EXPERTS, K = 96, 64, 128, 4, 2


@jax.custom_vjp
def in_order(rows, order):
    """Rows in the order of a permutation; its derivative is a gather too."""
    return rows[order]


in_order.defvjp(lambda rows, order: (rows[order], order), lambda order, g: (g[jnp.argsort(order)], None))


def maxtext(x, w, ragged_dot=lax.ragged_dot):
    """Each token's row k times, sorted by expert, padded to whole tiles; results sorted back, and summed by weights."""
    tokens, logits = x.reshape(-1, x.shape[-1]), jnp.einsum("bsd,de->bse", x, w["gate"])
    weights, chosen = lax.top_k(logits, K)
    weights = jax.nn.softmax(weights.astype(jnp.float32), axis=-1).astype(x.dtype)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=EXPERTS)
    rows = in_order(jnp.repeat(tokens, K, axis=0), order)
    count, tile = len(rows), 128

    def multiply(rows, weights):
        padded = lax.pad(rows, jnp.zeros((), rows.dtype), [(0, -count % tile, 0), (0, 0, 0)])
        with set_xla_metadata(ragged_dot_tiling="128,64,64"):  # for TPUs
            return ragged_dot(padded, weights, sizes, preferred_element_type=x.dtype)[:count]

    hidden = jax.nn.silu(multiply(rows, w["wi_0"])) * multiply(rows, w["wi_1"])
    out = in_order(multiply(hidden, w["wo"]), jnp.argsort(order)).reshape(len(tokens), K, -1)
    wide = (out.astype(jnp.float32), weights.reshape(-1, K).astype(jnp.float32))
    return jnp.einsum("tkd,tk->td", *wide).astype(x.dtype).reshape(x.shape)


def maxtext_with_capacity(x, w, ragged_dot=None):
    """As many places for each expert: tokens are brought to them, and back, by products with masks of 0 and 1."""
    logits = jnp.einsum("bsd,de->bse", x, w["gate"])
    weights, chosen = lax.top_k(logits, K)
    weights = jax.nn.softmax(weights.astype(jnp.float32), axis=-1).astype(x.dtype)
    capacity = 3 * x.shape[1] * K // EXPERTS
    picked = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)  # [b, s, k, e]
    flat = picked.reshape(len(x), -1, EXPERTS)
    place = ((jnp.cumsum(flat, axis=1) - 1) * flat).sum(-1).reshape(chosen.shape)
    places = jax.nn.one_hot(place, capacity, dtype=x.dtype)  # none of a place beyond the last
    mask = jnp.einsum("bske,bskc->bskec", picked.astype(x.dtype), places)
    rows = jnp.einsum("bsd,bsec->ebcd", x, mask.sum(2))
    hidden = jax.nn.silu(jnp.einsum("ebcd,edh->ebch", rows, w["wi_0"])) * jnp.einsum("ebcd,edh->ebch", rows, w["wi_1"])
    out = jnp.einsum("ebch,ehd->ebcd", hidden, w["wo"])
    return jnp.einsum("ebcd,bsec->bsd", out, jnp.einsum("bskec,bsk->bsec", mask, weights))


def marin(x, w, ragged_dot=lax.ragged_dot):
    """Rows gathered by expert, the gate and what it gates as one product, results added where the rows came from."""
    tokens = x.reshape(-1, x.shape[-1])
    scores, chosen = lax.top_k(jnp.einsum("td,de->te", tokens, w["gate"]), K)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    order = jnp.argsort(chosen.reshape(-1))
    source = (jnp.arange(len(tokens) * K, dtype=jnp.int32) // K)[order]
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    both = ragged_dot(tokens[source], jnp.concatenate([w["wi_0"], w["wi_1"]], axis=-1), sizes)
    gate, up = jnp.split(both, [HIDDEN], axis=-1)
    out = ragged_dot(jax.nn.silu(gate) * up, w["wo"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(tokens).at[source].add(out, mode="drop").reshape(x.shape)


LAYERS = {"maxtext": maxtext, "capacity": maxtext_with_capacity, "marin": marin}
SHAPES = {"gate": (WIDTH, EXPERTS), "wi_0": (EXPERTS, WIDTH, HIDDEN), "wi_1": (EXPERTS, WIDTH, HIDDEN)}
SHAPES["wo"] = (EXPERTS, HIDDEN, WIDTH)
WEIGHTS = {name: scaled(i, shape, BF16) for i, (name, shape) in enumerate(SHAPES.items())}
X = normal(9, (2, TOKENS // 2, WIDTH), BF16)


def step(layer):
    """A function's result with its gradients."""

    def loss(x, w):
        y = layer(x, w)
        return (y.astype(jnp.float32) ** 2).sum(), y

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


def patched(layer):
    with cutjax.patch():
        return jax.jit(step(layer))


WAYS = {
    "patch": patched,
    "fuse": lambda layer: jax.jit(cutjax.fuse(step(layer))),
    "drop-in": lambda layer: jax.jit(step(functools.partial(layer, ragged_dot=cutjax.ragged_dot))),
}
CASES = [(way, name) for way in WAYS for name in LAYERS if (way, name) != ("drop-in", "capacity")]
# Products of the experts that are ours, at least: several of one operand, and sums of two, may be one.
LEAST = {
    "maxtext": {"cutjax_grouped_gemm[": 4, "cutjax_grouped_outer[": 2},
    "capacity": {"cutjax_gemm[": 8},
    "marin": {"cutjax_grouped_gemm[": 4, "cutjax_grouped_outer[": 2},
}


@pytest.mark.parametrize(("way", "name"), CASES)
def test_layers(way, name):
    """No product in groups is left to XLA, forward or backward; values and gradients are those of plain JAX."""
    run = WAYS[way](LAYERS[name])
    with jax.numpy_dtype_promotion("standard"):
        text = str(jax.make_jaxpr(run)(X, WEIGHTS))
        close(run(X, WEIGHTS), jax.jit(step(LAYERS[name]))(X, WEIGHTS), 2**-5)
    assert "ragged_dot_general" not in text
    for primitive, count in LEAST[name].items():
        assert text.count(primitive) >= count


@pytest.mark.parametrize("name", ["maxtext", "marin"])
def test_as_one_call(name):
    """cutjax.moe is such a layer."""
    tokens = X.reshape(TOKENS, WIDTH)
    with jax.numpy_dtype_promotion("standard"):
        y = cutjax.moe(tokens, tokens @ WEIGHTS["gate"], *(WEIGHTS[x] for x in ("wi_0", "wi_1", "wo")), k=K)
        close(y.reshape(X.shape), LAYERS[name](X, WEIGHTS), 2**-5)
