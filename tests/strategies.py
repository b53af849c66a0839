"""Random epilogues: functions of one to three accumulators and operands, with the operands' shapes and dtypes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

# Smooth and bounded enough that no chain of them turns a rounding error into another result; "steps" are the others.
UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": jnp.abs,
    "cbrt": lambda x: jnp.cbrt(jnp.abs(x) + 0.5),
    "cos": jnp.cos,
    "erf": lax.erf,
    "exp": lambda x: jnp.exp(jnp.minimum(x, 2.0)),
    "exp2": lambda x: jnp.exp2(jnp.minimum(x, 2.0)),
    "expm1": lambda x: jnp.expm1(jnp.minimum(x, 2.0)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "log": lambda x: jnp.log(jnp.abs(x) + 0.5),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "logistic": jax.nn.sigmoid,
    "neg": jnp.negative,
    "relu": jax.nn.relu,
    "rsqrt": lambda x: lax.rsqrt(jnp.square(x) + 0.5),
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "softplus": jax.nn.softplus,
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.5),
    "square": lambda x: jnp.square(jnp.clip(x, -4.0, 4.0)),
    "tanh": jnp.tanh,
}
STEPS: dict[str, Callable[[Any], Any]] = {
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "int": lambda x: jnp.clip(x, -100.0, 100.0).astype(jnp.int32).astype(x.dtype),
    "round": jnp.round,
    "sign": jnp.sign,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "atan2": jnp.arctan2,
    "div": lambda x, y: x / (1.0 + jnp.square(y)),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": lambda x, y: jnp.clip(x, -8.0, 8.0) * jnp.clip(y, -8.0, 8.0),
    "sub": jnp.subtract,
    "where": lambda x, y: jnp.where(x > 0.25, x, y),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A random epilogue: call it as the function; ``shapes`` are the operands' for a result of that shape."""

    products: int
    operands: tuple[tuple[str, str], ...]  # dtype, and one of KINDS
    trees: tuple[Any, ...]
    dtypes: tuple[str, ...]  # of the outputs

    def __call__(self, *args: jax.Array) -> Any:
        outs = tuple(evaluate(t, args).astype(d) for t, d in zip(self.trees, self.dtypes, strict=True))
        return outs if len(outs) > 1 else outs[0]

    def arrays(self, shape: Sequence[int], seed: int = 0) -> list[np.ndarray]:
        """Operands, multiples of 1/8 so that every dtype holds them."""
        draw = np.random.default_rng(seed)
        return [
            (draw.integers(-16, 17, KINDS[kind](*shape)) / 8).astype(jnp.dtype(dtype)) for dtype, kind in self.operands
        ]


KINDS: dict[str, Callable[..., tuple[int, ...]]] = {
    "scalar": lambda *s: (),
    "col": lambda *s: s[-1:],
    "row": lambda *s: (s[-2], 1),
    "full": lambda *s: s[-2:],
    "batch": lambda *s: (*s[:-2], 1, 1),
    "batch_col": lambda *s: (*s[:-2], 1, s[-1]),
    "all": lambda *s: s,
}


def evaluate(tree: Any, args: Sequence[jax.Array]) -> Any:
    """The value of a tree in f32, [..., m, n]: ("arg", i), ("const", x), ("cast", dtype, t), or a name and subtrees."""
    match tree:
        case ("arg", i):
            return jnp.broadcast_to(args[i].astype(jnp.float32), jnp.broadcast_shapes(args[i].shape, args[0].shape))
        case ("const", x):
            return jnp.full(args[0].shape, x, jnp.float32)
        case ("cast", dtype, t):
            return evaluate(t, args).astype(dtype).astype(jnp.float32)
        case ("row" | "col" as name,):
            axis = args[0].ndim - (2 if name == "row" else 1)
            return (lax.broadcasted_iota(jnp.int32, args[0].shape, axis) % 7).astype(jnp.float32)
        case (name, t):
            return (UNARY | STEPS)[name](evaluate(t, args))
        case (name, t, u):
            return BINARY[name](evaluate(t, args), evaluate(u, args))
    raise ValueError(tree)


def trees(args: int, depth: int, smooth: bool) -> st.SearchStrategy[Any]:
    """Expressions up to a depth. ``smooth`` ones have no step, so that rounding an input never moves them far."""
    leaf = st.one_of(
        st.integers(0, args - 1).map(lambda i: ("arg", i)),
        st.sampled_from([-1.5, -0.25, 0.5, 2.0]).map(lambda x: ("const", x)),
        st.sampled_from([("row",), ("col",)]),
    )
    if depth == 0:
        return leaf
    below = st.deferred(lambda: trees(args, depth - 1, smooth))
    unary = sorted(UNARY) if smooth else sorted(UNARY | STEPS)
    binary = sorted(set(BINARY) - {"where", "atan2"}) if smooth else sorted(BINARY)
    options = [
        st.tuples(st.sampled_from(unary), below),
        st.tuples(st.sampled_from(binary), below, leaf),
        st.tuples(st.sampled_from(binary), leaf, below),
        st.tuples(st.sampled_from(binary), below, below),
    ]
    if not smooth:
        options.append(st.tuples(st.just("cast"), st.sampled_from(["bfloat16", "float16"]), below))
    return st.one_of(leaf, *options)


@st.composite
def epilogues(
    draw: Any, *, depth: int = 8, products: int = 3, outputs: int = 2, smooth: bool = False, kinds: Sequence[str] = ()
) -> Case:
    """Random epilogues; every one uses its first accumulator."""
    n = draw(st.integers(1, products))
    operand = st.tuples(
        st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from(kinds or ["scalar", "col", "row", "full"])
    )
    operands = tuple(draw(st.lists(operand, max_size=3)))
    found = [draw(trees(n + len(operands), depth - 1, smooth)) for _ in range(draw(st.integers(1, outputs)))]
    found[0] = ("add", ("arg", 0), found[0])
    out = st.sampled_from(["float32"] if smooth else ["float32", "bfloat16", "float16"])
    return Case(n, operands, tuple(found), tuple(draw(out) for _ in found))


@functools.cache
def examples(count: int, kinds: Sequence[str]) -> list[Case]:
    """As many random epilogues with operands of these kinds, the same each time."""
    found: dict[Case, None] = {}

    @settings(
        max_examples=2 * count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=tuple(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(epilogues(kinds=kinds))
    def collect(case):
        found.setdefault(case)

    collect()
    return list(found)[-count:]  # the first are the simplest
