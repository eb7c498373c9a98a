// launch: grid=ceil(N / 32), ceil(M / 8) block=32, 8
#include "lib/storage.cuh"

extern "C" __global__ void gemm_small_sum(const T* a, const T* w, T* out, int M, int N, int K) {
    const int n = blockIdx.x * 32 + threadIdx.x, m = blockIdx.y * 8 + threadIdx.y;
    if (m >= M || n >= N) return;
    T sum = narrow(0.0f);
    for (int k = 0; k < K; ++k) {
        sum = narrow(widen(sum) + widen(a[(long long)m * K + k]) * widen(w[(long long)n * K + k]));
    }
    out[(long long)m * N + n] = sum;
}
