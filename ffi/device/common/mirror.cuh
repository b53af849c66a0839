// Symmetric results: of blocks of 64 x 64 of the result, those below the diagonal are stored at their place and, their
// transpose, at its mirror image; those on the diagonal once; those above not at all. So every element is written once.
// A staged chunk lies in one such block: it has 64 rows, and D_CHUNK divides 64.

static_assert(64 % D_CHUNK == 0, "a chunk may not cross a block's edge");

// Blocks right of the diagonal at which the chunk's row and column lie.
DEVICE int right_of_diagonal(int row, int column) { return column / 64 - row / 64; }
