// The parts of a weight gradient, added up in order, and the epilogue. SLICES threads have parts of one element each.

constexpr int ELEMENTS = THREADS / SLICES;

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(PARAMETERS) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Acc* shared = reinterpret_cast<Acc*>(shared_memory);
  int element = threadIdx.x % ELEMENTS, slice = threadIdx.x / ELEMENTS;
  i64 at = static_cast<i64>(blockIdx.x) * ELEMENTS + element, elements = static_cast<i64>(taps) * pairs;
  int tap = static_cast<int>(at / pairs), pair = static_cast<int>(at % pairs);
  int each = (parts + SLICES - 1) / SLICES, end = min(parts, (slice + 1) * each);
  Acc sum{};
  if (at < elements) {
#pragma unroll 4
    for (int part = slice * each; part < end; ++part) sum += sum_of_parts[part * elements + at];
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (slice > 0 || at >= elements) return;
#pragma unroll
  for (int other = 1; other < SLICES; ++other) sum += shared[other * ELEMENTS + element];
  Extras extras(taps, columns EXTRAS_ARGUMENTS);
  int column = pair / CHANNELS;
  extras.begin(column);
  const Done done{{sum}};
  Partials none;
  finish(extras, none, done, tap * CHANNELS + pair % CHANNELS, column);
}
