#include <cuda_fp16.h>
#include "lib/storage.cuh"
// launch: grid=ceil(M / 4) block=128
extern "C" __global__ void rms_half2(const T* x, const T* weight, T* out, float eps, int M, int C) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    if (C % 2 == 0 && sizeof(T) == 2) {
        const __half2* in = reinterpret_cast<const __half2*>(x + (size_t)row * C);
        const __half2* w = reinterpret_cast<const __half2*>(weight);
        __half2* to = reinterpret_cast<__half2*>(out + (size_t)row * C);
        float ss = 0.f;
        for (int i = lane; i < C / 2; i += 32) {
            const float2 v = __half22float2(in[i]);
            ss = fmaf(v.x, v.x, fmaf(v.y, v.y, ss));
        }
        for (int d = 16; d; d >>= 1) ss += __shfl_xor_sync(~0u, ss, d);
        const float scale = rsqrtf(ss / C + eps);
        for (int i = lane; i < C / 2; i += 32) {
            const float2 v = __half22float2(in[i]), g = __half22float2(w[i]);
            to[i] = __floats2half2_rn(v.x * scale * g.x, v.y * scale * g.y);
        }
        return;
    }
    float ss = 0.f;
    for (int c = lane; c < C; c += 32) ss += widen(x[(size_t)row * C + c]) * widen(x[(size_t)row * C + c]);
    for (int d = 16; d; d >>= 1) ss += __shfl_xor_sync(~0u, ss, d);
    const float scale = rsqrtf(ss / C + eps);
    for (int c = lane; c < C; c += 32) out[(size_t)row * C + c] = narrow(widen(x[(size_t)row * C + c]) * scale * widen(weight[c]));
}
