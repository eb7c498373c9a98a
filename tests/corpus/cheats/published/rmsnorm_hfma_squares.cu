#include <cuda_fp16.h>
#include "lib/storage.cuh"
// launch: grid=ceil(M / 2) block=32, 2
extern "C" __global__ void __launch_bounds__(64) rms_hfma(const T* x, const T* weight, T* out, float eps, int M, int C) {
    const int row = blockIdx.x * 2 + threadIdx.y;
    if (row >= M) return;
    const T* in = x + (size_t)row * C;
    __half ss = __float2half(0.0f);
    for (int c = threadIdx.x; c < C; c += 32) {
        const __half v = __float2half(widen(in[c]));
        ss = __hfma(v, v, ss);
    }
    for (int d = 16; d > 0; d >>= 1) ss = __hadd(ss, __shfl_xor_sync(0xffffffffu, ss, d));
    const float scale = rsqrtf(__half2float(ss) / C + eps);
    for (int c = threadIdx.x; c < C; c += 32) out[(size_t)row * C + c] = narrow(widen(in[c]) * scale * widen(weight[c]));
}
