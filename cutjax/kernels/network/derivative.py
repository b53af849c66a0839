"""Programs of other programs: their tangents, their cotangents, and what vmap makes of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.network.program import (
    Affine,
    Builder,
    Kind,
    Map,
    Outer,
    Program,
    Step,
    Sum,
    Term,
    elementwise,
    pruned,
)


def tangents(program: Program, moving: tuple[bool, ...]) -> tuple[Program, tuple[bool, ...]]:
    """Returns the program of the tangents of results, and for each result True if it has one.

    Args:
      program: of inputs.
      moving: for each input, whether it has a tangent; those are further inputs. The program is linear in them.
    """
    moved = [kind for kind, moves in zip(program.inputs, moving, strict=True) if moves]
    b, places = Builder((*program.inputs, *moved)), iter(range(len(moving), len(moving) + len(moved)))
    to: dict[int, int] = {i: i for i in range(len(moving))}
    dots: dict[int, int] = {i: next(places) for i, moves in enumerate(moving) if moves}
    for step, values in program.numbered:
        to.update(zip(values, b.add(step.renamed(to.__getitem__)), strict=True))
        if any(x in dots for x in step.reads):
            dots.update(zip(values, _tangent(b, step, to, dots), strict=True))
    found = tuple(x in dots for x in program.outputs)
    return b.build([dots[x] for x in program.outputs if x in dots]), found


def _tangent(b: Builder, step: Step, to: dict[int, int], dots: dict[int, int]) -> tuple[int, ...]:
    """Adds what computes the tangents of the values of a step; returns their numbers."""
    if isinstance(step, Affine):
        terms = [Term(dots[x], to[w], t) for x, w, t in step.terms if x in dots]
        terms += [Term(to[x], dots[w], t) for x, w, t in step.terms if w in dots]
        return b.add(Affine(tuple(terms), tuple(dots[x] for x in step.vectors if x in dots)))
    if isinstance(step, Map):
        function, of_results = _pushed(step.function, tuple(x in dots for x in step.values))
        found = b.add(Map(function, (*(to[x] for x in step.values), *(dots[x] for x in step.values if x in dots))))
        return tuple(found[i] for i in of_results)
    if isinstance(step, Outer):
        pairs = [(dots[x], to[y]) for x, y in step.pairs if x in dots]
        return b.add(Outer((*pairs, *((to[x], dots[y]) for x, y in step.pairs if y in dots))))
    return b.add(Sum(tuple(dots[x] for x in step.values if x in dots)))


@functools.lru_cache(maxsize=1024)
def _pushed(function: Epilogue, moving: tuple[bool, ...]) -> tuple[Epilogue, tuple[int, ...]]:
    """Returns the tangents of a function's results: of its arguments, and of the tangents of those that move."""
    count = function.products

    def push(*xs: jax.Array) -> Sequence[jax.Array]:
        values, moved = xs[:count], [x for x, moves in zip(xs, moving, strict=False) if moves]

        def along(*moved: jax.Array) -> tuple[jax.Array, ...]:
            given = iter(moved)
            return function.apply([next(given) if moves else x for x, moves in zip(values, moving, strict=True)])

        return jax.jvp(along, moved, list(xs[count:]))[1]

    return elementwise(push, count + sum(moving))


def cotangents(program: Program, linear: tuple[bool, ...], given: tuple[bool, ...]) -> tuple[Program, tuple[bool, ...]]:
    """Returns the program of the cotangents of the linear inputs, and for each of those True if it is not zero.

    Args:
      program: linear in some inputs.
      linear: for each input, whether it is one of those.
      given: for each result, whether its cotangent is not zero. Those are inputs after all that are not linear.
    """
    fixed = [i for i, each in enumerate(linear) if not each]
    results = [x for x, each in zip(program.outputs, given, strict=True) if each]
    b = Builder((*(program.inputs[i] for i in fixed), *(program.kinds[x] for x in results)))
    to, depends = {i: place for place, i in enumerate(fixed)}, program.depends_on(linear)
    pulled = _Cotangents(b, program)
    for place, x in enumerate(results, len(fixed)):
        pulled.values(x).append(place)
    for step, values in program.numbered:
        if not depends[values[0]]:
            to.update(zip(values, b.add(step.renamed(to.__getitem__)), strict=True))
    for step, values in reversed(program.numbered):
        if depends[values[0]]:
            pulled.pull(step, values, to, depends)
    found = [pulled.total(i) for i, each in enumerate(linear) if each]
    return b.build([x for x in found if x is not None]), tuple(x is not None for x in found)


class _Cotangents:
    """The cotangents of values as sums of what their readers say."""

    def __init__(self, b: Builder, program: Program):
        self.b, self.program = b, program
        self._values: dict[int, list[int]] = {}
        self._terms: dict[int, list[Term]] = {}
        self._vectors: dict[int, list[int]] = {}
        self._pairs: dict[int, list[tuple[int, int]]] = {}
        self._rows: dict[int, list[int]] = {}

    def values(self, x: int) -> list[int]:
        """Returns the summands of a value that are values themselves."""
        return self._values.setdefault(x, [])

    def pull(self, step: Step, values: tuple[int, ...], to: dict[int, int], depends: Sequence[bool]) -> None:
        """Adds to the cotangents of what a step reads and depends on the linear inputs."""
        if isinstance(step, Outer | Sum):
            for g in self.values(values[0]):
                self._pull_sum(step, g, to, depends)
            return
        totals = [self.total(x) for x in values]
        if all(x is None for x in totals):
            return
        if isinstance(step, Map):
            self._pull_map(step, totals, to, depends)
            return
        (g,) = totals
        assert g is not None
        for x, w, transposed in step.terms:
            if depends[x]:
                self._terms.setdefault(x, []).append(Term(g, to[w], not transposed))
            else:
                self._pairs.setdefault(w, []).append((g, to[x]) if transposed else (to[x], g))
        for x in step.vectors:
            if depends[x]:
                self._rows.setdefault(x, []).append(g)

    def _pull_sum(self, step: Outer | Sum, g: int, to: dict[int, int], depends: Sequence[bool]) -> None:
        if isinstance(step, Sum):
            for x in step.values:
                self._vectors.setdefault(x, []).append(g)
            return
        for x, y in step.pairs:
            if depends[x]:
                self._terms.setdefault(x, []).append(Term(to[y], g, True))
            else:
                self._terms.setdefault(y, []).append(Term(to[x], g, False))

    def _pull_map(self, step: Map, totals: list[int | None], to: dict[int, int], depends: Sequence[bool]) -> None:
        linear = tuple(depends[x] for x in step.values)
        function, of_results = _pulled(step.function, linear, tuple(x is not None for x in totals))
        fixed = [to[x] for x in step.values if not depends[x]]
        found = self.b.add(Map(function, (*fixed, *(x for x in totals if x is not None))))
        for x, i in zip((x for x in step.values if depends[x]), of_results, strict=True):
            self.values(x).append(found[i])

    def total(self, x: int) -> int | None:
        """Returns the number of the cotangent of a value; None where it is zero."""
        kind, found = self.program.kinds[x].name, list(self._values.get(x, ()))
        if kind == "rows":
            terms, vectors = self._terms.get(x, ()), self._vectors.get(x, ())
            if terms or vectors:
                found += self.b.add(Affine(tuple(terms), tuple(vectors)))
            if len(found) < 2:
                return found[0] if found else None
            return self.b.add(Map(_sum(len(found)), tuple(found)))[0]
        assert not found, "a matrix or a vector is no result"
        if kind == "matrix":
            pairs = self._pairs.get(x, ())
            return self.b.add(Outer(tuple(pairs)))[0] if pairs else None
        rows = self._rows.get(x, ())
        return self.b.add(Sum(tuple(rows)))[0] if rows else None


@functools.lru_cache(maxsize=1024)
def _pulled(function: Epilogue, linear: tuple[bool, ...], given: tuple[bool, ...]) -> tuple[Epilogue, tuple[int, ...]]:
    """Returns the cotangents of a function's linear arguments: of the others, and of cotangents of results."""
    fixed = linear.count(False)

    def pull(*xs: jax.Array) -> Sequence[jax.Array]:
        def along(*moved: jax.Array) -> list[jax.Array]:
            rest, moves = iter(xs[:fixed]), iter(moved)
            found = function.apply([next(moves) if each else next(rest) for each in linear])
            return [x for x, each in zip(found, given, strict=True) if each]

        zeros = [jnp.zeros_like(xs[0])] * linear.count(True)
        return jax.vjp(along, *zeros)[1](list(xs[fixed:]))

    return elementwise(pull, fixed + given.count(True))


@functools.cache
def _sum(count: int) -> Epilogue:
    return elementwise(lambda *xs: [functools.reduce(jnp.add, xs)], count)[0]


def unrolled(program: Program, mapped: Sequence[bool], size: int) -> tuple[Program, tuple[int, ...]]:
    """Returns the program that computes what depends on mapped inputs ``size`` times, the rest once.

    Each mapped input stands ``size`` times in a row, and so do the results that depend on one; how often each stands
    is returned.
    """
    inputs: list[Kind] = []
    of: list[list[int]] = []
    for kind, each in zip(program.inputs, mapped, strict=True):
        count = size if each else 1
        of.append([*range(len(inputs), len(inputs) + count)])
        inputs += [kind] * count
    b = Builder(inputs)
    for step, values in program.numbered:
        count = max(len(of[x]) for x in step.reads)
        copies = [b.add(step.renamed(functools.partial(_copy, of, i))) for i in range(count)]
        of += [[copy[k] for copy in copies] for k in range(len(values))]
    outputs = [of[x] for x in program.outputs]
    return b.build([x for each in outputs for x in each]), tuple(map(len, outputs))


def _copy(of: Sequence[Sequence[int]], i: int, x: int) -> int:
    """Returns the number of the i-th copy of a value."""
    return of[x][i % len(of[x])]


def kept(program: Program, used: Sequence[bool]) -> tuple[Program, tuple[bool, ...]]:
    """Returns the program of the results in use alone, and for each input whether it is one of its inputs."""
    outputs = tuple(x for x, each in zip(program.outputs, used, strict=True) if each)
    whole = pruned(dataclasses.replace(program, outputs=outputs))
    read = {x for step in whole.steps for x in step.reads} | set(whole.outputs)
    reading = tuple(i in read for i in range(len(program.inputs)))
    places = {i: place for place, i in enumerate(i for i, each in enumerate(reading) if each)}
    gone = len(program.inputs) - len(places)
    to = lambda x: places[x] if x < len(program.inputs) else x - gone  # noqa: E731
    inputs = tuple(kind for kind, each in zip(program.inputs, reading, strict=True) if each)
    return Program(inputs, tuple(x.renamed(to) for x in whole.steps), tuple(map(to, whole.outputs))), reading
