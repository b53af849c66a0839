"""Values that a loss makes of logits, as sums of terms: coefficients of rows, each times an array that is never made.

A value of the logits' size is ``phi * factor * sum(coefficient * basis)``. Coefficients and the factor are numbers or
expressions of rows; phi is one of the product, as the slope of a bound on logits is. Bases are

- ``("logits", p)``: p, an expression of the product, of bias and other columns: the logits, or what they were before.
- ``("powers", p, s)``: ``exp(p - s)``, s an expression of rows.
- ``("label", y)``: 1 in the column y of each row, 0 elsewhere.
- ``("one",)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from cutjax.fusion.heads.values import (
    PASSING,
    Escape,
    Expr,
    Label,
    Leaf,
    Value,
    as_number,
    bound,
    is_full,
    is_made,
    is_number,
    leaves,
    minus,
    over,
    plus,
    power,
    times,
    where,
)

Basis = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """A value of the logits' size: ``phi * factor`` times the sum of the terms, coefficients by basis."""

    terms: Mapping[Basis, Value]
    factor: Value = 1.0
    phi: Value = 1.0

    def scaled(self, by: Value) -> Form:
        """Returns the form times a value of rows; the terms are the same object."""
        return self if is_number(by, 1.0) else Form(self.terms, times(self.factor, by), self.phi)

    def shaped(self, by: Value) -> Form:
        """Returns the form times a value of the product."""
        return Form(self.terms, self.factor, times(self.phi, by))

    @property
    def whole(self) -> dict[Basis, Value]:
        """The terms, each times the factor, of one without phi."""
        if not is_number(self.phi, 1.0):
            raise Escape("a sum over the vocabulary, or a function, of what the slope of logits is multiplied into")
        return {basis: times(x, self.factor) for basis, x in self.terms.items()}

    @property
    def rows(self) -> Value | None:
        """The value of rows that it is everywhere; None where it depends on the column."""
        plain = is_number(self.phi, 1.0) and self.terms.keys() <= {ONE}
        return times(self.terms.get(ONE, 0.0), self.factor) if plain else None


ONE: Basis = ("one",)


def form_of(x: Value | Form) -> Form:
    """Returns a value as a sum of terms."""
    if isinstance(x, Form):
        return x
    if is_full(x):
        return Form({("logits", x): 1.0})
    return Form({} if is_number(x, 0.0) else {ONE: x})


def _same(x: Value, y: Value) -> bool:
    return x is y or (is_number(x) and is_number(y) and x == y)


def _added(x: Form, y: Form) -> Form:
    if not x.terms or not y.terms:
        return y if not x.terms else x
    if x.terms is y.terms and _same(x.phi, y.phi):
        return Form(x.terms, plus(x.factor, y.factor), x.phi)
    if x.terms is y.terms and _same(x.factor, y.factor):
        return Form(x.terms, x.factor, plus(x.phi, y.phi))
    if not _same(x.phi, y.phi):
        raise Escape("a sum of values with other slopes")
    bases = [{basis: times(c, form.factor) for basis, c in form.terms.items()} for form in (x, y)]
    return Form({b: plus(bases[0].get(b, 0.0), bases[1].get(b, 0.0)) for b in {**bases[0], **bases[1]}}, 1.0, x.phi)


def _multiplied(x: Value | Form, y: Value | Form) -> Form:
    for one, other in ((x, y), (y, x)):
        form = form_of(one)
        if (rows := form.rows) is not None:
            return form_of(other).scaled(rows)
    for one, other in ((x, y), (y, x)):
        form = form_of(one)
        labels = [basis for basis in form.terms if basis[0] == "label"]
        if len(labels) == 1 and form.terms.keys() <= {labels[0], ONE} and is_number(form.phi, 1.0):
            terms, by = form.whole, form_of(other)
            at = times(terms[labels[0]], at_label(by, labels[0][1]))
            rest = by.scaled(terms.get(ONE, 0.0)) if ONE in terms else Form({})
            return _added(rest, Form({labels[0]: at}))
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Form) and not isinstance(other, Form):
            return one.shaped(other)
    raise Escape("a product of two values of the logits")


def _quotient(x: Value | Form, y: Value | Form) -> Form:
    if (rows := form_of(y).rows) is not None:
        form = form_of(x)
        return Form(form.terms, over(form.factor, rows), form.phi)
    if isinstance(y, Form):
        raise Escape("a quotient by a value of the logits")
    return Form((form := form_of(x)).terms, form.factor, over(form.phi, y))


def _exponential(x: Form) -> Form:
    terms = x.whole
    logits = [basis for basis in terms if basis[0] == "logits"]
    if len(logits) != 1 or not terms.keys() <= {logits[0], ONE}:
        raise Escape("an exponential of what is not linear in the logits")
    by, p = terms[logits[0]], logits[0][1]
    if is_made(by):
        raise Escape("an exponential of logits that are scaled by what is made of them")
    return Form({("powers", times(by, p), minus(terms.get(ONE, 0.0))): 1.0})


def _selected(condition: Value | Form, no: Value | Form, yes: Value | Form) -> Form:
    """Returns ``yes`` where a condition holds, else ``no``."""
    if isinstance(condition, Form):
        terms = condition.whole
        labels = [basis for basis in terms if basis[0] == "label"]
        if len(labels) != 1 or not is_number(terms[labels[0]], 1.0, -1.0):
            raise Escape("a selection by values of the logits")
        if is_number(terms[labels[0]], -1.0):
            no, yes = yes, no
        elif len(terms) != 1:
            raise Escape("a selection by values of the logits")
        y = labels[0][1]
        at = plus(at_label(form_of(yes), y), minus(at_label(form_of(no), y)))
        return _added(form_of(no), Form({labels[0]: at}))
    if is_full(condition):
        for one, other, held in ((no, yes, True), (yes, no, False)):
            if not (form := form_of(one)).terms or is_number(form.factor, 0.0):
                phi = as_number(condition)
                return form_of(other).shaped(phi if held else plus(1.0, minus(phi)))
        raise Escape("a selection by column between two values of the logits")
    one, other = form_of(yes), form_of(no)
    if one.terms and other.terms and not _same(one.phi, other.phi):
        raise Escape("a selection between values with other slopes")
    both = [{basis: times(c, form.factor) for basis, c in form.terms.items()} for form in (one, other)]
    terms = {b: where(condition, both[0].get(b, 0.0), both[1].get(b, 0.0)) for b in {**both[0], **both[1]}}
    return Form(terms, 1.0, one.phi if one.terms else other.phi)


def applied(eqn: Any, args: Sequence[Value | Form]) -> Value | Form:
    """Returns the result of an elementwise equation on values of the logits' size, of rows or of columns.

    Raises:
      Escape: if that is no sum of terms.
    """
    name = eqn.primitive.name
    if name in PASSING:
        return args[-1]
    if name in ("eq", "ne"):
        for x, y in (args, args[::-1]):
            index = isinstance(x, Leaf) and x.kind == "index"
            if index and isinstance(y, Leaf | Expr) and not is_full(y) and not is_made(y):
                basis = ("label", Label(y, False))
                return Form({basis: 1.0} if name == "eq" else {ONE: 1.0, basis: -1.0})
    powers = name == "exp" and any(x.kind == "product" for x in leaves(args))
    alone = not powers and not any(isinstance(x, Form) for x in args)
    if alone and not (any(map(is_full, args)) and any(map(is_made, args))):
        if name == "convert_element_type" and isinstance(args[0], Leaf) and args[0].kind == "index":
            return args[0]
        return bound(eqn, args)
    match name:
        case "convert_element_type":
            if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) and jnp.issubdtype(
                eqn.invars[0].aval.dtype, jnp.floating
            ):
                raise Escape("a conversion of the logits to integers")
            return args[0]
        case "add" | "add_any":
            return _added(*map(form_of, args))
        case "sub":
            return _added(form_of(args[0]), form_of(args[1]).scaled(-1.0))
        case "mul" | "and":
            return _multiplied(*args)
        case "div":
            return _quotient(*args)
        case "neg":
            return form_of(args[0]).scaled(-1.0)
        case "not":
            return _added(Form({ONE: 1.0}), form_of(args[0]).scaled(-1.0))
        case "exp":
            return _exponential(form_of(args[0]))
        case "select_n" if len(args) == 3:
            return _selected(*args)
    raise Escape(name)


def at_label(form: Form, label: Label) -> Value:
    """Returns the values of rows at the column of a label; where there is none, anything."""
    found: Value = 0.0
    for basis, coefficient in form.terms.items():
        match basis:
            case ("logits", p):
                x = picked(p, label)
            case ("powers", p, shift):
                x = power(plus(picked(p, label), minus(shift)))
            case ("label", other):
                if other != label:
                    raise Escape("values at the column of another label")
                x = 1.0
            case _:
                x = 1.0
        found = plus(found, times(coefficient, x))
    phi = form.phi if is_number(form.phi) else picked(form.phi, label)
    return times(times(found, form.factor), phi)


def total(form: Form, size: int) -> Value:
    """Returns the sum over a vocabulary of a size."""
    found: Value = 0.0
    for basis, coefficient in form.whole.items():
        match basis:
            case ("label", label):
                found = plus(found, where(Leaf("known", (label,)), coefficient, 0.0))
            case ("one",):
                found = plus(found, times(coefficient, float(size)))
            case ("logits", p):
                found = plus(found, times(coefficient, Leaf("total", (p,), made=True)))
            case (_, p, shift):
                found = plus(found, times(coefficient, Leaf("powers", (p, shift), made=True)))
    return found


def largest(form: Form) -> Value:
    """Returns the largest value over the vocabulary."""
    terms = form.whole
    logits = [basis for basis in terms if basis[0] == "logits"]
    if len(logits) != 1 or not terms.keys() <= {logits[0], ONE}:
        raise Escape("the largest of what is not linear in the logits")
    if not is_number(terms[logits[0]]) or terms[logits[0]] <= 0:
        raise Escape("the largest of logits that are scaled")
    most = Leaf("largest", (logits[0][1],), made=True)
    return plus(times(terms[logits[0]], most), terms.get(ONE, 0.0))


def picked(p: Value, label: Label) -> Value:
    """Returns a value of the logits' size at the column of a label."""
    return p if not is_full(p) else Leaf("picked", (p, label), made=True)
