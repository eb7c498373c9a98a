// RMSNorm of one head v of q or k, as in Qwen3: v * r * gamma with r = 1 / sqrt(mean(v^2) + eps), over the D channels
// of the head.
//
// positions/qk_norm.cu and lib/decode/epilogues.cuh include this file, so that both add squares in the same order:
// first the squares of channels k and k + D / 2, which gives D / 2 values; then neighbouring values; then neighbouring
// sums of two values, of four values, and so on:
//   values   0 1 2 3 4 5 6 7 ...     D / 2 values, with zeros up to a power of two
//   sums     0+1 2+3 4+5 6+7 ...     then 01+23 45+67, then 0123+4567
//
// The order of the two operands does not change a sum, so both lanes of a shuffle compute the same bits.
//
// Source: Henry et al., "Query-Key Normalization for Transformers" (2020); Qwen Team, "Qwen3 Technical Report" (2025).
#pragma once

// Returns the sum of the squares of channels k and k + D / 2. Explicit roundings give all kernels the same bits.
__device__ __forceinline__ float head_square(float first, float second) {
    return fmaf(first, first, __fmul_rn(second, second));
}

// Returns the sum of `value` over COUNT neighbouring lanes. COUNT is a power of two. All lanes of the warp must call
// this function.
template <int COUNT>
__device__ __forceinline__ float neighbours_sum(float value) {
    static_assert(COUNT > 0 && COUNT <= 32 && (COUNT & (COUNT - 1)) == 0, "lanes: a power of two");
#pragma unroll
    for (int distance = 1; distance < COUNT; distance *= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// Returns the sum of the COUNT elements of `values`. COUNT is a power of two.
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

// Returns the RMSNorm factor r = 1 / sqrt(mean + eps) of a head, given the sum of the squares of its D channels.
template <int D>
__device__ __forceinline__ float head_factor(float square, float eps) { return rsqrtf(fmaf(square, 1.0f / D, eps)); }

__device__ __forceinline__ float head_normed(float v, float factor, float gamma) {
    return __fmul_rn(v, __fmul_rn(factor, gamma));
}
