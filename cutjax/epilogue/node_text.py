"""The C++ of one node of an epilogue: by its dtype, in the accuracy asked of it.

Functions of atoms.cuh, integers.cuh and math.cuh, by the name of the lax primitive; docs/accuracy.md says which
accuracy each has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue.accuracy import Level
from cutjax.epilogue.nodes import Node

# How a value rounds to a float dtype, given in f32.
ROUND = {
    "float32": "{}",
    "bfloat16": "round_bf16({})",
    "float16": "round_f16({})",
    "float8_e4m3fn": "round_e4m3({})",
    "float8_e5m2": "round_e5m2({})",
}
_INTEGER_TYPES = {name: dtype.integer for name, dtype in DTYPES.items() if dtype.integer}

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}

# In f32, accurate. Results of the second group need no rounding: they are as representable as their arguments.
_FLOAT_TEXT = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "div_uniform": "div_uniform({}, {})",  # of accuracy.rewrite
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
_EXACT_FLOAT_TEXT = {
    "neg": "-{}",
    "abs": "fabsf({})",
    "max": "max_nan({}, {})",
    "min": "min_nan({}, {})",
    "clamp": "clamp_nan({}, {}, {})",
    "sign": "accurate_sign({})",
    "floor": "floorf({})",
    "ceil": "ceilf({})",
}
_INTEGER_TEXT = {
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
# Those of complex numbers, and what makes real ones of them.
COMPLEX = {"complex64": "float32", "complex128": "float64"}
_COMPLEX_TEXT = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "square": "{0} * {0}",
    "neg": "-{}",
}
_PART_TEXT = {"real": "{}.real", "imag": "{}.imag", "abs": "modulus({})"}
_BOOL_TEXT = {"not": "!{}", "max": "{} | {}", "min": "{} & {}", "mul": "{} & {}", "add": "{} | {}"}


def is_rounded(node: Node) -> bool:
    """True if the value is computed in f32 and then rounded to its dtype."""
    if node.dtype not in ROUND or node.dtype == "float32":
        return False
    kept = ("acc", "operand", "const", "select_n", "round", "bitcast_convert_type", "convert_element_type")
    kept += ("optimization_barrier",)
    return node.op not in _EXACT_FLOAT_TEXT and node.op not in kept


def rounded_text(node: Node, text: str) -> str:
    """Returns the text of a node's value, rounded to its dtype."""
    return ROUND[node.dtype].format(text) if is_rounded(node) else text


def literal_text(node: Node) -> str:
    """Returns the literal of a constant."""
    value = node.params[0]
    if node.dtype == "bool":
        return "true" if value else "false"
    if node.dtype in ROUND:
        return _float_literal(float(value))
    if node.dtype == "float64":
        return _double_literal(float(value))
    if node.dtype in COMPLEX:
        part = _float_literal if COMPLEX[node.dtype] == "float32" else _double_literal
        value = complex(value)
        return f"{DTYPES[node.dtype].carrier}{{{part(value.real)}, {part(value.imag)}}}"
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


def _double_literal(value: float) -> str:
    if math.isnan(value):
        return "__longlong_as_double(0x7fffffffffffffff)"
    if math.isinf(value):
        return f"{'(-' if value < 0 else '('}__longlong_as_double(0x7ff0000000000000))"
    text = repr(value)
    return f"({text})" if text[0] == "-" else text


def converted_text(text: str, source: str, target: str) -> str:
    """Returns the text of ``convert_element_type``."""
    if source == target:
        return text
    if source in COMPLEX and target in COMPLEX:
        return f"to_complex<{DTYPES[COMPLEX[target]].carrier}>({text})"
    if source in COMPLEX:
        raise NotImplementedError(f"kernels do not convert {source} to {target}")
    if target in COMPLEX:
        return f"{DTYPES[target].carrier}{{{converted_text(text, source, COMPLEX[target])}, 0}}"
    if target == "bool":
        return f"{text} != 0"
    if target == "float64":
        return f"static_cast<double>({text})"
    if target in ROUND:
        value = text if source in ROUND else f"static_cast<float>({text})"
        exact = source == "bool" or target == "float32" or (source.startswith("float8") and target[-2:] == "16")
        return value if exact else ROUND[target].format(value)
    if source in ROUND or source == "float64":
        return f"from_float<{_INTEGER_TYPES[target]}>({text})"
    return f"wrap<{_INTEGER_TYPES[target]}>({text})"


# The bits of a float as an integer, and back.
_TO_BITS = {
    "float64": "__double_as_longlong({})",
    "float32": "__float_as_uint({})",
    "bfloat16": "(__float_as_uint({}) >> 16)",
    "float16": "(cvt_f16x2({}, 0.0f) & 0xffff)",
    "float8_e4m3fn": "(pack_e4m3x2({}, 0.0f) & 0xff)",
    "float8_e5m2": "(pack_e5m2x2({}, 0.0f) & 0xff)",
}
_FROM_BITS = {
    "float64": "__longlong_as_double({})",
    "float32": "__uint_as_float(static_cast<u32>({}))",
    "bfloat16": "__uint_as_float(static_cast<u32>({}) << 16)",
    "float16": "f16_to_f32(static_cast<u32>({}) & 0xffff)",
    "float8_e4m3fn": "f16_to_f32(cvt_f16x2_e4m3x2(static_cast<u16>({})) & 0xffff)",
    "float8_e5m2": "f16_to_f32(static_cast<u32>({}) << 8 & 0xff00)",
}


def _bitcast_text(text: str, source: str, target: str) -> str:
    """Returns the text of ``bitcast_convert_type`` between dtypes of one size."""
    if "bool" in (source, target) or {source, target} & COMPLEX.keys():
        raise NotImplementedError(f"kernels do not bitcast {source} to {target}")
    bits = _TO_BITS[source].format(text) if source in _TO_BITS else text
    return _FROM_BITS[target].format(bits) if target in _FROM_BITS else f"wrap<{_INTEGER_TYPES[target]}>({bits})"


def node_text(nodes: Sequence[Node], i: int, node: Node, level: Level, names: Sequence[str]) -> str:
    """Returns the C++ of one node, before it is rounded to the node's dtype."""
    args = [names[j] for j in node.args]
    dtype = node.dtype
    source = nodes[node.args[0]].dtype if node.args else dtype
    match node.op:
        case "acc" | "operand" | "const":
            return names[i]
        case "iota":
            return converted_text("".join(map(str, node.params)), "int32", dtype)
        case "convert_element_type":
            return converted_text(args[0], source, dtype)
        case "bitcast_convert_type":
            return _bitcast_text(args[0], source, dtype)
        case "optimization_barrier":  # no kernel reorders what it computes
            return args[0]
        case "select_n":
            return _select_text(source, args)
        case "is_finite":
            return f"is_finite({args[0]})"
        case op if op in _COMPARISONS:
            return f"{args[0]} {_COMPARISONS[op]} {args[1]}"
        case op if op in _BITWISE:
            return f"{args[0]} {_BITWISE[op]} {args[1]}"
    if node.op in _PART_TEXT and source in COMPLEX:
        return _PART_TEXT[node.op].format(*args)
    if dtype in ROUND:
        return _float_text(node, level, args, [nodes[j] for j in node.args])
    if dtype == "float64":
        return _double_text(node, args)
    if dtype in COMPLEX and (text := _complex_text(node, args, source)):
        return text
    if dtype == "bool" and node.op in _BOOL_TEXT:
        return _BOOL_TEXT[node.op].format(*args)
    if dtype in _INTEGER_TYPES and node.op == "integer_pow" and node.params[0] >= 0:
        return f"integer_power<{_INTEGER_TYPES[dtype]}>({args[0]}, {node.params[0]})"
    if dtype in _INTEGER_TYPES and node.op in _INTEGER_TEXT:
        return _INTEGER_TEXT[node.op].format(*args, T=_INTEGER_TYPES[dtype])
    raise NotImplementedError(f"kernels have no {node.op} in {dtype}")


def _select_text(dtype: str, args: list[str]) -> str:
    which, *cases = args
    if dtype == "bool":
        return f"{which} ? {cases[1]} : {cases[0]}" if len(cases) == 2 else cases[0]

    def among(first: int, end: int) -> str:
        """Returns one of these cases. Halved, as XLA does it: a chain of hundreds overflows the compiler's stack."""
        if end - first == 1:
            return cases[first]
        middle = (first + end) // 2
        return f"({which} < {middle} ? {among(first, middle)} : {among(middle, end)})"

    return among(0, len(cases))


def _float_text(node: Node, level: Level, args: list[str], sources: list[Node]) -> str:
    if fast := _FAST_FLOAT_TEXT.get(node.op):
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
                return ROUND[dtype].format(args[0])
        case "nextafter" if node.dtype == "float32":
            return f"nextafterf({args[0]}, {args[1]})"
        case op if op in _FLOAT_TEXT:
            return _FLOAT_TEXT[op].format(*args)
        case op if op in _EXACT_FLOAT_TEXT:
            return _EXACT_FLOAT_TEXT[op].format(*args)
    raise NotImplementedError(f"kernels have no {node.op}{node.params or ''} in {node.dtype}")


def _double_text(node: Node, args: list[str]) -> str:
    """Returns the text in float64, where every function is the accurate one: C names those of f32 by a last f."""
    if node.op == "reduce_precision" and tuple(node.params) != (11, 52):
        raise NotImplementedError(f"kernels have no reduce_precision{node.params} in float64")
    if node.op == "reduce_precision":
        return args[0]
    if node.op == "nextafter":
        return f"nextafter({args[0]}, {args[1]})"
    return re.sub(r"(?<=\w)f\(", "(", _float_text(node, Level.ACCURATE, args, []))


def _complex_text(node: Node, args: list[str], source: str) -> str | None:
    carrier = DTYPES[node.dtype].carrier
    match node.op:
        case "complex":
            return f"{carrier}{{{args[0]}, {args[1]}}}"
        case "conj":
            return f"conj({args[0]})" if source in COMPLEX else f"{carrier}{{{args[0]}, 0}}"
        case "integer_pow" if node.params[0] > 0:
            return f"integer_pow<{node.params[0]}>({args[0]})"
        case op if op in _COMPLEX_TEXT:
            return _COMPLEX_TEXT[op].format(*args)
    return None


def _fast_div(node: Node, level: Level, args: list[str], sources: list[Node]) -> str | None:
    if level < Level.XLA:
        return None
    if sources[1].op == "const" and level > Level.XLA:
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
    text = f"fine_{node.op}({args[0]}, {_float_literal(scale)})"
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


_FAST_FLOAT_TEXT: dict[str, Callable[[Node, Level, list[str], list[Node]], str | None]] = {
    "div": _fast_div,
    "logistic": _fast_logistic,
    "logistic_rising": _fast_logistic,
    "logistic_falling": _fast_logistic,
    "erfc": _fast_erfc,
    "exp": _fast_exp,
    "exp2": lambda _, level, args, __: f"fine_exp2({args[0]})" if level >= Level.FINE else None,
    "sqrt": lambda _, level, args, __: f"sqrt_approx({args[0]})" if level >= Level.FINE else None,
    "tanh": lambda _, level, args, __: f"tanh_approx({args[0]})" if level == Level.COARSE_BF16 else None,
    "expm1": lambda _, level, args, __: f"coarse_expm1({args[0]})" if level == Level.COARSE_BF16 else None,
    "log1p_unit": lambda _, level, args, __: f"coarse_log1p({args[0]})",
}
