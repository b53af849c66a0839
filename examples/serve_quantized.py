"""Decode with a Llama of quantized weights, read from a safetensors file as GPTQ, AWQ, gpt-oss or DeepSeek write them.

    python examples/serve_quantized.py [--weights int4|int8|bf16|gptq|awq|mxfp4|fp8] [--head] [--file FILE]
                                       [--config cpu|gpu]

A file that is not there is written first, with random weights. The program prints tokens a second, how much memory the
weights take, and what multiplies them. Layers of one input are one product: queries, keys and values, and an MLP's gate
and what it gates. Norms and embeddings are in bf16 in all, and so is the head unless --head quantizes it too.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import WEIGHTS, Tensors, bytes_of, linear, load, random_linear, save
from model import rotate

import cutjax

Array = jax.Array
Params = dict[str, Any]
# The products of a block, and the layers of the file of whose columns each is made.
PRODUCTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes of the model; activations are in `dtype`."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int
    vocabulary: int = 256
    dtype: str = "bfloat16"

    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block by their names, with the sizes n and k."""
        keys = self.kv_heads * self.width // self.heads
        return {
            "self_attn.q_proj": (self.width, self.width),
            "self_attn.k_proj": (keys, self.width),
            "self_attn.v_proj": (keys, self.width),
            "self_attn.o_proj": (self.width, self.width),
            "mlp.gate_proj": (self.hidden, self.width),
            "mlp.up_proj": (self.hidden, self.width),
            "mlp.down_proj": (self.width, self.hidden),
        }


CONFIGS = {"cpu": Setup(256, 4, 2, 512, 2), "gpu": Setup(4096, 32, 8, 14336, 8, vocabulary=32768)}


def random_checkpoint(setup: Setup, weights: str, seed: int = 0) -> Tensors:
    """Returns the arrays of a checkpoint with random weights."""
    rng = np.random.default_rng(seed)
    shape = (setup.vocabulary, setup.width)
    tensors = {"model.embed_tokens.weight": rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)}
    tensors |= random_linear(rng, "lm_head", *shape, "bf16")
    for i in range(setup.layers):
        for name, (n, k) in setup.linears().items():
            tensors |= random_linear(rng, f"model.layers.{i}.{name}", n, k, weights)
        for name in NORMS:
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(setup.width, jnp.bfloat16)
    tensors["model.norm.weight"] = np.ones(setup.width, jnp.bfloat16)
    return tensors


def read(tensors: Tensors, setup: Setup, weights: str = "", head: bool = False) -> tuple[Params, str]:
    """Returns a checkpoint's parameters on the device, and the layout of the products by its linear layers.

    Args:
      tensors: those of a file.
      setup: of its model.
      weights: as `checkpoints.linear` has it.
      head: whether it is quantized as the layers are.
    """
    layers, layouts = [], set()
    for i in range(setup.layers):
        found = {name: linear(tensors, f"model.layers.{i}.{name}", weights) for name in setup.linears()}
        layouts |= {layout for _, layout in found.values()}
        (layout,) = layouts
        joined = {name: beside([found[part][0] for part in parts], layout) for name, parts in PRODUCTS.items()}
        layers.append(joined | {name: jnp.asarray(tensors[f"model.layers.{i}.{name}.weight"]) for name in NORMS})
    names = {"embed": "model.embed_tokens", "norm": "model.norm"}
    params: Params = {name: jnp.asarray(tensors[f"{of}.weight"]) for name, of in names.items()}
    params["head"], _ = linear(tensors, "lm_head", weights if head else "")
    return {**params, "layers": layers}, layout


def beside(weights: Sequence[Any], layout: str) -> Any:
    """Returns weights whose columns are those of several, arrays or quantized operands, beside each other."""
    axis = -1 if layout == "nn" else -2
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis), *weights)


def multiplied(x: Array, w: Any, layout: str) -> Array:
    """Returns ``x @ w`` of an array or a quantized operand; of a triple ``(w, a, b)`` with a LoRA adapter beside it."""
    if isinstance(w, tuple):
        w, a, b = w
        narrow = cutjax.gemm(x, a.astype(x.dtype))
        y = multiplied(x, w, layout)
        return cutjax.gemm(narrow, b.astype(x.dtype), epilogue=lambda acc, y: acc + y.astype(acc.dtype), operands=(y,))
    return cutjax.gemm(x, w, layout=layout)


def normalized(x: Array, weight: Array) -> Array:
    """RMS norm, in f32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def logits(params: Params, tokens: Array, cache: list | None, position: Any, setup: Setup, layout: str):
    """Returns f32 logits ``[batch, time, vocabulary]`` of tokens ``[batch, time]`` from a position on, and caches.

    With a cache, of each layer keys and values ``[batch, context, kv_heads, size]``, tokens see what is before them.
    """
    batch, length = tokens.shape
    size = setup.width // setup.heads
    positions = position + jnp.arange(length)
    x, written = params["embed"][tokens].astype(setup.dtype).reshape(batch * length, -1), []
    for i, w in enumerate(params["layers"]):
        y = normalized(x, w["input_layernorm"])
        y = multiplied(y, w["self_attn.qkv_proj"], layout).reshape(batch, length, -1, size)
        q, k, v = jnp.split(y, [setup.heads, setup.heads + setup.kv_heads], 2)
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            pairs = zip(cache[i], (k, v), strict=True)
            k, v = (jax.lax.dynamic_update_slice_in_dim(old, new, position, 1) for old, new in pairs)
        written.append((k, v))
        q = q.reshape(batch, length, setup.kv_heads, -1, size)
        scores = jnp.einsum("btkqd,bskd->bkqts", q, k).astype(jnp.float32) * size**-0.5
        seen = jnp.arange(k.shape[1]) <= positions[:, None]
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
        mixed = jnp.einsum("bkqts,bskd->btkqd", shares, v).reshape(x.shape)
        x = x + multiplied(mixed, w["self_attn.o_proj"], layout)
        y = normalized(x, w["post_attention_layernorm"])
        gate, up = jnp.split(multiplied(y, w["mlp.gate_up_proj"], layout), 2, -1)
        x = x + multiplied(jax.nn.silu(gate) * up, w["mlp.down_proj"], layout)
    last = normalized(x, params["norm"])
    head = params["head"]
    head, layout = (head.astype(x.dtype), "nt") if isinstance(head, Array) else (head, layout)
    found = cutjax.gemm(last, head, layout=layout, out_dtype=jnp.float32)
    return found.reshape(batch, length, -1), written


def decoded(params: Params, prompts: Array, count: int, setup: Setup, layout: str) -> Array:
    """Returns the likeliest tokens ``[sequences, count]`` after prompts ``[sequences, time]``."""
    sequences, start = prompts.shape
    blank = jnp.zeros((sequences, start + count, setup.kv_heads, setup.width // setup.heads), setup.dtype)
    found, cache = logits(params, prompts, [(blank, blank)] * setup.layers, 0, setup, layout)

    def step(carry, number):
        cache, token = carry
        found, cache = logits(params, token[:, None], cache, start + number, setup, layout)
        return (cache, jnp.argmax(found[:, -1], -1).astype(token.dtype)), token

    first = jnp.argmax(found[:, -1], -1).astype(prompts.dtype)
    return jax.lax.scan(step, (cache, first), jnp.arange(count))[1].T


def main(argv: Sequence[str] | None = None) -> np.ndarray:
    """The command line; returns the tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", choices=WEIGHTS, default="int4", help="int8 and int4 are made of a file in bf16")
    parser.add_argument("--head", action="store_true", help="quantize the head as the layers, to int8 or int4")
    parser.add_argument("--file", type=pathlib.Path, help="read from, or written first (default: a temporary one)")
    parser.add_argument("--config", choices=CONFIGS, default="gpu" if jax.default_backend() == "gpu" else "cpu")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args(argv)
    if args.head and args.weights not in ("int8", "int4"):
        parser.error("--head is for int8 and int4: the other formats' files have the head in bf16")
    setup = CONFIGS[args.config]

    with tempfile.TemporaryDirectory() as folder:
        path = args.file or pathlib.Path(folder) / f"{args.weights}.safetensors"
        if not path.exists():
            save(path, random_checkpoint(setup, "bf16" if args.weights in ("int8", "int4") else args.weights))
        params, layout = read(load(path), setup, args.weights, args.head)
        params = jax.block_until_ready(params)
    prompts = jax.random.randint(jax.random.key(0), (args.sequences, 8), 0, setup.vocabulary)
    token = jax.ShapeDtypeStruct((args.sequences, setup.width), setup.dtype)
    print(cutjax.explain(lambda x, w: multiplied(x, w, layout))(token, params["layers"][0]["mlp.gate_up_proj"]), "\n")

    run = jax.jit(decoded, static_argnums=(2, 3, 4))
    times = []
    for _ in range(4):  # the first compiles
        start = time.perf_counter()
        tokens = jax.block_until_ready(run(params, prompts, args.tokens, setup, layout))
        times.append(time.perf_counter() - start)
    blocks, others = bytes_of(params["layers"]) / 1e6, bytes_of({**params, "layers": []}) / 1e6
    stats = jax.devices()[0].memory_stats() or {}
    peak = f", {stats['peak_bytes_in_use'] / 1e6:,.1f} MB of the device at most" if "peak_bytes_in_use" in stats else ""
    print(f"{args.weights}: {args.sequences * args.tokens / min(times):,.0f} tokens/s, {args.sequences} at a time")
    print(f"memory: {blocks:,.1f} MB of layers, {others:,.1f} MB of embeddings and head{peak}")
    return np.asarray(tokens)


if __name__ == "__main__":
    main()
