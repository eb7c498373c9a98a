// GEMM of hi/lo matrices on tensor cores, for sm_75 and newer:
//
//   out = [residual +] [gelu](a w^T + bias)     a (M, K), w (N, K), out and residual (M, N), bias (N)
//
//   gemm_split_mma: float32 accuracy: three products of float16 parts, sums added to floats every 128 values of K
//
// A value of a or w is (hi + lo / 2048) scale with 22 bits. Each row has one scale, a power of two (lib/hi_lo.cuh).
// The product lo lo is omitted:
//
//   out[m, n] = (sum hi hi + sum (hi lo + lo hi) / 2048) scale_a[m] scale_w[n]
//
// A tensor core truncates its sums instead of rounding them. Therefore the sum of hi hi is promoted every 128 values of
// K: it is added to a separate float, with rounding, and starts again from 0. The sum of hi lo + lo hi, which is
// divided by 2048, has a separate accumulator.
//
// Infinity and NaN in a or w give the same output as in float. One exception: infinity times a number whose high part
// is 0 (below 2^-39 of the largest in its row) gives NaN.
//
// out is float, or with GEMM_SPLIT_OUT 1 hi/lo with one scale for all rows. The caller guarantees that this scale is
// large enough: values that are more than twice too large for the scale become infinite.
//
// lib/matmul/mma.cuh has the tiles and the loop over K. Any M; N and K are multiples of 8; all arrays are aligned to 16
// bytes. residual may be out. Block, grid and shared memory are as in matmul/prompt/mma.cu.
#define STORAGE_FP16 1
#define GEMM_PARTS 2
#undef GEMM_FLOAT_OUT
#define GEMM_FLOAT_OUT 1
#ifndef GEMM_N
#define GEMM_N 96
#endif
#ifndef GEMM_WARPS_M
#define GEMM_WARPS_M 4
#endif
#include "lib/storage.cuh"
#include "lib/fresh.cuh"
#include "lib/fast.cuh"
#include "lib/overlap.cuh"
#include "lib/hi_lo.cuh"
#include "lib/sm80.cuh"
#include "lib/matmul/mma.cuh"

#ifndef GEMM_SPLIT_OUT
#define GEMM_SPLIT_OUT 0
#endif

constexpr int PROMOTED = HAS_BF16 ? 128 : 64;  // values along K after which the sums of hi hi are added to `sums`
static_assert(PROMOTED % GEMM_SLICE == 0, "sums are promoted between slices");

struct Total {
    Sums high, sums, cross;  // high: sums of hi hi that are not yet added to `sums`

    __device__ __forceinline__ void add(const Fragments& hi, const Fragments& lo) {
        multiply(high, hi.a, hi.w);
        multiply(cross, hi.a, lo.w);
        multiply(cross, lo.a, hi.w);
    }

    __device__ __forceinline__ void slice(int k) {
        if (k % PROMOTED) return;
#pragma unroll
        for (int m = 0; m < FRAGS_M; ++m) {
#pragma unroll
            for (int n = 0; n < FRAGS_N; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][n][i] += high[m][n][i], high[m][n][i] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ float get(int m, int n, int i) const {
        return sum_of(sums[m][n][i] + high[m][n][i], cross[m][n][i]);
    }
};

struct Output {
    const float *w_scale, *bias, *residual;
    float* out;
    T* parts;
    float per_scale;  // 1 / scale of out_parts
    Sizes sizes;
};

// Stores 8-column fragments `first` .. `last` - 1 in groups of SIZE: a lane stores 2 * SIZE contiguous columns per row.
template <int SIZE>
__device__ __forceinline__ void store_groups(const Total& total, int first, int last, const Tile& tile,
                                             const Warp& warp, const float (&a_scale)[FRAGS_M * 2], const Output& to) {
    constexpr int WIDTH = 2 * SIZE;
#pragma unroll
    for (int f = first; f < last; f += SIZE) {
        const int column = tile.column + warp.column + 8 * f + WIDTH * warp.t;
        if (column >= to.sizes.N) continue;
        const int row = tile.row + warp.row + warp.g, rows = to.sizes.M - row;
        float scale[WIDTH], b[WIDTH] = {};
        Vec<float, WIDTH>::load(to.w_scale + column).unpack(scale);
        if (to.bias) Vec<float, WIDTH>::load(to.bias + column).unpack(b);
#pragma unroll
        for (int i = 0; i < FRAGS_M * 2; ++i) {
            if (8 * i >= rows) continue;
            const long long at = (long long)(row + 8 * i) * to.sizes.N + column;
            float v[WIDTH], r[WIDTH];
            if (GEMM_RESIDUAL) load_fresh<float, WIDTH>(to.residual + at).unpack(r);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                const float product = total.get(i / 2, f + e / 2, i % 2 * 2 + e % 2);
                const float sum = scaled(product, a_scale[i], scale[e]) + b[e];
                v[e] = GEMM_GELU ? gelu_fast(sum) : sum;
                if (GEMM_RESIDUAL) v[e] += r[e];
            }
            if constexpr (GEMM_SPLIT_OUT) {
                float low[WIDTH];
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) v[e] *= to.per_scale;
                low_parts(v, low);
                Vec<T, WIDTH>::store(to.parts + at, v);
                Vec<T, WIDTH>::store(to.parts + (long long)to.sizes.M * to.sizes.N + at, low);
            } else {
                Vec<float, WIDTH>::store(to.out + at, v);
            }
        }
    }
}

// Launched by operation (variant): gemm (split)
extern "C" __global__ void __launch_bounds__(THREADS, GEMM_BLOCKS) gemm_split_mma(
    const T* a,                         // (2, M, K): hi, lo
    const float* a_scale,               // (M)
    const T* __restrict__ w,            // (2, N, K)
    const float* __restrict__ w_scale,  // (N)
    const float* __restrict__ bias,     // (N) or null
    const float* residual,              // (M, N), with GEMM_RESIDUAL 1
    float* out,                         // (M, N)
    T* out_parts,                       // (2, M, N), used instead of out with GEMM_SPLIT_OUT 1
    float per_scale,                    // 1 / scale of the rows of out_parts
    int M, int N, int K) {
    extern __shared__ __align__(128) char shared[];
    let_next_start();
    const Output to = {w_scale, bias, residual, out, out_parts, per_scale, {M, N, K}};
    multiply_tiles<Total>(a, w, nullptr, to.sizes, shared, [&](const Tile& tile, const Warp& warp, const Total& total) {
        float scales[FRAGS_M * 2];
#pragma unroll
        for (int i = 0; i < FRAGS_M * 2; ++i) {
            const int row = tile.row + warp.row + warp.g + 8 * i;
            scales[i] = row < M ? __ldcg(a_scale + row) : 0.0f;
        }
        store_groups<2>(total, 0, EVEN, tile, warp, scales, to);
        store_groups<1>(total, EVEN, FRAGS_N, tile, warp, scales, to);
    });
}
