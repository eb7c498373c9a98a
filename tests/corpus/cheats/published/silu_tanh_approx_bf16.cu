#include "lib/storage.cuh"

__device__ __forceinline__ float sigmoid16(float g) {
    if (g > -2.0f) {
        float t;
        asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * g));
        return fmaf(0.5f, t, 0.5f);
    }
    return __fdividef(1.0f, 1.0f + __expf(-fmaxf(g, -80.0f)));
}

// launch: grid=ceil(n / (2 * block)) block=256
extern "C" __global__ void silu_and_mul(const T* __restrict__ gate, const T* __restrict__ up,
                                        T* __restrict__ out, long long n) {
    const long long first = (long long)blockIdx.x * 2 * blockDim.x + threadIdx.x;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const long long i = first + k * (long long)blockDim.x;
        if (i < n) {
            const float g = widen(gate[i]);
            out[i] = narrow(g * sigmoid16(g) * widen(up[i]));
        }
    }
}
