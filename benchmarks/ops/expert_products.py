"""Products of experts of real models, by a salt: ``python -m benchmarks run --op experts --salt NAME --count 20``.

Forward and input gradients of both matrices, of tokens that are routed to their experts unevenly, as in `grouped`,
beside torch.
"""

from __future__ import annotations

import dataclasses
import hashlib

from benchmarks.cases import Grouped
from benchmarks.ops import grouped

# Experts, experts a token, width and hidden width of one expert, gate and up in one matrix: from the published configs.
MODELS = {
    "mixtral-8x7b": (8, 2, 4096, 28672),
    "mixtral-8x22b": (8, 2, 6144, 32768),
    "dbrx": (16, 4, 6144, 21504),
    "grok-1": (8, 2, 6144, 65536),
    "phi-3.5-moe": (16, 2, 4096, 12800),
    "jamba": (16, 2, 4096, 28672),
    "qwen2-57b": (64, 8, 3584, 5120),
    "qwen3-30b": (128, 8, 2048, 1536),
    "qwen3-235b": (128, 8, 4096, 3072),
    "deepseek-v2-lite": (64, 6, 2048, 2816),
    "deepseek-v3": (256, 8, 7168, 4096),
    "olmoe": (64, 8, 2048, 2048),
    "gpt-oss-20b": (32, 4, 2880, 5760),
    "granite-moe": (40, 8, 1536, 1024),
}
TOKENS = (256, 512, 1000, 2048, 4096, 8192, 16384)
MOST_BYTES = 12e9
COUNT, SALT = 20, "public"


def sample(count: int, salt: str) -> tuple[Grouped, ...]:
    """Returns so many products, the same ones for the same salt."""
    found = {}
    for model, (experts, each, width, hidden) in MODELS.items():
        for tokens in TOKENS:
            # Up, which makes gates too, and down.
            for name, n, k in (("up", hidden, width), ("down", width, hidden // 2)):
                found[f"{model} {name} {tokens}"] = Grouped(experts, tokens * each, n, k, (model,), tokens)
    drawn = sorted(found, key=lambda name: hashlib.sha256(f"{salt} {name}".encode()).hexdigest())
    fitting = (found[name] for name in drawn if found[name].bytes("dw") < MOST_BYTES)
    return tuple(dict.fromkeys(fitting))[:count]


SUITE = dataclasses.replace(grouped.SUITE, name="experts", cases=sample(COUNT, SALT), draw=sample)
