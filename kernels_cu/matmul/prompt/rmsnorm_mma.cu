// RMSNorm and the products that follow it, for sm_75 and newer:
//
//   rms[m] = 1 / sqrt(mean over k of x[m, k]^2 + eps)
//
//   rmsnorm_matmul_mma   out = rms (x gamma) w, then RoPE on heads of head_dim columns        w (K, N) or (N, K)
//   rmsnorm_ffn_mma      h = x + residual; n = rms(h) (h gamma); out = silu(n w1) (n w3)      w1, w3 like w
//
//   rmsnorm_matmul_mma, rmsnorm_ffn_mma: many rows: tiles on tensor cores (mma.sync), the norm in the same loop over K
//   rmsnorm_matmul_mma (unfused): rmsnorm in a separate kernel, then the product, then RoPE: x is normalised once
//   rmsnorm_ffn_mma (unfused): rmsnorm in a separate kernel, then the products: x is normalised once
//
// The operations are taken from kernl's Llama kernels. The row's factor rms is applied at the end: x gamma, rounded to
// T, is multiplied by w while the squares of x are added. The float sums are then multiplied by rms. Both weight
// matrices of the feed-forward share one loop: each has half of a tile's columns. matmul/prompt/rmsnorm_mma_tile.cuh
// has the loop and describes the constants.
//
// Any M. K, x_stride and N must be multiples of 8. With FP8 weights, N (for w as (K, N)) or K (for w as (N, K)) must be
// a multiple of 16. All arrays are aligned to 16 bytes. No output may overlap an input. Row m has position start + m %
// seq_len.
//
// Block (THREADS), grid ceil(M / MMA_ROWS) * ceil(N / columns), where columns is MMA_COLUMNS, or MMA_COLUMNS / 2 with
// two weight matrices. Dynamic shared memory: MMA_STAGES * STAGE bytes, or the bytes of the sums if these are larger.
#if !defined(STORAGE_FP16) && !defined(STORAGE_BF16)
#define STORAGE_FP16
#endif
#include "lib/common.cuh"
#include "lib/gate.cuh"
#include "lib/rotation.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "matmul/prompt/rmsnorm_mma_tile.cuh"

// Loads the weight scales of 8 columns. For columns after the last one, which are never stored, the scale is 1.
__device__ __forceinline__ void load_scales(float (&scales)[8], const float* scale, int n, int N) {
#pragma unroll
    for (int e = 0; e < 8; ++e) scales[e] = scale && n + e < N ? scale[n + e] : 1.0f;
}

// Launched by operation (variant): rmsnorm_matmul (mma), rmsnorm_matmul (unfused)
extern "C" __global__ void __launch_bounds__(THREADS, MMA_BLOCKS) rmsnorm_matmul_mma(
    const T* __restrict__ x,          // (M, K), rows x_stride apart
    const T* __restrict__ gamma,      // (K); not read with MMA_NORM 0
    const W* __restrict__ w,          // (K, N), or (N, K) with MMA_W_NK 1
    const float* __restrict__ scale,  // (N) or null
    T* __restrict__ out,              // (M, N)
    float eps, long long x_stride, int M, int N, int K, int seq_len,
    int head_dim,  // even; 0: no RoPE
    int start, float step, float step_low) {  // exponent of theta: lib/rotation.cuh
    extern __shared__ __align__(16) char shared[];
    const Tile tile = choose_tile(M, N, MMA_COLUMNS);
    const Inputs in = {x, nullptr, nullptr, gamma, w, nullptr, x_stride, M, N, K};
    float scales[8];
    Pair turns[4];
    compute_tile<1>(
        in, tile, shared, eps,
        [&](int column) {
            const int n = tile.column + column;
            load_scales(scales, scale, n, N);
            if (head_dim) {
#pragma unroll
                for (int e = 0; e < 4; ++e) turns[e] = frequency((n + 2 * e) % head_dim / 2, step, step_low);
            }
        },
        [&](int row, int column, float (&v)[1][8], float factor) {
            const int m = tile.row + row, n = tile.column + column;
            if (n >= N) return;
#pragma unroll
            for (int e = 0; e < 8; ++e) v[0][e] *= factor * scales[e];
            if (head_dim) {
                const Pair position = half_turns(start + m % seq_len);
#pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    const Rotation turn = rotation(position, turns[e / 2]);
                    const float r = v[0][e], i = v[0][e + 1];
                    v[0][e] = r * turn.cos - i * turn.sin;
                    v[0][e + 1] = r * turn.sin + i * turn.cos;
                }
            }
            Vec<T, 8>::store(out + (long long)m * N + n, v[0]);
        });
}

// Launched by operation (variant): rmsnorm_ffn (mma), rmsnorm_ffn (unfused)
extern "C" __global__ void __launch_bounds__(THREADS, MMA_BLOCKS) rmsnorm_ffn_mma(
    const T* __restrict__ x,           // (M, K), rows x_stride apart
    const T* __restrict__ residual,    // (M, K); not read with MMA_RESIDUAL 0
    T* __restrict__ sum,               // (M, K): x + residual, or null
    const T* __restrict__ gamma,       // (K)
    const W* __restrict__ w1,          // (K, N), or (N, K) with MMA_W_NK 1
    const float* __restrict__ scale1,  // (N) or null
    const W* __restrict__ w3,          // same shape as w1
    const float* __restrict__ scale3,  // (N) or null
    T* __restrict__ out,               // (M, N)
    float eps, long long x_stride, int M, int N, int K) {
    extern __shared__ __align__(16) char shared[];
    const Tile tile = choose_tile(M, N, MMA_COLUMNS / 2);
    const Inputs in = {x, residual, sum, gamma, w1, w3, x_stride, M, N, K};
    float scales1[8], scales3[8];
    compute_tile<2>(
        in, tile, shared, eps,
        [&](int column) {
            load_scales(scales1, scale1, tile.column + column, N);
            load_scales(scales3, scale3, tile.column + column, N);
        },
        [&](int row, int column, float (&v)[2][8], float factor) {
            const int m = tile.row + row, n = tile.column + column;
            if (n >= N) return;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float a = v[0][e] * (factor * scales1[e]), b = v[1][e] * (factor * scales3[e]);
                v[0][e] = gate_of(a) * b;
            }
            Vec<T, 8>::store(out + (long long)m * N + n, v[0]);
        });
}
