// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
#include "lib/storage.cuh"

extern "C" __global__ void gemm_tiles(const T* a, const T* w, T* out, int M, int N, int K) {
    __shared__ float at[16][17], wt[16][17];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int m = blockIdx.y * 16 + ty, n = blockIdx.x * 16 + tx, load_n = blockIdx.x * 16 + ty;
    float acc = 0.0f;
    for (int k0 = 0; k0 < K; k0 += 16) {
        const int k = k0 + tx;
        at[ty][tx] = m < M && k < K ? widen(a[(long long)m * K + k]) : 0.0f;
        wt[ty][tx] = load_n < N && k < K ? widen(w[(long long)load_n * K + k]) : 0.0f;
        __syncthreads();
        for (int i = 0; i < 16; ++i) acc = fmaf(at[ty][i], wt[tx][i], acc);
        __syncthreads();
    }
    if (m < M && n < N) out[(long long)m * N + n] = narrow(acc);
}
