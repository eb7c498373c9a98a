// Chapter 9, exercise 2: linear, few rows; every weight is loaded once for up to 8 rows of x
//
// A block computes one output of each row. Its 128 threads divide K, and a thread multiplies each of
// its weights by 8 rows. The order of additions is the same for every M: over k in a thread, over the
// lanes of a warp by shuffles, then over the warps.
//   gpt2block kernels linear --mine my.cu
//   gpt2block kernels linear --mine my.cu --shape M=8,K=768
//
// launch: grid=N, ceil(M / 8) block=128
#define ROWS 8
#define WARPS 4

extern "C" __global__ void my_linear(
    const float* x,     // (M, K)
    const float* w,     // (N, K)
    const float* bias,  // (N)
    float* out,         // (M, N)
    int M, int N, int K) {
    __shared__ float part[WARPS][ROWS];
    const int n = blockIdx.x, first = blockIdx.y * ROWS, rows = min(ROWS, M - first);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* x_rows = x + (long long)first * K;
    const float* w_row = w + (long long)n * K;

    float sum[ROWS] = {};
    for (int k = threadIdx.x; k < K; k += 32 * WARPS) {
        const float weight = w_row[k];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r < rows) sum[r] += weight * x_rows[(long long)r * K + k];
        }
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], distance);
        }
        if (lane == 0) part[warp][r] = sum[r];
    }
    __syncthreads();

    const int r = threadIdx.x;
    if (r >= rows) return;
    float total = 0.0f;
    for (int p = 0; p < WARPS; ++p) total += part[p][r];
    out[(long long)(first + r) * N + n] = total + bias[n];
}
