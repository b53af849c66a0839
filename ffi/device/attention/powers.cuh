// What a softmax is added up with, part by part: each part has the largest of its scores, and powers of the others less
// it.

DEVICE float lowest() { return __int_as_float(0xff800000); }  // -inf

// Where all scores are -inf so far, powers are 0, not NaN: another part may have more.
DEVICE float finite_shift(float largest) { return largest == lowest() ? 0.0f : largest; }

DEVICE float power(float x) { return ex2_approx(x * LOG2_E); }
