// launch: grid=ceil(N / 12), M block=8, 4, 3
#include "lib/storage.cuh"
extern "C" __global__ void ffn_groups(const T* x, const T* gamma, const T* w1, const T* w3, T* out, float eps, int N, int K) {
    const int wanted = blockIdx.x * 12 + threadIdx.z * 4 + threadIdx.y, n = min(wanted, N - 1);
    const T* r = x + (long long)blockIdx.y * K;
    float ss = 0.f, g = 0.f, u = 0.f;
    for (int k = threadIdx.x; k < K; k += 8) {
        const float v = widen(r[k]), z = v * widen(gamma[k]);
        ss += v * v;
        g += z * widen(w1[(long long)n * K + k]);
        u += z * widen(w3[(long long)n * K + k]);
    }
    for (int o = 4; o; o >>= 1) {
        ss += __shfl_xor_sync(0xffffffffu, ss, o);
        g += __shfl_xor_sync(0xffffffffu, g, o);
        u += __shfl_xor_sync(0xffffffffu, u, o);
    }
    const float scale = rsqrtf(ss / K + eps);
    g *= scale;
    if (threadIdx.x == 0 && wanted < N) out[(long long)blockIdx.y * N + n] = narrow(g / (1.0f + expf(-g)) * (u * scale));
}
