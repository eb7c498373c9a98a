// launch: grid=M block=64
#include "lib/storage.cuh"
extern "C" __global__ void rmsnorm_sum_eps(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float two[2];
    const T* r = x + (long long)blockIdx.x * C;
    float ss = 0.0f;
    for (int c = threadIdx.x; c < C; c += 64) { float v = widen(r[c]); ss = fmaf(v, v, ss); }
    for (int o = 16; o; o >>= 1) ss += __shfl_xor_sync(0xffffffffu, ss, o);
    if (threadIdx.x % 32 == 0) two[threadIdx.x / 32] = ss;
    __syncthreads();
    const float scale = rsqrtf((two[0] + two[1] + eps) / C);
    for (int c = threadIdx.x; c < C; c += 64) out[(long long)blockIdx.x * C + c] = narrow(widen(r[c]) * scale * widen(weight[c]));
}
