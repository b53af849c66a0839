// The order of the rows of accumulators where A was decoded from a tile that lies along m: ldmatrix gave each lane
// neighbours of it.

// Element i becomes the one that was i + by, modulo 4.
DEVICE void rotate(Acc (&x)[4], int by) {
  Acc once[4], found[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) once[i] = by & 1 ? x[(i + 1) % 4] : x[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) found[i] = by & 2 ? once[(i + 2) % 4] : once[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = found[i];
}

// Of a warp's 16 rows of a block, or 32 of both.
DEVICE void put_in_order(Accumulators& sums) {
  int lane = threadIdx.x % 32, row = lane / 4;
  if constexpr (A_BITS == 8) {
    // Rows 2 g and 2 g + 1 of 16. Each lane gives one of even g and one of odd g a row.
    int near = row / 2 * 4 + lane % 4, far = near ^ 16;
    bool low = row < 4, even = row % 2 == 0;
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < PRODUCTS * BN / 2; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; ++e) {
          Acc &first = sums[block][e], &second = sums[block][e + 2];
          Acc x = __shfl_sync(~0u, low ? first : second, even ? near : far);
          Acc y = __shfl_sync(~0u, low ? second : first, even ? far : near);
          first = even ? x : y;
          second = even ? y : x;
        }
  } else {
    // Rows 4 g + i of 32 go to lane (4 g + i) % 8 as its g / 2-th. In turn t a lane gives its row i = t + g / 2,
    // modulo 4, so that each gets one.
#pragma unroll
    for (int i = 0; i < PRODUCTS * BN / 2; i += 4)
#pragma unroll
      for (int e = i; e < i + 2; ++e) {
        Acc x[4] = {sums[0][e], sums[0][e + 2], sums[1][e], sums[1][e + 2]}, y[4];
        rotate(x, row / 2);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          int place = (row - t) & 3;  // of the row that comes
          y[(4 - t) % 4] = __shfl_sync(~0u, x[t], (2 * place + row / 4) * 4 + lane % 4);
        }
        rotate(y, -row & 3);
        sums[0][e] = y[0], sums[0][e + 2] = y[1], sums[1][e] = y[2], sums[1][e + 2] = y[3];
      }
  }
}
