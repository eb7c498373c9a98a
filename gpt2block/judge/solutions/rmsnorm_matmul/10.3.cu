// Chapter 10, exercise 3: the kernel of exercise 2, for launches that overlap
//
// gamma and the first weights of each thread are requested before the wait: no kernel of the pass writes
// them, which __restrict__ states. x comes from the previous kernel, and is loaded after the wait.
//   gpt2block kernels rmsnorm_matmul --mine my.cu
//
// launch: grid=ceil(N / 64), M block=256
#include "lib/overlap.cuh"
#include "lib/storage.cuh"

#define WARPS 8
#define EARLY 4  // values of k per warp whose weights are loaded before the wait

extern "C" __global__ void my_rmsnorm_matmul(
    const T* x,                   // (M, K)
    const T* __restrict__ gamma,  // (K)
    const T* __restrict__ w,      // (K, N)
    T* out,                       // (M, N)
    float eps, int N, int K, int head_dim, float theta) {
    __shared__ float part[3][WARPS][32];
    const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = 2 * (blockIdx.x * 32 + lane);
    const T* x_row = x + (long long)row * K;

    float gammas[EARLY] = {}, weights[EARLY][2] = {};
#pragma unroll
    for (int e = 0; e < EARLY; ++e) {
        const int k = warp + e * WARPS;
        if (k < K) gammas[e] = widen(gamma[k]);
        if (k < K && first < N) {
            weights[e][0] = widen(w[(long long)k * N + first]);
            weights[e][1] = widen(w[(long long)k * N + first + 1]);
        }
    }
    let_next_start();
    wait_for_previous();

    float squares = 0.0f, r = 0.0f, i = 0.0f;
#pragma unroll
    for (int e = 0; e < EARLY; ++e) {
        const int k = warp + e * WARPS;
        const float v = k < K ? widen(x_row[k]) : 0.0f, scaled = v * gammas[e];
        squares += v * v;
        r += scaled * weights[e][0];
        i += scaled * weights[e][1];
    }
    for (int k = warp + EARLY * WARPS; k < K; k += WARPS) {
        const float v = widen(x_row[k]), scaled = v * widen(gamma[k]);
        squares += v * v;
        if (first < N) {
            r += scaled * widen(w[(long long)k * N + first]);
            i += scaled * widen(w[(long long)k * N + first + 1]);
        }
    }
    part[0][warp][lane] = squares;
    part[1][warp][lane] = r;
    part[2][warp][lane] = i;
    __syncthreads();

    if (warp > 0 || first >= N) return;
    for (int p = 1; p < WARPS; ++p) {
        squares += part[0][p][lane];
        r += part[1][p][lane];
        i += part[2][p][lane];
    }
    const float factor = rsqrtf(squares / K + eps);
    const float angle = row / powf(theta, (float)(first % head_dim) / head_dim);
    T* to = out + (long long)row * N + first;
    to[0] = narrow(factor * (r * cosf(angle) - i * sinf(angle)));
    to[1] = narrow(factor * (r * sinf(angle) + i * cosf(angle)));
}
