// LayerNorm forward, kernels 1, 2 and 5 (3 and 4 are in learn/layernorm/warp.cu, 6 in norms/layernorm_rows.cu):
//
//   out = (x - mean) * rstd * gamma + beta,   rstd = 1 / sqrt(var + eps)   over each row of C channels
//
// mean and rstd, N floats each, are also stored, for a backward pass. N = B * T rows, any C.
//
// Kernels 1 to 5 follow llm.c's LayerNorm kernels. Each changes one thing compared with the previous one:
//
//   layernorm_forward_kernel1: one thread per row, loops over C. Neighbouring threads read addresses a whole row apart,
//       and N rows give only N threads: too few to keep a GPU busy.
//   mean_kernel, rstd_kernel, normalization_kernel: three kernels: one block per row, tree in shared memory; then one
//       thread per element. Together they are kernel 2. Each thread adds every LN_BLOCK-th channel (coarsening), and
//       the tree adds the sums of the threads. Neighbouring threads read neighbouring addresses, but all three kernels
//       read x.
//   layernorm_forward_kernel5: one block per row, reduced in two stages: warps, then the first warp. A single kernel
//       computes the sum and the sum of squares in one pass. Warps reduce by shuffles: two barriers in total, instead
//       of one barrier per level of a tree.
// Kernels 1 and 2 compute the variance around the mean, in a separate pass. Kernel 5 computes E[x^2] - E[x]^2. This
// formula reads x once less, but loses all digits when |mean| is large compared with the standard deviation.
#include "lib/common.cuh"

#ifndef LN_BLOCK  // blockDim.x: a power of two, 32 to 1024
#define LN_BLOCK 256
#endif

// launch: grid=ceil(N / block) block=64
extern "C" __global__ void layernorm_forward_kernel1(
    const float* x,      // (N, C)
    const float* gamma,  // (C)
    const float* beta,   // (C)
    float* out,          // (N, C)
    float* mean,         // (N)
    float* rstd,         // (N)
    float eps, int N, int C) {
    const long long row = (long long)blockIdx.x * LN_BLOCK + threadIdx.x;
    if (row >= N) return;
    const float* x_row = x + row * C;
    float* out_row = out + row * C;

    // Unrolled, the loop keeps 32 loads in flight: the additions depend on each other, but the loads do not.
    float m = 0.0f;
#pragma unroll 32
    for (int c = 0; c < C; ++c) m += x_row[c];
    m /= C;

    float var = 0.0f;
#pragma unroll 32
    for (int c = 0; c < C; ++c) var += (x_row[c] - m) * (x_row[c] - m);
    var /= C;

    const float r = rsqrtf(var + eps);
    for (int c = 0; c < C; ++c) out_row[c] = (x_row[c] - m) * r * gamma[c] + beta[c];
    mean[row] = m;
    rstd[row] = r;
}

// Calls use(v) for a thread's share of a row: every LN_BLOCK-th channel. Eight loads are issued before the first value
// is used. The loop is unrolled by hand, because the compiler would load channels after the last whole group of eight
// one by one. At C = 768 a thread has only 3 channels, so each of them would take a full memory latency.
template <typename Use>
__device__ __forceinline__ void coarsen(const float* x_row, int C, Use use) {
    constexpr int BATCH = 8;
    for (int start = threadIdx.x; start < C; start += BATCH * LN_BLOCK) {
        float v[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (start + i * LN_BLOCK < C) v[i] = x_row[start + i * LN_BLOCK];
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (start + i * LN_BLOCK < C) use(v[i]);
        }
    }
}

// launch: grid=N block=256
extern "C" __global__ void mean_kernel(
    const float* x,  // (N, C)
    float* mean,     // (N)
    int C) {
    __shared__ float scratch[LN_BLOCK];
    const float* x_row = x + (long long)blockIdx.x * C;
    float sum = 0.0f;
    coarsen(x_row, C, [&](float v) { sum += v; });
    sum = block_reduce_sum<LN_BLOCK>(sum, scratch);
    if (threadIdx.x == 0) mean[blockIdx.x] = sum / C;
}

// launch: grid=N block=256
extern "C" __global__ void rstd_kernel(
    const float* x,     // (N, C)
    const float* mean,  // (N)
    float* rstd,        // (N)
    float eps, int C) {
    __shared__ float scratch[LN_BLOCK];
    const float* x_row = x + (long long)blockIdx.x * C;
    const float m = mean[blockIdx.x];
    float sum = 0.0f;
    coarsen(x_row, C, [&](float v) { sum += (v - m) * (v - m); });
    sum = block_reduce_sum<LN_BLOCK>(sum, scratch);
    if (threadIdx.x == 0) rstd[blockIdx.x] = rsqrtf(sum / C + eps);
}

// blockIdx.x is the row, so that no thread divides by C.
// launch: grid=N, ceil(C / block) block=256
extern "C" __global__ void normalization_kernel(
    const float* x,      // (N, C)
    const float* mean,   // (N)
    const float* rstd,   // (N)
    const float* gamma,  // (C)
    const float* beta,   // (C)
    float* out,          // (N, C)
    int C) {
    const int c = blockIdx.y * LN_BLOCK + threadIdx.x;
    if (c >= C) return;
    const long long row = blockIdx.x, i = row * C + c;
    // x is read for the last time and out is not read again soon: neither needs to stay in the cache.
    __stcs(out + i, (__ldcs(x + i) - mean[row]) * rstd[row] * gamma[c] + beta[c]);
}

// launch: grid=N block=128
extern "C" __global__ void layernorm_forward_kernel5(
    const float* __restrict__ x,      // (N, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    float* __restrict__ out,          // (N, C)
    float* __restrict__ mean,         // (N)
    float* __restrict__ rstd,         // (N)
    float eps, int C) {
    constexpr int WARPS = LN_BLOCK / 32;
    __shared__ float sums[WARPS], squares[WARPS];  // one per warp; later, sums[0] is mean and squares[0] is rstd
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = blockIdx.x;
    const float* x_row = x + row * C;
    float* out_row = out + row * C;

    float sum = 0.0f, square = 0.0f;
    coarsen(x_row, C, [&](float v) {
        sum += v;
        square += v * v;
    });
    sum = lanes_sum<32>(sum);
    square = lanes_sum<32>(square);
    if (lane == 0) {
        sums[warp] = sum;
        squares[warp] = square;
    }
    __syncthreads();
    if (warp == 0) {
        const float m = lanes_sum<32>(lane < WARPS ? sums[lane] : 0.0f) / C;
        // Round m * m like the squares of x. A fused multiply-add would keep m * m exact, and the variance of a
        // constant row would not be 0.
        float var = lanes_sum<32>(lane < WARPS ? squares[lane] : 0.0f) / C - __fmul_rn(m, m);
        if (var < 0.0f) var = 0.0f;  // rounding can make var negative; fmaxf would hide a NaN
        if (lane == 0) {
            sums[0] = mean[row] = m;
            squares[0] = rstd[row] = rsqrtf(var + eps);
        }
    }
    __syncthreads();
    const float m = sums[0], r = squares[0];
#pragma unroll 3  // factor 4 takes 40 registers per thread: only three quarters of the threads fit on an SM
    for (int c = threadIdx.x; c < C; c += LN_BLOCK) {
        __stcs(out_row + c, (__ldcs(x_row + c) - m) * r * gamma[c] + beta[c]);
    }
}
