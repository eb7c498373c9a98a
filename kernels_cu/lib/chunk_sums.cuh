// The sums of x over each 32 of K, a chunk, by which minimums in blocks of GGUF are multiplied.
//
//   x (M, K), rounded terms of float16 in order (lib/terms.cuh, TERM_WIDTH 2) -> of each chunk the sum, as split_sum
//   has it. Fours of values are added as (a + b) + (c + d), eight of their sums as in lanes_sum<8>
//
// A kernel that stores such terms stores these after them with TERM_SUMS; else gguf/chunk_sums.cu does. K is a multiple
// of 128. Of each TERM_ROWS rows and each 128 of K, a row has four words, as one copy brings them.
//
// The including file includes lib/sm80.cuh.
#pragma once
#include "lib/common.cuh"
#include "lib/terms.cuh"

#ifndef TERM_SUMS
#define TERM_SUMS 0
#endif

// A sum of a chunk divided by 32, as two numbers of float16.
__device__ __forceinline__ unsigned split_sum(float sum) {
    float high[2];
    sum *= 0.03125f;
    const unsigned first = pack2_fp16(sum, 0.0f);
    unpack2_fp16(first, high);
    return first | pack2_fp16(0.0f, sum - high[0]);
}

// Of a pair of terms.
__device__ __forceinline__ float sum_of(unsigned pair) {
    float v[2];
    unpack2_fp16(pair, v);
    return v[0] + v[1];
}

// Stores the sum of the chunk of k of row m.
template <typename T>
__device__ __forceinline__ void store_sum(T* sums, float sum, int m, int k, int M, int K) {
    const int first = m / (int)TERM_ROWS * (int)TERM_ROWS, rows = min((int)TERM_ROWS, M - first);
    const long long unit = (long long)first * (K / 128) + (long long)(k / 128) * rows + (m - first);
    narrow_to(sums[unit * 4 + k / 32 % 4], __int_as_float((int)split_sum(sum)));
}

// The same, after the terms x, where eight neighbouring lanes have four values each, as two pairs of terms. All lanes
// of a warp call this.
template <typename T>
__device__ __forceinline__ void store_sum_of_fours(T* x, unsigned first, unsigned last, int m, int k, int M, int K) {
    const float sum = lanes_sum<8>(sum_of(first) + sum_of(last));
    if (threadIdx.x % 8 == 0) store_sum(x + (long long)M * K / 2, sum, m, k, M, K);
}

// The same where a warp has a chunk, its even lanes a pair each, others 0.
template <typename T>
__device__ __forceinline__ void store_sum_of_pairs(T* x, unsigned pair, int m, int k, int M, int K) {
    float sum = sum_of(pair);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
#pragma unroll
    for (int distance = 16; distance > 2; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) store_sum(x + (long long)M * K / 2, sum, m, k, M, K);
}
