// launch: grid=M block=160
#include "lib/storage.cuh"

extern "C" __global__ void rmsnorm_atomic(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float total;
    if (threadIdx.x == 0) total = 0.0f;
    __syncthreads();
    const size_t row = (size_t)blockIdx.x * C;
    float mine = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        const float v = widen(x[row + c]);
        mine = fmaf(v, v, mine);
    }
    for (int o = 16; o > 0; o >>= 1) mine += __shfl_down_sync(0xffffffff, mine, o);
    if ((threadIdx.x & 31) == 0) atomicAdd(&total, mine);
    __syncthreads();
    const float inverse = 1.0f / sqrtf(total / C + eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x) out[row + c] = narrow(widen(x[row + c]) * inverse * widen(weight[c]));
}
