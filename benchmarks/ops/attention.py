"""Batched products of attention, drawn by a salt: ``python -m benchmarks direct --suite attention --salts NAME``.

Each model's heads give two products for a batch and a length: scores (queries times keys, nt) and values (weights times
values, nn). Decoding gives them for few rows: ``[batch, rows, d] @ [batch, d, length]`` under vmap, and the values'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from benchmarks.cases import Dense

# Query heads, key heads, head size: from the models' published configs.
MODELS = {
    "gpt2": (12, 12, 64),
    "siglip-so400m": (16, 16, 72),
    "vit-h14": (16, 16, 80),
    "phi3-mini": (32, 32, 96),
    "vit-e": (16, 16, 112),
    "llama3-8b": (32, 8, 128),
    "deepseek-v3": (128, 128, 192),
    "gemma2-9b": (16, 8, 256),
}
LENGTHS = (128, 197, 256, 512, 577, 1024, 1500, 2048, 4096, 8192)
BATCHES = (1, 4, 16)
ROWS = (1, 2, 4, 8, 16)  # of queries that share a key head in decoding
MOST_BYTES = 8e9


def products() -> Iterator[Dense]:
    """Every product of every model."""
    for model, (heads, kv_heads, d) in MODELS.items():
        for length in LENGTHS:
            for size in BATCHES:
                name, batch = f"{model} {size} {length}", (size * heads,)
                yield Dense(length, length, d, "nt", batch, of=f"{name} scores", tags=("scores", "attention", model))
                yield Dense(length, d, length, "nn", batch, of=f"{name} values", tags=("values", "attention", model))
                for rows in ROWS:
                    name, batch = f"{model} {size} {length} {rows}", (size * kv_heads,)
                    tags = "decode", "attention", model
                    yield Dense(rows, length, d, "nn", batch, of=f"{name} decode scores", tags=tags)
                    yield Dense(rows, d, length, "nn", batch, of=f"{name} decode values", tags=tags)


def sample(count: int, salt: str) -> tuple[Dense, ...]:
    """So many products of distinct sizes, the same ones for the same salt: as many of decoding as of whole lengths."""
    found: dict[str, Dense] = {}
    for case in sorted(products(), key=lambda case: hashlib.sha256(f"{salt} {case.of}".encode()).hexdigest()):
        if case.problem.bytes < MOST_BYTES:
            found.setdefault(case.name, case)
    decode = [case for case in found.values() if case.tags[0] == "decode"]
    whole = [case for case in found.values() if case.tags[0] != "decode"]
    return (*whole[: count - count // 2], *decode[: count // 2])
