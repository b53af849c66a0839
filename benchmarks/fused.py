"""Fused epilogues, layers and blocks beside XLA and beside our own plain product: ``benchmarks.run --op fused``."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import cutjax
from benchmarks import cases, report, timing

REPS, TIMED_US = (12, 60), 250e3  # of one problem, all functions together
# A graph may run its nodes in any order, and kernels are told apart by their order. Kernel times are the same.
OPTIONS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1 << 20}
PLAIN = "plain"

# The errors of correct results, relative to the norm, when everything is rounded to bf16 once: 1.7e-3; a backward pass
# through several roundings is held to XLA's own error.
RELATIVE, SHARE_OF_XLA = 2e-3, 1.25

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "bias+gelu": jax.nn.gelu,
    "bias+gelu(erf)": functools.partial(jax.nn.gelu, approximate=False),
    "bias+relu": jax.nn.relu,
    "bias+silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One thing to compute, ours and XLA's; both take all inputs of their problem, by name.

    Attributes:
      plain: whether our plain products of the same problem are a yardstick.
      flops: of the products.
      bytes: least moved.
    """

    name: str
    ours: Callable[[Mapping[str, jax.Array]], Any]
    xla: Callable[[Mapping[str, jax.Array], lax.Precision | None], Any]
    flops: int
    bytes: int
    target: float | None
    plain: bool = True


def _epilogue(kind: str) -> Callable[..., jax.Array]:
    if kind == "scale+bias+residual":
        return lambda acc, s, b, r: acc * s + b + r
    return lambda acc, b: ACTIVATIONS[kind](acc + b)


def _operands(kind: str, x: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    return (x["s"], x["b"], x["r"]) if kind == "scale+bias+residual" else (x["b"],)


def _matmul(precision: lax.Precision | None) -> Callable[..., jax.Array]:
    return functools.partial(jnp.matmul, precision=precision)


def _forward(case: cases.Fused) -> Iterator[Pair]:
    m, n, k = case.sizes
    flops, moved = 2 * m * n * k, 2 * (m * k + k * n + m * n)
    for kind in (*ACTIVATIONS, "scale+bias+residual"):

        def ours(x, kind=kind):
            return cutjax.gemm(x["x"], x["w"], epilogue=_mixed(kind), operands=_operands(kind, x), backend="cuda")

        def xla(x, precision, kind=kind):
            return _epilogue(kind)(_matmul(precision)(x["x"], x["w"]), *_operands(kind, x))

        extra = 2 * m * n * (kind == "scale+bias+residual")
        yield Pair(kind, ours, xla, flops, moved + extra, case.target)


def _mixed(kind: str) -> Callable[..., jax.Array]:
    """The epilogue on float32 accumulators and operands in bf16."""
    return lambda acc, *operands: _epilogue(kind)(acc, *(x.astype(acc.dtype) for x in operands))


def _gated(case: cases.Fused) -> Iterator[Pair]:
    m, n, k = case.sizes

    def combine(g, u):
        return jax.nn.silu(g) * u

    def ours(x):
        return cutjax.gemm(x["x"], (x["w"], x["u"]), epilogue=combine, backend="cuda")

    def xla(x, precision):
        dot = _matmul(precision)
        return combine(dot(x["x"], x["w"]), dot(x["x"], x["u"]))

    yield Pair("silu(x@wg)*(x@wu)", ours, xla, 4 * m * n * k, 2 * (m * k + 2 * k * n + m * n), case.target)


def _gradient(fn: Callable[..., jax.Array], x: Mapping[str, jax.Array], names: Sequence[str]) -> Any:
    """The result, and gradients for its cotangent g, which comes only when the result is there, as in a network."""
    y, pull = jax.vjp(lambda arguments: fn(x | arguments), {name: x[name] for name in names})
    y, g = lax.optimization_barrier((y, x["g"]))
    return y, pull(g)[0]


def _layer(case: cases.Fused) -> Iterator[Pair]:
    m, n, k = case.sizes

    def fused(x):
        return cutjax.gemm(x["x"], x["w"], epilogue=_mixed("bias+gelu"), operands=(x["b"],))

    def ours(x):
        return _gradient(fused, x, ("x", "w", "b"))

    def xla(x, precision):
        return _gradient(lambda x: jax.nn.gelu(_matmul(precision)(x["x"], x["w"]) + x["b"]), x, ("x", "w", "b"))

    moved = 4 * (m * k + k * n) + 6 * m * n
    yield Pair("bias+gelu layer, fwd+bwd", ours, xla, 6 * m * n * k, moved, case.target, plain=False)


def _block(case: cases.Fused) -> Iterator[Pair]:
    m, h, k = case.sizes
    names = ("x", "w", "u", "d")

    def fused(x):
        return cutjax.mlp(x["x"], x["u"], x["d"], gate=x["w"], activation=jax.nn.silu)

    def ours(x):
        return _gradient(fused, x, names)

    def plain(x, dot):
        return dot(jax.nn.silu(dot(x["x"], x["w"])) * dot(x["x"], x["u"]), x["d"])

    def xla(x, precision):
        return _gradient(lambda x: plain(x, _matmul(precision)), x, names)

    moved = 4 * (2 * m * k + 3 * k * h) + 8 * m * h
    yield Pair("SwiGLU mlp, fwd+bwd", ours, xla, 18 * m * h * k, moved, case.target, plain=False)


KINDS = {"epilogue": _forward, "gated": _gated, "layer": _layer, "mlp": _block}


def pairs(case: cases.Fused) -> list[Pair]:
    """What is computed on the inputs of a case."""
    return list(KINDS[case.kind](case))


def plain(case: cases.Fused) -> Callable[[Mapping[str, jax.Array]], Any]:
    """Our plain products of the case."""
    names = ("w", "u") if case.kind == "gated" else ("w",)
    return lambda x: [cutjax.gemm(x["x"], x[name], backend="cuda") for name in names]


def shapes(case: cases.Fused) -> dict[str, tuple[int, ...]]:
    """The inputs by name: x @ w, operands, a second weight u, a third d, and the result's cotangent g."""
    m, n, k = case.sizes
    found: dict[str, tuple[int, ...]] = {"x": (m, k), "w": (k, n)}
    if case.kind == "epilogue":
        found |= {"b": (n,), "r": (m, n), "s": ()}
    elif case.kind == "layer":
        found |= {"b": (n,), "g": (m, n)}
    else:
        found |= {"u": (k, n)} | ({"d": (n, k), "g": (m, k)} if case.kind == "mlp" else {})
    return found


@functools.cache
def _maker(case: cases.Fused) -> Callable[[int], dict[str, jax.Array]]:
    @jax.jit
    def make(seed):
        found = {}
        for i, (name, shape) in enumerate(shapes(case).items()):
            key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), i)
            value = jax.random.normal(key, shape, jnp.bfloat16)
            # Weights that keep the products near unit variance, where activations are neither 0 nor the identity.
            found[name] = value * jnp.bfloat16(shape[0] ** -0.5) if name in "wud" else value
        return found

    return make


def inputs(case: cases.Fused, seed: int) -> tuple[dict[str, jax.Array]]:
    """Random normal inputs in bf16."""
    return (_maker(case)(seed),)


def check(case: cases.Fused, pair: Pair, ours: Callable, xla: Callable, args: tuple) -> tuple[float, str]:
    """The largest relative error of our results against float32, and what is wrong with it or ""."""
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}

    @functools.partial(jax.jit, compiler_options=options)
    def errors(x, ours, xla):
        wide = pair.xla({name: value.astype(jnp.float32) for name, value in x.items()}, lax.Precision.HIGHEST)

        def error(out, ref):
            return jnp.linalg.norm((out.astype(jnp.float32) - ref).ravel()) / jnp.linalg.norm(ref.ravel())

        return [jax.tree.leaves(jax.tree.map(error, out, wide)) for out in (ours, xla)]

    got, theirs = errors(*args, ours(*args), xla(*args))
    found = [(float(x), max(RELATIVE, SHARE_OF_XLA * float(y))) for x, y in zip(got, theirs, strict=True)]
    wrong = [f"wrong: relative error {x:.3g}, at most {most:.3g}" for x, most in found if not x <= most]
    return max(x for x, _ in found), "; ".join(wrong)


def compile_ours(chosen: Sequence[cases.Fused]) -> None:
    """Compiles our kernels on every core, into the cache; XLA tunes on the device, so its programs come one by one."""

    def lower(fn: Callable, case: cases.Fused) -> None:
        arguments = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes(case).items()}
        with contextlib.suppress(NotImplementedError):  # the measurement reports it
            jax.jit(fn).lower(arguments)

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        functions = [(fn, case) for case in chosen for fn in (plain(case), *(pair.ours for pair in pairs(case)))]
        for done in [pool.submit(lower, fn, case) for fn, case in functions]:
            done.result()


def peak_bytes(compiled: Any) -> float:
    """Temporaries and results of an executable."""
    analysis = compiled.memory_analysis()
    return math.nan if analysis is None else analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def measure_case(case: cases.Fused, roofline: report.Roofline, method: str) -> list[report.Row]:
    """Checks, then times in one run: our plain product, and for everything on its inputs ours and XLA's."""
    sets = timing.input_sets(lambda seed: inputs(case, seed))
    options = OPTIONS if jax.default_backend() == "gpu" else {}
    functions: dict[str, Callable] = {}
    failures: dict[str, str] = {}
    errors: dict[str, float] = {}
    peaks: dict[str, float] = {}

    def add(name: str, fn: Callable) -> Callable:
        jitted = jax.jit(fn, compiler_options=options)
        compiled = jitted.lower(*sets[0]).compile()
        peaks[name] = peak_bytes(compiled)
        functions[name] = compiled if method == "cupti" else jitted
        return compiled

    found = pairs(case)
    if any(pair.plain for pair in found):
        add(PLAIN, plain(case))
    for pair in found:
        try:
            ours = add(pair.name, pair.ours)
            xla = add(f"xla {pair.name}", lambda x, pair=pair: pair.xla(x, None))
            errors[pair.name], failures[pair.name] = check(case, pair, ours, xla, sets[-1])
        except RuntimeError as error:  # no kernel, or XLA's: out of memory
            failures[pair.name] = f"{type(error).__name__}: {error}"
        if failures[pair.name]:
            functions.pop(pair.name, None)
            functions.pop(f"xla {pair.name}", None)
    try:
        times = _times(functions, sets, method) if set(functions) - {PLAIN} else {}
    except RuntimeError as error:  # of the profiler
        times, failures = {}, {name: why or f"not timed: {error}" for name, why in failures.items()}
    return [_row(case, pair, failures[pair.name], errors, times, peaks, roofline) for pair in found]


def _times(functions: dict[str, Callable], sets: Sequence[tuple], method: str) -> dict[str, timing.Timing]:
    rough = timing.measure(functions, sets, 2, method)
    reps = int(TIMED_US / sum(time.us for time in rough.values()))
    return timing.measure(functions, sets, min(max(reps, REPS[0]), REPS[1]), method)


def _row(
    case: cases.Fused,
    pair: Pair,
    failure: str,
    errors: dict[str, float],
    times: dict[str, timing.Timing],
    peaks: dict[str, float],
    roofline: report.Roofline,
) -> report.Row:
    name = f"{case.name} {pair.name}"
    plain_target = case.plain_target if pair.plain else None
    if failure:
        return report.Row(name, target=pair.target, plain_target=plain_target, failure=failure)
    ours, xla = times[pair.name], times[f"xla {pair.name}"]
    plain_us = times[PLAIN].us if pair.plain else None
    return report.Row(
        case=name,
        kernel=" + ".join(ours.kernels),
        us=ours.us,
        iqr_us=ours.iqr_us,
        xla_kernel=" + ".join(xla.kernels),
        xla_us=xla.us,
        xla_iqr_us=xla.iqr_us,
        tflops=pair.flops / ours.us / 1e6,
        roofline=roofline.us(pair.flops, pair.bytes) / ours.us,
        ratio=xla.us / ours.us,
        target=pair.target,
        error=errors[pair.name],
        plain_us=plain_us,
        plain_ratio=None if plain_us is None else ours.us / plain_us,
        plain_target=plain_target,
        peak_mib=peaks[pair.name] / 2**20,
        xla_peak_mib=peaks[f"xla {pair.name}"] / 2**20,
    )


def print_rows(rows: Sequence[report.Row], title: str) -> None:
    """The table a person reads."""
    import rich.console
    import rich.table

    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=36)
    for column in ("us", "of plain", "at most", "XLA us", "ratio", "target", "peak MiB", "XLA MiB"):
        table.add_column(column, justify="right", no_wrap=True)

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"

    for row in rows:
        missed = row.target is not None and not row.ratio >= row.target
        missed |= row.plain_target is not None and not (row.plain_ratio or math.inf) <= row.plain_target
        cells = [(row.us, 1), (row.plain_ratio, 3), (row.plain_target, 2), (row.xla_us, 1), (row.ratio, 3)]
        cells += [(row.target, 2), (row.peak_mib, 0), (row.xla_peak_mib, 0)]
        style = "red" if missed or row.failure else None
        table.add_row(row.case, row.failure or row.kernel, *(number(*cell) for cell in cells), style=style)
    rich.console.Console(width=None if os.isatty(1) else 190).print(table)
