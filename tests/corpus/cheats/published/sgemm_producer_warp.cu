// launch: grid=ceil(N / 32), ceil(M / 32) block=160
#define FULL 1
#define EMPTY 3
__device__ __forceinline__ void bar_sync(int id) { asm volatile("bar.sync %0, 160;" :: "r"(id) : "memory"); }
__device__ __forceinline__ void bar_arrive(int id) {
    __threadfence_block();
    asm volatile("bar.arrive %0, 160;" :: "r"(id) : "memory");
}

extern "C" __global__ void __launch_bounds__(160) gemm_specialised(
    const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ float as[2][32][33], bs[2][32][33];
    const int m0 = blockIdx.y * 32, n0 = blockIdx.x * 32;
    const int steps = (K + 31) / 32;

    if (threadIdx.x >= 128) {  // the producer
        const int lane = threadIdx.x - 128;
        for (int t = 0; t < steps; ++t) {
            const int buf = t & 1, k0 = 32 * t;
            if (t >= 2) bar_sync(EMPTY + buf);
            for (int r = 0; r < 32; ++r) {
                as[buf][r][lane] = (m0 + r < M && k0 + lane < K) ? A[(size_t)(m0 + r) * K + k0 + lane] : 0.0f;
                bs[buf][r][lane] = (k0 + r < K && n0 + lane < N) ? B[(size_t)(k0 + r) * N + n0 + lane] : 0.0f;
            }
            bar_arrive(FULL + buf);
        }
        return;
    }

    const int x = threadIdx.x % 32, y = threadIdx.x / 32;
    float sum[8] = {};
    for (int t = 0; t < steps; ++t) {
        const int buf = t & 1;
        bar_sync(FULL + buf);
#pragma unroll 4
        for (int k = 0; k < 32; ++k)
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] += as[buf][y * 8 + i][k] * bs[buf][k][x];
        if (t + 2 < steps) bar_arrive(EMPTY + buf);
    }
    if (n0 + x >= N) return;
    for (int i = 0; i < 8; ++i) {
        const int m = m0 + y * 8 + i;
        if (m < M) C[(size_t)m * N + n0 + x] = sum[i] + bias[n0 + x];
    }
}
