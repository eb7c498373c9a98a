// What the special function units compute in an instruction or two, for the tensor-core tier.
#pragma once

// 2^x, two units in the last place off; 0 below 2^-126, where exp2f() takes two instructions more.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// GELU, the tanh form as v / (1 + exp(-2 u)), u = sqrt(2/pi) (v + 0.044715 v^3), in seven instructions. Off by some
// 1e-6 of the result at most down to v = -3, where 1 + tanh(u) would have lost its digits; below, where results vanish,
// the rounded exponent costs more, 1e-5 at -10.
__device__ __forceinline__ float gelu_fast(float v) {
    const float e = exp2_fast(v * fmaf(-0.10294324f, v * v, -2.3022082f));  // of -2 u log2(e)
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return v * r;
}
