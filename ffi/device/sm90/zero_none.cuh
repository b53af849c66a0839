// Zero points of decoded elements (multiply_registers.cuh): none.

DEVICE void load_zeros(u32, u32 (&)[2], u32) {}
