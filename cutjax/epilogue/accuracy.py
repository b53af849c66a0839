"""The accuracy each value of an epilogue must have for its outputs not to show it, and rewrites that serve it.

A function feeding only outputs of 16 bits or fewer may use the hardware's approximations, as long as nothing between
it and the output can magnify their error. docs/accuracy.md states the rules and the errors.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Container, Sequence

from cutjax.epilogue.nodes import Node, Output

_INFINITY = math.inf
Interval = tuple[float, float]


class Level(enum.IntEnum):
    """The accuracy asked of a value."""

    ACCURATE = 0  # as f32 can show it
    XLA = 1  # as XLA has f32 on a GPU: division errs by two units in the last place
    FINE = 2  # relative error about 2^-21: f32's own, three bits short
    COARSE_F16 = 3  # relative error below 2^-14: a quarter of what rounding to f16 makes
    COARSE_BF16 = 4  # 2^-11: a quarter of what rounding to bf16 makes


_OUTPUT_LEVELS = {
    "bfloat16": Level.COARSE_BF16,
    "float8_e4m3fn": Level.COARSE_BF16,
    "float8_e5m2": Level.COARSE_BF16,
    "float16": Level.COARSE_F16,
    "float32": Level.XLA,
}
# A relative error of the argument grows by a small factor at most.
_KEEPS_RELATIVE_ERROR = frozenset(
    [
        "mul",
        "div",
        "neg",
        "abs",
        "max",
        "min",
        "clamp",
        "optimization_barrier",
        "sqrt",
        "rsqrt",
        "cbrt",
        "square",
        "tanh",
        "erf",
        "log1p_unit",
    ]
)
_FLOATS = frozenset(_OUTPUT_LEVELS)


def levels(nodes: Sequence[Node], outputs: Sequence[Output]) -> list[Level]:
    """Returns the level of each node: the strictest of what its uses ask."""
    bounds = intervals(nodes)
    found = [Level.COARSE_BF16] * len(nodes)

    def ask(i: int, level: Level) -> None:
        found[i] = min(found[i], level)

    stored = [node.dtype for node in nodes if node.op == "acc"]  # of sums that no product makes, an array's
    stored += [out.dtype for out in outputs if not out.reduce]
    of_16_bits = any(_OUTPUT_LEVELS.get(dtype, Level.ACCURATE) > Level.FINE for dtype in stored)
    for out in outputs:
        level = _OUTPUT_LEVELS.get(out.dtype, Level.ACCURATE)
        if out.reduce == "sum":
            # Over all rows float32's own rounding of partial sums is as large as fine terms' errors.
            beside = of_16_bits and "row" in out.axes and level == Level.XLA
            level = Level.FINE if beside else min(level, Level.FINE)
        ask(out.node, level)
    for i in reversed(range(len(nodes))):
        for position, arg in enumerate(nodes[i].args):
            ask(arg, _level_asked(nodes, i, position, found[i], bounds))
    return found


def _level_asked(nodes: Sequence[Node], i: int, position: int, level: Level, bounds: Sequence[Interval]) -> Level:
    """Returns the level that node i, of which ``level`` is asked, asks of one of its arguments."""
    node = nodes[i]
    if node.dtype not in _FLOATS:
        return Level.ACCURATE
    match node.op:
        case op if op in _KEEPS_RELATIVE_ERROR:
            return level
        case "convert_element_type" | "reduce_precision":
            return level
        case "select_n":
            return Level.ACCURATE if position == 0 else level
        case "integer_pow" if abs(node.params[0]) <= 4:
            return level
        case "log1p" if bounds[node.args[0]][0] >= 0:
            return level
        case "add" | "sub":
            a, b = bounds[node.args[0]], bounds[node.args[1]]
            b = (-b[1], -b[0]) if node.op == "sub" else b
            if (a[0] >= 0 and b[0] >= 0) or (a[1] <= 0 and b[1] <= 0):
                return level  # nothing cancels
            for one, other in ((a, b), (b, a)):  # exp(x) - 1: a constant that the other comes near, for many arguments
                if one[0] == one[1] and other != (-_INFINITY, _INFINITY) and other[0] <= -one[0] <= other[1]:
                    return Level.ACCURATE
            return min(level, Level.FINE)
        case _:
            return Level.ACCURATE


def intervals(nodes: Sequence[Node]) -> list[Interval]:
    """Computes bounds of each value, NaN aside."""
    found: list[Interval] = []
    for node in nodes:
        bounds = _interval(node, [found[i] for i in node.args]) if node.dtype in _FLOATS else (-_INFINITY, _INFINITY)
        found.append((-_INFINITY, _INFINITY) if any(map(math.isnan, bounds)) else bounds)
    return found


def _interval(node: Node, args: list[Interval]) -> Interval:
    everything = (-_INFINITY, _INFINITY)
    a = args[0] if args else everything
    b = args[1] if len(args) > 1 else everything
    match node.op:
        case "const":
            return float(node.params[0]), float(node.params[0])
        case "neg":
            return -a[1], -a[0]
        case "abs" | "square" | "integer_pow" if node.op != "integer_pow" or node.params[0] % 2 == 0:
            return 0.0, max(abs(a[0]), abs(a[1])) if node.op == "abs" else _INFINITY
        case "exp" | "exp2":
            scale = node.params[0] if node.params else 1.0
            return 0.0, 1.0 if scale * (a[1] if scale > 0 else a[0]) <= 0 else _INFINITY
        case "logistic":
            factor = node.params[1] if node.params else 1.0
            return min(factor, 0.0), max(factor, 0.0)
        case "tanh" | "erf":
            return 0.0 if a[0] >= 0 else -1.0, 0.0 if a[1] <= 0 else 1.0
        case "erfc":
            factor = 2.0 * (node.params[1] if node.params else 1.0)
            return min(factor, 0.0), max(factor, 0.0)
        case "sqrt" | "rsqrt":
            return 0.0, _INFINITY
        case "log1p" | "log1p_unit" | "cbrt":
            return 0.0 if a[0] >= 0 else -_INFINITY, _INFINITY
        case "convert_element_type" | "optimization_barrier" | "reduce_precision":
            return a
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "max":
            return max(a[0], b[0]), max(a[1], b[1])
        case "min":
            return min(a[0], b[0]), min(a[1], b[1])
        case "select_n":
            return min(x[0] for x in args[1:]), max(x[1] for x in args[1:])
        case "mul" | "div" if (a[0] >= 0 and b[0] >= 0) or (node.op == "mul" and node.args[0] == node.args[1]):
            return 0.0, _INFINITY
        case _:
            return everything


def rewrite(
    nodes: Sequence[Node], outputs: Sequence[Output], uniform: Container[int] = ()
) -> tuple[list[Node], list[Output], list[Level]]:
    """Returns the nodes in forms that neither cancel nor cost, where no output shows the difference, and their levels.

    1 + tanh(x) and 1 + erf(x), which cancel, become logistic and erfc, and a / (1 + exp(x)) becomes a * logistic(-x).
    Constant factors go into exp, logistic and erfc, whose ``params`` are ``(scale, factor)``: factor * f(scale * x).
    A quotient by one of the ``uniform`` operands, which have one number for all elements, becomes "div_uniform".
    logistic(x) and logistic(-x), of derivatives, become "logistic_rising" and "logistic_falling": of one exponential.
    """
    nodes = list(nodes)
    uses = [0] * len(nodes)
    for node in nodes:
        for arg in node.args:
            uses[arg] += 1
    for out in outputs:
        uses[out.node] += 1
    found = levels(nodes, outputs)
    for i in range(len(found)):
        if nodes[i].dtype == "float32" and found[i] >= Level.FINE:
            _improve_node(nodes, i, uses)
    nodes, outputs = _in_order(nodes, outputs)
    found = levels(nodes, outputs)
    bounds = intervals(nodes)
    _pair_logistics(nodes, found)
    for i, node in enumerate(nodes):
        if node.op == "log1p" and found[i] >= Level.COARSE_F16:
            low, high = bounds[node.args[0]]
            if low >= 0 and high <= 1:
                nodes[i] = dataclasses.replace(node, op="log1p_unit")
        elif node.op == "div" and node.dtype in _FLOATS and found[i] >= Level.XLA:
            divisor = nodes[node.args[1]]
            if divisor.op == "operand" and divisor.params[0] in uniform:
                nodes[i] = dataclasses.replace(node, op="div_uniform")
    return nodes, outputs, found


def _pair_logistics(nodes: list[Node], found: Sequence[Level]) -> None:
    places = {
        (node.args, *(node.params or (1.0, 1.0))): i
        for i, node in enumerate(nodes)
        if node.op == "logistic" and node.dtype == "float32" and found[i] >= Level.FINE
    }
    for (args, scale, factor), i in places.items():
        j = places.get((args, -scale, factor))
        if scale < 0 and j is not None:
            nodes[i] = dataclasses.replace(nodes[j], op="logistic_falling")
            nodes[j] = dataclasses.replace(nodes[j], op="logistic_rising")


def _in_order(nodes: Sequence[Node], outputs: Sequence[Output]) -> tuple[list[Node], list[Output]]:
    """Returns the nodes that the outputs need, each after its arguments, equal ones once."""
    index: dict[Node, int] = {}
    places: dict[int, int] = {}
    stack = [out.node for out in reversed(outputs)]
    while stack:
        i = stack[-1]
        waiting = [j for j in nodes[i].args if j not in places]
        if waiting:
            stack += reversed(waiting)
            continue
        stack.pop()
        if i not in places:
            node = dataclasses.replace(nodes[i], args=tuple(places[j] for j in nodes[i].args))
            places[i] = index.setdefault(node, len(index))
    return list(index), [dataclasses.replace(out, node=places[out.node]) for out in outputs]


def _improve_node(nodes: list[Node], i: int, uses: Sequence[int]) -> None:
    """Improves one node. What others may use stays as it is: new nodes go to the end of the list."""
    node = nodes[i]
    match node.op:
        case "exp":
            _set_scaled(nodes, i, "exp", node.args[0], 1.0)
        case "logistic" | "erfc":
            _set_scaled(nodes, i, node.op, node.args[0], *(node.params or (1.0, 1.0)))
            _factor_cubic(nodes, i)
        case "add" | "sub":
            for one, other in (node.args, node.args[::-1])[: 2 if node.op == "add" else 1]:
                function = nodes[other]
                sign = 1.0 if node.op == "add" else -1.0
                scale, factor = function.params if function.op == "logistic" and function.params else (1.0, 1.0)
                if function.op == "mul" and one in function.args:  # a + a tanh(x), of tanh's derivative
                    tanh = function.args[function.args[0] == one]
                    if nodes[tanh].op == "tanh" and nodes[tanh].dtype == "float32":
                        logistic = _append(nodes, nodes[tanh])
                        _set_scaled(nodes, logistic, "logistic", nodes[tanh].args[0], 2.0 * sign, 2.0)
                        _factor_cubic(nodes, logistic)
                        nodes[i] = dataclasses.replace(node, op="mul", args=(one, logistic))
                        return
                if not _is_const(nodes[one], 1.0) or function.dtype != "float32":
                    continue
                if function.op == "tanh":
                    _set_scaled(nodes, i, "logistic", function.args[0], 2.0 * sign, 2.0)
                    return _factor_cubic(nodes, i)
                if function.op == "erf":
                    return _set_scaled(nodes, i, "erfc", function.args[0], -sign)
                if function.op == "logistic" and node.op == "sub" and factor == 1:
                    return _set_scaled(nodes, i, "logistic", function.args[0], -scale)
        case "mul":
            for one, other in (node.args, node.args[::-1]):
                function = nodes[other]
                if (
                    nodes[one].op == "const"
                    and function.op in ("logistic", "erfc")
                    and function.params
                    and uses[other] == 1
                ):
                    scale, factor = function.params
                    value = float(nodes[one].params[0])
                    if 2**-30 < abs(value * factor) < 2**30:
                        nodes[i] = dataclasses.replace(function, params=(scale, value * factor))
                        return
        case "div":
            top, bottom = node.args
            total = nodes[bottom]
            if total.op == "add" and total.dtype == "float32" and uses[bottom] == 1:
                for one, other in (total.args, total.args[::-1]):
                    function = nodes[other]
                    if _is_const(nodes[one], 1.0) and function.op == "exp" and function.dtype == "float32":
                        scale = function.params[0] if function.params else 1.0
                        _set_scaled(nodes, bottom, "logistic", function.args[0], -scale)
                        nodes[i] = dataclasses.replace(node, op="mul", args=(top, bottom))
                        return


def _factor_cubic(nodes: list[Node], i: int) -> None:
    """Turns s (x + c x^3), of GELU's logistic, into ln 2 * x (k0 + k1 x^2): the function divides by ln 2."""
    scale, factor = nodes[i].params
    total = nodes[nodes[i].args[0]]
    if nodes[i].op != "logistic" or total.op != "add":
        return
    for x, other in (total.args, total.args[::-1]):
        term = nodes[other]
        for c, cube in (term.args, term.args[::-1]) if term.op == "mul" else ():
            power = nodes[cube]
            if nodes[c].op != "const" or power.op != "integer_pow" or power.params != (3,) or power.args != (x,):
                continue
            if {total.dtype, term.dtype, power.dtype} != {"float32"}:
                continue
            k = abs(scale) / math.log(2)
            square = _append(nodes, dataclasses.replace(power, op="square", params=()))
            affine = (k * float(nodes[c].params[0]), k)
            sum_ = _append(nodes, dataclasses.replace(term, op="affine", args=(square,), params=affine))
            product = _append(nodes, dataclasses.replace(total, op="mul", args=(x, sum_)))
            nodes[i] = dataclasses.replace(
                nodes[i], args=(product,), params=(math.copysign(math.log(2), scale), factor)
            )
            return


def _append(nodes: list[Node], node: Node) -> int:
    nodes.append(node)
    return len(nodes) - 1


def _is_const(node: Node, value: float) -> bool:
    return node.op == "const" and node.params[0] == value


def _set_scaled(nodes: list[Node], i: int, op: str, arg: int, scale: float, factor: float = 1.0) -> None:
    """Makes node i factor * op(scale * arg), with constant factors of arg moved into the scale."""
    while nodes[arg].dtype == "float32":
        node = nodes[arg]
        if node.op == "neg":
            scale, arg = -scale, node.args[0]
            continue
        if node.op != "mul":
            break
        found = [(a, b) for a, b in (node.args, node.args[::-1]) if nodes[a].op == "const"]
        if not found:
            break
        product = scale * float(nodes[found[0][0]].params[0])
        if not 2**-30 < abs(product) < 2**30:
            break
        scale, arg = product, found[0][1]
    params = (scale,) if op == "exp" else (scale, factor)
    nodes[i] = dataclasses.replace(nodes[i], op=op, args=(arg,), params=params)
