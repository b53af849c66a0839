// The first kernel of a routing: each token's experts and weights, and the place of each of its pairs among those of
// the same expert that this block has. A block takes the tokens of a range, TOKENS at a step; if it is ALONE it has
// all.
//
// A bit for each expert and token of a step says who chose whom. Bits before a token's are counted, so places are in
// the order of the tokens, whatever the order of the threads.

constexpr int TOKENS = THREADS / LANES;
constexpr int MASKS = (TOKENS + 31) / 32;
constexpr bool NORMED = SOFTMAX && (BIASED || !RENORMALIZE);  // by what the exponentials of all logits add up to

DEVICE float minus_infinity() { return __uint_as_float(0xff800000); }

struct Norm {
  float most, total;

  DEVICE static Norm of(const char* row) {
    float most = minus_infinity(), total = 0.0f;
    each(row, [&](int, u32 bits) { most = fmaxf(most, value_of(bits)); });
    most = largest(most);
    float shift = is_finite(most) ? most : 0.0f;
    each(row, [&](int, u32 bits) { total += expf(value_of(bits) - shift); });
    return {most, sum(total)};
  }

  // NaN of all experts where a logit is infinity, or all are minus infinity, as with jax.nn.softmax.
  DEVICE float softmax(float x) const { return expf(x - most) / total; }
  DEVICE float log_total() const { return logf(total) + (is_finite(most) ? most : 0.0f); }
};

DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float log_logistic(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(PARAMETERS) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  u32* chose = reinterpret_cast<u32*>(shared_memory);  // [EXPERTS][MASKS] the tokens of this step, a bit each
  u32* before = chose + EXPERTS * MASKS;               // [EXPERTS][MASKS] the tokens before those of a word
  u32* count = before + EXPERTS * MASKS;               // [EXPERTS] all tokens
  int batch = blockIdx.x / blocks, block = blockIdx.x % blocks, lane = threadIdx.x % LANES;
  int of_step = threadIdx.x / LANES, word = of_step / 32;
  u32 bit = 1u << of_step % 32;
  i64 first_pair = static_cast<i64>(batch) * tokens * K;
  logits += batch * logits_step, bias += batch * bias_step;
  indices += first_pair, weights += first_pair, inverse += first_pair;
#pragma unroll 1
  for (int i = threadIdx.x; i < EXPERTS; i += THREADS) count[i] = 0;
  int begin = min(tokens, block * chunk), end = min(tokens, begin + chunk);
  for (int first = begin; first < end; first += TOKENS) {
#pragma unroll 1
    for (int i = threadIdx.x; i < EXPERTS * MASKS; i += THREADS) chose[i] = 0;
    __syncthreads();
    bool there = first + of_step < end;
    int token = there ? first + of_step : first;
    const char* row = logits + static_cast<i64>(token) * EXPERTS * SIZE<LOGITS>;
    Norm norm{};
    if constexpr (NORMED) norm = Norm::of(row);
    int experts[HELD];
    choose(row, experts, [&](int expert, float x) {
      float score = SOFTMAX ? norm.softmax(x) : logistic(x);
      return score + bias[token * bias_token_step + expert * bias_expert_step];
    });

    float values[HELD], most = minus_infinity(), total = 0.0f;
    // Calls f(i) of each choice that the lane has.
    auto of_choices = [&](auto f) {
#pragma unroll
      for (int i = 0; i < HELD; ++i)
        if (K % LANES == 0 || i * LANES + lane < K) f(i);
    };
    of_choices([&](int i) {
      float x = logit(row, experts[i]);
      values[i] = SOFTMAX ? x : log_logistic(x);
      most = fmaxf(most, values[i]);
      if (there) atomicOr(chose + experts[i] * MASKS + word, bit);
    });
    if constexpr (RENORMALIZE) {
      most = largest(most);
      of_choices([&](int i) { total += values[i] = expf(values[i] - most); });
      total = sum(total);
      of_choices([&](int i) { values[i] = div_uniform(values[i], total); });
    } else {
      float shift = NORMED ? norm.log_total() : 0.0f;
      of_choices([&](int i) { values[i] = expf(values[i] - shift); });
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < EXPERTS; i += THREADS) {
      u32 found = count[i];
#pragma unroll
      for (int j = 0; j < MASKS; ++j) {
        before[i * MASKS + j] = found;
        found += __popc(chose[i * MASKS + j]);
      }
      count[i] = found;
    }
    __syncthreads();
    if (there) {
      of_choices([&](int i) {
        int at = experts[i] * MASKS + word;
        i64 pair = static_cast<i64>(token) * K + i * LANES + lane;
        indices[pair] = experts[i], weights[pair] = values[i];
        inverse[pair] = before[at] + __popc(chose[at] & (bit - 1));
      });
    }
    __syncthreads();
  }
  if constexpr (ALONE) {
    for (int i = threadIdx.x; i < EXPERTS; i += THREADS) {
      group_sizes[static_cast<i64>(batch) * EXPERTS + i] = count[i];
      before[i] = 0;
    }
    __syncthreads();
    place(indices, inverse, permutation + first_pair, before, count, 0, tokens * K);
  } else {
    counts += static_cast<i64>(blockIdx.x) * PITCH;
    for (int i = threadIdx.x; i < PITCH; i += THREADS) counts[i] = i < EXPERTS ? count[i] : 0;
  }
}
