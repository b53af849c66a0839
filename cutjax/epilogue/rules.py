"""Derivatives that a function inside an epilogue brings with it: custom_jvp and custom_vjp.

JAX's own rule runs as JAX runs it: on the true tangents, on the true cotangents. A `Rule` runs it at any shape, since
an epilogue's values gain batch axes and lose them, so the rule must work element by element. A function with another
rule is differentiated outside of the kernel (`primitives.derivative.outside`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from cutjax.binding.define import define
from cutjax.binding.rules import broadcast_together, is_linear, is_zero, match_varying
from cutjax.epilogue.expression import OPS
from cutjax.epilogue.jaxpr import (
    CALLS,
    HIGHER_PRIMITIVE,
    IDENTITIES,
    UNIT_MOVES,
    bind_equation,
    callee,
    evaluate,
    has_rule,
    needed_equations,
    reorders,
    reverse_only,
)

# The last three are newer than jax 0.10.
_POINTWISE = OPS | IDENTITIES | {"add_any", "log2", "one_minus_square", "polynomial"}


class Irregular(Exception):
    """A rule that is no elementwise function; the message says why."""


def _broadcast_together(args: Sequence[Any]) -> list[jax.Array]:
    """Returns arrays of one shape, and varying over the same axes of a mesh."""
    return match_varying(*broadcast_together(args))


def _bind_elementwise(eqn: Any, args: list[Any]) -> list[Any]:
    """Computes an equation of a pointwise jaxpr on arrays of any shapes that broadcast."""
    name = eqn.primitive.name
    if has_rule(eqn):  # of a rule: it matters to a further derivative
        try:
            return linear_rule(eqn)(*args)
        except Irregular as why:
            refusal = Refusal(str(why))
            return [refusal(x, *args)[0] for x in evaluate(*callee(eqn), args, _bind_elementwise)]
    if eqn.primitive is pull_p:
        return eqn.params["rule"].linear_tangents(*_split_operands(args, **eqn.params))
    if name in CALLS:
        return evaluate(*callee(eqn), args, _bind_elementwise)
    if name in ("broadcast_in_dim", *UNIT_MOVES):
        return args[:1]  # broadcasts where it is used
    if name == "polynomial":  # whose coefficients must stay numbers
        return bind_equation(eqn, [args[0], *(jnp.reshape(x, ()) for x in args[1:])])
    return args if name in IDENTITIES else bind_equation(eqn, _broadcast_together(args))


def _is_unit(shape: Sequence[int]) -> bool:
    return all(n == 1 for n in shape)


def _check_elementwise(jaxpr: Any, consts: Sequence[Any], full: tuple[int, ...]) -> None:
    """Raises Irregular unless each value is of the full shape or one number, made by elementwise operations."""
    for x in consts:
        if isinstance(x, Tracer) or not _is_unit(np.shape(x)):
            raise Irregular(f"captures an array of shape {np.shape(x)}")
    for eqn in needed_equations(jaxpr):
        name = eqn.primitive.name
        if name == HIGHER_PRIMITIVE:
            raise Irregular(f"has {type(eqn.params['_prim']).__name__}, whose rules are JAX's own")
        if name in CALLS:
            _check_elementwise(*callee(eqn), full)
        moves = name in ("broadcast_in_dim", *UNIT_MOVES) and not reorders(eqn)
        if name not in CALLS and name not in _POINTWISE and eqn.primitive is not pull_p and not moves:
            raise Irregular(f"has {name}, which is no elementwise operation")
        for x in (*eqn.invars, *eqn.outvars):
            if tuple(x.aval.shape) != full and not _is_unit(x.aval.shape):
                raise Irregular(f"has a value of shape {tuple(x.aval.shape)} beside {full}")


def _is_literal_zero(x: Any) -> bool:
    """True if a value of a jaxpr is written as 0."""
    return hasattr(x, "val") and bool(np.all(np.asarray(x.val) == 0))


def _is_linear_jaxpr(jaxpr: Any, moving: Sequence[bool]) -> bool:
    """True if a jaxpr's results are, by its operations, linear in those of its inputs that move."""
    moves = {x for x, each in zip(jaxpr.invars, moving, strict=True) if each}
    for eqn in needed_equations(jaxpr):
        args = [not hasattr(x, "val") and x in moves for x in eqn.invars]
        if not any(args):
            continue
        name = eqn.primitive.name
        fixed = [x for x, each in zip(eqn.invars, args, strict=True) if not each]
        match name:
            case "mul":
                linear = not all(args)
            case "div":
                linear = not args[1]
            case "add" | "sub" | "add_any":
                linear = all(args)
            case "select_n":
                linear = not args[0] and all(map(_is_literal_zero, fixed[1:]))
            case "neg" | "convert_element_type" | "broadcast_in_dim" | "real" | "imag" | "optimization_barrier":
                linear = True
            case _ if name in CALLS and not has_rule(eqn):
                linear = _is_linear_jaxpr(callee(eqn)[0], args)
            case _:
                linear = name in IDENTITIES or name in UNIT_MOVES
        if not linear:
            return False
        moves.update(eqn.outvars)
    return True


class Rule:
    """A function with a derivative of its own, of arrays of any shapes that broadcast.

    Two are equal only if they are the same object: what a rule does is known to JAX alone.

    Attributes:
      name: the function's kind and name, for messages.

    Raises:
      Irregular: if the function or its rule is no elementwise function, or cannot be traced.
    """

    def __init__(self, eqn: Any):
        self.reverse_only = reverse_only(eqn)
        self.name = _rule_name(eqn)
        if eqn.primitive.name == HIGHER_PRIMITIVE:
            raise Irregular(f"{self.name} has rules that are JAX's own")
        avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        full = max((tuple(x.shape) for x in avals), key=lambda shape: (not _is_unit(shape), len(shape)))
        if bad := [x.shape for x in avals if tuple(x.shape) != full and not _is_unit(x.shape)]:
            raise Irregular(f"{self.name} takes shapes {full} and {bad[0]}")
        self._full = [tuple(x.aval.shape) == full for x in eqn.invars]
        self._real = [k for k, x in enumerate(eqn.invars) if jnp.issubdtype(x.aval.dtype, jnp.inexact)]
        self._moves = [jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.outvars]
        self._body = callee(eqn)
        self._backward: tuple[Any, Sequence[Any]] | None = None
        if eqn.params.get("symbolic_zeros") and self.reverse_only:
            raise Irregular(f"{self.name} asks for symbolic zeros")
        try:
            self._trace(eqn)
            for jaxpr, consts in filter(None, (self._body, self._forward, self._backward)):
                _check_elementwise(jaxpr, consts, full)
            self._check_numbers()
        except Irregular as why:
            raise Irregular(f"{self.name} {why}") from None
        except Refused as error:
            raise Irregular(error.why) from None
        except Exception as error:  # of the user's rule, which JAX runs only when asked for a derivative
            raise Irregular(f"{self.name} cannot be traced: {type(error).__name__}: {error}") from error

        @jax.custom_jvp
        def function(*xs: jax.Array) -> list[Any]:
            return self._shaped(evaluate(*self._body, xs, _bind_elementwise), xs)

        function.defjvp(self._jvp)
        self._function = function

    def __call__(self, *xs: Any) -> list[jax.Array]:
        """Computes the function, with its derivative. All inputs of full size are broadcast together."""
        full = iter(_broadcast_together([x for x, is_full in zip(xs, self._full, strict=True) if is_full]))
        return self._function(*(next(full) if is_full else x for x, is_full in zip(xs, self._full, strict=True)))

    def _trace(self, eqn: Any) -> None:
        """Traces the rules of a derivative to jaxprs: forward and, of a custom_vjp, backward."""
        avals = [x.aval for x in eqn.invars]  # with the mesh axes they vary over
        dots = [avals[k] for k in self._real]

        def along(args: Sequence[Any]) -> Callable[..., list[Any]]:
            def function(*reals: Any) -> list[Any]:
                filled = list(args)
                for k, x in zip(self._real, reals, strict=True):
                    filled[k] = x
                return bind_equation(eqn, filled)

            return function

        def moving(outs: Sequence[Any]) -> list[Any]:
            return [x for x, moves in zip(outs, self._moves, strict=True) if moves]

        def with_tangents(args: Any, dots: Any) -> tuple[Any, Any]:
            outs, tangents = jax.jvp(along(args), tuple(args[k] for k in self._real), tuple(dots))
            return outs, moving(tangents)

        def with_residuals(*args: Any) -> tuple[Any, Any]:
            return jax.vjp(along(args), *(args[k] for k in self._real))

        if not self.reverse_only:
            closed = jax.make_jaxpr(with_tangents)(avals, dots)
            self._forward = closed.jaxpr, closed.consts
            return
        closed, (values, pull) = jax.make_jaxpr(with_residuals, return_shape=True)(*avals)
        self._forward = closed.jaxpr, closed.consts
        structure = jax.tree.structure(pull)
        kept = [x.aval for x in closed.jaxpr.outvars]

        def pulled(residuals: Any, cotangents: Any) -> Any:
            given = iter(cotangents)
            whole = [
                next(given) if moves else np.zeros(x.shape, jax.dtypes.float0)
                for x, moves in zip(values, self._moves, strict=True)
            ]
            return jax.tree.unflatten(structure, residuals)(whole)

        closed = jax.make_jaxpr(pulled)(kept[len(values) :], moving(kept[: len(values)]))
        self._backward = closed.jaxpr, closed.consts

    def _check_numbers(self) -> None:
        """Raises Irregular if the backward rule of a custom_vjp has a cotangent for an input that is one number.

        Where the function is batched there is one for each index, and JAX adds them up.
        """
        if self._backward is None:
            return
        jaxpr = self._backward[0]
        zeros = {
            x
            for eqn in needed_equations(jaxpr)
            if eqn.primitive.name == "broadcast_in_dim"
            for x in eqn.outvars
            if _is_literal_zero(eqn.invars[0])
        }
        for k, x in zip(self._real, jaxpr.outvars, strict=True):
            if not self._full[k] and not _is_literal_zero(x) and (hasattr(x, "val") or x not in zeros):
                raise Irregular("has a cotangent for an argument that is one number")

    def _shaped(self, outs: Sequence[Any], xs: Sequence[Any]) -> list[jax.Array]:
        """Returns the results in the shape that all inputs make."""
        shape = lax.broadcast_shapes(*(np.shape(x) for x in xs))
        return [jnp.broadcast_to(x, shape) for x in outs]

    def _jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        dots = [tangents[k] for k in self._real]
        n = len(self._moves)
        found = evaluate(*self._forward, (*primals, *([] if self.reverse_only else dots)), _bind_elementwise)
        values = self._shaped(found[:n], primals)
        if self.reverse_only:
            moved = self.linear_tangents(
                [x for x, moves in zip(values, self._moves, strict=True) if moves], found[n:], dots
            )
        else:
            moved = self._shaped(found[n:], primals)
        given = iter(moved)
        return values, [
            next(given) if moves else np.zeros(x.shape, jax.dtypes.float0)
            for x, moves in zip(values, self._moves, strict=True)
        ]

    def linear_tangents(self, like: Sequence[Any], residuals: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
        """Returns the tangents of the results of a custom_vjp, ``like`` the results; only their transpose is known."""
        shape = lax.broadcast_shapes(*(np.shape(x) for x in (*like, *residuals, *dots)))
        like = [jnp.broadcast_to(x, shape) for x in like]
        dots = [jnp.broadcast_to(x, shape) if self._full[k] else x for k, x in zip(self._real, dots, strict=True)]
        return pull_p.bind(*match_varying(*like, *residuals, *dots), rule=self, dots=len(dots))

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Computes the cotangents of the real inputs by the backward rule of a custom_vjp."""
        assert self._backward is not None
        return evaluate(*self._backward, (*residuals, *cotangents), _bind_elementwise)

    def is_linear(self) -> bool:
        """True if the derivative is linear by its operations: then cotangents may be added up before it or after it."""
        if self._backward is None:
            return True
        inputs, n = len(self._backward[0].invars), sum(self._moves)
        return _is_linear_jaxpr(self._backward[0], [k >= inputs - n for k in range(inputs)])


class Refused(NotImplementedError):
    """A derivative that is not to be had.

    Attributes:
      why: the reason alone.
    """

    def __init__(self, why: str):
        super().__init__(
            f"epilogue: no second derivative, since {why}; apply the function to the result of the product, outside "
            "the epilogue"
        )
        self.why = why


class Refusal:
    """A function without a derivative: its first argument, of several.

    Attributes:
      why: what the error says.
    """

    def __init__(self, why: str):
        self.why = why

        @jax.custom_jvp
        def first(*xs: Any) -> Any:
            return xs[0]

        first.defjvp(self._jvp)
        self._first = first

    def __call__(self, *xs: Any) -> list[Any]:
        return [self._first(*xs)]

    def _jvp(self, primals: Any, tangents: Any) -> Any:
        raise Refused(self.why)


def linear_rule(eqn: Any) -> Rule:
    """Returns the rule of a function that a rule calls, or of the values beside a derivative.

    Those are computed anew where a further derivative is taken. So their cotangents are not added up before the rule,
    which the rule must not mind.

    Raises:
      Irregular: as Rule does, and if the rule minds.
    """
    rule = Rule(eqn)
    if not rule.is_linear():
        raise Irregular(f"{rule.name} has a backward rule that is not linear in the cotangent")
    return rule


def _rule_name(eqn: Any) -> str:
    """Returns the kind and the name of a function with a rule."""
    if eqn.primitive.name == HIGHER_PRIMITIVE:
        return type(eqn.params["_prim"]).__name__
    kind = eqn.primitive.name.removesuffix("_jaxpr").removesuffix("_call")
    info = getattr(callee(eqn)[0], "debug_info", None)
    return f"{kind} {eqn.params.get('name') or getattr(info, 'func_name', None) or ''}".strip()


# What a custom_vjp is between its forward rule and its backward rule: linear in tangents, and known by its transpose
# alone. Operands: the values of the results that have tangents, what the forward rule kept, the tangents.


def _split_operands(args: Sequence[Any], rule: Rule, dots: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    n = sum(rule._moves)
    return args[:n], args[n : len(args) - dots], args[len(args) - dots :]


def _pull_abstract(*avals: Any, rule: Rule, dots: int) -> list[Any]:
    return list(_split_operands(avals, rule, dots)[0])


def _refuse_forward_mode(*args: Any, rule: Rule, **_: Any) -> Any:
    raise TypeError(f"{rule.name}: can't apply forward-mode differentiation (jvp) to a custom_vjp function")


def _pull_batch(args: Any, dims: Any, **params: Any) -> tuple[list[Any], list[int]]:
    moved = [
        lax.expand_dims(x, [0]) if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)
    ]
    size = max(x.shape[0] for x in moved)  # for all: each index of the batch has cotangents of its own
    moved = [jnp.broadcast_to(x, (size, *x.shape[1:])) for x in moved]
    return pull_p.bind(*moved, **params), [0] * sum(params["rule"]._moves)


def _pull_transpose(cotangents: Any, *args: Any, rule: Rule, dots: int) -> list[Any]:
    like, residuals, tangents = _split_operands(args, rule, dots)
    whole = [jnp.zeros(x.shape, x.dtype) if is_zero(g) else g for g, x in zip(cotangents, like, strict=True)]
    found = rule.pull(residuals, whole)
    found = [
        jnp.broadcast_to(x, dot.aval.shape) if is_linear(dot) else None for x, dot in zip(found, tangents, strict=True)
    ]
    return [None] * (len(args) - dots) + found


pull_p = define(
    "cutjax_pull",
    abstract=_pull_abstract,
    reference=_refuse_forward_mode,
    batch=_pull_batch,
    jvp=lambda primals, tangents, **params: _refuse_forward_mode(**params),
    transpose=_pull_transpose,
    multiple_results=True,
)
