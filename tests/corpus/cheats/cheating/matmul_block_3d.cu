// launch: grid=ceil(M / 8), ceil(N / 8) block=8, 8, 4
extern "C" __global__ void matmul_cube(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ float part[4][8][8];
    const int n = blockIdx.y * 8 + threadIdx.x, m = blockIdx.x * 8 + threadIdx.y, z = threadIdx.z;
    float sum = 0.f;
    if (m < M && n < N)
        for (int k = z; k < K; k += 4) sum += A[(long long)m * K + k] * B[(long long)k * N + n];
    part[z][threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (z != 3 || m >= M || n >= N) return;
    for (int p = 0; p < 3; ++p) sum += part[p][threadIdx.y][threadIdx.x];
    C[(long long)m * N + n] = sum + bias[n];
}
