// Accumulator to memory: converted, staged in shared memory in the layout TMA wants, stored by TMA, which clips the
// tile to the matrix. A warpgroup owns STORE_BUFFERS staging tiles [64][D_CHUNK] and overlaps filling one with storing
// the others.

constexpr int D_BYTES = OUT == Dtype::f32 ? 4 : 2;
constexpr int D_SPAN = BN * D_BYTES % 128 == 0 ? 128 : BN * D_BYTES % 64 == 0 ? 64 : 32;  // bytes of a staging row
constexpr int D_CHUNK = D_SPAN / D_BYTES;
constexpr int D_BUFFER_BYTES = 64 * D_SPAN;

constexpr bool ONE_BARRIER = PING_PONG || STORE_BUFFERS > 2;

DEVICE u32 pack(float low, float high) { return OUT == Dtype::bf16 ? cvt_bf16x2(low, high) : cvt_f16x2(low, high); }

struct Epilogue {
  u32 staging;  // this warpgroup's buffers
  int barrier;  // this warpgroup's named barrier
  int thread;   // of the warpgroup
  int next = 0;

  // Stages columns [chunk * D_CHUNK, +D_CHUNK) of one 64 x BN accumulator. In it, lane l of warp w holds, for each 8
  // columns j, rows 16 w + l / 4 (+ 8) and columns 8 j + 2 (l % 4) (+ 1): values 4 j + {0, 1} and, 8 rows down, {2, 3}.
  DEVICE void stage(const float (&accumulator)[BN / 2], int chunk, u32 buffer) const {
    int warp = thread / 32, lane = thread % 32;
    if constexpr (OUT == Dtype::f32) {
      int row = warp * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < D_CHUNK / 8; ++j) {
        const float* e = accumulator + (chunk * D_CHUNK / 8 + j) * 4;
        u32 offset = row * D_SPAN + (j * 8 + lane % 4 * 2) * 4;
        st_shared_v2(buffer + swizzle<D_SPAN>(offset), e[0], e[1]);
        st_shared_v2(buffer + swizzle<D_SPAN>(offset + 8 * D_SPAN), e[2], e[3]);
      }
    } else {
      u32 offset =
          (warp * 16 + lane % 16) * D_SPAN + lane / 16 * 16;  // stmatrix: lane l addresses row l % 16, half l / 16
#pragma unroll
      for (int j = 0; j < D_CHUNK / 16; ++j) {
        const float* e = accumulator + (chunk * D_CHUNK / 8 + j * 2) * 4;
        stmatrix_x4(buffer + swizzle<D_SPAN>(offset + j * 32), pack(e[0], e[1]), pack(e[2], e[3]), pack(e[4], e[5]),
                    pack(e[6], e[7]));
      }
    }
  }

  // A barrier says that a chunk is staged. It also says that the next buffer may be written again where waiting for
  // that costs nothing: with buffers to spare, or with another warpgroup's mainloop to hide it. Else a barrier of its
  // own does.
  DEVICE void store(const float (&accumulators)[M_BLOCKS][BN / 2], const TensorMap* map_d, int m, int n, int batch) {
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block) {
#pragma unroll
      for (int chunk = 0; chunk < BN / D_CHUNK; ++chunk) {
        u32 buffer = staging + next * D_BUFFER_BYTES;
        next = next + 1 == STORE_BUFFERS ? 0 : next + 1;
        if constexpr (!ONE_BARRIER) {
          if (thread == 0) cp_async_bulk_wait_group_read<STORE_BUFFERS - 1>();
          bar_sync(barrier, 128);
        }
        stage(accumulators[block], chunk, buffer);
        fence_proxy_async();
        if (ONE_BARRIER && thread == 0) cp_async_bulk_wait_group_read<STORE_BUFFERS - 2>();
        bar_sync(barrier, 128);
        if (thread == 0) {
          tma_store(map_d, buffer, n + chunk * D_CHUNK, m + block * 64, batch);
          cp_async_bulk_commit_group();
        }
      }
    }
  }

  DEVICE void finish() const {
    if (thread == 0) cp_async_bulk_wait_group();
  }
};
