"""A network as a program that is local to rows: products by small matrices, elementwise functions, sums over rows.

What such a program computes of a row depends on that row alone, but for what it sums over rows. Its tangents and its
cotangents are such programs again (derivative.py), so that a kernel of one is a kernel of any derivative.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax

from cutjax.epilogue.expression import ACC, Epilogue, Node, Output, normal
from cutjax.epilogue.trace import trace


class Kind(NamedTuple):
    """The kind of a value.

    Attributes:
      name: "rows", of which every row has a vector; "matrix" or "vector", which all rows share.
      sizes: without the rows.
    """

    name: str
    sizes: tuple[int, ...]


class Term(NamedTuple):
    """A product ``rows @ matrix``, or ``rows @ matrix.T`` where it is transposed; of the numbers of values."""

    rows: int
    matrix: int
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Affine:
    """Rows: the sum of products and of vectors, in float32."""

    terms: tuple[Term, ...]
    vectors: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that it reads."""
        return (*(x for term in self.terms for x in term[:2]), *self.vectors)

    def renamed(self, to: Callable[[int], int]) -> Affine:
        """Returns the step of values with other numbers."""
        terms = tuple(Term(to(t.rows), to(t.matrix), t.transposed) for t in self.terms)
        return Affine(terms, tuple(map(to, self.vectors)))


@dataclasses.dataclass(frozen=True)
class Map:
    """Rows: the results of an elementwise function of rows of one width, an epilogue without operands."""

    function: Epilogue
    values: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that it reads."""
        return self.values

    def renamed(self, to: Callable[[int], int]) -> Map:
        """Returns the step of values with other numbers."""
        return Map(self.function, tuple(map(to, self.values)))


@dataclasses.dataclass(frozen=True)
class Outer:
    """A matrix: the sum over rows of ``a[row]^T b[row]`` of each pair, in float32."""

    pairs: tuple[tuple[int, int], ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that it reads."""
        return tuple(x for pair in self.pairs for x in pair)

    def renamed(self, to: Callable[[int], int]) -> Outer:
        """Returns the step of values with other numbers."""
        return Outer(tuple((to(a), to(b)) for a, b in self.pairs))


@dataclasses.dataclass(frozen=True)
class Sum:
    """A vector: the sum over rows of all values, in float32."""

    values: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that it reads."""
        return self.values

    def renamed(self, to: Callable[[int], int]) -> Sum:
        """Returns the step of values with other numbers."""
        return Sum(tuple(map(to, self.values)))


Step = Affine | Map | Outer | Sum


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps in order. Values have numbers: first those of the inputs, then each step's.

    Attributes:
      inputs: the kinds of the inputs.
      steps: a map has as many values as results, any other one.
      outputs: the numbers of the results.
    """

    inputs: tuple[Kind, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.steps, self.outputs))

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of all values."""
        found = list(self.inputs)
        for step in self.steps:
            found += kinds_of(step, found)
        return tuple(found)

    @functools.cached_property
    def numbered(self) -> tuple[tuple[Step, tuple[int, ...]], ...]:
        """The steps, each with the numbers of its values."""
        first, found = len(self.inputs), []
        for step in self.steps:
            count = len(step.function.outputs) if isinstance(step, Map) else 1
            found.append((step, tuple(range(first, first + count))))
            first += count
        return tuple(found)

    @functools.cached_property
    def primal(self) -> Program:
        """The program as it is computed, without what only derivatives read."""
        of = [dataclasses.replace(x, function=x.function.primal) if isinstance(x, Map) else x for x in self.steps]
        return dataclasses.replace(self, steps=tuple(of))

    @property
    def sums(self) -> bool:
        """True if a result is a sum over rows."""
        return any(self.kinds[x].name != "rows" for x in self.outputs)

    def depends_on(self, inputs: Sequence[bool]) -> list[bool]:
        """Returns for each value True if it depends on one of some inputs."""
        found = list(inputs)
        for step, values in self.numbered:
            found += [any(found[x] for x in step.reads)] * len(values)
        return found

    def flops(self, rows: int) -> int:
        """Returns the FLOP of its products."""
        found = 0
        for step in self.steps:
            if isinstance(step, Affine):
                found += sum(2 * rows * _size(self.kinds[t.matrix]) for t in step.terms)
            elif isinstance(step, Outer):
                found += sum(2 * rows * _size(self.kinds[a]) * _size(self.kinds[b]) for a, b in step.pairs)
        return found

    def __str__(self) -> str:
        rows = [kind.sizes[0] for kind in self.inputs if kind.name == "rows"]
        products = sum(len(x.terms) for x in self.steps if isinstance(x, Affine))
        sums = sum(len(x.pairs) for x in self.steps if isinstance(x, Outer))
        into = " + ".join("x".join(map(str, self.kinds[x].sizes)) for x in self.outputs)
        beside = f", {sums} sums of outer products" if sums else ""
        return f"{'+'.join(map(str, rows))} -> {into} by {products} products{beside}"


def _size(kind: Kind) -> int:
    size = 1
    for x in kind.sizes:
        size *= x
    return size


def kinds_of(step: Step, kinds: Sequence[Kind]) -> list[Kind]:
    """Returns the kinds of the values of a step, told those before it."""
    if isinstance(step, Affine):
        if not step.terms:
            return [Kind("rows", kinds[step.vectors[0]].sizes)]
        term = step.terms[0]
        return [Kind("rows", kinds[term.matrix].sizes[0 if term.transposed else 1 :][:1])]
    if isinstance(step, Map):
        return [kinds[step.values[0]]] * len(step.function.outputs)
    if isinstance(step, Outer):
        a, b = step.pairs[0]
        return [Kind("matrix", (*kinds[a].sizes, *kinds[b].sizes))]
    return [Kind("vector", kinds[step.values[0]].sizes)]


class Builder:
    """Steps as they are added; equal ones are one."""

    def __init__(self, inputs: Iterable[Kind]):
        self.inputs = tuple(inputs)
        self.kinds, self.steps = list(self.inputs), []
        self._known: dict[Step, tuple[int, ...]] = {}

    def add(self, step: Step) -> tuple[int, ...]:
        """Returns the numbers of a step's values."""
        if step not in self._known:
            more = kinds_of(step, self.kinds)
            self._known[step] = tuple(range(len(self.kinds), len(self.kinds) + len(more)))
            self.kinds += more
            self.steps.append(step)
        return self._known[step]

    def build(self, outputs: Sequence[int]) -> Program:
        """Returns the program of some results, without the steps that they do not need."""
        return pruned(Program(self.inputs, tuple(self.steps), tuple(outputs)))


def pruned(program: Program) -> Program:
    """Returns the program without the steps that its results do not need."""
    needed = set(program.outputs)
    for step, values in reversed(program.numbered):
        if needed.intersection(values):
            needed.update(step.reads)
    first = len(program.inputs)
    to, kept = {i: i for i in range(first)}, []
    for step, values in program.numbered:
        if needed.intersection(values):
            kept.append(step.renamed(to.__getitem__))
            to.update((x, first + i) for i, x in enumerate(values))
            first += len(values)
    return Program(program.inputs, tuple(kept), tuple(to[x] for x in program.outputs))


def merged(maps: Sequence[tuple[Map, tuple[int, ...]]], wanted: Sequence[int]) -> tuple[Map, tuple[int, ...]]:
    """Returns functions of one width as one, which computes what they share once, and the numbers of its results.

    Args:
      maps: steps in order, each with the numbers of its values.
      wanted: the numbers of values that something else reads.
    """
    own = {x for _, values in maps for x in values}
    given = tuple(dict.fromkeys(x for step, _ in maps for x in step.values if x not in own))
    nodes = [Node("acc", dtype=ACC.name, params=(i,)) for i in range(len(given))]
    at = {x: i for i, x in enumerate(given)}
    for step, values in maps:
        to: list[int] = []
        for node in step.function.nodes:
            if node.op == "acc":
                to.append(at[step.values[node.params[0]]])
            else:
                nodes.append(dataclasses.replace(node, args=tuple(to[i] for i in node.args)))
                to.append(len(nodes) - 1)
        at.update((x, to[out.node]) for x, out in zip(values, step.function.outputs, strict=True))
    results = tuple(x for _, values in maps for x in values if x in wanted)
    function = normal(len(given), (), nodes, [Output(at[x], ACC.name) for x in results])
    return Map(function, given), results


def reusing(program: Program) -> Program:
    """Returns the program whose functions read what is multiplied rather than compute it again.

    So the derivative of ``y = tanh(x)`` reads y, as the next layer does. Numbers stay.
    """
    factors = {x for step in program.steps if isinstance(step, Outer) for pair in step.pairs for x in pair}
    factors |= {t.rows for step in program.steps if isinstance(step, Affine) for t in step.terms}
    there: list[tuple[Map, int, int]] = []  # of a function, the number of a result and which one it is
    steps: list[Step] = []
    for step, values in program.numbered:
        if isinstance(step, Map):
            for earlier, x, i in there:
                step = _reading(step, earlier, x, i)
            there += [(step, x, i) for i, x in enumerate(values) if x in factors]
        steps.append(step)
    return dataclasses.replace(program, steps=tuple(steps))


def _reading(step: Map, earlier: Map, x: int, i: int) -> Map:
    """Returns a step that reads the i-th result of an earlier one, of number x, where it computed it."""
    nodes = list(step.function.nodes)
    places = {node: at for at, node in enumerate(nodes)}
    to: dict[int, int] = {}
    for at, node in enumerate(earlier.function.nodes):
        args = tuple(to.get(arg, -1) for arg in node.args)
        params = node.params
        if node.op == "acc":
            value = earlier.values[node.params[0]]
            params = (step.values.index(value) if value in step.values else -1,)
        found = places.get(dataclasses.replace(node, args=args, params=params))
        if found is not None:
            to[at] = found
    made = to.get(earlier.function.outputs[i].node)
    if made is None or nodes[made].op in ("acc", "const") or nodes[made].dtype != ACC.name:
        return step
    # What it reads now comes first, as arguments do; those that nothing needs any more go.
    values = [*step.values, x]
    nodes[made] = Node("acc", dtype=ACC.name, params=(len(step.values),))
    _shorten(nodes, made, step.function.outputs)
    function = normal(len(values), (), nodes, step.function.outputs)
    read = sorted({node.params[0] for node in function.nodes if node.op == "acc"})
    renamed = [
        dataclasses.replace(node, params=(read.index(node.params[0]),)) if node.op == "acc" else node
        for node in function.nodes
    ]
    return Map(normal(len(read), (), renamed, function.outputs), tuple(values[j] for j in read))


def _shorten(nodes: list[Node], y: int, outputs: Sequence[Output]) -> None:
    """Turns g (1 - y) + g (1 - y) y, of tanh's derivative, into g - g y y, where y has few digits: nothing is lost."""
    uses = collections.Counter(arg for node in nodes for arg in node.args) + collections.Counter(
        x.node for x in outputs
    )
    for i, node in enumerate(nodes):
        for a, b in (node.args, node.args[::-1]) if node.op == "add" else ():
            if nodes[b].op != "mul" or sorted(nodes[b].args) != sorted((a, y)) or nodes[a].op != "mul":
                continue
            for g, rest in (nodes[a].args, nodes[a].args[::-1]):
                less = nodes[rest]
                one = less.op == "sub" and less.args[1] == y and nodes[less.args[0]]
                if one and one.op == "const" and float(one.params[0]) == 1 and (uses[a], uses[b]) == (2, 1):
                    nodes[a] = dataclasses.replace(nodes[a], args=(g, y))
                    nodes[i] = dataclasses.replace(node, op="sub", args=(g, b))
                    break


class NotElementwise(NotImplementedError):
    """A function of which a program cannot be made."""


def elementwise(fn: Callable[..., Sequence[jax.Array]], count: int) -> tuple[Epilogue, tuple[int, ...]]:
    """Returns an elementwise function of ``count`` arrays in float32 as an epilogue, and which output each result is.

    Raises:
      NotElementwise: it captures an array or depends on where elements lie, or its derivative is not elementwise.
    """
    traced = trace(lambda *xs: list(fn(*xs)), [jax.ShapeDtypeStruct((2, 2), ACC)] * count)
    epilogue = traced.epilogue
    if traced.outside is not None:
        raise NotElementwise(traced.outside.why)
    if traced.operands:
        raise NotElementwise("an activation that captures an array")
    if traced.names:
        raise NotElementwise("an activation that names what it returns")
    if epilogue.positions:
        raise NotElementwise("an activation that depends on where elements lie")
    if any(out.reduce for out in epilogue.outputs):
        raise NotElementwise("an activation that reduces its argument")
    return epilogue, tuple(traced.finish(range(len(epilogue.outputs))))  # pyright: ignore[reportArgumentType]
