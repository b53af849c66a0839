// Operands of a prologue, in registers.

// Eight neighbours of a line from `element` on. Past its end they are any: what they change is not there.
// By plain loads: those of constants move ahead of the fence before them in the text, which may then wait for them.
template <int UNIT, Dtype D>
DEVICE void load_eight(Pair<D> (&x)[4], const char* line, int element, int columns) {
  constexpr int SIZE_OF = SIZE<D>;
  if constexpr (UNIT == 8) {  // lines are whole units
    const char* p = line + min(element, columns - 8) * static_cast<i64>(SIZE_OF);
    if constexpr (SIZE_OF == 1) {
      u32 word[2];
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(p) : "memory");
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j].bits[0] = word[j / 2] >> j % 2 * 16 & 0xffff;
    } else {
      constexpr int OF_PAIR = SIZE_OF / 2;  // words
#pragma unroll
      for (int i = 0; i < SIZE_OF / 2; ++i) {
        u32 word[4];
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(p + 16 * i)
                     : "memory");
#pragma unroll
        for (int w = 0; w < 4; ++w) x[(4 * i + w) / OF_PAIR].bits[(4 * i + w) % OF_PAIR] = word[w];
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int first = min(element + 2 * j, columns - UNIT), second = min(element + 2 * j + 1, columns - 1);
      if constexpr (UNIT == 2) {
        x[j].load(line + first * static_cast<i64>(SIZE_OF));
      } else {
        x[j].load_each(line + first * static_cast<i64>(SIZE_OF), line + second * static_cast<i64>(SIZE_OF));
      }
    }
  }
}
