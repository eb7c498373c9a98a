// Squared norms of the rows of FP8 weights, which bound the activations of prompts.
//
//   w (N, K) of type W, E5M2 or E4M3; gamma (K) -> squares[n] = sum over k of (w[n][k] gamma[k])^2, without scales
//
//   row_norms: squares of the norms of an FP8 matrix's rows, which bound its products
//
// grid (N), block (NORMS_BLOCK)
#if !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define WEIGHT_E5M2
#endif
#include "lib/common.cuh"
#include "lib/storage.cuh"

#ifndef NORMS_BLOCK
#define NORMS_BLOCK 256
#endif
#ifndef NORMS_WIDTH  // weights per load: a power of two, at most 16, that divides K
#define NORMS_WIDTH 4
#endif

// Launched by operation (variant): row_norms (row_norms)
extern "C" __global__ void __launch_bounds__(NORMS_BLOCK) row_norms(
    const W* __restrict__ w,          // (N, K)
    const float* __restrict__ gamma,  // (K)
    float* __restrict__ squares,      // (N)
    int K) {
    __shared__ float scratch[NORMS_BLOCK];
    const W* row = w + (long long)blockIdx.x * K;
    float sum = 0.0f;
    for (int k = threadIdx.x * NORMS_WIDTH; k < K; k += NORMS_BLOCK * NORMS_WIDTH) {
        float v[NORMS_WIDTH];
        Vec<W, NORMS_WIDTH>::load(row + k).unpack(v);
#pragma unroll
        for (int i = 0; i < NORMS_WIDTH; ++i) {
            const float product = v[i] * gamma[k + i];
            sum += product * product;
        }
    }
    sum = block_reduce_sum<NORMS_BLOCK>(sum, scratch);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}
