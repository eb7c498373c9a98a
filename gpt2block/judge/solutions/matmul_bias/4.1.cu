// Chapter 4, exercise 1: a matrix product by tiles of 16 x 16 in shared memory
//
// At each step the 256 threads load a tile of A and a tile of B, one value each. Places
// outside the matrices become zeros, which add nothing. No thread returns before the end of
// the loop, as all have to reach both barriers.
//   gpt2block kernels matmul_bias --mine my.cu
//
// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
#define TILE 16

extern "C" __global__ void my_matmul(
    const float* A,     // (M, K)
    const float* B,     // (K, N)
    const float* bias,  // (N)
    float* C,           // (M, N)
    int M, int K, int N) {
    __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int n = blockIdx.x * TILE + tx, m = blockIdx.y * TILE + ty;

    float sum = 0.0f;
    for (int k = 0; k < K; k += TILE) {
        a_tile[ty][tx] = m < M && k + tx < K ? A[(long long)m * K + k + tx] : 0.0f;
        b_tile[ty][tx] = k + ty < K && n < N ? B[(long long)(k + ty) * N + n] : 0.0f;
        __syncthreads();  // both tiles are complete
        for (int i = 0; i < TILE; ++i) sum += a_tile[ty][i] * b_tile[i][tx];
        __syncthreads();  // all threads have read the tiles, which the next step overwrites
    }
    if (m < M && n < N) C[(long long)m * N + n] = sum + bias[n];
}
