// Floats as the sum of two 16-bit numbers, their terms, for products on tensor cores: each is the nearest one to what
// is left. Two of bfloat16 have 16 bits and the range of a float; two of float16 have 22 bits, down to 2^-24, and
// magnitudes up to 65504. Two-part ones are float16, too, of the value over a scale and of what is left times 2048
// (lib/two_part.cuh): with a scale for the largest value, they have 22 bits of values 2^-28 as large. Infinity gives
// NaN.
//
// In memory the terms of a pair of neighbouring values take the place of their floats, the high ones first; or all are
// in the order in which wgmma reads them (term_place), in as much memory.
//
// With TERM_COUNT 1, a value is rounded to its high term. The low one is stored as 0 in the places of floats, and left
// out in the order of wgmma, which then takes half as much memory.
//
// The including file includes lib/sm80.cuh.
#pragma once
#include "lib/two_part.cuh"

#ifndef TERM_WIDTH  // order of the terms that a kernel stores: 0 in the places of the floats, else as in term_place
#define TERM_WIDTH 0
#endif

#ifndef TERM_COUNT  // of a value
#define TERM_COUNT 2
#endif

constexpr int FP16_TERMS = 1, BF16_TERMS = 2, TWO_PART_TERMS = 3;  // kinds of terms

// The terms of two values, the first one in the lower half. inverse: of the scale of two-part terms.
template <int KIND>
__device__ __forceinline__ void split_pair(float first, float second, float inverse, unsigned& high, unsigned& low) {
    constexpr bool BRAIN = KIND == BF16_TERMS;
    if constexpr (KIND == TWO_PART_TERMS) first *= inverse, second *= inverse;
    float rounded[2];
    high = BRAIN ? pack2_bf16(first, second) : pack2_fp16(first, second);
    if constexpr (TERM_COUNT == 1) {
        low = 0;
        return;
    }
    if (BRAIN) unpack2_bf16(high, rounded);
    else unpack2_fp16(high, rounded);
    first -= rounded[0], second -= rounded[1];
    if constexpr (KIND == TWO_PART_TERMS) first *= LOW, second *= LOW;
    low = BRAIN ? pack2_bf16(first, second) : pack2_fp16(first, second);
}

// What the place of a lane's value then holds. A lane and the one DISTANCE further, a power of two, have a pair; all
// lanes of a warp call this.
template <int KIND, int DISTANCE = 1>
__device__ __forceinline__ float term_of(float value, float inverse = 1.0f) {
    const bool odd = threadIdx.x & DISTANCE;
    const float other = __shfl_xor_sync(0xffffffffu, value, DISTANCE);
    unsigned high, low;
    split_pair<KIND>(odd ? other : value, odd ? value : other, inverse, high, low);
    return __int_as_float((int)(odd ? low : high));
}

constexpr unsigned TERM_ROWS = 64;  // of a tile of terms

// Where the float of value k of row m of (M, K) has its place. WIDTH 0: in the order of rows. WIDTH 2, 8 or 16: as the
// products of matmul/decode_hopper.cu have them in shared memory, a tile of rows after the other, and in a tile 64 of K
// after the other. These have a line of 128 bytes for the high terms of each row, followed by one for its low terms if
// it has them, in which 16-byte units are swizzled for wgmma. WIDTH is the number of values that a lane loads at once
// of a row of weights: of each 4 WIDTH of K, a unit has two neighbouring values of each of four lanes. With 2 these are
// in order.
template <int WIDTH = TERM_WIDTH>
__device__ __forceinline__ long long term_place(int m, int k, int M, int K) {
    if constexpr (WIDTH == 0) return (long long)m * K + k;
    constexpr unsigned EACH = WIDTH ? WIDTH : 8;
    const unsigned first = (unsigned)m / TERM_ROWS * TERM_ROWS, rows = min((unsigned)TERM_ROWS, M - first);
    const unsigned at = k, line = TERM_COUNT * (m - first) + at % TERM_COUNT, lane = at / EACH % 4;
    const unsigned unit = at / (4 * EACH) * (EACH / 2) + at % EACH / 2;
    const long long of_tile = (long long)first * K * TERM_COUNT / 2;
    return of_tile + ((long long)(unit / 8) * TERM_COUNT * rows + line) * 32 + (unit % 8 ^ line % 8) * 4 + lane;
}

// From the place of the high terms of a pair: where its low ones are, in the next line, where swizzling has exchanged
// each unit with its neighbour.
template <int WIDTH = TERM_WIDTH>
__device__ __forceinline__ long long low_place(long long high) {
    return WIDTH == 0 ? high + 1 : (high ^ 4) + 32;
}

// Whether low terms have a place.
template <int WIDTH = TERM_WIDTH>
__device__ constexpr bool has_low() {
    return TERM_COUNT == 2 || WIDTH == 0;
}

// From the place of the high terms at k, a multiple of 4 or of 8: where those of the pair at k + e are, with e less
// than this multiple.
__device__ __forceinline__ long long further_place(long long first, int e) {
    return TERM_WIDTH == 0 ? first + e : TERM_WIDTH == 2 ? first ^ e / 2 : first ^ 2 * e;
}
