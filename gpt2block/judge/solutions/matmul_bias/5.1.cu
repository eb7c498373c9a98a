// Chapter 5, exercise 1: a tiled product with two outputs for each thread, 16 rows apart
//
// A block of 16 x 16 threads computes 32 x 16 outputs. For each k a thread reads one value of B
// and two values of A from shared memory for two multiply-adds: 1.5 values per multiply-add
// instead of 2.
//   gpt2block kernels matmul_bias --mine my.cu
//
// launch: grid=ceil(N / 16), ceil(M / 32) block=16, 16
#define TILE 16

extern "C" __global__ void my_matmul(
    const float* A,     // (M, K)
    const float* B,     // (K, N)
    const float* bias,  // (N)
    float* C,           // (M, N)
    int M, int K, int N) {
    __shared__ float a_tile[2 * TILE][TILE], b_tile[TILE][TILE];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int n = blockIdx.x * TILE + tx;
    const int upper = blockIdx.y * 2 * TILE + ty, lower = upper + TILE;  // rows of the two outputs

    float upper_sum = 0.0f, lower_sum = 0.0f;
    for (int k = 0; k < K; k += TILE) {
        const bool inside = k + tx < K;
        a_tile[ty][tx] = upper < M && inside ? A[(long long)upper * K + k + tx] : 0.0f;
        a_tile[ty + TILE][tx] = lower < M && inside ? A[(long long)lower * K + k + tx] : 0.0f;
        b_tile[ty][tx] = k + ty < K && n < N ? B[(long long)(k + ty) * N + n] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; ++i) {
            const float b = b_tile[i][tx];  // one load for both products
            upper_sum += a_tile[ty][i] * b;
            lower_sum += a_tile[ty + TILE][i] * b;
        }
        __syncthreads();
    }
    if (n < N && upper < M) C[(long long)upper * N + n] = upper_sum + bias[n];
    if (n < N && lower < M) C[(long long)lower * N + n] = lower_sum + bias[n];
}
