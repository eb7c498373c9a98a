// Chapter 5, exercise 2: a tiled product with OUTPUTS outputs for each thread, 16 rows apart
//
// `sum` has a constant size and all loops over it are unrolled, so that it stays in
// registers. The launch line cannot use OUTPUTS: 128 in it is TILE * OUTPUTS.
//   gpt2block kernels matmul_bias --mine my.cu
//   gpt2block kernels matmul_bias --mine my.cu --shape M=300
//
// launch: grid=ceil(N / 16), ceil(M / 128) block=16, 16
constexpr int TILE = 16, OUTPUTS = 8;

extern "C" __global__ void my_matmul(
    const float* A,     // (M, K)
    const float* B,     // (K, N)
    const float* bias,  // (N)
    float* C,           // (M, N)
    int M, int K, int N) {
    __shared__ float a_tile[OUTPUTS * TILE][TILE], b_tile[TILE][TILE];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int n = blockIdx.x * TILE + tx;
    const int first = blockIdx.y * OUTPUTS * TILE + ty;  // row of the thread's first output

    float sum[OUTPUTS] = {};
    for (int k = 0; k < K; k += TILE) {
#pragma unroll
        for (int r = 0; r < OUTPUTS; ++r) {
            const int m = first + r * TILE;
            a_tile[ty + r * TILE][tx] = m < M && k + tx < K ? A[(long long)m * K + k + tx] : 0.0f;
        }
        b_tile[ty][tx] = k + ty < K && n < N ? B[(long long)(k + ty) * N + n] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; ++i) {
            const float b = b_tile[i][tx];  // one load for all products
#pragma unroll
            for (int r = 0; r < OUTPUTS; ++r) sum[r] += a_tile[ty + r * TILE][i] * b;
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < OUTPUTS; ++r) {
        const int m = first + r * TILE;
        if (m < M && n < N) C[(long long)m * N + n] = sum[r] + bias[n];
    }
}
