// Fast approximations of exp2, GELU and SiLU by the special function units, for the tensor-core kernels.
#pragma once

// Computes 2^x with an error of two units in the last place. Returns 0 for results below 2^-126; exp2f(), which
// represents such results, needs two more instructions.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Computes the tanh form of GELU as v / (1 + exp(-2 u)), u = sqrt(2/pi) (v + 0.044715 v^3), in seven instructions. For
// v >= -3 the relative error is at most about 1e-6; near v = -3, the form with 1 + tanh(u) would lose digits by
// cancellation. For v < -3 the rounding error of the exponent is larger, and the relative error is 1e-5 at v = -10.
__device__ __forceinline__ float gelu_fast(float v) {
    const float e = exp2_fast(v * fmaf(-0.10294324f, v * v, -2.3022082f));  // exp(-2 u) as 2^(-2 u log2(e))
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return v * r;
}

// Computes SiLU, v / (1 + exp(-v)), in four instructions. The relative error is at most about 1e-6 for v >= -10, and
// the result is 0 for v < -88.
__device__ __forceinline__ float silu_fast(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + exp2_fast(-1.44269504f * v)));
    return v * r;
}
