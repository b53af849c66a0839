"""The device text of the kernels: constants, the generated epilogue, and the family's files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue, Output
from cutjax.kernels.arguments import Argument
from cutjax.runtime import sources

OF_THREAD = 4  # channels of which a thread by Toeplitz matrices makes results, where an operand is as large as those
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

    Those of operands that rows share are loaded once, those of one place, ``Beside``, before it is computed, so that a
    thread can have those of several places on their way. Where it is ``called`` the kernel has one copy of it;
    ``by_stages`` results go through shared memory; where an operand is `as_large`, sums do, and with them `planes`.
    What a thread has of a reduction, ``Partials``, it has of each of its channels.
    """
    fields, initial, first, values, asked = [], [], [], [], []
    beside, loads = [], []  # of one place
    in_planes = planes(epilogue) if by_stages else []
    for i, spec in enumerate(epilogue.operands):
        vector = f"Vector<Dtype::{DTYPES[spec.dtype].stored}, {count if spec.col else 1}>"
        size = np.dtype(spec.dtype).itemsize
        fields.append(f"const char* base{i};")
        initial.append(f"base{i}(base{i})")
        values.append(f"x{i}[{'i' if spec.col else '0'}]")
        if i in in_planes:
            at = f"{in_planes.index(i)} * PLANE_BYTES"
            beside.append(f"{vector} x{i};")
            loads.append(f"x{i}.load_shared(planes + {at});")
            base = f"base{i} + (static_cast<i64>(row) * n + column) * {size}"
            asked.append(f"copy_ahead(to + {at}, {base}, channels);")
        elif spec.row:
            at = f"(static_cast<i64>(row) * extras.n + column) * {size}" if spec.col else f"row * {size}ll"
            beside.append(f"{vector} x{i};")
            loads.append(f"x{i}.load(extras.base{i} + {at});")
        else:
            fields.append(f"{vector} x{i};")
            first.append(f"x{i}.load(base{i}{f' + column * {size}ll' * spec.col});")
            values[-1] = f"extras.{values[-1]}"
            continue
        values[-1] = f"beside.{values[-1]}"
    staged, copied, slots = [], [], ["0"]
    for i, out in enumerate(epilogue.outputs):
        fields.append(f"char* d{i};")
        initial.append(f"d{i}(d{i})")
        if out.reduce:
            continue
        dtype, slot = f"Dtype::{DTYPES[out.dtype].stored}", f"buffer + {' + '.join(slots)}"
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
  Acc acc[{count}];
}};
struct Beside {{{lines(beside)}
  DEVICE void load(const Extras& extras, int row, int column, u32 planes = 0) {{{lines(["  " + x for x in loads])}
  }}
}};
struct Found {{
  {" ".join(declared)}
}};
{qualifier} Found results_of(const Extras& extras, const Beside beside, const Done done, int row, int column) {{
  Found found;
#pragma unroll
  for (int i = 0; i < {count}; ++i) {{
    const Acc value[1] = {{done.acc[i]}};
    epilogue_element({", ".join(["value", *values, "row", "column + i", *results])});
  }}
  return found;
}}
constexpr int HELD = {held(epilogue) if by_stages else count};  // channels that a thread has of each reduction
{_partials(epilogue, count)}"""
    if not by_stages:
        return f"""{text}
DEVICE void finish(const Extras& extras, Partials& partials, const Beside& beside, const Done done, int row,
                   int column) {{
  const Found found = results_of(extras, beside, done, row, column);{lines(_stores(epilogue, count))}
  partials.add(found, 0);
}}
DEVICE void finish(const Extras& extras, Partials& partials, const Done done, int row, int column) {{
  Beside beside;
  beside.load(extras, row, column);
  finish(extras, partials, beside, done, row, column);
}}
"""
    if as_large(epilogue):
        return text + _of_sums(epilogue, count)
    return f"""{text}constexpr int STAGED_WORDS = {" + ".join(slots)}, CHANNELS_EACH = 8;
constexpr bool BEGUN_EACH = AS_LARGE;
DEVICE void stage_results(const Extras& extras, Partials& partials, const Acc (&sums)[2][2], int first, int column,
                          u32* buffer, int warp, int first_place, int there) {{
#pragma unroll
  for (int i = 0; i < 2; ++i) {{
    int row = min(first + i, extras.m - 1), place = first_place + i;
    Beside beside;
    beside.load(extras, row, column);
    const Done done{{{{sums[i][0], sums[i][1]}}}};
    const Found found = results_of(extras, beside, done, row, column);{lines(["  " + x for x in staged])}
    if (there > i) partials.add(found, 0);
  }}
}}
DEVICE void copy_results(const Extras& extras, Partials&, const u32* buffer, const Own<8>& own, int row, u32) {{
  i64 at = static_cast<i64>(row) * extras.n + own.channel;{lines(copied)}
}}
"""


def _stores(epilogue: Epilogue, count: str) -> list[str]:
    """The statements that store so many neighbours."""
    found, at = [], "(static_cast<i64>(row) * extras.n + column)"
    for i, out in enumerate(epilogue.outputs):
        vector, size = f"Vector<Dtype::{DTYPES[out.dtype].stored}, {count}>", np.dtype(out.dtype).itemsize
        found += [f"{vector}::store(extras.d{i} + {at} * {size}, found.y{i});"] * (not out.reduce)
    return found


def _of_sums(epilogue: Epilogue, count: str) -> str:
    """The function that computes and stores results of staged sums, ``count`` channels of two places at once."""
    stores = "".join(f"\n      {store}" for store in _stores(epilogue, count))
    return f"""constexpr int STAGED_WORDS = Sums::WORDS, CHANNELS_EACH = {OF_THREAD};
constexpr bool BEGUN_EACH = {count} < CHANNELS_EACH;  // vectors are loaded again for each place
DEVICE void stage_results(const Extras&, Partials&, const Acc (&sums)[2][2], int, int, u32* to, int, int, int) {{
  Sums::stage(to, sums);
}}
DEVICE void copy_results(Extras& extras, Partials& partials, const u32* sums, const Own<{OF_THREAD}>& own, int first,
                         u32 planes) {{
  constexpr int PLACES = Own<{OF_THREAD}>::PLACES, ACROSS = Own<{OF_THREAD}>::ACROSS;
  constexpr bool EVEN = Own<{OF_THREAD}>::EVEN;
#pragma unroll
  for (int v = 0; v < {OF_THREAD}; v += {count}) {{
    if (BEGUN_EACH && v >= own.channels) break;
    int column = own.channel + v;
    if (BEGUN_EACH) extras.begin(column);
    Done done[PLACES];
    Sums::take(sums + v * Sums::PITCH, done);
    Beside beside[PLACES];
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {{
      int row = first + (EVEN ? i : min(i, own.places - 1));
      beside[i].load(extras, row, column, planes + (i * ACROSS * {OF_THREAD} + v) * 2);
    }}
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {{
      if (!EVEN && i >= own.places) break;
      int row = first + i;
      const Found found = results_of(extras, beside[i], done[i], row, column);{stores}
      partials.add(found, v);
    }}
  }}
}}
"""


def _partials(epilogue: Epilogue, count: str) -> str:
    """The struct of what a thread has of each reduction, and of how a block stores its share of it."""
    reductions = reduced(epilogue)
    fields, begin, added, kept, shares = [], [], [], [], []
    for k, (i, out) in enumerate(reductions):
        identity, both = emit.reduction(out)
        fields.append(f"\n  Acc r{i}[HELD];")
        begin.append(f"r{i}[v] = {identity};")
        added.append(f"r{i}[v + i] = {both.format(f'r{i}[v + i]', f'found.y{i}[i]')};")
        kept.append(f"to[{k} * THREADS * HELD + v] = r{i}[v];")
        shares.append(f"""if (j / ACROSS == {k}) {{
#pragma unroll 8
      for (int other = 1; other < THREADS / OF_LANES; ++other) {{
        const Acc more = from[other * ACROSS];
        all = {both.format("all", "more")};
      }}
      reinterpret_cast<Acc*>(extras.d{i})[static_cast<i64>(part) * extras.n + first + j % ACROSS] = all;
    }}""")

    def each(statements: list[str], index: str = "v", end: str = "HELD") -> str:
        body = "".join(f"\n      {statement}" for statement in statements)
        return f"\n#pragma unroll\n    for (int {index} = 0; {index} < {end}; ++{index}) {{{body}\n    }}" * bool(body)

    stored = f"""
    constexpr int ACROSS = OF_LANES * HELD;
    __syncthreads();
    Acc* to = shared + (item * OF_LANES + lane) * HELD;{each(kept)}
    __syncthreads();
    for (int j = threadIdx.x; j < {len(reductions)} * ACROSS; j += THREADS) {{
      if (first + j % ACROSS >= extras.n) continue;
      const Acc* from = shared + j / ACROSS * THREADS * HELD + j % ACROSS;
      Acc all = from[0];
      {" else ".join(shares)}
    }}""" * bool(shares)
    return f"""struct Partials {{{"".join(fields)}

  DEVICE Partials() {{{each(begin)}
  }}
  // What is found of a thread's channels from `v` on.
  DEVICE void add(const Found& found, int v) {{{each(added, "i", count)}
  }}
  // The block's share, of OF_LANES * HELD channels from the `first` on: threads with the same ones have one `lane`, and
  // are added up in the order of their `item`.
  template <int OF_LANES>
  DEVICE void store(const Extras& extras, Acc* shared, int lane, int item, int first, int part) const {{{stored}
  }}
}};
"""


def reduced(epilogue: Epilogue) -> list[tuple[int, Output]]:
    """Returns the results that are reductions, with their places among all."""
    return [(i, out) for i, out in enumerate(epilogue.outputs) if out.reduce]


def held(epilogue: Epilogue) -> int:
    """Returns the channels that a thread of a kernel by Toeplitz matrices has of a reduction."""
    return OF_THREAD if as_large(epilogue) else 2


def as_large(epilogue: Epilogue) -> bool:
    """True if an operand is as large as a result: a thread had better load several channels of it at once."""
    return any(spec.row and spec.col for spec in epilogue.operands)


def planes(epilogue: Epilogue) -> list[int]:
    """Returns the operands that are copied into shared memory ahead: of 16 bits, and as large as a result."""
    found = enumerate(epilogue.operands)
    return [i for i, spec in found if spec.row and spec.col and np.dtype(spec.dtype).itemsize == 2]
