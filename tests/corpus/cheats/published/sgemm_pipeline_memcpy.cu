#include <cuda_pipeline.h>
// launch: grid=ceil(N / 32), ceil(M / 32) block=32, 8
constexpr int STAGES = 3;

struct Tile { float a[32][33]; float b[32][32]; };

extern "C" __global__ void __launch_bounds__(256) gemm_stages(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ Tile tile[STAGES];
    const int x = threadIdx.x, y = threadIdx.y;
    const int n = blockIdx.x * 32 + x, m0 = blockIdx.y * 32;
    const int count = (K + 31) / 32;

    auto issue = [&](int t) {
        Tile& to = tile[t % STAGES];
        for (int r = y; r < 32; r += 8) {
            const int ka = t * 32 + x, kb = t * 32 + r, m = m0 + r;
            const bool ina = m < M && ka < K, inb = n < N && kb < K;
            __pipeline_memcpy_async(&to.a[r][x], ina ? &A[(size_t)m * K + ka] : A, 4, ina ? 0 : 4);
            __pipeline_memcpy_async(&to.b[r][x], inb ? &B[(size_t)kb * N + n] : B, 4, inb ? 0 : 4);
        }
    };

    for (int t = 0; t < STAGES - 1; ++t) {
        if (t < count) issue(t);
        __pipeline_commit();
    }
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    for (int t = 0; t < count; ++t) {
        __pipeline_wait_prior(STAGES - 2);
        __syncthreads();
        if (t + STAGES - 1 < count) issue(t + STAGES - 1);
        __pipeline_commit();
        const Tile& now = tile[t % STAGES];
#pragma unroll 8
        for (int k = 0; k < 32; ++k) {
            const float b = now.b[k][x];
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] += now.a[y + 8 * i][k] * b;
        }
    }
    if (n < N) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = m0 + y + 8 * i;
            if (m < M) C[(size_t)m * N + n] = sum[i] + bias[n];
        }
    }
}
