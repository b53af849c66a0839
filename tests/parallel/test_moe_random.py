"""Random layers of experts over devices, in every form: values and gradients are those of one device.

DRAWS in the environment says how many are drawn: 40 after a change of how experts lie over devices.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, normal, scaled

import cutjax

P = jax.P


def layer(seed):
    """A layer of one device, the same over devices, its arguments, and what it is."""
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    data, model = pick((1, 2), (2, 2), (2, 2), (1, 4), (2, 1), (1, 3))
    kinds, size = (jax.sharding.AxisType.Auto,) * 2, data * model
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=kinds, devices=jax.devices()[:size])
    tokens, experts = int(rng.integers(0, 7)) * size, int(rng.integers(1, 4)) * model
    d, h, n = (int(x) for x in rng.integers(1, 17, 3))
    k, layout = int(rng.integers(1, experts + 1)), pick("nn", "nt")
    form = pick("exchange", "exchange", "ragged", "gather", "auto")
    over = {"form": form, "room": pick(0.3, 0.7, 1.5, 4.0), "parts": pick(1, 1, 2), "expert_axis": "model"}
    options = {"k": k, "layout": layout, "save": pick("default", "recompute"), "scoring": pick("softmax", "sigmoid")}
    options |= {"renormalize": pick(True, False), "activation": pick(jax.nn.silu, jnp.tanh)}
    shapes = ((experts, d, h), (experts, d, h), (experts, h, n))
    weights = [scaled(seed + i, s if layout == "nn" else (s[0], s[2], s[1])) for i, s in enumerate(shapes)]
    uneven = (jnp.arange(experts) < 2) & (jnp.arange(tokens)[:, None] < tokens // 2)
    logits = 2 * normal(seed + 3, (tokens, experts)) + pick(0, 0, 5) * uneven.astype(jnp.float32)
    args = [normal(seed + 4, (tokens, d)), logits, *weights]
    rows, of_experts = P(("data", "model")), P("model")
    specs = [rows, rows, *3 * [of_experts]]
    more = []
    if rng.random() < 0.3:
        more, specs, args = ["bias"], [*specs, P()], [*args, normal(seed + 5, (experts,))]
    if rng.random() < 0.3:
        more, specs, args = [*more, "beta"], [*specs, P()], [*args, jnp.float32(1.25)]

    def fn(*args, **over):
        given = dict(zip(more, args[5:], strict=True))
        found = dict(options)
        if "bias" in given:
            found["selection_bias"] = given["bias"]
        if "beta" in given:
            found["activation"] = lambda x: options["activation"](given["beta"] * x)
        return cutjax.moe(*args[:5], **found, **over)

    divided = jax.shard_map(
        lambda *args: fn(*args, **over), mesh=mesh, in_specs=tuple(specs), out_specs=rows, check_vma=pick(True, False)
    )
    return fn, divided, args, f"{dict(mesh.shape)} {[x.shape for x in args]} {over} {options} {more}"


@pytest.mark.parametrize("seed", range(int(os.environ.get("DRAWS", "1"))))
def test_layers(seed):
    fn, divided, args, what = layer(seed)

    def both(f):
        def loss(*args):
            out = f(*args)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, range(len(args)), has_aux=True))(*args)

    try:
        close(both(divided), both(fn), 2e-5)  # sums in another order
    except Exception as error:
        error.add_note(what)
        raise
