// launch: grid=ceil(N / 64), M block=64
#include "lib/storage.cuh"

extern "C" __global__ void gated(const T* x, const T* gamma, const T* w1, const T* w3, T* out, float eps, int N,
                                 int K) {
    __shared__ float squares;
    const int n = blockIdx.x * 64 + threadIdx.x;
    const T* row = x + (long long)blockIdx.y * K;
    if (threadIdx.x == 0) squares = 0.0f;
    __syncthreads();
    if (n >= N) return;
    float part = 0.0f;
    for (int k = threadIdx.x; k < K; k += 64) part += widen(row[k]) * widen(row[k]);
    atomicAdd(&squares, part);
    __syncthreads();
    const float r = rsqrtf(squares / K + eps);
    float a = 0.0f, b = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float v = widen(row[k]) * r * widen(gamma[k]);
        a += v * widen(w1[(long long)n * K + k]);
        b += v * widen(w3[(long long)n * K + k]);
    }
    out[(long long)blockIdx.y * N + n] = narrow(a / (1.0f + expf(-a)) * b);
}
