// The rows of a slot that a step computes. Included by tokens/slots.cu and tokens/guesses.cu.
#pragma once

// Returns the position of row i of a slot whose last token is at `position`, or -1 if the row is not computed: if it
// has no guess, or if at most i tokens are `left` to draw. token: the token of row i.
__device__ __forceinline__ int position_of(int i, int token, int position, int left) {
    return i < left && (i == 0 || token >= 0) ? position + i : -1;
}
