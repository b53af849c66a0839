"""The first half of tracing an epilogue: a jaxpr as one list of steps.

Calls are inlined. What a step computes is of one of three kinds:

- TILE: depends on an accumulator, so it runs in the kernel, element by element.
- OUTSIDE: depends on operands and captured values alone. Elementwise steps still run in the kernel; what cannot (a sort
  of the bias, the split of a key) runs before it, and its result is one more operand.
- POST: computed from a reduction of TILE values; runs after the kernel on what the reduction left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from cutjax._expression import OPS, Node, split_rule, with_derivative

TILE, OUTSIDE, POST = "tile", "outside", "post"


def aval_of(x: Any) -> Any:
    """Shape and dtype of a value."""
    return x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)


def where(eqn: Any) -> str:
    """The user's line; that of the product where the epilogue itself is a function of a library."""
    return source_info_util.summarize(eqn.source_info) or source_info_util.summarize(source_info_util.current())


@dataclasses.dataclass
class Step:
    name: str
    ins: list[int]
    outs: list[int]
    eqn: Any
    site: Any  # the equation of the outermost call: those inside may have been traced, and cached, for another line
    kind: str
    params: dict[str, Any]

    def run(self, args: list[Any]) -> list[Any]:
        """What the step computes, as JAX computes it."""
        if self.name == "custom_jvp":
            return [with_derivative(*split_rule(Node("", params=self.params["rule"]), args))]
        return _bind(self.eqn, args)


def _bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


# Several of these only ever see one value; a barrier and device_put see any number.
_SAME = "copy copy_p device_put name optimization_barrier pbroadcast pcast pvary reshard sharding_constraint"
_IDENTITIES = frozenset(_SAME.split())
UNIT_MOVES = ("reshape", "squeeze", "expand_dims")
REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
# These become several nodes; the last three are newer than jax 0.10.
_EXPANDED = frozenset(["add_any", "random_bits", "stop_gradient", "log2", "one_minus_square", "polynomial"])
INLINABLE = OPS | _IDENTITIES | _EXPANDED | {*UNIT_MOVES, "broadcast_in_dim", "iota", "tie", "transpose"}
_CALLS = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "composite": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
# A custom rule may use its own function (logaddexp's does), and derivatives of that its rule again. Two levels serve
# first and second derivatives; in the third, the function's own expression is differentiated.
_RULE_DEPTH = 2


def _callee(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr of a call and its constants; they are one object or two, as jax has it."""
    jaxpr = eqn.params[_CALLS[eqn.primitive.name]]
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _live(jaxpr: Any) -> list[Any]:
    """The equations that the results need, in order."""
    wanted = {id(x) for x in jaxpr.outvars}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if any(id(x) in wanted for x in eqn.outvars):
            wanted.update(map(id, eqn.invars))
            live.append(eqn)
    return live[::-1]


def _elementwise(jaxpr: Any) -> bool:
    for eqn in _live(jaxpr):
        if eqn.primitive.name in _CALLS:
            if not _elementwise(_callee(eqn)[0]):
                return False
        elif eqn.primitive.name not in INLINABLE:
            return False
    return True


def refuse_effects(jaxpr: Any, site: Any = None) -> None:
    """Raises if anything in a jaxpr, needed or not, has a side effect."""
    for eqn in jaxpr.eqns:
        inner = list(core.jaxprs_in_params(eqn.params))
        for sub in inner:
            refuse_effects(sub, site or eqn)
        if not inner and any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects):
            raise NotImplementedError(
                f"epilogue: {eqn.primitive.name} at {where(site or eqn)} has a side effect, and a kernel has none; "
                "apply it to the result of the product instead"
            )


class Flat:
    """A function as one list of steps over numbered values."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[Any] = []
        self.kinds: list[str] = []
        self.steps: list[Step] = []
        self.known: dict[int, Any] = {}  # arrays and tracers
        self.calls: set[tuple[int, tuple[int, ...]]] = set()  # results of custom rules' functions, and of what
        self.literals: dict[int, Any] = {}  # numbers; of any shape, the same everywhere

    def value(self, shape: Sequence[int], dtype: Any, kind: str) -> int:
        self.shapes.append(tuple(shape))
        self.dtypes.append(dtype)
        self.kinds.append(kind)
        return len(self.shapes) - 1

    def outside(self, x: Any, aval: Any, bake: bool = True) -> int:
        """A value from outside; a number, if ``bake``, becomes part of the expression."""
        i = self.value(aval.shape, aval.dtype, OUTSIDE)
        self.known[i] = x
        if bake and not aval.shape and isinstance(x, np.ndarray | np.generic | bool | int | float):
            self.literals[i] = np.asarray(x, aval.dtype)
        return i

    def inline(
        self, jaxpr: Any, consts: Sequence[int], inputs: Sequence[int], depth: int = 0, site: Any = None
    ) -> list[int]:
        """Appends a jaxpr's steps; the values of its results."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

        def read(x: Any) -> int:
            if hasattr(x, "val"):
                i = self.value(x.aval.shape, x.aval.dtype, OUTSIDE)
                self.known[i] = x.val
                self.literals[i] = np.asarray(x.val).astype(x.aval.dtype)
                return i
            return env[x]

        for eqn in _live(jaxpr):
            ins = [read(x) for x in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, ins, depth, site or eqn), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[int], depth: int, site: Any) -> list[int]:
        name = eqn.primitive.name
        kinds = {self.kinds[i] for i in ins}
        if name in _CALLS and (TILE in kinds or (POST not in kinds and _elementwise(_callee(eqn)[0]))):
            jaxpr, consts = _callee(eqn)
            outs = self.inline(jaxpr, [self.outside(c, aval_of(c)) for c in consts], ins, depth, site)
            return self._rule(eqn, ins, outs, depth, site) if name.startswith("custom_") else outs
        if name in _IDENTITIES and POST not in kinds and len(ins) == len(eqn.outvars):
            return ins
        if name == "tie":
            return ins[1:]
        literal = self._fold(eqn, ins)
        if literal is not None:
            return [literal]
        if POST in kinds and TILE in kinds:
            raise NotImplementedError(
                f"epilogue: {name} at {where(site)} combines a reduction with an accumulator, but a reduction is known "
                "only when every tile is done; return it, and combine outside"
            )
        kind = POST if POST in kinds else TILE if TILE in kinds else OUTSIDE
        if kind == TILE and name in REDUCTIONS:
            if all(self.shapes[ins[0]][axis] == 1 for axis in eqn.params["axes"]) and self.shapes[ins[0]] != self.shape:
                name = "reshape"
            else:
                kind = POST
        elif kind == TILE and (name not in INLINABLE or eqn.params.get("out_dtype") is not None):
            raise NotImplementedError(
                f"epilogue: {name} at {where(site)} is no elementwise operation of a kernel; {_advice(name)}"
            )
        outs = [self.value(x.aval.shape, x.aval.dtype, kind) for x in eqn.outvars]
        self.steps.append(Step(name, ins, outs, eqn, site, kind, eqn.params))
        return outs

    def _fold(self, eqn: Any, ins: list[int]) -> int | None:
        """A value that needs no step: a number converted or broadcast, or x * 1 and the like."""
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        if name in ("mul", "sub", "add"):
            for x, y in (ins, ins[::-1])[: 1 if name == "sub" else 2]:
                number = self.literals.get(y)
                if number is None or self.shapes[x] != out.shape or x in self.literals:
                    continue
                # x + 0.0 is not x where that is -0.0, but x - 0.0 is
                exact = name == "sub" or jnp.issubdtype(out.dtype, jnp.integer)
                zero = number == 0 and not np.signbit(number) and exact
                if number == 1 if name == "mul" else zero:
                    return x
        if not ins or any(i not in self.literals for i in ins):
            return None
        value = self.literals[ins[0]]
        if name == "convert_element_type":
            widens = jnp.issubdtype(out.dtype, jnp.floating) or value.dtype == out.dtype
            if not widens and not np.array_equal(value.astype(out.dtype).astype(value.dtype), value):
                return None
            value = value.astype(out.dtype)
        elif name not in ("broadcast_in_dim", *UNIT_MOVES):
            return None
        i = self.value(out.shape, out.dtype, OUTSIDE)
        self.known[i] = jnp.broadcast_to(value, out.shape)
        self.literals[i] = value
        return i

    def _rule(self, eqn: Any, ins: list[int], outs: list[int], depth: int, site: Any) -> list[int]:
        """The results of a function with a derivative of its own, each with that derivative.

        An elementwise function's derivative in an input is a factor, the rule's answer to a tangent of ones.
        """
        if any(self.kinds[i] == POST for i in outs):
            raise NotImplementedError(
                f"epilogue: {eqn.primitive.name} at {where(site)} reduces in a function with a derivative of its own; "
                "return the reduction, and go on outside"
            )
        real = [k for k, i in enumerate(ins) if i not in self.literals and jnp.issubdtype(self.dtypes[i], jnp.floating)]

        key = tuple(ins[k] for k in real)
        if not real or depth == _RULE_DEPTH:
            self.calls.update({(i, key) for i in outs})
            return outs

        def rule(*args: Any) -> list[Any]:
            """The results as the rule has them, for second derivatives, and for each result its factors."""
            if eqn.primitive.name == "custom_jvp_call":
                found: list[list[Any]] = []
                for k in real:
                    fn = lambda x, k=k: _bind(eqn, [*args[:k], x, *args[k + 1 :]])  # noqa: E731
                    values, factors = jax.jvp(fn, (args[k],), (jnp.ones_like(args[k]),))
                    found.append(factors)
                return [*values, *(factors[o] for o in range(len(outs)) for factors in found)]
            values, pull = jax.vjp(lambda *xs: _bind(eqn, _filled(args, real, xs)), *(args[k] for k in real))
            ones = ([jnp.full_like(x, float(o == i)) for i, x in enumerate(values)] for o in range(len(outs)))
            return [*values, *(factor for cotangents in ones for factor in pull(cotangents))]

        closed = jax.make_jaxpr(rule)(*(x.aval for x in eqn.invars))
        consts = [self.outside(c, aval_of(c)) for c in closed.consts]
        found = self.inline(closed.jaxpr, consts, ins, depth + 1, site)
        results = []
        for o, value in enumerate(outs):
            kind, n = self.kinds[value], len(real)
            at = len(outs) + o * n
            again = (found[o], key) not in self.calls  # else the rule gives its own function's value, as most do
            args = [value, *found[o : o + again], *key, *found[at : at + n]]
            result = self.value(self.shapes[value], self.dtypes[value], kind)
            self.steps.append(Step("custom_jvp", args, [result], eqn, site, kind, {"rule": (n, int(again))}))
            self.calls.add((result, key))
            results.append(result)
        return results


def _filled(args: Sequence[Any], at: Sequence[int], xs: Sequence[Any]) -> list[Any]:
    filled = list(args)
    for k, x in zip(at, xs, strict=True):
        filled[k] = x
    return filled


def _advice(name: str) -> str:
    if name in ("split", "slice", "concatenate"):
        return "for a gated unit give gemm a tuple of weights, one accumulator each"
    if name in ("cond", "while", "scan", "switch"):
        return "use jnp.where in place of control flow"
    if name.startswith(("reduce_", "arg")):
        return "the reductions of accumulators are sum, max and min"
    return "apply it to the result of the product, outside the epilogue"
