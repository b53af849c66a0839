"""The device as benchmarks/direct_worker.py uses it: launches into memory of its own, results compared with XLA's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle
from benchmarks.cases import Dense
from benchmarks.direct import Board
from benchmarks.driver import Driver, Prepared
from cutjax.kernels.device import Device
from cutjax.runtime.compiler import compile_kernel
from cutjax.runtime.launch import Call, Float32, Int32, Int64, Launch, Pointer

RING_BYTES = 256 << 20  # of the memory results rotate through, at least: none is written where L2 holds the last

# Two 16-bit results of the same product, each rounded once, are a unit in the last place apart (2^-7 of bf16, 2^-10 of
# f16), and by what oracle.py allows for accumulation, here twice. One more unit in case XLA's is rounded twice.
_RELATIVE = {"bfloat16": 2.0**-6, "float16": 2.0**-9}

_COMPARE = """
typedef unsigned short u16;
typedef unsigned long long u64;
__device__ float widen(u16 x, int f16) {
  if (!f16) return __uint_as_float(static_cast<unsigned>(x) << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
// The largest distance of x from y over what is allowed. x is in 16 bits, or the sum of so many parts in f32.
extern "C" __global__ void compare(const void* x, const u16* y, unsigned* worst, u64 count, int parts, int f16,
                                   float relative, float absolute) {
  float most = 0;
  for (u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    float ours = 0;
    if (parts == 0) ours = widen(static_cast<const u16*>(x)[i], f16);
    for (int part = 0; part < parts; ++part) ours += static_cast<const float*>(x)[part * count + i];
    const float expected = widen(y[i], f16);
    float error = fabsf(ours - expected) / (absolute + relative * fabsf(expected));
    if (!(error < 1e30f)) error = 1e30f;  // NaN
    most = fmaxf(most, error);
  }
  atomicMax(worst, __float_as_uint(most));
}
"""


@dataclasses.dataclass
class Entry:
    """A config as it is timed.

    Attributes:
      place: in the job.
      launches: of its call.
      kernels: their names.
      results: what they write.
      zeroed: which of them is zeros before, being an argument too; -1 is none.
    """

    place: int
    launches: list[Prepared]
    kernels: list[str]
    results: list[jax.ShapeDtypeStruct]
    zeroed: int


@dataclasses.dataclass
class Programs:
    """Everything of a product that is compiled.

    Attributes:
      make: inputs of a seed.
      xla: XLA's product.
      seconds: that both took.
      calls: of the job's configs by their place, or why there is none.
      finishes: what JAX does after some of these calls, and what makes its arguments.
    """

    make: Callable[[Any], Any]
    xla: Callable[..., jax.Array]
    seconds: float
    calls: dict[int, Call | str] = dataclasses.field(default_factory=dict)
    finishes: dict[int, tuple[Callable[..., Any], Callable[[], Any]]] = dataclasses.field(default_factory=dict)


def compile_programs(case: Dense) -> Programs:
    """Compiles what XLA runs for a product; tunes it on the device."""
    start = time.monotonic()
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in (case.a_shape, case.b_shape)]

    def make(seed):
        keys = jax.random.split(jax.random.key(seed, impl="rbg"))
        return tuple(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, avals, strict=True))

    made = jax.jit(make).lower(jax.ShapeDtypeStruct((), jnp.uint32)).compile()
    xla = jax.jit(oracle.xla(case.layout, case.dtype)).lower(*avals).compile()
    return Programs(made, xla, time.monotonic() - start)


class Bench:
    """The device: its driver, memory for results, and the comparison."""

    def __init__(self, driver: Driver, device: Device, board: Board):
        self.driver, self.device, self.board = driver, device, board
        self._ring = self._ring_bytes = self._at = 0
        self._worst = driver.allocate(256)
        cubin = compile_kernel(_COMPARE, name="compare", arch=device.arch).image
        self._compare = functools.partial(Launch, "compare", cubin, (8 * device.sms, 1, 1), (256, 1, 1))

    def reserve(self, size: int) -> None:
        """Makes room for results of so many bytes, and for more beside them."""
        size = 2 * size if size < RING_BYTES else size
        size = max(size, RING_BYTES)
        if size > self._ring_bytes:
            if self._ring:
                self.driver.free(self._ring)
            self._ring = self._ring_bytes = self._at = 0
            self._ring = self.driver.allocate(size)
            self._ring_bytes = size

    def place(self, results: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Returns addresses for results: the next in the ring."""
        sizes = [padded(x) for x in results]
        if self._at + sum(sizes) > self._ring_bytes:
            self._at = 0
        addresses = [self._ring + self._at + offset for offset in itertools.accumulate(sizes[:-1], initial=0)]
        self._at += sum(sizes)
        return addresses

    def prepare(self, case: Dense, place: int, call: Call) -> Entry:
        """Loads a call's kernels and encodes its tensor maps."""
        results = list(call.results) or [jax.ShapeDtypeStruct((*case.batch, case.m, case.n), jnp.dtype(case.dtype))]
        launches = [Prepared(self.driver, launch, self.device.sms) for launch in call.launches]
        zeroed = next((result for argument, result in call.aliases if argument == 2), -1)
        return Entry(place, launches, [launch.kernel for launch in call.launches], results, zeroed)

    def launch(self, entry: Entry, arrays: Sequence[jax.Array], results: Sequence[int]) -> None:
        """Runs a call's kernels and waits for them."""
        self.start(entry, arrays, results)
        self.driver.synchronize()

    def start(self, entry: Entry, arrays: Sequence[jax.Array], results: Sequence[int]) -> None:
        """Launches a call's kernels."""
        addresses = [x.unsafe_buffer_pointer() for x in arrays]
        if entry.zeroed >= 0:
            addresses.append(results[entry.zeroed])
            self.driver.fill(results[entry.zeroed], 0, padded(entry.results[entry.zeroed]))
        addresses += results
        for prepared in entry.launches:
            prepared(addresses)

    def check(self, entry: Entry, case: Dense, arrays: Sequence[jax.Array], expected: jax.Array) -> str:
        """Returns the error of a config's result in words, or ""."""
        addresses = self.place(entry.results)
        for address, result in zip(addresses, entry.results, strict=True):
            self.driver.fill(address, 0xFFFFFFFF, padded(result))  # NaN, which nothing may leave
        self.launch(entry, arrays, addresses)
        which = next(
            (i for i, x in enumerate(entry.results) if (x.size, x.dtype) == (expected.size, expected.dtype)), -1
        )
        parts = 0
        if which < 0:
            which = next(i for i, x in enumerate(entry.results) if x.dtype == np.float32 and not x.size % expected.size)
            parts = entry.results[which].size // expected.size
        absolute = 2e-4 * math.sqrt(case.k) * max(1.0, case.k / 16384)
        compare = self._compare(
            params=(
                *(Pointer(i) for i in range(3)),
                *(Int64(expected.size), Int32(parts), Int32(int(case.dtype == "float16"))),
                *(Float32(_RELATIVE[case.dtype]), Float32(absolute)),
            )
        )
        self.driver.fill(self._worst, 0, 4)
        buffers = (addresses[which], expected.unsafe_buffer_pointer(), self._worst)
        Prepared(self.driver, compare, self.device.sms)(buffers)
        (worst,) = struct.unpack("<f", self.driver.read(self._worst, 4))
        return "" if worst <= 1 else f"wrong: an element is {worst:.3g} times what is allowed from XLA's"


def padded(x: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes that a result takes in the ring."""
    return -(-x.size * x.dtype.itemsize // 1024) * 1024
