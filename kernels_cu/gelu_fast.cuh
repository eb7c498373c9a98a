// GELU for epilogues of the tensor-core tier: the tanh form as v / (1 + exp(-2 u)), u = sqrt(2/pi) (v + 0.044715 v^3),
// with the hardware's exp2 and reciprocal: seven instructions. Off by some 1e-6 of the result at most down to v = -3,
// where 1 + tanh(u) would have lost its digits; below, where results vanish, the rounded exponent costs more, 1e-5 at
// -10.
#pragma once

__device__ __forceinline__ float gelu_fast(float v) {
    const float exponent = v * fmaf(-0.10294324f, v * v, -2.3022082f);  // -2 u log2(e)
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(exponent));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return v * r;
}
