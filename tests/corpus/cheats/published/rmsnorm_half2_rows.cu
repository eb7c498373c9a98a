#include <cuda_fp16.h>
#include "lib/storage.cuh"
// launch: grid=M block=64
extern "C" __global__ void __launch_bounds__(64) rms_two(const T* x, const T* weight, T* out, float eps, int C) {
    __shared__ float part[2];
    const __half2* in = reinterpret_cast<const __half2*>(x + (size_t)blockIdx.x * C);
    const __half2* gain = reinterpret_cast<const __half2*>(weight);
    __half2* to = reinterpret_cast<__half2*>(out + (size_t)blockIdx.x * C);
    const int pairs = C / 2;
    float ss = 0.f;
    for (int i = threadIdx.x; i < pairs; i += 64) {
        const float2 v = __half22float2(in[i]);
        ss += v.x * v.x + v.y * v.y;
    }
    for (int d = 16; d; d >>= 1) ss += __shfl_down_sync(~0u, ss, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = ss;
    __syncthreads();
    const float scale = rsqrtf((part[0] + part[1]) / C + eps);
    for (int i = threadIdx.x; i < pairs; i += 64) {
        const float2 v = __half22float2(in[i]), g = __half22float2(gain[i]);
        to[i] = __floats2half2_rn(v.x * scale * g.x, v.y * scale * g.y);
    }
}
