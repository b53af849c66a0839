"""The device text of the kernels: constants, the generated epilogue, and the family's files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels.arguments import Argument
from cutjax.runtime import sources

COMMON = ("common/atoms.cuh", *sources.MATH, "common/elements.cuh")


def source(
    name: str,
    dtype: str,
    accumulator: str,
    constants: dict[str, int],
    arguments: Sequence[Argument],
    files: Sequence[str],
) -> str:
    """Returns the text of a kernel: what all share, its arguments, and its own parts."""
    head = f"#define ACCUMULATOR {DTYPES[accumulator].carrier}\n"
    operand = f"constexpr Dtype OPERAND = Dtype::{DTYPES[dtype].stored};\n"
    return sources.source(name, constants, [*COMMON, head, operand, "direct/vector.cuh", _signature(arguments), *files])


def _signature(arguments: Sequence[Argument]) -> str:
    """Returns the parameters of a kernel, and those that it passes on: as a struct's, or an epilogue's."""

    def passed(to: str) -> str:
        return ", ".join(argument.passed for argument in arguments if argument.to == to)

    structs = dict.fromkeys(argument.to for argument in arguments if argument.to not in ("", "extras"))
    lines = [f"#define PARAMETERS {', '.join(argument.declaration for argument in arguments)}"]
    lines += [f"#define {to.upper()} {{{passed(to)}}}" for to in structs]
    extras = passed("extras")
    return "\n".join([*lines, f"#define EXTRAS_ARGUMENTS {', ' * bool(extras)}{extras}", ""])


def epilogue_text(
    epilogue: Epilogue, arguments: Sequence[Argument], count: str, called: bool, by_stages: bool = False
) -> str:
    """Returns the text of an epilogue of ``count`` neighbours of a row, with its operands' loads and results' stores.

    Those of operands that rows share are loaded once. Where it is ``called`` the kernel has one copy of it;
    ``by_stages`` results go through shared memory, and `planes` of operands, whose words it is told.
    """
    fields, initial, first, loads, values = [], [], [], [], []
    in_planes = planes(epilogue) if by_stages else []
    for i, spec in enumerate(epilogue.operands):
        vector = f"Vector<Dtype::{DTYPES[spec.dtype].stored}, {count if spec.col else 1}>"
        size = np.dtype(spec.dtype).itemsize
        fields.append(f"const char* base{i};")
        initial.append(f"base{i}(base{i})")
        values.append(f"x{i}[{'i' if spec.col else '0'}]")
        if i in in_planes:
            loads.append(f"{vector} x{i};\n  x{i}.words[0] = done.beside[{in_planes.index(i)}];")
        elif spec.row:
            at = f"(static_cast<i64>(row) * extras.n + column) * {size}" if spec.col else f"row * {size}ll"
            loads.append(f"{vector} x{i};\n  x{i}.load(extras.base{i} + {at});")
        else:
            fields.append(f"{vector} x{i};")
            first.append(f"x{i}.load(base{i}{f' + column * {size}ll' * spec.col});")
            values[-1] = f"extras.{values[-1]}"
    at = "(static_cast<i64>(row) * extras.n + column)"
    stores, staged, copied, slots = [], [], [], ["0"]
    for i, out in enumerate(epilogue.outputs):
        fields.append(f"char* d{i};")
        initial.append(f"d{i}(d{i})")
        dtype = f"Dtype::{DTYPES[out.dtype].stored}"
        stores.append(
            f"Vector<{dtype}, {count}>::store(extras.d{i} + {at} * {np.dtype(out.dtype).itemsize}, found.y{i});"
        )
        slot = f"buffer + {' + '.join(slots)}"
        staged.append(f"Staged<{dtype}>::stage({slot}, warp, place, found.y{i});")
        copied.append(f"Staged<{dtype}>::copy({slot}, extras.d{i}, own);")
        slots.append(f"Staged<{dtype}>::WORDS")
    declared = [f"{DTYPES[out.dtype].carrier} y{i}[{count}];" for i, out in enumerate(epilogue.outputs)]
    results = [f"found.y{i}[i]" for i in range(len(epilogue.outputs))]
    taken = "".join(f", {argument.taken}" for argument in arguments if argument.to == "extras")

    def lines(statements: list[str]) -> str:
        return "".join("\n  " + statement for statement in statements)

    of_planes = [f"  if (i == {j}) return base{i};" for j, i in enumerate(in_planes)]
    qualifier = "__device__ __noinline__" if called else "DEVICE"
    text = f"""{emit.emit(epilogue)}#line 1 "extras (generated)"
struct Extras {{
  int m, n;{lines(fields)}

  DEVICE Extras(int m, int n{taken}) : m(m), n(n){"".join(", " + x for x in initial)} {{}}
  DEVICE void begin(int column) {{{lines(first)}
  }}
  DEVICE const char* plane(int i) const {{{lines(of_planes)}
    return nullptr;
  }}
}};
constexpr int PLANES = {len(in_planes)};
struct Done {{
  Acc acc[{count}];{lines([f"u32 beside[{len(in_planes)}];"] if in_planes else [])}
}};
struct Found {{
  {" ".join(declared)}
}};
{qualifier} Found results_of(const Extras& extras, const Done done, int row, int column) {{
  Found found;{lines(loads)}
#pragma unroll
  for (int i = 0; i < {count}; ++i) {{
    const Acc value[1] = {{done.acc[i]}};
    epilogue_element({", ".join(["value", *values, "row", "column + i", *results])});
  }}
  return found;
}}
"""
    if not by_stages:
        return f"""{text}DEVICE void finish(const Extras& extras, const Done done, int row, int column) {{
  const Found found = results_of(extras, done, row, column);{lines(stores)}
}}
"""
    words = [f"done.beside[{i}] = ld_shared_u32(planes + {i} * plane_bytes + at);" for i in range(len(in_planes))]
    return f"""{text}DEVICE void take(Done& done, u32 planes, int plane_bytes, int at) {{{lines(words)}
}}
constexpr int STAGED_WORDS = {" + ".join(slots)};
DEVICE void stage_results(const Extras& extras, const Done done, int row, int column, u32* buffer, int warp,
                          int place) {{
  const Found found = results_of(extras, done, row, column);{lines(staged)}
}}
DEVICE void copy_results(const Extras& extras, const u32* buffer, const Own& own) {{{lines(copied)}
}}
"""


def planes(epilogue: Epilogue) -> list[int]:
    """Returns the operands that go through shared memory by stages: of 16 bits, and of a result's size."""
    found = enumerate(epilogue.operands)
    return [i for i, spec in found if spec.row and spec.col and np.dtype(spec.dtype).itemsize == 2]
