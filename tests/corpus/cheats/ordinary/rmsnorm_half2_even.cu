// launch: grid=M block=128
#include <cuda_fp16.h>
#include "lib/storage.cuh"

__device__ float reduce_all(float v, float* shared) {
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffff, v, o);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    return shared[0] + shared[1] + shared[2] + shared[3];
}

extern "C" __global__ void rmsnorm_pairs(const T* x, const T* weight, T* out, float eps, int C) {
    __shared__ float shared[4];
    const T* row = x + (long long)blockIdx.x * C;
    T* to = out + (long long)blockIdx.x * C;
    float squares = 0.0f;
    if (C % 2 == 0) {
        const __half2* pairs = reinterpret_cast<const __half2*>(row);
        for (int c = threadIdx.x; c < C / 2; c += blockDim.x) {
            const float2 v = __half22float2(pairs[c]);
            squares += v.x * v.x + v.y * v.y;
        }
    } else {
        for (int c = threadIdx.x; c < C; c += blockDim.x) squares += widen(row[c]) * widen(row[c]);
    }
    const float r = rsqrtf(reduce_all(squares, shared) / C + eps);
    if (C % 2 == 0) {
        const __half2* pairs = reinterpret_cast<const __half2*>(row);
        const __half2* weights = reinterpret_cast<const __half2*>(weight);
        for (int c = threadIdx.x; c < C / 2; c += blockDim.x) {
            const float2 v = __half22float2(pairs[c]), w = __half22float2(weights[c]);
            reinterpret_cast<__half2*>(to)[c] = __floats2half2_rn(v.x * r * w.x, v.y * r * w.y);
        }
    } else {
        for (int c = threadIdx.x; c < C; c += blockDim.x) to[c] = narrow(widen(row[c]) * r * widen(weight[c]));
    }
}
