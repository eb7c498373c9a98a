// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
#include "lib/storage.cuh"

extern "C" __global__ void gemm_kn(const T* a, const T* w, T* out, int M, int N, int K) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    const int m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum = fmaf(widen(a[(long long)m * K + k]), widen(w[(long long)k * N + n]), sum);
    out[(long long)m * N + n] = narrow(sum);
}
