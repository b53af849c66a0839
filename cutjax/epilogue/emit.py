"""From an Epilogue to device text: one straight-line function of one element, on top of atoms.cuh and math.cuh.

The contract with the kernel that calls it is in `emit`; which accuracy a function gets is in docs/accuracy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import accuracy
from cutjax.epilogue.accuracy import Level

if TYPE_CHECKING:
    from cutjax.epilogue.expression import Epilogue, Node

# How a value rounds to a float dtype, given in f32.
_ROUND = {
    "float32": "{}",
    "bfloat16": "round_bf16({})",
    "float16": "round_f16({})",
    "float8_e4m3fn": "round_e4m3({})",
    "float8_e5m2": "round_e5m2({})",
}
_INTEGERS = {name: dtype.integer for name, dtype in DTYPES.items() if dtype.integer}
CARRIERS = {name: dtype.carrier for name, dtype in DTYPES.items() if dtype.carrier}

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}

# In f32, accurate. Results of the second group need no rounding: they are as representable as their arguments.
_FLOAT = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "rem": "fmodf({}, {})",
    "pow": "powf({}, {})",
    "atan2": "atan2f({}, {})",
    "exp": "expf({})",
    "exp2": "exp2f({})",
    "expm1": "expm1f({})",
    "log": "logf({})",
    "log1p": "log1pf({})",
    "logistic": "accurate_logistic({})",
    "tanh": "tanhf({})",
    "erf": "erff({})",
    "erfc": "erfcf({})",
    "erf_inv": "erfinvf({})",
    "sqrt": "sqrtf({})",
    "rsqrt": "rsqrtf({})",
    "cbrt": "cbrtf({})",
    "sin": "sinf({})",
    "cos": "cosf({})",
    "tan": "tanf({})",
    "asin": "asinf({})",
    "acos": "acosf({})",
    "atan": "atanf({})",
    "sinh": "sinhf({})",
    "cosh": "coshf({})",
    "asinh": "asinhf({})",
    "acosh": "acoshf({})",
    "atanh": "atanhf({})",
    "square": "{0} * {0}",
}
_FLOAT_EXACT = {
    "neg": "-{}",
    "abs": "fabsf({})",
    "max": "max_nan({}, {})",
    "min": "min_nan({}, {})",
    "clamp": "clamp_nan({}, {}, {})",
    "sign": "accurate_sign({})",
    "floor": "floorf({})",
    "ceil": "ceilf({})",
}
_INTEGER = {
    "add": "integer_add<{T}>({}, {})",
    "sub": "integer_sub<{T}>({}, {})",
    "mul": "integer_mul<{T}>({}, {})",
    "div": "integer_div<{T}>({}, {})",
    "rem": "integer_rem<{T}>({}, {})",
    "neg": "integer_sub<{T}>(0, {})",
    "abs": "integer_abs<{T}>({})",
    "sign": "integer_sign<{T}>({})",
    "square": "integer_mul<{T}>({0}, {0})",
    "not": "wrap<{T}>(~{})",
    "shift_left": "shift_left<{T}>({}, {})",
    "shift_right_logical": "shift_right_logical<{T}>({}, {})",
    "shift_right_arithmetic": "shift_right_arithmetic<{T}>({}, {})",
    "population_count": "population_count<{T}>({})",
    "clz": "clz<{T}>({})",
    "random_bits": "threefry2x32({}, {}, {})",
    "max": "({0} < {1} ? {1} : {0})",
    "min": "({1} < {0} ? {1} : {0})",
    "clamp": "({2} < {1} || {2} < {0} ? {2} : {1} < {0} ? {0} : {1})",
}
_BOOL = {"not": "!{}", "max": "{} | {}", "min": "{} & {}", "mul": "{} & {}", "add": "{} | {}"}


def reasons(epilogue: Epilogue) -> tuple[str, ...]:
    """Why no device text can be made of an epilogue; empty where it can."""
    found = []
    epilogue = epilogue.primal
    dtypes = [spec.dtype for spec in epilogue.operands] + [out.dtype for out in epilogue.outputs]
    for dtype in sorted({*dtypes, *(node.dtype for node in epilogue.nodes)} - CARRIERS.keys()):
        found.append(f"kernels do not compute in {dtype}")
    if found:
        return tuple(found)
    for i, node in enumerate(epilogue.nodes):
        try:
            _expression(epilogue.nodes, i, node, Level.ACCURATE, ["0"] * len(epilogue.nodes))
        except NotImplementedError as error:
            found.append(str(error))
    return tuple(dict.fromkeys(found))


def places(epilogue: Epilogue) -> list[tuple[str, int]]:
    """Positions beside the row and the column in the matrix, as `Node` has them: ("batch", i) or ("row", i)."""
    return sorted({node.params for node in epilogue.primal.nodes if node.op == "iota" and len(node.params) > 1})


def emit(epilogue: Epilogue) -> str:
    """The function ``epilogue_element``, which computes every output of one element.

    ::

        DEVICE void epilogue_element(const float (&acc)[PRODUCTS], <Carrier> x0, ..., int row, int col,
                                     int batch0, ..., <Carrier>& y0, ...)

    with one ``x`` for each operand, one ``y`` for each output, ``row`` and ``col`` the element's place in its matrix,
    then each of `places`.
    A carrier (`CARRIERS`) holds a value exactly: float every float dtype, int and u32 integers of up to 32 bits, i64
    and u64 those of 64, bool. One exception: an output that is not reduced and of a float dtype shorter than f32 is not
    yet rounded to that dtype, since a store rounds two values in one instruction: ``cvt_bf16x2``, ``cvt_f16x2``,
    ``pack_e4m3x2`` or ``pack_e5m2x2``. Rounding again what is rounded changes nothing, so the store always does.

    Raises:
      NotImplementedError: with all of `reasons`.
    """
    if why := reasons(epilogue):
        raise NotImplementedError("; ".join(why))
    epilogue = epilogue.primal
    nodes, outputs, levels = accuracy.rewrite(epilogue.nodes, epilogue.outputs)
    early = [_late_rounded(nodes, out.node, out.dtype) if not out.reduce else None for out in outputs]
    live = _live(nodes, [e if e is not None else out.node for e, out in zip(early, outputs, strict=True)])

    lines: list[str] = []
    names: list[str] = []
    unrounded: dict[int, str] = {}
    wanted = {e for e in early if e is not None}
    used = {arg for i in live for arg in nodes[i].args}
    used |= {out.node for out, e in zip(outputs, early, strict=True) if e is None}
    for i, node in enumerate(nodes):
        name = f"v{i}"
        if i not in live:
            pass
        elif node.op == "const":
            name = _literal(node)
        elif node.op == "acc":
            name = f"acc[{node.params[0]}]"
        elif node.op == "operand":
            name = f"x{node.params[0]}"
        else:
            text = _expression(nodes, i, node, levels[i], names)
            if i in wanted and _rounds(node):  # an output before it is rounded; others may use it after
                lines.append(f"const float w{i} = {text};")
                text = unrounded[i] = f"w{i}"
            if i in used or i not in unrounded:
                lines.append(f"const {CARRIERS[node.dtype]} {name} = {_rounded(node, text)};")
        names.append(name)

    for number, (out, e) in enumerate(zip(outputs, early, strict=True)):
        if e is not None:
            value = unrounded.get(e, names[e])
        else:
            value = _converted(names[out.node], nodes[out.node].dtype, out.dtype)
        lines.append(f"y{number} = {value};")
    parameters = [f"const float (&acc)[{epilogue.products}]"]
    parameters += [f"{CARRIERS[spec.dtype]} x{i}" for i, spec in enumerate(epilogue.operands)]
    parameters += ["int row", "int col", *(f"int {axis}{i}" for axis, i in places(epilogue))]
    parameters += [f"{CARRIERS[out.dtype]}& y{i}" for i, out in enumerate(epilogue.outputs)]
    body = "".join(f"  {line}\n" for line in lines)
    return f'#line 1 "epilogue (generated)"\nDEVICE void epilogue_element({", ".join(parameters)}) {{\n{body}}}\n'


def _late_rounded(nodes: Sequence[Node], i: int, dtype: str) -> int | None:
    """The node whose value, not yet rounded to the dtype, an output is; None unless it is a float shorter than f32."""
    if dtype not in _ROUND or dtype == "float32":
        return None
    node = nodes[i]
    if node.dtype == "float32":
        return i
    if node.dtype != dtype:
        return None
    if node.op == "convert_element_type" and nodes[node.args[0]].dtype == "float32":
        return node.args[0]
    return i


def _live(nodes: Sequence[Node], roots: Sequence[int]) -> set[int]:
    live = set(roots)
    for i in reversed(range(len(nodes))):
        if i in live:
            live.update(nodes[i].args)
    return live


def _rounds(node: Node) -> bool:
    """Whether the value is computed in f32 and then rounded to its dtype."""
    if node.dtype not in _ROUND or node.dtype == "float32":
        return False
    kept = ("acc", "operand", "const", "select_n", "round", "bitcast_convert_type", "convert_element_type")
    return node.op not in _FLOAT_EXACT and node.op not in kept


def _rounded(node: Node, text: str) -> str:
    return _ROUND[node.dtype].format(text) if _rounds(node) else text


def _literal(node: Node) -> str:
    value = node.params[0]
    if node.dtype == "bool":
        return "true" if value else "false"
    if node.dtype in _ROUND:
        return _float_literal(float(value))
    value = int(value)
    if node.dtype in ("int64", "uint64"):
        # The smallest has no literal of its own.
        return (
            f"{value}ull"
            if node.dtype == "uint64"
            else "(-9223372036854775807ll - 1)"
            if value == -(2**63)
            else f"{value}ll"
        )
    return f"{value}u" if node.dtype[0] == "u" else "(-2147483647 - 1)" if value == -(2**31) else str(value)


def _float_literal(value: float) -> str:
    value = float(np.float32(value))
    if math.isnan(value):
        return "__uint_as_float(0x7fffffffu)"
    if math.isinf(value):
        return f"__uint_as_float({'0xff800000u' if value < 0 else '0x7f800000u'})"
    text = f"{value:.9g}"
    text = text if "." in text or "e" in text else text + ".0"
    return f"({text}f)" if text[0] == "-" else text + "f"


def _converted(text: str, source: str, target: str) -> str:
    """``convert_element_type``."""
    if source == target:
        return text
    if target == "bool":
        return f"{text} != 0"
    if target in _ROUND:
        value = text if source in _ROUND else f"static_cast<float>({text})"
        exact = source == "bool" or target == "float32" or (source.startswith("float8") and target[-2:] == "16")
        return value if exact else _ROUND[target].format(value)
    if source in _ROUND:
        return f"from_float<{_INTEGERS[target]}>({text})"
    return f"wrap<{_INTEGERS[target]}>({text})"


# The bits of a float as an integer, and back.
_TO_BITS = {
    "float32": "__float_as_uint({})",
    "bfloat16": "(__float_as_uint({}) >> 16)",
    "float16": "(cvt_f16x2({}, 0.0f) & 0xffff)",
    "float8_e4m3fn": "(pack_e4m3x2({}, 0.0f) & 0xff)",
    "float8_e5m2": "(pack_e5m2x2({}, 0.0f) & 0xff)",
}
_FROM_BITS = {
    "float32": "__uint_as_float(static_cast<u32>({}))",
    "bfloat16": "__uint_as_float(static_cast<u32>({}) << 16)",
    "float16": "f16_to_f32(static_cast<u32>({}) & 0xffff)",
    "float8_e4m3fn": "f16_to_f32(cvt_f16x2_e4m3x2(static_cast<u16>({})) & 0xffff)",
    "float8_e5m2": "f16_to_f32(static_cast<u32>({}) << 8 & 0xff00)",
}


def _bitcast(text: str, source: str, target: str) -> str:
    """``bitcast_convert_type`` between dtypes of one size."""
    if "bool" in (source, target):
        raise NotImplementedError(f"kernels do not bitcast {source} to {target}")
    bits = _TO_BITS[source].format(text) if source in _ROUND else text
    return _FROM_BITS[target].format(bits) if target in _ROUND else f"wrap<{_INTEGERS[target]}>({bits})"


def _expression(nodes: Sequence[Node], i: int, node: Node, level: Level, names: Sequence[str]) -> str:
    """The C++ of one node, before it is rounded to the node's dtype."""
    args = [names[j] for j in node.args]
    dtype = node.dtype
    source = nodes[node.args[0]].dtype if node.args else dtype
    match node.op:
        case "acc" | "operand" | "const":
            return names[i]
        case "iota":
            return _converted("".join(map(str, node.params)), "int32", dtype)
        case "convert_element_type":
            return _converted(args[0], source, dtype)
        case "bitcast_convert_type":
            return _bitcast(args[0], source, dtype)
        case "copy":
            return args[0]
        case "select_n":
            return _select(source, args)
        case "is_finite":
            return f"is_finite({args[0]})"
        case op if op in _COMPARISONS:
            return f"{args[0]} {_COMPARISONS[op]} {args[1]}"
        case op if op in _BITWISE:
            return f"{args[0]} {_BITWISE[op]} {args[1]}"
    if dtype in _ROUND:
        return _float(node, level, args, [nodes[j] for j in node.args])
    if dtype == "bool" and node.op in _BOOL:
        return _BOOL[node.op].format(*args)
    if dtype in _INTEGERS and node.op == "integer_pow" and node.params[0] >= 0:
        return f"integer_power<{_INTEGERS[dtype]}>({args[0]}, {node.params[0]})"
    if dtype in _INTEGERS and node.op in _INTEGER:
        return _INTEGER[node.op].format(*args, T=_INTEGERS[dtype])
    raise NotImplementedError(f"kernels have no {node.op} in {dtype}")


def _select(dtype: str, args: list[str]) -> str:
    which, *cases = args
    if dtype == "bool":
        return f"{which} ? {cases[1]} : {cases[0]}" if len(cases) == 2 else cases[0]

    def among(first: int, end: int) -> str:
        """One of these cases. Halved, as XLA does it: a chain of hundreds would overflow the compiler's stack."""
        if end - first == 1:
            return cases[first]
        middle = (first + end) // 2
        return f"({which} < {middle} ? {among(first, middle)} : {among(middle, end)})"

    return among(0, len(cases))


def _float(node: Node, level: Level, args: list[str], sources: list[Node]) -> str:
    if fast := _FAST.get(node.op):
        text = fast(node, level, args, sources)
        if text:
            return text
    match node.op:
        case "affine":  # of accuracy.rewrite
            return f"{args[0]} * {_float_literal(node.params[0])} + {_float_literal(node.params[1])}"
        case "integer_pow":
            return f"integer_pow<{node.params[0]}>({args[0]})"
        case "round":
            return f"{'rintf' if int(node.params[0]) == 1 else 'roundf'}({args[0]})"
        case "reduce_precision":
            dtype = {(8, 23): "float32", (8, 7): "bfloat16", (5, 10): "float16"}.get(tuple(node.params))
            if dtype:
                return _ROUND[dtype].format(args[0])
        case "nextafter" if node.dtype == "float32":
            return f"nextafterf({args[0]}, {args[1]})"
        case op if op in _FLOAT:
            return _FLOAT[op].format(*args)
        case op if op in _FLOAT_EXACT:
            return _FLOAT_EXACT[op].format(*args)
    raise NotImplementedError(f"kernels have no {node.op}{node.params or ''} in {node.dtype}")


def _fast_div(node: Node, level: Level, args: list[str], sources: list[Node]) -> str | None:
    if level < Level.FINE:
        return None
    if sources[1].op == "const":
        value = np.float32(sources[1].params[0])
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(1) / value
        if 2**-126 <= abs(inverse) < 2**126:
            return f"{args[0]} * {_float_literal(float(inverse))}"
    return f"div_full({args[0]}, {args[1]})"


def _fast_logistic(node: Node, level: Level, args: list[str], sources: list[Node]) -> str | None:
    if level < Level.FINE:
        return None
    scale, factor = node.params or (1.0, 1.0)
    # A coarse form with one multifunction instruction instead of two, and more of the others, was slower: what an
    # epilogue costs beside another tile's mainloop is its number of instructions (docs/fused-epilogues.md).
    text = f"fine_logistic({args[0]}, {_float_literal(scale)})"
    return text if factor == 1 else f"{_float_literal(factor)} * {text}"


def _fast_erfc(node: Node, level: Level, args: list[str], sources: list[Node]) -> str | None:
    scale, factor = node.params or (1.0, 1.0)
    kind = {Level.COARSE_BF16: "coarse_erfc_bf16", Level.COARSE_F16: "coarse_erfc_f16"}.get(level, "erfcf")
    argument = args[0] if scale == 1 else f"{args[0]} * {_float_literal(scale)}"
    return f"{kind}({argument})" if factor == 1 else f"{_float_literal(factor)} * {kind}({argument})"


def _fast_exp(node: Node, level: Level, args: list[str], sources: list[Node]) -> str | None:
    if level < Level.FINE:
        return None
    return f"fine_exp({args[0]}, {_float_literal(node.params[0] if node.params else 1.0)})"


_FAST: dict[str, Callable[[Node, Level, list[str], list[Node]], str | None]] = {
    "div": _fast_div,
    "logistic": _fast_logistic,
    "erfc": _fast_erfc,
    "exp": _fast_exp,
    "exp2": lambda _, level, args, __: f"fine_exp2({args[0]})" if level >= Level.FINE else None,
    "sqrt": lambda _, level, args, __: f"sqrt_approx({args[0]})" if level >= Level.FINE else None,
    "tanh": lambda _, level, args, __: f"tanh_approx({args[0]})" if level == Level.COARSE_BF16 else None,
    "expm1": lambda _, level, args, __: f"coarse_expm1({args[0]})" if level == Level.COARSE_BF16 else None,
    "log1p_unit": lambda _, level, args, __: f"coarse_log1p({args[0]})",
}
