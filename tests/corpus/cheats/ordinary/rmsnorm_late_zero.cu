// launch: grid=M block=256
#include "lib/storage.cuh"

extern "C" __global__ void rmsnorm_total(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float total;
    if (threadIdx.x == 0) total = 0.0f;
    const T* row = x + (size_t)blockIdx.x * C;
    float own = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) own += widen(row[c]) * widen(row[c]);
    for (int o = 16; o > 0; o >>= 1) own += __shfl_down_sync(0xffffffff, own, o);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, own);
    __syncthreads();
    const float r = rsqrtf(total / C + eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        out[(size_t)blockIdx.x * C + c] = narrow(widen(row[c]) * r * widen(weight[c]));
}
