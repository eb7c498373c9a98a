// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
extern "C" __global__ void __launch_bounds__(256) tile_matmul(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ float at[16][16], bt[16][16];
    const int x = threadIdx.x, y = threadIdx.y, n = blockIdx.x * 16 + x, m = blockIdx.y * 16 + y;
    const unsigned sa = (unsigned)__cvta_generic_to_shared(&at[y][x]), sb = (unsigned)__cvta_generic_to_shared(&bt[y][x]);
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += 16) {
        const bool ia = m < M && k0 + x < K, ib = k0 + y < K && n < N;
        const float* pa = ia ? A + (size_t)m * K + k0 + x : A;
        const float* pb = ib ? B + (size_t)(k0 + y) * N + n : B;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(sa), "l"(pa), "r"(ia ? 4 : 0) : "memory");
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(sb), "l"(pb), "r"(ib ? 4 : 0) : "memory");
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 16; ++k) sum += at[y][k] * bt[k][x];
        __syncthreads();
    }
    if (m < M && n < N) C[(size_t)m * N + n] = sum + bias[n];
}
