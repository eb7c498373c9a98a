// Which rows of a slot a step computes. Included by tokens/slots.cu and tokens/guesses.cu.
#pragma once

// The position of row i of a slot whose last token is at `position`: -1, so that nothing is computed, where there is no
// guess or where no more than i tokens are `left` to draw. token: that of the row.
__device__ __forceinline__ int position_of(int i, int token, int position, int left) {
    return i < left && (i == 0 || token >= 0) ? position + i : -1;
}
