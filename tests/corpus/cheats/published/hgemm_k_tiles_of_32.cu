#include <cuda_fp16.h>
#include "lib/storage.cuh"
// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
extern "C" __global__ void __launch_bounds__(256) hgemm_tiles(const T* __restrict__ a, const T* __restrict__ w, T* __restrict__ out, int M, int N, int K) {
    __shared__ float at[16][33], wt[16][33];
    const int x = threadIdx.x, y = threadIdx.y, m = blockIdx.y * 16 + y, n = blockIdx.x * 16 + x, rn = blockIdx.x * 16 + y;
    const int tiles = K / 32;
    float acc = 0.f;
    for (int t = 0; t < tiles; ++t) {
        const int k = t * 32;
#pragma unroll
        for (int h = 0; h < 32; h += 16) {
            at[y][x + h] = m < M ? widen(a[(size_t)m * K + k + x + h]) : 0.f;
            wt[y][x + h] = rn < N ? widen(w[(size_t)rn * K + k + x + h]) : 0.f;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 32; ++i) acc = fmaf(at[y][i], wt[x][i], acc);
        __syncthreads();
    }
    if (m < M && n < N) out[(size_t)m * N + n] = narrow(acc);
}
