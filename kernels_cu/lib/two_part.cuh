// Numbers in two parts, for float accuracy on half-precision tensor cores: (hi + lo / 2048) scale.
//
//   scale   of a row, a power of two that brings its largest magnitude to at least 2^14 and below 2^15
//   hi      half(x / scale)
//   lo      half((x / scale - hi) 2048), 0 where hi is not finite
//
// That keeps 22 bits of every number down to 2^-28 of the row's largest, and of smaller ones what is above 2^-50 of it.
// Subnormal numbers count as zero, and a row of zeros has the scale 1.
#pragma once
#include "lib/storage.cuh"

constexpr float LOW = 2048.0f;  // of lo's unit in one of hi

// For a row whose largest magnitude is `largest`, which is finite. At least 2^-126, so that the inverse is finite, too.
__device__ __forceinline__ float scale_of(float largest) {
    const int exponent = (__float_as_int(largest) >> 23) - 14;
    return largest > 0.0f ? __int_as_float((exponent > 1 ? exponent : 1) << 23) : 1.0f;
}

__device__ __forceinline__ float inverse_of(float power) {  // of two, from 2^-126 to 2^126
    return __int_as_float(0x7f000000 - __float_as_int(power));
}

// lo of values in units of their scale; narrow(v) is hi.
template <int WIDTH>
__device__ __forceinline__ void low_parts(const float (&v)[WIDTH], float (&low)[WIDTH]) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
        const float hi = widen(narrow(v[e]));
        low[e] = fabsf(hi) <= 65504.0f ? (v[e] - hi) * LOW : 0.0f;
    }
}

// A sum of products from those of high parts and those with a low one. Where the first has met infinity or NaN, the
// other need not agree in sign, or is no number: infinity times a low part of 0.
__device__ __forceinline__ float sum_of(float high, float cross) {
    return fabsf(high) < 1e30f ? fmaf(cross, 1.0f / LOW, high) : high;
}

// The smaller scale first: no product on the way is beyond float unless the last one is.
__device__ __forceinline__ float scaled(float sum, float a_scale, float w_scale) {
    return sum * fminf(a_scale, w_scale) * fmaxf(a_scale, w_scale);
}
