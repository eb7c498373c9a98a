// launch: grid=ceil(M / 4) block=32, 4
#include "lib/storage.cuh"
extern "C" __global__ void rmsnorm_warps(const T* x, const T* weight, T* out, float eps, int M, int C) {
    const int row = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x;
    if (row >= M) return;
    const T* r = x + (long long)row * C;
    float total = 0.f;
    for (int c = lane; c < C; c += 32) {
        const unsigned live = __activemask();
        float v = widen(r[c]) * widen(r[c]);
        for (int o = 16; o; o >>= 1) v += __shfl_down_sync(live, v, o);
        if (lane == 0) total += v;
    }
    total = __shfl_sync(0xffffffffu, total, 0);
    const float scale = rsqrtf(total / C + eps);
    for (int c = lane; c < C; c += 32) out[(long long)row * C + c] = narrow(widen(r[c]) * scale * widen(weight[c]));
}
