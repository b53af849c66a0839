"""Batch axes merged into rows, or into another batch axis: the same epilogue of arrays of fewer axes."""

from __future__ import annotations

import dataclasses

from cutjax.epilogue.expression import Epilogue
from cutjax.epilogue.nodes import OperandSpec, Output

# Axes are counted from the rows outwards: the rows are axis 0, batch axis i is axis 1 + i.


def merged(epilogue: Epilogue, count: int, into: int = 0) -> Epilogue | None:
    """Returns the epilogue with so many batch axes merged into the axis inside of them; 0 stands for the rows.

    None where it depends on the position along one of these axes alone, or reduces over some of them. An operand that
    varies along any of them varies along the merged one: it must have them all.
    """
    if not count:
        return epilogue
    last = into + count
    nodes, outputs = [], []
    for node in epilogue.nodes:
        if node.op == "iota":
            params = _position(node.params, into, last)
            if params is None:
                return None
            node = dataclasses.replace(node, params=params)
        nodes.append(node)
    for out in epilogue.outputs:
        axes = _reduced(out, into, last)
        if axes is None:
            return None
        outputs.append(dataclasses.replace(out, axes=axes))
    operands = tuple(_varies(spec, into, last) for spec in epilogue.operands)
    return dataclasses.replace(epilogue, operands=operands, nodes=tuple(nodes), outputs=tuple(outputs))


def _position(params: tuple, into: int, last: int) -> tuple | None:
    axis, *more = params
    if axis == "col":
        return None if more else params
    if axis == "row" and more:  # of the rows and so many batch axes, counted as one
        through = more[0]
        return params if through < into else None if through < last else _counted(through - (last - into))
    at = 0 if axis == "row" else 1 + more[0]
    if into <= at <= last:
        return None
    return params if at < into else ("batch", at - (last - into) - 1)


def _counted(through: int) -> tuple:
    return ("row", through) if through else ("row",)


def _reduced(out: Output, into: int, last: int) -> tuple[str, ...] | None:
    at = {0 if axis == "row" else 1 + int(axis[1:]) for axis in out.axes if axis != "col"}
    inside = at & {*range(into, last + 1)}
    if inside and len(inside) <= last - into:
        return None
    kept = {i if i < into else max(i - (last - into), into) for i in at}
    return (*(names(kept)), *(("col",) if "col" in out.axes else ()))


def names(axes: set[int]) -> tuple[str, ...]:
    """Returns the names of axes, counted from the rows outwards, as an ``Output`` has them."""
    return tuple(f"b{i - 1}" if i else "row" for i in sorted(axes, reverse=True))


def _varies(spec: OperandSpec, into: int, last: int) -> OperandSpec:
    of = [spec.row, *reversed(spec.batch)]
    of += [False] * (last + 1 - len(of))
    row, *batch = (*of[:into], any(of[into : last + 1]), *of[last + 1 :])
    return dataclasses.replace(spec, row=row, batch=tuple(reversed(batch)))
