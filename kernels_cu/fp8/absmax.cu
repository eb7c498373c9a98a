// The largest magnitude per output channel of a weight matrix: absmax[n] = max over k of |w[k][n]| for w (K, N), or of
// |w[n][k]| for w (N, K).
//
//   absmax_kn_kernel, absmax_nk_kernel: the largest magnitude of each output channel, for scales; finds infinity and
//       NaN. absmax_kn_kernel reads columns of (K, N), absmax_nk_kernel rows of (N, K)
//
// For loads of FP8_WIDTH elements, w and each of its rows must be aligned to a vector.
//
// absmax_kn_kernel: grid (ceil(N / (FP8_LANES * FP8_WIDTH))), absmax_nk_kernel: grid (N); block (FP8_BLOCK).
#include "lib/common.cuh"
#include "lib/storage.cuh"

#ifndef FP8_WIDTH  // elements per load: a power of two, at most 16 bytes
#define FP8_WIDTH 4
#endif
#ifndef FP8_BLOCK  // threads per block
#define FP8_BLOCK 512
#endif
#ifndef FP8_LANES  // neighbouring threads of absmax_kn_kernel that share a row
#define FP8_LANES 4
#endif

constexpr unsigned EXPONENT = 0x7f800000;  // mask of a float's exponent

// Updates most[] with the magnitudes of a vector. Magnitudes are compared as integers, so that NaN and infinity are the
// largest.
__device__ __forceinline__ void take_larger(int (&most)[FP8_WIDTH], const T* from) {
    float v[FP8_WIDTH];
    Vec<T, FP8_WIDTH>::load_once(from).unpack(v);
#pragma unroll
    for (int k = 0; k < FP8_WIDTH; ++k) most[k] = max(most[k], __float_as_int(v[k]) & 0x7fffffff);
}

// Returns the magnitude as a float, infinity for NaN, so that a maximum of floats reports infinity and NaN.
__device__ __forceinline__ float finished(int most) { return __int_as_float(min(most, (int)EXPONENT)); }

// Launched by operation (variant): to_fp8 (absmax)
extern "C" __global__ void __launch_bounds__(FP8_BLOCK) absmax_kn_kernel(
    const T* __restrict__ w,     // (K, N)
    float* __restrict__ absmax,  // (N), infinity if a channel contains infinity or NaN
    int K, int N) {
    constexpr int COLUMNS = FP8_LANES * FP8_WIDTH, GROUPS = FP8_BLOCK / FP8_LANES;
    __shared__ float scratch[GROUPS][COLUMNS];
    const int lane = threadIdx.x % FP8_LANES, group = threadIdx.x / FP8_LANES;
    const long long n = (long long)blockIdx.x * COLUMNS + lane * FP8_WIDTH;
    int most[FP8_WIDTH] = {};
    if (n < N) {
        const T* column = w + n;
#pragma unroll 4
        for (int k = group; k < K; k += GROUPS) take_larger(most, column + (long long)k * N);
    }
#pragma unroll
    for (int j = 0; j < FP8_WIDTH; ++j) scratch[group][lane * FP8_WIDTH + j] = finished(most[j]);
    __syncthreads();

    const int column = threadIdx.x;
    if (column >= COLUMNS || (long long)blockIdx.x * COLUMNS + column >= N) return;
    float largest = 0.0f;
    for (int g = 0; g < GROUPS; ++g) largest = fmaxf(largest, scratch[g][column]);
    absmax[blockIdx.x * COLUMNS + column] = largest;
}

// Launched by operation (variant): to_fp8 (absmax)
extern "C" __global__ void __launch_bounds__(FP8_BLOCK) absmax_nk_kernel(
    const T* __restrict__ w,     // (N, K)
    float* __restrict__ absmax,  // (N), infinity if a channel contains infinity or NaN
    int K) {
    __shared__ float scratch[FP8_BLOCK];
    const T* row = w + (long long)blockIdx.x * K;
    int most[FP8_WIDTH] = {};
#pragma unroll 4
    for (long long k = threadIdx.x * FP8_WIDTH; k < K; k += FP8_BLOCK * FP8_WIDTH) take_larger(most, row + k);
    int all = 0;
#pragma unroll
    for (int j = 0; j < FP8_WIDTH; ++j) all = max(all, most[j]);
    const float largest = block_reduce_max<FP8_BLOCK>(finished(all), scratch);
    if (threadIdx.x == 0) absmax[blockIdx.x] = largest;
}
