// launch: grid=ceil(N / block), M block=128
#include "lib/storage.cuh"
#define ROOM 1024
extern "C" __global__ void ffn_shared_row(const T* x, const T* gamma, const T* w1, const T* w3, T* out, float eps, int N, int K) {
    __shared__ float normed[ROOM];
    __shared__ float sums[4];
    const T* r = x + (long long)blockIdx.y * K;
    float ss = 0.f;
    for (int k = threadIdx.x; k < K; k += 128) ss += widen(r[k]) * widen(r[k]);
    for (int o = 16; o; o >>= 1) ss += __shfl_xor_sync(0xffffffffu, ss, o);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = ss;
    __syncthreads();
    const float scale = rsqrtf((sums[0] + sums[1] + sums[2] + sums[3]) / K + eps);
    const int used = min(K, ROOM);
    for (int k = threadIdx.x; k < used; k += 128) normed[k] = widen(r[k]) * scale * widen(gamma[k]);
    __syncthreads();
    const int n = blockIdx.x * 128 + threadIdx.x;
    if (n >= N) return;
    float g = 0.f, u = 0.f;
    for (int k = 0; k < used; ++k) {
        g += normed[k] * widen(w1[(long long)n * K + k]);
        u += normed[k] * widen(w3[(long long)n * K + k]);
    }
    out[(long long)blockIdx.y * N + n] = narrow(g / (1.f + expf(-g)) * u);
}
