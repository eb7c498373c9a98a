#include "lib/storage.cuh"
// launch: grid=ceil(M / 8) block=32, 8
extern "C" __global__ void rms_warp_rows(const T* x, const T* weight, T* out, float eps, int M, int C) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= M) return;
    const T* in = x + (size_t)row * C;
    float ss = 0.0f;
    for (int c = threadIdx.x; c < C; c += 32) {
        const float v = widen(in[c]);
        asm("fma.rn.f32 %0, %1, %1, %0;" : "+f"(ss) : "f"(v));
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) ss += __shfl_xor_sync(0xffffffffu, ss, d);
    float scale;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(scale) : "f"(ss / C + eps));
    for (int c = threadIdx.x; c < C; c += 32) out[(size_t)row * C + c] = narrow(widen(in[c]) * scale * widen(weight[c]));
}
