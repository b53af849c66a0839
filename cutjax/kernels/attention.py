"""Attention of few query rows to many keys, as in decoding: the kernels, their plan, and their price."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from cutjax import dtypes
from cutjax.dtypes import short
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue
from cutjax.epilogue.nodes import OperandSpec
from cutjax.kernels import reasons
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.device import Device
from cutjax.kernels.entry import Entry
from cutjax.kernels.staging import not_inlined
from cutjax.runtime import choice, sources
from cutjax.runtime.architectures import too_old
from cutjax.runtime.choice import Choice
from cutjax.runtime.launch import Call, Int64, Pointer

DTYPES = ("bfloat16", "float16")  # of queries, keys and values
MOST_ROWS = 32  # of queries of one head of keys
_SIZES = range(16, 257, 16)  # of heads
_MOST_SUMS = 128  # registers of a thread that add up mixed values
_LINES = 8  # of 32 threads of a block of the second kernel
_AXES: tuple[str, ...] = ("batch", "head", "group", "time", "key")
# Of the cost model, fitted to benchmarks/results/experiments/attention-h200.json. Microseconds: of a launch with its
# first loads and its sums over warps; of each further round of blocks; of the second kernel; of 16 keys of 128 elements
# in a warp, beside 8 query rows; of bytes on their way. So many of the SMs reach a copy's rate, and reads alone more.
LAUNCH_US, ROUND_US, COMBINE_US, TILE_US, LATENCY_US = 2.9, 0.9, 2.0, 0.55, 1.4
ENOUGH_SMS, READ_SHARE = 0.62, 1.02


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a block: warps, each with a ring of so many stages of so many keys; the parts of the keys."""

    warps: int
    stages: int
    tile: int
    parts: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """Queries ``[batch, heads, group, time, key_size]``, each group with one head of keys and values.

    Attributes:
      batch, heads, group, time, keys: sizes.
      key_size, value_size: elements of a key and of a value.
      dtype: of queries, keys and values.
      out_dtype: of the result.
      expression: what scores become before the softmax, ``[batch, heads, group, time, keys]`` in float32.
      keys_first: of keys and of values, whether they lie as ``[batch, keys, heads, size]``, or with heads before keys.
      device: which.
    """

    batch: int
    heads: int
    group: int
    time: int
    keys: int
    key_size: int
    value_size: int
    dtype: np.dtype
    out_dtype: np.dtype
    expression: Epilogue
    keys_first: tuple[bool, bool]
    device: Device

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *_: Any,
        expression: Epilogue,
        keys_first: tuple[bool, bool],
        out_dtype: Any,
        device: Device,
    ) -> Problem:
        """Makes one of the avals and the parameters of ``attention_p``."""
        batch, heads, group, time, size = q.shape
        keys = k.shape[1 if keys_first[0] else 2]
        dtypes = np.dtype(q.dtype), np.dtype(out_dtype)
        return cls(batch, heads, group, time, keys, size, v.shape[-1], *dtypes, expression, keys_first, device)

    @property
    def arch(self) -> str:
        """The architecture it is compiled for."""
        return self.device.arch

    @property
    def rows(self) -> int:
        """The query rows of one head of keys."""
        return self.group * self.time

    @property
    def matrices(self) -> int:
        """The heads of keys of all of the batch."""
        return self.batch * self.heads

    @property
    def flops(self) -> int:
        """The operations of both products."""
        return 2 * self.matrices * self.rows * self.keys * (self.key_size + self.value_size)

    @property
    def bytes(self) -> int:
        """The least bytes that are moved: keys and values, and operands of scores that all of them have."""
        read = self.matrices * self.keys * (self.key_size + self.value_size) * self.dtype.itemsize
        sizes: dict[str, int] = dict(
            zip(_AXES, (self.batch, self.heads, self.group, self.time, self.keys), strict=True)
        )
        for spec in self.expression.operands:
            read += math.prod(sizes[axis] for axis in axes(spec)) * np.dtype(spec.dtype).itemsize
        return read

    def __str__(self) -> str:
        shape = ",".join(map(str, (self.batch, self.heads, self.group, self.time, self.key_size)))
        return f"attention of {short(self.dtype.name)}[{shape}] to {self.keys} keys by {self.expression.text('score')}"


def axes(spec: OperandSpec) -> list[str]:
    """Returns the axes of scores along which an operand varies."""
    batch = (*(False,) * (3 - len(spec.batch)), *spec.batch)
    return [axis for axis, varies in zip(_AXES, (*batch, spec.row, spec.col), strict=True) if varies]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A config for a problem that it serves: text, arguments and launches."""

    problem: Problem
    config: Config

    @property
    def name(self) -> str:
        """The entry symbol: dtype, sizes, the shape of a block and the expression."""
        p, c = self.problem, self.config
        sizes = f"{p.key_size}" if p.key_size == p.value_size else f"{p.key_size}_{p.value_size}"
        divided = "_parts" * self.divided
        shape = f"{p.group}x{p.time}_{c.warps}x{c.tile}_s{c.stages}{divided}"
        return f"attention_{short(p.dtype.name)}_{short(p.out_dtype.name)}_{sizes}_{shape}_e{p.expression.digest}"

    @property
    def divided(self) -> bool:
        """True if several blocks have parts of the same keys."""
        return self.config.parts > 1

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: the rings, later what warps add up."""
        p, c = self.problem, self.config
        ring = c.stages * self.stage_bytes
        sums = 4 * 8 * -(-p.rows // 8) * (p.value_size + 4 + 2)
        return max(c.warps * ring + self.query_bytes, c.warps * sums)

    @property
    def query_bytes(self) -> int:
        """The shared memory of queries; 0 where each warp keeps them in up to 32 registers of a thread."""
        words = -(-self.problem.rows // 8) * self.problem.key_size // 8
        return 128 * words if words > 32 else 0

    @property
    def stage_bytes(self) -> int:
        """The shared memory of a stage of a warp."""
        return self.config.tile * (2 * (self.problem.key_size + self.problem.value_size) + 32)

    @property
    def blocks_per_sm(self) -> int:
        """The blocks that shared memory lets an SM have at one time."""
        return max(1, min(4, self.problem.device.shared_bytes_per_sm // (self.shared_bytes + 1024)))

    def reasons(self) -> list[str]:
        """Returns the reasons against the config."""
        most = self.problem.device.shared_bytes
        return [f"{self.shared_bytes} bytes of shared memory, at most {most}"] * (self.shared_bytes > most)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The launches, in order."""
        return (self._attending, self._combining) if self.divided else (self._attending,)

    @property
    def _attending(self) -> Entry:
        p, c = self.problem, self.config
        constants = {
            "WARPS": c.warps,
            "STAGES": c.stages,
            "TILE": c.tile,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "KEY_SIZE": p.key_size,
            "ROWS": p.rows,
            "TIME": p.time,
            "DIVIDED": self.divided,
            "QUERIES_SHARED": self.query_bytes > 0,
            "STREAMED": p.bytes > p.device.l2_bytes,
        }
        out = "float32" if self.divided else p.out_dtype.name
        head = f"constexpr Math MATH = Math::{dtypes.DTYPES[p.dtype.name].stored};\n"
        head += f"constexpr Dtype ELEMENT = Dtype::{dtypes.DTYPES[p.dtype.name].stored};\n"
        files = "mma/math.cuh", "mma/atoms.cuh", "mma/instruction.cuh", head, _text(p), "attention/kernel.cuh"
        blocks, arguments = p.matrices * c.parts, tuple(self._arguments())
        return self._entry(self.name, constants, out, arguments, files, blocks, 32 * c.warps, self.shared_bytes)

    @property
    def _combining(self) -> Entry:
        p = self.problem
        pairs = p.matrices * p.rows * p.value_size // 2
        name = f"attention_{short(p.out_dtype.name)}_{p.value_size}x{p.rows}_combine"
        arguments = (
            Argument("const float* mixed", Pointer(self._first_result)),
            Argument("const float* sums", Pointer(self._first_result + 1)),
            Argument("char* result", Pointer(self._first_result + 2)),
            integer("pairs", pairs),
            integer("parts", self.config.parts),
        )
        constants, blocks = {"ROWS": p.rows, "LINES": _LINES}, -(-pairs // 32)
        files = ("attention/combine.cuh",)
        return self._entry(name, constants, p.out_dtype.name, arguments, files, blocks, 32 * _LINES, 0)

    def _entry(
        self,
        name: str,
        constants: dict[str, int],
        out: str,
        arguments: tuple[Argument, ...],
        files: tuple[str, ...],
        blocks: int,
        threads: int,
        shared_bytes: int,
    ) -> Entry:
        head = f"#define ACCUMULATOR float\n#define PARAMETERS {', '.join(a.declaration for a in arguments)}\n"
        passed = ", ".join(["batch", "head", "t", *(a.name for a in arguments if a.to == "extras")])
        head += f"#define EXTRAS ({passed})\n"
        result = f"constexpr Dtype RESULT = Dtype::{dtypes.DTYPES[out].stored};\n"
        common = (
            "common/atoms.cuh",
            *sources.MATH,
            "common/elements.cuh",
            head,
            "direct/vector.cuh",
            result,
            "attention/powers.cuh",
        )
        source = sources.source(name, constants | {"VALUE_SIZE": self.problem.value_size}, [*common, *files])
        return Entry(self.problem, name, source, arguments, blocks, threads, shared_bytes)

    @property
    def _first_result(self) -> int:
        return 3 + len(self.problem.expression.operands)

    def _arguments(self) -> Iterator[Argument]:
        p, result = self.problem, self._first_result
        for i, name in enumerate("qkv"):
            yield Argument(f"const char* {name}", Pointer(i))
        for name, keys_first, size in zip("kv", p.keys_first, (p.key_size, p.value_size), strict=True):
            row = p.dtype.itemsize * size
            yield Argument(f"long long {name}_batch", Int64(p.heads * p.keys * row))
            yield Argument(f"long long {name}_head", Int64(row if keys_first else p.keys * row))
            yield integer(f"{name}_key", row * p.heads if keys_first else row)
        yield Argument("char* result", Pointer(result))
        yield Argument("float* sums", Pointer(result + self.divided))
        for i in range(len(p.expression.operands)):
            yield Argument(f"const char* base{i}", Pointer(3 + i), "extras")
        yield integer("heads", p.heads, "extras")
        yield integer("keys", p.keys, "extras")
        yield integer("parts", self.config.parts)
        yield integer("keys_of_part", self.keys_of_part)

    @property
    def keys_of_part(self) -> int:
        """The keys of a part, in whole tiles."""
        return -(-self.problem.keys // (self.config.parts * self.config.tile)) * self.config.tile

    def call(self) -> Call:
        """Returns the compiled kernels and the plan of their launches."""
        launches = tuple(entry.launch(entry.compile().image) for entry in self.entries)
        if not self.divided:
            return Call(launches)
        return Call(launches, results=self.results, finish=lambda written, _: written[2:])

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that kernels write, the result behind those of the parts."""
        p = self.problem
        shapes = (p.matrices, self.config.parts, p.rows), (p.batch, p.heads, p.group, p.time, p.value_size)
        parts = [jax.ShapeDtypeStruct((*shapes[0], size), np.float32) for size in (p.value_size, 2)]
        return *parts, jax.ShapeDtypeStruct(shapes[1], p.out_dtype)

    @property
    def time_us(self) -> float:
        """Predicted microseconds: of bytes, or of what a warp computes."""
        p, c, device = self.problem, self.config, self.problem.device
        if not device.sms or not device.bytes_per_second:
            return math.inf
        places, blocks = device.sms * self.blocks_per_sm, p.matrices * c.parts
        rounds = -(-blocks // places)
        busy = min(1.0, blocks / device.sms) if rounds == 1 else blocks / (rounds * places)
        flying = min(blocks, places) * c.warps * (c.stages - 1) * self.stage_bytes
        rate = min(READ_SHARE * device.bytes_per_second * min(1.0, busy / ENOUGH_SMS), 1e6 * flying / LATENCY_US)
        tiles = rounds * -(-self.keys_of_part // (c.warps * c.tile))
        computing = tiles * TILE_US * c.tile / 16 * (p.key_size + p.value_size) / 256 * -(-p.rows // 8)
        beside = LAUNCH_US + ROUND_US * (rounds - 1) / self.blocks_per_sm + COMBINE_US * self.divided
        return beside + max(1e6 * p.bytes / rate, computing)


# The places along axes in the text, and their sizes.
_PLACES: dict[str, str] = dict(zip(_AXES, ("batch", "head", "row / TIME", "row % TIME", "key"), strict=True))
_SIZES_OF: dict[str, str] = dict(zip(_AXES, ("1", "heads", "(ROWS / TIME)", "TIME", "keys"), strict=True))
_OF_ROWS = """#pragma unroll
{0}for (int c = 0; c < COLUMNS; ++c)
{0}  for (int e = 0; e < 2; ++e) {{
{0}    int row = min(8 * c + 2 * t + e, ROWS - 1);
{0}    {1}
{0}  }}"""
_OF_KEYS = """
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {{
        int key = min(first + 16 * b + 8 * h, keys - 1);
        {}
      }}"""


def _text(problem: Problem) -> str:
    """Returns the struct of what scores are computed with, of one lane's query rows."""
    fields, begins, loads, values = [], [], [], []
    for i, spec in enumerate(problem.expression.operands):
        along = axes(spec)
        of_rows, of_keys = "group" in along or "time" in along, "key" in along
        fields.append(f"const char* base{i};")
        shape = "[BLOCKS][2]" * of_keys + "[COLUMNS][2]" * of_rows
        fields.append(f"Pair<Dtype::{dtypes.DTYPES[spec.dtype].stored}> x{i}{shape};")
        value = f"x{i}{'[b][h]' * of_keys}{'[c][e]' * of_rows}"
        place = functools.reduce(lambda text, axis: f"({text} * {_SIZES_OF[axis]} + {_PLACES[axis]})", along, "0ll")
        load = f"{value}.load_one(base{i} + {place} * {np.dtype(spec.dtype).itemsize});"
        (loads if of_keys else begins).append(_OF_ROWS.format(" " * (8 if of_keys else 4), load) if of_rows else load)
        values.append(f"{value}[0]")
    names = [_PLACES["time"], _PLACES["key"], *(_position(*place) for place in emit.places(problem.expression))]
    bases = [f"base{i}" for i in range(len(problem.expression.operands))]

    given, kept = "".join(f", const char* {x}" for x in bases), "".join(f", {x}({x})" for x in bases)

    def lines(statements: list[str], indent: int) -> str:
        return "".join("\n" + " " * indent * (statement[0] != "#") + statement for statement in statements)

    return f"""{emit.emit(problem.expression)}#line 1 "scores (generated)"
constexpr int COLUMNS = (ROWS + 7) / 8, BLOCKS = TILE / 16;  // of 8 query rows, of 16 keys
struct Extras {{
  int batch, head, t, heads, keys;{lines(fields, 2)}

  DEVICE Extras(int batch, int head, int t{given}, int heads, int keys)
      : batch(batch), head(head), t(t), heads(heads), keys(keys){kept} {{{lines(begins, 4)}
  }}
  DEVICE void load(int first) {{{_OF_KEYS.format("".join(lines(loads, 8)).strip()) if loads else ""}
  }}
  DEVICE float score(float score, int b, int h, int c, int e, int key) const {{
    const float value[1] = {{score}};
    const int row = 8 * c + 2 * t + e;
    float y;
    epilogue_element({", ".join(["value", *values, *names, "y"])});
    return y;
  }}
}};
"""


def _position(axis: str, i: int) -> str:
    """Returns the text of a position beside time and key, as `emit.places` names it."""
    outer = list(_AXES[2::-1])  # from the rows outwards
    if axis == "batch":
        return _PLACES[outer[i]]
    own = {"row": "time", "col": "key"}[axis]
    found, stride = _PLACES[own], _SIZES_OF[own]
    for other in outer[:i]:
        found, stride = f"{found} + {stride} * ({_PLACES[other]})", f"{stride} * {_SIZES_OF[other]}"
    return found


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the largest two shapes of blocks that fit an SM, whole and with the parts that fill the SMs."""
    tile = 16 if problem.key_size + problem.value_size > 128 else 32
    shapes = [Config(warps, stages, tile, 1) for warps, stages in ((8, 3), (4, 3), (4, 2), (2, 2), (1, 2))]
    fitting = [config for config in shapes if not Kernel(problem, config).reasons()]
    for config in fitting[:2] or shapes[-1:]:
        most, sms = -(-problem.keys // (config.warps * tile)), problem.device.sms
        places = sms, sms * Kernel(problem, config).blocks_per_sm
        for parts in dict.fromkeys((1, *(max(1, min(most, n // problem.matrices)) for n in places))):
            # Fewer, where the last ones would have no keys.
            each = Kernel(problem, dataclasses.replace(config, parts=parts)).keys_of_part
            yield dataclasses.replace(config, parts=-(-problem.keys // each))


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, backend: str) -> Choice[Problem, Kernel]:
    """Returns the kernel that runs under a backend, or the reasons why XLA does."""
    if why := why_not(problem):
        return Choice(problem, tuple(why))
    kernels = [Kernel(problem, config) for config in configs(problem)]
    each = (tuple(kernel.reasons()) or kernel for kernel in kernels)
    why = f"predicted fastest of {len(kernels)} configs"
    return choice.fastest(problem, each, why, problem.device.moving_us(problem.bytes))


def why_not(problem: Problem) -> list[str]:
    """Returns the reasons against kernels."""
    p = problem
    if not p.flops:
        return ["a size is 0: nothing to launch"]
    found = [*emit.reasons(p.expression), *too_old(p.arch, 80), *not_inlined(p.expression, "an expression")]
    if p.dtype.name not in DTYPES or p.out_dtype.name not in (p.dtype.name, "float32"):
        found.append(f"{p.dtype.name} with a result in {p.out_dtype.name}: kernels multiply 16 bits")
    if p.rows > MOST_ROWS:
        found.append(f"{p.rows} query rows of a head of keys: more than {MOST_ROWS}")
    if -(-p.rows // 8) * p.value_size // 4 > _MOST_SUMS:
        found.append(f"{p.rows} query rows with values of {p.value_size} elements: more than registers hold")
    if p.key_size not in _SIZES or p.value_size not in _SIZES:
        found.append(f"heads of {p.key_size} and {p.value_size} elements: kernels have multiples of 16 up to 256")
    counts = {"keys": p.keys + 2**16, "bytes of keys": 64 * p.heads * max(p.key_size, p.value_size)}
    return [*found, *reasons.of_counters(counts | {"query rows": p.matrices * p.rows * p.value_size})]
