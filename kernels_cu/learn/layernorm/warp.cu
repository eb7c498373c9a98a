// LayerNorm forward, kernels 3 and 4:
//
//   out = (x - mean) * rstd * gamma + beta,   rstd = 1 / sqrt(var + eps)   over each row of C channels
//
// mean and rstd, N floats each, are also stored. N = B * T rows, any C. Both kernels follow llm.c's LayerNorm kernels:
//
//   layernorm_forward_kernel3: one warp per row by cooperative groups, all steps in one kernel, streaming hints. Kernel
//       2 (learn/layernorm/ladder.cu) takes three kernels. The 32 lanes reduce by shuffles, so that no row waits at a
//       barrier for another row. Hints: __restrict__ states that out overlaps no input, so that loads may move before
//       stores; __ldcs and __stcs state that x is read for the last time and that out is not read again soon, so that x
//       and out do not evict gamma and beta from the cache.
//   layernorm_forward_kernel4: kernel 3 with var = E[x^2] - E[x]^2: one pass fewer over x. This formula loses all
//       digits when |mean| is large compared with the standard deviation.
//
// Both kernels: a warp per row, block any multiple of 32 up to 1024.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

constexpr int LANES = 32;  // not warp.size(), which is unsigned: a loop with signed and unsigned values is not unrolled
typedef cg::thread_block_tile<LANES> Warp;

__device__ long long row_of(const Warp& warp) {
    return (long long)blockIdx.x * warp.meta_group_size() + warp.meta_group_rank();
}

__device__ void normalize(const Warp& warp, const float* __restrict__ x_row, const float* __restrict__ gamma,
                          const float* __restrict__ beta, float* __restrict__ out_row, float m, float r, int C) {
#pragma unroll 4
    for (int c = warp.thread_rank(); c < C; c += LANES) {
        __stcs(out_row + c, (__ldcs(x_row + c) - m) * r * gamma[c] + beta[c]);
    }
}

// launch: grid=ceil(N / (block / 32)) block=512
extern "C" __global__ void layernorm_forward_kernel3(
    const float* __restrict__ x,      // (N, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    float* __restrict__ out,          // (N, C)
    float* __restrict__ mean,         // (N)
    float* __restrict__ rstd,         // (N)
    float eps, int N, int C) {
    const Warp warp = cg::tiled_partition<LANES>(cg::this_thread_block());
    const long long row = row_of(warp);
    if (row >= N) return;  // all lanes of a warp have the same row
    const float* x_row = x + row * C;

    float sum = 0.0f;
#pragma unroll 8  // 8 loads in flight
    for (int c = warp.thread_rank(); c < C; c += LANES) sum += x_row[c];
    const float m = cg::reduce(warp, sum, cg::plus<float>()) / C;

    float square = 0.0f;
#pragma unroll 8
    for (int c = warp.thread_rank(); c < C; c += LANES) square += (x_row[c] - m) * (x_row[c] - m);
    const float r = rsqrtf(cg::reduce(warp, square, cg::plus<float>()) / C + eps);

    if (warp.thread_rank() == 0) {
        __stcs(mean + row, m);
        __stcs(rstd + row, r);
    }
    normalize(warp, x_row, gamma, beta, out + row * C, m, r, C);
}

// launch: grid=ceil(N / (block / 32)) block=512
extern "C" __global__ void layernorm_forward_kernel4(
    const float* __restrict__ x,      // (N, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    float* __restrict__ out,          // (N, C)
    float* __restrict__ mean,         // (N)
    float* __restrict__ rstd,         // (N)
    float eps, int N, int C) {
    const Warp warp = cg::tiled_partition<LANES>(cg::this_thread_block());
    const long long row = row_of(warp);
    if (row >= N) return;  // all lanes of a warp have the same row
    const float* x_row = x + row * C;

    float sum = 0.0f, square = 0.0f;
#pragma unroll 8
    for (int c = warp.thread_rank(); c < C; c += LANES) {
        const float v = x_row[c];
        sum += v;
        square += v * v;
    }
    const float m = cg::reduce(warp, sum, cg::plus<float>()) / C;
    // Round m * m like the squares of x. A fused multiply-add would keep m * m exact, and the variance of a constant
    // row would not be 0.
    float var = cg::reduce(warp, square, cg::plus<float>()) / C - __fmul_rn(m, m);
    if (var < 0.0f) var = 0.0f;  // rounding can make var negative; fmaxf would hide a NaN
    const float r = rsqrtf(var + eps);

    if (warp.thread_rank() == 0) {
        __stcs(mean + row, m);
        __stcs(rstd + row, r);
    }
    normalize(warp, x_row, gamma, beta, out + row * C, m, r, C);
}
