// Matrix product with bias: C = A B + bias, row-major fp32. A step of LeetGPU's GPT-2 block challenge.
//
//   matmul_bias_tiled: one thread per output, 16x16 tiles in shared memory, the next tile in flight
//
// A block has TILE x TILE threads. It processes K in steps of TILE. In each step, the block loads one tile of A and one
// of B, so that each value loaded from global memory is used TILE times, and each thread adds TILE products.
//
//              k ->                    n ->
//   A (M, K)  [....AAAA....]   B (K, N)  : B :
//                                        : B :     two barriers per step: tiles are complete before they are read,
//                                        : B :     and have been read before they are overwritten
//
// While the products of a step are added, the next tiles are loaded from global memory into two registers per thread:
// the arithmetic hides the latency of these loads.
#ifndef TILE
#define TILE 16
#endif

// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
extern "C" __global__ void matmul_bias_tiled(
    const float* __restrict__ A,     // (M, K)
    const float* __restrict__ B,     // (K, N)
    const float* __restrict__ bias,  // (N) or null
    float* __restrict__ C,           // (M, N)
    int M, int K, int N) {
    __shared__ float a_tile[TILE][TILE];
    __shared__ float b_tile[TILE][TILE];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int row = blockIdx.y * TILE + ty;
    const int col = blockIdx.x * TILE + tx;
    const bool row_inside = row < M, col_inside = col < N;
    const float* a = A + (long long)row * K + tx;  // A[row][k0 + tx], initially k0 = 0
    const float* b = B + (long long)ty * N + col;  // B[k0 + ty][col]

    float a_next = row_inside && tx < K ? *a : 0.0f;
    float b_next = col_inside && ty < K ? *b : 0.0f;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        a_tile[ty][tx] = a_next;
        b_tile[ty][tx] = b_next;
        __syncthreads();
        a += TILE;
        b += (long long)TILE * N;
        a_next = row_inside && k0 + TILE + tx < K ? *a : 0.0f;
        b_next = col_inside && k0 + TILE + ty < K ? *b : 0.0f;
#pragma unroll
        for (int k = 0; k < TILE; ++k) sum += a_tile[ty][k] * b_tile[k][tx];
        __syncthreads();
    }
    if (row_inside && col_inside) C[(long long)row * N + col] = bias ? sum + bias[col] : sum;
}
