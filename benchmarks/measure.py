"""The measurement of a case: its functions are compiled and checked, then those that are right are timed in turns."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import cutjax
from benchmarks import cases, oracle, timing
from benchmarks.record import Figures, Roofline, Row
from benchmarks.suite import Function, Peer, Product, Run, Suite

# A graph may run its nodes in any order, and kernels are told apart by their order. Kernel times are the same.
OPTIONS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1 << 20}
UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0}  # of references: tuning would take longer than they do
OURS = "ours"


def key(*parts: str) -> str:
    """The name of a function: whose, of which product, and which variant."""
    return " ".join(filter(None, parts))


def reason(error: BaseException) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def jit(fn: Function, **options: Any) -> Any:
    """``jax.jit`` with the options for measuring on a GPU."""
    return jax.jit(fn, compiler_options=OPTIONS | options if jax.default_backend() == "gpu" else {})


def peak_mib(compiled: Any) -> float:
    """Temporaries and results of an executable."""
    analysis = compiled.memory_analysis()
    return math.nan if analysis is None else (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / 2**20


def roofline(method: str) -> Roofline:
    """A 2 GiB copy and the best 8192 x 8192 x 8192 bf16 product, XLA's or ours."""
    # A kernel that reads and writes each word once; a plain copy would run on the copy engines.
    size = 1 << 29
    words = jax.random.bits(jax.random.key(0, impl="rbg"), (size,), jnp.uint32)
    copy = timing.measure({"copy": jax.jit(lambda x: x ^ 1)}, [(words,)], 12, method)["copy"]
    del words
    case = cases.Dense(8192, 8192, 8192)
    functions = {"xla": jax.jit(oracle.xla(case.layout, case.dtype)), "cutjax": jax.jit(lambda a, b: cutjax.gemm(a, b))}
    times = timing.measure(functions, timing.input_sets(case.inputs), 12, method)
    best = min(time.us for time in times.values())
    return Roofline(case.problem.flops / best / 1e6, 2 * 4 * size / copy.us / 1e3)


def compile_ours(suite: Suite, chosen: Sequence[Any], run: Run) -> None:
    """Compiles our kernels on every core, into the cache; XLA tunes on the device, so its programs come one by one."""
    make = suite.inputs
    assert make

    def lower(case: Any, fn: Function) -> None:
        with contextlib.suppress(Exception):  # the measurement reports it
            jax.jit(fn).lower(*jax.eval_shape(functools.partial(make, case), 0))

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        jobs = []
        for case in chosen:
            with contextlib.suppress(Exception):
                ours = [product.ours(None) for product in _products(suite, case, run)]
                jobs += [pool.submit(lower, case, fn) for fn in (*suite.yardsticks(case).values(), *ours)]
        for job in jobs:
            job.result()


def _products(suite: Suite, case: Any, run: Run) -> list[Product]:
    assert suite.products
    return [product for product in suite.products(case) if run.products is None or product.name in run.products]


class _Found:
    """Findings about one case, step by step; functions, times and failures by `key`."""

    def __init__(self, suite: Suite, case: Any, run: Run):
        make = suite.inputs
        assert make
        self.suite, self.run = suite, run
        self.products = _products(suite, case, run)
        self.sets = timing.input_sets(lambda seed: make(case, seed))
        self.functions: dict[str, Function] = {}
        self.looks: dict[str, Any] = {}
        self.errors: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.peaks: dict[str, float] = {}
        self.times: dict[str, timing.Timing] = {}

    def compile(self, functions: Mapping[str, Callable[[], Function]], looks: Sequence[Product] = ()) -> None:
        """Compiles functions and what looks at their results, in threads where none is tuned on the device."""

        def compiled(job: Callable[[], Any]) -> Any:
            try:
                return job()
            except Exception as error:  # whatever is wrong with one of them, the others go on
                return reason(error)

        def function(name: str) -> Function:
            made = functions[name]()
            compiled = jit(made).lower(*self.sets[0]).compile()
            self.peaks[name] = peak_mib(compiled)
            return compiled if self.run.method == "cupti" else jax.jit(made)  # the host's clock traces it in a loop

        def look(product: Product) -> Function:
            out = jax.eval_shape(product.ours(None), *self.sets[0])
            make = product.peers[product.beside].make if product.beside else None
            theirs = jax.eval_shape(make(), *self.sets[0]) if make else None
            return jit(product.look, **UNTUNED).lower(self.sets[0], out, theirs).compile()

        jobs = [functools.partial(function, name) for name in functions]
        jobs += [functools.partial(look, product) for product in looks]
        workers = min(16, os.cpu_count() or 1) if self.suite.threads else 1
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(compiled, jobs))
        for name, result in zip(functions, results, strict=False):
            (self.failures if isinstance(result, str) else self.functions)[name] = result
        self.looks |= {p.name: result for p, result in zip(looks, results[len(functions) :], strict=True)}

    def check(self, product: Product, name: str, result: Callable[[Any], Any] = lambda out: out) -> None:
        """Looks at a result; a function whose result is wrong is not timed, a peer's neither."""
        if name not in self.functions:
            return
        args, look, beside = self.sets[-1], self.looks[product.name], key(product.beside, product.name)
        if isinstance(look, str):
            wrong = f"cannot be checked: {look}"
        elif product.beside and beside not in self.functions:
            wrong = f"cannot be checked: {beside}: {self.failures[beside]}"
        else:
            try:
                theirs = self.functions[beside](*args) if product.beside else None
                self.errors[name], wrong = product.judge(look(args, result(self.functions[name](*args)), theirs))
            except Exception as error:  # the others are checked all the same
                wrong = reason(error)
        if wrong:
            self.failures[name] = wrong
            del self.functions[name]

    def measure(self, names: Iterable[str], reps: int) -> dict[str, timing.Timing]:
        """Times some functions interleaved; one by one where that fails, and those that fail alone are given up."""
        functions = {name: self.functions[name] for name in names if name in self.functions}
        if any(name.split()[0] in self.suite.foreign for name in functions):  # on a stream of its own: none may overlap
            functions = {name: functools.partial(_wait, function) for name, function in functions.items()}
        try:
            return timing.measure(functions, self.sets, reps, self.run.method) if functions else {}
        except Exception as error:  # of one of them, or of the profiler
            if len(functions) > 1:
                return {key: time for name in functions for key, time in self.measure([name], reps).items()}
            (name,) = functions
            self.failures[name] = f"not timed: {reason(error)}"
            del self.functions[name]
            return {}


def _wait(function: Function, *args: Any) -> Any:
    return jax.block_until_ready(function(*args))


def measure_case(suite: Suite, case: Any, run: Run) -> list[Row]:
    """Checks, then times in one run, ours and the peers'; a row for each product and config."""
    found = _Found(suite, case, run)
    variants: dict[str, Mapping[str, Any] | None] = {"auto": None, **{json.dumps(dict(c)): c for c in run.configs}}
    functions: dict[str, Callable[[], Function]] = {}
    swept: dict[str, Mapping[str, Any]] = {}
    alone: list[tuple[Product, str, Peer]] = []
    checked: list[tuple[Product, str]] = []
    for name, function in suite.yardsticks(case).items():
        functions[name] = lambda function=function: function
    for product in found.products:
        for whose, peer in _wanted(product, run):
            name = key(whose, product.name)
            make = peer.make
            assert make
            if peer.runs:
                alone.append((product, name, peer))
                continue
            tried = {name: {}} if peer.configs is None else {key(name, str(i)): c for i, c in enumerate(peer.configs)}
            functions |= {n: functools.partial(make, **config) for n, config in tried.items()}
            swept |= tried if peer.configs is not None else {}
            checked += [(product, n) for n in tried] if peer.check else []
        for variant, config in variants.items():
            name = _ours(product, variant)
            functions[name] = functools.partial(_pinned, product, config)
            checked.append((product, name))
    found.compile(functions, found.products)
    for product, name in checked:
        found.check(product, name)
    fastest = _fastest(found.measure(swept, 2))
    _add_foreign(found, case)
    names = [*(name for name in found.functions if name not in swept), *fastest.values()]
    total = sum(time.us for time in found.measure(names, suite.rough).values())
    reps = int(suite.timed_us / max(total, 1.0))
    found.times |= found.measure(names, min(max(reps, suite.reps[0]), suite.reps[1]))
    suite.release()
    for product, name, peer in alone:
        if why := peer.refuse(run.roofline):
            found.failures[name] = why
            continue
        assert peer.make
        found.compile({name: peer.make})
        found.check(product, name)
        found.times |= found.measure([name], peer.runs)
    rows = []
    for product in found.products:
        seen = {whose: _figures(found, key(whose, product.name), fastest, swept) for whose in _names(product, run)}
        seen |= {name: _figures(found, name, fastest, swept) for name in product.yardsticks}
        rows += [_row(found, case, product, variant, seen) for variant in variants]
    return rows


def _names(product: Product, run: Run) -> list[str]:
    return [name for name in product.peers if run.peers is None or name in (*run.peers, product.beside)]


def _wanted(product: Product, run: Run) -> list[tuple[str, Peer]]:
    """Returns the peers that JAX runs, of those asked for."""
    return [(name, product.peers[name]) for name in _names(product, run) if product.peers[name].make]


def _ours(product: Product, variant: str) -> str:
    return key(OURS, product.name, "" if variant == "auto" else variant)


def _pinned(product: Product, config: Mapping[str, Any] | None) -> Function:
    return product.ours(None if config is None else cutjax.Config(**config))


def _fastest(rough: Mapping[str, timing.Timing]) -> dict[str, str]:
    """For each product of a peer that is swept, e.g. "pallas dx", the name of its fastest config."""
    slowest_first = sorted(rough, key=lambda name: rough[name].us, reverse=True)
    return {name.rpartition(" ")[0]: name for name in slowest_first}


def _add_foreign(found: _Found, case: Any) -> None:
    """Adds products of another library, where kernels are timed: the clock of the host cannot tell them apart."""
    for whose, make in found.suite.foreign.items():
        products = [product for product in found.products if whose in _names(product, found.run)]
        try:
            if products and found.run.method != "cupti":
                raise RuntimeError(f"{whose} is timed by its kernels only, and their times cannot be read here")
            functions = make(case, found.sets) if products else {}
        except Exception as error:
            found.failures |= {key(whose, product.name): reason(error) for product in products}
            continue
        for product in products:
            found.functions[key(whose, product.name)] = functions[product.name]
            found.check(product, key(whose, product.name), lambda out: jnp.from_dlpack(out.contiguous()))


def _figures(found: _Found, name: str, fastest: Mapping[str, str], swept: Mapping[str, Any]) -> Figures:
    if name not in found.functions and name not in found.failures:
        name = fastest.get(name, f"{name} 0")
    if name not in found.times:
        return Figures(failure=found.failures.get(name, f"no config of {name.split()[0]} divides this problem"))
    time = found.times[name]
    kernel = json.dumps(dict(swept[name])) if name in swept else " + ".join(time.kernels)
    return Figures(time.us, time.iqr_us, kernel, found.peaks.get(name, math.nan))


def _row(found: _Found, case: Any, product: Product, variant: str, seen: dict[str, Figures]) -> Row:
    name, roofline = _ours(product, variant), found.run.roofline
    pinned = variant != "auto"
    row: dict[str, Any] = {"case": case.name, "product": product.name, "variant": variant, "peers": seen}
    row |= {"figures": product.figures, "targets": {} if pinned else product.targets}
    if name not in found.times:
        return Row(**row, failure=found.failures[name])
    time = found.times[name]
    gb_per_s = product.bytes / time.us / 1e3
    ratios = {whose: figures.us / time.us for whose, figures in seen.items() if not math.isnan(figures.us)}
    ratios["copy"] = gb_per_s / roofline.gb_per_s
    if len(product.peers) > 1 and (best := Row(**row).fastest):
        ratios["peers"] = ratios[best]
    return Row(
        **row,
        kernel=" + ".join(time.kernels) or name,
        us=time.us,
        iqr_us=time.iqr_us,
        tflops=product.flops / time.us / 1e6,
        gb_per_s=gb_per_s,
        roofline=roofline.us(product.flops, product.bytes) / time.us,
        peak_mib=found.peaks[name],
        error=found.errors[name],
        ratios=ratios,
    )
