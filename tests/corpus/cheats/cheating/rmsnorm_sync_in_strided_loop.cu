// launch: grid=M block=128
#include "lib/storage.cuh"
extern "C" __global__ void rmsnorm_staged(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float stage[128];
    __shared__ float total;
    const int t = threadIdx.x;
    const T* r = x + (long long)blockIdx.x * C;
    if (t == 0) total = 0.f;
    for (int c = t; c < C; c += 128) {
        const float v = widen(r[c]);
        stage[t] = v * v;
        __syncthreads();
        if (t == 0) {
            const int filled = min(128, C - c);
            for (int k = 0; k < filled; ++k) total += stage[k];
        }
        __syncthreads();
    }
    __syncthreads();
    const float scale = rsqrtf(total / C + eps);
    for (int c = t; c < C; c += 128) out[(long long)blockIdx.x * C + c] = narrow(widen(r[c]) * scale * widen(weight[c]));
}
