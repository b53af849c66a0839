"""The first half of tracing an epilogue: a jaxpr as one list of steps.

Calls are inlined. What a step computes is of one of three kinds:

- TILE: depends on an accumulator, so it runs in the kernel, element by element.
- OUTSIDE: depends on operands and captured values alone. Elementwise steps still run in the kernel; what cannot (a sort
  of the bias, the split of a key) runs before it, and its result is one more operand.
- POST: computed from a reduction of TILE values; runs after the kernel on what the reduction left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from cutjax.epilogue.expression import OPS
from cutjax.epilogue.jaxpr import (
    CALLS,
    IDENTITIES,
    UNIT_MOVES,
    bind_equation,
    callee,
    has_rule,
    is_open,
    needed_equations,
)
from cutjax.epilogue.rules import Irregular, Refusal, Rule, linear_rule

TILE, OUTSIDE, POST = "tile", "outside", "post"


def aval_of(x: Any) -> Any:
    """Returns the shape and dtype of a value."""
    return x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)


def line_of(eqn: Any) -> str:
    """Returns the user's line; that of the product where the epilogue itself is a function of a library."""
    return source_info_util.summarize(eqn.source_info) or source_info_util.summarize(source_info_util.current())


@dataclasses.dataclass
class Step:
    """An equation over numbered values, or a function with a derivative of its own."""

    name: str
    ins: list[int]
    outs: list[int]
    eqn: Any
    site: Any  # the equation of the outermost call: those inside may have been traced, and cached, for another line
    kind: str
    params: dict[str, Any]

    def run(self, args: list[Any]) -> list[Any]:
        """Computes the step as JAX does."""
        if self.name == "rule":
            rule, i = self.params["rule"]
            return [rule(*args[1:])[i]]
        return bind_equation(self.eqn, args)


REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
RANDOM_BITS = "cutjax_random_bits"  # the function of expression.py
# These become several nodes; the last three are newer than jax 0.10.
_BECOME_SEVERAL_NODES = frozenset(["add_any", "random_bits", "log2", "one_minus_square", "polynomial", RANDOM_BITS])
INLINABLE = OPS | IDENTITIES | _BECOME_SEVERAL_NODES | {*UNIT_MOVES, "broadcast_in_dim", "iota", "tie", "transpose"}


def is_elementwise(jaxpr: Any) -> bool:
    """True if a kernel can compute all that the results of a jaxpr need."""
    for eqn in needed_equations(jaxpr):
        if eqn.primitive.name in CALLS:
            if not is_open(eqn) or not is_elementwise(callee(eqn)[0]):
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
                f"epilogue: {eqn.primitive.name} at {line_of(site or eqn)} has a side effect, and a kernel has none; "
                "apply it to the result of the product instead"
            )


class Flat:
    """A function as one list of steps over numbered values."""

    def __init__(self, shape: tuple[int, ...], refusing: bool = False, named: Container[Any] = ()):
        self.shape = shape
        self.named = named  # variables that bear a name of jax.checkpoint's as results, and are nothing else's argument
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[Any] = []
        self.kinds: list[str] = []
        self.steps: list[Step] = []
        self.known: dict[int, Any] = {}  # arrays and tracers
        self.group_values: set[int] = set()  # what rows have of operands of groups, and what is made of it alone
        self.irregular: list[str] = []  # why its derivative is JAX's own: rules that are not elementwise, names
        self.refusing = refusing
        self.literals: dict[int, Any] = {}  # numbers; of any shape, the same everywhere

    def add_value(self, shape: Sequence[int], dtype: Any, kind: str) -> int:
        """Adds a value; returns its number."""
        self.shapes.append(tuple(shape))
        self.dtypes.append(dtype)
        self.kinds.append(kind)
        return len(self.shapes) - 1

    def add_outside(self, x: Any, aval: Any, bake: bool = True) -> int:
        """Adds a value from outside; a number, if ``bake``, becomes part of the expression."""
        i = self.add_value(aval.shape, aval.dtype, OUTSIDE)
        self.known[i] = x
        if bake and not aval.shape and isinstance(x, np.ndarray | np.generic | bool | int | float):
            self.literals[i] = np.asarray(x, aval.dtype)
        return i

    def inline(self, jaxpr: Any, consts: Sequence[int], inputs: Sequence[int], site: Any = None) -> list[int]:
        """Appends a jaxpr's steps; returns the values of its results."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

        def read(x: Any) -> int:
            if hasattr(x, "val"):
                i = self.add_value(x.aval.shape, x.aval.dtype, OUTSIDE)
                self.known[i] = x.val
                self.literals[i] = np.asarray(x.val).astype(x.aval.dtype)
                return i
            return env[x]

        for eqn in needed_equations(jaxpr):
            ins = [read(x) for x in eqn.invars]
            env.update(zip(eqn.outvars, self._append_equation(eqn, ins, site or eqn), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _append_equation(self, eqn: Any, ins: list[int], site: Any) -> list[int]:
        """Appends the steps of an equation, if it needs any; returns the values of its results."""
        name = eqn.primitive.name
        kinds = {self.kinds[i] for i in ins}
        if name in ("jit", "pjit") and eqn.params["name"] == RANDOM_BITS:
            name = RANDOM_BITS  # of an expression that is traced again: one step, as it was
        if name in CALLS and is_open(eqn) and (TILE in kinds or (POST not in kinds and self._runs_in_kernel(eqn, ins))):
            jaxpr, consts = callee(eqn)
            outs = self.inline(jaxpr, [self.add_outside(c, aval_of(c)) for c in consts], ins, site)
            return self._with_rule(eqn, ins, outs, site) if has_rule(eqn) else outs
        if name in IDENTITIES and POST not in kinds:
            return ins
        if name == "optimization_barrier" and len(ins) > 1:  # of values of several kinds: each gets its own
            pairs = zip(ins, eqn.invars, eqn.outvars, strict=True)
            one_by_one = ((eqn.replace(invars=[x], outvars=[y]), [i]) for i, x, y in pairs)
            return [out for one, args in one_by_one for out in self._append_equation(one, args, site)]
        if name == "name" and (TILE in kinds or self.group_values.intersection(ins)):
            if eqn.outvars[0] not in self.named:
                self.irregular.append(f"{eqn.params['name']!r} is a name within it, at {line_of(site)}")
            return ins
        if name == "tie":
            return ins[1:]
        literal = self._without_step(eqn, ins)
        if literal is not None:
            return [literal]
        if POST in kinds and TILE in kinds:
            raise NotImplementedError(
                f"epilogue: {name} at {line_of(site)} combines a reduction with an accumulator, but a reduction is "
                "known only when every tile is done; return it, and combine outside"
            )
        kind = POST if POST in kinds else TILE if TILE in kinds else OUTSIDE
        if kind == TILE and name in REDUCTIONS:
            if all(self.shapes[ins[0]][axis] == 1 for axis in eqn.params["axes"]) and self.shapes[ins[0]] != self.shape:
                name = "reshape"
            else:
                kind = POST
        elif kind == TILE and (name not in INLINABLE or eqn.params.get("out_dtype") is not None):
            raise NotImplementedError(
                f"epilogue: {name} at {line_of(site)} is no elementwise operation of a kernel; {_advice(name)}"
            )
        outs = [self.add_value(x.aval.shape, x.aval.dtype, kind) for x in eqn.outvars]
        if kind == OUTSIDE and self.group_values.intersection(ins):
            self.group_values.update(outs)
        self.steps.append(Step(name, ins, outs, eqn, site, kind, eqn.params))
        return outs

    def _without_step(self, eqn: Any, ins: list[int]) -> int | None:
        """Returns the value of an equation that needs no step: a number converted or broadcast, x * 1 and the like."""
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        if name in ("mul", "sub", "add"):
            for x, y in (ins, ins[::-1])[: 1 if name == "sub" else 2]:
                number = self.literals.get(y)
                if number is None or self.shapes[x] != out.shape or x in self.literals:
                    continue
                # x + 0.0 is not x where that is -0.0, but x - 0.0 is
                exact = jnp.issubdtype(out.dtype, jnp.integer) or (name == "sub" and not np.iscomplexobj(number))
                zero = exact and number == 0 and not np.signbit(number)
                if number == 1 if name == "mul" else zero:
                    return x
        if not ins or any(i not in self.literals for i in ins):
            return None
        value = self.literals[ins[0]]
        if name == "convert_element_type":
            widens = jnp.issubdtype(out.dtype, jnp.inexact) or value.dtype == out.dtype
            if not widens and not np.array_equal(value.astype(out.dtype).astype(value.dtype), value):
                return None
            value = value.astype(out.dtype)
        elif name not in ("broadcast_in_dim", *UNIT_MOVES):
            return None
        i = self.add_value(out.shape, out.dtype, OUTSIDE)
        self.known[i] = jnp.broadcast_to(value, out.shape)
        self.literals[i] = value
        return i

    def _runs_in_kernel(self, eqn: Any, ins: list[int]) -> bool:
        """True if a call of operands alone is computed in the kernel, not before it."""
        if not is_elementwise(callee(eqn)[0]):
            return False
        if not has_rule(eqn):
            return True
        # The cotangents of what is smaller than the result are added up before a rule sees them.
        if not self.group_values.intersection(ins) and all(self.shapes[i] != self.shape for i in ins):
            return False
        return isinstance(self._find_rule(eqn), Rule)

    def _find_rule(self, eqn: Any) -> Rule | Irregular:
        """Returns a rule for this one call, or why there is none: two calls of a value have two cotangents."""
        try:
            return linear_rule(eqn) if self.refusing else Rule(eqn)
        except Irregular as why:
            return why

    def _with_rule(self, eqn: Any, ins: list[int], outs: list[int], site: Any) -> list[int]:
        """Returns the results of a function with a derivative of its own, each with that derivative."""
        if not any(jnp.issubdtype(self.dtypes[i], jnp.inexact) for i in ins if i not in self.literals):
            return outs
        reduces = any(self.kinds[i] == POST for i in outs)
        rule = Irregular(f"{eqn.primitive.name} reduces") if reduces else self._find_rule(eqn)
        if isinstance(rule, Rule):
            return [self._append_rule(rule, o, x, ins, eqn, site) for o, x in enumerate(outs)]
        if self.refusing:
            return [self._append_rule(Refusal(str(rule)), 0, x, [x, *ins], eqn, site) for x in outs]
        self.irregular.append(f"{rule}, at {line_of(site)}")
        return outs

    def _append_rule(self, rule: Rule | Refusal, o: int, value: int, ins: list[int], eqn: Any, site: Any) -> int:
        """Appends the step that gives a value the derivative of result ``o`` of a rule."""
        result = self.add_value(self.shapes[value], self.dtypes[value], self.kinds[value])
        self.steps.append(Step("rule", [value, *ins], [result], eqn, site, self.kinds[value], {"rule": (rule, o)}))
        return result


def _advice(name: str) -> str:
    """Returns the way to do without a primitive that no kernel has."""
    if name in ("split", "slice", "concatenate"):
        return "for a gated unit give gemm a tuple of weights, one accumulator each"
    if name in ("cond", "while", "scan", "switch"):
        return "use jnp.where in place of control flow"
    if name.startswith(("reduce_", "arg")):
        return "the reductions of accumulators are sum, max and min"
    return "apply it to the result of the product, outside the epilogue"
