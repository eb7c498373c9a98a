// Chapter 10, exercise 2: RMSNorm, a product and RoPE in one kernel; the norm's factor is in the epilogue
//
// A lane computes two neighbouring columns, and the 8 warps of a block divide K. One loop over K sums
// up x^2 and the products of x gamma with w. The factor 1 / sqrt(mean(x^2) + eps) is the same for the
// whole row, and multiplies the complete sums.
//   gpt2block kernels rmsnorm_matmul --mine my.cu
//   gpt2block kernels rmsnorm_matmul --mine my.cu --dtype float32
//
// launch: grid=ceil(N / 64), M block=256
#include "lib/storage.cuh"

#define WARPS 8

extern "C" __global__ void my_rmsnorm_matmul(
    const T* x,      // (M, K)
    const T* gamma,  // (K)
    const T* w,      // (K, N)
    T* out,          // (M, N)
    float eps, int N, int K, int head_dim, float theta) {
    __shared__ float part[3][WARPS][32];
    const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = 2 * (blockIdx.x * 32 + lane);
    const T* x_row = x + (long long)row * K;

    float squares = 0.0f, r = 0.0f, i = 0.0f;
    for (int k = warp; k < K; k += WARPS) {
        const float v = widen(x_row[k]), scaled = v * widen(gamma[k]);
        squares += v * v;
        if (first < N) {  // N is even, as head_dim is even
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
