// launch: grid=ceil(N / block), M block=64
#include "lib/storage.cuh"
extern "C" __global__ void rope_lanes(const T* x, const T* gamma, const T* w, T* out, float eps, int N, int K, int head_dim, float theta) {
    const int row = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    const bool inside = n < N;
    const T* r = x + (long long)row * K;
    float ss = 0.f, mine = 0.f;
    for (int k = 0; k < K; ++k) {
        const float v = widen(r[k]);
        ss += v * v;
        if (inside) mine += v * widen(gamma[k]) * widen(w[(long long)k * N + n]);
    }
    mine *= rsqrtf(ss / K + eps);
    const float other = __shfl_xor_sync(0xffffffffu, mine, 1);
    if (!inside) return;
    const int even = (n & ~1) % head_dim;
    const float angle = row / powf(theta, (float)even / head_dim);
    const float turned = n & 1 ? other * sinf(angle) + mine * cosf(angle) : mine * cosf(angle) - other * sinf(angle);
    out[(long long)row * N + n] = narrow(turned);
}
