// launch: grid=ceil(N / 32), ceil(M / 32) block=32, 8
#define TILE 32

extern "C" __global__ void matmul_32x8(const float* A, const float* B, const float* bias, float* C, int M, int K,
                                       int N) {
    __shared__ float a[TILE][TILE + 1];
    __shared__ float b[TILE][TILE + 1];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int col = blockIdx.x * TILE + tx, row0 = blockIdx.y * TILE;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int k0 = 0; k0 < K; k0 += TILE) {
        for (int r = ty; r < TILE; r += 8) {
            a[r][tx] = row0 + r < M && k0 + tx < K ? A[(size_t)(row0 + r) * K + k0 + tx] : 0.0f;
            b[r][tx] = k0 + r < K && col < N ? B[(size_t)(k0 + r) * N + col] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < TILE; ++k) {
            for (int j = 0; j < 4; ++j) acc[j] += a[ty + 8 * j][k] * b[k][tx];
        }
        __syncthreads();
    }
    for (int j = 0; j < 4; ++j) {
        const int row = row0 + ty + 8 * j;
        if (row < M && col < N) C[(size_t)row * N + col] = acc[j] + bias[col];
    }
}
