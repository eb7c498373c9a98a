// launch: grid=ceil(N / 128), ceil(M / 8) block=128
extern "C" __global__ void matmul_strip(const float* __restrict__ A, const float* __restrict__ B,
                                        const float* __restrict__ bias, float* __restrict__ C, int M, int K, int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    const int m0 = blockIdx.y * 8, rows = min(8, M - m0);
    if (n >= N) return;
    float sums[8];
    for (int r = 0; r < 8; ++r) sums[r] = bias[n];
    for (int k = 0; k < K; ++k) {
        const float b = __ldg(B + (long long)k * N + n);
#pragma unroll
        for (int r = 0; r < 8; ++r)
            if (r < rows) sums[r] += A[(long long)(m0 + r) * K + k] * b;
    }
    for (int r = 0; r < rows; ++r) C[(long long)(m0 + r) * N + n] = sums[r];
}
