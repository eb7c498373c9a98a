// The norm of a head of q or k, as Qwen3 has it: v r gamma with r = 1 / sqrt(mean(v^2) + eps), over its D channels.
//
// Included by llama/qk_norm.cu and matmul/decode_turned.cuh, which add up in the same order: the squares of channels k
// and k + D / 2 are one value, then there are sums of neighbouring values, of neighbouring twos, fours and so on:
//
//   values   0 1 2 3 4 5 6 7 ...     of D / 2, and zeros up to a power of two
//   sums     0+1 2+3 4+5 6+7 ...     then 01+23 45+67, then 0123+4567
//
// A sum of two does not depend on which is first, so that both lanes of a shuffle have the same.
//
// Source: Henry et al., "Query-Key Normalization for Transformers" (2020); Qwen Team, "Qwen3 Technical Report" (2025).
#pragma once

// Of channels k and k + D / 2. The roundings are stated, so that all kernels have the same.
__device__ __forceinline__ float head_square(float first, float second) {
    return fmaf(first, first, __fmul_rn(second, second));
}

// Over COUNT neighbouring lanes, a power of two; all lanes of the warp call this.
template <int COUNT>
__device__ __forceinline__ float neighbours_sum(float value) {
    static_assert(COUNT > 0 && COUNT <= 32 && (COUNT & (COUNT - 1)) == 0, "lanes: a power of two");
#pragma unroll
    for (int distance = 1; distance < COUNT; distance *= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// Over an array, of which COUNT, a power of two, is the length.
template <int COUNT>
__device__ __forceinline__ float neighbours_sum(float (&values)[COUNT]) {
    static_assert(COUNT > 0 && (COUNT & (COUNT - 1)) == 0, "values: a power of two");
#pragma unroll
    for (int distance = 1; distance < COUNT; distance *= 2) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2 * distance) values[i] += values[i + distance];
    }
    return values[0];
}

// r, of the sum of squares of D channels.
template <int D>
__device__ __forceinline__ float head_factor(float square, float eps) { return rsqrtf(fmaf(square, 1.0f / D, eps)); }

__device__ __forceinline__ float head_normed(float v, float factor, float gamma) {
    return __fmul_rn(v, __fmul_rn(factor, gamma));
}
