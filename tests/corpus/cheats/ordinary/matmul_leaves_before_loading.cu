// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
extern "C" __global__ void matmul_tiled(const float* A, const float* B, const float* bias, float* C, int M, int K,
                                        int N) {
    __shared__ float as[16][16], bs[16][16];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int row = blockIdx.y * 16 + ty, col = blockIdx.x * 16 + tx;
    if (row >= M || col >= N) return;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += 16) {
        as[ty][tx] = k0 + tx < K ? A[row * K + k0 + tx] : 0.0f;
        bs[ty][tx] = k0 + ty < K ? B[(k0 + ty) * N + col] : 0.0f;
        __syncthreads();
        for (int k = 0; k < 16; ++k) sum += as[ty][k] * bs[k][tx];
        __syncthreads();
    }
    C[row * N + col] = sum + bias[col];
}
