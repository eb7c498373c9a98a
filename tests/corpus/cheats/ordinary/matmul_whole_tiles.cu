// launch: grid=ceil(N / 8), ceil(M / 8) block=8, 8
extern "C" __global__ void matmul_8(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ float a[8][8];
    __shared__ float b[8][8];
    const int m = blockIdx.y * 8 + threadIdx.y, n = blockIdx.x * 8 + threadIdx.x;
    const int tiles = K / 8;
    float sum = 0.0f;
    for (int tile = 0; tile < tiles; ++tile) {
        const int k = tile * 8;
        a[threadIdx.y][threadIdx.x] = m < M ? A[m * K + k + threadIdx.x] : 0.0f;
        b[threadIdx.y][threadIdx.x] = n < N ? B[(k + threadIdx.y) * N + n] : 0.0f;
        __syncthreads();
        for (int i = 0; i < 8; ++i) sum += a[threadIdx.y][i] * b[i][threadIdx.x];
        __syncthreads();
    }
    if (m < M && n < N) C[m * N + n] = sum + bias[n];
}
