// Tiles on or below the diagonal, numbered row by row: row i has i + 1 tiles.
#pragma once

// Returns the row of tile t: the largest i with i (i + 1) / 2 <= t, for t from 0 to 1e9. The rounded square root is off
// by at most one.
__device__ __forceinline__ int triangle_row(int t) {
    int i = (int)((sqrtf(8.0f * t + 1.0f) - 1.0f) / 2.0f);
    if (i * (i + 1) / 2 > t) --i;
    if ((i + 1) * (i + 2) / 2 <= t) ++i;
    return i;
}
