"""Grouped products beside those of benchmarks.peers, and beside a dense one: ``benchmarks.run --op grouped``."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from benchmarks import cases, oracle, peers, report, timing

REPS, TIMED_US = (6, 40), 200e3  # of one case, all functions together
# A graph may run its nodes in any order, and kernels are told apart by their order. Kernel times are the same.
OPTIONS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1 << 20}
DENSE = "dense"
PEERS = ("xla", "pallas", "tokamax", "torch")
TWO_SETS_BYTES = 8 << 30  # of inputs larger than this there is one set: a single run of them leaves nothing in L2
# XLA multiplies all rows by the weights of every group. Where that takes longer or more memory, it is not run.
XLA_MOST_US, XLA_MOST_BYTES, XLA_REPS = 30e3, 16 << 30, 2
SAMPLES = 48  # rows of a result that are compared element by element
# Where each element of a row is rounded to bf16 once, the error of the row's product with random signs has a standard
# deviation of 1.7e-3 of its norm; of a million rows the worst is off by 5 of those. A wrong row is off by about 1.
PROJECTION = 1.3e-2


@dataclasses.dataclass(frozen=True)
class Peer:
    """What another library takes for the same product; a failure says why there is no time."""

    us: float = math.nan
    iqr_us: float = math.nan
    kernel: str = ""
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One product of one case.

    Attributes:
      case, product: which, e.g. ``8g 16384x14336x4096`` and "dx".
      kernel, us, iqr_us, tflops: ours.
      gb_per_s: bytes that must move over our time.
      error: of the rows looked at, relative to their norm.
      ratios: "dense", "peers" (the fastest) and "torch": their time over ours; "copy": the share of the measured copy
        bandwidth.
      targets: the least asked for, of some of them.
      peers: by name.
      failure: why there is no time, else "".
    """

    case: str
    product: str
    kernel: str = ""
    us: float = math.nan
    iqr_us: float = math.nan
    tflops: float = math.nan
    gb_per_s: float = math.nan
    error: float = math.nan
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    targets: dict[str, float] = dataclasses.field(default_factory=dict)
    peers: dict[str, Peer] = dataclasses.field(default_factory=dict)
    failure: str = ""

    @property
    def name(self) -> str:
        """As ``cases.find_grouped`` takes it."""
        return f"{self.case} {self.product}"

    @property
    def summary(self) -> str:
        """One line of its numbers."""
        ratios = ", ".join(f"{key} {ratio:.3f}" for key, ratio in self.ratios.items())
        return f"{self.us:.1f} us, {ratios}" + (f", MISSED {', '.join(self.missed)}" if self.missed else "")

    @property
    def missed(self) -> tuple[str, ...]:
        """The targets that were measured and not reached."""
        return tuple(key for key, target in self.targets.items() if self.ratios.get(key, math.nan) < target)

    @property
    def fastest(self) -> str:
        """The name of the fastest peer, or ""."""
        timed = {name: peer.us for name, peer in self.peers.items() if not math.isnan(peer.us)}
        return min(timed, key=timed.__getitem__) if timed else ""


# The products.

Inputs = peers.Inputs
Product = Callable[[Inputs], jax.Array]


def ours(product: str, config: cutjax.Config | None = None, backend: str = "cuda") -> Product:
    """Our kernel of a product."""
    params: dict[str, Any] = {"backend": backend, "config": config}
    if product == "forward":
        return lambda i: cutjax.grouped_gemm(i["x"], i["w"], i["sizes"], **params)
    if product == "dx":
        return lambda i: cutjax.grouped_gemm(i["dy"], i["w"], i["sizes"], layout="nt", **params)
    return lambda i: cutjax.grouped_outer(i["x"], i["dy"], i["sizes"], **params)


def xla(product: str) -> Product:
    """What a JAX user has."""
    if product == "forward":
        return lambda i: lax.ragged_dot(i["x"], i["w"], i["sizes"])
    if product == "dx":
        return lambda i: jax.vjp(lambda x: lax.ragged_dot(x, i["w"], i["sizes"]), i["x"])[1](i["dy"])[0]
    return lambda i: jax.vjp(lambda w: lax.ragged_dot(i["x"], w, i["sizes"]), i["w"])[1](i["dy"])[0]


def dense(i: Inputs) -> jax.Array:
    """The yardstick: as many rows by one group's weights."""
    return cutjax.gemm(i["x"], i["v"])


# Inputs, and what is right.


def shapes(case: cases.Grouped) -> dict[str, tuple[int, ...]]:
    """The inputs by name; v is the weights of the dense product."""
    g, m, n, k = case.groups, case.m, case.n, case.k
    return {"x": (m, k), "w": (g, k, n), "dy": (m, n), "v": (k, n), "sizes": (g,)}


def result_shape(case: cases.Grouped, product: str) -> tuple[int, ...]:
    """The shape of a product."""
    return {"forward": (case.m, case.n), "dx": (case.m, case.k), "dw": (case.groups, case.k, case.n)}[product]


def avals(case: cases.Grouped) -> tuple[dict[str, jax.ShapeDtypeStruct]]:
    """The same as avals."""
    dtypes = {"sizes": jnp.int32}
    return ({name: jax.ShapeDtypeStruct(s, dtypes.get(name, jnp.bfloat16)) for name, s in shapes(case).items()},)


@functools.cache
def _maker(case: cases.Grouped, whole: bool) -> Callable[[int], dict[str, jax.Array]]:
    def draw(key, shape):
        if whole:
            return jax.random.randint(key, shape, -2, 3, jnp.int8).astype(jnp.bfloat16)
        return jax.random.normal(key, shape, jnp.bfloat16)

    @jax.jit
    def make(seed):
        found = {}
        for i, (name, shape) in enumerate(shapes(case).items()):
            key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), i)
            if name == "w":  # group by group: all at once would take several times its memory
                found[name] = lax.map(lambda key, shape=shape: draw(key, shape[1:]), jax.random.split(key, shape[0]))
            elif name != "sizes":
                found[name] = draw(key, shape)
        return found

    return make


def inputs(case: cases.Grouped, seed: int, whole: bool = False) -> tuple[dict[str, jax.Array]]:
    """Random normal inputs in bf16, or whole numbers from -2 to 2."""
    return ({**_maker(case, whole)(seed), "sizes": jnp.asarray(case.sizes)},)


def input_sets(case: cases.Grouped) -> list[tuple[dict[str, jax.Array]]]:
    """What timing.input_sets makes, or one set where that is large."""
    nbytes = 2 * sum(math.prod(shape) for shape in shapes(case).values())
    if nbytes > TWO_SETS_BYTES:
        return [jax.block_until_ready(inputs(case, 0))]
    return timing.input_sets(lambda seed: inputs(case, seed))


def _sampled(case: cases.Grouped, product: str) -> tuple[np.ndarray, np.ndarray]:
    """Groups, and for each a row to look at: of dw a row of its matrix, of the others the first and last of a group."""
    rng = np.random.default_rng(0)
    if product == "dw":
        nonempty = np.flatnonzero(case.sizes)
        groups = rng.choice(nonempty, SAMPLES // 2)
        groups = np.concatenate([groups, rng.integers(0, case.groups, SAMPLES // 4)])
        return groups, rng.integers(0, case.k, len(groups))
    ends = np.cumsum(case.sizes)
    rows = rng.integers(0, case.m, SAMPLES // 2)
    some = rng.choice(np.flatnonzero(case.sizes), SAMPLES // 4)
    rows = np.concatenate([rows, ends[some] - 1, (ends - case.sizes)[some]])
    return np.searchsorted(ends, rows, side="right"), rows


def _rows(product: str, i: Inputs, groups: jax.Array, rows: jax.Array) -> jax.Array:
    """The sampled rows of a product, added up in f32 without the matrix unit."""
    ends = jnp.cumsum(i["sizes"])

    def one(at):
        group, row = at
        if product == "dw":
            index = jnp.arange(i["x"].shape[0])
            mine = (index >= ends[group] - i["sizes"][group]) & (index < ends[group])
            a, b, axis = jnp.where(mine, i["x"][:, row], 0)[:, None], i["dy"], 0
        elif product == "dx":
            a, b, axis = i["dy"][row][None], i["w"][group], 1
        else:
            a, b, axis = i["x"][row][:, None], i["w"][group], 0
        return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis)

    return lax.map(one, (groups, rows))


def _projection(product: str, i: Inputs, out: jax.Array) -> jax.Array:
    """The largest error of a row of the result times random signs, over the row's norm: every row is looked at."""
    signs = jax.random.rademacher(jax.random.key(1), (out.shape[-1],), jnp.int8).astype(jnp.float32)
    group = jnp.searchsorted(jnp.cumsum(i["sizes"]), jnp.arange(i["x"].shape[0]), side="right")

    def dot(x, axis=-1):  # of a matrix and the signs; a product would be tuned on the device, a sum is not
        return jnp.sum(x.astype(jnp.float32) * (signs if axis == -1 else signs[:, None]), axis)

    def row(out):
        return dot(out), jnp.sqrt(jnp.sum(jnp.square(out.astype(jnp.float32)), -1))

    if product == "dw":
        terms = i["x"].astype(jnp.float32) * dot(i["dy"])[:, None]
        expected = jax.ops.segment_sum(terms, group, i["sizes"].shape[0], indices_are_sorted=True)
        got, norm = lax.map(row, out)
    else:
        x = i["x"] if product == "forward" else i["dy"]
        of_group = lax.map(lambda w: dot(w, -1 if product == "forward" else 0), i["w"])
        expected = jnp.sum(x.astype(jnp.float32) * of_group[group], -1)
        got, norm = row(out)
    error = jnp.abs(got - expected) / jnp.maximum(norm, 1e-3)
    return jnp.max(jnp.where(jnp.isfinite(error), error, jnp.inf))


def looks(case: cases.Grouped, product: str) -> Callable[[Inputs, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """What a check looks at: the sampled rows as they are and as they should be, and the worst of all rows."""
    groups, rows = _sampled(case, product)

    def look(i, out):
        got = out[groups, rows] if product == "dw" else out[rows]
        return got, _rows(product, i, jnp.asarray(groups), jnp.asarray(rows)), _projection(product, i, out)

    return look


def judge(case: cases.Grouped, product: str, got: Any, expected: Any, projection: Any) -> tuple[float, str]:
    """The relative error of the sampled rows, and what is wrong with the result or ""."""
    contracted = {"forward": case.k, "dx": case.n, "dw": int(case.sizes.max())}[product]
    error = oracle.compare(np.asarray(got), np.asarray(expected, np.float64), contracted)
    if not error.ok:
        return error.relative, f"wrong: {error}"
    if not float(projection) <= PROJECTION:
        return error.relative, f"wrong: a row is off by {float(projection):.3g} of its norm, at most {PROJECTION}"
    return error.relative, ""


# The measurement.


def _compile(functions: Mapping[Any, tuple[Callable, tuple]], method: str) -> dict[Any, Any]:
    """Each function compiled for its avals, or why not; in threads, as none of them is tuned on the device."""
    options = OPTIONS if jax.default_backend() == "gpu" else {}

    def compile(fn, avals):
        try:
            jitted = jax.jit(fn, compiler_options=options)
            compiled = jitted.lower(*avals).compile()
            return compiled if method == "cupti" else jitted
        except Exception as error:  # whatever is wrong with one of them, the others go on
            return _reason(error)

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        jobs = {name: pool.submit(compile, *job) for name, job in functions.items()}
        return {name: job.result() for name, job in jobs.items()}


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _wait(function: Product, i: Inputs) -> jax.Array:
    return jax.block_until_ready(function(i))


def compile_ours(chosen: Sequence[cases.Grouped], products: Sequence[str]) -> None:
    """Compiles our kernels on every core, into the cache."""

    def lower(case, fn):
        with contextlib.suppress(Exception):  # the measurement reports it
            jax.jit(fn).lower(*avals(case))

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(lower, case, fn) for case in chosen for fn in (dense, *map(ours, products))]
        for job in jobs:
            job.result()


class _Case:
    """What is found about one case, step by step."""

    def __init__(self, case: cases.Grouped, products: Sequence[str], method: str):
        self.case, self.products, self.method = case, products, method
        self.sets = input_sets(case)
        self.looks: dict[str, Any] = {}
        self.functions: dict[str, Callable] = {}
        self.errors: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.times: dict[str, timing.Timing] = {}

    def compile(self, functions: Mapping[str, Product]) -> None:
        """Compiles functions and takes those that are right; a name is whose, and of which product."""
        (i,) = avals(self.case)
        jobs: dict[Any, tuple[Callable, tuple]] = {name: (fn, (i,)) for name, fn in functions.items()}
        for product in self.products if not self.looks else ():
            out = jax.ShapeDtypeStruct(result_shape(self.case, product), jnp.bfloat16)
            jobs["look", product] = (looks(self.case, product), (i, out))
        compiled = _compile(jobs, self.method)
        self.looks |= {name[1]: look for name, look in compiled.items() if isinstance(name, tuple)}
        for name in functions:
            function = compiled[name]
            if not isinstance(function, str):
                self.functions[name] = function
                if name != DENSE:
                    self.check(name, functools.partial(function, *self.sets[-1]))
            else:
                self.failures[name] = function

    def check(self, name: str, call: Callable[[], jax.Array]) -> None:
        """Looks at a result; a function whose result is wrong is not timed, a peer's neither."""
        product = name.split()[1]
        try:
            out = call()
            if (out.shape, out.dtype) != (result_shape(self.case, product), jnp.bfloat16):
                wrong = f"wrong: the result is {out.dtype}{list(out.shape)}"
            elif isinstance(look := self.looks[product], str):
                wrong = f"cannot be checked: {look}"
            else:
                self.errors[name], wrong = judge(self.case, product, *look(*self.sets[-1], out))
        except Exception as error:
            wrong = _reason(error)
        if wrong:
            self.failures[name] = wrong
            self.functions.pop(name, None)

    def measure(self, names: Sequence[str], reps: int) -> dict[str, timing.Timing]:
        """Times some functions interleaved; one by one where that fails, and those that fail alone are given up."""
        functions = {name: self.functions[name] for name in names if name in self.functions}
        if any(name.startswith("torch") for name in functions):  # it has a stream of its own: no kernels may overlap
            functions = {name: functools.partial(_wait, function) for name, function in functions.items()}
        try:
            return timing.measure(functions, self.sets, reps, self.method) if functions else {}
        except Exception as error:  # of one of them, or of the profiler
            if len(functions) > 1:
                return {key: time for name in functions for key, time in self.measure([name], reps).items()}
            (name,) = functions
            self.failures[name] = f"not timed: {_reason(error)}"
            del self.functions[name]
            return {}


def measure_case(
    case: cases.Grouped,
    products: Sequence[str],
    roofline: report.Roofline,
    method: str,
    wanted: Sequence[str] = PEERS,
    backend: str = "cuda",
) -> list[Row]:
    """Checks, then times in one run: our products, the dense one and the peers; a row for each product."""
    found = _Case(case, products, method)
    functions: dict[str, Product] = {DENSE: dense, **{f"ours {p}": ours(p, None, backend) for p in products}}
    configs: dict[str, dict[str, Any]] = {}
    for peer, (of_case, make) in peers.SWEPT.items():
        for product in products if peer in wanted else ():
            for i, config in enumerate(of_case(case, product)):
                configs[f"{peer} {product} {i}"] = config
                functions[f"{peer} {product} {i}"] = make(product, config)
    found.compile(functions)
    swept = _fastest(found, [name for name in configs if name in found.functions])
    if "torch" in wanted:
        _add_torch(found)
    found.times |= _measure(found, [*(name for name in found.functions if name not in configs), *swept.values()])
    if "torch" in wanted:
        peers.release()
    if "xla" in wanted:
        _measure_xla(found, roofline)
    rows = []
    for product in products:
        seen: dict[str, Peer] = {}
        for name in (name for name in PEERS if name in wanted):
            key = f"{name} {product}"
            if name in peers.SWEPT:
                key = swept.get(key, f"{key} 0")
            if key in found.times:
                time = found.times[key]
                kernel = json.dumps(configs[key]) if key in configs else " + ".join(time.kernels)
                seen[name] = Peer(time.us, time.iqr_us, kernel)
            else:
                seen[name] = Peer(failure=found.failures.get(key, f"no config of {name} divides this problem"))
        rows.append(_row(found, product, seen, roofline))
    return rows


def _add_torch(found: _Case) -> None:
    """torch's products, where kernels are timed: they cannot be a part of what the host's clock times."""
    try:
        if found.method != "cupti":
            raise RuntimeError("torch is timed by its kernels only, and their times cannot be read here")
        functions = peers.torch(found.case, found.sets)
    except Exception as error:
        found.failures |= {f"torch {product}": _reason(error) for product in found.products}
        return
    for product in found.products:
        call = found.functions[f"torch {product}"] = functions[product]
        found.check(f"torch {product}", lambda call=call: jnp.from_dlpack(call(*found.sets[-1]).contiguous()))


def _fastest(found: _Case, names: Sequence[str]) -> dict[str, str]:
    """For each product of a peer that is swept, e.g. "pallas dx", the name of its fastest config."""
    rough = found.measure(names, 2)
    best: dict[str, str] = {}
    for name in sorted(rough, key=lambda name: rough[name].us, reverse=True):
        best[name.rpartition(" ")[0]] = name
    return best


def _measure(found: _Case, names: Sequence[str]) -> dict[str, timing.Timing]:
    """All of them in turns, as often as they take bearable time."""
    rough = found.measure(names, 2)
    total = sum(time.us for time in rough.values())
    return found.measure(names, min(max(int(TIMED_US / max(total, 1.0)), REPS[0]), REPS[1]))


def _measure_xla(found: _Case, roofline: report.Roofline) -> None:
    """XLA's, where its masked product of all rows by all groups' weights takes bearable time and memory."""
    case = found.case
    expected_us, masked = (
        case.groups * case.flops / roofline.tflops / 1e6,
        2 * case.groups * case.m * max(case.n, case.k),
    )
    for product in found.products:
        name = f"xla {product}"
        if expected_us > XLA_MOST_US:
            found.failures[name] = f"not run: {case.groups} times the product would take {expected_us / 1e3:.0f} ms"
        elif masked > XLA_MOST_BYTES:
            found.failures[name] = f"not run: rows masked for every group would take {masked / 2**30:.0f} GiB"
        else:
            found.compile({name: xla(product)})
            if name in found.functions:
                found.times |= found.measure([name], XLA_REPS)


def _row(found: _Case, product: str, seen: dict[str, Peer], roofline: report.Roofline) -> Row:
    case, name = found.case, f"ours {product}"
    row = Row(case.name, product, targets=case.targets(product), peers=seen)
    if name not in found.times:
        return dataclasses.replace(row, failure=found.failures[name])
    time = found.times[name]
    gb_per_s = case.bytes(product) / time.us / 1e3
    ratios = {"dense": found.times[DENSE].us / time.us} if DENSE in found.times else {}
    ratios["copy"] = gb_per_s / roofline.gb_per_s
    for key, peer in (("peers", seen.get(row.fastest)), ("torch", seen.get("torch"))):
        if peer is not None and not math.isnan(peer.us):
            ratios[key] = peer.us / time.us
    return dataclasses.replace(
        row,
        kernel=" + ".join(time.kernels),
        us=time.us,
        iqr_us=time.iqr_us,
        tflops=case.flops / time.us / 1e6,
        gb_per_s=gb_per_s,
        error=found.errors[name],
        ratios=ratios,
    )


# The report.


def document(environment: dict[str, Any], method: str, roofline: report.Roofline, rows: Sequence[Row]) -> dict:
    """The JSON of one run."""
    return {"op": "grouped", **report.document(environment, method, roofline, rows)}


def read(path: pathlib.Path) -> tuple[dict[str, Any], list[Row]]:
    """A run's JSON and its rows."""

    def nan(value: Any) -> Any:
        return math.nan if value is None else value

    content = json.loads(path.read_text())
    if content.get("op") != "grouped":
        raise ValueError(f"{path}: expected a run of --op grouped, it is of {content.get('op')!r}")
    rows = []
    for row in content["rows"]:
        seen = {name: Peer(**{key: nan(value) for key, value in peer.items()}) for name, peer in row["peers"].items()}
        ratios = {key: nan(value) for key, value in row["ratios"].items()}
        rows.append(Row(**{**{key: nan(value) for key, value in row.items()}, "peers": seen, "ratios": ratios}))
    return content, rows


def print_rows(rows: Sequence[Row], title: str) -> None:
    """The table a person reads."""
    import rich.console
    import rich.table

    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=40)
    for column in ("us", "spread", "TFLOP/s", "of dense", "of copy", *PEERS, "ratio", "missed"):
        table.add_column(column, justify="right", no_wrap=True)

    def number(value: float, digits: int) -> str:
        return "-" if math.isnan(value) else f"{value:.{digits}f}"

    for row in rows:
        ratios = [row.ratios.get(key, math.nan) for key in ("dense", "copy")]
        cells = [(row.us, 1), (row.iqr_us, 1), (row.tflops, 0), *((ratio, 3) for ratio in ratios)]
        cells += [(row.peers[name].us if name in row.peers else math.nan, 1) for name in PEERS]
        cells += [(row.ratios.get("peers", math.nan), 3)]
        missed = ", ".join(f"{key} {row.targets[key]:.2f}" for key in row.missed)
        style = "red" if missed or row.failure else None
        table.add_row(row.name, row.failure or row.kernel, *(number(*cell) for cell in cells), missed, style=style)
    console = rich.console.Console(width=None if os.isatty(1) else 200)
    console.print(table)
    for key, products in (("peers", ("forward", "dx")), ("peers", ("dw",)), ("torch", ("dw",))):
        ratios = [row.ratios[key] for row in rows if row.product in products and key in row.ratios]
        if ratios:
            mean = report.geometric_mean(ratios)
            console.print(f"{' and '.join(products)} to {key}: geometric mean {mean:.3f} of {len(ratios)}")
    for reason in dict.fromkeys(f"{name}: {p.failure}" for row in rows for name, p in row.peers.items() if p.failure):
        console.print(reason, highlight=False, markup=False)
