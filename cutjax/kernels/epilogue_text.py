"""The device text around a generated epilogue, which all families share: what feeds it, and what stores its results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutjax.dtypes import DTYPES
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue, Output
from cutjax.kernels import store_text
from cutjax.kernels.arguments import Argument
from cutjax.kernels.staging import Staging
from cutjax.kernels.store_text import place_of


def epilogue_text(staging: Staging, arguments: Sequence[Argument], ragged: str) -> str:
    """Returns the epilogue's device text, with the loads of its operands and the stores of its results."""
    parts = [emit.emit(staging.epilogue), _signature(staging, arguments), _extras(staging, arguments)]
    parts += [_partials(staging, arguments), _piece(staging), *([store_text.by_tma(staging)] if staging.tma else [])]
    return "".join([*parts, store_text.rows(staging, arguments, ragged)])


def _signature(staging: Staging, arguments: Sequence[Argument]) -> str:
    """Returns the parameters of the kernel, and those that it passes on."""
    tiles = ("d", staging.result_slots), ("t", staging.mirror_slots)
    maps = [
        f"&map_{name}{place}" if staging.by_tma(out) else "nullptr"
        for name, slots in tiles
        for place, (_, (_, out)) in enumerate(zip(slots, staging.results, strict=False))
    ]

    def passed(to: str) -> str:
        return "".join(f", {argument.passed}" for argument in arguments if to in argument.to.split())

    strided = any(argument.name == "d_step0" for argument in arguments)
    result = "i(d_step0, d_step1, d_step2)" if strided else "work.result"
    return f"""#define PARAMETERS {", ".join(argument.declaration for argument in arguments)}
#define SOURCE_A {{{passed("a")[2:]}}}
#define SOURCE_B {{{passed("b")[2:]}}}
#define MAPS_D {{{", ".join(maps or ["nullptr"])}}}
#define EXTRAS_ARGUMENTS {passed("extras")}
#define PARTIALS_ARGUMENTS {passed("partials")}
#define SPLITS {passed("splits")[2:] or 1}
#define SCHEDULER_ARGUMENTS {passed("scheduler")}
#define ITEMS_ARGUMENTS {passed("items")}
#define ROWS_ARGUMENTS {passed("rows")}
#define PROMOTION_ARGUMENTS {passed("promotion")[2:]}
#define CHANGES_ARGUMENTS {passed("changes")[2:]}
#define RESULT {result}
#define PIXELS {int(staging.pixels)}
"""


def _taken(arguments: Sequence[Argument], to: str) -> str:
    """Parameters of a constructor, each behind a comma."""
    return "".join(f", {argument.taken}" for argument in arguments if to in argument.to.split())


def _extras(staging: Staging, arguments: Sequence[Argument]) -> str:
    """The struct of the epilogue's operands and positions."""
    epilogue = staging.epilogue
    fields, initial, tile, rows, chunks, pieces, fetched, staged = [], [], [], [], [], [], [], []
    by_tma = {i: slot for (i, _), slot in zip(staging.operands, staging.operand_slots, strict=True)}
    at_row = "at[h]" if staging.pixels else "min(row + 8 * h, m - 1)"
    for i, spec in enumerate(epilogue.operands):
        dtype = f"Dtype::{DTYPES[spec.dtype].stored}"
        steps = f"step{i}_0, step{i}_1, step{i}_2"
        copied = "".join(f", {step}({step})" for step in steps.split(", "))
        if i in by_tma:
            fields.append(f"const TensorMap* map{i};\n  int {steps};\n  Pair<{dtype}> x{i}[PIECE / 8][2];")
            initial.append(f"map{i}(map_x{i}){copied}")
            at = f"buffer + {place_of(by_tma[i])}, barrier, x, y, i({steps})"
            fetched.append(f"{staging.by_tma_tile}<{dtype}>::load(map{i}, {at});")
            staged.append(f"{staging.tile}<{dtype}>::read(buffer + {place_of(by_tma[i])}, thread, piece, x{i});")
            continue
        size = np.dtype(spec.dtype).itemsize
        elements = {(0, 0): "1", (1, 0): "m", (0, 1): "n", (1, 1): "static_cast<i64>(m) * n"}[spec.row, spec.col]
        whole = f"[{'PIECE' if staging.apart else 'D_CHUNK'} / 8][2]"
        shape = {(0, 0): "", (1, 0): "[2]", (0, 1): "[PIECE / 8]", (1, 1): whole}[spec.row, spec.col]
        fields.append(f"const char *base{i}, *matrix{i};\n  int {steps};\n  Pair<{dtype}> x{i}{shape};")
        initial.append(f"base{i}(base{i}){copied}")
        tile.append(f"matrix{i} = base{i} + static_cast<i64>(i({steps})) * ({elements}) * {size};")
        if not spec.row and not spec.col:
            tile.append(f"x{i}.load_one(matrix{i});")
        elif not spec.col:
            rows.append(f"x{i}[h].load_one(matrix{i} + {at_row} * {size}ll);")
        elif not spec.row and staging.even:
            pieces.append(f"x{i}[j].load(matrix{i} + c * {size}ll);")
        elif not spec.row:
            pieces.append(f"x{i}[j].load_each(matrix{i} + c * {size}ll, matrix{i} + c1 * {size}ll);")
        elif not staging.apart:
            at = f"matrix{i} + ({at_row} * static_cast<i64>(n) + c) * {size}"
            chunks.append(f"for (int h = 0; h < 2; ++h) x{i}[j][h].load({at});")
        else:
            place = "{} * static_cast<i64>(m) + r" if staging.swap else "r * static_cast<i64>(n) + {}"
            both = ", ".join(f"matrix{i} + ({place.format(c)}) * {size}" for c in ("c", "c1"))
            pieces.append("for (int h = 0; h < 2; ++h) {")
            pieces.append(f"  int r = {at_row};")
            pieces.append(f"  x{i}[j][h].load_each({both});")
            pieces.append("}")

    if staging.pixels:
        fields.append("int at[2];  // of this lane's rows, where they lie")
    for axis, i in emit.places(epilogue):
        name = f"{axis}{i}"
        fields.append(f"int {name}_stride, {name}_size, {name};")
        initial.append(f"{name}_stride({name}_stride), {name}_size({name}_size)")
        times = {"row": " * m", "col": " * n", "batch": ""}[axis]
        tile.append(f"{name} = result / {name}_stride % {name}_size{times};")

    def lines(statements: list[str], indent: int) -> str:
        return "".join("\n" + " " * indent + statement for statement in statements)

    def loop(variable: str, end: str, body: list[str], before: str = "") -> str:
        if not body:
            return ""
        head = f"\n#pragma unroll\n    for (int {variable} = 0; {variable} < {end}; ++{variable}) {{{before}"
        return f"{head}{lines(body, 6)}\n    }}"

    # Past the matrix, where the result is clipped, the last row or columns are read again.
    clip = f"\n      int c = min(column + 8 * j, n - {2 if staging.even else 1});"
    if any("c1" in piece for piece in pieces):
        clip += f"\n      int c1 = {'c + 1' if staging.even else 'min(column + 8 * j + 1, n - 1)'};"
    by_piece = lines(staged, 4) + loop("j", "PIECE / 8", pieces, clip)
    loaded = sum(np.dtype(epilogue.operands[i].dtype).itemsize for i in by_tma)
    return f"""#line 1 "extras (generated)"
constexpr int EXTRAS_BYTES = STAGING_ROWS * D_CHUNK * {loaded};  // that TMA loads for a chunk
struct Extras {{
  int m, n;{lines(fields, 2)}

  DEVICE Extras(int m, int n{_taken(arguments, "extras")})
      : m(m), n(n){"".join(", " + x for x in initial)} {{}}
  DEVICE void fetch(u32 buffer, u32 barrier, int x, int y, const BatchIndex& i) const {{{lines(fetched, 4)}
  }}
  // `result` is which matrix of the results.
  DEVICE void begin_tile(const BatchIndex& i, int result) {{{lines(tile, 4)}
  }}
  DEVICE void begin_rows(int row) {{{loop("h", "2", rows)}
  }}
  DEVICE void begin_chunk(int row, int column) {{{loop("j", "D_CHUNK / 8", chunks, clip)}
  }}
  DEVICE void begin_piece(int row, int column, int piece, u32 buffer, int thread) {{{by_piece}
  }}
}};
"""


def _combine(out: Output, into: str, value: str) -> str:
    return f"{into} = {emit.reduction(out)[1].format(into, value)};"


def _shuffles(out: Output, value: str, lanes: Sequence[int]) -> list[str]:
    # A reduction may name a value twice, the second time in a branch, where not all lanes would shuffle.
    shuffle = f"{{{{ auto other = __shfl_xor_sync(~0u, {value}, {{}}); {_combine(out, value, 'other')} }}}}"
    return [shuffle.format(lane) for lane in lanes]


def _partials(staging: Staging, arguments: Sequence[Argument]) -> str:
    """The struct of the partial reductions over a block of 64 rows, and of the places that they are stored to."""
    fields, initial, places, begin, end, clear = [], [], [], [], [], []  # places: where a matrix's begin, of its number
    for i, out in staging.reductions:
        rows = "(m + 15) / 16" if "row" in out.axes else "m"
        columns = "(n + EPILOGUE_COLUMNS - 1) / EPILOGUE_COLUMNS" if "col" in out.axes else "n"
        carrier = DTYPES[out.dtype].carrier
        fields.append(f"{carrier}* partial{i};\n  {carrier} r{i}[2];")
        initial.append(f", partial{i}(partial{i})")
        matrix = f"partial{i} + static_cast<i64>(batch) * ({rows}) * ({columns})"
        places.append(f"DEVICE {carrier}* matrix{i}() const {{ return {matrix}; }}")
        if out.axes == ("row",):
            continue  # stored by each piece
        begin.append(f"r{i}[0] = r{i}[1] = {emit.reduction(out)[0]};")
        at = f"matrix{i}()[static_cast<i64>({{}}) * ({columns}) + column / EPILOGUE_COLUMNS]"
        if out.axes == ("col",):  # rows are neighbours: a warpgroup's fill lines of memory
            at = f"matrix{i}()[static_cast<i64>(column / EPILOGUE_COLUMNS) * m + {{}}]"
            end += [*_shuffles(out, f"r{i}[0]", (1, 2)), *_shuffles(out, f"r{i}[1]", (1, 2))]
            for h in range(2):
                end.append(
                    f"if (lane % 4 == 0 && row + {8 * h} < to && column < n) {at.format(f'row + {8 * h}')} = r{i}[{h}];"
                )
            clear.append(
                f"for (int r = row + thread; column < n && r < to; r += STAGING_THREADS) {at.format('r')} = {{}};"
            )
        else:
            end += [_combine(out, f"r{i}[0]", f"r{i}[1]"), *_shuffles(out, f"r{i}[0]", (1, 2, 4, 8, 16))]
            end.append(f"if (lane == 0 && row < to && column < n) {at.format('row / 16')} = r{i}[0];")

    def lines(statements: list[str], indent: int = 4) -> str:
        return "".join("\n" + " " * indent + statement for statement in statements)

    return f"""#line 1 "partials (generated)"
struct Partials {{
  int m, n, batch, to;{lines(fields, 2)}

  DEVICE Partials(int m, int n{_taken(arguments, "partials")}) : m(m), n(n), batch(0), to(m){"".join(initial)} {{}}
{lines(places, 2)[1:]}
  // Of a matrix, up to a row: that after its group's last, where rows have groups.
  DEVICE void begin_tile(int of, int end) {{ batch = of, to = end; }}
  DEVICE void begin_block() {{{lines(begin)}
  }}
  // `row` is this lane's first, `column` that of the first of EPILOGUE_COLUMNS.
  DEVICE void end_block(int row, int column, int lane) {{{lines(end)}
  }}
  // Zeroes what rows of no group have of these columns.
  DEVICE void clear(int row, int column, int thread) const {{{lines(clear)}
  }}
}};
"""


# Where along an axis a piece may have values past the matrix, and which; none where all tiles are whole.
_PAST = {
    "row": ("!WHOLE_ROWS && row + 8 >= partials.to", "row + i / 2 % 2 * 8 >= partials.to"),
    "col": ("!WHOLE_COLUMNS && column + PIECE - 7 >= partials.n", "column + i / 4 * 8 + i % 2 >= partials.n"),
}


def _within(reductions: Sequence[tuple[int, Output]]) -> str:
    """Returns the text that replaces values past the matrix, along what is reduced, by the identities of reductions."""
    found = ""
    for axes in dict.fromkeys(out.axes for _, out in reductions):
        identities = (f"y{i}[i] = {emit.reduction(out)[0]};" for i, out in reductions if out.axes == axes)
        near, past = (" || ".join(each) for each in zip(*(_PAST[axis] for axis in axes), strict=True))
        # Most pieces lie inside: one comparison for each is less than one for each value.
        found += f"""if ({near}) {{
#pragma unroll
    for (int i = 0; i < PIECE / 2; ++i)
      if ({past}) {{ {" ".join(identities)} }}
  }}
"""
    return found


def _reduce_piece(i: int, out: Output, even: bool) -> str:
    """Returns the text that adds a piece to a reduction."""
    if out.axes != ("row",):
        loop = "#pragma unroll\n  for (int i = 0; i < PIECE / 2; ++i)"
        return f"{loop} {_combine(out, f'partials.r{i}[i / 2 % 2]', f'y{i}[i]')}\n"
    at = f"{DTYPES[out.dtype].carrier}* at = partials.matrix{i}()"
    lines = [f"{at} + static_cast<i64>(row / 16) * partials.n + column + 8 * j;"]
    for e in range(2):
        value = f"y{i}[4 * j + {e}]"
        lines += [_combine(out, value, f"y{i}[4 * j + {2 + e}]"), *_shuffles(out, value, (4, 8, 16))]
    inside = "if (thread % 32 < 4 && row < partials.to && column + 8 * j"
    if even:
        lines.append(f"{inside} < partials.n) st_global_v2(at, y{i}[4 * j], y{i}[4 * j + 1]);")
    else:
        lines += [f"{inside} + {e} < partials.n) at[{e}] = y{i}[4 * j + {e}];" for e in range(2)]
    body = "".join(f"\n    {line}" for line in lines)
    return f"#pragma unroll\n  for (int j = 0; j < PIECE / 8; ++j) {{{body}\n  }}\n"


def _piece(staging: Staging) -> str:
    epilogue = staging.epilogue
    carriers = [DTYPES[out.dtype].carrier for out in epilogue.outputs]
    declared = "\n  ".join(f"{carrier} y{i}[PIECE / 2];" for i, carrier in enumerate(carriers))
    staged = "\n  ".join(
        f"{staging.tile}<Dtype::{DTYPES[out.dtype].stored}>::stage(buffer + {place_of(slot)}, thread, piece, y{i});"
        for slot, (i, out) in zip(staging.result_slots, staging.results, strict=True)
    )
    above = "\n  if (right_of_diagonal(row, column) > 0) return;" if staging.mirror_slots else ""
    staged += "".join(
        f"\n  Transposed<Dtype::{DTYPES[out.dtype].stored}>::stage(buffer + {place_of(slot)}, thread, piece, y{i});"
        for slot, (i, out) in zip(staging.mirror_slots if staging.tma else (), staging.results, strict=False)
    )
    reduced = _within(staging.reductions)
    reduced += "".join(_reduce_piece(i, out, staging.even) for i, out in staging.reductions)
    by_tma = [i for i, _ in staging.operands]
    by_chunk = "piece * (PIECE / 8) + j"
    full = ["j" if i in by_tma or staging.apart else by_chunk for i in range(len(epilogue.operands))]
    if function := _four(epilogue) if staging.called else "":
        loop = f"for (int j = 0; j < PIECE / 8; ++j) {{{_call_four(epilogue, full)}"
    else:
        loop = "for (int i = 0; i < PIECE / 2; ++i) {\n    const int j = i / 4, h = i / 2 % 2, e = i % 2;"
        loop += _element(epilogue, full)
    return f"""#line 1 "piece (generated)"
{function}\
DEVICE void epilogue_piece(Extras& extras, Partials& partials, const Acc (&acc)[PRODUCTS][PIECE / 2], int piece,
                           int row, int column, u32 buffer, int thread) {{{above}
  {declared}
  extras.begin_piece(row, column, piece, buffer, thread);
#pragma unroll
  {loop}
  }}
  {staged}
{reduced}}}
"""


def _element(epilogue: Epilogue, full: Sequence[str], own: str = "", out: str = "") -> str:
    """Computes element i: of columns j, row h and column e of them. ``full`` is where an operand has columns j."""
    accs = ", ".join(f"{own}acc[{p}][i]" for p in range(epilogue.products))
    values = []
    for i, spec in enumerate(epilogue.operands):
        at = {(0, 0): "", (1, 0): "[h]", (0, 1): "[j]", (1, 1): f"[{full[i]}][h]"}[spec.row, spec.col]
        values.append(f"extras.x{i}{at}[{'e' if spec.col else '0'}]")
    results = [f"{out}y{i}[i]" for i in range(len(epilogue.outputs))]
    places = ["row + h * 8", "column + j * 8 + e"]
    inside = {"row": f" + {places[0]}", "col": f" + {places[1]}", "batch": ""}
    places += [f"extras.{axis}{i}{inside[axis]}" for axis, i in emit.places(epilogue)]
    arguments = ", ".join(["value", *values, *places, *results])
    return f"\n    const Acc value[PRODUCTS] = {{{accs}}};\n    epilogue_element({arguments});"


def _four(epilogue: Epilogue) -> str:
    """The function that is called for four elements: they hide each other's latency, and take few registers.

    What it takes, it takes in registers: operands as they were loaded, each once.
    """
    fields = [
        f"Pair<Dtype::{DTYPES[spec.dtype].stored}> x{i}{'[1]' * spec.col}{'[2]' * spec.row};"
        for i, spec in enumerate(epilogue.operands)
    ]
    fields = ["Acc acc[PRODUCTS][4];", *fields, *(f"int {axis}{i};" for axis, i in emit.places(epilogue))]
    results = [f"{DTYPES[out.dtype].carrier} y{i}[4];" for i, out in enumerate(epilogue.outputs)]
    return f"""struct Four {{
  {" ".join(fields)}
}};
struct FourResults {{
  {" ".join(results)}
}};
__device__ __noinline__ FourResults epilogue_four(Four extras, int row, int column) {{
  FourResults results;
#pragma unroll
  for (int i = 0; i < 4; ++i) {{
    const int j = 0, h = i / 2, e = i % 2;{_element(epilogue, "j" * len(epilogue.operands), "extras.", "results.")}
  }}
  return results;
}}
"""


def _call_four(epilogue: Epilogue, full: Sequence[str]) -> str:
    accs = [", ".join(f"acc[{p}][4 * j + {i}]" for i in range(4)) for p in range(epilogue.products)]
    values = [f"{{{', '.join(f'{{{acc}}}' for acc in accs)}}}"]
    for i, spec in enumerate(epilogue.operands):
        columns = f"extras.x{i}" + (f"[{full[i] if spec.row else 'j'}]" if spec.col else "")
        value = f"{{{columns}[0], {columns}[1]}}" if spec.row else columns
        values.append(f"{{{value}}}" if spec.col else value)
    values += [f"extras.{axis}{i}" for axis, i in emit.places(epilogue)]
    copies = " ".join(f"y{i}[4 * j + i] = four.y{i}[i];" for i in range(len(epilogue.outputs)))
    return f"""
    const FourResults four = epilogue_four({{{", ".join(values)}}}, row, column + j * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {{
      {copies}
    }}"""
