"""From an Epilogue to device text: one straight-line function of one element, on top of atoms.cuh and math.cuh.

The contract with the kernel that calls it is in `emit`; which accuracy a function gets is in docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import accuracy
from cutjax.epilogue.accuracy import Level
from cutjax.epilogue.expression import Epilogue, Node, Output, const, needed_nodes
from cutjax.epilogue.node_text import ROUND, converted_text, is_rounded, literal_text, node_text, rounded_text

CARRIERS = {name: dtype.carrier for name, dtype in DTYPES.items() if dtype.carrier}


def reasons(epilogue: Epilogue) -> tuple[str, ...]:
    """Returns the reasons why no device text can be made of an epilogue; none where it can."""
    found = []
    epilogue = epilogue.primal
    dtypes = [spec.dtype for spec in epilogue.operands] + [out.dtype for out in epilogue.outputs]
    for dtype in sorted({*dtypes, *(node.dtype for node in epilogue.nodes)} - CARRIERS.keys()):
        found.append(f"kernels do not compute in {dtype}")
    if found:
        return tuple(found)
    for i, node in enumerate(epilogue.nodes):
        try:
            node_text(epilogue.nodes, i, node, Level.ACCURATE, ["0"] * len(epilogue.nodes))
        except NotImplementedError as error:
            found.append(str(error))
    for out in epilogue.outputs:
        try:
            converted_text("0", epilogue.nodes[out.node].dtype, out.dtype)
        except NotImplementedError as error:
            found.append(str(error))
    return tuple(dict.fromkeys(found))


def places(epilogue: Epilogue) -> list[tuple[str, int]]:
    """Returns the positions used beside row and column, as `Node` has them: ("batch", i), ("row", i) or ("col", i)."""
    return sorted({node.params for node in epilogue.primal.nodes if node.op == "iota" and len(node.params) > 1})


def emit(epilogue: Epilogue, what: str = "epilogue") -> str:
    """Returns the text of ``epilogue_element``, the function which computes every output of one element.

    Of a prologue, as ``what`` says, it is ``prologue_element``.

    ::

        DEVICE void epilogue_element(const <Carrier> (&acc)[PRODUCTS], <Carrier> x0, ..., int row, int col,
                                     int batch0, ..., <Carrier>& y0, ...)

    with one ``x`` for each operand, one ``y`` for each output, ``row`` and ``col`` the element's place in its matrix,
    then each of `places`.
    A carrier (`CARRIERS`) holds a value exactly: float every float of up to 32 bits, double float64, int and u32
    integers of up to 32 bits, i64 and u64 those of 64, bool, Complex<float> and Complex<double>. That of ``acc`` is of
    the accumulators' dtype. One exception: an output that is not reduced and of a float dtype shorter than f32 is not
    yet rounded to that dtype, since a store rounds two values in one instruction: ``cvt_bf16x2``, ``cvt_f16x2``,
    ``pack_e4m3x2`` or ``pack_e5m2x2``. Rounding again what is rounded changes nothing, so the store always does.

    Raises:
      NotImplementedError: with all of `reasons`.
    """
    if why := reasons(epilogue):
        raise NotImplementedError("; ".join(why))
    epilogue = epilogue.primal
    uniform = {i for i, spec in enumerate(epilogue.operands) if not (spec.row or spec.col or spec.group)}
    nodes, outputs, levels = accuracy.rewrite(epilogue.nodes, epilogue.outputs, uniform)
    before_rounding = [_node_before_rounding(nodes, out.node, out.dtype) if not out.reduce else None for out in outputs]
    roots = [out.node if before is None else before for out, before in zip(outputs, before_rounding, strict=True)]
    needed = needed_nodes(nodes, roots)

    lines: list[str] = []
    names: list[str] = []
    unrounded: dict[int, str] = {}
    wanted = {before for before in before_rounding if before is not None}
    used = {arg for i in needed for arg in nodes[i].args}
    used |= {out.node for out, before in zip(outputs, before_rounding, strict=True) if before is None}
    for i, node in enumerate(nodes):
        name = f"v{i}"
        if i not in needed:
            pass
        elif node.op == "const":
            name = literal_text(node)
        elif node.op == "acc":
            name = f"acc[{node.params[0]}]"
        elif node.op == "operand":
            name = f"x{node.params[0]}"
        else:
            text = node_text(nodes, i, node, levels[i], names)
            if i in wanted and is_rounded(node):  # an output before it is rounded; others may use it after
                lines.append(f"const float w{i} = {text};")
                text = unrounded[i] = f"w{i}"
            if i in used or i not in unrounded:
                lines.append(f"const {CARRIERS[node.dtype]} {name} = {rounded_text(node, text)};")
        names.append(name)

    for number, (out, before) in enumerate(zip(outputs, before_rounding, strict=True)):
        if before is not None:
            value = unrounded.get(before, names[before])
        else:
            value = converted_text(names[out.node], nodes[out.node].dtype, out.dtype)
        lines.append(f"y{number} = {value};")
    parameters = [f"const {CARRIERS[epilogue.accumulator.name]} (&acc)[{epilogue.products}]"]
    parameters += [f"{CARRIERS[spec.dtype]} x{i}" for i, spec in enumerate(epilogue.operands)]
    parameters += ["int row", "int col", *(f"int {axis}{i}" for axis, i in places(epilogue))]
    parameters += [f"{CARRIERS[out.dtype]}& y{i}" for i, out in enumerate(epilogue.outputs)]
    body = "".join(f"  {line}\n" for line in lines)
    return f'#line 1 "{what} (generated)"\nDEVICE void {what}_element({", ".join(parameters)}) {{\n{body}}}\n'


def reduction(out: Output) -> tuple[str, str]:
    """Returns the identity of a reduction, and the text ``.. {0} .. {1} ..`` that combines two values.

    Both are in the carrier of its dtype, in which partial results are exchanged and stored; XLA reduces those further.
    """
    reduce, dtype = out.reduce, out.dtype
    values = [Node("operand", (), dtype, (i,)) for i in range(2)]
    both = Node("add" if reduce == "sum" else reduce or "", (0, 1), dtype)
    combined = node_text([*values, both], 2, both, Level.ACCURATE, ["{0}", "{1}"])
    if reduce == "sum":
        identity = 0
    elif dtype in ROUND or dtype == "float64":
        identity = -np.inf if reduce == "max" else np.inf
    else:
        bounds = np.iinfo("uint8" if dtype == "bool" else dtype)
        identity = bounds.min if reduce == "max" else bounds.max
    return literal_text(const(identity, dtype)), combined


def _node_before_rounding(nodes: Sequence[Node], i: int, dtype: str) -> int | None:
    """Returns the node whose value an output is before it is rounded; None unless to a float shorter than f32."""
    if dtype not in ROUND or dtype == "float32":
        return None
    node = nodes[i]
    if node.dtype == "float32":
        return i
    if node.dtype != dtype:
        return None
    if node.op == "convert_element_type" and nodes[node.args[0]].dtype == "float32":
        return node.args[0]
    return i
