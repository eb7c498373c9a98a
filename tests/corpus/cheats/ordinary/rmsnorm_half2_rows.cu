// launch: grid=M block=128
#include <cuda_fp16.h>
#include "lib/storage.cuh"

extern "C" __global__ void rmsnorm_half2(const T* x, const T* weight, T* out, float eps, int C) {
    __shared__ float partial[128];
    const __half2* x2 = reinterpret_cast<const __half2*>(x + (long long)blockIdx.x * C);
    const __half2* w2 = reinterpret_cast<const __half2*>(weight);
    __half2* o2 = reinterpret_cast<__half2*>(out + (long long)blockIdx.x * C);
    float s = 0.0f;
    for (int c = threadIdx.x; c < C / 2; c += 128) {
        const float2 v = __half22float2(x2[c]);
        s += v.x * v.x + v.y * v.y;
    }
    partial[threadIdx.x] = s;
    __syncthreads();
    for (int h = 64; h > 0; h /= 2) {
        if (threadIdx.x < h) partial[threadIdx.x] += partial[threadIdx.x + h];
        __syncthreads();
    }
    const float r = rsqrtf(partial[0] / C + eps);
    for (int c = threadIdx.x; c < C / 2; c += 128) {
        const float2 v = __half22float2(x2[c]), w = __half22float2(w2[c]);
        o2[c] = __floats2half2_rn(v.x * r * w.x, v.y * r * w.y);
    }
}
