"""Grouped products beside those of benchmarks.peers, and beside a dense one: ``benchmarks run --op grouped``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from benchmarks import oracle, peers
from benchmarks.cases import Grouped
from benchmarks.record import Roofline
from benchmarks.suite import Peer, Product, Suite

DENSE = "dense"
# XLA multiplies all rows by the weights of every group. Where that takes longer or more memory, it is not run.
XLA_MOST_US, XLA_MOST_BYTES, XLA_REPS = 30e3, 16 << 30, 2
SAMPLES = 48  # rows of a result that are compared element by element
# Where each element of a row is rounded to bf16 once, the error of the row's product with random signs has a standard
# deviation of 1.7e-3 of its norm; of a million rows the worst is off by 5 of those. A wrong row is off by about 1.
PROJECTION = 1.3e-2


PRODUCTS = ("forward", "dx", "dw")


def _grouped() -> tuple[Grouped, ...]:
    anchors = ((8, 16384, 14336, 4096), (64, 16384, 1408, 2048), (16, 16384, 16384, 2048), (128, 8192, 1536, 4096))
    cases = [Grouped(*sizes, tags=("anchors",)) for sizes in anchors]
    cases.append(Grouped(8, 128, 14336, 4096, ("anchors", "decode")))
    # Experts, their width and that of the model, experts per token.
    models = {"mixtral": (8, 14336, 4096, 2), "deepseek": (256, 2048, 7168, 8), "qwen": (128, 768, 2048, 8)}
    for model, (groups, n, k, each) in models.items():
        for tokens in (16384, 4096, 128):
            tags = ("models", model, *(["decode"] if tokens == 128 else []))
            cases.append(Grouped(groups, tokens * each, n, k, tags, tokens))
    cases.append(Grouped(128, 4096 * 8, 768, 2048, ("models", "sparse"), 4096, nonempty=8))
    return tuple(cases)


GROUPED = _grouped()


def find_grouped(name: str) -> tuple[Grouped, str]:
    """The case and the product of a name such as ``8g 16384x14336x4096 dx``.

    Raises:
      ValueError: there is none.
    """
    of_case, _, product = name.rpartition(" ")
    for case in GROUPED:
        if case.name == of_case and product in PRODUCTS:
            return case, product
    raise ValueError(f"no grouped product named {name!r}")


# The products.

Inputs = peers.Inputs
Function = Callable[[Inputs], jax.Array]


def ours(product: str, config: cutjax.Config | None = None, backend: str = "cuda") -> Function:
    """Our kernel of a product."""
    params: dict[str, Any] = {"backend": backend, "config": config}
    if product == "forward":
        return lambda i: cutjax.grouped_gemm(i["x"], i["w"], i["sizes"], **params)
    if product == "dx":
        return lambda i: cutjax.grouped_gemm(i["dy"], i["w"], i["sizes"], layout="nt", **params)
    return lambda i: cutjax.grouped_outer(i["x"], i["dy"], i["sizes"], **params)


def xla(product: str) -> Function:
    """The function that a JAX user has."""
    if product == "forward":
        return lambda i: lax.ragged_dot(i["x"], i["w"], i["sizes"])
    if product == "dx":
        return lambda i: jax.vjp(lambda x: lax.ragged_dot(x, i["w"], i["sizes"]), i["x"])[1](i["dy"])[0]
    return lambda i: jax.vjp(lambda w: lax.ragged_dot(i["x"], w, i["sizes"]), i["w"])[1](i["dy"])[0]


def dense(i: Inputs) -> jax.Array:
    """The yardstick: as many rows by one group's weights."""
    return cutjax.gemm(i["x"], i["v"])


# Inputs, and what is right.


def shapes(case: Grouped) -> dict[str, tuple[int, ...]]:
    """The inputs by name; v is the weights of the dense product."""
    g, m, n, k = case.groups, case.m, case.n, case.k
    return {"x": (m, k), "w": (g, k, n), "dy": (m, n), "v": (k, n), "sizes": (g,)}


def avals(case: Grouped) -> tuple[dict[str, jax.ShapeDtypeStruct]]:
    """The inputs of a case as avals."""
    dtypes = {"sizes": jnp.int32}
    return ({name: jax.ShapeDtypeStruct(s, dtypes.get(name, jnp.bfloat16)) for name, s in shapes(case).items()},)


@functools.cache
def _maker(case: Grouped, whole: bool) -> Callable[[int], dict[str, jax.Array]]:
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


def inputs(case: Grouped, seed: int, whole: bool = False) -> tuple[dict[str, jax.Array]]:
    """Random normal inputs in bf16, or whole numbers from -2 to 2."""
    return ({**_maker(case, whole)(seed), "sizes": jnp.asarray(case.sizes)},)


def _sampled(case: Grouped, product: str) -> tuple[np.ndarray, np.ndarray]:
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


def looks(case: Grouped, product: str) -> Callable[[Inputs, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """The function that a check looks with: sampled rows as they are and as they should be, and the worst of all."""
    groups, rows = _sampled(case, product)

    def look(i, out):
        got = out[groups, rows] if product == "dw" else out[rows]
        return got, _rows(product, i, jnp.asarray(groups), jnp.asarray(rows)), _projection(product, i, out)

    return look


def judge(case: Grouped, product: str, got: Any, expected: Any, projection: Any) -> tuple[float, str]:
    """The relative error of the sampled rows, and what is wrong with the result or ""."""
    contracted = {"forward": case.k, "dx": case.n, "dw": int(case.sizes.max())}[product]
    error = oracle.compare(np.asarray(got), np.asarray(expected, np.float64), contracted)
    if not error.ok:
        return error.relative, f"wrong: {error}"
    if not float(projection) <= PROJECTION:
        return error.relative, f"wrong: a row is off by {float(projection):.3g} of its norm, at most {PROJECTION}"
    return error.relative, ""


def _refused(case: Grouped, roofline: Roofline) -> str:
    """Returns the reason against XLA's masked product of all rows by all weights: too long, or too much memory."""
    expected_us = case.groups * case.flops / roofline.tflops / 1e6
    masked = 2 * case.groups * case.m * max(case.n, case.k)
    if expected_us > XLA_MOST_US:
        return f"not run: {case.groups} times the product would take {expected_us / 1e3:.0f} ms"
    return (
        f"not run: rows masked for every group would take {masked / 2**30:.0f} GiB" if masked > XLA_MOST_BYTES else ""
    )


def _product(case: Grouped, product: str) -> Product:
    look = looks(case, product)

    refuse = functools.partial(_refused, case)
    swept = {
        name: Peer(functools.partial(_configured, make, product), configs(case, product))
        for name, (configs, make) in peers.SWEPT.items()
    }
    return Product(
        product,
        case.flops,
        case.bytes(product),
        lambda config: ours(product, config),
        {"xla": Peer(lambda: xla(product), runs=XLA_REPS, refuse=refuse), **swept, "torch": Peer(None)},
        lambda args, out, theirs: look(args[0], out),
        lambda seen: judge(case, product, *seen),
        targets=case.targets(product),
        yardsticks=(DENSE,),
    )


def _configured(make: Callable[..., Function], product: str, **config: Any) -> Function:
    return make(product, config)


def products(case: Grouped) -> list[Product]:
    """The three products of a case."""
    return [_product(case, product) for product in PRODUCTS]


SUITE = Suite(
    "grouped",
    GROUPED,
    inputs,
    products,
    lambda case: {DENSE: dense},
    PRODUCTS,
    {"torch": peers.torch},
    peers.release,
    reps=(6, 40),
    timed_us=200e3,
    threads=True,  # none is tuned on the device: XLA's are compiled apart
    versions=("tokamax", "torch"),
    environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # torch needs memory too
)
