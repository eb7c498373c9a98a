#include "lib/storage.cuh"
// launch: grid=ceil(n / 1024) block=256
extern "C" __global__ void __launch_bounds__(256) swish_gate(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ out, long long n) {
    const long long base = blockIdx.x * 1024LL + threadIdx.x;
#pragma unroll 4
    for (int k = 0; k < 4; ++k) {
        const long long i = base + 256 * k;
        if (i < n) {
            const float g = widen(gate[i]);
            float e;
            asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(g * 1.4426950409f));
            out[i] = narrow(g * (e / (1.0f + e)) * widen(up[i]));
        }
    }
}
