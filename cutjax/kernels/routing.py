"""Tokens routed to experts: the kernels that choose and sort, their plan, and the choice between them and XLA."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cutjax.dtypes import DTYPES, short
from cutjax.kernels import reasons
from cutjax.kernels.arguments import Argument, integer
from cutjax.kernels.choose import LEAD
from cutjax.kernels.device import Device
from cutjax.kernels.entry import Entry
from cutjax.runtime import sources
from cutjax.runtime.choice import Choice, fastest
from cutjax.runtime.launch import Call, Int64, Pointer

LOGITS = ("bfloat16", "float16", "float32")
MOST_CHOICES = 32
MOST_COUNTED = 2**16 - 1  # tokens of a block, whose counts have 16 bits
MOST_UNROLLED = 2048
PLACING = 512  # threads of a block of the second kernel
# Of the cost model, fitted to 93 kernels of ten problems on an H200 (benchmarks/results/experiments/routing-h200.json):
# its pick takes at most 1.02 times as long as the fastest measured.
LAUNCH_US, PLACING_US = 0.8, 2.6  # of the first kernel, and of the second
MHZ = 1700.0
RATE = 2.3  # instructions of warps that an SM issues in a cycle: half of them compare, at half the rate
LATENCY = 1.5  # cycles that each instruction of a warp takes beside that, however many there are
STEP_CYCLES, LOAD_US = 150, 0.1  # of each step
L2_BYTES_PER_US = 4e6
FILES = ("common/atoms.cuh", *sources.MATH, "common/elements.cuh")


@dataclasses.dataclass(frozen=True)
class Config:
    """Threads of a block, lanes that read a token's logits together, and blocks for each example of a batch.

    One block places the pairs of its tokens itself; more leave that to a second kernel.
    """

    threads: int
    lanes: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """Logits ``[*batch, tokens, experts]``, of which each token gets its k best experts.

    Attributes:
      tokens, experts, k: sizes.
      dtype: of the logits.
      scoring, renormalize: as ``cutjax.route`` has them.
      bias: the shape of the selection bias, in as many axes as the logits, each of their size or 1; None without one.
      batch: of the result.
      counts: how many of the batch the logits and the bias each have.
      device: which.
    """

    tokens: int
    experts: int
    k: int
    dtype: np.dtype
    scoring: str
    renormalize: bool
    bias: tuple[int, ...] | None
    batch: tuple[int, ...]
    counts: tuple[int, int]
    device: Device

    @classmethod
    def of(cls, logits: Any, bias: Any, k: int, scoring: str, renormalize: bool, device: Device) -> Problem:
        """Makes one of the avals of ``route_p``, the bias's None where there is none."""
        given = None if bias is None else tuple(bias.shape)
        batch = np.broadcast_shapes(logits.shape[:-2], given[:-2] if given else ())
        counts = math.prod(logits.shape[:-2]), math.prod(given[:-2] if given else ())
        tokens, experts = logits.shape[-2:]
        return cls(tokens, experts, k, logits.dtype, scoring, renormalize, given, tuple(batch), counts, device)

    @property
    def arch(self) -> str:
        """The architecture it is compiled for."""
        return self.device.arch

    @property
    def vector(self) -> int:
        """The elements that fit 16 bytes, of a power of two that divides a row."""
        return math.gcd(self.experts, 16 // self.dtype.itemsize)

    @property
    def size(self) -> int:
        """The number of examples in the batch."""
        return math.prod(self.batch)

    @property
    def pairs(self) -> int:
        """Pairs of a token and an expert of an example."""
        return self.tokens * self.k

    @property
    def flops(self) -> int:
        """0 where there is nothing to choose, else the logits that are looked at; no arithmetic counts."""
        return self.size * self.tokens * self.experts

    @property
    def bytes(self) -> int:
        """The least bytes that are moved: logits read, four arrays of pairs and the sizes written."""
        logits = self.counts[0] * self.tokens * self.experts * self.dtype.itemsize
        return logits + self.size * 4 * (4 * self.pairs + self.experts)

    @property
    def xla_us(self) -> float:
        """The predicted time of XLA's top-k (a sort of each row), masked sums, radix sorts and histogram.

        On an H200 62, 94, 180, 228, 219 and 950 us are measured where this has 34, 71, 174, 221, 208 and 776; of up to
        16 tokens 9 to 12 where it has 30, which is as long as many kernels take there.
        """
        tokens, pairs = self.size * self.tokens, self.size * self.pairs
        share = 4.3e12 / self.device.bytes_per_second if self.device.bytes_per_second else 1.0
        return 30 + share * (27e-6 * tokens * self.experts + 1.55e-6 * pairs * self.experts + 1e-4 * pairs)

    def __str__(self) -> str:
        shape = ",".join(map(str, (*self.batch, self.tokens, self.experts)))
        return f"routing {short(self.dtype.name)}[{shape}] k={self.k}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A config for a problem that it serves: text, arguments and launches."""

    problem: Problem
    config: Config

    @property
    def name(self) -> str:
        """The entry symbol: what is chosen, threads and lanes; "alone" is the one block."""
        p, c = self.problem, self.config
        flags = "_sigmoid" * (p.scoring == "sigmoid") + "_all" * (not p.renormalize) + "_bias" * (p.bias is not None)
        alone = "_alone" * self.alone
        return f"route_{short(p.dtype.name)}_{p.experts}k{p.k}{flags}_{c.threads}x{c.lanes}{alone}"

    @property
    def alone(self) -> bool:
        """True if one block has all tokens."""
        return self.config.blocks == 1

    @property
    def vector(self) -> int:
        """The elements that a lane loads at once."""
        return self.problem.vector

    @property
    def list(self) -> int:
        """The keys that a lane keeps."""
        return min(self.problem.k, self.pieces * self.vector)

    @property
    def words(self) -> int:
        """The words of a key."""
        return 1 if self.problem.dtype.itemsize == 2 and self.problem.bias is None else 2

    @property
    def pieces(self) -> int:
        """The loads of a lane."""
        return -(-self.problem.experts // (self.vector * self.config.lanes))

    @property
    def sorting(self) -> int:
        """The instructions that put a key in its place in a list, for each of the list's."""
        return 2 if self.words == 1 else 6

    @property
    def ahead(self) -> int:
        """The pieces that a lane loads at once, and whose code is written out."""
        return max(1, min(4, self.pieces, 512 // (self.vector * self.list * self.sorting)))

    @property
    def at_once(self) -> int:
        """The tokens of a step."""
        return self.config.threads // self.config.lanes

    @property
    def chunk(self) -> int:
        """The tokens of a block."""
        return -(-self.problem.tokens // self.config.blocks)

    @property
    def pitch(self) -> int:
        """The counts of a block, in whole 16 bytes."""
        return -(-self.problem.experts // 8) * 8

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: two words for each expert and 32 tokens of a step, and the counts."""
        return 4 * self.problem.experts * (2 * -(-self.at_once // 32) + 1)

    @property
    def registers(self) -> int:
        """About what a thread takes."""
        held = -(-self.problem.k // self.config.lanes)
        return 34 + self.words * self.list + 4 * self.ahead + 3 * held

    def reasons(self) -> list[str]:
        """Returns the reasons against the config."""
        p, c = self.problem, self.config
        found = []
        if self.shared_bytes > p.device.shared_bytes:
            found.append(f"{self.shared_bytes} bytes of shared memory, at most {p.device.shared_bytes}")
        most = p.device.registers_per_sm // c.threads
        if self.registers > most:
            found.append(f"about {self.registers} registers a thread, at most {most}")
        unrolled = self.ahead * self.vector * (self.sorting * self.list + 8) + (1 + bool(c.lanes > 1)) * p.k * self.list
        if unrolled > MOST_UNROLLED:
            found.append(
                f"about {unrolled} instructions of its loops, at most {MOST_UNROLLED}: it would compile for long"
            )
        if self.chunk > MOST_COUNTED:
            found.append(f"{self.chunk} tokens of a block, at most {MOST_COUNTED}")
        return found

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The launches, in order."""
        return (self._choosing,) if self.alone else (self._choosing, self._placing)

    @property
    def _choosing(self) -> Entry:
        p, c = self.problem, self.config
        constants = {
            "THREADS": c.threads,
            "LANES": c.lanes,
            "VECTOR": self.vector,
            "AHEAD": self.ahead,
            "BIASED": p.bias is not None,
            "SOFTMAX": p.scoring == "softmax",
            "RENORMALIZE": p.renormalize,
            "ALONE": self.alone,
        }
        files = ("place", "rows", "best", "choose")
        return self._entry(self.name, constants, tuple(self._arguments()), files, c.threads, self.shared_bytes)

    @property
    def _placing(self) -> Entry:
        name = f"route_{self.problem.experts}k{self.problem.k}_place"
        results = [(i, x) for i, x in enumerate(_RESULTS) if "weights" not in x]
        arguments = (*self._pointers(results), *self._sizes())
        return self._entry(name, {"THREADS": PLACING}, arguments, ("place", "scan"), PLACING, 8 * self.pitch)

    def _entry(
        self,
        name: str,
        constants: dict[str, int],
        arguments: tuple[Argument, ...],
        files: tuple[str, ...],
        threads: int,
        shared_bytes: int,
    ) -> Entry:
        logits = f"constexpr Dtype LOGITS = Dtype::{DTYPES[self.problem.dtype.name].stored};\n"
        parameters = f"#define PARAMETERS {', '.join(argument.declaration for argument in arguments)}\n"
        parts = (*FILES, logits, parameters, *(f"routing/{file}.cuh" for file in files))
        constants = {"EXPERTS": self.problem.experts, "K": self.problem.k} | constants
        blocks = self.problem.size * self.config.blocks
        return Entry(
            self.problem, name, sources.source(name, constants, parts), arguments, blocks, threads, shared_bytes
        )

    def _pointers(self, results: Sequence[tuple[int, str]]) -> Iterator[Argument]:
        first = 1 + (self.problem.bias is not None)
        for i, declaration in results:
            yield Argument(declaration, Pointer(first + i))

    def _sizes(self) -> Iterator[Argument]:
        yield integer("tokens", self.problem.tokens)
        yield integer("blocks", self.config.blocks)
        yield integer("chunk", self.chunk)

    def _arguments(self) -> Iterator[Argument]:
        p = self.problem
        yield Argument("const char* logits", Pointer(0))
        yield Argument("const float* bias", Pointer(int(p.bias is not None)))
        yield from self._pointers(list(enumerate(_RESULTS[: 6 - self.alone])))
        if self.alone:
            yield Argument("u16* counts", Pointer(0))
        yield from self._sizes()
        apart = p.tokens * p.experts * p.dtype.itemsize
        yield Argument("long long logits_step", Int64(apart * (p.counts[0] > 1)))
        *_, tokens, experts = p.bias or (1, 1)
        yield Argument("long long bias_step", Int64(tokens * experts * (p.counts[1] > 1)))
        yield Argument("long long bias_token_step", Int64(experts * (tokens > 1)))
        yield Argument("long long bias_expert_step", Int64(int(experts > 1)))

    def call(self) -> Call:
        """Returns the compiled kernels and the plan of their launches."""
        launches = tuple(entry.launch(entry.compile().image) for entry in self.entries)
        if self.alone:
            return Call(launches)
        return Call(launches, results=self.results, finish=lambda written, _: written[:5])

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that kernels write, what blocks count behind those of the routing."""
        p = self.problem
        pairs = (*p.batch, p.tokens, p.k)
        shapes = pairs, pairs, (*p.batch, p.pairs), pairs, (*p.batch, p.experts)
        dtypes = np.int32, np.float32, np.int32, np.int32, np.int32
        found = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        counts = (p.size * self.config.blocks, self.pitch)
        return (*found, *([] if self.alone else [jax.ShapeDtypeStruct(counts, np.uint16)]))

    @property
    def time_us(self) -> float:
        """Predicted microseconds: of bytes, or of instructions."""
        p, c, device = self.problem, self.config, self.problem.device
        if not device.sms:
            return math.inf
        passes = 1 + 2 * (p.scoring == "softmax" and (p.bias is not None or not p.renormalize))
        looked_at = self.pieces * self.vector
        often = 40 * self.list  # keys until which some lane of a warp has a greater one each time
        kept = looked_at if looked_at <= often else often * (1 + math.log(looked_at / often))
        taken = p.k * (self.sorting * math.log2(c.lanes) + self.words * self.list + 3) / 3
        held = -(-p.k // c.lanes)
        instructions = 1.2 * kept * self.sorting * self.list + looked_at * (9 * self.words + 12 * (passes - 1))
        instructions += taken + 110 * held + 35
        steps, warps = -(-self.chunk // self.at_once), c.threads / 32
        resident = -(-p.size * c.blocks // device.sms)  # blocks that an SM has, at once or one after the other
        cycles = steps * (instructions * (LATENCY + warps * resident / RATE) + STEP_CYCLES)
        us = LAUNCH_US + max(cycles / MHZ + LOAD_US * steps, 1e6 * p.bytes / device.bytes_per_second)
        if self.alone:
            return us + LOAD_US * -(-p.pairs // (4 * c.threads))
        counted = 2.0 * p.size * c.blocks**2 * self.pitch / L2_BYTES_PER_US
        return us + PLACING_US + max(counted, 1e6 * 12 * p.size * p.pairs / device.bytes_per_second)


_RESULTS = "int* indices", "float* weights", "int* permutation", "int* inverse", "int* group_sizes", "u16* counts"


def configs(problem: Problem) -> Iterator[Config]:
    """Yields the ways to divide the tokens."""
    pieces = problem.experts // problem.vector
    for threads in (1024, 512, 256, 128):
        lanes = 1
        while lanes <= min(32, 2 * pieces - 1):
            steps = -(-problem.tokens // (threads // lanes))
            most = max(1, problem.device.sms // problem.size)
            for blocks in dict.fromkeys((1, min(steps, most), min(steps, 2 * most))):
                chunk = -(-steps // blocks) * (threads // lanes)  # whole steps
                yield Config(threads, lanes, -(-problem.tokens // chunk))
            lanes *= 2


def resolve(problem: Problem, config: Config) -> Kernel | tuple[str, ...]:
    """Returns the kernel of a config, or every reason why it cannot serve the problem."""
    kernel = Kernel(problem, config)
    return tuple(kernel.reasons()) or kernel


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, backend: str) -> Choice[Problem, Kernel]:
    """Returns the kernel that runs under a backend, or the reasons why XLA does."""
    if against := why_not(problem):
        return Choice(problem, tuple(against))
    each = (resolve(problem, config) for config in configs(problem))
    found = fastest(problem, each, "one pass over the logits", 1e6 * problem.bytes / problem.device.bytes_per_second)
    if found.resolved is None or backend == "cuda":
        return found
    if found.time_us is not None and problem.xla_us < LEAD * found.time_us:
        why = f"XLA's sorts are predicted to take {problem.xla_us:.1f} us, a kernel {found.time_us:.1f}"
        return Choice(problem, (why,))
    return found


def why_not(problem: Problem) -> list[str]:
    """Returns the reasons against every kernel."""
    p = problem
    if 0 in (p.size, p.tokens, p.experts, p.k):
        return ["a size is 0: nothing to launch"]
    found = []
    if not p.device.sms:
        found.append(f"{p.device.arch}: an architecture that is not known")
    if p.dtype.name not in LOGITS:
        found.append(f"logits of {p.dtype}: kernels read {', '.join(map(short, LOGITS))}")
    if p.k > MOST_CHOICES:
        found.append(f"k = {p.k}: kernels choose up to {MOST_CHOICES}")
    if p.experts >= 2**16:
        found.append(f"{p.experts} experts: kernels number them with 16 bits")
    if any(count not in (1, p.size) for count in p.counts):
        found.append(f"batch {p.batch}: of the logits and the bias, each has all of it or none")
    counters = {"pairs": p.size * p.pairs + 4 * PLACING * p.k, "tokens": p.tokens + 2**16}
    return [*found, *reasons.of_counters(counters)]
