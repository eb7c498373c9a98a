// LayerNorm: y = (x - mean) * rsqrt(var + eps) * gamma + beta over each row of C channels.
//
// A step of LeetGPU's GPT-2 block challenge. The variance is computed around the mean, in a second pass. The formula
// E[x^2] - E[x]^2 would lose all digits when the mean is large.
//
//   layernorm768_kernel, layernorm_kernel: one block per row; mean and rstd are not stored. A step of the ten-step plan
//       of a GPT-2 block (docs/block.md). layernorm768_kernel is for C = 768: a thread keeps its 3 channels in
//       registers, so x is read once. layernorm_kernel is for any C: a thread strides over the row; from the second
//       pass on, the L1 cache serves x
//
// Both kernels: grid (rows), block (256). rows = B * T.
#include "lib/common.cuh"

#ifndef LN_EPS
#define LN_EPS 1e-5f
#endif

constexpr int LN_BLOCK = 256;

extern "C" __global__ void layernorm768_kernel(
    const float* __restrict__ in,     // (seq_len, 768)
    float* __restrict__ out,          // (seq_len, 768)
    const float* __restrict__ gamma,  // (768)
    const float* __restrict__ beta,   // (768)
    int seq_len) {
    constexpr int C = 768;
    constexpr int PER_THREAD = C / LN_BLOCK;
    __shared__ float scratch[LN_BLOCK];
    const int row = blockIdx.x;
    if (row >= seq_len) return;
    const float* x = in + (long long)row * C;
    float* y = out + (long long)row * C;

    float v[PER_THREAD];
    float sum = 0.0f;
    for (int i = 0; i < PER_THREAD; ++i) {
        v[i] = x[threadIdx.x + i * LN_BLOCK];
        sum += v[i];
    }
    const float mean = block_reduce_sum<LN_BLOCK>(sum, scratch) / C;

    float squares = 0.0f;
    for (int i = 0; i < PER_THREAD; ++i) squares += (v[i] - mean) * (v[i] - mean);
    const float rstd = rsqrtf(block_reduce_sum<LN_BLOCK>(squares, scratch) / C + LN_EPS);

    for (int i = 0; i < PER_THREAD; ++i) {
        const int c = threadIdx.x + i * LN_BLOCK;
        y[c] = (v[i] - mean) * rstd * gamma[c] + beta[c];
    }
}

extern "C" __global__ void layernorm_kernel(
    const float* __restrict__ in,     // (seq_len, C)
    float* __restrict__ out,          // (seq_len, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    int seq_len, int C) {
    __shared__ float scratch[LN_BLOCK];
    const int row = blockIdx.x;
    if (row >= seq_len) return;
    const float* x = in + (long long)row * C;
    float* y = out + (long long)row * C;

    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += LN_BLOCK) sum += x[c];
    const float mean = block_reduce_sum<LN_BLOCK>(sum, scratch) / C;

    float squares = 0.0f;
    for (int c = threadIdx.x; c < C; c += LN_BLOCK) squares += (x[c] - mean) * (x[c] - mean);
    const float rstd = rsqrtf(block_reduce_sum<LN_BLOCK>(squares, scratch) / C + LN_EPS);

    for (int c = threadIdx.x; c < C; c += LN_BLOCK) {
        y[c] = (x[c] - mean) * rstd * gamma[c] + beta[c];
    }
}
