"""Fused epilogues, layers and blocks beside XLA and beside our own plain product: ``benchmarks run --op fused``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import cutjax
from benchmarks.suite import Peer, Product, Suite

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
class Fused:
    """Products with more around them, on the same inputs; bf16 throughout.

    Attributes:
      kind: "epilogue" (several of one product), "prologue" (the scale of a norm before one, of few rows), "gated" (two
        products), "layer" or "mlp" (forward and backward).
      sizes: m, n, k; of an mlp tokens, hidden, model.
      target: the least ratio to XLA we ask for, or None where we only report.
      plain_target: the most time we allow over that of the plain product, or None.
    """

    kind: str
    sizes: tuple[int, int, int]
    target: float | None = None
    plain_target: float | None = None

    @property
    def name(self) -> str:
        """The sizes, as in ``Dense``."""
        return "x".join(map(str, self.sizes))

    @property
    def tags(self) -> tuple[str]:
        """The kind."""
        return (self.kind,)


FUSED = (
    *(
        Fused("epilogue", sizes, target, plain_target=1.03)
        for sizes, target in (
            ((8192, 14336, 4096), 1.10),
            ((8192, 8192, 8192), 1.05),
            ((2048, 2048, 2048), 1.20),
            ((4096, 4096, 4096), None),
            ((16384, 1024, 1024), None),
        )
    ),
    *(Fused("prologue", (rows, 14336, 4096)) for rows in (1, 4, 16, 64, 256)),
    *(Fused("gated", sizes, 1.10) for sizes in ((8192, 14336, 4096), (8192, 8192, 8192), (2048, 2048, 2048))),
    Fused("layer", (8192, 14336, 4096), 1.10),
    Fused("layer", (16384, 16384, 4096), 1.20),
    Fused("layer", (2048, 8192, 2048), 1.20),
    Fused("mlp", (16384, 16384, 4096), 1.08),
    Fused("mlp", (2048, 8192, 2048), 1.08),
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One thing to compute, ours and XLA's; both take all inputs of their problem, by name.

    Attributes:
      plain: True if our plain products of the same problem are a yardstick.
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


def _forward(case: Fused) -> Iterator[Pair]:
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


def _prologue(case: Fused) -> Iterator[Pair]:
    m, n, k = case.sizes

    def norm(a, r, g):
        return a.astype(jnp.float32) * r * g.astype(jnp.float32)

    def ours(x):
        return cutjax.gemm(x["x"], x["w"], prologue=norm, prologue_operands=(_rms(x["x"]), x["c"]), backend="cuda")

    def xla(x, precision):
        made = norm(x["x"], _rms(x["x"]), x["c"]).astype(x["x"].dtype)
        return _matmul(precision)(made, x["w"])

    yield Pair("rms norm", ours, xla, 2 * m * n * k, 2 * (m * k + k * n + m * n + k), case.target)


def _rms(x: jax.Array) -> jax.Array:
    """The factor of each row by which RMSNorm multiplies it."""
    return lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)


def _gated(case: Fused) -> Iterator[Pair]:
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


def _layer(case: Fused) -> Iterator[Pair]:
    m, n, k = case.sizes

    def fused(x):
        return cutjax.gemm(x["x"], x["w"], epilogue=_mixed("bias+gelu"), operands=(x["b"],))

    def ours(x):
        return _gradient(fused, x, ("x", "w", "b"))

    def xla(x, precision):
        return _gradient(lambda x: jax.nn.gelu(_matmul(precision)(x["x"], x["w"]) + x["b"]), x, ("x", "w", "b"))

    moved = 4 * (m * k + k * n) + 6 * m * n
    yield Pair("bias+gelu layer, fwd+bwd", ours, xla, 6 * m * n * k, moved, case.target, plain=False)


def _block(case: Fused) -> Iterator[Pair]:
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


KINDS = {"epilogue": _forward, "prologue": _prologue, "gated": _gated, "layer": _layer, "mlp": _block}


def pairs(case: Fused) -> list[Pair]:
    """Everything computed on the inputs of a case."""
    return list(KINDS[case.kind](case))


def plain(case: Fused) -> Callable[[Mapping[str, jax.Array]], Any]:
    """Our plain products of the case."""
    names = ("w", "u") if case.kind == "gated" else ("w",)
    return lambda x: [cutjax.gemm(x["x"], x[name], backend="cuda") for name in names]


def shapes(case: Fused) -> dict[str, tuple[int, ...]]:
    """The inputs by name: x @ w, operands, a second weight u, a third d, and the result's cotangent g."""
    m, n, k = case.sizes
    found: dict[str, tuple[int, ...]] = {"x": (m, k), "w": (k, n)}
    if case.kind == "epilogue":
        found |= {"b": (n,), "r": (m, n), "s": ()}
    elif case.kind == "prologue":
        found |= {"c": (k,)}
    elif case.kind == "layer":
        found |= {"b": (n,), "g": (m, n)}
    else:
        found |= {"u": (k, n)} | ({"d": (n, k), "g": (m, k)} if case.kind == "mlp" else {})
    return found


@functools.cache
def _maker(case: Fused) -> Callable[[int], dict[str, jax.Array]]:
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


def inputs(case: Fused, seed: int) -> tuple[dict[str, jax.Array]]:
    """Random normal inputs in bf16."""
    return (_maker(case)(seed),)


def products(case: Fused) -> list[Product]:
    """The products of a case, as the runner takes them."""
    return [_product(case, pair) for pair in pairs(case)]


def _product(case: Fused, pair: Pair) -> Product:
    def ours(config: cutjax.Config | None) -> Callable[..., Any]:
        if config is not None:
            raise NotImplementedError("one config does not serve all of a fused program's products")
        return pair.ours

    def look(args: Any, out: Any, theirs: Any) -> Any:
        """The relative errors of our results and XLA's against float32."""
        (x,) = args
        wide = pair.xla({name: value.astype(jnp.float32) for name, value in x.items()}, lax.Precision.HIGHEST)

        def error(out, ref):
            return jnp.linalg.norm((out.astype(jnp.float32) - ref).ravel()) / jnp.linalg.norm(ref.ravel())

        return [jax.tree.leaves(jax.tree.map(error, result, wide)) for result in (out, theirs)]

    def judge(seen: Any) -> tuple[float, str]:
        found = [(float(x), max(RELATIVE, SHARE_OF_XLA * float(y))) for x, y in zip(*seen, strict=True)]
        wrong = [f"wrong: relative error {x:.3g}, at most {most:.3g}" for x, most in found if not x <= most]
        return max(x for x, _ in found), "; ".join(wrong)

    plain = {PLAIN: 1 / case.plain_target} if pair.plain and case.plain_target else {}
    return Product(
        pair.name,
        pair.flops,
        pair.bytes,
        ours,
        {"xla": Peer(lambda: lambda x: pair.xla(x, None), check=False)},
        look,
        judge,
        beside="xla",
        targets=({} if pair.target is None else {"xla": pair.target}) | plain,
        yardsticks=(PLAIN,) if pair.plain else (),
    )


def _yardsticks(case: Fused) -> dict[str, Callable[..., Any]]:
    return {PLAIN: plain(case)} if any(pair.plain for pair in pairs(case)) else {}


SUITE = Suite("fused", FUSED, inputs, products, _yardsticks, reps=(12, 60), timed_us=250e3)
