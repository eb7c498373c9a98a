// Selects the rows that a decoding step computes for a slot (the place of one sequence in the batch): its last token,
// and guesses of the tokens after it. Included by tokens/slots.cu and tokens/guesses.cu.
#pragma once

// Returns the position of row i of a slot. Row 0 is the slot's last token, at `position`; row i > 0 is guess i, with
// the id `token`, or without a guess if `token` is negative. Returns -1 for rows that are not computed: rows without a
// guess, and all rows i >= left, where `left` is the number of tokens still to generate.
__device__ __forceinline__ int position_of(int i, int token, int position, int left) {
    return i < left && (i == 0 || token >= 0) ? position + i : -1;
}
