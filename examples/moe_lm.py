"""Train a small character-level transformer with `cutjax.moe`, and check it against all experts for every token.

    python examples/moe_lm.py [--steps N] [--backend auto|cuda|xla] [--out loss.png]

The model is that of char_lm.py with a mixture of experts in each layer. It is trained twice, from the same weights on
the same batches: once with `cutjax.moe`, once with a layer that computes all experts and multiplies all but k of them
by zero. The program prints what runs each product and how even the experts' load became, draws both loss curves, and
fails if they part. On a GPU the model is larger, computes in bfloat16, and is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import char_lm
import jax
import jax.numpy as jnp
import numpy as np
import optax
from char_lm import CHARACTERS, TEXT, VOCABULARY, device_name, normalize

import cutjax


@dataclasses.dataclass(frozen=True)
class Setup(char_lm.Setup):
    """Sizes of the model and of its training; how many experts there are, how wide, and how many a token is sent to."""

    experts: int = 8
    hidden: int = 0
    k: int = 2
    balance: float = 0.01  # coefficients of the two losses of the router
    z: float = 0.001


# Calibrated: two right layers differ in rounding only, which moves the first 10 losses by at most 5e-7 in f32 and 4e-3
# in bf16 (measured on a CPU), the mean of later ones by 5e-3. A gradient that lacks one expert's `down` moves the first
# 10 by 1.5e-2.
CPU = Setup(64, 4, 2, 64, 16, 200, 3e-3, jnp.float32, 1e-5, 1e-3, hidden=64)
GPU = Setup(1024, 16, 4, 256, 64, 300, 5e-4, jnp.bfloat16, 0.01, 0.02, experts=16, hidden=2048)


def every_expert(x, router_logits, gate, up, down, k):
    """What `cutjax.moe` computes, with `jnp.einsum` over all experts: the layer to check against."""
    best, indices = jax.lax.top_k(router_logits.astype(jnp.float32), k)
    chosen = jax.nn.one_hot(indices, gate.shape[0])
    weights = jnp.einsum("...tk,...tke->...te", jax.nn.softmax(best), chosen)
    hidden = jax.nn.silu(jnp.einsum("...td,edh->...teh", x, gate)) * jnp.einsum("...td,edh->...teh", x, up)
    return jnp.einsum("...teh,ehd->...td", hidden * weights[..., None].astype(x.dtype), down)


def init(key: jax.Array, setup: Setup) -> dict:
    """Random weights; those of the layers are stacked on a leading axis, for `lax.scan`."""
    width, layers, experts, hidden = setup.width, setup.layers, setup.experts, setup.hidden
    shapes = {
        "embed": (VOCABULARY, width),
        "position": (setup.context, width),
        "layers": {
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "router": (layers, width, experts),
            "gate": (layers, experts, width, hidden),
            "up": (layers, experts, width, hidden),
            "down": (layers, experts, hidden, width),
        },
        "head": (width, VOCABULARY),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([jax.random.normal(k, s) * s[-2] ** -0.5 for k, s in zip(keys, leaves, strict=True)])


def forward(moe, setup: Setup, params: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The model: tokens [batch, time] -> f32 logits [batch, time, vocabulary], and the layers' router logits."""
    params = jax.tree.map(lambda w: w.astype(setup.dtype), params)
    batch, length = tokens.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    head_width = setup.width // setup.heads

    def layer(x, w):
        qkv = cutjax.gemm(normalize(x), w["qkv"]).reshape(batch, length, 3, setup.heads, head_width)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # each [batch, heads, time, head_width]
        scores = cutjax.gemm(q, k, layout="nt", out_dtype=jnp.float32) * head_width**-0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(setup.dtype)
        mixed = cutjax.gemm(weights, v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + cutjax.gemm(mixed, w["out"])
        y = normalize(x)
        router_logits = jnp.matmul(y, w["router"], preferred_element_type=jnp.float32)
        x = x + moe(y, router_logits, w["gate"], w["up"], w["down"], k=setup.k)
        return x, router_logits

    x = params["embed"][tokens] + params["position"][:length]
    x, router_logits = jax.lax.scan(layer, x, params["layers"])
    return cutjax.gemm(normalize(x), params["head"], out_dtype=jnp.float32), router_logits


def sample(setup: Setup, number: jax.Array) -> jax.Array:
    """The batch that belongs to a step: [batch, context + 1]."""
    text = jnp.asarray([CHARACTERS.index(c) for c in TEXT], jnp.int32)
    starts = jax.random.randint(jax.random.key(number), (setup.batch, 1), 0, len(TEXT) - setup.context)
    return text[starts + jnp.arange(setup.context + 1)]


def make_step(moe, setup: Setup, optimizer):
    """The training step ``(state, step number) -> (state, cross-entropy)``."""

    def loss(params, tokens):
        predicted, router_logits = forward(moe, setup, params, tokens[:, :-1])
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:]).mean()
        balance = jax.vmap(lambda x: cutjax.load_balance_loss(x, setup.k))(router_logits).mean()  # over the layers
        return cross_entropy + setup.balance * balance + setup.z * cutjax.router_z_loss(router_logits), cross_entropy

    def step(state, number):
        params, optimizer_state = state
        gradient, cross_entropy = jax.grad(loss, has_aux=True)(params, sample(setup, number))
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), cross_entropy

    return step


def shares(setup: Setup, params: dict) -> np.ndarray:
    """The share of the (token, expert) pairs of a batch that each expert gets, [layers, experts]."""
    router_logits = forward(cutjax.moe, setup, params, sample(setup, jnp.int32(0))[:, :-1])[1]
    sizes = cutjax.route(router_logits.reshape(setup.layers, -1, setup.experts), setup.k).group_sizes
    return np.asarray(sizes / sizes.sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="training steps (default: 200 on a CPU, 300 on a GPU)")
    parser.add_argument("--backend", choices=("auto", "cuda", "xla"), default="auto", help="what runs the products")
    parser.add_argument("--out", type=pathlib.Path, default="build/moe_lm.png", help="where the loss curves go")
    args = parser.parse_args()

    on_gpu = jax.default_backend() == "gpu"
    setup = GPU if on_gpu else CPU
    setup = dataclasses.replace(setup, steps=max(1, args.steps or setup.steps))
    optimizer = optax.adam(optax.warmup_constant_schedule(0.0, setup.learning_rate, 20))

    def fresh_state():
        params = init(jax.random.key(0), setup)
        return params, optimizer.init(params)

    size = sum(w.size for w in jax.tree.leaves(fresh_state()[0]))
    print(f"{size / 1e6:.1f} M weights, {setup.k} of {setup.experts} experts, {np.dtype(setup.dtype).name}")
    print(f"{device_name()}, jax {jax.__version__}\n")
    layers = {"cutjax.moe": cutjax.moe, "every expert": every_expert}
    steps = {name: jax.jit(make_step(f, setup, optimizer), donate_argnums=0) for name, f in layers.items()}

    with cutjax.use_backend(args.backend):
        print(cutjax.explain(steps["cutjax.moe"])(fresh_state(), 0), "\n")
        states, losses = char_lm.train_each(steps, fresh_state, setup.steps)
        for i, share in enumerate(shares(setup, states["cutjax.moe"][0])):
            print(f"layer {i}: the experts' shares are {share.min():.1%} to {share.max():.1%}")
        char_lm.plot(losses, setup, args.out)
        print(f"loss curves: {args.out}")
        if on_gpu:
            ours, theirs = char_lm.time_steps(steps, states).values()
            print(f"a training step: cutjax.moe {ours:.2f} ms, every expert {theirs:.2f} ms, ratio {theirs / ours:.3f}")
        char_lm.check(losses, setup)


if __name__ == "__main__":
    main()
