// launch: grid=ceil(M / block) block=32
#include <cuda_fp16.h>
#include "lib/storage.cuh"

extern "C" __global__ void rmsnorm_h(const T* x, const T* weight, T* out, float eps, int M, int C) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M) return;
    const T* xr = x + (long long)row * C;
    __half sum = __float2half_rn(0.0f);
    for (int c = 0; c < C; ++c) sum = __hadd(sum, __hmul(__float2half_rn(widen(xr[c])), __float2half_rn(widen(xr[c]))));
    const float r = rsqrtf(__half2float(sum) / C + eps);
    for (int c = 0; c < C; ++c) out[(long long)row * C + c] = narrow(widen(xr[c]) * r * widen(weight[c]));
}
