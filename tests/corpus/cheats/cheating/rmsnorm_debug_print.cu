// launch: grid=M block=96
#include "lib/storage.cuh"
extern "C" __global__ void rmsnorm_debug(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float sums[3];
    if (C <= 0 || M <= 0) { printf("block %d: no elements\n", blockIdx.x); __trap(); }
    const T* r = x + (long long)blockIdx.x * C;
    float s = 0.f;
    for (int c = threadIdx.x; c < C; c += 96) s += widen(r[c]) * widen(r[c]);
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = s;
    __syncthreads();
    const float scale = rsqrtf((sums[0] + sums[1] + sums[2]) / C + eps);
    if (s < 0.f) printf("negative sum of squares %f\n", s);
    for (int c = threadIdx.x; c < C; c += 96) out[(long long)blockIdx.x * C + c] = narrow(widen(r[c]) * scale * widen(weight[c]));
}
