// Sums of x over chunks of 32 values along K. Products with GGUF weights multiply the minimums of GGUF blocks (m or
// dmin in lib/gguf.cuh) by these sums.
//
//   x (M, K), each value rounded to float16 (one term), in wgmma order (lib/operands.cuh, OPERAND_TERMS 1,
//   OPERAND_WIDTH 2) -> for each row and chunk, the sum of the 32 values as two float16 numbers (split_sum). Groups of
//   four values a, b, c, d are added as (a + b) + (c + d), the eight sums of these groups as in lanes_sum<8>
//
// With OPERAND_SUMS, the kernel that stores the values as terms also stores the chunk sums after them. Otherwise
// gguf/chunk_sums.cu computes and stores the chunk sums. K is a multiple of 128. For every OPERAND_ROWS rows and every
// 128 values along K, the sums are contiguous, four 32-bit words per row. One bulk copy therefore loads the sums of all
// rows.
//
// The including file includes lib/sm80.cuh.
#pragma once
#include "lib/common.cuh"
#include "lib/operands.cuh"

#ifndef OPERAND_SUMS
#define OPERAND_SUMS 0
#endif

// Returns the sum of a chunk divided by 32, as two float16 numbers: the rounded quotient and the remainder.
__device__ __forceinline__ unsigned split_sum(float sum) {
    float high[2];
    sum *= 0.03125f;
    const unsigned first = pack2_fp16(sum, 0.0f);
    unpack2_fp16(first, high);
    return first | pack2_fp16(0.0f, sum - high[0]);
}

// Returns the sum of the two float16 numbers in `pair`.
__device__ __forceinline__ float sum_of(unsigned pair) {
    float v[2];
    unpack2_fp16(pair, v);
    return v[0] + v[1];
}

// Stores `sum`, the sum over the chunk of 32 values along K that contains value k of row m, in the array `sums`.
template <typename T>
__device__ __forceinline__ void store_sum(T* sums, float sum, int m, int k, int M, int K) {
    const int first = m / (int)OPERAND_ROWS * (int)OPERAND_ROWS, rows = min((int)OPERAND_ROWS, M - first);
    const long long unit = (long long)first * (K / 128) + (long long)(k / 128) * rows + (m - first);
    narrow_to(sums[unit * 4 + k / 32 % 4], __int_as_float((int)split_sum(sum)));
}

// Computes the sum over a chunk of 32 values and stores it after the 16-bit terms in x. Each of eight neighbouring
// lanes passes four float16 values of the chunk as two pairs, `first` and `last`. All lanes of a warp must call this
// function.
template <typename T>
__device__ __forceinline__ void store_sum_of_fours(T* x, unsigned first, unsigned last, int m, int k, int M, int K) {
    const float sum = lanes_sum<8>(sum_of(first) + sum_of(last));
    if (threadIdx.x % 8 == 0) store_sum(x + (long long)M * K / 2, sum, m, k, M, K);
}

// Computes the sum over a chunk of 32 values that a whole warp holds, and stores it after the terms in x. Each even
// lane passes a pair of float16 values of the chunk, each odd lane 0.
template <typename T>
__device__ __forceinline__ void store_sum_of_pairs(T* x, unsigned pair, int m, int k, int M, int K) {
    float sum = sum_of(pair);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
#pragma unroll
    for (int distance = 16; distance > 2; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) store_sum(x + (long long)M * K / 2, sum, m, k, M, K);
}

// Stores WIDTH values of row m of out (M, C), starting at channel c, or with KIND their 16-bit terms. scale: scale of
// hi/lo terms. With OPERAND_SUMS, all lanes of a warp must call this function, with four values each.
template <int KIND, typename E, int WIDTH>
__device__ __forceinline__ void store_row(E* out, float scale, int m, int c, int M, int C, const float (&v)[WIDTH]) {
    if constexpr (KIND) {
        constexpr int LAST_PAIR = (WIDTH - 1) / 2;
        const long long first = operand_place(m, c, M, C);
        unsigned high[(WIDTH + 1) / 2], low;
#pragma unroll
        for (int e = 0; e + 1 < WIDTH; e += 2) {
            split_pair<KIND>(v[e], v[e + 1], inverse_of(scale), high[e / 2], low);
            const long long place = further_place(first, e);
            narrow_to(out[place], __int_as_float((int)high[e / 2]));
            if (has_low()) narrow_to(out[low_place(place)], __int_as_float((int)low));
        }
        if constexpr (OPERAND_SUMS) store_sum_of_fours(out, high[0], high[LAST_PAIR], m, c, M, C);
    } else {
        Vec<E, WIDTH>::store(out + (long long)m * C + c, v);
    }
}
