"""Runs the device text of epilogues on the host: math.cuh over tests/native/device_shim.h, compiled by g++."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import gxx
import numpy as np

from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue, Node, OperandSpec, Output, normal
from cutjax.runtime import sources

SHIM = gxx.NATIVE / "device_shim.h"
# The numpy type of a carrier.
TYPES = {"float": np.float32, "int": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "bool": np.bool_}
TYPES |= {"double": np.float64, "Complex<float>": np.complex64, "Complex<double>": np.complex128}


def carrier(dtype: str) -> Any:
    """The numpy type of the values of a dtype."""
    return TYPES[emit.CARRIERS[dtype]]


def expression(build: Callable[..., Any], dtypes: Sequence[str], out: str | Sequence[str]) -> Epilogue:
    """An epilogue of operands alone: ``build(node, *operands)`` gives the index of the result or results."""
    nodes = [Node("operand", dtype=dtype, params=(i,)) for i, dtype in enumerate(dtypes)]

    def node(op: str, *args: int, dtype: str = "float32", params: tuple[Any, ...] = ()) -> int:
        nodes.append(Node(op, args, dtype, params))
        return len(nodes) - 1

    results = build(node, *range(len(dtypes)))
    outs = [out] if isinstance(out, str) else out
    results = [results] if isinstance(results, int) else results
    specs = [OperandSpec(dtype, True, True, ()) for dtype in dtypes]
    return normal(1, specs, nodes, [Output(i, dtype) for i, dtype in zip(results, outs, strict=True)])


def unary(op: str, dtype: str, out: str | None = None, params: tuple[Any, ...] = (), shown: str = "") -> Epilogue:
    """One operation of one operand; ``shown`` is the dtype of the output where it is not the operation's."""
    return expression(lambda node, x: node(op, x, dtype=out or dtype, params=params), [dtype], shown or out or dtype)


def binary(op: str, dtype: str, out: str | None = None, shown: str = "") -> Epilogue:
    """One operation of two operands of one dtype."""
    return expression(lambda node, x, y: node(op, x, y, dtype=out or dtype), [dtype] * 2, shown or out or dtype)


def _function(epilogue: Epilogue, number: int) -> str:
    """The emitted function and a loop over arrays that calls it: accumulators, operands and outputs in one list."""
    text = emit.emit(epilogue)
    products, operands, outs = epilogue.products, epilogue.operands, epilogue.outputs
    calls = [f"static_cast<const {emit.CARRIERS[s.dtype]}*>(p[{products + i}])[t]" for i, s in enumerate(operands)]
    of_acc = emit.CARRIERS[epilogue.accumulator.name]
    accs = ", ".join(f"static_cast<const {of_acc}*>(p[{i}])[t]" for i in range(products))
    at = products + len(operands)
    calls += ["int(t / 1024)", "int(t % 1024)", *(f"int(t % {3 + i})" for _, i in emit.places(epilogue))]
    calls += [f"static_cast<{emit.CARRIERS[o.dtype]}*>(p[{at + i}])[t]" for i, o in enumerate(outs)]
    return (
        f"namespace e{number} {{\n{text}}}\n"
        f"EXPORT void run{number}(long long n, void** p) {{\n  for (long long t = 0; t < n; ++t) {{\n"
        f"    const {of_acc} acc[{products}] = {{{accs}}};\n"
        f"    e{number}::epilogue_element({', '.join(['acc', *calls])});\n"
        "  }\n}\n"
    )


class Host:
    """Epilogues compiled into one library; ``host(i, arrays)`` runs the i-th; ``raw``: outputs not yet rounded."""

    def __init__(self, folder: pathlib.Path, epilogues: Sequence[Epilogue]):
        self._epilogues = list(epilogues)
        text = f'#include "{SHIM}"\n{"".join(map(sources._file, sources.MATH))}#define EXPORT extern "C"\n'
        text += "".join(_function(epilogue, i) for i, epilogue in enumerate(epilogues))
        self._library = gxx.build(folder, text, "-Wno-unknown-pragmas")

    def __call__(
        self, i: int, *operands: np.ndarray, accs: Sequence[np.ndarray] = (), raw: bool = False
    ) -> tuple[np.ndarray, ...]:
        epilogue = self._epilogues[i]
        size = (*accs, *operands)[0].size
        of_acc = carrier(epilogue.accumulator.name)
        accs = list(accs) or [np.zeros(size, of_acc)] * epilogue.products
        inputs = [np.ascontiguousarray(x, of_acc) for x in accs]
        inputs += [np.asarray(x).astype(carrier(s.dtype)) for x, s in zip(operands, epilogue.operands, strict=True)]
        outs = tuple(np.zeros(size, carrier(out.dtype)) for out in epilogue.outputs)
        pointers = [x.ctypes.data for x in (*inputs, *outs)]
        getattr(self._library, f"run{i}")(ctypes.c_longlong(size), (ctypes.c_void_p * len(pointers))(*pointers))
        if raw:
            return outs
        return tuple(x.astype(out.dtype) for x, out in zip(outs, epilogue.outputs, strict=True))
