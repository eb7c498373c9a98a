// launch: grid=ceil(N / 32), ceil(M / 4) block=32, 4
#include "lib/storage.cuh"
extern "C" __global__ void gemm_lean(const T* a, const T* w, T* out, int M, int N, int K) {
    const int n = blockIdx.x * 32 + threadIdx.x, m = blockIdx.y * 4 + threadIdx.y;
    if (m >= M || n >= N) return;
    const T* ar = a + (long long)m * K;
    const T* wr = w + (long long)n * K;
    T acc = narrow(0.0f);
    for (int k = 0; k < K; ++k) acc = narrow(fmaf(widen(ar[k]), widen(wr[k]), widen(acc)));
    out[(long long)m * N + n] = acc;
}
