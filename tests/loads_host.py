"""Runs the loads of the sm_90 kernels on the host, by g++: every tile of a product, multiplied as it lands.

What is the kernels' own is the order of tiles, what each loads and where to, and the bytes that barriers wait for. TMA
is a stand-in (tests/native/loads_shim.h), without swizzles; there is no wgmma and no epilogue.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Sequence

import gxx
import numpy as np

from cutjax.kernels.sm90.kernel import Kernel
from cutjax.runtime.launch import Int32, Int64, TensorMap
from cutjax.runtime.tensor_map import Im2col

# Of a kernel's text, by the names of its files.
_KEPT = ("constants of", "common/scheduler", "common/dense_scheduler", "common/stream_scheduler")
_KEPT += ("sm90/phase_scheduler", "common/parts", "sm90/tiles", "sm90/load_plain", "sm90/load_im2col")
_KEPT += ("sm90/load_taps", "sm90/producer", "sm90/pixels")
_ELEMENTS = {1: "signed char", 2: "short", 4: "float"}

_RUN = """
using Element = {element};
// Of a tile in the shared memory of a CTA.
template <typename Operand>
static double element(u32 tile, int row, int k) {{
  constexpr int ROWS = Operand::ROWS, CHUNK = Operand::CHUNK;
  int product = row / Operand::ROWS_EACH, lines = row % Operand::ROWS_EACH;
  int chunk = product * Operand::CHUNKS_EACH + lines / CHUNK;
  int place = Operand::K_MAJOR ? k / CHUNK * ROWS * CHUNK + row * CHUNK + k % CHUNK
                               : chunk * BK * CHUNK + k * CHUNK + lines % CHUNK;
  return reinterpret_cast<Element*>(&shared_memory[current][tile])[place];
}}

extern "C" void run(const char* const* buffers, double* results, int clusters) {{
  {maps}
  const SourceA source_a = SOURCE_A;
  const SourceB source_b = SOURCE_B;
  constexpr int CTAS = CLUSTER * CLUSTER_K;
  gridDim.x = clusters * CTAS;
  for (auto& memory : shared_memory) memory.assign(STAGES * STAGE_BYTES, 0);
  for (int cluster = 0; cluster < clusters; ++cluster)
    for (int rank_k = 0; rank_k < CLUSTER_K; ++rank_k) {{
      blockIdx.x = cluster * CTAS + rank_k;
      Scheduler scheduler(m, n, k, raster, batch, SPLITS, batch1, batch2 SCHEDULER_ARGUMENTS);
      for (int index = cluster; scheduler.has(index); index += clusters) {{
        for (auto& bytes : landed) bytes.assign(2 * STAGES, 0);
        for (current = 0; current < CLUSTER; ++current) {{
          u32 rank_m = CLUSTER_M > 1 ? current : 0, rank_n = CLUSTER_N > 1 ? current : 0;
          Work work = scheduler.work(index, rank_m, rank_n);
          ViewA::limit(source_a, work);
          work = part(work, rank_k, SPLITS, batch);
          if (work.k_blocks * PAIRS > STAGES) fail("too few stages");
          Pipeline pipe{{0, STAGES * 8, 0, 0}};
          fill(pipe, SharedTiles{{0}}, source_a, source_b, work, m, 0, 0, rank_m, rank_n);
        }}
        for (current = 0; current < CLUSTER; ++current) {{
          u32 rank_m = CLUSTER_M > 1 ? current : 0, rank_n = CLUSTER_N > 1 ? current : 0;
          Work work = scheduler.work(index, rank_m, rank_n);
          ViewA::limit(source_a, work);
          work = part(work, rank_k, SPLITS, batch);
          double* d = results + (PHASED ? i64(work.result) * m * n : 0);
          for (i64 bytes : landed[current])
            if (bytes) fail("a barrier waits for other bytes than those that land");
          for (int stage = 0; stage < work.k_blocks; ++stage)
            for (int depth = 0; depth < BK; ++depth)
              for (int i = 0; i < BM && work.m + i < m; ++i)
                if (double a = element<OperandA>(SharedTiles{{0}}.a(stage), i, depth))
                  for (int j = 0; j < BN && work.n + j < n; ++j)
                    d[i64(work.m + i) * n + work.n + j] += a * element<OperandB>(SharedTiles{{0}}.b(stage), j, depth);
        }}
      }}
    }}
}}
"""


_PLACES = """
extern "C" void places(int* found) {{
  for (int i = 0; i < PHASES * m; ++i) found[i] = Pixels{{{told}}}(i % m, i / m);
}}
"""


def _map(name: str, x: TensorMap) -> str:
    def listed(values: Sequence[int]) -> str:
        return "{" + ", ".join(map(str, values)) + "}"

    walk, size = x.box, x.dtype.itemsize
    box, lower, upper = (
        ((walk.channels, walk.pixels), walk.lower, walk.upper) if isinstance(walk, Im2col) else (walk, (), ())
    )
    steps = x.element_strides[1:-1]
    fields = f"{size}, {len(x.dims)}, {listed(x.dims)}, {listed((size, *x.strides))}, {listed(box)}"
    corners = f"{str(isinstance(walk, Im2col)).lower()}, {listed(lower)}, {listed(upper)}, {listed(steps)}"
    return f"TensorMap {name}{{buffers[{x.buffer}] + {x.byte_offset}, {fields}, {corners}}};"


def multiplied(kernel: Kernel, arrays: Sequence[np.ndarray], folder: pathlib.Path, clusters: int = 3) -> np.ndarray:
    """The product ``float64[m, n]`` of the arrays that a kernel loads, all parts of k added up."""
    p = kernel.multiplied
    stages = 1 + -(-p.k // kernel.config.depth(p))
    parts = re.split(r'^(?=#line 1 ")', kernel.source, flags=re.M)
    kept = [part for part in parts if part.startswith(tuple(f'#line 1 "{name}' for name in _KEPT))]
    kept.sort(key=lambda part: part.startswith('#line 1 "sm90/pixels'))  # behind the shim that it needs
    body = re.sub(r"^#line.*$", "", "".join(kept), flags=re.M)
    body = re.sub(r"constexpr int STAGES = \d+;", f"constexpr int STAGES = {stages};", body)
    defined = re.findall(r"^#define (?:SOURCE_\w|SPLITS|SCHEDULER_ARGUMENTS) .*$", kernel.source, flags=re.M)
    defined += ["#define IMAGES IMAGE_AXES"] * ("IMAGE_AXES" in body)
    values, maps = [], []
    for argument in kernel.arguments:
        if isinstance(argument.value, TensorMap) and argument.to in ("a", "b"):
            maps.append(_map(argument.name, argument.value))
        elif isinstance(argument.value, (Int32, Int64)):
            values.append(f"static const long long {argument.name} = {argument.value.value};")
    scratch = "static float* scratch; static int* tickets;"
    shim = (gxx.NATIVE / "loads_shim.h").read_text()
    constants, code = re.split(r"(?=^// Which tile next)", body, maxsplit=1, flags=re.M)
    element = _ELEMENTS[p.a.dtype.itemsize]
    run = _RUN.format(element=element, maps="\n  ".join(maps))
    if kernel.phases:
        run += _PLACES.format(told=", ".join(x.name for x in kernel.arguments if x.name.startswith("pixels_")))
    text = "\n".join([constants, *defined, shim, "using Acc = float;", code, *values, scratch, run])
    library = gxx.build(folder, text, "-Wno-narrowing")
    d = np.zeros((kernel.matrices, p.m, p.n), np.float64)
    pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
    library.run(pointers, d.ctypes.data_as(ctypes.c_void_p), clusters)
    if kernel.phases is None:
        return d[0]
    places = np.empty((kernel.matrices, p.m), np.int32)
    library.places(places.ctypes.data_as(ctypes.c_void_p))
    runs, apart = kernel.phases.runs, kernel.phases.image[-1]
    found = np.full((kernel.asked.m * kernel.asked.n * runs // p.n, p.n // runs), np.nan)
    for run, values in enumerate(np.split(d, runs, axis=-1)):
        found[places[places >= 0] + run * apart] = values[places >= 0]
    return found
