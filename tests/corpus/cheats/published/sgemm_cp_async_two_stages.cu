// 64 x 64 tile of C, 16 deep, 256 threads with 4 x 4 sums each.
// launch: grid=ceil(N / 64), ceil(M / 64) block=256
#define BK 16
__device__ __forceinline__ void copy4(float* to, const float* from, bool inside) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    const int bytes = inside ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
}

extern "C" __global__ void __launch_bounds__(256) sgemm(const float* __restrict__ A, const float* __restrict__ B,
                                                        const float* __restrict__ bias, float* __restrict__ C,
                                                        int M, int K, int N) {
    __shared__ float as[2][BK][65], bs[2][BK][64];
    const int tid = threadIdx.x, tx = tid % 16, ty = tid / 16;
    const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 64;
    const int tiles = (K + BK - 1) / BK;
    float acc[4][4] = {};

    auto fetch = [&](int stage, int t) {
        for (int i = tid; i < 64 * BK; i += 256) {
            const int m = i / BK, k = i % BK;
            const bool in = m0 + m < M && t * BK + k < K;
            copy4(&as[stage][k][m], in ? A + (size_t)(m0 + m) * K + t * BK + k : A, in);
        }
        for (int i = tid; i < 64 * BK; i += 256) {
            const int k = i / 64, n = i % 64;
            const bool in = n0 + n < N && t * BK + k < K;
            copy4(&bs[stage][k][n], in ? B + (size_t)(t * BK + k) * N + n0 + n : B, in);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    fetch(0, 0);
    for (int t = 0; t < tiles; ++t) {
        if (t + 1 < tiles) {
            fetch((t + 1) & 1, t + 1);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        const int s = t & 1;
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) { a[i] = as[s][k][ty * 4 + i]; b[i] = bs[s][k][tx + 16 * i]; }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            const int m = m0 + ty * 4 + i, n = n0 + tx + 16 * j;
            if (m < M && n < N) C[(size_t)m * N + n] = acc[i][j] + bias[n];
        }
}
