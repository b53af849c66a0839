// Factors of decoded elements (multiply_registers.cuh) in f32.

DEVICE void load_factors(u32 at, u32 (&x)[2]) { ld_shared_v2(at, x[0], x[1]); }

DEVICE u32 scaled(u32 x, u32 factor) { return halves_by_f32(x, __uint_as_float(factor)); }

DEVICE float factor_of(u32 x) { return __uint_as_float(x); }
