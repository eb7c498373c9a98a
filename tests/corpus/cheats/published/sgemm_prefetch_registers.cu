// launch: grid=ceil(N / 64), ceil(M / 16) block=16, 16
extern "C" __global__ void __launch_bounds__(256) matmul_prefetch(const float* __restrict__ A, const float* __restrict__ B,
                                                                 const float* __restrict__ bias, float* __restrict__ C, int M, int K, int N) {
    __shared__ float sa[16][17];
    __shared__ __align__(16) float sb[16][64];
    const int x = threadIdx.x, y = threadIdx.y, m = blockIdx.y * 16 + y, n = blockIdx.x * 64 + 4 * x;
    float ra, rb[4], acc[4] = {0.f, 0.f, 0.f, 0.f};
    auto fetch = [&](int k0) {
        ra = m < M && k0 + x < K ? A[(size_t)m * K + k0 + x] : 0.f;
        for (int j = 0; j < 4; ++j) rb[j] = k0 + y < K && n + j < N ? B[(size_t)(k0 + y) * N + n + j] : 0.f;
    };
    fetch(0);
    for (int k0 = 0; k0 < K; k0 += 16) {
        sa[y][x] = ra;
        for (int j = 0; j < 4; ++j) sb[y][4 * x + j] = rb[j];
        __syncthreads();
        if (k0 + 16 < K) fetch(k0 + 16);
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const float4 b = *reinterpret_cast<const float4*>(&sb[k][4 * x]);
            acc[0] += sa[y][k] * b.x; acc[1] += sa[y][k] * b.y;
            acc[2] += sa[y][k] * b.z; acc[3] += sa[y][k] * b.w;
        }
    }
    for (int j = 0; j < 4; ++j)
        if (m < M && n + j < N) C[(size_t)m * N + n + j] = acc[j] + bias[n + j];
}
