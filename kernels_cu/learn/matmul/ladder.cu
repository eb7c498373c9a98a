// Matrix product with bias: C = A B + bias, row-major fp32; from one thread per output to thread coarsening.
//
//   A (M, K)   B (K, N)   bias (N) or null   C (M, N)
//
// The kernels have the names of llm.c's matmul kernels. Each variant adds one idea to the previous one. All variants
// add the products of an output in the order of k:
//
//   matmul_forward_kernel1: one thread per output, operands read from global memory. There are 2 loads per
//       multiply-add. The L1 cache limits their cost: a warp shares its value of A, and a block its values of B.
//   (matmul_bias_tiled in learn/matmul/skeleton.cu: tiles of A and B in shared memory, so that a value loaded from
//       global memory is used 16 times. There are still 2 loads per multiply-add, now from shared memory, or 1.25 if
//       one load fetches 4 values of A.)
//   matmul_forward_kernel2: thread coarsening: 8 outputs of a column per thread, which share each loaded b
//   (matmul_forward_kernel3 in learn/matmul/registers.cu: 8x8 outputs per thread, and copies that overlap the
//   arithmetic)
//
// Thread coarsening means that one thread does the work of several threads. Here a value of B is loaded once instead of
// 8 times and stays in a register. Tiles are loaded as in matmul_bias_tiled.
//
//                  B  | b |             a step of 4 along k, for the 8 outputs of a thread:
//               k     | b |               4 loads of b, which neighbouring threads read from neighbouring addresses
//                     | b |               8 loads of a a a a, 16 bytes, the same address for a whole warp
//                     | b |              32 multiply-adds
//              k      -----
//   A   [ a a a a ]  C: x               This is 0.375 loads from shared memory per multiply-add instead of 1.25. Work
//       [ a a a a ]     x               that 8 threads would repeat is also done once: position of the tile, loop
//       [ a a a a ]     x               counter and branch, barriers, address of b. And each value of B that is loaded
//       [   ...   ]    ...              from global memory is used 64 times, not 16.
//
// The cost: 8 times fewer threads, each with more registers. With a small C, multiprocessors are idle.
//
// A block of matmul_forward_kernel1 computes a tile of 8 x 32 outputs, and a block of matmul_forward_kernel2 a tile of
// 64 x 32. The grid has one dimension: row after row of tiles, from left to right.
#ifndef COARSENING
#define COARSENING 8
#endif
static_assert(COARSENING > 0, "a thread computes COARSENING outputs");

constexpr int WIDTH = 32;                  // width of a block, of its tile and of a slice along K: threads of a warp
constexpr int HEIGHT = 8;                  // height of a block
constexpr int SPAN = HEIGHT * COARSENING;  // rows of a tile of matmul_forward_kernel2
constexpr int B_ROWS = WIDTH / HEIGHT;     // values of a slice of B that a thread loads, one per row

// launch: grid=ceil(M / 8) * ceil(N / 32) block=32, 8
extern "C" __global__ void matmul_forward_kernel1(
    const float* __restrict__ A,     // (M, K)
    const float* __restrict__ B,     // (K, N)
    const float* __restrict__ bias,  // (N) or null
    float* __restrict__ C,           // (M, N)
    int M, int K, int N) {
    const int tile = blockIdx.x, across = (N + WIDTH - 1) / WIDTH;
    const int row = tile / across * HEIGHT + threadIdx.y;
    const int col = tile % across * WIDTH + threadIdx.x;
    if (row >= M || col >= N) return;
    const float* a = A + (long long)row * K;
    const float* b = B + col;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k, b += N) sum += a[k] * *b;
    C[(long long)row * N + col] = bias ? sum + bias[col] : sum;
}

// launch: grid=ceil(M / 64) * ceil(N / 32) block=32, 8
extern "C" __global__ void __launch_bounds__(256) matmul_forward_kernel2(
    const float* __restrict__ A,     // (M, K)
    const float* __restrict__ B,     // (K, N)
    const float* __restrict__ bias,  // (N) or null
    float* __restrict__ C,           // (M, N)
    int M, int K, int N) {
    __shared__ __align__(16) float a_tile[SPAN][WIDTH];
    __shared__ float b_tile[WIDTH][WIDTH];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int tile = blockIdx.x, across = (N + WIDTH - 1) / WIDTH;
    const int row = tile / across * SPAN + ty;  // row of the thread's first output; its outputs are HEIGHT rows apart
    const int col = tile % across * WIDTH + tx;

    // As in matmul_bias_tiled, the next slice is loaded into registers while the current slice is multiplied. Threads
    // after the end of C read its last row or column again and store nothing.
    float a_next[COARSENING], b_next[B_ROWS];
    const float* b = B + min(col, N - 1);
    auto fetch = [&](int k0) {
#pragma unroll
        for (int i = 0; i < COARSENING; ++i) {
            const long long r = min(row + i * HEIGHT, M - 1);
            a_next[i] = k0 + tx < K ? A[r * K + k0 + tx] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < B_ROWS; ++i) {
            const int k = k0 + ty + i * HEIGHT;
            b_next[i] = k < K ? b[(long long)k * N] : 0.0f;
        }
    };

    float sum[COARSENING] = {};
    fetch(0);
    for (int k0 = 0; k0 < K; k0 += WIDTH) {
#pragma unroll
        for (int i = 0; i < COARSENING; ++i) a_tile[ty + i * HEIGHT][tx] = a_next[i];
#pragma unroll
        for (int i = 0; i < B_ROWS; ++i) b_tile[ty + i * HEIGHT][tx] = b_next[i];
        __syncthreads();
        fetch(k0 + WIDTH);
#pragma unroll 1  // a higher factor causes register spills on some architectures
        for (int k = 0; k < WIDTH; k += 4) {
            const float b0 = b_tile[k][tx], b1 = b_tile[k + 1][tx], b2 = b_tile[k + 2][tx], b3 = b_tile[k + 3][tx];
#pragma unroll
            for (int i = 0; i < COARSENING; ++i) {
                const float4 a = *reinterpret_cast<const float4*>(&a_tile[ty + i * HEIGHT][k]);
                sum[i] += a.x * b0;
                sum[i] += a.y * b1;
                sum[i] += a.z * b2;
                sum[i] += a.w * b3;
            }
        }
        __syncthreads();
    }
    if (col >= N) return;
    const float shift = bias ? bias[col] : 0.0f;
#pragma unroll
    for (int i = 0; i < COARSENING; ++i) {
        const int r = row + i * HEIGHT;
        if (r < M) C[(long long)r * N + col] = bias ? sum[i] + shift : sum[i];
    }
}
