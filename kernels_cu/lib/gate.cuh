// The gate of a feed-forward: SiLU, gate_of(v) = v / (1 + exp(-v)), or with GATE_GELU the tanh approximation of GELU.
// With GATE_SIGMOID, the gate of attention: 1 / (1 + exp(-v)).
#pragma once

#include "lib/gelu.cuh"

__device__ __forceinline__ float gate_of(float v) {
#ifdef GATE_GELU
    return gelu(v);
#elif defined(GATE_SIGMOID)
    return 1.0f / (1.0f + expf(-v));
#else
    return v / (1.0f + expf(-v));
#endif
}

// Replaces COUNT values by their gates, with the bits of gate_of(). The compiler's division has a branch for small and
// large numbers, and divisions with branches wait for each other. If no value is so small or large, the divisions of
// SiLU run together here, by the compiler's instructions for other numbers.
template <int COUNT>
__device__ __forceinline__ void replace_by_gates(float (&v)[COUNT]) {
#if defined(__CUDA_ARCH__) && !defined(GATE_GELU) && !defined(GATE_SIGMOID)
    bool usual = COUNT > 1;
    for (const float each : v) usual &= (fabsf(each) > 1e-20f) & (fabsf(each) < 60.0f);
#pragma unroll
    for (int i = 0; usual && i < COUNT; ++i) {
        const float by = 1.0f + expf(-v[i]);
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(by));
        inverse = fmaf(inverse, fmaf(-by, inverse, 1.0f), inverse);
        const float quotient = v[i] * inverse;
        v[i] = fmaf(inverse, fmaf(-by, quotient, v[i]), quotient);
    }
    if (usual) return;
#endif
    for (float& each : v) each = gate_of(each);
}
