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
    ``by_stages`` results go through shared memory, or sums do where there is more to compute than a result's dtype.
    """
    fields, initial, first, loads, values, fetched = [], [], [], [], [], []
    for i, spec in enumerate(epilogue.operands):
        vector = f"Vector<Dtype::{DTYPES[spec.dtype].stored}, {count if spec.col else 1}>"
        size = np.dtype(spec.dtype).itemsize
        fields.append(f"const char* base{i};")
        initial.append(f"base{i}(base{i})")
        values.append(f"x{i}[{'i' if spec.col else '0'}]")
        if spec.row:
            at = f"base{i} + " + (f"element(row, column) * {size}" if spec.col else f"row * {size}ll")
            loads.append(f"{vector} x{i};\n  x{i}.load(extras.{at.replace('element', 'extras.element')});")
            fetched.append(f"prefetch({at});")
        else:
            fields.append(f"{vector} x{i};")
            first.append(f"x{i}.load(base{i}{f' + column * {size}ll' * spec.col});")
            values[-1] = f"extras.{values[-1]}"
    stores = []
    for i, out in enumerate(epilogue.outputs):
        fields.append(f"char* d{i};")
        initial.append(f"d{i}(d{i})")
        at = f"extras.d{i} + extras.element(row, column) * {np.dtype(out.dtype).itemsize}"
        stores.append(f"Vector<Dtype::{DTYPES[out.dtype].stored}, {count}>::store({at}, found.y{i});")
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
  DEVICE i64 element(int row, int column) const {{ return static_cast<i64>(row) * n + column; }}
  DEVICE void begin(int column) {{{lines(first)}
  }}
  DEVICE void fetch(int row, int column) const {{{lines(fetched)}
  }}
}};
struct Done {{
  Acc acc[{count}];
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
    text += f"""DEVICE void finish(const Extras& extras, const Done done, int row, int column) {{
  const Found found = results_of(extras, done, row, column);{lines(stores)}
}}
"""
    return text + _stages(epilogue) if by_stages else text


def _stages(epilogue: Epilogue) -> str:
    """Returns the text of what goes through shared memory, and of how a thread takes its channels of a row from there.

    A plain product's results do, of 16 bits half as much as sums.
    """
    if epilogue.primal.plain:
        out = DTYPES[epilogue.outputs[0].dtype]
        dtype = f"Dtype::{out.stored}"
        staged = f"""{out.carrier} y[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {{
    const Acc value[1] = {{sums[i]}};
    epilogue_element(value, 0, 0, y[i]);
  }}"""
        at = f"extras.element(row, own.channel) * {np.dtype(out.name).itemsize}"
        copied = f"Staged<{dtype}>::copy(buffer, extras.d0 + {at}, own);"
    else:
        dtype, staged = "Dtype::f32", "const Acc (&y)[2] = sums;"
        copied = """
#pragma unroll
  for (int v = 0; v < 8; v += UNIT) {
    if (UNIT < 8 && v >= own.channels) break;
    extras.begin(own.channel + v);  // again for each row: registers are short
    Done done;
    Staged<Dtype::f32>::take(buffer, own, v, done.acc);
    finish(extras, done, row, own.channel + v);
  }"""
    return f"""constexpr int STAGED_WORDS = Staged<{dtype}>::WORDS;
DEVICE void stage(u32* buffer, int warp, int place, const Acc (&sums)[2]) {{
  {staged}
  Staged<{dtype}>::stage(buffer, warp, place, y);
}}
DEVICE void copy_results(Extras& extras, const u32* buffer, const Own& own, int row) {{
  {copied.lstrip()}
}}
"""
