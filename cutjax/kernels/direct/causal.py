"""The gradients of an activation of a causal convolution, in one pass over memory: the choice, and the launches."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator

import jax
import numpy as np

from cutjax.dtypes import DTYPES as NAMES
from cutjax.dtypes import short
from cutjax.epilogue import emit
from cutjax.epilogue.expression import Epilogue
from cutjax.kernels import reasons
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.device import Device
from cutjax.kernels.direct import slide
from cutjax.kernels.direct.config import Config
from cutjax.kernels.direct.entries import SUM_THREADS, slices_of
from cutjax.kernels.direct.text import source
from cutjax.kernels.entry import Entry
from cutjax.kernels.staging import instructions
from cutjax.runtime.architectures import too_old
from cutjax.runtime.choice import Choice, fastest
from cutjax.runtime.launch import Call, Pointer

DTYPES = ("bfloat16", "float16", "float32")
WIDEST = 8
BESIDE = 30  # registers of a thread beside weights, sums and rows
SUM_US = 4.2


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of ``f(causal convolution of x by w + bias)`` in x, w and bias, given that of the result.

    Attributes:
      images, length, channels, width: sizes: x and the result are ``[images, length, channels]``, w is
        ``[width, channels]``.
      dtype: of x, w and the gradient of the result.
      bias: the dtype of the bias; None where there is none.
      sums: the dtypes of the gradients of w, and of the bias.
      gradient: the gradient before f as an epilogue of what f is of, and, an operand, of the gradient of its result;
        None where it is no elementwise function.
      device: that it is for.
    """

    images: int
    length: int
    channels: int
    width: int
    dtype: np.dtype
    bias: np.dtype | None
    sums: tuple[np.dtype, ...]
    gradient: Epilogue | None
    device: Device

    @property
    def arch(self) -> str:
        """The architecture to compile for."""
        return self.device.arch

    @property
    def flops(self) -> int:
        """FLOP of the three convolutions."""
        return 6 * self.images * self.length * self.channels * self.width

    @property
    def bytes(self) -> int:
        """Bytes of x, and of both gradients of its size."""
        return 3 * self.images * self.length * self.channels * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = f"{self.images}x{self.length}x{self.channels} {short(self.dtype.name)}"
        return f"gradients of a causal convolution of {sizes}, width {self.width}"

    def reasons(self) -> list[str]:
        """Returns the reasons against every kernel."""
        if not self.flops:
            return ["a size is 0"]
        found = too_old(self.arch, 75)
        if self.dtype.name not in DTYPES:
            found.append(f"{short(self.dtype.name)}: the kernels are of {', '.join(map(short, DTYPES))}")
        if self.bias is not None and self.bias.name not in DTYPES:
            found.append(f"a bias in {short(self.bias.name)}")
        if self.width > WIDEST:
            found.append(f"width {self.width}, at most {WIDEST}")
        if self.gradient is None:
            return [*found, "an activation whose derivative is not elementwise"]
        if self.gradient.positions:
            found.append("an activation that depends on where elements lie")
        return found + list(emit.reasons(self.gradient))


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One config resolved for one problem: the launch of a pass, and that of what adds up its parts.

    Of a config ``pairs`` are channels, ``ahead`` the places whose rows a thread loads at once, and `rows` a chunk's.
    """

    problem: Gradients
    config: Config

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.problem.length // self.config.rows)

    @property
    def lanes(self) -> int:
        """Threads of a block along channels."""
        return min(self.config.lanes, -(-self.problem.channels // self.config.pairs))

    @property
    def items(self) -> int:
        """Chunks of a block."""
        return max(1, self.config.threads // self.lanes)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.items

    @property
    def tiles(self) -> int:
        """Blocks along channels."""
        return -(-self.problem.channels // (self.lanes * self.config.pairs))

    @property
    def parts(self) -> int:
        """Blocks along chunks, each of which has a part of the gradients of weights."""
        return -(-self.chunks * self.problem.images // self.items)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return 4 * (self.problem.width + 1) * self.threads * self.config.pairs

    @property
    def registers(self) -> int:
        """Registers of a thread, about."""
        p, c = self.problem, self.config
        rows = 2 * c.ahead * -(-c.pairs * p.dtype.itemsize // 4)
        return c.pairs * max(4 * p.width + 4, 6 * p.width - 4) + rows + BESIDE

    @property
    def name(self) -> str:
        """The entry symbol of the first launch, which says what is compiled into it."""
        p, c = self.problem, self.config
        bias = "" if p.bias is None else f"_{short(p.bias.name)}"
        thread = f"{p.width}_{c.pairs}_a{c.ahead}_l{self.lanes}x{self.items}_b{c.blocks}_n{p.channels}"
        digest = hashlib.sha256(repr(p.gradient).encode()).hexdigest()[:8]
        return f"direct_{short(p.dtype.name)}{bias}_causal_gradients_{thread}_e{digest}"

    def reasons(self) -> list[str]:
        """Returns the reasons against the config."""
        p, c, device = self.problem, self.config, self.problem.device
        found = []
        if p.channels % c.pairs or c.pairs * p.dtype.itemsize > 16:
            found.append(f"pairs={c.pairs} of {p.channels} channels: a thread has up to 16 bytes of whole ones")
        limit = min(255, device.registers_per_sm // (-(-self.threads // 32) * 32 * c.blocks) // 8 * 8)
        if self.registers > limit:
            found.append(f"about {self.registers} registers a thread, at most {limit}")
        most = min(device.shared_bytes, device.shared_bytes_per_sm // c.blocks - 1024)
        if self.shared_bytes > most:
            found.append(f"{self.shared_bytes} bytes of shared memory, at most {most} with {c.blocks} blocks an SM")
        if c.blocks * self.threads > device.max_threads_per_sm:
            found.append(f"blocks={c.blocks} of {self.threads} threads: more than an SM of {device.name} holds")
        sizes = {
            "blocks": self.tiles * self.parts,
            "rows": p.length + 4 * c.rows + 64,
            "bytes of rows": (2 * c.ahead + p.width) * p.channels * p.dtype.itemsize,
            "weights": (p.width + 1) * p.channels * 4,
        }
        return found + reasons.of_counters(sizes)

    @property
    def time_us(self) -> float:
        """Predicted microseconds of both launches: of the bytes, or of the instructions."""
        p, c, device = self.problem, self.config, self.problem.device
        if not dict(device.flops).get("float32") or not device.sms:
            return math.inf
        halo = p.width - 1
        rows = self.chunks * c.rows / p.length  # of chunks that end behind their sequence
        elements = rows * (1 + 2 * halo / c.rows) * p.images * p.length * p.channels
        each = 3 * p.width + 4 + instructions(p.gradient) + 12 / c.pairs
        blocks = self.tiles * self.parts
        moved = p.bytes * (1 + halo / c.rows) + 8.0 * self.parts * (p.width + 1) * p.channels
        working = self.tiles * self.lanes * self.chunks * p.images
        resident = min(working, device.sms * c.blocks * self.threads)
        # Two of three arrays are read.
        flying = 3 * resident * c.ahead * c.pairs * p.dtype.itemsize
        return slide.LAUNCH_US + SUM_US + slide.pass_us(c, device, elements, each, moved, flying, blocks)

    @functools.cached_property
    def entries(self) -> tuple[Entry, Entry]:
        """The launches, in order."""
        return self._pass(), self._sum()

    def _pass(self) -> Entry:
        p, c, has = self.problem, self.config, self.problem.bias is not None

        def arguments() -> Iterator[Argument]:
            places = {"x": 0, "w": 1, "bias": 1 + has, "dy": 2 + has}  # that of the bias, where it is none, is not read
            for name, i in places.items():
                yield Argument(f"const char* {name}", Pointer(i))
            yield Argument("char* dx", Pointer(self._operands))
            yield Argument("float* sum_of_parts", Pointer(self._operands + 2 + has))
            sizes = {"items": self.chunks * p.images, "chunks": self.chunks, "rows": c.rows, "length": p.length}
            for name, value in {**sizes, "tiles": self.tiles}.items():
                yield integer(name, value)

        constants = {
            "COLUMNS": p.channels,
            "WINDOW": p.width,
            "PAIRS": c.pairs,
            "AHEAD": c.ahead,
            "LANES": self.lanes,
            "THREADS": self.threads,
            "BLOCKS_PER_SM": c.blocks,
            "HAS_BIAS": has,
        }
        assert p.gradient is not None
        given, y = ", dy" * len(p.gradient.operands), NAMES[p.gradient.outputs[0].dtype].carrier
        text = f"""constexpr Dtype BIAS = Dtype::{NAMES[(p.bias or p.dtype).name].stored};
{emit.emit(p.gradient)}DEVICE Acc gradient_of(Acc before, Acc dy) {{
  const Acc value[1] = {{before}};
  {y} found;
  epilogue_element(value{given}, 0, 0, found);
  return found;
}}
"""
        return self._entry(self.name, constants, arguments(), [text, "direct/causal_gradients.cuh"], self.shared_bytes)

    def _sum(self) -> Entry:
        p, has, taps = self.problem, self.problem.bias is not None, self.problem.width + 1
        results = ("dw", *["db"] * has)

        def arguments() -> Iterator[Argument]:
            yield Argument("const float* sum_of_parts", Pointer(self._operands + 2 + has))
            sizes = {"parts": self.parts, "taps": taps, "pairs": p.channels, "columns": p.channels}
            for name, value in sizes.items():
                yield integer(name, value)
            for i, name in enumerate(results):
                yield Argument(f"char* {name}", Pointer(self._operands + 1 + i), "extras")

        def store(name: str, dtype: np.dtype, row: str) -> str:
            vector = f"Vector<Dtype::{NAMES[dtype.name].stored}, 1>"
            at = f"(static_cast<i64>({row}) * extras.n + column) * {dtype.itemsize}"
            return f"{vector}::store(extras.{name} + {at}, done.acc);"

        of_bias = f" else {{\n    {store('db', p.sums[1], '0')}\n  }}" if has else ""
        text = f"""struct Extras {{
  int m, n;
  {"".join(f"char* {name};" for name in results)}
  DEVICE Extras(int m, int n{"".join(f", char* {name}" for name in results)})
      : m(m), n(n){"".join(f", {name}({name})" for name in results)} {{}}
  DEVICE void begin(int column) {{}}
}};
struct Done {{
  Acc acc[1];
}};
struct Partials {{}};
DEVICE void finish(const Extras& extras, Partials&, const Done done, int row, int column) {{
  if (row < {p.width}) {{
    {store("dw", p.sums[0], "row")}
  }}{of_bias}
}}
"""
        slices = slices_of(self.parts)
        constants = {"THREADS": SUM_THREADS, "SLICES": slices, "CHANNELS": 1}
        return self._entry(
            f"{self.name}_{slices}_sum", constants, arguments(), [text, "direct/sum.cuh"], 4 * SUM_THREADS
        )

    def _entry(
        self, name: str, constants: dict[str, int], arguments: Iterator[Argument], parts: list[str], shared_bytes: int
    ) -> Entry:
        taken, last = tuple(arguments), name.endswith("_sum")
        text = source(name, self.problem.dtype.name, "float32", constants, taken, parts)
        elements = (self.problem.width + 1) * self.problem.channels
        blocks = -(-elements * constants["SLICES"] // SUM_THREADS) if last else self.tiles * self.parts
        return Entry(self.problem, name, text, taken, blocks, constants["THREADS"], shared_bytes)

    @property
    def _operands(self) -> int:
        return 3 + (self.problem.bias is not None)

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that the launches write: the gradients, and the parts of those that are sums."""
        p = self.problem
        shapes = ((p.width, p.channels), (p.channels,))
        sums = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, p.sums, strict=False)]
        parts = jax.ShapeDtypeStruct((self.parts, p.width + 1, p.channels), np.dtype("float32"))
        return (jax.ShapeDtypeStruct((p.images, p.length, p.channels), p.dtype), *sums, parts)

    def call(self) -> Call:
        """Returns the compiled kernels and the plan of their launches."""
        launches = tuple(entry.launch(entry.compile().image) for entry in self.entries)
        return Call(launches, results=self.results, finish=lambda written, _: list(written[:-1]))


def configs(problem: Gradients) -> Iterator[Config]:
    """Yields the ways to divide a problem among threads: as many blocks on an SM as its registers let."""
    device, threads, halo = problem.device, 128, problem.width - 1
    for pairs in (8, 4, 2, 1):
        if problem.channels % pairs or pairs * problem.dtype.itemsize > 16:
            continue
        for ahead in (2, 4, 8):
            if ahead * pairs * problem.dtype.itemsize > 64:
                continue
            registers = Kernel(problem, Config(pairs, 1, 1, 32, threads, ahead, 1)).registers
            fitting = [b for b in range(1, 13) if device.registers_per_sm // (threads * b) // 8 * 8 >= registers]
            for chunks in sorted({-(-problem.length // rows) for rows in slide.ROWS}):
                rows = halo + -(-(-(-problem.length // chunks) - halo) // ahead) * ahead
                yield Config(pairs, 1, rows, 32, threads, ahead, max(fitting, default=1))


def resolve(problem: Gradients, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel, or every reason why the config cannot serve the problem."""
    kernel = Kernel(problem, config)
    found = problem.reasons()
    found = found or kernel.reasons()
    return tuple(found) if found else kernel


@functools.lru_cache(maxsize=1024)
def choose(problem: Gradients) -> Choice[Gradients, Kernel]:
    """Returns the kernel that is predicted to be the fastest, or the reasons why there is none."""
    if found := problem.reasons():
        return Choice(problem, tuple(found))
    each = (resolve(problem, config) for config in configs(problem))
    return fastest(problem, each, "one pass over memory", 1e6 * problem.bytes / problem.device.bytes_per_second)
