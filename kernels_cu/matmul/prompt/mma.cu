// GEMM for sm_75 and newer:
//
//   out = [residual +] [gelu](a w^T w_scale + bias)     a (M, K), w (N, K), out and residual (M, N), w_scale, bias (N)
//
//   gemm_mma: tiles on tensor cores (mma.sync), one ring buffer of slices for all tiles of a block
// With GEMM_GATED 1, there is a second matrix up (N, K), and out = silu(a w^T) (a up^T), or with GEMM_GELU 1
// gelu(a w^T) (a up^T). A tile has half of its columns from each matrix.
//
// a and w are __half or __nv_bfloat16, sums are float, out and residual have the type of a or are float. w_scale is
// used with GEMM_SCALED 1. lib/matmul/mma.cuh has the tiles and the loop over K. Outputs are stored directly from
// registers to memory: a lane stores 16 contiguous bytes of a row, four lanes 64 bytes. The stores need neither shared
// memory nor a barrier, so a warp continues with the next tile as soon as it has issued its stores.
//
// Measured: docs/performance.md#gemm
//
// Any M; N and K are multiples of 8; all arrays are aligned to 16 bytes. residual may be out: a thread reads an element
// before it writes it.
//
// Block (THREADS). Grid: as many blocks as fit on the GPU at once, but at most one per tile. Dynamic shared memory:
// GEMM_STAGES * STAGE bytes.
#if !defined(STORAGE_FP16) && !defined(STORAGE_BF16)
#define STORAGE_FP16
#endif
#include "lib/storage.cuh"
#include "lib/fresh.cuh"
#include "lib/fast.cuh"
#include "lib/overlap.cuh"
#include "lib/sm80.cuh"
#include "lib/matmul/mma.cuh"

#ifndef GEMM_SCALED
#define GEMM_SCALED 0
#endif

struct Total {
    Sums sums;

    __device__ __forceinline__ void add(const Fragments& of, const Fragments&) { multiply(sums, of.a, of.w); }
    __device__ __forceinline__ void slice(int) {}
};

// Loads a lane's columns of w_scale or bias.
template <int WIDTH>
__device__ __forceinline__ void load_columns(const float* from, float (&v)[WIDTH]) {
    constexpr int LOAD = WIDTH < 4 ? WIDTH : 4;
#pragma unroll
    for (int e = 0; e < WIDTH; e += LOAD) {
        float some[LOAD];
        Vec<float, LOAD>::load(from + e).unpack(some);
#pragma unroll
        for (int i = 0; i < LOAD; ++i) v[e + i] = some[i];
    }
}

struct Columns {
    const float *w_scale, *bias;
};

// Stores the outputs of 8-column fragments `first` .. `last` - 1 in groups of SIZE fragments: per row and group, a lane
// stores 2 * SIZE contiguous columns.
template <int SIZE, typename Out>
__device__ __forceinline__ void store_groups(const Sums& sums, int first, int last, const Tile& tile, const Warp& warp,
                                             const Columns& of, const Out* residual, Out* out, const Sizes& sizes) {
    constexpr int WIDTH = 2 * SIZE;
#pragma unroll
    for (int f = first; f < last; f += SIZE) {
        const int column = tile.column + warp.column / MATRICES + 8 * f + WIDTH * warp.t;
        if (column >= sizes.N) continue;
        const int row = tile.row + warp.row + warp.g, rows = sizes.M - row;
        const long long at = (long long)row * sizes.N + column;
        float b[WIDTH] = {}, scale[WIDTH];
        if (of.bias) load_columns(of.bias + column, b);
        if (GEMM_SCALED) load_columns(of.w_scale + column, scale);
#pragma unroll
        for (int m = 0; m < FRAGS_M; ++m) {
            Vec<Out, WIDTH> old[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int below = 16 * m + 8 * i;
                if (GEMM_RESIDUAL && below < rows) {
                    old[i] = load_fresh<Out, WIDTH>(residual + at + (long long)below * sizes.N);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int below = 16 * m + 8 * i;
                if (below >= rows) continue;
                float v[WIDTH], r[WIDTH];
                if (GEMM_RESIDUAL) old[i].unpack(r);
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    const float product = sums[m][f + e / 2][2 * i + e % 2];
                    const float sum = (GEMM_SCALED ? product * scale[e] : product) + b[e];
                    v[e] = GEMM_GELU ? gelu_fast(sum) : GEMM_GATED ? silu_fast(sum) : sum;
                    if (GEMM_GATED) v[e] *= sums[m][FRAGS_N / 2 + f + e / 2][2 * i + e % 2];
                    if (GEMM_RESIDUAL) v[e] += r[e];
                }
                Vec<Out, WIDTH>::store(out + at + (long long)below * sizes.N, v);
            }
        }
    }
}

template <typename Out>
__device__ __forceinline__ void gemm(const T* a, const T* w, const T* up, const Columns& of, const Out* residual,
                                     Out* out, const Sizes& sizes) {
    extern __shared__ __align__(128) char shared[];
    let_next_start();
    multiply_tiles<Total>(a, w, up, sizes, shared, [&](const Tile& tile, const Warp& warp, const Total& total) {
        store_groups<GROUP>(total.sums, 0, WHOLE / MATRICES, tile, warp, of, residual, out, sizes);
        store_groups<2>(total.sums, WHOLE, EVEN, tile, warp, of, residual, out, sizes);
        store_groups<1>(total.sums, EVEN, FRAGS_N, tile, warp, of, residual, out, sizes);
    });
}

// Launched by operation (variant): gemm (mma)
extern "C" __global__ void __launch_bounds__(THREADS, GEMM_BLOCKS) gemm_mma(
    const T* a,                         // (M, K)
    const T* __restrict__ w,            // (N, K)
    const float* __restrict__ w_scale,  // (N), with GEMM_SCALED 1
    const float* __restrict__ bias,     // (N) or null
    const T* residual,                  // (M, N), with GEMM_RESIDUAL 1; up, with GEMM_GATED 1
    T* out,                             // (M, N)
    const float* residual_float,        // (M, N); replaces residual with GEMM_FLOAT_OUT 1
    float* out_float,                   // (M, N); replaces out with GEMM_FLOAT_OUT 1
    int M, int N, int K) {
#if GEMM_FLOAT_OUT
    gemm(a, w, nullptr, {w_scale, bias}, residual_float, out_float, Sizes{M, N, K});
#else
    gemm(a, w, residual, {w_scale, bias}, residual, out, Sizes{M, N, K});
#endif
}
