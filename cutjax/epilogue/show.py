"""An epilogue as a line of text to read, as ``explain`` prints it: infix, with a name for each value used twice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cutjax.dtypes import short
from cutjax.epilogue.nodes import Node, Output

_INFIX = dict(
    add="+", sub="-", mul="*", div="/", rem="%", pow="**", eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=", xor="^",
    shift_left="<<", shift_right_logical=">>>", shift_right_arithmetic=">>", **{"and": "&", "or": "|"},
)  # fmt: skip
_LEAVES = ("acc", "operand", "const", "iota")


def show(products: int, nodes: Sequence[Node], outputs: Sequence[Output], name: str = "acc") -> str:
    """Returns the infix text; a value used twice gets a name, t0, t1, ..., accumulators the one given."""
    uses = [0] * len(nodes)
    for i in itertools.chain(*(node.args for node in nodes), (out.node for out in outputs)):
        uses[i] += 1
    texts: list[str] = []
    lines: list[str] = []
    for node, count in zip(nodes, uses, strict=True):
        text = _node_text(node, texts, name if products == 1 else f"{name}{node.params[0]}" if node.op == "acc" else "")
        if count > 1 and node.op not in _LEAVES:
            lines.append(f"t{len(lines)} = {_without_parentheses(text)}")
            text = f"t{len(lines) - 1}"
        texts.append(text)
    if len(lines) > 24:
        lines = [*lines[:8], f"... {len(lines) - 16} more ...", *lines[-8:]]
    results = []
    for out in outputs:
        text = _without_parentheses(texts[out.node])
        if out.reduce:
            text = f"{out.reduce}({text}, {'+'.join(out.axes)})"
        dtype = nodes[out.node].dtype
        results.append(text if dtype == out.dtype else f"{short(out.dtype)}({text})")
    return "; ".join([*lines, ", ".join(results)])


def _node_text(node: Node, texts: list[str], acc: str) -> str:
    args = [texts[i] for i in node.args]
    match node.op:
        case "acc":
            return acc
        case "operand":
            return f"x{node.params[0]}"
        case "iota":
            return "".join(map(str, node.params))
        case "const":
            value = node.params[0]
            return f"{value:.6g}" if isinstance(value, float) else str(value)
        case "neg" | "not":
            return f"({'-' if node.op == 'neg' else '~'}{args[0]})"
        case "integer_pow" | "square":
            return f"({args[0]} ** {2 if node.op == 'square' else node.params[0]})"
        case "convert_element_type":
            return f"{short(node.dtype)}({_without_parentheses(args[0])})"
        case "bitcast_convert_type":
            return f"bits_{short(node.dtype)}({_without_parentheses(args[0])})"
        case "select_n" if len(args) == 3:
            return f"where({', '.join(map(_without_parentheses, (args[0], args[2], args[1])))})"
        case op if op in _INFIX:
            return f"({args[0]} {_INFIX[op]} {args[1]})"
        case op:
            return f"{op}({', '.join(map(_without_parentheses, args))})"


def _without_parentheses(text: str) -> str:
    """Returns the text without parentheses around all of it."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[1:-1] if c == ")" and i == len(text) - 1 and text[0] == "(" else text
    return text
