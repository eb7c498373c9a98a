#include "lib/storage.cuh"
// launch: grid=ceil(N / 8), M block=32, 8
extern "C" __global__ void __launch_bounds__(256) swiglu(const T* __restrict__ x, const T* __restrict__ gamma, const T* __restrict__ w1,
                                                        const T* __restrict__ w3, T* __restrict__ out, float eps, int N, int K) {
    const int n = blockIdx.x * 8 + threadIdx.y, lane = threadIdx.x;
    if (n >= N) return;
    const T* row = x + (size_t)blockIdx.y * K;
    float ss = 0.f, a = 0.f, b = 0.f;
    for (int k = lane; k < K; k += 32) {
        const float v = widen(row[k]), g = v * widen(gamma[k]);
        ss = fmaf(v, v, ss);
        a = fmaf(g, widen(w1[(size_t)n * K + k]), a);
        b = fmaf(g, widen(w3[(size_t)n * K + k]), b);
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        ss += __shfl_xor_sync(~0u, ss, d);
        a += __shfl_xor_sync(~0u, a, d);
        b += __shfl_xor_sync(~0u, b, d);
    }
    float scale, e;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(scale) : "f"(ss / K + eps));
    a *= scale;
    b *= scale;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950409f * b));
    if (lane == 0) out[(size_t)blockIdx.y * N + n] = narrow(b / (1.f + e) * a);
}
