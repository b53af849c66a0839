"""A layer of experts, forward and backward, beside the same layer on lax.ragged_dot: ``benchmarks run --op moe``."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import cutjax
from benchmarks import timing
from benchmarks.measure import jit, peak_mib, reason
from benchmarks.record import Figures, Row
from benchmarks.suite import Run, Suite

REPS = 7
PASSES = ("forward", "fwd+bwd")
# XLA multiplies all rows by the weights of every group, in time and memory proportional to rows times groups. Where the
# masked rows would take more than this, it gets fewer tokens.
XLA_MOST_BYTES = 8 << 30
# Of ours in bf16, of which several roundings are on the way, from the layer in f32; where that is too large, from the
# plain layer in bf16, which is about as far from it.
RELATIVE = 1.5e-2
EXACT_BYTES, EXACT_TOKENS = 24 << 30, 2048  # of weights and gradients in f32, and how many tokens the layer then gets


@dataclasses.dataclass(frozen=True)
class Moe:
    """A layer of gated experts: x [tokens, d], each token to k experts, whose hidden axis has h; bf16.

    Attributes:
      name: a short unique name.
      target: the least ratio to XLA asked for of the forward and backward pass, or None.
      asked_us: the times asked for of each pass, or none.
    """

    name: str
    experts: int
    tokens: int
    d: int
    h: int
    k: int
    target: float | None = None
    asked_us: tuple[int, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """The name, and "fine" where times are asked for."""
        return self.name, *["fine"] * bool(self.asked_us)

    @property
    def flops(self) -> int:
        """The FLOP of the three products of the forward pass; with the backward pass three times that."""
        return 3 * 2 * self.tokens * self.k * self.d * self.h


# The smaller first, as the device's peak only rises.
MOE = (
    Moe("8 x 3072", 8, 8192, 2048, 3072, 2, asked_us=(900, 2650)),
    Moe("64 x 1280", 64, 16384, 2560, 1280, 4, asked_us=(2050, 6000)),
    Moe("128 x 1024", 128, 24576, 2048, 1024, 8, asked_us=(4000, 11400)),
    Moe("128 x 256", 128, 32768, 1536, 256, 8, asked_us=(1600, 4100)),
    Moe("mixtral", 8, 4096, 4096, 14336, 2, target=3.0),
    Moe("deepseek", 256, 16384, 7168, 2048, 8, target=3.0),
)


Inputs = Mapping[str, jax.Array]
Layer = Callable[..., jax.Array]


def ours(case: Moe) -> Layer:
    """Our layer."""
    return functools.partial(cutjax.moe, k=case.k, backend="cuda")


def plain(case: Moe) -> Layer:
    """The layer as a JAX user writes it."""

    def layer(x, logits, w_gate, w_up, w_down):
        values, experts = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), case.k)
        weights = (values / values.sum(-1, keepdims=True)).reshape(-1)
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=case.experts).astype(jnp.int32)
        rows = x[order // case.k]
        hidden = jax.nn.silu(lax.ragged_dot(rows, w_gate, sizes)) * lax.ragged_dot(rows, w_up, sizes)
        out = lax.ragged_dot(hidden, w_down, sizes) * weights[order][:, None].astype(x.dtype)
        return out[jnp.argsort(order)].reshape(-1, case.k, x.shape[-1]).sum(1)

    return layer


NAMES = ("x", "logits", "gate", "up", "down")


def passes(layer: Layer) -> dict[str, Callable[[Inputs], Any]]:
    """The functions that are timed: the layer, and the layer with the gradients of everything."""

    def forward(i):
        return layer(*(i[name] for name in NAMES))

    def backward(i):
        out, pull = jax.vjp(layer, *(i[name] for name in NAMES))
        out, g = lax.optimization_barrier((out, i["g"]))  # which comes only when the result is there, as in a network
        return out, pull(g)

    return {"forward": forward, "fwd+bwd": backward}


@functools.cache
def _maker(case: Moe) -> Callable[[], dict[str, jax.Array]]:
    d, h, g = case.d, case.h, case.experts

    @jax.jit
    def make():
        keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 8))

        def normal(*shape):
            return jax.random.normal(next(keys), shape, jnp.bfloat16)

        def weights(k, n):  # that keep the products near unit variance; group by group, to save memory
            scale = jnp.bfloat16(k**-0.5)
            return lax.map(
                lambda key: jax.random.normal(key, (k, n), jnp.bfloat16) * scale, jax.random.split(next(keys), g)
            )

        # Some experts are liked better than others.
        logits = normal(case.tokens, g) + normal(g) * jnp.bfloat16(0.5)
        found = {"x": normal(case.tokens, d), "logits": logits, "g": normal(case.tokens, d)}
        return found | {"gate": weights(d, h), "up": weights(d, h), "down": weights(h, d)}

    return make


def first_tokens(i: Inputs, tokens: int) -> dict[str, jax.Array]:
    """The inputs with fewer tokens, and the same weights."""
    return {name: value[:tokens] if name in ("x", "logits", "g") else value for name, value in i.items()}


def xla_tokens(case: Moe, most: int | None = None, itemsize: int = 2) -> int:
    """As many tokens, halved until XLA's masked rows take bearable memory."""
    tokens = most or case.tokens
    while itemsize * case.experts * tokens * case.k * max(case.d, case.h) > XLA_MOST_BYTES and tokens > 1:
        tokens //= 2
    return tokens


def _compile(fn: Callable, i: Inputs) -> Any:
    return jit(fn).lower(i).compile()


def _device_mib() -> float:
    stats = jax.devices()[0].memory_stats()
    return math.nan if stats is None else stats.get("peak_bytes_in_use", math.nan) / 2**20


def _time(function: Callable, i: Inputs, reps: int, method: str) -> timing.Timing:
    """Kernel times, or by the host's clock where the profiler does not see the same kernels in each call."""
    if method == "cupti":
        try:
            return timing.measure({"layer": function}, [(i,)], reps, method)["layer"]
        except RuntimeError as error:
            print(f"no kernel times, the host's clock instead: {error}"[:300])
    samples = []
    for _ in range(reps + 1):  # the first is a warm-up
        start = time.perf_counter()
        jax.block_until_ready(function(i))
        samples.append(1e6 * (time.perf_counter() - start))
    return timing.Timing(tuple(samples[1:]), (), "host")


def error(got: Any, expected: Any) -> float:
    """The largest relative error of a result."""

    @jax.jit
    def each(got, expected):
        def one(x, y):
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            return jnp.sqrt(jnp.sum(jnp.square(x - y)) / jnp.maximum(jnp.sum(jnp.square(y)), 1e-30))

        return jax.tree.map(one, got, expected)

    found = [float(x) for x in jax.tree.leaves(each(got, expected))]
    return math.inf if any(map(math.isnan, found)) else max(found)


def measure_case(case: Moe, run: Run) -> list[Row]:
    """Checks, then times, each pass: ours for all tokens, and both layers for as many as XLA's gets."""
    i = jax.block_until_ready(_maker(case)())
    few = xla_tokens(case)
    j = i if few == case.tokens else jax.block_until_ready(first_tokens(i, few))
    rows = []
    for name in run.products or PASSES:
        targets = {"xla": case.target} if case.target and name == "fwd+bwd" else {}
        figures: dict[str, Any] = {"tokens": case.tokens, "xla_tokens": few}
        figures |= {"asked_us": case.asked_us[PASSES.index(name)]} if case.asked_us else {}
        row = Row(case.name, name, targets=targets, figures=figures)
        try:
            mine, theirs = passes(ours(case))[name], passes(plain(case))[name]
            compiled = _compile(mine, i)
            row = _ours(case, row, compiled, i, run.method)
            row = dataclasses.replace(row, **_errors(case, row, mine, theirs, i))
            row = _beside(case, row, compiled if j is i else _compile(mine, j), theirs, j, run.method)
        except Exception as error:  # the others are measured all the same
            row = dataclasses.replace(row, failure=reason(error))
        rows.append(row)
    return rows


def _ours(case: Moe, row: Row, compiled: Any, i: Inputs, method: str) -> Row:
    jax.block_until_ready(compiled(i))
    device_mib = _device_mib()
    took = _time(compiled, i, REPS, method)
    parts = sorted(zip(took.kernels, took.kernel_us, strict=False), key=lambda part: -part[1])
    # What are not products: routing, gathers, sums.
    rest_us = (
        sum(us for kernel, us in parts if not kernel.startswith("sm90_") or kernel.startswith("sm90_gather"))
        if parts
        else math.nan
    )
    return dataclasses.replace(
        row,
        us=took.us,
        iqr_us=took.iqr_us,
        tflops=case.flops * (3 if row.product == "fwd+bwd" else 1) / took.us / 1e6,
        peak_mib=peak_mib(compiled),
        figures={**row.figures, "rest_us": rest_us, "parts": parts, "device_mib": device_mib},
    )


def _errors(case: Moe, row: Row, mine: Callable, xla: Callable, i: Inputs) -> dict[str, Any]:
    """The largest error of a result, ours, and, where float32 tells which, XLA's too."""
    if 2 * 4 * 3 * case.experts * case.d * case.h > EXACT_BYTES:
        few = first_tokens(i, xla_tokens(case))
        return {"error": error(_compile(mine, few)(few), _compile(xla, few)(few))}
    few = first_tokens(i, xla_tokens(case, min(case.tokens, EXACT_TOKENS), 4))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), few)
    with jax.default_matmul_precision("highest"):
        exact = jax.block_until_ready(_compile(xla, wide)(wide))
    del wide
    both = [error(_compile(fn, few)(few), exact) for fn in (mine, xla)]
    return {"error": both[0], "figures": {**row.figures, "xla_error": both[1]}}


def _beside(case: Moe, row: Row, compiled: Any, xla: Callable, j: Inputs, method: str) -> Row:
    if not row.error <= RELATIVE:
        return dataclasses.replace(row, failure=f"wrong: relative error {row.error:.3g}, at most {RELATIVE}")
    theirs = _compile(xla, j)
    same_us = row.us if j["x"].shape[0] == case.tokens else _time(compiled, j, REPS, method).us
    xla_time = _time(theirs, j, 3, method)
    return dataclasses.replace(
        row,
        peers={"xla": Figures(xla_time.us, xla_time.iqr_us, " + ".join(xla_time.kernels), peak_mib(theirs))},
        ratios={"xla": xla_time.us / same_us},
        figures={**row.figures, "same_us": same_us},
    )


SUITE = Suite(
    "moe",
    MOE,
    measure=measure_case,
    product_names=PASSES,
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"},  # weights and gradients of a layer are 48 GB
)
