"""A fused epilogue as data: a small frozen expression of accumulators and operands, and what it means in JAX."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.binding.rules import broadcast_together
from cutjax.epilogue.nodes import Node, OperandSpec, Output
from cutjax.epilogue.show import show

ACC = np.dtype(np.float32)  # the dtype of accumulators, if no other is said


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """A function of ``products`` accumulators, ``[..., m, n]`` in f32, and of operands that broadcast against them.

    It depends on no size, unless the traced function did. Equal functions give equal epilogues.
    """

    products: int
    operands: tuple[OperandSpec, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    def apply(self, accs: Sequence[jax.Array], operands: Sequence[jax.Array] = ()) -> tuple[jax.Array, ...]:
        """Computes the results in JAX: the reference, and what differentiation differentiates."""
        rank = np.ndim(accs[0])
        shape = lax.broadcast_shapes(*(np.shape(x) for x in accs), *(np.shape(x) for x in operands))
        # Values keep only the axes they vary along; the others have size 1.
        values: list[jax.Array] = []
        ruled: dict[tuple[Any, ...], list[jax.Array]] = {}
        for node in self.nodes:
            if node.op == "acc":
                value = accs[node.params[0]].astype(node.dtype)
            elif node.op == "operand":
                value = jnp.asarray(operands[node.params[0]])
                value = lax.expand_dims(value, range(rank - value.ndim))
            elif node.op == "const":
                value = jnp.full((1,) * rank, scalar(node), node.dtype)
            elif node.op == "iota":
                value = _position(node, shape)
            elif node.op == "rule":
                rule, i = node.params
                key = rule, *node.args[1:]
                if key not in ruled:  # one call for all results: the rule wants all their cotangents
                    ruled[key] = rule(*(values[j] for j in node.args[1:]))
                value = ruled[key][i]
            else:
                value = _evaluate(node, broadcast_together([values[i] for i in node.args]))
            values.append(value)
        results = []
        for out in self.outputs:
            value = jnp.broadcast_to(values[out.node], shape)
            if out.reduce:
                value = REDUCTIONS[out.reduce](value, out.places(rank))
            results.append(value.astype(out.dtype))
        return tuple(results)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # asked for with every eager call and every config
        return hash((self.products, self.operands, self.nodes, self.outputs))

    def __getstate__(self) -> dict[str, Any]:  # hashes differ from process to process
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def digest(self) -> str:
        """Returns a name of 8 digits, the same in every process: part of those of kernels."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]

    @functools.cached_property
    def positions(self) -> frozenset[str]:
        """Returns the axes, of "row", "col" and "batch", whose index it uses: such cannot be merged or reordered."""
        return frozenset("batch" if node.params[1:] else node.params[0] for node in self.nodes if node.op == "iota")

    @functools.cached_property
    def rules(self) -> bool:
        """True if any function in it has a derivative of its own."""
        return any(node.op == "rule" for node in self.nodes)

    @functools.cached_property
    def plain(self) -> bool:
        """True if it is the identity of one product: linear, and all that a plain product has for an epilogue."""
        alone = len(self.nodes) == len(self.outputs) == self.products == 1 and not self.operands
        return alone and self.nodes[0].op == "acc" and not self.outputs[0].reduce

    @functools.cached_property
    def identities(self) -> bool:
        """True if its results are the products as they are, one each and in their order: it is plain, or of several."""
        alone = len(self.nodes) == len(self.outputs) == self.products and not self.operands
        return alone and all(
            node.op == "acc" and node.params == (i,) and (out.node, out.reduce) == (i, None)
            for i, (node, out) in enumerate(zip(self.nodes, self.outputs, strict=True))
        )

    @functools.cached_property
    def accumulator(self) -> np.dtype:
        """Returns the dtype of the accumulators."""
        return np.dtype(next((node.dtype for node in self.nodes if node.op == "acc"), ACC))

    @functools.cached_property
    def transposed(self) -> Epilogue:
        """Returns the epilogue of the transposed product, whose operands and results are transposed too."""
        other = {"row": "col", "col": "row"}
        operands = tuple(dataclasses.replace(spec, row=spec.col, col=spec.row) for spec in self.operands)
        nodes = tuple(
            dataclasses.replace(node, params=(other.get(node.params[0], node.params[0]), *node.params[1:]))
            if node.op == "iota"
            else node
            for node in self.nodes
        )
        outputs = tuple(
            dataclasses.replace(out, axes=tuple(axis for axis in ("row", "col") if other[axis] in out.axes))
            for out in self.outputs
        )
        return Epilogue(self.products, operands, nodes, outputs)

    @functools.cached_property
    def primal(self) -> Epilogue:
        """Returns the epilogue as a kernel computes it: the same values without the nodes that only derivatives need.

        The operands stay as they are, used or not.
        """
        same = {i: node.args[0] for i, node in enumerate(self.nodes) if node.op in ("rule", "stop_gradient")}
        for i in same:  # in order: what it points to is resolved already
            same[i] = same.get(same[i], same[i])
        nodes = [dataclasses.replace(node, args=tuple(same.get(i, i) for i in node.args)) for node in self.nodes]
        outputs = [dataclasses.replace(out, node=same.get(out.node, out.node)) for out in self.outputs]
        return normal(self.products, self.operands, nodes, outputs)

    def __str__(self) -> str:
        return self.text()

    def text(self, name: str = "acc") -> str:
        """Returns a line to read, in which the accumulators have that name."""
        primal = self.primal
        return show(primal.products, primal.nodes, primal.outputs, name)


def needed_nodes(nodes: Sequence[Node], roots: Iterable[int]) -> set[int]:
    """Returns the indices of some nodes and of all that they need."""
    needed = set(roots)
    for i in reversed(range(len(nodes))):
        if i in needed:
            needed.update(nodes[i].args)
    return needed


def normal(
    products: int, operands: Sequence[OperandSpec], nodes: Sequence[Node], outputs: Sequence[Output]
) -> Epilogue:
    """Returns the epilogue of nodes of which some may be equal or dead."""
    index: dict[Node, int] = {}
    renamed: dict[int, int] = {}
    for i in sorted(needed_nodes(nodes, (out.node for out in outputs))):
        node = dataclasses.replace(nodes[i], args=tuple(renamed[j] for j in nodes[i].args))
        renamed[i] = index.setdefault(node, len(index))
    outs = tuple(dataclasses.replace(out, node=renamed[out.node]) for out in outputs)
    return Epilogue(products, tuple(operands), tuple(index), outs)


@functools.cache
def identity(dtype: np.dtype, accumulator: np.dtype = ACC, products: int = 1) -> Epilogue:
    """Returns the epilogue of a plain product: the accumulator, in a dtype; or of several, those of all."""
    nodes = tuple(Node("acc", dtype=accumulator.name, params=(i,)) for i in range(products))
    return Epilogue(products, (), nodes, tuple(Output(i, dtype.name) for i in range(products)))


def const(value: Any, dtype: Any) -> Node:
    """Returns the node of a constant."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return Node("const", dtype="bool", params=(bool(value),))
    if jnp.issubdtype(dtype, jnp.integer):
        return Node("const", dtype=dtype.name, params=(int(value),))
    if dtype.kind == "c":
        return Node("const", dtype=dtype.name, params=(repr(complex(value)),))
    value = float(np.asarray(value).astype(dtype))
    plain = np.isfinite(value) and (value != 0 or not np.signbit(value))
    return Node("const", dtype=dtype.name, params=(value if plain else repr(abs(value) if value != value else value),))


def scalar(node: Node) -> bool | int | float | complex:
    """Returns the value of a constant."""
    value = node.params[0]
    if isinstance(value, str):
        return complex(value) if node.dtype.startswith("complex") else float(value)
    return value


REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "sum": lambda x, axes: jnp.sum(x, axes, dtype=x.dtype),
    "max": jnp.max,
    "min": jnp.min,
}

# Elementwise primitives of lax by name, as functions of their arguments. Those of another shape are in _evaluate.
_NAMED = (
    "abs acos acosh add asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj cos cosh div eq erf erf_inv erfc "
    "exp exp2 expm1 floor ge gt imag is_finite le log log1p logistic lt max min mul ne neg nextafter "
    "population_count pow real rem rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt "
    "square sub tan tanh"
)
FUNCTIONS: dict[str, Callable[..., jax.Array]] = {name: getattr(lax, name) for name in _NAMED.split()} | {
    "and": lax.bitwise_and,
    "not": lax.bitwise_not,
    "optimization_barrier": lax.optimization_barrier,
    "or": lax.bitwise_or,
    "select_n": lax.select_n,
    "stop_gradient": lax.stop_gradient,
    "xor": lax.bitwise_xor,
}
OPS = frozenset(FUNCTIONS) | {
    "bitcast_convert_type",
    "convert_element_type",
    "integer_pow",
    "reduce_precision",
    "round",
}


def _position(node: Node, shape: tuple[int, ...]) -> jax.Array:
    """Computes the value of an iota, for a result of that shape."""
    axis, *i = node.params
    axes = [-3 - i[0]] if axis == "batch" else [{"row": -2, "col": -1}[axis], *range(-3, -3 - sum(i), -1)]
    terms, stride = [], 1
    for at in axes:
        sizes = [n if j - len(shape) == at else 1 for j, n in enumerate(shape)]
        index = lax.broadcasted_iota(node.dtype, sizes, at + len(shape))
        terms.append(index if stride == 1 else index * stride)
        stride *= shape[at]
    return functools.reduce(jnp.add, terms)


def _evaluate(node: Node, args: list[jax.Array]) -> jax.Array:
    """Computes an elementwise node of arguments of one shape."""
    match node.op:
        case "bitcast_convert_type":
            return lax.bitcast_convert_type(args[0], np.dtype(node.dtype))
        case "convert_element_type":
            return lax.convert_element_type(args[0], np.dtype(node.dtype))
        case "integer_pow":
            return lax.integer_pow(args[0], node.params[0])
        case "random_bits":
            return cutjax_random_bits(*args)
        case "reduce_precision":
            return lax.reduce_precision(args[0], *node.params)
        case "round":
            return lax.round(args[0], lax.RoundingMethod(node.params[0]))
        case op:
            return FUNCTIONS[op](*args)


@jax.jit
def cutjax_random_bits(k0: jax.Array, k1: jax.Array, index: jax.Array) -> jax.Array:
    """Computes the bits jax.random gives an element: both words of threefry of (0, index), one xor the other."""
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    x, y = k0, index + k1
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x += y
            y = x ^ (y << np.uint32(rotation) | y >> np.uint32(32 - rotation))
        x += keys[(group + 1) % 3]
        y += keys[(group + 2) % 3] + np.uint32(group + 1)
    return x ^ y
