// Numbering of the tiles of a square matrix on or below the diagonal, row by row: row i (from 0) has i + 1 tiles.
#pragma once

// Returns the row of tile t: the largest i with i (i + 1) / 2 <= t, for t from 0 to 1e9. The result of the rounded
// square root is wrong by at most 1, which is then corrected.
__device__ __forceinline__ int triangle_row(int t) {
    int i = (int)((sqrtf(8.0f * t + 1.0f) - 1.0f) / 2.0f);
    if (i * (i + 1) / 2 > t) --i;
    if ((i + 1) * (i + 2) / 2 <= t) ++i;
    return i;
}
