"""Layers divided over the GPUs of one host, products beside transfers and not: ``--op collective``.

A row is a program in a way of dividing it, wall time in turns on all devices there are; 2 or 4 of one host.
``python -m benchmarks run --op collective --tag suite --out benchmarks/results/collective-h200x4.json`` measures all
that ``python -m benchmarks scale`` predicts from. ``--tag tiny`` is for virtual devices of a CPU.

The ways: "jit" is plain JAX divided by XLA, the baseline; "apart" gathers, multiplies with our kernels, and adds up;
"auto" is ours; "pieces" and "direct" are its routes beside the transfers, "narrow" ones with parts of sums in
bf16; "alone" is our products with no transfer at all. Hidden is the share of the transfers' time, "apart" less "alone",
that a way does not show. A turn of calls takes 80 ms, so that power limits the clock; burst is of turns of 12 ms, each
after a rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from benchmarks.measure import peak_mib, reason
from benchmarks.ops.programs import times
from benchmarks.record import Row
from benchmarks.suite import Run, Suite

P = jax.P
ROWS, COLUMNS = P("i"), P(None, "i")
LEFT = (4, 8, 16, 32)  # SMs left free, in the programs that pin kernels
# Sums of 8192 to 28672 products of bf16 in other orders, and parts of them rounded to bf16 by "narrow" and by XLA.
ERROR = 2e-2
BURST_S, REST_S = 12e-3, 0.1  # a turn, and the rest before it
Way = tuple[Callable[..., Any], tuple[P, ...]]  # the function of all arrays, and how these are divided


@dataclasses.dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
      name, tags: as elsewhere.
      kind: a key of KINDS.
      sizes: its own, of one device's share where they are tokens of a moe, of all devices else.
      backward: whether gradients are computed too.
      targets: the least ratio of the baseline's time to ours.
    """

    name: str
    tags: tuple[str, ...]
    kind: str
    sizes: tuple[int, ...]
    backward: bool = False
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)


LLAMA, FASTER, MOE = (8192, 8192, 28672), {"jit": 1.10}, {"gather": 2.0}
DEEPSEEK = (8192, 2048, 1408, 64, 6)  # tokens of a device, widths, experts, experts of a token
CASES = (
    Case("links", ("suite", "links"), "links", (1 << 16, 1 << 22, 1 << 26)),
    Case("llama 70b mlp", ("suite", "mlp"), "mlp", LLAMA, targets=FASTER),
    Case("llama 70b mlp fwd+bwd", ("suite", "mlp"), "mlp", LLAMA, True, FASTER),
    Case("llama 70b qkv", ("suite", "projections"), "gather", (8192, 8192, 10240), targets=FASTER),
    Case("llama 70b out", ("suite", "projections"), "scatter", (8192, 8192, 8192), targets=FASTER),
    Case("llama 70b qkv fwd+bwd", ("suite", "projections"), "gather", (8192, 8192, 10240), True, FASTER),
    Case("llama 70b out fwd+bwd", ("suite", "projections"), "scatter", (8192, 8192, 8192), True, FASTER),
    Case("deepseek moe", ("suite", "moe"), "moe", DEEPSEEK, targets=MOE),
    Case("deepseek moe fwd+bwd", ("suite", "moe"), "moe", DEEPSEEK, True, MOE),
    Case("tiny links", ("tiny",), "links", (1 << 10,)),
    Case("tiny mlp", ("tiny",), "mlp", (64, 32, 64), True),
    Case("tiny qkv", ("tiny",), "gather", (64, 32, 64)),
    Case("tiny out", ("tiny",), "scatter", (64, 32, 64)),
    Case("tiny moe", ("tiny",), "moe", (32, 16, 24, 8, 2), True),
)


def shapes(case: Case, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a program's arrays, undivided."""
    if case.kind == "moe":
        tokens, d, h, experts, _ = case.sizes
        weights = (experts, d, h), (experts, d, h), (experts, h, d)
        return (devices * tokens, d), (devices * tokens, experts), *weights
    m, k, n = case.sizes
    return ((m, k), (k, n), (k, n), (n, k)) if case.kind == "mlp" else ((m, k), (k, n))


def _mlp(case: Case) -> dict[str, Way]:
    specs = (ROWS, COLUMNS, COLUMNS, ROWS)

    def jit(x, gate, up, down):
        return constrained((jax.nn.silu(x @ gate) * (x @ up)) @ down, ROWS)

    def alone(x, gate, up, down):
        return cutjax.mlp(x, up, down, gate=gate, activation=jax.nn.silu)

    def apart(x, gate, up, down):
        y = alone(lax.all_gather(x, "i", tiled=True), gate, up, down)
        return lax.psum_scatter(y.astype(jnp.float32), "i", tiled=True).astype(y.dtype)

    def ours(x, gate, up, down, **kwargs):
        return cutjax.mlp(x, up, down, gate=gate, activation=jax.nn.silu, axis_name="i", **kwargs)

    return {"jit": (jit, specs), **_ways(apart, ours, alone, specs, (P(), COLUMNS, COLUMNS, ROWS), ROWS)}


def _gather(case: Case) -> dict[str, Way]:
    def apart(x, w):
        return cutjax.gemm(lax.all_gather(x, "i", tiled=True), w)

    ours, specs = functools.partial(cutjax.all_gather_gemm, axis_name="i"), (ROWS, COLUMNS)
    found = _ways(apart, ours, cutjax.gemm, specs, (P(), COLUMNS), COLUMNS, case)
    return {"jit": (lambda x, w: constrained(x @ w, COLUMNS), specs), **found}


def _scatter(case: Case) -> dict[str, Way]:
    def apart(x, w):
        y = cutjax.gemm(x, w, out_dtype=jnp.float32)
        return lax.psum_scatter(y, "i", tiled=True).astype(x.dtype)

    ours, specs = functools.partial(cutjax.gemm_reduce_scatter, axis_name="i"), (COLUMNS, ROWS)
    found = _ways(apart, ours, cutjax.gemm, specs, specs, ROWS, case)
    return {"jit": (lambda x, w: constrained(x @ w, ROWS), specs), **found}


def _moe(case: Case) -> dict[str, Way]:
    def ours(*args, **kwargs):
        return cutjax.moe(*args, case.sizes[-1], expert_axis="i", **kwargs)

    def of(**kwargs) -> Way:
        f = jax.shard_map(functools.partial(ours, **kwargs), in_specs=specs, out_specs=ROWS)
        return f, specs

    specs = (ROWS,) * 5
    halves, whole = of(form="exchange"), of(form="exchange", parts=1)
    ways = {"gather": of(form="gather"), "exchange": halves, "exchange whole": whole, "auto": of()}
    return ways | {"ragged": of(form="ragged")} if case.backward and "suite" in case.tags else ways


def _ways(apart: Any, ours: Any, alone: Any, specs: Any, of_alone: Any, out: P, case: Case | None = None) -> Any:
    """Returns our ways of a layer; those that pin kernels where a case of one product is given."""

    def over(f: Any, specs: Any = specs, out: P = out, **kwargs: Any) -> Way:
        return jax.shard_map(f, in_specs=specs, out_specs=out, **kwargs), specs

    found = {
        "apart": over(apart),
        "auto": over(ours),
        "pieces": over(functools.partial(ours, route="pieces")),
        "direct": over(functools.partial(ours, route="direct")),
    }
    if out == ROWS or (case is not None and case.backward):
        for route in ("auto", "whole", "pieces", "direct"):
            found[f"{route} narrow"] = over(functools.partial(ours, route=route, reduce_dtype=jnp.bfloat16))
    # Each device's own parts of sums, which nothing adds up.
    found["alone"] = over(alone, of_alone, P("i") if out == ROWS else out)
    if case is not None and (config := pinned(case)) is not None:
        left = {f"{free} SMs free": dataclasses.replace(config, sms=132 - free) for free in LEFT}
        found |= {name: over(functools.partial(ours, route="direct", config=config)) for name, config in left.items()}
    return found


def pinned(case: Case) -> Any:
    """Returns the kernel's config of the products of one device's rows; None where XLA runs."""
    devices = jax.device_count()
    m, k, n = case.sizes
    k, n = (k, n // devices) if case.kind == "gather" else (k // devices, n)
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m // devices, k), (k, n)))
    out = None if case.kind == "gather" else jnp.float32
    gemm = functools.partial(cutjax.gemm, out_dtype=out, backend="cuda")
    config = cutjax.explain(gemm, platform="cuda")(a, b).rows[0].choice.config
    return None if config is None or config.cluster_k > 1 else config


def constrained(x: jax.Array, spec: P) -> jax.Array:
    return lax.with_sharding_constraint(x, spec)


KINDS: dict[str, Callable[[Case], dict[str, Way]]] = {"mlp": _mlp, "gather": _gather, "scatter": _scatter, "moe": _moe}


class Running:
    """A compiled way with its arrays: a call is a run."""

    def __init__(self, step: Any, args: Any):
        self.step, self.args, self.state = step, args, ()

    def __call__(self) -> Any:
        out = self.step(*self.args)
        # Runs that wait for each other take all threads of a CPU's virtual devices.
        return jax.block_until_ready(out) if jax.default_backend() == "cpu" else out


def measure_case(case: Case, run: Run) -> list[Row]:
    """Compiles the ways of a program, compares their results with the first one's, and times them in turns."""
    devices = jax.device_count()
    if devices < 2:
        return [Row(case.name, failure="needs 2 devices of one host or more")]
    mesh = jax.make_mesh((devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        if case.kind == "links":
            return [link(case.name, kind, count, mesh) for kind in LINKS for count in case.sizes]
        return _measure(case, mesh, run)


def _measure(case: Case, mesh: jax.sharding.Mesh, run: Run) -> list[Row]:
    keys = jax.random.split(jax.random.key(0), 5)
    arrays = [
        (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes(case, mesh.size), strict=False)
    ]
    rows, running, expected = {}, {}, None
    for name, (f, specs) in KINDS[case.kind](case).items():
        if run.peers is not None and name not in (*run.peers, "jit", "gather", "apart", "alone"):
            continue
        rows[name] = Row(case.name, name)
        try:
            args = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
            take = f
            if case.backward:

                def take(*args, f=f):
                    loss = lambda *args: (f(*args).astype(jnp.float32) ** 2).sum()  # noqa: E731
                    return jax.grad(loss, range(len(args)))(*args)

            step = jax.jit(take).lower(*args).compile()
            out = jax.block_until_ready(step(*args))
            expected = out if expected is None else expected
            error = float("nan") if name == "alone" else float(_difference(out, expected))
            failure = "" if name == "alone" or error <= ERROR else f"wrong: differs by {error:.3g} (at most {ERROR})"
            rows[name] = dataclasses.replace(rows[name], error=error, peak_mib=peak_mib(step), failure=failure)
            running[name] = Running(step, args)
        except Exception as error:  # such as too little memory; the other ways are measured all the same
            rows[name] = dataclasses.replace(rows[name], failure=reason(error))
    del expected
    samples, bursts = times(running), times(running, BURST_S, REST_S)
    medians, burst = ({name: float(np.median(x)) for name, x in found.items()} for found in (samples, bursts))
    for name, found in samples.items():
        rows[name] = _compared(case, rows[name], medians, burst, found)
    return list(rows.values())


@jax.jit
def _difference(found: Any, expected: Any) -> jax.Array:
    norm = lambda tree: sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(tree)) ** 0.5  # noqa: E731
    apart = jax.tree.map(lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), found, expected)
    return norm(apart) / jnp.maximum(norm(expected), 1e-30)


def _compared(
    case: Case, row: Row, medians: Mapping[str, float], burst: Mapping[str, float], samples: list[float]
) -> Row:
    name, base = row.product, next(iter(medians))
    figures = {"burst_us": burst[name]} | ({} if name in (base, "alone") else {"burst": burst[base] / burst[name]})
    low, high = np.percentile(samples, (25, 75))
    if {"apart", "alone"} <= medians.keys() and medians["apart"] > medians["alone"]:
        figures["hidden"] = 1 - (medians[name] - medians["alone"]) / (medians["apart"] - medians["alone"])
    ratios = {} if name in (base, "alone") else {base: medians[base] / medians[name]}
    targets = {peer: least for peer, least in case.targets.items() if peer in ratios and name in ("auto", "exchange")}
    more = {"iqr_us": float(high - low), "ratios": ratios, "targets": targets, "figures": figures}
    return dataclasses.replace(row, us=medians[name], **more)


# The rates of the links: what each device sends, by how long it takes.


LINKS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "permute": lambda x, n: lax.ppermute(x, "i", [(j, (j + 1) % n) for j in range(n)]),
    "all_gather": lambda x, n: lax.all_gather(x, "i", tiled=True),
    "reduce_scatter": lambda x, n: lax.psum_scatter(x, "i", tiled=True),
    "all_to_all": lambda x, n: lax.all_to_all(x, "i", 0, 0, tiled=True),
}


def link(case: str, kind: str, count: int, mesh: jax.sharding.Mesh) -> Row:
    """Returns the time of one collective in which each device sends ``count`` numbers of bf16, about."""
    n = mesh.size
    share = count if kind == "permute" else count // (n - 1) if kind == "all_gather" else count * n // (n - 1)
    share = max(n, share // n * n)
    sent = {"permute": share, "all_gather": share * (n - 1)}.get(kind, share * (n - 1) // n)
    x = jax.device_put(jnp.ones(n * share, jnp.bfloat16), jax.NamedSharding(mesh, ROWS))
    f = jax.jit(jax.shard_map(functools.partial(LINKS[kind], n=n), in_specs=ROWS, out_specs=ROWS, check_vma=False))
    samples = times({kind: Running(f.lower(x).compile(), (x,))})[kind]
    us, (low, high) = float(np.median(samples)), np.percentile(samples, (25, 75))
    rate = 2 * sent / us / 1e3
    return Row(
        case,
        f"{kind} {2 * sent} bytes",
        us=us,
        iqr_us=float(high - low),
        gb_per_s=rate,
        figures={"sent": 2 * sent, "devices": n},
    )


SUITE = Suite(
    "collective",
    CASES,
    measure=measure_case,
    clocks=("host",),
    environment={
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true",
    },
)
