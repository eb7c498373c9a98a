// launch: grid=ceil(M / 8) block=32, 8
#include "lib/storage.cuh"

extern "C" __global__ void rmsnorm_down(const T* x, const T* weight, T* out, float eps, int M, int C) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= M) return;
    const T* in = x + (long long)row * C;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += 32) sum += widen(in[c]) * widen(in[c]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
    const float scale = rsqrtf(sum / C + eps);
    for (int c = threadIdx.x; c < C; c += 32) out[(long long)row * C + c] = narrow(widen(in[c]) * scale * widen(weight[c]));
}
