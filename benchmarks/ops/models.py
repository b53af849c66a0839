"""Dense products of real models, drawn by a salt: ``python -m benchmarks run --op models --salt NAME --count 100``.

Each layer of each model gives three products for a number of tokens: the forward pass (nn), the input gradient (nt)
and the weight gradient (tn). Hashing their names with the salt draws a sample, so it never changes and no shape is
picked by hand. Tuning to one salt and reporting on another shows whether a choice of kernels generalises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from benchmarks.cases import Dense
from benchmarks.ops import gemm
from benchmarks.suite import Suite

# Width, hidden width, width of keys and values or 0, vocabulary or classes or 0: from the models' published configs.
MODELS = {
    "gpt2": (768, 3072, 0, 50257),
    "gpt2-xl": (1600, 6400, 0, 50257),
    "bert-large": (1024, 4096, 0, 30522),
    "opt-2.7b": (2560, 10240, 0, 50272),
    "vit-b16": (768, 3072, 0, 1000),
    "vit-l14": (1024, 4096, 0, 1000),
    "vit-g14": (1408, 6144, 0, 1000),
    "t5-large": (1024, 4096, 0, 32128),
    "t5-xxl": (4096, 10240, 0, 32128),
    "whisper-large": (1280, 5120, 0, 51866),
    "llama3-8b": (4096, 14336, 1024, 128256),
    "llama3-70b": (8192, 28672, 1024, 128256),
    "llama2-7b": (4096, 11008, 0, 32000),
    "llama2-13b": (5120, 13824, 0, 32000),
    "mistral-7b": (4096, 14336, 1024, 32768),
    "qwen2.5-0.5b": (896, 4864, 128, 151936),
    "qwen2.5-7b": (3584, 18944, 512, 152064),
    "qwen3-32b": (5120, 25600, 1024, 151936),
    "gemma2-9b": (3584, 14336, 2048, 256000),
    "phi3-mini": (3072, 8192, 0, 32064),
    "deepseek-v3": (7168, 18432, 576, 129280),
    "gpt-oss-20b": (2880, 2880, 512, 201088),
    "dit-xl": (1152, 4608, 0, 0),
    "sdxl-640": (640, 2560, 0, 0),
    "sdxl-1280": (1280, 5120, 0, 0),
    "resnet50-fc": (2048, 1000, 0, 0),
    "pointnet-mlp": (256, 512, 0, 40),
    "nerf-mlp": (256, 256, 0, 0),
    "dlrm-top": (1024, 512, 0, 0),
}
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ODD_TOKENS = (3, 77, 197, 300, 1000, 1500, 3000, 12608, 20000, 50432)  # of CLIP, ViT-B/16, Whisper, 64 and 256 images
LEAST_TRAINED, MOST_OF_HEAD = 128, 4096  # tokens: a model that serves has no gradients, and few logits are kept
MOST_BYTES = 24e9
COUNT, SALT = 100, "public"


def products() -> Iterator[Dense]:
    """Every product of every model."""
    for model, (d, h, kv, vocabulary) in MODELS.items():
        layers = {"qkv": (d, d + 2 * (kv or d)), "out": (d, d), "up": (d, h), "down": (h, d)}
        if vocabulary:
            layers["head"] = (d, vocabulary)
        for layer, (k, n) in layers.items():
            for tokens in TOKENS + ODD_TOKENS:
                if layer == "head" and tokens > MOST_OF_HEAD:
                    continue
                name = f"{model} {layer} {tokens}"
                yield Dense(tokens, n, k, "nn", of=f"{name} fwd", tags=("fwd", layer, model))
                if tokens >= LEAST_TRAINED:
                    yield Dense(tokens, k, n, "nt", of=f"{name} dx", tags=("dx", layer, model))
                    yield Dense(k, n, tokens, "tn", of=f"{name} dw", tags=("dw", layer, model))


def sample(count: int, salt: str) -> tuple[Dense, ...]:
    """So many products of distinct sizes, the same ones for the same salt."""
    found: dict[str, Dense] = {}
    for case in sorted(products(), key=lambda case: hashlib.sha256(f"{salt} {case.of}".encode()).hexdigest()):
        if 2 * (case.m * case.n + case.m * case.k + case.n * case.k) < MOST_BYTES:
            found.setdefault(case.name, case)
    return tuple(found.values())[:count]


SUITE = Suite("models", sample(COUNT, SALT), Dense.inputs, gemm.products, rough=3, draw=sample)
