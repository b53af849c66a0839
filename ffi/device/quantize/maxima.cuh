// The pass before that which quantizes, where scales are of more than a tile: the greatest magnitudes of matrices
// (SQUARE), or of their rows (OWN) and columns (TURNED), added to what other blocks have found. Memory has zeros
// before.

extern "C" __global__ void __launch_bounds__(THREADS, HALVES&& FROM == OF ? 5 : 3) KERNEL(PARAMETERS) {
  __shared__ u32 of_columns[TILE * WORDS_OF_EDGE], of_rows[TILE];
  Place place(blockIdx.x, rows, columns);
  Elements elements;
  elements.load(x + place.first(rows, columns) * SIZE<FROM>, static_cast<i64>(columns) * SIZE<FROM>);
  Maxima maxima{of_columns, of_rows};
  maxima.find(elements);
  if constexpr (SQUARE) {
    u32 most = maxima.of_tile();
    if (threadIdx.x == 0) atomicMax(most_of_rows + place.matrix, most);
  } else {
    if constexpr (OWN) maxima.write_rows(place.edge, place.line);
    if constexpr (TURNED) maxima.write_columns(place.edge);
    __syncthreads();
    int i = threadIdx.x % TILE;
    if (OWN && threadIdx.x < TILE)
      atomicMax(most_of_rows + static_cast<i64>(place.matrix) * rows + place.row + i, maxima.of_row(i));
    if (TURNED && threadIdx.x >= TILE)
      atomicMax(most_of_columns + static_cast<i64>(place.matrix) * columns + place.column + i, maxima.of_column(i));
  }
}
