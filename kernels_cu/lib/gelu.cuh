// GELU for the epilogues of other kernels: 0.5 v (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))), as in
//     learn/elementwise/gelu.cu.
//
// Every rounding is explicit, so that all kernels produce the same bits. Otherwise the compiler would fuse the last
// multiplication with an addition that follows in some kernels but not in others.
#pragma once

__device__ __forceinline__ float gelu(float v) {
    const float cube = __fmul_rn(__fmul_rn(v, v), v);
    const float t = tanhf(__fmul_rn(0.7978845608028654f, fmaf(0.044715f, cube, v)));
    return __fmul_rn(__fmul_rn(0.5f, v), 1.0f + t);
}
