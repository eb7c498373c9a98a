// Selects the rows that a decoding step computes for a slot (the place of one sequence in the batch): its last token,
// and draft tokens of the tokens after it. Included by tokens/slots.cu and tokens/drafts.cu.
#pragma once

// Returns the position of row i of a slot. Row 0 is the slot's last token, at `position`; row i > 0 is draft token i,
// with the id `token`, or without a draft token if `token` is negative. Returns -1 for rows that are not computed: rows
// without a draft token, and all rows i >= left, where `left` is the number of tokens still to generate.
__device__ __forceinline__ int position_of(int i, int token, int position, int left) {
    return i < left && (i == 0 || token >= 0) ? position + i : -1;
}
