// launch: grid=ceil(N / 32), ceil(M / 16) block=160
__device__ __forceinline__ void wait_full(int b) { asm volatile("bar.sync %0, 160;" :: "r"(1 + b) : "memory"); }
__device__ __forceinline__ void set_full(int b) { __threadfence_block(); asm volatile("bar.arrive %0, 160;" :: "r"(1 + b) : "memory"); }
__device__ __forceinline__ void wait_free(int b) { asm volatile("bar.sync %0, 128;" :: "r"(3 + b) : "memory"); }
__device__ __forceinline__ void set_free(int b) { __threadfence_block(); asm volatile("bar.arrive %0, 128;" :: "r"(3 + b) : "memory"); }

extern "C" __global__ void __launch_bounds__(160) matmul_roles(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ float sa[2][16][33], sb[2][32][32];
    const int m0 = blockIdx.y * 16, n0 = blockIdx.x * 32, tiles = (K + 31) / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        for (int t = 0; t < tiles; ++t) {
            if (t > 1) wait_free(t & 1);
            const int k = 32 * t;
            for (int r = 0; r < 16; ++r) sa[t & 1][r][lane] = m0 + r < M && k + lane < K ? A[(size_t)(m0 + r) * K + k + lane] : 0.f;
            for (int r = 0; r < 32; ++r) sb[t & 1][r][lane] = k + r < K && n0 + lane < N ? B[(size_t)(k + r) * N + n0 + lane] : 0.f;
            set_full(t & 1);
        }
    } else {
        const int y = threadIdx.x / 32 - 1;
        float acc[4] = {};
        for (int t = 0; t < tiles; ++t) {
            wait_full(t & 1);
            for (int k = 0; k < 32; ++k)
                for (int i = 0; i < 4; ++i) acc[i] = fmaf(sa[t & 1][4 * y + i][k], sb[t & 1][k][lane], acc[i]);
            if (t + 2 < tiles) set_free(t & 1);
        }
        for (int i = 0; i < 4; ++i)
            if (m0 + 4 * y + i < M && n0 + lane < N) C[(size_t)(m0 + 4 * y + i) * N + n0 + lane] = acc[i] + bias[n0 + lane];
    }
}
