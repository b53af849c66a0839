// Factors of decoded elements (multiply_registers.cuh): none.

DEVICE void load_factors(u32, u32 (&)[2]) {}
DEVICE u32 scaled(u32 x, u32) { return x; }
DEVICE float factor_of(u32) { return 1; }
