"""A layer of experts, forward and backward, beside the same layer on lax.ragged_dot: ``benchmarks.run --op moe``."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import cutjax
from benchmarks import cases, report, timing
from benchmarks.fused import OPTIONS, peak_bytes

REPS = 7
PASSES = ("forward", "fwd+bwd")
# XLA multiplies all rows by the weights of every group, in time and memory proportional to rows times groups. Where the
# masked rows would take more than this, it gets fewer tokens.
XLA_MOST_BYTES = 8 << 30
# Of two programs that round to bf16 in other places; each is about half of that from the f32 result.
RELATIVE = 1.5e-2


@dataclasses.dataclass(frozen=True)
class Row:
    """One pass of one layer.

    Attributes:
      case, tokens: which.
      us, iqr_us, tflops: ours; the products' FLOP over the time of everything.
      rest_us: of that, what are not our kernels: routing, gathers, sums; NaN where kernels are not told apart.
      parts: time of each kernel, the longest first.
      peak_mib: temporaries and results of the executable.
      device_mib: the most the device had in use in this process so far, inputs included.
      xla_tokens: the tokens XLA's layer got.
      xla_us, xla_peak_mib: its time and memory for them.
      same_us: ours for as many tokens.
      ratio: XLA's time over ours for as many tokens.
      target: the least ratio asked for, or None.
      error: of our results for XLA's tokens, relative to XLA's.
      failure: why there is no time, else "".
    """

    case: str
    tokens: int
    us: float = math.nan
    iqr_us: float = math.nan
    tflops: float = math.nan
    rest_us: float = math.nan
    parts: tuple[tuple[str, float], ...] = ()
    peak_mib: float = math.nan
    device_mib: float = math.nan
    xla_tokens: int = 0
    xla_us: float = math.nan
    xla_peak_mib: float = math.nan
    same_us: float = math.nan
    ratio: float = math.nan
    target: float | None = None
    error: float = math.nan
    failure: str = ""


Inputs = Mapping[str, jax.Array]
Layer = Callable[..., jax.Array]


def ours(case: cases.Moe, backend: str = "cuda") -> Layer:
    """Our layer."""
    return functools.partial(cutjax.moe, k=case.k, backend=backend)


def plain(case: cases.Moe) -> Layer:
    """The same as a JAX user writes it."""

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
    """What is timed: the layer, and the layer with the gradients of everything."""

    def forward(i):
        return layer(*(i[name] for name in NAMES))

    def backward(i):
        out, pull = jax.vjp(layer, *(i[name] for name in NAMES))
        out, g = lax.optimization_barrier((out, i["g"]))  # which comes only when the result is there, as in a network
        return out, pull(g)

    return {"forward": forward, "fwd+bwd": backward}


@functools.cache
def _maker(case: cases.Moe) -> Callable[[], dict[str, jax.Array]]:
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


def xla_tokens(case: cases.Moe) -> int:
    """As many tokens, halved until XLA's masked rows take bearable memory."""
    tokens = case.tokens
    while 2 * case.experts * tokens * case.k * max(case.d, case.h) > XLA_MOST_BYTES and tokens > 1:
        tokens //= 2
    return tokens


def _compile(fn: Callable, i: Inputs) -> Any:
    options = OPTIONS if jax.default_backend() == "gpu" else {}
    return jax.jit(fn, compiler_options=options).lower(i).compile()


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


def measure_case(case: cases.Moe, method: str, wanted: Sequence[str] = PASSES, backend: str = "cuda") -> list[Row]:
    """Checks, then times, each pass: ours for all tokens, and both layers for as many as XLA's gets."""
    i = jax.block_until_ready(_maker(case)())
    few = xla_tokens(case)
    j = i if few == case.tokens else jax.block_until_ready(first_tokens(i, few))
    rows = []
    for name in wanted:
        row = Row(case.name + " " + name, case.tokens, xla_tokens=few)
        row = dataclasses.replace(row, target=case.target if name == "fwd+bwd" else None)
        try:
            row = _ours(case, row, passes(ours(case, backend))[name], i, method)
            row = _beside(case, row, passes(ours(case, backend))[name], passes(plain(case))[name], i, j, method)
        except Exception as failure:  # the others are measured all the same
            lines = str(failure).strip().splitlines()
            row = dataclasses.replace(row, failure=f"{type(failure).__name__}: {lines[0] if lines else ''}"[:300])
        rows.append(row)
    return rows


def _ours(case: cases.Moe, row: Row, fn: Callable, i: Inputs, method: str) -> Row:
    compiled = _compile(fn, i)
    jax.block_until_ready(compiled(i))
    device_mib = _device_mib()
    took = _time(compiled, i, REPS, method)
    parts = sorted(zip(took.kernels, took.kernel_us, strict=False), key=lambda part: -part[1])
    flops = case.flops * (3 if row.case.endswith("bwd") else 1)
    return dataclasses.replace(
        row,
        us=took.us,
        iqr_us=took.iqr_us,
        tflops=flops / took.us / 1e6,
        rest_us=sum(us for kernel, us in parts if not kernel.startswith("sm90_")) if parts else math.nan,
        parts=tuple(parts),
        peak_mib=peak_bytes(compiled) / 2**20,
        device_mib=device_mib,
    )


def _beside(case: cases.Moe, row: Row, fn: Callable, xla: Callable, i: Inputs, j: Inputs, method: str) -> Row:
    few = j["x"].shape[0]
    compiled, theirs = _compile(fn, j), _compile(xla, j)
    found = error(compiled(j), theirs(j))
    if not found <= RELATIVE:
        return dataclasses.replace(row, error=found, failure=f"wrong: relative error {found:.3g}, at most {RELATIVE}")
    same_us = row.us if few == case.tokens else _time(compiled, j, REPS, method).us
    xla_us = _time(theirs, j, 3, method).us
    return dataclasses.replace(
        row,
        xla_us=xla_us,
        xla_peak_mib=peak_bytes(theirs) / 2**20,
        same_us=same_us,
        ratio=xla_us / same_us,
        error=found,
    )


def document(environment: dict[str, Any], method: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON of one run."""
    return {"op": "moe", **report.document(environment, method, None, rows)}


def print_rows(rows: Sequence[Row]) -> None:
    """The table a person reads."""
    import rich.console
    import rich.table

    table = rich.table.Table(title="layers of experts, bf16", title_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("tokens", "us", "TFLOP/s", "not products", "peak MiB", "device MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("XLA: tokens", "us", "MiB", "ours us", "ratio", "target"):
        table.add_column(column, justify="right", no_wrap=True)

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"

    for row in rows:
        cells = [(row.us, 0), (row.tflops, 0), (row.rest_us, 0), (row.peak_mib, 0), (row.device_mib, 0)]
        beside = [(row.xla_us, 0), (row.xla_peak_mib, 0), (row.same_us, 0), (row.ratio, 2), (row.target, 1)]
        style = "red" if row.failure or (row.target is not None and not row.ratio >= row.target) else None
        first = [row.case, str(row.tokens), *(number(*cell) for cell in cells), str(row.xla_tokens)]
        table.add_row(*first, *(number(*cell) for cell in beside), style=style)
    console = rich.console.Console(width=None if os.isatty(1) else 190)
    console.print(table)
    for row in rows:
        if row.failure:
            console.print(f"{row.case}: {row.failure}", highlight=False, markup=False)
        elif row.parts:
            parts = ", ".join(f"{name[:60]} {us:.0f}" for name, us in row.parts[:12])
            console.print(f"{row.case}: {parts}", highlight=False, markup=False)
