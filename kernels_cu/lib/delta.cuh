// The rows and states of a gated delta net, a layer that keeps a matrix S for each head instead of keys and values.
//
//   x       (N, D + V)         rows [q | k | v | z] of new tokens; D channels of q, k and v; H heads of v
//   ba      (N, 2 H)           rows [b | a] of the same tokens
//   rows    (N + 7 B, D + 2 H) rows [q | k | v | decay | beta] made of x; then 7 rows of tokens to repeat for each slot
//   spans   (B, 6)             for each slot: the tokens that a pass computes, and the states that it reads and writes
//   state   (B, 2, P)          two states of each slot: the last three rows [q | k | v] of x, then S of each head
//   pool    (S, P)             states that other texts with the same first tokens can continue from
//   saved   (B, M)             for each slot: the entries of `pool` for the states after 256, 512 ... tokens and, last,
//                              after the last token of a pass; -1 for none
//   recent  (B, 16, D + 2 H)   rows [q | k | v | b | a] of the tokens after the newer state, by position modulo 16
//
// A step may compute draft tokens that are refused later. Therefore it writes the state after its first row only, and
// keeps the rows of its other tokens in `recent`. The next pass repeats the accepted ones with the same
// arithmetic. A pass reads one state and writes the other: a pass that runs again has the same result.
#pragma once

#ifndef DELTA_K  // channels of a head of q and k: a multiple of 4
#define DELTA_K 128
#endif
#ifndef DELTA_V  // channels of a head of v: a multiple of 4
#define DELTA_V 128
#endif

#define DELTA_REPLAYED 7  // maximum number of tokens that a pass repeats
#define DELTA_RECENT 16
static_assert(DELTA_K % 4 == 0 && DELTA_V % 4 == 0, "heads are whole vectors");

// A slot's row of `spans`, as delta_spans writes it.
struct Span {
    int first;   // row of x of the first new token
    int start;   // position of the first new token
    int end;     // position after the last new token; equal to start if the slot has no rows
    int base;    // number of tokens of the state that the pass reads
    int source;  // index of this state; -1: begin with zeros; -2: no state has the slot's tokens
    int target;  // index of the state that the pass writes
};

// Loads the span of a slot from spans (B, 6).
__device__ __forceinline__ Span span_of(const int* spans, int slot) {
    const int* const from = spans + 6 * slot;
    return {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2), __ldcg(from + 3), __ldcg(from + 4), __ldcg(from + 5)};
}

// Where rows [q | k | v] and [b | a] are: the rows of a pass, and earlier rows of a slot.
struct DeltaRows {
    const float* x;
    const float* ba;
    const float* state;   // or null
    const float* recent;  // or null
    long long W, P;
    int D, H, slot;
    Span span;

    // Returns the row of `recent`, [q | k | v | b | a] of D + 2 H values, for the token at a position.
    __device__ __forceinline__ const float* recent_row(int position) const {
        return recent + ((long long)slot * DELTA_RECENT + position % DELTA_RECENT) * (D + 2 * H);
    }

    // Returns the row [q | k | v] of the token at a position, from 3 before `base` on; null before the first token.
    __device__ __forceinline__ const float* channels(int position) const {
        if (position >= span.start) return x + (long long)(span.first + position - span.start) * W;
        if (span.source < 0) return nullptr;
        if (position >= span.base) return recent_row(position);
        return state + (2LL * slot + span.source) * P + (long long)(position - span.base + 3) * D;
    }

    // Returns the row [b | a] of the token at a position from `base` on.
    __device__ __forceinline__ const float* gates(int position) const {
        if (position >= span.start) return ba + (long long)(span.first + position - span.start) * 2 * H;
        return recent_row(position) + D;
    }
};

// Returns the row of `rows` of the token at a position from `base` on.
__device__ __forceinline__ int row_of(const Span& span, int slot, int position, int N) {
    if (position >= span.start) return span.first + position - span.start;
    return N + slot * DELTA_REPLAYED + position - span.base;
}
