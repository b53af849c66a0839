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
    ``by_stages`` results go through shared memory; where an operand is `as_large`, sums do, and with them `planes`.
    """
    fields, initial, first, loads, values, asked = [], [], [], [], [], []
    in_planes = planes(epilogue) if by_stages else []
    for i, spec in enumerate(epilogue.operands):
        vector = f"Vector<Dtype::{DTYPES[spec.dtype].stored}, {count if spec.col else 1}>"
        size = np.dtype(spec.dtype).itemsize
        fields.append(f"const char* base{i};")
        initial.append(f"base{i}(base{i})")
        values.append(f"x{i}[{'i' if spec.col else '0'}]")
        if i in in_planes:
            at = f"{in_planes.index(i)} * PLANE_BYTES"
            loads.append(f"{vector} x{i};\n  x{i}.load_shared(done.beside + {at});")
            base = f"base{i} + (static_cast<i64>(row) * n + column) * {size}"
            asked.append(f"copy_ahead(to + {at}, {base}, channels);")
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
        size = np.dtype(out.dtype).itemsize
        copied.append(f"Staged<{dtype}>::copy({slot}, extras.d{i} + at * {size}, own);")
        slots.append(f"Staged<{dtype}>::WORDS")
    declared = [f"{DTYPES[out.dtype].carrier} y{i}[{count}];" for i, out in enumerate(epilogue.outputs)]
    results = [f"found.y{i}[i]" for i in range(len(epilogue.outputs))]
    taken = "".join(f", {argument.taken}" for argument in arguments if argument.to == "extras")

    def lines(statements: list[str]) -> str:
        return "".join("\n  " + statement for statement in statements)

    qualifier = "__device__ __noinline__" if called else "DEVICE"
    text = f"""{emit.emit(epilogue)}#line 1 "extras (generated)"
struct Extras {{
  int m, n;{lines(fields)}

  DEVICE Extras(int m, int n{taken}) : m(m), n(n){"".join(", " + x for x in initial)} {{}}
  DEVICE void begin(int column) {{{lines(first)}
  }}
  DEVICE void ask(u32 to, int row, int column, int channels) const {{{lines(asked)}
  }}
}};
constexpr int PLANES = {len(in_planes)};
constexpr bool AS_LARGE = {str(as_large(epilogue)).lower()};
struct Done {{
  Acc acc[{count}];{lines(["u32 beside;  // where its planes are"] if in_planes else [])}
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
    finish = f"""DEVICE void finish(const Extras& extras, const Done done, int row, int column) {{
  const Found found = results_of(extras, done, row, column);{lines(stores)}
}}
"""
    if not by_stages:
        return text + finish
    if as_large(epilogue):
        beside = "done.beside = planes + v * 2;" if in_planes else ""
        return f"""{text}{finish}constexpr int STAGED_WORDS = Staged<Dtype::f32>::WORDS;
DEVICE void stage_results(const Extras&, const Acc (&sums)[2], int, int, u32* buffer, int warp, int place) {{
  Staged<Dtype::f32>::stage(buffer, warp, place, sums);
}}
DEVICE void copy_results(Extras& extras, const u32* buffer, const Own& own, int row, u32 planes) {{
#pragma unroll
  for (int v = 0; v < 8; v += UNIT) {{
    if (UNIT < 8 && v >= own.channels) break;
    extras.begin(own.channel + v);  // again for each row: registers are short
    Done done;
    Staged<Dtype::f32>::take(buffer, own, v, done.acc);
    {beside}
    finish(extras, done, row, own.channel + v);
  }}
}}
"""
    return f"""{text}constexpr int STAGED_WORDS = {" + ".join(slots)};
DEVICE void stage_results(const Extras& extras, const Acc (&sums)[2], int row, int column, u32* buffer, int warp,
                          int place) {{
  const Found found = results_of(extras, Done{{{{sums[0], sums[1]}}}}, row, column);{lines(staged)}
}}
DEVICE void copy_results(const Extras& extras, const u32* buffer, const Own& own, int row, u32) {{
  i64 at = static_cast<i64>(row) * extras.n + own.channel;{lines(copied)}
}}
"""


def as_large(epilogue: Epilogue) -> bool:
    """True if an operand is as large as a result: a thread had better load several channels of it at once."""
    return any(spec.row and spec.col for spec in epilogue.operands)


def planes(epilogue: Epilogue) -> list[int]:
    """Returns the operands that are copied into shared memory ahead: of 16 bits, and as large as a result."""
    found = enumerate(epilogue.operands)
    return [i for i, spec in found if spec.row and spec.col and np.dtype(spec.dtype).itemsize == 2]
