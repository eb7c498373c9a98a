// Hi/lo numbers, which give float accuracy on half-precision tensor cores: x = (hi + lo / 2048) scale.
//
//   scale   one per row: a power of two; the row's largest magnitude / scale is at least 2^14 and less than 2^15
//   hi      half(x / scale)
//   lo      half((x / scale - hi) 2048), 0 where hi is not finite
//
// A number that is at least 2^-28 of the row's largest magnitude keeps 22 bits. Smaller numbers keep the bits that are
// above 2^-50 of this magnitude. Subnormal floats become zero. A row of zeros has the scale 1.
//
// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
// theoretical peak performance" (2022).
#pragma once
#include "lib/storage.cuh"

constexpr float LOW = 2048.0f;  // factor of low parts: lo = LOW * remainder

// Returns the scale of a row whose largest magnitude is `largest`, a finite number. The scale is at least 2^-126, so
// that 1 / scale is finite.
__device__ __forceinline__ float scale_of(float largest) {
    const int exponent = (__float_as_int(largest) >> 23) - 14;
    return largest > 0.0f ? __int_as_float((exponent > 1 ? exponent : 1) << 23) : 1.0f;
}

__device__ __forceinline__ float inverse_of(float power) {  // inverse of a power of two from 2^-126 to 2^126
    return __int_as_float(0x7f000000 - __float_as_int(power));
}

// Computes the low parts of values v, which are already divided by the scale of their row. The high parts are
// narrow(v).
template <int WIDTH>
__device__ __forceinline__ void low_parts(const float (&v)[WIDTH], float (&low)[WIDTH]) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
        const float hi = widen(narrow(v[e]));
        low[e] = fabsf(hi) <= 65504.0f ? (v[e] - hi) * LOW : 0.0f;
    }
}

// Computes the numbers that the parts `high` and `low` represent, and stores the numbers in `high`.
template <int WIDTH>
__device__ __forceinline__ void join(float (&high)[WIDTH], const float (&low)[WIDTH], float scale) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) high[e] = fmaf(low[e], 1.0f / LOW, high[e]) * scale;
}

// Returns a sum of products of hi/lo numbers. high: the sum of products of two high parts. cross: the sum of
// products of a high part and a low part. If `high` is infinite or NaN, `cross` is ignored: it could have the opposite
// sign or be NaN (infinity times a low part of 0).
__device__ __forceinline__ float sum_of(float high, float cross) {
    return fabsf(high) < 1e30f ? fmaf(cross, 1.0f / LOW, high) : high;
}

// Multiplies a sum by the scales of both operands, the smaller scale first: an intermediate product overflows only if
// the result does.
__device__ __forceinline__ float scaled(float sum, float a_scale, float w_scale) {
    return sum * fminf(a_scale, w_scale) * fmaxf(a_scale, w_scale);
}
