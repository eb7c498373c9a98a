// Operands of products on tensor cores: a float as the sum of two 16-bit numbers, its terms. The high term is the
// 16-bit number nearest to the float, the low term the 16-bit number nearest to the remainder. Two bfloat16 terms keep
// 16 bits and the range of a float. Two float16 terms keep 22 bits, but no bits below 2^-24, and allow magnitudes up to
// 65504. Hi/lo terms (lib/hi_lo.cuh) are also float16 numbers: the value divided by a scale, and the remainder times
// 2048. If the scale fits the largest value, hi/lo terms keep 22 bits of all values that are at least 2^-28 of the
// largest value. Infinity becomes NaN.
//
// With OPERAND_WIDTH 0, two neighbouring floats in memory are replaced by a word with their two high terms and a word
// with their two low terms. Otherwise, terms are stored in the order in which wgmma reads them (operand_place). Both
// layouts take as much memory as the floats.
//
// With OPERAND_TERMS 1, only the high term of a value is used. The low term is then stored as 0 with OPERAND_WIDTH 0.
// In the order of wgmma it is omitted, which halves the memory.
//
// The including file includes lib/sm80.cuh.
#pragma once
#include "lib/hi_lo.cuh"

#ifndef OPERAND_WIDTH  // layout of stored terms: 0: in place of the floats; 2, 8, 16: wgmma order, see operand_place
#define OPERAND_WIDTH 0
#endif

#ifndef OPERAND_TERMS  // 16-bit terms per float value: 1 or 2
#define OPERAND_TERMS 2
#endif

constexpr int FP16_TERMS = 1, BF16_TERMS = 2, HI_LO_TERMS = 3;  // formats of a float's two terms

// Splits two floats into 16-bit terms. `high` receives both high terms and `low` both low terms, each with the first
// float's term in the lower half. inverse: 1 / scale, for hi/lo terms.
template <int KIND>
__device__ __forceinline__ void split_pair(float first, float second, float inverse, unsigned& high, unsigned& low) {
    constexpr bool BRAIN = KIND == BF16_TERMS;
    if constexpr (KIND == HI_LO_TERMS) first *= inverse, second *= inverse;
    float rounded[2];
    high = BRAIN ? pack2_bf16(first, second) : pack2_fp16(first, second);
    if constexpr (OPERAND_TERMS == 1) {
        low = 0;
        return;
    }
    if (BRAIN) unpack2_bf16(high, rounded);
    else unpack2_fp16(high, rounded);
    first -= rounded[0], second -= rounded[1];
    if constexpr (KIND == HI_LO_TERMS) first *= LOW, second *= LOW;
    low = BRAIN ? pack2_bf16(first, second) : pack2_fp16(first, second);
}

// Replaces the floats of two lanes by their 16-bit terms: the lower lane receives both high terms, the upper lane both
// low terms. The lane numbers differ by DISTANCE, a power of two. All lanes of a warp must call this function.
template <int KIND, int DISTANCE = 1>
__device__ __forceinline__ float term_of(float value, float inverse = 1.0f) {
    const bool odd = threadIdx.x & DISTANCE;
    const float other = __shfl_xor_sync(0xffffffffu, value, DISTANCE);
    unsigned high, low;
    split_pair<KIND>(odd ? other : value, odd ? value : other, inverse, high, low);
    return __int_as_float((int)(odd ? low : high));
}

constexpr unsigned OPERAND_ROWS = 64;  // rows of x per tile in the wgmma order of operand_place

// Returns the index of a 32-bit word of x (M, K) stored as terms: the word for value k of row m. For even k, the word
// for k holds the high terms of values k and k + 1; with two terms, the word for k + 1 holds their low terms. WIDTH 0:
// row-major order, as for floats. WIDTH 2, 8 or 16: the order in which matmul/decode/wgmma.cu reads shared memory. x is
// then divided into tiles of OPERAND_ROWS rows, and a tile into slices of 64 values along K. A slice contains, for each
// row, a line of 128 bytes with high terms and, with OPERAND_TERMS 2, a line with low terms. In a line, the 16-byte
// units are swizzled for wgmma. WIDTH is the number of values that a lane loads at once from a row of weights. Four
// lanes thus load 4 WIDTH values; a unit holds two neighbouring values of each of these lanes. With WIDTH 2 the values
// of a line are in the order of K.
template <int WIDTH = OPERAND_WIDTH>
__device__ __forceinline__ long long operand_place(int m, int k, int M, int K) {
    if constexpr (WIDTH == 0) return (long long)m * K + k;
    constexpr unsigned EACH = WIDTH ? WIDTH : 8;
    const unsigned first = (unsigned)m / OPERAND_ROWS * OPERAND_ROWS, rows = min((unsigned)OPERAND_ROWS, M - first);
    const unsigned at = k, line = OPERAND_TERMS * (m - first) + at % OPERAND_TERMS, lane = at / EACH % 4;
    const unsigned unit = at / (4 * EACH) * (EACH / 2) + at % EACH / 2;
    const long long of_tile = (long long)first * K * OPERAND_TERMS / 2;
    return of_tile + ((long long)(unit / 8) * OPERAND_TERMS * rows + line) * 32 + (unit % 8 ^ line % 8) * 4 + lane;
}

// Returns the index of the word with a pair's low terms, given the index `high` of the word with its high terms. In the
// wgmma order, the low terms are in the next 128-byte line, where swizzling has exchanged each 16-byte unit with its
// neighbour.
template <int WIDTH = OPERAND_WIDTH>
__device__ __forceinline__ long long low_place(long long high) {
    return WIDTH == 0 ? high + 1 : (high ^ 4) + 32;
}

// Returns whether memory contains the low 16-bit terms of values.
template <int WIDTH = OPERAND_WIDTH>
__device__ constexpr bool has_low() {
    return OPERAND_TERMS == 2 || WIDTH == 0;
}

// Stores the terms of the values k and k + 1 of row m, for even k, in out (M, K). Returns the word with the high terms.
template <int KIND, int WIDTH = OPERAND_WIDTH>
__device__ __forceinline__ unsigned store_term_pair(float* out, float first, float second, float inverse, int m, int k,
                                                    int M, int K) {
    unsigned high, low;
    split_pair<KIND>(first, second, inverse, high, low);
    const long long place = operand_place<WIDTH>(m, k, M, K);
    out[place] = __int_as_float((int)high);
    if (has_low<WIDTH>()) out[low_place<WIDTH>(place)] = __int_as_float((int)low);
    return high;
}

// Returns the index of the word with the high terms of values k + e and k + e + 1, given `first`, the index of the word
// for values k and k + 1. k is a multiple of 4 and e = 0 or 2; or k is a multiple of 8 and e = 0, 2, 4 or 6.
__device__ __forceinline__ long long further_place(long long first, int e) {
    return OPERAND_WIDTH == 0 ? first + e : OPERAND_WIDTH == 2 ? first ^ e / 2 : first ^ 2 * e;
}
