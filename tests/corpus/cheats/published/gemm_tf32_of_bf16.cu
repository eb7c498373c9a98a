#include "lib/storage.cuh"
// Four warps of a block divide K; their sums meet in shared memory.
// launch: grid=ceil(N / 8), ceil(M / 16) block=128
extern "C" __global__ void __launch_bounds__(128) gemm_tf32(const T* __restrict__ a, const T* __restrict__ w,
                                                            T* __restrict__ out, int M, int N, int K) {
    __shared__ float part[4][16][9];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, t = lane & 3;
    const int m = blockIdx.y * 16 + g, n = blockIdx.x * 8 + g;
    auto at = [&](const T* p, int row, int rows, int k) -> unsigned {
        return row < rows && k < K ? __float_as_uint(widen(p[(size_t)row * K + k])) : 0u;
    };
    float d0 = 0.f, d1 = 0.f, d2 = 0.f, d3 = 0.f;
    for (int k = warp * 8; k < K; k += 32) {
        const unsigned a0 = at(a, m, M, k + t), a1 = at(a, m + 8, M, k + t);
        const unsigned a2 = at(a, m, M, k + t + 4), a3 = at(a, m + 8, M, k + t + 4);
        const unsigned b0 = at(w, n, N, k + t), b1 = at(w, n, N, k + t + 4);
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    part[warp][g][2 * t] = d0;
    part[warp][g][2 * t + 1] = d1;
    part[warp][g + 8][2 * t] = d2;
    part[warp][g + 8][2 * t + 1] = d3;
    __syncthreads();
    const int r = threadIdx.x / 8, c = threadIdx.x % 8, row = blockIdx.y * 16 + r, col = blockIdx.x * 8 + c;
    if (row < M && col < N)
        out[(size_t)row * N + col] = narrow(part[0][r][c] + part[1][r][c] + part[2][r][c] + part[3][r][c]);
}
